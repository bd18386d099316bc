"""Feedback-Enriched Environments (FEE): hints in the environment's feedback while training, none in evaluation.
arXiv 2609.08404.

    python enrich.py --env keydoor                       # an episode, standard feedback beside enriched; the schedule
    python grpo.py --enrich hybrid --enrich-late 4,5     # train with it
    python enrich.py --prompts --model FOLDER            # the same episode as a model reads it, and its rows
    python enrich.py --study --quick                     # strategies against each other (study.py)
    from enrich import EnrichedEnv, feedback_kind, group_is_enriched    # needs the standard library alone

Only observations change: o+ = E(o, h). Rewards, transitions, admissible actions and the number of turns are those of
the wrapped environment, and hints are context, never trained on. There are two kinds of hint h: action guidance says
what to do, observation enrichment says what the standard observation hides. The environment supplies
the texts of both; this file decides when and for whom they are shown, and contains no code of a benchmark:

    when in an episode     turns 1-3 ("early") or 6-10 ("late")
    when in training       all of it, or guidance first and enrichment from the middle on ("hybrid")
    for whom               one coin per group: its episodes are all enriched, or none is

What differs from the paper, and from its released code, which has other faults (docs/enrich.md):
1. A turn is one action of the agent in every environment; on BFCL the released code counts the user's turns.
2. The coin has its own random stream. In the released code it follows the choice of tasks on BFCL, and on ScienceWorld
   there is none: the first half of the slots is enriched.
3. Ours, not the paper's: the controls (reversed, ag-always, oe-always, both, wrong-hint), `--enrich-anneal`,
   `--enrich-positive-only` and `--enrich-train-context` (rl/stripped.py).
"""
import math
import random
from dataclasses import dataclass, replace

STRATEGIES = {  # (what is shown, in which turns); a second pair holds after the switch
    "none": [(None, "always")],
    "ag-early": [("guidance", "early")],
    "ag-late": [("guidance", "late")],
    "oe-early": [("enrichment", "early")],
    "oe-late": [("enrichment", "late")],
    "hybrid": [("guidance", "early"), ("enrichment", "late")],
    "reversed": [("enrichment", "late"), ("guidance", "early")],  # from here on controls, ours
    "ag-always": [("guidance", "always")],
    "oe-always": [("enrichment", "always")],
    "both": [("both", "always")],
    "wrong-hint": [("guidance", "early")],  # EnrichedEnv lets it name an action that is not the right one
}


def feedback_kind(strategy, step, total_steps, turn, *, early=(1, 3), late=(6, 10), switch=0.5):
    """What the observation before action `turn` of training step `step` shows: "guidance", "enrichment", "both", None.

    Steps and turns count from 1, windows include both ends. The defaults are the paper's, turns 1-3 and 6-10, and a
    switch after half of the steps (100 of 200). The released code differs: guidance in turns 1-4 on ScienceWorld and in
    the first 3 user turns on BFCL; enrichment in turns 7-11 on ScienceWorld and after every tool call on BFCL.
    Raises ValueError for an unknown strategy and for windows that make no sense.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}: --enrich takes one of {', '.join(STRATEGIES)}")
    for name, (first, last) in (("early", early), ("late", late)):
        if not 1 <= first <= last:
            raise ValueError(f"--enrich-{name} {first},{last} holds no turn: write FIRST,LAST with 1 <= FIRST <= LAST")
    phases = STRATEGIES[strategy]
    if len(phases) > 1 and not (early[0] <= late[0] and early[1] <= late[1]):
        raise ValueError(f"--enrich {strategy} wants the late window after the early one, got {late[0]},{late[1]} and "
                       f"{early[0]},{early[1]}: change --enrich-early or --enrich-late")
    if not 0 <= switch <= 1:
        raise ValueError(f"--enrich-switch is a share of training in 0..1, got {switch}")
    kind, window = phases[0] if step <= switch * total_steps + 1e-9 else phases[-1]
    first, last = {"early": early, "late": late, "always": (1, math.inf)}[window]
    return kind if first <= turn <= last else None


def group_is_enriched(seed, step, group, probability=0.5) -> bool:
    """The coin of section 5.4: one for all episodes of a group. A stream of its own, so it knows nothing of the task."""
    return random.Random(f"enrich {seed} {step} {group}").random() < probability


def rollout_is_enriched(seed, step, group, rollout, probability=0.5) -> bool:
    """The paper's ablation (`--enrich-mixed`): a coin for each episode of a group."""
    return random.Random(f"enrich {seed} {step} {group} {rollout}").random() < probability


@dataclass(frozen=True)
class Schedule:
    """A strategy with its options, at one training step: environments ask `kind`, the training loop asks `enriched`."""
    strategy: str = "none"
    total_steps: int = 1
    early: tuple[int, int] = (1, 3)
    late: tuple[int, int] = (6, 10)
    switch: float = 0.5
    seed: int = 0
    probability: float = 0.5
    mixed: bool = False
    half: bool = False  # of each group exactly half, as the released code has its mixed groups
    anneal: bool = False  # ours: the probability falls linearly, from `probability` in step 1 to 0 in the last
    step: int = 1

    def __post_init__(self):
        self.kind(1)  # raises ValueError for what it does not know
        if not 0 <= self.probability <= 1:
            raise ValueError(f"--enrich-probability must lie in 0..1, got {self.probability}")
        if self.half and (self.mixed or self.anneal or self.probability != 0.5):
            raise ValueError("--enrich-half hints exactly half of every group: leave out --enrich-mixed, --enrich-anneal and "
                             "--enrich-probability")

    def at(self, step):
        """The same schedule at another training step."""
        return replace(self, step=step)

    def kind(self, turn):
        """What the observation before action `turn` of an enriched episode shows in this step."""
        return feedback_kind(self.strategy, self.step, self.total_steps, turn, early=self.early, late=self.late,
                             switch=self.switch)

    def enriched(self, group, rollout) -> bool:
        """Is this episode of this step enriched?"""
        if self.strategy == "none":
            return False
        if self.half:  # the even ones: the episodes of a group differ by the sampling alone, so any half is as good
            return rollout % 2 == 0
        left = (self.total_steps - self.step) / max(self.total_steps - 1, 1) if self.anneal else 1.0
        if self.mixed:
            return rollout_is_enriched(self.seed, self.step, group, rollout, self.probability * left)
        return group_is_enriched(self.seed, self.step, group, self.probability * left)

    def wrap(self, envs) -> list:
        """The environments as this step shows them."""
        return [EnrichedEnv(env, self) for env in envs]

    def why_no_hints(self, env, tasks, max_turns) -> str:
        """Why no hint of this strategy would ever be shown in training, or "". Plays a few `tasks` to find out."""
        for kind, window in STRATEGIES[self.strategy] if self.strategy != "none" else []:
            first = {"early": self.early[0], "late": self.late[0], "always": 1}[window]
            if first > max_turns:
                return (f"--enrich {self.strategy}: the window --enrich-{window} begins in turn {first}, and an "
                        f"episode has {max_turns} turns at most: choose an earlier one")
            for wanted in ("guidance", "enrichment") if kind == "both" else (kind,):
                always = {"guidance": "ag-always", "enrichment": "oe-always"}[wanted]
                probe = EnrichedEnv(env, Schedule("wrong-hint" if self.strategy == "wrong-hint" else always))
                if not any("hint" in info for task in tasks[:8] for _, info, _ in walk(probe, task, enriched=True)):
                    what = "list of wrong actions beside a right one" if self.strategy == "wrong-hint" else f"{wanted} hint"
                    return (f"--enrich {self.strategy}: the environment has no {what} in its first tasks: "
                            f"choose another --enrich, or none")
        return ""


class EnrichedEnv:
    """Any environment, with hints appended to the observations of enriched episodes: `reset(..., enriched=True)`.

    Everything else, from `system_prompt` to `close`, is the wrapped environment's. Where an observation carries a hint,
    `info["hint"]` holds it: the observation is then the plain one + "\\n" + the hint.
    """

    def __init__(self, env, schedule):
        self.env, self.schedule, self.is_enriched = env, schedule, False

    def __getattr__(self, name):
        return getattr(self.env, name)

    def reset(self, *, task, seed, enriched=False):
        self.is_enriched, self.turn, self.rng = enriched, 1, random.Random(f"wrong hint {task} {seed}")
        return self._hinted(*self.env.reset(task=task, seed=seed))

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.turn += 1
        if not (terminated or truncated):
            observation, info = self._hinted(observation, info)
        return observation, reward, terminated, truncated, info

    def _hinted(self, observation, info):
        """The observation before action `turn`, and its info."""
        kind, hints = self.schedule.kind(self.turn) if self.is_enriched else None, []
        if kind in ("guidance", "both"):
            wrong = self.schedule.strategy == "wrong-hint"
            hints.append(self._wrong_guidance(info) if wrong else self.env.action_guidance())
        if kind in ("enrichment", "both"):
            hints.append(self.env.observation_enrichment())
        hint = "\n".join(filter(None, hints))
        return (f"{observation}\n{hint}", {**info, "hint": hint}) if hint else (observation, info)

    def _wrong_guidance(self, info):
        """A hint in the environment's own words that names an admissible action other than the right one, or None."""
        gold = self.env.gold_action()
        listed = (info.get("admissible") or self.env.admissible_actions() or []) if gold else []
        wrong = [action for action in listed if action.lower() != gold.lower()]
        return self.env.phrase([self.rng.choice(wrong)]) if wrong else None


def walk(env, task, **how):
    """Play `task` along the gold path (by random admissible actions where none is known, and to the end at most):
    yields (observation, info, the next action or None)."""
    rng, over = random.Random(f"walk {task}"), False
    observation, info = env.reset(task=task, seed=0, **how)
    for _ in range(env.max_turns):
        action = None if over else env.gold_action()
        if not over and action is None:
            listed = info.get("admissible") or env.admissible_actions()
            action = rng.choice(listed) if listed else None
        yield observation, info, action
        if action is None:
            return
        observation, _, terminated, truncated, info = env.step(action)
        over = terminated or truncated


if __name__ == "__main__":
    from rl.runs import cli
    from tools.show import main
    cli(main)
