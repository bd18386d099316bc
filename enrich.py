"""Feedback-Enriched Environments (FEE): hints in the environment's feedback while training, none in evaluation.
arXiv 2609.08404.

    python enrich.py --env keydoor                       # an episode, standard feedback beside enriched; the schedule
    python grpo.py --enrich hybrid --enrich-late 4,5     # train with it
    python enrich.py --study --quick                     # strategies against each other (study.py)
    from enrich import EnrichedEnv, feedback_kind, group_is_enriched    # needs the standard library alone

Only observations change: o+ = E(o, h). Rewards, transitions, admissible actions and the number of turns are those of
the wrapped environment, and hints are context, never trained on. There are two kinds of hint h: action guidance says
what to do, observation enrichment says what the standard observation hides. The environment words both and never
decides; this file decides, along two axes, and never knows a benchmark:

    when in an episode     turns 1-3 ("early") or 6-10 ("late")
    when in training       all of it, or guidance first and enrichment from the middle on ("hybrid")
    for whom               one coin per group: its episodes are all enriched, or none is

What differs from the paper, and from its released code, which has other faults (docs/enrich.md):
1. A turn is one action of the agent in every environment; on BFCL the released code counts the user's turns.
2. The coin has its own random stream. In the released code it follows the choice of tasks on BFCL, and on ScienceWorld
   there is none: the first half of the slots is enriched.
3. Ours, not the paper's: the controls (reversed, ag-always, oe-always, both, wrong-hint), `--enrich-anneal`,
   `--enrich-positive-only` and `--enrich-train-context` (see `train_context`).
"""
import math
import random
import sys
from dataclasses import dataclass, replace

from envs import BadInput, plain

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
    the first 3 user turns on BFCL; enrichment in turns 6-10 on ScienceWorld and after every tool call on BFCL.
    Raises BadInput for an unknown strategy and for windows that make no sense.
    """
    if strategy not in STRATEGIES:
        raise BadInput(f"unknown strategy {strategy!r}: --enrich takes one of {', '.join(STRATEGIES)}")
    for name, (first, last) in (("early", early), ("late", late)):
        if not 1 <= first <= last:
            raise BadInput(f"--enrich-{name} {first},{last} holds no turn: write FIRST,LAST with 1 <= FIRST <= LAST")
    phases = STRATEGIES[strategy]
    if len(phases) > 1 and not (early[0] <= late[0] and early[1] <= late[1]):
        raise BadInput(f"--enrich {strategy} wants the late window after the early one, got {late[0]},{late[1]} and "
                       f"{early[0]},{early[1]}: change --enrich-early or --enrich-late")
    if not 0 <= switch <= 1:
        raise BadInput(f"--enrich-switch is a share of training in 0..1, got {switch}")
    kind, window = phases[0] if step <= switch * total_steps + 1e-9 else phases[-1]
    first, last = {"early": early, "late": late, "always": (1, math.inf)}[window]
    return kind if first <= turn <= last else None


def group_is_enriched(seed, step, group, probability=0.5) -> bool:
    """The coin of section 5.4: one for all episodes of a group. A stream of its own, so it knows nothing of the task."""
    return random.Random(f"enrich {seed} {step} {group}").random() < probability


def rollout_is_enriched(seed, step, group, rollout, probability=0.5) -> bool:
    """The paper's ablation (`--enrich-mixed`): a coin for each episode of a group."""
    return random.Random(f"enrich {seed} {step} {group} {rollout}").random() < probability


@dataclass
class Schedule:
    """A strategy with its options. The training loop sets `step`; environments ask `kind`, requests ask `enriched`."""
    strategy: str = "none"
    total_steps: int = 1
    early: tuple[int, int] = (1, 3)
    late: tuple[int, int] = (6, 10)
    switch: float = 0.5
    seed: int = 0
    probability: float = 0.5
    mixed: bool = False
    anneal: bool = False  # ours: the probability falls linearly, from `probability` in step 1 to 0 in the last
    step: int = 1

    def __post_init__(self):
        self.kind(1)  # raises BadInput for what it does not know
        if not 0 <= self.probability <= 1:
            raise BadInput(f"--enrich-probability must lie in 0..1, got {self.probability}")

    def kind(self, turn):
        return feedback_kind(self.strategy, self.step, self.total_steps, turn, early=self.early, late=self.late,
                             switch=self.switch)

    def enriched(self, group, rollout) -> bool:
        """Is this episode of this step enriched?"""
        if self.strategy == "none":
            return False
        left = (self.total_steps - self.step) / max(self.total_steps - 1, 1) if self.anneal else 1.0
        if self.mixed:
            return rollout_is_enriched(self.seed, self.step, group, rollout, self.probability * left)
        return group_is_enriched(self.seed, self.step, group, self.probability * left)

    def check(self, env, tasks, max_turns):
        """Refuse, before training, what would silently train without hints. Plays a few `tasks` until it has seen one."""
        for kind, window in STRATEGIES[self.strategy] if self.strategy != "none" else []:
            first = {"early": self.early[0], "late": self.late[0], "always": 1}[window]
            if first > max_turns:
                raise BadInput(f"--enrich {self.strategy}: the window --enrich-{window} begins in turn {first}, and an "
                               f"episode has {max_turns} turns at most: choose an earlier one")
            for wanted in ("guidance", "enrichment") if kind == "both" else (kind,):
                always = {"guidance": "ag-always", "enrichment": "oe-always"}[wanted]
                probe = EnrichedEnv(env, Schedule("wrong-hint" if self.strategy == "wrong-hint" else always))
                if not any("hint" in info for task in tasks[:8] for _, info, _ in walk(probe, task, enriched=True)):
                    what = "list of wrong actions beside a right one" if self.strategy == "wrong-hint" else f"{wanted} hint"
                    raise BadInput(f"--enrich {self.strategy}: the environment has no {what} in its first tasks: "
                                   f"choose another --enrich, or none")


def schedule_of(config) -> Schedule:
    """From the options of a run. Raises BadInput."""
    def window(name, text):
        first, comma, last = text.partition(",")
        if not (first.strip().isdecimal() and last.strip().isdecimal()):
            raise BadInput(f"--enrich-{name} must be FIRST,LAST (two turns, such as 1,3), got {text!r}")
        return int(first), int(last)

    return Schedule(config.enrich, config.steps, window("early", config.enrich_early), window("late", config.enrich_late),
                    config.enrich_switch, config.seed, config.enrich_probability, config.enrich_mixed, config.enrich_anneal)


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


# Beyond the paper

def train_context(config, batch, chat, model):
    """Extension, ours (`--enrich-train-context`): sample with hints, train on the same actions without them.

    The policy is asked for the hinted action where no hint will be: rows are rebuilt as the prompt of the hint-free
    conversation + the sampled ids. Returns trajectories with these rows; those without a hint stay as they are.

    as-sampled       the paper: train on what was sampled
    stripped         the old log-probs are taken in the stripped context too, so the ratio starts at 1. This is biased:
                     the stripped policy did not sample these actions. Imitation of hinted success, weighed by advantage.
    stripped-ratio   the old log-probs are those of the hinted context, which sampled: an importance ratio, under
                     the algorithm's own clip. Off-policy, so most ratios of a hinted action are far below 1.

    A negative advantage pushes down an action that the stripped policy might never have taken; `--enrich-positive-only`
    leaves these out, for hinted and plain episodes alike.
    """
    if config.enrich_train_context == "as-sampled":
        return batch
    from learner import row_logps
    from rollout import rows_of, without_hints

    hinted, sampled_logps = [t for t in batch if any(turn.hint for turn in t.turns)], {}
    if config.enrich_train_context == "stripped-ratio":
        sampled_logps = row_logps(model, [row for t in hinted for row in t.rows], chat.pad_id,
                                  temperature=config.temperature, micro_batch_tokens=config.micro_batch_tokens)
    stripped = {}
    for trajectory in hinted:
        rows = rows_of(without_hints(trajectory), chat, config.history)
        if sampled_logps:  # the sampled tokens come in the same order, cut into rows in another way perhaps
            logps = iter([logp for row in trajectory.rows for logp, own in zip(sampled_logps[id(row)], row.mask) if own])
            for row in rows:
                row.old_logp = [next(logps) if own else 0.0 for own in row.mask]
        stripped[id(trajectory)] = replace(trajectory, rows=rows)
    return [stripped.get(id(t), t) for t in batch]


# The file as a program

def show(env, task, schedule):
    """Print an episode along the gold path: standard feedback on the left, enriched on the right."""
    import itertools
    import textwrap

    def column(text):
        return [piece for line in plain(text).splitlines() for piece in textwrap.wrap(line, 57) or [""]]

    for turn, (observation, info, action) in enumerate(walk(EnrichedEnv(env, schedule), task, enriched=True), 1):
        standard = observation.removesuffix("\n" + info["hint"]) if "hint" in info else observation
        print(f"\n{f'turn {turn}, standard':<58} | enriched")
        for left, right in itertools.zip_longest(column(standard), column(observation), fillvalue=""):
            print(f"{left:<58} | {right}")
        print(plain(f"> {action}") if action else "(the end)")


def draw(schedule, path):
    """Every strategy under this schedule's windows and switch, training step by turn, as one picture."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import colors, patches, pyplot

    legend = {None: ("standard feedback", "#eeeeee"), "guidance": ("action guidance", "#4c78a8"), "enrichment":
              ("observation enrichment", "#f58518"), "both": ("both", "#54a24b"), "wrong": ("wrong guidance", "#e45756")}
    steps, turns = range(1, schedule.total_steps + 1), range(1, schedule.late[1] + 3)
    figure, grid = pyplot.subplots(2, 5, figsize=(11, 4.4), sharex=True, sharey=True)
    for axes, name in zip(grid.flat, [name for name in STRATEGIES if name != "none"]):
        kinds = [[replace(schedule, strategy=name, step=step).kind(turn) for step in steps] for turn in turns]
        codes = [[list(legend).index("wrong" if kind and name == "wrong-hint" else kind) for kind in row] for row in kinds]
        axes.imshow(codes, colors.ListedColormap([colour for _, colour in legend.values()]), vmin=0, vmax=len(legend) - 1,
                    origin="lower", aspect="auto", interpolation="nearest",
                    extent=(0.5, len(steps) + 0.5, 0.5, len(turns) + 0.5))
        axes.set_title(name)
    figure.supxlabel("training step")
    figure.supylabel("turn of an episode")
    figure.legend(handles=[patches.Patch(color=colour, label=label) for label, colour in legend.values()],
                  loc="upper center", ncols=5, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if "--study" in argv:
        from study import enrichment
        return enrichment([word for word in argv if word != "--study"])
    from envs import make_env, parse_options, select_tasks
    from train import Config, option, parse

    @dataclass
    class ShowConfig(Config):
        task: str = option("", "the training task to show, by name or by full id (default: the first)")
        enrich: str = option("both", f"the strategy of the episode shown: {', '.join(STRATEGIES)}")
        step: int = option(1, "the training step of the episode shown, of --steps")
        picture: str = option("schedule.png", "where the picture of the schedule goes")

    config = parse(ShowConfig, argv, description="Feedback enrichment (arXiv 2609.08404), shown.")
    schedule = replace(schedule_of(config), step=config.step)
    options = parse_options(config.env_options)
    tasks = select_tasks(config.env, "train", [config.task] if config.task else config.tasks, options)
    env = make_env(config.env, options)
    schedule.check(env, tasks, config.max_turns or env.max_turns)
    print(f"{config.env} {tasks[0]}, --enrich {config.enrich}, training step {config.step} of {config.steps}")
    show(env, tasks[0], schedule)
    env.close()
    draw(schedule, config.picture)
    print(f"\nschedule: {config.picture}")


if __name__ == "__main__":
    from train import cli
    cli(main)
