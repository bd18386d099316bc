"""ScienceWorld: elementary-school science experiments in a text world of ten rooms, as FEE uses it.

Benchmark: Wang et al., "ScienceWorld", arXiv 2203.07540; package `scienceworld` 1.2.3 (Python around a simulator in Scala,
so it needs Java). Hints: FEE, arXiv 2609.08404. Thirty tasks; a variation fixes the objects and their places. The score
runs from 0 to 100 by sub-goals, and focusing on a wrong object ends the episode at -100.

Deviations from FEE's setting
 1. Turn limits are the caller's: the package's own step limit is not used.
 2. The list of available actions is a list of templates in the system prompt, and the names of the objects at hand
    in each observation. Every valid action in full would be 300-1200 lines a turn: ask `admissible_actions()`.
 3. guidance="next" is ours: the paper shows the first three gold actions whatever was done since. Gold steps that open what is open
    already change nothing but the clock and are left out, as the released code leaves out "open door" before "go to" in its hints
    (under "easy" these are all such steps); here also in gold play, but not in identify-life-stages-*, where the clock decides: a
    path that is a move early finds no adult tree. The caution's words are ours.
 4. Goal progress loses the simulator's class names. It still lists the goals that are open, so it leaks a plan.
Deviations from the package, all in how it is driven
 5. An ambiguous request ("Please enter the number...") is answered 0 in the same turn, as the simulator's own
    gold agent does. Its gold paths hold these answers as actions of their own: they are left out.
 6. The simulator keeps its random stream, its object numbers and its simplifications for the whole JVM, so instances would
    disturb one another: they are set before every step, from (task, variation, turn) alone. And it walks through sets in
    the order of Java's identity hashes, so descriptions, wandering animals and gold paths differ from load to load: the
    JVM is told to make these hashes equal (-XX:hashCode=2), which leaves the order of insertion. An episode is then a
    function of (task, variation, actions), whatever else runs and in every process.
 7. The simulator's own list of valid actions, which `admissible_actions()` hands on, holds some that it then refuses: 88 of 444 drawn at
    random (15 tasks, after 0, 3 and 8 random actions), most of them "move", "pour" and "dunk". A warm start on random play
    teaches these too; a refused action costs a turn and no score.
"""
import atexit
import contextlib
import json
import os
import random
import re
import shutil
import threading

from envs import BadInput, Env, refuse_unknown
from envs.action import invalid, parse_action

SIMPLIFICATIONS = ("teleportAction", "selfWateringFlowerPots", "openContainers", "openDoors", "noElectricalAction")
SPLITS = {"train": "getVariationsTrain", "valid": "getVariationsDev", "test": "getVariationsTest"}
AMBIGUOUS = "Ambiguous request"
MOVE_LIMIT = 100    # the package's own `envStepLimit`; it does not end an episode here, and counts in `success_released_rule` alone

PROMPT = """You are an agent in a text world of ten rooms, and you have a science task to carry out there.
Each turn, answer with one action: alone on one line, or inside <action></action>."""
TEMPLATES = """
Actions, where OBJ is the name of an object (you may think first if you put the action in <action></action>):
look around | look at OBJ | look in OBJ | read OBJ | inventory | task
go to OBJ | open OBJ | close OBJ
pick up OBJ | put down OBJ | move OBJ to OBJ | pour OBJ in OBJ | dunk OBJ in OBJ | mix OBJ
activate OBJ | deactivate OBJ | use OBJ on OBJ | eat OBJ | flush OBJ
focus on OBJ (to point out what the task asks for, and nothing else: a wrong object ends the task in failure)
wait (ten moments) | wait1 (one moment)"""
TELEPORT = "\nteleport to ROOM"
ELECTRICAL = "\nconnect OBJ to OBJ | disconnect OBJ (only where the task is about electricity)"
COMMAND = re.compile(       # tells a command from prose; what is valid the simulator says
    "look|look around|inventory|task|wait1?|(look at|look in|read|examine|go|teleport to|open|close|pick up|put down|mix|activate|"
    "deactivate|use|eat|flush|focus on|disconnect) OBJ|(move|pour|dunk|use|connect) OBJ (to|in|into|on) OBJ"
    .replace("OBJ", r"[\w ]{1,120}"), re.IGNORECASE)

_lock = threading.RLock()   # around every use of the JVM: calls from two threads at once corrupt its state silently
_java = None                # the JVM of this process, started by the first call that needs it
_gold: dict[tuple[str, int, str], list[str]] = {}   # (task, variation, simplifications) -> gold actions
TARGETS = {"lifespan-longest-lived": ("long",), "lifespan-shortest-lived": ("short",),
           "lifespan-longest-lived-then-shortest-lived": ("long", "short")}     # what the simulator calls the right animals


class SimulatorDied(RuntimeError):
    """The JVM is gone, and this episode with it; the next `reset` starts a fresh one."""


class _Java:
    """One JVM for all instances of the process (a JVM each takes over 300 MB)."""

    def __init__(self):
        if shutil.which("java") is None:
            raise BadInput("ScienceWorld's simulator needs Java: apt-get install default-jre-headless")
        try:
            from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
            from scienceworld.constants import BASEPATH, JAR_PATH
        except ModuleNotFoundError as error:
            raise BadInput("environment 'sciworld' needs the package 'scienceworld': pip install scienceworld") from error
        options = ["-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2"]
        if not {"JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS"} & set(os.environ):     # ours would override the user's own
            options += ["-Xmx4g", "-XX:+UseSerialGC"]                           # a cap; 64 instances need 2 GB
        try:
            port, self.process = launch_gateway(classpath=JAR_PATH, cwd=BASEPATH, die_on_exit=True, return_proc=True,
                                                javaopts=options)
        except ValueError as error:     # it printed no port
            raise BadInput("Java did not start: see what `java -version` says, and JAVA_TOOL_OPTIONS") from error
        atexit.register(self.stop)
        self.gateway = JavaGateway(gateway_parameters=GatewayParameters(auto_field=True, port=port))
        self.jvm = self.gateway.jvm
        self.random = getattr(getattr(self.jvm.scala.util, "Random$"), "MODULE$")
        self.numbers = self.jvm.util.UniqueIdentifier
        self.simplifier = self.jvm.main.scala.scienceworld.runtime.SimplifierProcessor
        self.simplifications = None     # those now set
        self.interface = self.jvm.scienceworld.runtime.pythonapi.PythonInterface
        self.catalogue = self.interface()

    def stop(self):
        self.gateway._gateway_client.is_connected = False   # py4j's finalizers would log an error for each object
        self.process.kill()
        self.process.wait()

    def load(self, server, name, variation, simplifications, gold=False):
        """A fresh episode in `server`. Without gold 15-55 ms; with it up to 30 s (mendelian-genetics-*)."""
        error = server.load(name, variation, simplifications, gold)
        self.simplifications = server.getSimplificationsUsed()
        if error:
            raise RuntimeError(f"ScienceWorld could not load {name}/{variation}: {error}")
        # Not touched by load, nor by the commands "help", "objects" and "task": a won episode would be won again.
        getattr(server, "score_$eq")(0.0)
        getattr(server, "isComplete_$eq")(False)

    def place(self, simplifications, task, turn):
        """Set what the simulator holds once for all its instances."""
        if simplifications != self.simplifications:
            self.simplifier.parseSimplificationStr(simplifications)
            self.simplifications = simplifications
        self.random.setSeed(random.Random(f"{task} {turn}").getrandbits(47))
        getattr(self.numbers, "count_$eq")(10_000_000 + 10_000 * turn)      # above any number given at load


@contextlib.contextmanager
def _shared_java(java=None):
    """The JVM with its lock held: `java` if that one is still alive, or (None) the process's, started if need be."""
    global _java
    with _lock:
        if java is None:
            if _java is None or _java.process.poll() is not None:
                _java = _Java()
            java = _java
        elif java.process.poll() is not None:
            raise SimulatorDied("ScienceWorld's JVM has died: reset() starts a new one")
        from py4j.protocol import Py4JError, Py4JJavaError
        try:
            yield java
        except Py4JJavaError:   # an exception inside Java: the JVM lives on
            raise
        except Py4JError as error:
            java.stop()         # it may hang instead of being dead
            raise SimulatorDied(f"ScienceWorld's JVM no longer answers: reset() starts a new one ({error})") from error
        except Exception:
            raise
        except BaseException:   # cut off in the middle of a call: the next one would get this one's answer
            java.stop()
            raise


class SciWorld(Env):
    """Task ids `find-plant/12`: task name / variation number.

    simplifications  "easy" (the paper's), "none", or some of SIMPLIFICATIONS joined by commas. The simulator's "easy"
                     is all of them but openContainers, and noElectricalAction not where the task is electrical.
    reward           "binary": 1 on the turn that brings the score to 100, else 0. "score": what the score gained
                     this turn / 100, so that the return is the final score / 100.
    admissible       "none"; "templates": action templates in the system prompt, object names in the observation;
                     "full": that and `info["admissible"]`, every valid action (slow: 30-300 ms a turn).
    guidance         "first-three" (the paper's) or "next" (ours), see `action_guidance`.
    held_out         animals joined by commas ("elephant,parrot"), ours: only the lifespan-* tasks are left, and those whose
                     right answer is such an animal are the test tasks, all of them; train and valid have none of them.

    Gold paths are cached for the process by (task, variation, simplifications), each made when first asked for
    in an interface of its own: a hint cannot touch the episode, and an episode without hints pays nothing.
    """

    max_turns = 15  # FEE's limit

    def __init__(self, simplifications="easy", reward="binary", admissible="templates", guidance="first-three", held_out=""):
        chosen = [] if simplifications == "none" else str(simplifications).split(",")
        if chosen != ["easy"] and not set(chosen) <= set(SIMPLIFICATIONS):
            raise BadInput(f"simplifications={simplifications!r}: use easy, none, or some of {','.join(SIMPLIFICATIONS)}")
        refuse_unknown("reward", reward, ("binary", "score"))
        refuse_unknown("admissible", admissible, ("none", "templates", "full"))
        refuse_unknown("guidance", guidance, ("first-three", "next"))
        self.simplifications, self.reward, self.admissible, self.guidance = ",".join(chosen), reward, admissible, guidance
        self.system_prompt = PROMPT
        if admissible != "none":
            self.system_prompt += TEMPLATES
            self.system_prompt += TELEPORT if {"easy", "teleportAction"} & set(chosen) else ""
            self.system_prompt += ELECTRICAL if "noElectricalAction" not in chosen else ""
        self._java = self._server = None
        self._done = True

    @classmethod
    def tasks(cls, split, simplifications="easy", held_out=""):
        """ScienceWorld's own split, 3592 / 1796 / 1819 task ids. Loads no task: 0.2 s. Without its electrical tasks where
        `simplifications` takes their actions away. With `held_out` the split is that of the targets."""
        refuse_unknown("split", split, SPLITS)
        found = {part: [] for part in SPLITS}
        with _shared_java() as java:
            for name in java.catalogue.getTaskNames():
                if cannot_be_done(name, simplifications):
                    continue
                getattr(java.catalogue, "taskStr_$eq")(name)    # all that the simulator's split depends on
                for part, variations in SPLITS.items():
                    numbers = json.loads(getattr(java.catalogue, variations)().toString())
                    found[part] += [f"{name}/{n}" for n in numbers]
            if not held_out:
                return found[split]
            apart, right = {animal.strip() for animal in str(held_out).split(",")}, {}
            for name, number in (task.split("/") for tasks in found.values() for task in tasks):
                if name in TARGETS:     # the animals that it asks for, from the table that the simulator builds it by
                    maker = java.catalogue.taskMaker().getTask(name).get()
                    parts = maker.getCombination(int(number))
                    right[f"{name}/{number}"] = {maker.getTaskValueStr(parts, part).get() for part in TARGETS[name]}
        known = set().union(*right.values())
        if not apart < known:
            raise BadInput(f"held_out={held_out!r}: name some of {', '.join(sorted(known))}, not all")
        if split == "test":
            return [task for task in right if right[task] & apart]
        return [task for task in found[split] if task in right and not right[task] & apart]

    def reset(self, *, task, seed):
        """Any seed gives the same episode. Raises BadInput for a task that does not exist."""
        name, _, number = task.partition("/")
        with _shared_java() as java:
            count = java.catalogue.getTaskMaxVariations(name)   # -1: no such task
            if count < 0:
                raise BadInput(f"unknown task {name!r}; there are: {', '.join(java.catalogue.getTaskNames())}")
            if not number.isdecimal() or int(number) >= count:
                raise BadInput(f"task {task!r}: write {name}/N with N from 0 to {count - 1}")
            if cannot_be_done(name, self.simplifications):
                raise BadInput(f"task {task!r} cannot be done with simplifications={self.simplifications!r}")
            if self._java is not java:
                self._java, self._server = java, java.interface()
            self._task, self._loaded = task, (name, int(number), self.simplifications)
            self._actions, self._turns, self._score, self._done, self._released = [], 0, 0, False, None
            java.load(self._server, *self._loaded)
            self._simplified = java.simplifications
            java.place(self._simplified, task, 0)
            text = f"{self._server.getTaskDescription().strip()}\n\n{self._server.freeActionLook().strip()}\n\n"
            text += self._server.freeActionInventory().strip() if self.admissible == "none" else self._at_hand()
        return text.strip(), self._info(success=False, valid=True, score=0, moves=0)

    def step(self, action):
        """`info` adds `score` (0..100, -100 after a wrong focus), `moves` (the simulator's clock: looking around and
        invalid actions cost none, "wait" costs 11), `turns` and `success_released_rule`: whether the score was above 0 when
        FEE's released code would have ended the episode, at the simulator's end or after MOVE_LIMIT moves. Raises SimulatorDied
        if the JVM has, RuntimeError if it failed inside or if the episode is over: after its end the simulator would answer on."""
        if self._done:
            raise RuntimeError("this episode is over: call reset()")
        command = parse_action(action, COMMAND.fullmatch)
        with self._placed(self._turns + 1):
            self._turns += 1
            text = self._server.step(command)
            while text.startswith(AMBIGUOUS):
                text = self._server.step("0")
            score = round(100 * self._server.getScore())
            success = score >= 100
            terminated = success or score < 0 or self._server.getCompleted()
            if score < 0 and self._server.agentInterface().get().isInErrorState():
                self._done = True
                raise RuntimeError(f"ScienceWorld failed inside in {self._task}: {text}")
            moves = self._server.getNumMoves()
            valid = text.strip() != "No known action matches that input."
            text = invalid(text.strip(), action)
            if not terminated and self.admissible != "none":
                text += f"\n\n{self._at_hand()}"
        self._done = terminated
        self._actions.append(command)
        if self._released is None and (terminated or moves > MOVE_LIMIT):
            self._released = score > 0
        gained, self._score = score - self._score, score
        reward = gained / 100 if self.reward == "score" else float(success)
        return text, reward, terminated, False, self._info(success=success, valid=valid, score=score, moves=moves)

    def admissible_actions(self):
        """Every action that the simulator lists as valid now (see 7), sorted: 300-1200 of them, in 30-300 ms. Empty after the end.
        "reset task" is left out: it takes back the goals reached."""
        if self._done:
            return []
        with self._placed(self._turns) as java:
            actions = java.jvm.java.lang.String.join("\n", self._server.getValidActionObjectCombinations())
        return sorted(set(actions.split("\n")) - {"reset task"})

    def action_guidance(self):
        """A caution and three gold actions: the first three of the path ("first-three"), or those that follow what
        was done of it so far ("next"). None without a gold path, or with nothing left to say."""
        path = self._gold_path()
        actions = without_openings(path, self.simplifications) if self.guidance == "first-three" else self._gold_left()
        return self.phrase(actions[:3]) if actions else None

    def phrase(self, actions):
        lead = "Begin" if self.guidance == "first-three" else "Go on"
        return f"Caution! {lead} with these actions, in this order: {', then '.join(actions)}."

    def observation_enrichment(self):
        """The simulator's list of sub-goals, reached and open."""
        if self._done:
            return None
        with self._placed(self._turns):
            progress = self._server.getGoalProgressStr()
        rows = [line.split("\t") for line in progress.splitlines() if line.count("\t") == 3]   # number, reached, class, text
        goals = [f"[{'x' if reached.strip() == 'true' else ' '}] {text.strip()}" for _, reached, _, text in rows]
        return "Goals ([x] is reached):\n" + "\n".join(goals) if goals else None

    def gold_action(self):
        """The gold action after those taken so far; None at the end. The path was found without the others that were
        taken between, and time may make it stale: a plant grows and changes its name. A step that the simulator has refused
        is behind us too, or it would be named for ever."""
        return next(iter(self._gold_left()), None)

    def close(self):
        """Lets go of this instance; the JVM stays for the others and ends with the process."""
        self._java = self._server = None
        self._done = True

    @contextlib.contextmanager
    def _placed(self, turn):
        with _shared_java(self._java) as java:
            java.place(self._simplified, self._task, turn)
            yield java

    def _at_hand(self):
        """Names that actions can use here, and what is carried. About 50 words."""
        here = [name for name in self._server.getPossibleObjects() if name not in ("agent", "air")]
        carried = [line.strip() for line in self._server.freeActionInventory().splitlines()[1:] if line.strip()]
        return f"Objects here: {', '.join(here)}\nYou carry: {', '.join(carried) or 'nothing'}"

    def _info(self, **facts):
        info = {**facts, "turns": self._turns, "success_released_rule": bool(self._released)}
        if self.admissible == "full":
            info["admissible"] = self.admissible_actions()
        return info

    def _gold_path(self):
        if self._done:
            return []
        if self._loaded not in _gold:
            with _shared_java(self._java) as java:
                if self._loaded not in _gold:    # made by another thread meanwhile
                    server = java.interface()
                    java.load(server, *self._loaded, gold=True)
                    actions = [action for action in server.getGoldActionSequence() if not action.isdecimal()]
                    timed = self._loaded[0].startswith("identify-life-stages")
                    _gold[self._loaded] = actions if timed else without_openings(actions, self.simplifications)
        return _gold[self._loaded]

    def _gold_left(self):
        """The path after the actions taken so far, in order and with any others between."""
        path, done = self._gold_path(), 0
        for action in self._actions:
            done += done < len(path) and action.lower().split() == path[done].lower().split()
        return path[done:]


def without_openings(path: list[str], simplifications: str) -> list[str]:
    """The path without the steps that open what the simplifications have opened; after the first closing they stay, as a door
    has another name from its other side."""
    chosen, kept = set(simplifications.split(",")), []
    is_open = {"door": bool(chosen & {"easy", "openDoors"}), "container": "openContainers" in chosen}
    for action in path:
        verb, _, thing = action.partition(" ")
        kind = "door" if thing.startswith("door") else "container"
        is_open[kind] &= verb != "close"
        if verb != "open" or not is_open[kind]:
            kept.append(action)
    return kept


def cannot_be_done(name: str, simplifications: str) -> bool:
    """An electrical task without electrical actions."""
    return "noElectricalAction" in simplifications and ("power-component" in name or "conductivity" in name)
