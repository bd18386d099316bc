"""An environment of your own in twenty lines: say three words in alphabetical order, one a turn.

    python grpo.py --env examples.my_env:MyEnv            # from the repository's root; makes a small model for it once
    python enrich.py --env examples.my_env:MyEnv          # an episode along the gold path, standard beside enriched
    python grpo.py --env examples.my_env:MyEnv --enrich ag-early

The contract is in envs/__init__.py. What training needs: `tasks`, `reset`, `step` and in `info` success and valid.
`admissible` lets `--model tiny` warm up on random play. The three methods at the end are for hints and warm starts.
"""
import random
from itertools import combinations

from envs import Env, parse_action

WORDS = ["apple", "bread", "cheese", "dates", "eggs", "figs", "grapes", "honey"]
TASKS = ["sort/" + "-".join(three) for three in combinations(WORDS, 3)]
SPLITS = {"train": TASKS[::2], "valid": TASKS[1::4], "test": TASKS[3::4]}


class MyEnv(Env):
    system_prompt = "Say the words in alphabetical order. Answer with one word."
    max_turns = 3

    @classmethod
    def tasks(cls, split):
        return SPLITS[split]

    def reset(self, *, task, seed):
        self.left = sorted(task.partition("/")[2].split("-"))
        self.shown = random.Random(f"{task} {seed}").sample(self.left, len(self.left))
        return f"Words: {' | '.join(self.shown)}.", self._info()

    def step(self, action):
        word, self.right = parse_action(action), self.left.pop(0)
        over = word != self.right or not self.left
        info = self._info(valid=word in self.shown, success=word == self.right and over)
        return "Wrong." if word != self.right else "Yes.", float(info["success"]), over, False, info

    def _info(self, valid=True, success=False):
        return {"success": success, "valid": valid, "admissible": self.shown}

    def gold_action(self):
        return self.left[0] if self.left else None

    def action_guidance(self):
        return self.phrase(self.left[:1]) if self.left else None

    def observation_enrichment(self):
        return f"{len(self.left)} words are left." if self.left else None
