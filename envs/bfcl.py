"""BFCL v3, multi-turn: a user asks several things in turn, and the agent calls Python-like functions.

Data, function documents and the eight back-end classes (a file system, a car, a broker, ...) are those of the package
`bfcl-eval`. Flow: user message -> the model's calls -> their results -> more calls -> ... -> an output without a call
ends the user turn, and the next user message comes. 800 tasks: categories base, miss_func (a function stays hidden until
a later turn), miss_param (a parameter comes a turn later) and long_context (bulky results), 200 each; the same index is
the same underlying task in all four.

Reward: 1.0 at the end iff every user turn with ground truth passed both official checks, else 0.0.
  state     every public attribute of every instance equals that of a run of the ground truth
  response  each ground-truth result of this turn is among the model's results so far (multiset, any order)
Turns with empty ground truth (the right act is to ask, not to call) are not scored by the benchmark; info counts them:
`abstain_turns` seen so far, and `abstained`, those of them that ended with no call executed. Three of the 203 in each
miss_* category (indices 167 and 180, last turns) are gaps in the data; base and long_context have them too.

The model's text is parsed, never executed (envs/toolcalls.py): literal arguments, the method looked up by name.
Differences from the official harness (bfcl-eval 2026.3.23):
 1. A malformed call (text that starts like one but does not parse) is an invalid action: it says why, counts as one of
    the 20 steps, and the turn goes on. Officially, what does not parse ends the turn, as prose does here.
 2. Arguments must be literals or bare names, which are strings. Officially arithmetic is evaluated, too, and a nested call
    runs. Text over 10,000 characters after thinking is invalid, and so is thinking that did not end.
 3. Positional arguments count, as in the ground truth. Officially the ground truth's count, the model's are lost.
 4. Only the task's functions are callable. Officially, the model's text also reaches Python's built-ins.
 5. Each episode has its own instances. Officially they live in a module's globals under the model's name, and
    long_context's extra credit cards and bookings are the same objects in all of them.
 6. An exponent, precision or number of decimal places beyond 1,000 is refused: one such call can hang a worker.
 7. The prompt's words are ours, and results come as `function -> result` lines. In the native format each is a message
    of role "tool", as officially, and so is the reason why a call is invalid; the functions added by miss_func are
    written into the user's message: `tools` stays, so the prompt only ever grows.
As officially, a hidden function is undocumented, not blocked: a call of it runs.

Hints follow FEE (arXiv 2609.08404). Guidance is the first ground-truth call of a user turn; ours in addition is
`guidance="next"`: the first call not yet made, at any step. Enrichment explains what the last calls did.
"""
import contextlib
import copy
import functools
import hashlib
import importlib
import inspect
import json
from collections import Counter
from pathlib import Path

from envs import BadInput, Env, refuse_unknown
from envs.action import UNFINISHED, after_thinking
from envs.toolcalls import Call, InvalidAction, parse_calls, parse_tool_calls, write_tool_call

CATEGORIES = ("base", "miss_func", "miss_param", "long_context")      # 200 tasks each
MAX_STEPS = 20          # model outputs in one user turn; one more fails the episode
MAX_CHARS = 10_000      # of one output, thinking not counted; the longest ground-truth turn has 6,908
MAX_LISTED = 40         # names in an enriched directory listing: long_context fills directories with hundreds
COSTLY = {"power": "exponent", "logarithm": "precision", "square_root": "precision", "round_number": "decimal_places"}
JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "list": "array", "any": "string"}

SYSTEM_PROMPT = """You help a user by calling functions. Each message asks for something: call what it takes, \
look at the results, and go on until it is done. Then answer with a sentence and no call, which ends your turn. \
Do the same, saying what is missing, when no function fits or when a required value is not known: never guess."""
CALL_FORMAT = """

To call functions, write one list of calls and nothing else, with literal values only:
[first_function(name="value", count=2), second_function()]

Functions (JSON, one a line):
"""
ADDED_FUNCTIONS = "You can now also use these functions (JSON, one a line):\n{}\nPlease try again."


@functools.cache
def load_data() -> tuple[dict, dict, dict]:
    """The package's tables, read once and never changed: task id -> entry, class name -> function documents,
    class name -> class. Raises BadInput where the package or a file of it is missing."""
    try:
        config = importlib.import_module("bfcl_eval.constants.executable_backend_config")
        data = Path(config.__file__).parents[1] / "data"
        read = lambda path: [json.loads(line) for line in path.read_text(encoding="utf-8").strip().split("\n")]
        entries = {}
        for category in CATEGORIES:
            name = f"BFCL_v4_multi_turn_{category}.json"          # JSON lines; v4 ships v3's multi-turn part
            pairs = zip(read(data / name), read(data / "possible_answer" / name), strict=True)
            for index, (entry, answer) in enumerate(pairs):
                entries[f"{category}/{index}"] = entry | {"ground_truth": answer["ground_truth"]}
        names = sorted({name for entry in entries.values() for name in entry["involved_classes"]})
        documents = {name: read(data / "multi_turn_func_doc" / config.MULTI_TURN_FUNC_DOC_FILE_MAPPING[name]) for name in names}
        classes = {name: getattr(importlib.import_module(config.CLASS_FILE_PATH_MAPPING[name]), name) for name in names}
    except (ImportError, OSError) as error:
        raise BadInput(f"environment 'bfcl' lacks a part ({error}): "
                       "pip install --no-deps -r envs/bfcl-requirements.txt") from error
    return entries, documents, classes


def make_instances(entry: dict, long_context: bool) -> dict:
    """Fresh back ends in the task's order. The outer copy cuts the ties to the package's own tables (5)."""
    classes, instances = load_data()[2], {}
    for name in entry["involved_classes"]:
        instance = classes[name]()
        if hasattr(instance, "_load_scenario"):                   # MathAPI keeps no state
            instance._load_scenario(copy.deepcopy(entry["initial_config"].get(name, {})), long_context=long_context)
        instances[name] = copy.deepcopy(instance)
    return instances


def public_methods(instances: dict) -> dict:
    """Name -> bound method; where two classes share a name, the later class has it."""
    return {name: method for instance in instances.values()
            for name, method in inspect.getmembers(instance, inspect.ismethod) if not name.startswith("_")}


def run_call(call: Call, methods: dict) -> str:
    """The result as the official executor writes it. An unknown name or a failing method is a result too."""
    if call.name not in methods:
        return f"Error during execution: name '{call.name.partition('.')[0]}' is not defined"
    size = bound_arguments(call, methods).get(COSTLY.get(call.name), 0)
    if not (isinstance(size, (int, float)) and abs(size) <= 1000):
        return f"Error during execution: {COSTLY[call.name]} must be a number between -1000 and 1000"
    try:
        result = methods[call.name](*call.args, **call.kwargs)
        with contextlib.suppress(TypeError, ValueError, RecursionError):      # mpmath numbers, for one
            if type(result) is dict:
                return json.dumps(result)
        return str(result)
    except Exception as error:                                    # whatever a wrong argument makes a back end raise
        return f"Error during execution: {error}"


def bound_arguments(call: Call, methods: dict, defaults: bool = False) -> dict:
    """Parameter name -> value; {} if the call does not fit the function's signature."""
    try:
        bound = inspect.signature(methods[call.name]).bind(*call.args, **call.kwargs)
    except TypeError:
        return {}
    if defaults:
        bound.apply_defaults()
    return dict(bound.arguments)


def same_state(instances: dict, gold_instances: dict) -> bool:
    """The official state check: equal public attributes, class by class."""
    return all(getattr(instances[name], key) == value for name, gold in gold_instances.items()
               for key, value in vars(gold).items() if not key.startswith("_"))


def known_classes(classes: str | None) -> set[str]:
    """The names in "GorillaFileSystem,MathAPI", all of them for None. Raises BadInput for an unknown one."""
    documents = load_data()[1]
    wanted = set(str(classes).replace(" ", "").split(",")) if classes else set(documents)
    if wanted - set(documents):
        raise BadInput(f"unknown class {', '.join(sorted(wanted - set(documents)))}; there are: {', '.join(documents)}")
    return wanted


def json_schema(document):
    """A function document's parameters with JSON Schema's type names (the documents say dict, float, ...)."""
    if isinstance(document, dict):
        return {key: JSON_TYPES.get(value, value) if key == "type" and isinstance(value, str) else json_schema(value)
                for key, value in document.items()}
    return [json_schema(item) for item in document] if isinstance(document, list) else document


class BFCL(Env):
    """Options: `format` "prompt" (a list of calls as text) or "native" (tool calls in the form of the model's chat template),
    `guidance` "first-call" or "next", and those of `tasks`.

    After `reset`, `system_prompt` holds the task's instructions; in the native format without the functions, which are
    in `tools`. `info` has success, valid (parsed, and every function known), user_turn (from 1), abstain_turns,
    abstained and, in the native format, tool_results.
    """

    def __init__(self, format="prompt", guidance="first-call", classes: str | None = None, split_by="domain"):
        refuse_unknown("format", format, ("prompt", "native"))
        refuse_unknown("guidance", guidance, ("first-call", "next"))
        refuse_unknown("split_by", split_by, ("domain", "index"))
        known_classes(classes)      # raises BadInput
        self.format, self.guidance = format, guidance
        self._done = True

    @classmethod
    def tasks(cls, split: str, classes: str | None = None, split_by="domain") -> list[str]:
        """Ids `category/index`; the four categories of an index always share its split.

        `split_by="domain"` is FEE's: indices 0-99 (each has the file system or the car) train, 100-199 (each has the
        broker or travel) test. "index" draws the halves by a hash of the index. Of the first half, every fifth is "valid"
        and not "train". `classes` ("GorillaFileSystem" or "MathAPI,TravelAPI") keeps the tasks that involve no other
        class: 14,000 characters of prompt for one class against 22,000 in the median task. By domain, train and test
        share no class for that, and some classes are never alone: a split without a task is refused."""
        refuse_unknown("split", split, ("train", "valid", "test"))
        refuse_unknown("split_by", split_by, ("domain", "index"))
        wanted, order = known_classes(classes), list(range(200))
        if split_by == "index":
            order.sort(key=lambda index: hashlib.sha256(f"bfcl {index}".encode()).digest())
        indices = {"train": [index for rank, index in enumerate(order[:100]) if rank % 5 != 4],
                   "valid": order[4:100:5], "test": order[100:]}[split]
        tasks = [task for category in CATEGORIES for task in (f"{category}/{index}" for index in sorted(indices))
                 if set(load_data()[0][task]["involved_classes"]) <= wanted]
        if not tasks:
            other = " or split_by=index" if split_by == "domain" else ""
            raise BadInput(f"no {split} task involves {classes} and no other class: try more classes{other}")
        return tasks

    def reset(self, *, task: str, seed: int) -> tuple[str, dict]:
        """Nothing is drawn at random: `seed` changes nothing."""
        entries, documents, _ = load_data()
        if task not in entries:
            raise BadInput(f"unknown task {task!r}: use category/index, such as base/17 or miss_func/103")
        if self.format == "native" and self.tool_call_form is None:
            raise BadInput("this model's chat template writes calls in a form that is not known here: use --env-options format=prompt")
        self._category, self._entry = task.split("/")[0], entries[task]
        self._gold = [[parse_calls(text)[0] for text in turn] for turn in self._entry["ground_truth"]]
        self._instances, self._gold_instances = (
            make_instances(self._entry, self._category == "long_context") for _ in range(2))
        self._methods, self._gold_methods = public_methods(self._instances), public_methods(self._gold_instances)
        functions = [doc for name in self._entry["involved_classes"] for doc in documents[name]]
        self._added = {int(turn): [doc for doc in functions if doc["name"] in names]
                       for turn, names in self._entry.get("missed_function", {}).items()}
        self._schemas = {doc["name"]: json_schema(doc["parameters"])["properties"] for doc in functions}
        shown = [doc for doc in functions if not any(doc in docs for docs in self._added.values())]
        if self.format == "native":
            self.system_prompt = SYSTEM_PROMPT
            self.tools = [{"type": "function", "function": {key: json_schema(doc[key]) for key in
                                                            ("name", "description", "parameters")}} for doc in shown]
        else:
            self.system_prompt = SYSTEM_PROMPT + CALL_FORMAT + "\n".join(map(json.dumps, shown))
        self._turn, self._passed, self._done, self._abstained, self._results = 0, True, False, 0, []
        return self._start_turn(), self._info(valid=True)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """One model output. Raises RuntimeError after the end."""
        if self._done:
            raise RuntimeError("the episode is over: call reset")
        self._steps, self._last = self._steps + 1, []
        text = after_thinking(action)
        try:
            if text is None:
                raise InvalidAction(UNFINISHED.removesuffix("."))
            if len(text) > MAX_CHARS:
                raise InvalidAction(f"{len(text)} characters are too many")
            calls = parse_tool_calls(text, self._schemas) if self.format == "native" else parse_calls(text)
            if not calls:
                return self._end_turn()
            self._last = [(call, run_call(call, self._methods)) for call in calls]
            valid = all(call.name in self._methods for call in calls)
            results = [_encodable(result if self.format == "native" else f"{call.name} -> {result}")
                       for call, result in self._last]
        except InvalidAction as error:
            valid, results = False, [f"Invalid action: {error}. Nothing was run."]
        self._made += [call for call, _ in self._last]            # of this user turn
        self._results += [result for _, result in self._last]     # of all user turns
        if self._steps > MAX_STEPS:
            self._done, self._passed = True, False
            results.append(f"More than {MAX_STEPS} steps for one request: the conversation is over.")
        info = self._info(valid) | ({"tool_results": results} if self.format == "native" else {})
        return "\n".join(results), 0.0, self._done, False, info

    def _start_turn(self) -> str:
        """The user's message; where functions are added, that message."""
        self._steps, self._made, self._last = 0, [], []
        if self._turn in self._added:
            return ADDED_FUNCTIONS.format("\n".join(map(json.dumps, self._added[self._turn])))
        return "\n".join(message["content"] for message in self._entry["question"][self._turn])

    def _end_turn(self):
        """Run this turn's ground truth beside and check, as the official checker does after each turn."""
        expected = [run_call(call, self._gold_methods) for call in self._gold[self._turn]]
        if expected:
            self._passed &= (bool(self._made) and same_state(self._instances, self._gold_instances)
                             and not Counter(expected) - Counter(self._results))
        else:
            self._abstained += not self._made
        self._done = self._turn == len(self._gold) - 1
        if self._done:
            return "The conversation is over.", float(self._passed), True, False, self._info(valid=True)
        self._turn += 1
        return self._start_turn(), 0.0, False, False, self._info(valid=True)

    def _info(self, valid: bool) -> dict:
        return {"success": self._done and self._passed, "valid": valid, "user_turn": self._turn + 1,
                "abstain_turns": self._gold[:self._turn + 1].count([]), "abstained": self._abstained}

    def _left(self) -> list[Call]:
        """This turn's ground-truth calls that were not made in it (same function, same arguments)."""
        key = lambda call: (call.name, bound_arguments(call, self._methods, defaults=True) or call)
        made, left = [key(call) for call in self._made if call.name in self._methods], []
        for call in self._gold[self._turn]:
            if key(call) in made:
                made.remove(key(call))
            else:
                left.append(call)
        return left

    def _closing(self) -> str:
        """What to say instead of a call. In a miss_* task only the first turn without ground truth lacks something on
        purpose; a later one is, as in base, a gap in the data."""
        first = not self._gold[self._turn] and [] not in self._gold[:self._turn]
        if first and self._category == "miss_func":
            return "A function that this needs is missing, and no available function fits."
        if first and self._category == "miss_param":
            return "Information that this needs is missing: please give it."
        return "Nothing is left to call for this request."

    def action_guidance(self) -> str | None:
        if self._done or (self.guidance == "first-call" and self._steps > 0):
            return None
        if left := self._left():
            return self.phrase([self._write(left[:1])])
        return f"Hint: do not call a function now, answer in words. {self._closing()}"

    def phrase(self, actions):
        """No full stop: copied with the call, it would be a part of it."""
        return f"Hint: a good next call is {', then '.join(actions)}"

    def gold_action(self) -> str | None:
        """All ground-truth calls that are left in this user turn, or the sentence that ends it."""
        if self._done:
            return None
        left = self._left()
        return self._write(left) if left else self._closing()

    def _write(self, calls: list[Call]) -> str:
        """Calls in the episode's format, every argument by its name."""
        named = [(call.name, bound_arguments(call, self._methods)) for call in calls]
        if self.format == "native":
            return "\n".join(write_tool_call(name, arguments, self.tool_call_form) for name, arguments in named)
        return "[" + ", ".join(f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
                               for name, arguments in named) + "]"

    def observation_enrichment(self) -> str | None:
        """Read from the state after the last calls; nothing here is seen by the checks."""
        if self._done:
            return None
        notes = []
        for call, result in self._last:
            owner = getattr(self._methods.get(call.name), "__self__", None)
            if describe := DESCRIBED.get(type(owner).__name__):
                notes += describe(owner, call.name, result)
        return _encodable("\n".join(dict.fromkeys(notes))) or None


def _describe_files(files, name: str, result: str):
    if result in ("None", "{}"):
        yield f"{name} returned nothing, which means that it worked."
    yield f"Current directory: {files.pwd()['current_working_directory']}"
    if name in ("cd", "mkdir", "touch", "rm", "rmdir", "mv", "cp", "echo"):
        yield f"It contains: {_listed(files._current_dir.contents)}"


def _describe_car(car, name: str, result: str):
    if name == "startEngine" and "error" in result:
        pressed = car.brakePedalStatus == "pressed" and car._brakePedalForce == 1000
        needs = {"every door locked": car.remainingUnlockedDoors == 0, "the brake pedal pressed fully": pressed,
                 "fuel": car.fuelLevel >= 0}
        unmet = [need for need, holds in needs.items() if not holds] or ["ignition mode START"]
        yield f"The engine did not start. It first needs: {', '.join(unmet)}."
    if name in ("startEngine", "lockDoors"):
        yield f"Doors: {', '.join(f'{door} {status}' for door, status in car.doorStatus.items())}."
    if name == "check_tire_pressure":
        tires = {key[:-len("TirePressure")]: psi for key, psi in vars(car).items() if key.endswith("TirePressure")}
        yield (f"Tires (psi): {', '.join(f'{tire} {psi}' for tire, psi in tires.items())}; "
               f"lowest: {min(tires, key=tires.get)}; the mean should be 30 to 35.")


def _describe_broker(broker, name: str, result: str):
    if "not authenticated" in result:
        yield "Nobody is logged in: trading_login comes first."
    if name == "get_symbol_by_name" and "not found" in result:
        yield f"Symbols that can be traded: {_listed(broker.stocks)}"
    if name == "place_order" and "error" not in result.lower():
        order = list(broker.orders.values())[-1]
        yield (f"Order {order['id']} is now {order['status']}. At {order['price']} a share it comes to "
               f"{order['price'] * order['amount']:.2f}; the market price of {order['symbol']} is {broker.stocks[order['symbol']]['price']}.")
    if name in ("place_order", "cancel_order", "get_order_details", "get_order_history"):
        orders = [f"{number} {order.get('status')}" for number, order in broker.orders.items() if isinstance(order, dict)]
        yield f"Orders: {_listed(reversed(orders))}"
    if name in ("place_order", "fund_account", "withdraw_funds", "trading_login"):
        yield (f"Balance: {broker.account_info.get('balance')}. The market is {broker.market_status}"
               f"{'' if broker.market_status == 'Open' else ': nothing can be withdrawn'}.")
    if name in ("add_to_watchlist", "remove_stock_from_watchlist"):
        yield f"Watch list: {_listed(broker.watch_list)}"


def _describe_travel(travel, name: str, result: str):
    if "oken" in result and "rror" in result or name == "authenticate_travel":      # Token expired, Invalid access token
        usable = travel.access_token and travel.token_expires_in != 0
        yield f"The access token is {travel.access_token}." if usable else "No access token is valid: authenticate_travel gives one."
    if name in ("get_flight_cost", "book_flight") and ("airport" in result or "route" in result):
        yield f"Airports: {_listed(travel.list_all_airports())}. Not every pair of them has a flight."
    if name in ("get_flight_cost", "book_flight", "cancel_booking", "purchase_insurance", "register_credit_card", "set_budget_limit"):
        cards = [f"{number} with {card.get('balance')}" for number, card in travel.credit_card_list.items()]
        yield f"Cards: {_listed(reversed(cards))}"
        limit = travel.budget_limit
        yield "No budget limit is set." if limit is None else f"Budget limit: {limit}; a card with less than that books no flight."
    if name in ("book_flight", "cancel_booking") or "Booking not found" in result:
        bookings = [f"{number} {booking.get('travel_from')}-{booking.get('travel_to')}" for number, booking in travel.booking_record.items()]
        yield f"Bookings: {_listed(reversed(bookings))}"
    if name == "verify_traveler_information" and "verification_failure" in result:
        yield (f"The traveler must be {travel.user_first_name} {travel.user_last_name}, 18 years old or more, "
               "with a passport whose number begins with US.")


def _listed(things) -> str:
    names = [str(thing) for thing in things]
    return (", ".join(names[:MAX_LISTED]) or "nothing") + (f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else "")


DESCRIBED = {"GorillaFileSystem": _describe_files, "VehicleControlAPI": _describe_car,
             "TradingBot": _describe_broker, "TravelAPI": _describe_travel}


def _encodable(text: str) -> str:
    """A lone surrogate, which a call can spell, as an escape: a tokenizer could not encode it."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
