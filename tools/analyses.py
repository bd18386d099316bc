"""The paper's analyses (arXiv 2609.08404, section 5), from the files of finished runs. The probe of section 5.3 is tools/probe.py.

    python -m tools.analyses entropy runs/a runs/b --out entropy.png       # Fig. 3: policy entropy over training
    python -m tools.analyses map runs/a --out map.png                      # Fig. 4(a): success of each training task over time
    python -m tools.analyses tiers --by runs/none__[0-3] --of runs/none__[4-7] runs/hybrid__*   # 5.2, Fig. 4(b)

Runs whose names differ by what follows the last "__" alone, their seed, are one arm; figures are means over an arm's runs.

What differs from the paper:
1. The map takes the episodes that training sampled, with hints or without (--plain: without alone): those of one group where a task
   came up once in a bin of steps. It costs no episode of its own.
2. Tiers are of test tasks, by their outcome in the last evaluation of the runs of --by. The same runs in --by and in --of make the
   hard tier look hard and the easy one easy by selection alone, so that any other arm gains on the hard tier; the paper's tiers
   are of that kind. Other seeds of the same arm in --by do not have this fault.
"""
import math
import statistics
import sys
from pathlib import Path

from envs import BadInput, plain
from rl.logs import each, is_final, mean, picture, read, success_map
from rl.runs import Parser, cli
from study import T975

TIERS = {"hard": (0.0, 0.33), "medium": (0.33, 0.66), "easy": (0.66, 1.0)}  # the paper's, by mean success; the upper end is included


def arms_of(folders) -> dict[str, list[Path]]:
    """{arm: its runs' folders}"""
    found = {}
    for folder in map(Path, folders):
        if not (folder / "metrics.jsonl").exists():
            raise BadInput(f"{folder} is no run with a metrics.jsonl")
        found.setdefault(folder.name.rpartition("__")[0] or folder.name, []).append(folder)
    return found


# Entropy

def entropy_curves(arms) -> dict[str, list[tuple[int, float]]]:
    """{arm: [(step, mean entropy in nats a sampled token over its runs)]}, at the steps that all of its runs have."""
    curves = {}
    for arm, folders in arms.items():
        runs = [{row["step"]: row["entropy"] for row in each(folder / "metrics.jsonl") if row.get("entropy") is not None}
                for folder in folders]
        curves[arm] = [(step, statistics.fmean(run[step] for run in runs)) for step in sorted(set.intersection(*map(set, runs)))]
        if not curves[arm]:
            raise BadInput(f"the runs of {arm} have no step with an entropy in common")
    return curves


def entropy(args):
    curves = entropy_curves(arms_of(args.runs))
    with picture(args.out, figsize=(6.4, 3.6)) as (_, axes):
        for arm, points in curves.items():
            axes.plot(*zip(*points), label=arm)
        axes.set(xlabel="training step", ylabel="entropy, nats a token", ylim=(0, None))
        axes.legend(fontsize=8)
    print(f"{'entropy, nats a token':<44} {'first':>8} {'middle':>8} {'last':>8}")
    for arm, points in curves.items():
        cells = [points[at][1] for at in (0, len(points) // 2, -1)]
        print(plain(f"{arm:<44} " + " ".join(f"{value:8.3f}" for value in cells)))


# The map

def map_(args):
    if len(args.runs) != 1:
        raise BadInput("a map is of one run: pass one folder")
    if args.bins < 1:
        raise BadInput(f"--bins must be at least 1, got {args.bins}")
    rows = [row for row in each(Path(args.runs[0]) / "rollouts.jsonl") if not (args.plain and row["enriched"])]
    if not rows:
        raise BadInput(f"{args.runs[0]} has no episodes to make a map of (rollouts.jsonl{', without hints' if args.plain else ''})")
    tasks, starts, grid = success_map(((row["step"], row["task"], row["success"]) for row in rows), args.bins)
    width = starts[1] - starts[0] if len(starts) > 1 else 1
    means = [mean([value for value in column if value is not None]) for column in zip(*grid)]
    with picture(args.out, 2, 1, figsize=(6.4, 6), sharex=True, height_ratios=[3, 1]) as (figure, (above, below)):
        image = above.imshow([[math.nan if value is None else value for value in line] for line in grid], aspect="auto", vmin=0, vmax=1,
                             origin="lower", interpolation="nearest", cmap="viridis", extent=(0.5, len(starts) + 0.5, 0, len(tasks)))
        above.set(ylabel="training task, from hard to easy (white: not sampled)")
        figure.colorbar(image, ax=above, label="success of the sampled episodes")
        below.plot(range(1, len(starts) + 1), means)
        below.set(xlabel=f"training time, in {len(starts)} bins of {width} steps", ylabel="mean", ylim=(0, 1))
    print(f"{len(tasks)} training tasks, {len(starts)} bins of {width} steps; mean success of the tasks sampled in each:")
    print(" ".join(f"{mean:.2f}" for mean in means))
    for third, name in enumerate(("hardest", "middle", "easiest")):
        own = range(len(tasks) * third // 3, len(tasks) * (third + 1) // 3)
        half = len(starts) // 2
        early, late = ([grid[n][b] for n in own for b in part if grid[n][b] is not None]
                       for part in (range(half), range(half, len(starts))))
        if early and late:
            print(f"{name:>9} third: {statistics.fmean(early):.3f} in the first half, {statistics.fmean(late):.3f} in the second")


# Tiers

def outcomes(folder) -> dict[str, float]:
    """{task: success} of a run's policy after its last step, on test tasks."""
    rows = [row for row in read(Path(folder) / "evaluations.jsonl")
            if (row["split"], row["policy"]) == ("test", "trained") and is_final(row)]
    if not rows or "outcomes" not in rows[-1]:
        raise BadInput(f"{folder} has no outcome for each test task in its evaluations.jsonl: it is not finished, or of an older version")
    return rows[-1]["outcomes"]


def mean_outcomes(folders) -> dict[str, float]:
    """{task: mean success over these runs}; all must have been tested on the same tasks."""
    runs = [outcomes(folder) for folder in folders]
    if any(set(run) != set(runs[0]) for run in runs):
        raise BadInput("these runs were tested on different tasks: compare runs with the same --tasks, --eval-episodes and environment")
    return {task: statistics.fmean(run[task] for run in runs) for task in runs[0]}


def tier(share: float) -> str:
    return next(name for name, (_, high) in TIERS.items() if share <= high)


def tiers(args):
    by, arms = mean_outcomes(args.by), {arm: mean_outcomes(folders) for arm, folders in arms_of(args.of).items()}
    first, *others = arms
    if any(set(found) != set(by) for found in arms.values()):
        raise BadInput("the runs of --by and of --of were tested on different tasks")
    print(f"{'test tasks, by ' + str(len(args.by)) + ' run' + 's' * (len(args.by) > 1):<24} "
          + " ".join(f"{name + ' (' + str(sum(tier(s) == name for s in by.values())) + ')':>26}" for name in TIERS))
    for arm, found in arms.items():
        cells = []
        for name in TIERS:
            own = [task for task, share in by.items() if tier(share) == name]
            if not own:
                cells.append("-")
                continue
            cell = f"{statistics.fmean(found[task] for task in own):.3f}"
            if arm != first and len(own) > 1:
                gains = [found[task] - arms[first][task] for task in own]
                half = (T975[len(gains) - 1] if len(gains) < len(T975) else 1.96) * statistics.stdev(gains) / math.sqrt(len(gains))
                mean = statistics.fmean(gains)
                cell += f" {mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"
            cells.append(cell)
        print(plain(f"{arm:<24} " + " ".join(f"{cell:>26}" for cell in cells)))
    if others:
        print(f"differences are to {plain(first)}, with a 95 % interval over the tasks of a tier")
    if {*map(Path, args.by)} & {*map(Path, args.of)}:
        print("some runs of --by are in --of too: the tiers' differences hold an effect of selection (see the docstring)")


def main(argv=None):
    parser = Parser(allow_abbrev=False, description="The paper's analyses, from the files of finished runs.")
    kinds = parser.add_subparsers(dest="kind", required=True, parser_class=Parser)
    one = kinds.add_parser("entropy", help="policy entropy over training, of several runs (Fig. 3)")
    one.add_argument("runs", nargs="+", metavar="RUN")
    one.add_argument("--out", default="entropy.png", help="the picture (default: %(default)s)")
    two = kinds.add_parser("map", help="success of each training task over time (Fig. 4a)")
    two.add_argument("runs", nargs="+", metavar="RUN")
    two.add_argument("--out", default="map.png", help="the picture (default: %(default)s)")
    two.add_argument("--bins", type=int, default=20, help="parts of training (default: %(default)s)")
    two.add_argument("--plain", action="store_true", help="episodes without hints alone")
    three = kinds.add_parser("tiers", help="success by tiers of difficulty on fixed tasks (section 5.2)")
    three.add_argument("--by", nargs="+", required=True, metavar="RUN", help="runs whose success makes the tiers")
    three.add_argument("--of", nargs="+", required=True, metavar="RUN", help="runs to compare, the first arm with the others")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    {"entropy": entropy, "map": map_, "tiers": tiers}[args.kind](args)


if __name__ == "__main__":
    cli(main)
