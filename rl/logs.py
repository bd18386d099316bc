"""What a run writes while it trains, as lines of JSON and a picture, and how that is read back.

    python -m rl.logs curve.png runs/keydoor__grpo__none__*       # several runs in one picture
"""
import contextlib
import json
import math
import os
import resource
import shutil
import sys
from pathlib import Path

from envs import BadInput


def append(path, row: dict):
    """One line of JSON; a number that is not finite becomes null."""
    row = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
    with open(path, "a") as file:
        file.write(json.dumps(row) + "\n")


def each(path):
    """The rows of a file of JSON lines, one at a time."""
    if not Path(path).exists():
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                if next(file, None) is None:  # only the last line can be one that a stop cut in half
                    return
                raise BadInput(f"{path}, line {number}, is not JSON: {error}") from error
            yield row


def read(path) -> list[dict]:
    return list(each(path))


def keep_rows(path, keep):
    """Leave only the rows with keep(row) in a file, if there is one."""
    if path.exists():
        with open(f"{path}.new", "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in each(path) if keep(row))
        os.replace(f"{path}.new", path)


def replace_file(path, text: str):
    """Write beside, then rename: a reader sees the old file or the new one."""
    beside = f"{path}.new"
    with open(beside, "w") as file:
        file.write(text)
    os.replace(beside, path)


def save_adapter(model, folder):
    """The policy's adapter alone: written beside, then renamed."""
    beside = folder.with_name(folder.name + ".new")
    shutil.rmtree(beside, ignore_errors=True)
    model.save_pretrained(beside, selected_adapters=["default"])
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)


def record(step, trajectory) -> dict:
    """An episode as a line of rollouts.jsonl."""
    return {"step": step, "task": trajectory.task, "group": trajectory.group, "seed": trajectory.seed,
            "enriched": trajectory.enriched, "success": trajectory.success, "end": trajectory.end,
            "reward": trajectory.reward if math.isfinite(trajectory.reward) else None, "error": trajectory.error,
            "first_observation": trajectory.first_observation,
            "turns": [{**({"hint": turn.hint} if turn.hint else {}), "action": turn.action,
                       "observation": turn.observation, "valid": turn.valid} for turn in trajectory.turns]}


def mean(values) -> float:
    return float(sum(values)) / len(values) if values else 0.0


def episode_metrics(played, group) -> dict:
    """What docs/grpo.md explains: means over the episodes, turns or groups that were sampled."""
    turns = [turn for t in played for turn in t.turns]
    rewards = [[t.reward for t in played[n:n + group] if t.reward == t.reward] for n in range(0, len(played), group)]
    known = [t.reward for t in played if t.reward == t.reward]
    entropies = [entropy for turn in turns for entropy in getattr(turn.action_ids, "entropies", None) or []]
    return {"reward": mean(known) if known else math.nan,
            "success": mean([t.success for t in played]), "enriched_fraction": mean([t.enriched for t in played]),
            "groups_sampled": len(rewards), "dead_group_fraction": mean([all_alike(values) for values in rewards]),
            "turns": mean([len(t.turns) for t in played]), "tokens": mean([t.length for t in played]),
            "valid_action_fraction": mean([turn.valid for turn in turns]),
            "length_stop_fraction": mean([turn.stop == "length" for turn in turns]),
            **{f"success_{name}": mean([t.success for t in played if t.enriched == enriched]) for name, enriched in
               (("hinted", True), ("plain", False)) if any(t.enriched == enriched for t in played)},
            **({"entropy": mean(entropies)} if entropies else {}),
            **({"abstention": mean(asked)} if (asked := abstentions(played)) else {}),
            **{f"end_{end}": mean([t.end == end for t in played]) for end in sorted({t.end for t in played})}}


def all_alike(rewards) -> bool:
    """Are they equal, but for rounding? As grpo.py's advantages and dapo.py's dynamic sampling have it."""
    return not rewards or max(rewards) - min(rewards) <= 1e-6 * max(map(abs, rewards))


def abstentions(played) -> list[float]:
    """For each episode that was asked for what cannot be done, the share of such turns in which it abstained."""
    return [t.info["abstained"] / t.info["abstain_turns"] for t in played if t.info.get("abstain_turns")]


def speed(played, learn_tokens, rollout_seconds, learn_seconds) -> dict:
    """Seconds, the policy's own tokens per second, and memory."""
    return {"rollout_seconds": rollout_seconds, "learn_seconds": learn_seconds,
            "rollout_tokens_per_second": sum(t.length for t in played) / rollout_seconds,
            "learn_tokens_per_second": learn_tokens / learn_seconds, "peak_memory_bytes": peak_memory()}


@contextlib.contextmanager
def tensorboard(folder, first_step, wanted):
    """add(scalars by name, step) into TensorBoard's files, or nothing unless they are wanted."""
    if not wanted:
        yield lambda scalars, step: None
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder, purge_step=first_step) as writer:  # of a run that is resumed, what came after its checkpoint is hidden
        def add(scalars, step):
            for name, value in scalars.items():
                writer.add_scalar(name, value, step)

        yield add


def peak_memory() -> int:
    """Bytes: of the GPU if there is one, else of this process."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextlib.contextmanager
def picture(path, *shape, rect=None, **how):
    """(figure, axes) as `pyplot.subplots` gives them, written to `path` at the end of the block. No screen is needed."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(*shape, **how)
    yield figure, axes
    figure.tight_layout(rect=rect)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def success_map(episodes, bins: int):
    """(tasks from hard to easy, the first step of each bin, for each task its mean success in each bin, or None).

    episodes: (step from 1 on, task, success as a number), such as rollouts.jsonl holds; `bins`: parts of training at most.
    """
    episodes = list(episodes)
    last = max((step for step, _, _ in episodes), default=0)
    width, cells, tasks = max(1, math.ceil(last / bins)), {}, {}
    for step, task, success in episodes:
        cells.setdefault((task, (step - 1) // width), []).append(success)
        tasks.setdefault(task, []).append(success)
    order, starts = sorted(tasks, key=lambda task: (mean(tasks[task]), task)), list(range(1, last + 1, width))
    return order, starts, [[mean(own) if (own := cells.get((task, n))) else None for n in range(len(starts))] for task in order]


def is_final(row) -> bool:
    """Is this line of evaluations.jsonl of the end of its run? (Where it does not say: every one on test tasks is.)"""
    return row.get("final", row.get("split") == "test")


def draw_curve(folders, path):
    """Training reward and hint-free success over steps: one run with its intervals, or several laid over each other."""
    with picture(path, figsize=(6.4, 3.6)) as (_, axes):
        for number, folder in enumerate(map(Path, folders)):
            metrics, evaluations = read(folder / "metrics.jsonl"), read(folder / "evaluations.jsonl")
            colour, name = f"C{number}", folder.name if len(folders) > 1 else ""
            axes.plot([row["step"] for row in metrics], [row["reward"] for row in metrics], color=colour, alpha=0.25,
                      label=None if name else "training reward")
            for split, final, marker in (("valid", False, "o-"), ("test", False, "o-"), ("test", True, "s")):
                rows = [row for row in evaluations if row["split"] == split and row["policy"] == "trained"
                        and is_final(row) == final]
                if rows:
                    errors = [[abs(row["success"] - row["interval"][side]) for row in rows] for side in (0, 1)]
                    axes.errorbar([row["step"] for row in rows], [row["success"] for row in rows], None if name else errors,
                                  fmt=marker, color=colour, markersize=4, capsize=2,
                                  label=f"success, {split} tasks (95 %)" if not name else name if split == "valid" else None)
        axes.set(xlabel="training step", ylim=(-0.02, 1.02), ylabel="success without hints" if len(folders) > 1 else "",
                 title="" if len(folders) > 1 else Path(folders[0]).name)
        axes.legend(fontsize=8)


if __name__ == "__main__":
    if len(sys.argv) < 3 or not sys.argv[1].endswith(".png") or not all(map(os.path.isdir, sys.argv[2:])):
        print("error: usage: python -m rl.logs PICTURE.png RUN...", file=sys.stderr)
        sys.exit(2)
    draw_curve(sys.argv[2:], sys.argv[1])
