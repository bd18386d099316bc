"""A run's folder: what is written while training, and how it is read back.

    python runs.py curve.png runs/keydoor__grpo__none__*       # several runs in one picture

    runs/<env>__<algo>__<enrich>__<seed>/
        config.json         options, versions, commit
        metrics.jsonl       one line a step              rollouts.jsonl      one line an episode
        evaluations.jsonl   one line an evaluation       curve.png
        tokens.jsonl        with --log-tokens N: N episodes a step once more, with their tokens (log_tokens)
        adapter/            the trained adapter in PEFT's format
        checkpoint/         adapter, optimizer and step: written beside, then renamed; checkpoint.old/ is the one before
"""
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import io
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

from envs import BadInput


@contextlib.contextmanager
def run_folder(config, algorithm, resuming=None):
    """(the run's folder, the first step to do). A command that proves wrong before the first step leaves no folder.
    resuming(folder, config, algorithm) -> the last step that is done; default: `resume`."""
    folder, first_step = open_folder(config, algorithm, resuming)
    before = folder.with_name(folder.name + ".before")  # what --overwrite replaces, until a first step is done
    try:
        yield folder, first_step
    finally:
        if (folder / "metrics.jsonl").exists() or (folder / "adapter").exists():
            shutil.rmtree(before, ignore_errors=True)
        else:
            shutil.rmtree(folder)
            if before.exists():
                before.rename(folder)


FREE = {"steps", "out", "resume", "overwrite", "lr", "save_every", "eval_every", "eval_episodes", "eval_temperature",
        "micro_batch_tokens", "gradient_checkpointing", "num_envs", "tensorboard", "step_timeout", "preset",
        "log_tokens"}  # options that a resumed run may change; with another num_envs it draws other samples


def open_folder(config, algorithm, resuming=None) -> tuple[Path, int]:
    """A folder that exists is only touched if the user said how."""
    folder = Path(config.out or f"runs/{config.env}__{algorithm}__{config.enrich}__{config.seed}")
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder} is a file: choose another --out")
    if config.resume:
        return folder, (resuming or resume)(folder, config, algorithm) + 1
    if folder.exists() and any(folder.iterdir()):
        if not config.overwrite:
            raise BadInput(f"the folder {folder} exists: pass --resume to go on, --overwrite to start again, or another "
                           f"--out")
        if "algorithm" not in about(folder):
            raise BadInput(f"{folder} is not a run's folder; it is not deleted: choose another --out")
        before = folder.with_name(folder.name + ".before")
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot make the folder {folder} ({error.strerror}): choose another --out") from error
    return folder, 1


def resume(folder, config, algorithm) -> int:
    """The step to go on from, 0 where none was saved yet; refuses another run's options, and cuts off what was logged after
    the checkpoint."""
    same_options(folder, config, algorithm, FREE)
    step = checkpoint_step(folder)
    if step > config.steps:
        raise BadInput(f"the checkpoint in {folder} is of step {step}, after --steps {config.steps}: pass --steps {step} or more")
    done = [row["step"] for row in read(folder / "evaluations.jsonl") if row["split"] == "test"]
    if step >= config.steps and config.steps in done:
        raise BadInput(f"the run in {folder} has done its {step} steps; to go on, raise --steps")
    for name in ("metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl", "tokens.jsonl"):
        cut(folder / name, lambda row: 0 < step >= row["step"])
    return step


def same_options(folder, config, algorithm, free):
    """Refuse to go on with another algorithm, or with other options than those of the run, `free` ones excepted."""
    if not folder.is_dir():
        raise BadInput(f"there is no run in {folder} to resume; start without --resume")
    if not any(folder.iterdir()):
        return  # a start that was stopped at once
    was = about(folder)
    if was.get("algorithm") != algorithm:
        raise BadInput(f"the run in {folder} is one of {was.get('algorithm')}.py, not {algorithm}.py")
    for name, value in dataclasses.asdict(config).items():
        if name not in free and name in was and was[name] != value:
            raise BadInput(f"the run in {folder} has --{name.replace('_', '-')} {was[name]}, not {value}: resume with its "
                           f"options, or start another run")


def about(folder) -> dict:
    """A run's config.json, or {} where there is none that can be read."""
    try:
        return json.loads((Path(folder) / "config.json").read_text())
    except (OSError, ValueError):
        return {}


def write_config(folder, config, algorithm):
    """Options, versions and commit."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft")}
    replace(folder / "config.json", json.dumps({"algorithm": algorithm, **dataclasses.asdict(config), "commit": commit(),
                                                "python": sys.version.split()[0], "versions": versions}, indent=2) + "\n")


def commit() -> str:
    """The commit of this code, or "" where it is not a checkout."""
    done = subprocess.run(["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
                          capture_output=True, text=True)
    return done.stdout.strip()


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


def cut(path, keep):
    """Leave only the rows with keep(row) in a file, if there is one."""
    if path.exists():
        with open(f"{path}.new", "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in each(path) if keep(row))
        os.replace(f"{path}.new", path)


def replace(path, text: str):
    """Write beside, then rename: a reader sees the old file or the new one."""
    beside = f"{path}.new"
    with open(beside, "w") as file:
        file.write(text)
    os.replace(beside, path)


@contextlib.contextmanager
def interrupts():
    """Ctrl-C ends the step that is under way: `stopping()` is true after one, a second one stops at once."""
    pressed = []

    def handler(*_):
        pressed.append(True)
        signal.signal(signal.SIGINT, before)
        print("\nstopping after this step; Ctrl-C again stops at once, without it", file=sys.stderr, flush=True)

    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: bool(pressed)
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


def save_checkpoint(folder, model, optimizer, step):
    """Everything that the next step needs; random draws are functions of (seed, step) and need nothing."""
    import torch

    new, current, old = folder / "checkpoint.new", folder / "checkpoint", folder / "checkpoint.old"
    shutil.rmtree(new, ignore_errors=True)
    model.save_pretrained(new)  # the adapter, and the frozen "reference" beside it where there is one
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    (new / "optimizer.pt").write_bytes(buffer.getbuffer())  # to a full disk, torch's own writer does not say what is wrong
    (new / "step.json").write_text(json.dumps({"step": step, "run": fingerprint(folder), "sha256": sums(new)}))
    if current.exists():
        shutil.rmtree(old, ignore_errors=True)
        current.rename(old)
    new.rename(current)


def sums(checkpoint) -> dict[str, str]:
    return {str(path.relative_to(checkpoint)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != "step.json"}


def fingerprint(folder) -> str:
    """Of a run's options, without those that a resumed one may change."""
    options = {name: value for name, value in about(folder).items() if name not in FREE | {"commit", "python", "versions"}}
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()


def checkpoint_step(folder) -> int:
    """The step of the folder's checkpoint, which may be put back from the one before; 0: none was saved yet.

    A checkpoint that is cut, changed or another run's is refused with a line, and the one before it used.
    """
    current, old = folder / "checkpoint", folder / "checkpoint.old"
    refused = []
    for checkpoint in (current, old):
        if not checkpoint.exists():
            continue
        try:
            kept = json.loads((checkpoint / "step.json").read_text())
            wrong = "" if kept["run"] == fingerprint(folder) else "it is of another run"
            wrong = wrong or ("" if kept["sha256"] == sums(checkpoint) else "its files are not those that were saved")
        except (OSError, ValueError, KeyError, TypeError) as error:
            wrong = f"its step.json cannot be read ({type(error).__name__})"
        if wrong:
            refused.append(f"{checkpoint}: {wrong}")
            continue
        if checkpoint is old:
            shutil.rmtree(current, ignore_errors=True)
            old.rename(current)
        for line in refused:
            print(f"{line}; going on from the one before, step {kept['step']}", file=sys.stderr)
        return kept["step"]
    if refused:
        raise BadInput(f"no checkpoint can be used ({'; '.join(refused)}): start again with --overwrite")
    return 0


def record(step, trajectory) -> dict:
    """An episode as a line of rollouts.jsonl."""
    return {"step": step, "task": trajectory.task, "group": trajectory.group, "seed": trajectory.seed,
            "enriched": trajectory.enriched, "success": trajectory.success, "end": trajectory.end,
            "reward": trajectory.reward if math.isfinite(trajectory.reward) else None, "error": trajectory.error,
            "first_observation": trajectory.first_observation,
            "turns": [{**({"hint": turn.hint} if turn.hint else {}), "action": turn.action,
                       "observation": turn.observation, "valid": turn.valid} for turn in trajectory.turns]}


def log_tokens(path, chat, recorded, rows, **numbers):
    """A line of tokens.jsonl: an episode's line of rollouts.jsonl and the rows that were trained on, token by token: its
    text, 1 where the policy sampled it, and, for the sampled ones, each of `numbers` ([T], row after row)."""
    flat = {name: iter(values) for name, values in numbers.items()}
    append(path, {**recorded, "rows": [
        {"tokens": [chat.tokenizer.decode([i]) for i in ids], "mask": mask,
         **{name: [round(float(next(values)), 4) for own in mask if own] for name, values in flat.items()}}
        for ids, mask in rows]})


def mean(values) -> float:
    return float(sum(values)) / len(values) if values else 0.0


def episode_metrics(played, group) -> dict:
    """What docs/grpo.md explains: means over the episodes, turns or groups that were sampled."""
    turns = [turn for t in played for turn in t.turns]
    rewards = [{t.reward for t in played[n:n + group] if t.reward == t.reward} for n in range(0, len(played), group)]
    known = [t.reward for t in played if t.reward == t.reward]
    return {"reward": mean(known) if known else math.nan,
            "success": mean([t.success for t in played]), "enriched_fraction": mean([t.enriched for t in played]),
            "groups_sampled": len(rewards), "dead_group_fraction": mean([len(values) < 2 for values in rewards]),
            "turns": mean([len(t.turns) for t in played]), "tokens": mean([t.length for t in played]),
            "valid_action_fraction": mean([turn.valid for turn in turns]),
            "length_stop_fraction": mean([turn.stop == "length" for turn in turns]),
            **{f"success_{name}": mean([t.success for t in played if t.enriched == enriched]) for name, enriched in
               (("hinted", True), ("plain", False)) if any(t.enriched == enriched for t in played)},
            **({"abstention": mean(asked)} if (asked := abstentions(played)) else {}),
            **{f"end_{end}": mean([t.end == end for t in played]) for end in sorted({t.end for t in played})}}


def abstentions(played) -> list[float]:
    """For each episode that was asked for what cannot be done, the share of such turns in which it abstained."""
    return [t.info["abstained"] / t.info["abstain_turns"] for t in played if t.info.get("abstain_turns")]


def speed(played, learn_tokens, rollout_seconds, learn_seconds) -> dict:
    """Seconds, the policy's own tokens per second, and memory."""
    return {"rollout_seconds": rollout_seconds, "learn_seconds": learn_seconds,
            "rollout_tokens_per_second": sum(t.length for t in played) / rollout_seconds,
            "learn_tokens_per_second": learn_tokens / learn_seconds, "peak_memory_bytes": peak_memory()}


def tensorboard(folder, first_step):
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder, purge_step=first_step)  # of a run that is resumed, what came after its checkpoint is hidden


def peak_memory() -> int:
    """Bytes: of the GPU if there is one, else of this process."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def draw_curve(folders, path):
    """Training reward and hint-free success over steps: one run with its intervals, or several laid over each other."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6))
    for number, folder in enumerate(map(Path, folders)):
        metrics, evaluations = read(folder / "metrics.jsonl"), read(folder / "evaluations.jsonl")
        colour, name = f"C{number}", folder.name if len(folders) > 1 else ""
        axes.plot([row["step"] for row in metrics], [row["reward"] for row in metrics], color=colour, alpha=0.25,
                  label=None if name else "training reward")
        for split, marker in (("valid", "o-"), ("test", "s")):
            rows = [row for row in evaluations if row["split"] == split and row["policy"] == "trained"]
            if rows:
                errors = [[abs(row["success"] - row["interval"][side]) for row in rows] for side in (0, 1)]
                axes.errorbar([row["step"] for row in rows], [row["success"] for row in rows], None if name else errors,
                              fmt=marker, color=colour, markersize=4, capsize=2,
                              label=f"success, {split} tasks (95 %)" if not name else name if split == "valid" else None)
    axes.set(xlabel="training step", ylim=(-0.02, 1.02), ylabel="success without hints" if len(folders) > 1 else "",
             title="" if len(folders) > 1 else Path(folders[0]).name)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    if len(sys.argv) < 3 or not sys.argv[1].endswith(".png") or not all(map(os.path.isdir, sys.argv[2:])):
        print("error: usage: python runs.py PICTURE.png RUN...", file=sys.stderr)
        sys.exit(2)
    draw_curve(sys.argv[2:], sys.argv[1])
