"""AppWorld: do a person's errands in nine simulated apps by writing Python against their 457 APIs, on the benchmark's own engine.

Benchmark: Trivedi et al., "AppWorld", arXiv 2407.18901, engine 0.1.3.post1. FEE (arXiv 2609.08404) reports that its models stay at
zero reward here, with and without hints.

    python -m envs.appworld_setup               # once: the engine in an environment of its own, and the data
    python enrich.py --env appworld             # prints a task: see the licence in envs/appworld_setup.py

A turn is a block of Python in the policy's text (`read_code`). It runs in the engine's shell, which keeps its variables, and what it
prints is the observation, cut at `characters`. `apis.supervisor.complete_task(...)` ends the episode; then the engine's tests decide.
Model code runs only in a process of its own, jailed (envs/appworld_worker.py, docs/trust.md).

Task ids are `<scenario>/<number>`, AppWorld's own `82e2fac_1` as 82e2fac/1. Train is its train split; its dev split makes valid and
test, every second scenario each. Its two test splits need a judge that is not public, so they are not used.

Success is AppWorld's: every test passes. `score`, ours, is 100 times the share of passed tests among those that doing nothing fails (a
quarter is passed from the start), without the test of the answer where none is wanted, which calling complete_task at once passes.
An episode that the turn limit ends is not evaluated: no success, score 0.

Gold and hints, all ours, are read from the known solution, a function whose body is a flat list of statements:
 1. Gold play writes its statements, one block a turn, each with an API call (5 to 11 of them). Where the author's own version lets a
    call fail (`raise_on_failure=False`), so does the block.
 2. Guidance: the next three API calls of the solution that were not made yet, in the order in which it first makes them, with their
    arguments as the solution writes them. A call made in a loop counts once.
 3. Enrichment: the rows that differ from the start, by app and table, and which log-ins of the solution were made and are missing.
"""
import ast
import functools
import json
import re
import textwrap
from pathlib import Path

from envs import BadInput, Env, reference_lines, refuse_unknown
from envs.action import after_thinking, invalid
from envs.appworld_engine import Engine, end_idle_judges, judge
from envs.appworld_setup import SETUP, checked_data, checked_python

PROMPT = """You do a task for your supervisor, on your own, by writing Python that calls the APIs of apps. Each turn, write one block:
```python
print(apis.api_docs.show_app_descriptions())
```
It is run, and you see what it prints. Variables are kept from turn to turn. Print what you want to see, and little at a time: long \
output is cut. An API call that fails raises an exception.
apis.api_docs.show_app_descriptions()                                   which apps there are
apis.api_docs.show_api_descriptions(app_name="spotify")                 the APIs of an app
apis.api_docs.show_api_doc(app_name="spotify", api_name="login")        parameters and answer of an API; look before you call one
apis.supervisor.show_profile(), .show_account_passwords()               the supervisor's own data and passwords
apis.spotify.login(username=..., password=...)["access_token"]          most APIs want the access token of their app
apis.supervisor.complete_task(answer=...)                               ends the task; without `answer` where nothing is asked for
Lists come in pages (page_index). Friends and family are in the phone app, files in file_system, the date from datetime."""
NO_CODE = "There was no block of Python: write one, begun by ```python and ended by ```."
SPLITS = ("train", "valid", "test")
EPISODES = 200      # of one process: each leaves 1 to 2 MB in it


def read_code(text: str) -> str | None:
    """The code of a turn: the first complete ``` block of the text behind the thinking that is called python, py or nothing. The first,
    as what stands behind it was written without its output (so do the benchmark's own agents). None: there is none. Linear."""
    text, begin = after_thinking(text) or "", 0
    while (begin := text.find("```", begin)) >= 0:
        end = text.find("```", begin + 3)
        if end < 0:
            return None
        name, _, code = text[begin + 3:end].partition("\n")
        code = textwrap.dedent(code).strip()
        if code and name.strip().lower() in ("python", "py", "python3", ""):
            return code
        begin = end + 3
    return None


# The known solution

def names_called(node) -> list[ast.Call]:
    """The calls `apis.app.api(...)` of a piece of code, about in the order in which they are made: arguments before their call, what is
    looped over before what is done with it."""
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
        children = [*node.generators, *(child for child in children if not isinstance(child, ast.comprehension))]
    elif isinstance(node, (ast.Assign, ast.AugAssign, ast.For)):
        children = sorted(children, key=lambda child: child is not getattr(node, "value", getattr(node, "iter", None)))
    found = [call for child in children for call in names_called(child)]
    return found + [node] * (isinstance(node, ast.Call) and re.fullmatch(r"apis\.\w+\.\w+", ast.unparse(node.func)) is not None)


def name_of(call: ast.Call) -> str:
    return ast.unparse(call.func).removeprefix("apis.")


@functools.lru_cache(64)
def solution(folder: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    """(the blocks of gold play, {name: call} of each API in the order in which it is first called). Raises BadInput."""
    try:
        tree, author = (ast.parse((folder / name).read_text(encoding="utf-8")) for name in ("compiled_solution.py", "solution.py"))
        body = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "solution").body
    except (OSError, ValueError, SyntaxError, StopIteration) as error:
        raise BadInput(f"appworld: {folder} has no known solution to read ({type(error).__name__}), so no gold play or hints") from error
    may_fail = {name_of(call) for call in names_called(author) if any(key.arg == "raise_on_failure" for key in call.keywords)}
    imports = [ast.unparse(node) for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))
               and not ast.unparse(node).startswith("from appworld")]
    blocks, calls, open_block = [], {}, imports
    for statement in body:
        made = names_called(statement)
        for call in made:
            calls.setdefault(name_of(call), ast.unparse(call))
            if name_of(call) in may_fail:
                call.keywords.append(ast.keyword("raise_on_failure", ast.Constant(False)))
        open_block.append(ast.unparse(statement))
        if made:
            blocks.append("\n".join(open_block))
            open_block = []
    return tuple(blocks), calls


class AppWorld(Env):
    """Options: data (the folder in which `data` lies, see envs/appworld_setup.py), difficulty (1, 2 or 3; 0: all), reward "binary" or
    "score" (the share at the end), characters (of an observation), seconds (of a turn's code), memory_mb (of the engine's address space;
    it needs 1,000), jail."""

    system_prompt = PROMPT
    max_turns = 30
    defaults = {"history": "window:6", "max_context": 16384, "max_new_tokens": 1024}
    analyst_note = ("Each turn is Python code that the agent wrote and what it printed. The agent sees neither the tests nor which of them "
                    "failed; they are told here at the end of an episode that it has ended by complete_task.")

    def __init__(self, data=None, difficulty=0, reward="binary", characters=3000, seconds=30, memory_mb=3072, jail=True):
        refuse_unknown("reward", reward, ("binary", "score"))
        refuse_unknown("jail", str(jail).lower(), ("true", "false"))
        for name, value, least in (("characters", characters, 100), ("seconds", seconds, 1), ("memory_mb", memory_mb, 1024)):
            if type(value) is not int or value < least:
                raise BadInput(f"appworld: {name} must be a whole number, at least {least}, got {value!r}")
        checked_python()
        self.data, self.reward, self.seconds = checked_data(data), reward, seconds
        self.limits = {"memory_mb": memory_mb, "jail": str(jail).lower() == "true"}
        self.shown = {"seconds": seconds, "characters": characters}
        self._known = {task for split in SPLITS for task in self.tasks(split, data, difficulty)}
        self._world, self._done = None, True

    @classmethod
    def tasks(cls, split, data=None, difficulty=0):
        """Ids in AppWorld's order: 90 / 30 / 27 of the 147."""
        refuse_unknown("split", split, SPLITS)
        refuse_unknown("difficulty", str(difficulty), ("0", "1", "2", "3"))
        data = checked_data(data)
        names = (data / "datasets" / ("train.txt" if split == "train" else "dev.txt")).read_text().split()
        if split != "train":
            scenarios = sorted({name.partition("_")[0] for name in names})
            names = [name for name in names if name.partition("_")[0] in scenarios[split == "test"::2]]
        if int(difficulty):
            names = [name for name in names if read(data, name, "ground_truth/metadata.json")["difficulty"] == int(difficulty)]
        return [name.replace("_", "/") for name in names]

    def reset(self, *, task, seed):
        """Any seed gives the same episode. Raises BadInput for a task that is not there, EngineDied."""
        if task not in self._known:
            like = min(self._known, default="none")
            raise BadInput(f"appworld: unknown task {task[:80]!r} with these options: ids look like {like}")
        self._done, self._name = True, task.replace("/", "_")
        specs = read(self.data, self._name, "specs.json")
        if self._world is None or not self._world.alive() or self._played >= EPISODES:
            if self._world is not None:
                self._world.kill()
            self._world, self._played = Engine("world", self.data, **self.limits, **self.shown), 0
        self._played += 1
        self._world.ask("load", task=self._name)
        self._made, self._followed, self._changes, self._done = set(), 0, {}, False
        person = specs["supervisor"]
        return (f"Task of {person['first_name']} {person['last_name']} ({person['email']}, {person['phone_number']}), your supervisor:\n"
                f"{specs['instruction']}"), self._info(valid=True)

    def step(self, action):
        """`valid`: there was code. Raises RuntimeError after the end, EngineDied where the engine dies or does not answer in time: the
        next `reset` starts another."""
        if self._done:
            raise RuntimeError("this episode is over: call reset()")
        code = read_code(action)
        if code is None:
            return invalid(NO_CODE, action), 0.0, False, False, self._info(valid=False)
        done = self._world.ask("execute", seconds=2 * self.seconds + 5, code=code.encode("utf-8", "replace").decode())
        self._made |= {name for name, ok in done["calls"] if ok}
        self._changes = done["changes"]
        if not self._done and self._followed < len(self._blocks()) and code == self._blocks()[self._followed]:
            self._followed += 1
        if not done["completed"]:
            return done["output"], 0.0, False, False, self._info(valid=True)
        self._done = True
        verdict = judge(self.data, **self.limits).ask("evaluate", task=self._name, folder=str(self._world.outputs))
        info = self._info(valid=True, **verdict)
        return done["output"], info["score"] / 100 if self.reward == "score" else float(info["success"]), True, False, info

    def _info(self, valid, success=False, passed=0, needed=1, tests=0, failed=()):
        """`reference`, for reflection alone: the requirements that were not met."""
        info = {"success": success, "valid": valid, "score": 100 * passed / max(needed, 1)}
        if tests:
            info["reference"] = {"passed": f"{tests - len(failed)} of {tests} tests", "failed": "; ".join(failed) or "none"}
        return info

    def _solution(self):
        return solution(self.data / "tasks" / self._name / "ground_truth")

    def _blocks(self):
        return self._solution()[0]

    def gold_action(self):
        """The block after those of the solution that were played so far, with any others between."""
        left = [] if self._done else self._blocks()[self._followed:]
        return f"```python\n{left[0]}\n```" if left else None

    def action_guidance(self):
        calls = {} if self._done else self._solution()[1]
        left = [call if len(call) <= 200 else f"{call[:200]}..." for name, call in calls.items() if name not in self._made]
        return self.phrase(left[:3]) if left else None

    def observation_enrichment(self):
        if self._done:
            return None
        rows = [f"{table} ({', '.join(f'{n} {word}' for word, n in counts.items())})" for table, counts in self._changes.items()]
        apps = [name.partition(".")[0] for name in self._solution()[1] if name.endswith(".login")]
        has = [app for app in apps if f"{app}.login" in self._made]
        return (f"Changed so far: {', '.join(rows) or 'nothing'}. Logged in to: {', '.join(has) or 'no app'}. "
                f"Log-in still missing: {', '.join(app for app in apps if app not in has) or 'none'}.")

    def reflection(self, trajectory):
        """The code of each turn, or the end of a text that holds none, and 900 characters of what it printed."""
        shown = [trajectory.first_observation]
        for turn in trajectory.turns:
            shown.append(f"> {read_code(turn.action) or f'(no code) {turn.action[-100:].strip()}'}\n{turn.observation[:900]}")
        return "\n".join([*shown, *reference_lines(trajectory.info.get("reference"))])

    def close(self):
        """Ends this instance's process; the last one ends the judge."""
        if self._world is not None:
            self._world.kill()
        self._world, self._done = None, True
        end_idle_judges()


def read(data: Path, name: str, file: str) -> dict:
    """A JSON file of a task. Raises BadInput where it is not there or damaged."""
    path = data / "tasks" / name / file
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"appworld: {path} cannot be read ({type(error).__name__}): remove {data}; {SETUP}") from error
