"""ALFWorld: household tasks in a text world, played by the real engine on the real games.

Benchmark: Shridhar et al., "ALFWorld", arXiv 2010.03768; packages `alfworld` 0.4.2 and `textworld` 1.7 (a PDDL planner's
state behind a grammar), of the text games only: no pictures, no 3D simulator. The Experience Funnel (arXiv 2609.08919)
is tried on it, 50 turns an episode. Six task types, such as "put a hot apple in the fridge"; a turn is one command.

    pip install --no-deps -r envs/alfworld-requirements.txt     # compiles: apt-get install build-essential cmake
    alfworld-download                                           # the games, to $ALFWORLD_DATA or ~/.cache/alfworld

Task ids are `<task type>/<object>-<...>-<scene>/<trial>`. Splits are the benchmark's: train, valid (its valid_seen, rooms
that training knows) and test (its valid_unseen, new rooms); as officially, without games that are marked unsolvable, with
movable receptacles or with sliced objects. Reward: 1 on the turn that reaches the goal, else 0. An invalid command is
answered "Nothing happens." and costs a turn.

Deviations, all ours
 1. The admissible commands stand in the observation (admissible="list"); the benchmark leaves that to the agent.
 2. Letter case does not matter: the engine's names are all lower case. The engine's greeting line is left out.
 3. Hints are ours, the benchmark has none. Guidance: the walkthrough that is stored with the game. Enrichment: facts of
    the engine's state. Neither is read anywhere else, and a game without a walkthrough has no guidance.
 4. The package grounds a game's PDDL four times for one start, about 0.4 s each: twice over, for play and for a planner that
    is not used here. Once is enough, and it is kept for the process (the last GROUNDED games). What is kept is text
    and operators that are only read; each instance has its own copy of the engine's state.
An episode is a function of (task, actions): the engine draws nothing at random.
"""
import functools
import json
import os
import re
import sys
import threading
from collections import defaultdict
from pathlib import Path
from unittest import mock

from envs import BadInput, Env, refuse_unknown
from envs.action import invalid, parse_action

SPLITS = {"train": "train", "valid": "valid_seen", "test": "valid_unseen"}
TASK_TYPES = ("pick_and_place_simple", "look_at_obj_in_light", "pick_clean_then_place_in_recep",
              "pick_heat_then_place_in_recep", "pick_cool_then_place_in_recep", "pick_two_obj_and_place")
GREETING = "-= Welcome to TextWorld, ALFRED! =-"
STATES = {"isclean": "clean", "ishot": "hot", "iscool": "cool", "istoggled": "on"}     # a fact's name -> how we say it
GROUNDED = 32   # games whose grounding is kept: about 5 MB each

PROMPT = """You are in a house, and you have a task to carry out there. Each turn, answer with one command: alone on one \
line, or inside <action></action>."""
TEMPLATES = """
Commands: look | inventory | go to PLACE | open PLACE | close PLACE | take THING from PLACE | move THING to PLACE
use THING | clean THING with PLACE | heat THING with PLACE | cool THING with PLACE | examine THING or PLACE
Names come with a number: apple 1, fridge 1."""

_lock = threading.RLock()   # the package's parsers, options and captured stdout are global
_idle = []                  # engines of closed instances, for the next ones: unloading their library crashes the process


@functools.cache
def engine():
    """The packages' parts: (PddlEnv, AlfredDemangler, EnvInfos, fast_downward)."""
    try:
        import fast_downward
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        from textworld import EnvInfos
        from textworld.envs.pddl.pddl import PddlEnv
    except ImportError as error:
        raise BadInput(f"environment 'alfworld' lacks the package {error.name or error!r}: "
                       "pip install --no-deps -r envs/alfworld-requirements.txt") from error
    return PddlEnv, AlfredDemangler, EnvInfos, fast_downward


@functools.lru_cache(GROUNDED)
def ground(domain, problem):
    """A PDDL problem's (task, SAS text), as the package's own translator makes them. It overwrites sys.argv."""
    argv = sys.argv
    try:
        return engine()[3].interface.pddl2sas(domain, problem, optimize=False)
    finally:
        sys.argv = argv


def folder(data) -> Path:
    """Where the games are: the option, else $ALFWORLD_DATA, else where alfworld-download puts them."""
    path = Path(str(data or os.environ.get("ALFWORLD_DATA") or "~/.cache/alfworld")).expanduser()
    path = path / "json_2.1.1" if (path / "json_2.1.1").is_dir() else path
    if not any((path / name).is_dir() for name in SPLITS.values()):
        raise BadInput(f"no ALFWorld games in {path}: run alfworld-download (pip install --no-deps -r "
                       "envs/alfworld-requirements.txt), or set $ALFWORLD_DATA or --env-options data=DIR")
    return path


@functools.cache
def games(path: Path, split: str) -> dict[str, Path]:
    """Task id -> game file, sorted by id. Reads every file once, for its "solvable": 0.3 s for 400 games."""
    found = {}
    for file in sorted((path / SPLITS[split]).glob("*/*/game.tw-pddl")):
        name, trial = file.parts[-3:-1]
        kind, _, rest = name.partition("-")
        if kind in TASK_TYPES and not re.search("movable|Sliced", name) and b'"solvable": true' in file.read_bytes():
            found[f"{kind}/{rest}/{trial}"] = file
    return dict(sorted(found.items()))


class ALFWorld(Env):
    """Options: data (the folder of alfworld-download), admissible "list" (in the observation) or "none" (command
    templates in the system prompt instead). `info["admissible"]` lists the valid commands in both."""

    max_turns = 50

    def __init__(self, data=None, admissible="list"):
        refuse_unknown("admissible", admissible, ("list", "none"))
        engine()
        self.folder, self.admissible = folder(data), admissible
        self.system_prompt = PROMPT + (TEMPLATES if admissible == "none" else "")
        self._env, self._done = None, True

    @classmethod
    def tasks(cls, split, data=None):
        """Task ids in order. The full data have 3553 / 140 / 134 games."""
        refuse_unknown("split", split, SPLITS)
        return list(games(folder(data), split))

    def reset(self, *, task, seed):
        """Any seed gives the same episode. Raises BadInput for a task that is not there or a file that is damaged."""
        files = {task: file for split in SPLITS for task, file in games(self.folder, split).items()}
        if task not in files:
            known = next(iter(files), "TYPE/OBJECT-SCENE/TRIAL")
            raise BadInput(f"unknown task {task!r} in {self.folder}: ids look like {known}")
        PddlEnv, AlfredDemangler, EnvInfos, fast_downward = engine()
        try:
            game = json.loads(files[task].read_text(encoding="utf-8"))
            problem, self._walkthrough = game["pddl_problem"], list(game.get("walkthrough") or [])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadInput(f"the game file {files[task]} is damaged ({error!r}): run alfworld-download again") from error
        with _lock, mock.patch.object(fast_downward, "pddl2sas", lambda domain, problem, **_: ground(domain, problem)):
            if self._env is None:
                infos = EnvInfos(admissible_commands=True, won=True, facts=True)
                self._env = _idle.pop() if _idle else AlfredDemangler(PddlEnv(infos), shuffle=False)
            self._env.load(game)
            self._state = self._env.reset()
        self._goal_types = set(re.findall(r"\(objecttype \?\w+ (\w+)\)", problem.partition("(:goal")[2].lower()))
        self._followed, self._done = 0, False
        return self._view(self._state.feedback.replace(GREETING, "")), self._info(valid=True)

    def step(self, action):
        """Raises RuntimeError after the end."""
        if self._done:
            raise RuntimeError("this episode is over: call reset()")
        command = parse_action(action, lambda line: line.lower() in self._state.admissible_commands).lower()
        valid = command in self._state.admissible_commands
        with _lock:
            self._state, _, _ = self._env.step(command)     # looks the text up among the valid commands, no more
        self._followed += valid and [command] == self._walkthrough[self._followed:self._followed + 1]
        self._done = bool(self._state.won)
        return self._view(invalid(self._state.feedback.strip(), action)), float(self._done), self._done, False, self._info(valid)

    def gold_action(self):
        """The walkthrough's command after those already followed, in order and with any others between. If it is not
        admissible here, the way back to where it is: the walkthrough's last "go to" before it. If that is not either
        (the hands are full with another thing, say), None: the walkthrough does not fit any more."""
        if self._done:
            return None
        here = self._state.admissible_commands
        wanted = self._walkthrough[self._followed:self._followed + 1]
        wanted += [command for command in self._walkthrough[:self._followed][::-1] if command.startswith("go to ")][:1]
        return next((command for command in wanted if command in here), None)

    def action_guidance(self):
        action = self.gold_action()
        return self.phrase([action]) if action else None

    def observation_enrichment(self):
        """Where you are, what you carry, and where each thing of the kinds that the task asks for is, closed places
        included: facts of the engine's state that are seen only after a search."""
        if self._done:
            return None
        facts = defaultdict(list)   # name -> the arguments of each
        for fact in self._state.facts:
            facts[fact.name].append(tuple(v.name.strip() for v in fact.arguments))

        def named(thing):
            states = [word for name, word in STATES.items() if (thing,) in facts[name]]
            return f"{thing} ({', '.join(states)})" if states else thing

        at = [loc for _, loc in facts["atlocation"]]
        here = sorted(r for r, loc in facts["receptacleatlocation"] if loc in at)
        lines = [f"You are at {' and '.join(here)}." if here else "You are in the middle of the room.",
                 f"You carry {', '.join(named(thing) for _, thing in facts['holds']) or 'nothing'}."]
        inside, closed = dict(facts["inreceptacle"]), set(facts["openable"]) - set(facts["opened"])
        for thing, kind in sorted(facts["objecttype"]):
            if kind in self._goal_types and thing in inside:
                shut = ", which is closed" if (inside[thing],) in closed else ""
                lines.append(f"{named(thing)} is at {inside[thing]}{shut}.")
        return " ".join(lines)

    def close(self):
        if self._env is not None:
            _idle.append(self._env)
        self._env, self._done = None, True

    def _view(self, feedback):
        text = feedback.strip()
        if self.admissible == "list" and not self._state.won:
            text += f"\nCommands: {' | '.join(self._state.admissible_commands)}."
        return text

    def _info(self, valid):
        return {"success": self._done, "valid": valid, "admissible": [] if self._done else self._state.admissible_commands}
