"""ALFWorld: household tasks in a text world, played by the real engine on the real games.

Benchmark: Shridhar et al., "ALFWorld", arXiv 2010.03768; packages `alfworld` 0.4.2 and `textworld` 1.7 (a PDDL planner's
state behind a grammar), of the text games only: no pictures, no 3D simulator. The Experience Funnel (arXiv 2609.08919)
is tried on it, 50 turns an episode. Six task types, such as "put a hot apple in the fridge"; a turn is one command.

    pip install --no-deps -r envs/alfworld-requirements.txt     # compiles: apt-get install build-essential cmake
    alfworld-download                                           # the games, to $ALFWORLD_DATA or ~/.cache/alfworld

Task ids are `<task type>/<object>-<...>-<scene>/<trial>`. Splits are the benchmark's: train, valid (its valid_seen, rooms
that training knows) and test (its valid_unseen, new rooms); as officially, without games that are marked unsolvable, with
movable receptacles or with sliced objects. `paths=DIR` takes the games that DIR/{train,val,test}/items.json list instead, records
with a "gamefile" such as "json_2.1.1/train/.../game.tw-pddl": the form of SkillOpt's released alfworld_path_split, 39 / 18 / 134
games (microsoft/SkillOpt, data/), on which it is tried in arXiv 2605.23904. Reward: 1 on the turn that reaches the goal, else 0.
An invalid command is answered "Nothing happens." and costs a turn. As in SkillOpt's released code the policy is asked to reason
step by step and then to write <action></action>, and a text in which no command can be read is played as `look`; here the
observation says so, the turn still counts as invalid, and commands without a tag are read too (docs/actions.md).

Deviations, all ours
 1. The admissible commands stand in the observation (admissible="list"); the benchmark leaves that to the agent.
 2. Letter case does not matter: the engine's names are all lower case. The engine's greeting line is left out.
 3. Hints are ours, the benchmark has none. Guidance: the walkthrough that is stored with the game. Enrichment: facts of
    the engine's state. Neither is read anywhere else, and a game without a walkthrough has no guidance.
 4. The package grounds a game's PDDL four times for one start, about 0.4 s each: twice over, for play and for a planner that
    is not used here. Once is enough, and it is kept for the process (the last GROUNDED games). What is kept is text
    and operators that are only read; each instance has its own copy of the engine's state.
 5. By default a prompt holds the first observation and the last 5 turns (`--history recent:5`), a conversation whose past observations
    have no list of commands. SkillOpt's prompt is one message with the last 2 observations and commands, without the reasoning.
    In random and gold play of 24 games with actions of 512 tokens, the largest of all prompts had 3,683 tokens of Qwen3's tokenizer
    (5,331 with the lists of past observations, and a quarter more in all); so 50 turns fit into 8,192 with a state of 13,000
    characters, about 3,000 tokens.
 6. What an editor reads of an episode (`reflection`) has commands and answers, and neither reasoning nor lists: 50 turns take at most
    5,550 characters in the same play.
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

from envs import BadInput, Env, refuse_unknown, without_list
from envs.action import invalid, parse_action

SPLITS = {"train": "train", "valid": "valid_seen", "test": "valid_unseen"}
TASK_TYPES = ("pick_and_place_simple", "look_at_obj_in_light", "pick_clean_then_place_in_recep",
              "pick_heat_then_place_in_recep", "pick_cool_then_place_in_recep", "pick_two_obj_and_place")
GREETING = "-= Welcome to TextWorld, ALFRED! =-"
STATES = {"isclean": "clean", "ishot": "hot", "iscool": "cool", "istoggled": "on"}     # a fact's name -> how we say it
COMMAND = re.compile(r"look|inventory|help|(?:go to|open|close|take|move|put|use|clean|heat|cool|slice|examine) .+", re.IGNORECASE)
HELP = re.compile(r"\s*Available commands:(\n  .*)+")     # the answer to "help"
LOOKED = "No command could be read, so you look."
GROUNDED = 32   # games whose grounding is kept: about 5 MB each

PROMPT = """You are in a house, and you have a task to carry out there. Each turn, first think step by step about what you see, \
what is done and what is left to do; then write one command inside <action></action>."""
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


@functools.cache
def listed_games(path: Path, paths: str, split: str) -> dict[str, Path]:
    """The games of a split by a published list, in its order. Raises BadInput."""
    file = Path(paths).expanduser() / {"valid": "val"}.get(split, split) / "items.json"
    try:
        parts = [Path(item["gamefile"]).parts[-4:] for item in json.loads(file.read_text(encoding="utf-8"))]
        names = [re.fullmatch("(.+?)-(.+)", name).groups() for _, name, _, _ in parts]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadInput(f"alfworld: paths={paths} needs {file.parent.name}/items.json, a list of records with a \"gamefile\" such as "
                       f"json_2.1.1/train/TYPE-OBJECT-SCENE/TRIAL/game.tw-pddl ({error!r})") from error
    found = {f"{kind}/{rest}/{game[2]}": path.joinpath(*game) for (kind, rest), game in zip(names, parts)}
    missing = [game for game in found.values() if not game.exists()]
    if missing:
        raise BadInput(f"alfworld: {len(missing)} of the {len(found)} games of {file} are not there, such as {missing[0]}: run "
                       "alfworld-download")
    return found


class ALFWorld(Env):
    """Options: data (the folder of alfworld-download), paths (a folder of lists of games, see above), admissible "list" (in the
    observation) or "none" (command templates in the system prompt instead). `info["admissible"]` lists the valid commands in both."""

    max_turns = 50
    defaults = {"history": "recent:5", "max_context": 8192, "max_new_tokens": 512}
    analyst_note = ("\"Nothing happens.\" means that the command was not possible at that moment. Lists of possible commands are left "
                    "out here, and so is the agent's reasoning.")

    def __init__(self, data=None, admissible="list", paths=None):
        refuse_unknown("admissible", admissible, ("list", "none"))
        engine()
        self.folder, self.admissible, self.paths = folder(data), admissible, paths
        self.system_prompt = PROMPT + (TEMPLATES if admissible == "none" else "")
        self._env, self._done = None, True

    @classmethod
    def tasks(cls, split, data=None, paths=None):
        """Task ids in order. The full data have 3553 / 140 / 134 games."""
        refuse_unknown("split", split, SPLITS)
        return list(listed_games(folder(data), str(paths), split) if paths else games(folder(data), split))

    def reset(self, *, task, seed):
        """Any seed gives the same episode. Raises BadInput for a task that is not there or a file that is damaged."""
        splits = [listed_games(self.folder, str(self.paths), split) if self.paths else games(self.folder, split) for split in SPLITS]
        files = {task: file for split in splits for task, file in split.items()}
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
            self._state, _, _ = self._env.step(command or "look")   # looks the text up among the valid commands, no more
        feedback = self._state.feedback.strip() if command else f"{LOOKED}\n{self._state.feedback.strip()}"
        self._followed += valid and [command] == self._walkthrough[self._followed:self._followed + 1]
        self._done = bool(self._state.won)
        return self._view(invalid(feedback, action)), float(self._done), self._done, False, self._info(valid)

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

    def reflection(self, trajectory):
        """The command of each turn, or the end of a text that holds none, and what came of it."""
        first, *lists = [*(turn.listed for turn in trajectory.turns), trajectory.info.get("listed")]
        shown = [without_list(trajectory.first_observation, first)]
        for turn, listed in zip(trajectory.turns, lists):
            command = parse_action(turn.action, COMMAND.fullmatch) or f"(no command) {turn.action[-100:].strip()}"
            shown.append(f"> {command[:200]}\n{HELP.sub('(a list of commands)', without_list(turn.observation, listed))}")
        return "\n".join(shown)

    def _view(self, feedback):
        return "\n".join([feedback.strip(), *filter(None, [self._listed()])])

    def _listed(self):
        over = self.admissible != "list" or self._state.won
        return None if over else f"Commands: {' | '.join(self._state.admissible_commands)}."

    def _info(self, valid):
        listed = self._listed()
        return {"success": self._done, "valid": valid, "admissible": [] if self._done else self._state.admissible_commands,
                **({"listed": listed} if listed else {})}
