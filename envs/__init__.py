"""The environment: text in, text out, in Gymnasium's five-tuple.

An environment gives facts and a reward; it never decides whether a hint is shown (that is `enrich.py`'s),
and nothing outside its file knows the benchmark. To add one, write `envs/<name>.py` with one subclass of
`Env`, or keep it in your own module and pass `--env your_module:YourEnv`.
"""
import ast
import importlib
import inspect

from envs.action import after_thinking, parse_action  # noqa: F401, for an environment's `step` and its callers


class BadInput(ValueError):
    """What the caller asked for cannot be done; the message is one line that says what to do instead."""


class DoesNotFit(BadInput):
    """No first prompt fits into the context."""


class Env:
    """One episode at a time. Keyword arguments of `__init__` are the options of `--env-options key=value ...`."""

    system_prompt: str = ""
    max_turns: int = 30  # the usual limit of this benchmark; the caller counts the turns
    tools: list[dict] | None = None  # JSON schemas of functions that the chat template lists, or None
    tool_call_form: str | None = "json"  # how hints and gold actions write calls (toolcalls.py); the caller sets the template's
    defaults: dict = {}  # options of the programs that take another default here, such as {"max_context": 8192}
    analyst_note: str = ""  # what an editor of the Funnel's state should know when it reads `reflection`

    @classmethod
    def tasks(cls, split: str, **options) -> list[str]:
        """Task ids `name/variation` of "train", "valid" or "test": disjoint, always in the same order."""
        raise NotImplementedError

    def reset(self, *, task: str, seed: int) -> tuple[str, dict]:
        """Start `task`; the same task and seed give the same episode. Returns (observation, info)."""
        raise NotImplementedError

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Act with the policy's raw text of this turn. Returns (observation, reward, terminated, truncated, info).

        Thinking is part of the text, with "<think>" before it where the prompt has opened it. `parse_action` (action.py) reads
        the command behind it. Thinking that did not end is an invalid action, and `invalid` says so in the observation.

        `info` holds `success: bool`, `valid: bool` and, where the benchmark has them, `admissible: list[str]`;
        a benchmark with a graded score adds `score: float`; one that asks for what cannot be done adds `abstain_turns`,
        how often it has done so, and `abstained`, how often the policy rightly did nothing or said so. Where the action
        called functions that `tools` lists, `tool_results: list[str]` holds what each returned: the observation is then
        these, joined by line breaks, and in the chat each is a message of role "tool". `listed: str`, also in the info of
        `reset`: lines of the observation that list what can be done now. They are of no use later: `reflection` and
        `--history recent:N` leave them out of past observations. `reference`, a dict or a text: what the episode is judged
        by, such as the right answers and their score, for `reflection` alone; it stands in no observation, so the
        policy never reads it. The last info's is kept. The return of an episode is the sum of its rewards.
        """
        raise NotImplementedError

    def reflection(self, trajectory) -> str:
        """An episode that was played (rl/rollout.py) as the editor of the Funnel's state reads it, made of the trajectory alone:
        what was observed, without the lists of what could be done, "> " and each action, and the reference."""
        observations = [trajectory.first_observation, *(turn.observation for turn in trajectory.turns)]
        lists = [*(turn.listed for turn in trajectory.turns), trajectory.info.get("listed")]
        texts = [without_list(text, listed) for text, listed in zip(observations, lists)]
        played = [f"> {turn.action.strip()}\n{text}" for turn, text in zip(trajectory.turns, texts[1:])]
        return "\n".join([texts[0], *played, *reference_lines(trajectory.info.get("reference"))])

    def action_guidance(self) -> str | None:
        """A procedural hint that fits now ("take the iron key"), or None."""
        return None

    def observation_enrichment(self) -> str | None:
        """State that the standard observation hides and that fits now, or None."""
        return None

    def phrase(self, actions: list[str]) -> str:
        """How this environment words a hint that names actions; warm starts teach a tiny model to follow it."""
        return "Hint: " + ", then ".join(actions) + "."

    def gold_action(self) -> str | None:
        """The next action of a known solution, or None: for `--warm-start gold` and for tests."""
        return None

    def admissible_actions(self) -> list[str] | None:
        """Every command that is valid now, where `info["admissible"]` would be too slow to build each turn."""
        return None

    def close(self):
        pass


def without_list(observation: str, listed: str | None) -> str:
    """An observation without the lines that `info["listed"]` names."""
    return observation.replace(f"\n{listed}", "") if listed else observation


def reference_lines(reference) -> list[str]:
    """`info["reference"]` as lines: a text as it is, a dict as "name: value"."""
    return [f"{key}: {value}" for key, value in reference.items()] if isinstance(reference, dict) else [reference] if reference else []


def env_class(name: str) -> type[Env]:
    """The `Env` subclass of `envs/<name>.py`, or of `module:Class`."""
    module_name, _, class_name = name.partition(":")
    if not class_name:
        module_name = f"envs.{name}"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise BadInput(f"environment {name!r} needs the package {error.name!r}: pip install {error.name}") from error
        raise BadInput(f"unknown environment {name!r}: use a file name in envs/, or your_module:YourEnv") from error
    found = [cls for key, cls in inspect.getmembers(module, inspect.isclass) if issubclass(cls, Env)
             and cls is not Env and (key == class_name if class_name else cls.__module__ == module_name)]
    if len(found) != 1:
        raise BadInput(f"environment {name!r}: {module_name} must hold exactly one such Env subclass, found {len(found)}")
    return found[0]


def parse_options(pairs: list[str]) -> dict:
    """["stages=4", "tasks=a,b"] -> {"stages": 4, "tasks": "a,b"}: literals where they parse, else text."""
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise BadInput(f"environment option {pair!r} is not of the form key=value")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return options


def known_options(cls: type[Env], options: dict | None) -> dict:
    """The options, if the environment's `__init__` has them all."""
    known = [p for p in inspect.signature(cls.__init__).parameters if p not in ("self", "args", "kwargs")]
    unknown = [key for key in options or {} if key not in known]
    if unknown:
        raise BadInput(f"environment {cls.__name__} has no option {', '.join(unknown)}; it has: {', '.join(known) or 'none'}")
    return options or {}


def make_env(name: str, options: dict | None = None) -> Env:
    """One instance; an option the environment does not have is named in one line."""
    cls = env_class(name)
    return cls(**known_options(cls, options))


def select_tasks(name: str, split: str, only: list[str] | None = None, options: dict | None = None) -> list[str]:
    """The tasks of a split; `only` keeps those whose id, or whose part before "/", is listed."""
    cls = env_class(name)
    parameters = inspect.signature(cls.tasks).parameters
    passed = {key: value for key, value in known_options(cls, options).items()
              if key in parameters or any(p.kind == p.VAR_KEYWORD for p in parameters.values())}
    all_tasks = cls.tasks(split, **passed)
    names = {task.split("/")[0] for task in all_tasks}
    missing = [item for item in only or [] if item not in names and item not in all_tasks]
    if missing:
        raise BadInput(f"unknown task {', '.join(missing)} in {name} {split}; there are: {', '.join(sorted(names))}")
    return [task for task in all_tasks if not only or task in only or task.split("/")[0] in only]


def split_tasks(name: str, only: list[str], options: dict, splits=("train", "valid", "test")) -> dict[str, list[str]]:
    """{split: its tasks}, none of them empty. A full id in `only` picks training tasks; evaluations take its name."""
    names = [task.split("/")[0] for task in only]
    tasks = {split: select_tasks(name, split, only if split == "train" else names, options) for split in splits}
    for split in tasks:
        if not tasks[split]:
            raise BadInput(f"{name} has no {split} tasks with these options: change --tasks or --env-options")
    return tasks


def refuse_unknown(what: str, value, known):
    """Raise BadInput, with what there is, for a value of an option that is not among the known ones."""
    if value not in known:
        raise BadInput(f"unknown {what} {value!r}: use one of {', '.join(known)}")


def plain(text: str) -> str:
    """For a terminal: characters that could move its cursor, change its colours or hide text are spelled out, as \\x1b."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
