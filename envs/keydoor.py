"""KeyDoor: the built-in game, small enough to learn on a CPU in minutes and with what both papers need.

A house has coloured doors in a row. Each takes three stages in this order: take the key that fits, unlock the door,
open it. A turn lists `commands` commands in shuffled order; any text but the right command sets off the alarm and ends
the episode, so random play succeeds with probability commands ** -stages. The reward is 1 at the end of a success and
0 everywhere else.

    hidden rule     in one house (a family of tasks) a door's colour decides the metal of its lock, and only the key of
                    that metal fits. Every task of the house obeys it, so what one task teaches helps in the next.
    hidden state    the lock's metal, what is carried and how many stages are done are not in the standard observation;
                    `observation_enrichment` tells them.
    impossible      in a share of the tasks the command that the last stage needs is not listed. The right act there,
                    and only there, is "say impossible".

The task decides the house, the doors, the listed commands and whether it can be done; the seed decides their order.
"""
import random
from functools import lru_cache

from envs import BadInput, Env, refuse_unknown
from envs.action import invalid, parse_action

METALS = ["iron", "gold", "brass", "tin", "zinc", "lead", "steel", "silver"]
COLOURS = ["red", "blue", "green", "white", "black", "pink", "grey", "brown"]
HOUSES = ["ash", "elm", "oak", "fir", "yew", "bay", "fig", "rowan"]
SPLITS = ("test", "valid", "train")  # 10 %, 10 % and the rest of up to 1280 different tasks
GIVE_UP = "say impossible"


def lock_metal(house: str, colour: str) -> str:
    """The hidden rule: each house has its own one-to-one map from colours to metals."""
    return random.Random(f"rule of {house}").sample(METALS, len(METALS))[COLOURS.index(colour)]


@lru_cache
def build(stages: int, commands: int, families: int, colours: int, impossible: float) -> dict[str, dict[str, dict]]:
    """{split: {task id: content}}: different contents from one stream, cut into test, valid and train."""
    rng, contents = random.Random(0), {}
    for draw in range(12_800):
        house = HOUSES[draw % families]
        doors = [rng.choice(COLOURS[:colours]) for _ in range((stages + 2) // 3)]
        doable = rng.random() >= impossible
        lists = [listed(rng, house, doors[stage // 3], stage % 3, commands, doable or stage < stages - 1)
                 for stage in range(stages)]
        content = {"house": house, "doors": doors, "doable": doable, "lists": lists}
        contents[house, *doors, doable, *map(frozenset, lists)] = content
        if len(contents) == 1280:
            break
    if len(contents) < 10:
        raise BadInput(f"keydoor: these options make only {len(contents)} different tasks; raise stages, colours or families")
    tenth, contents = len(contents) // 10, list(contents.values())
    parts = contents[:tenth], contents[tenth:2 * tenth], contents[2 * tenth:]
    return {split: {f"{content['house']}/{split}-{number:04d}": content for number, content in enumerate(part)}
            for split, part in zip(SPLITS, parts)}


def right_command(house: str, door: str, kind: int) -> str:
    return [f"take {lock_metal(house, door)} key", f"unlock {door} door", f"open {door} door"][kind]


def listed(rng, house, door, kind, commands, doable) -> list[str]:
    """One stage's commands: the right one if it can be done, giving up, and wrong ones that look like it."""
    right = right_command(house, door, kind)
    alike = {0: [f"take {metal} key" for metal in METALS], 1: [f"unlock {colour} door" for colour in COLOURS],
             2: [f"open {colour} door" for colour in COLOURS]}[kind]
    other = [right_command(house, door, other) for other in range(3) if other != kind]
    wrong = [command for command in alike if command != right] + other
    return [GIVE_UP] + [right] * doable + rng.sample(wrong, commands - 1 - doable)


class KeyDoor(Env):
    """Options: stages >= 1, commands 3..10, families 1..8 (houses), colours 1..8, impossible in 0..1 (share).

    practice: for warm starts; every listed command, right or wrong, moves the game on, and nothing is ever a success.
    """

    system_prompt = "Open every door. Answer with one command."

    def __init__(self, stages: int = 3, commands: int = 4, families: int = 1, colours: int = 2, impossible: float = 0.0625,
                 practice: bool = False):
        for name, value, least, most in (("stages", stages, 1, 30), ("commands", commands, 3, 10),
                                         ("families", families, 1, len(HOUSES)), ("colours", colours, 1, len(COLOURS))):
            if not (isinstance(value, int) and least <= value <= most):
                raise BadInput(f"keydoor: {name} must be a whole number in {least}..{most}, got {value!r}")
        if not (isinstance(impossible, (int, float)) and 0 <= impossible <= 1):
            raise BadInput(f"keydoor: impossible is a share in 0..1, got {impossible!r}")
        self.options = (stages, commands, families, colours, impossible)
        self.stages, self.max_turns, self.practice = stages, stages + 2, practice
        self.stage, self.over = 0, True

    @classmethod
    def tasks(cls, split, stages=3, commands=4, families=1, colours=2, impossible=0.0625, practice=False):
        game = KeyDoor(stages, commands, families, colours, impossible)
        refuse_unknown("split", split, SPLITS)
        return list(build(*game.options)[split])

    def reset(self, *, task, seed):
        content = next((tasks[task] for tasks in build(*self.options).values() if task in tasks), None)
        if content is None:
            raise BadInput(f"keydoor has no task {task!r}: ids look like {HOUSES[0]}/train-0000")
        self.house, self.doors, self.doable = content["house"], content["doors"], content["doable"]
        self.lists = [random.Random(f"{task} {seed} {stage}").sample(commands, len(commands))
                      for stage, commands in enumerate(content["lists"])]
        self.stage, self.over = 0, False
        return f"You are in the {self.house} house.\n{self._view()}", self._info(valid=True)

    def step(self, action):
        if self.over:
            raise RuntimeError("the episode is over: call reset")
        command = parse_action(action, lambda line: line.lower() in self.lists[self.stage]).lower()
        valid = command in self.lists[self.stage]
        if not valid or (command != self.gold_action() and not self.practice):
            self.over = True
            return invalid("The alarm rings.", action), 0.0, True, False, self._info(valid)
        self.stage += 1
        if self.stage < self.stages:
            done = ["Taken.", "Unlocked.", "Opened."][(self.stage - 1) % 3]
            return f"{done}\n{self._view()}", 0.0, False, False, self._info(valid=True)
        self.over = True
        if self.practice:
            return "The end.", 0.0, True, False, self._info(valid=True)
        return "Right.", 1.0, True, False, self._info(valid=True, success=True)

    def gold_action(self):
        if self.over:
            return None
        if not self.doable and self.stage == self.stages - 1:
            return GIVE_UP
        return right_command(self.house, self.doors[self.stage // 3], self.stage % 3)

    def action_guidance(self):
        return None if self.over else self.phrase([self.gold_action()])

    def observation_enrichment(self):
        if self.over:
            return None
        door, kind = self.doors[self.stage // 3], self.stage % 3
        metal = lock_metal(self.house, door)
        state = [f"The lock of the {door} door is {metal}. You carry nothing.",
                 f"You carry the {metal} key. The {door} door is locked.",
                 f"You carry the {metal} key. The {door} door is unlocked."][kind]
        return f"{state} {self.stage} of {self.stages} stages are done."

    def _view(self):
        return f"Commands: {' | '.join(self.lists[self.stage])}.\nThe door here is {self.doors[self.stage // 3]}."

    def _info(self, valid, success=False):
        asked = not self.doable and self.stage >= self.stages - 1  # it has seen that the task cannot be done
        return {"success": success, "valid": valid, "admissible": [] if self.over else list(self.lists[self.stage]),
                "doable": self.doable, "abstain_turns": int(asked), "abstained": int(asked and success)}
