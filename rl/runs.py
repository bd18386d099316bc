"""A run's folder and its checkpoints, Ctrl-C, and one line for what the user can mend.

    runs/<env>__<algo>__<enrich>__<seed>/
        config.json         options, versions, commit
        metrics.jsonl       one line a step              rollouts.jsonl      one line an episode
        evaluations.jsonl   one line an evaluation       curve.png
        tokens.jsonl        with --log-tokens N: N episodes a step once more, with their tokens (tokens.py)
        adapter/            the trained adapter in PEFT's format
        adapter-best/       that of the best evaluation while training; adapters/STEP/: with --keep-every
        checkpoint/         adapter, optimizer and step: written beside, then renamed; checkpoint.old/ is the one before
"""
import argparse
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import io
import json
import logging
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

from safetensors import SafetensorError

from envs import BadInput, plain
from rl.logs import is_final, keep_rows, read, replace_file


# The command line

class OneLine:
    """For an argparse parser: what is wrong is one line."""

    def error(self, message):
        raise BadInput(f"{message} (see --help)")


class Parser(OneLine, argparse.ArgumentParser):
    pass


def cli(main):
    """Run a script's main: what the user can mend is one line on stderr and exit code 2."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # says on every start that CPU kernels are not there
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing")  # old names, in peft and here
    try:
        main()
    except BadInput as error:
        print(plain(f"error: {error}"), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        print(str(stop) or "stopped: the same command with --resume goes on from what was saved last", file=sys.stderr)
        sys.exit(130)
    except FloatingPointError as error:
        print(f"error: {error}; lower --lr, and --resume if a checkpoint was saved before", file=sys.stderr)
        sys.exit(2)
    except (OSError, RuntimeError, SafetensorError) as error:  # the last two: what the writers say of a full disk
        if type(error).__name__ == "OutOfMemoryError":
            print("error: out of memory: lower --num-envs, and --resume if a checkpoint was saved before; or start with a lower "
                  "--max-context (python plan.py says what fits)", file=sys.stderr)
            sys.exit(2)
        if not disk_is_full(error):
            raise
        print(f"error: the disk is full ({str(error).splitlines()[0]}): make room, then --resume", file=sys.stderr)
        sys.exit(2)


def disk_is_full(error) -> bool:
    return any(words in str(error) for words in ("No space left", "Disk quota", "File too large"))


# The folder

@contextlib.contextmanager
def run_folder(config, algorithm, resuming=None):
    """(the run's folder, the first step to do). A command that proves wrong before the first step leaves no folder.
    resuming(folder, config, algorithm) -> the last step that is done; default: `last_step`."""
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


FREE = {"steps", "out", "resume", "overwrite", "lr", "save_every", "keep_every", "eval_every", "eval_episodes", "eval_temperature",
        "micro_batch_tokens", "gradient_checkpointing", "num_envs", "tensorboard", "step_timeout", "preset",
        "log_tokens"}  # options that a resumed run may change; with another num_envs it draws other samples
BEFORE = {"enrich_history": "kept", "ratio": "row", "retire": False, "gate_metric": "success",
          "lite": False}  # what a run did that was started before there was such an option
RENAMED = {("on_policy", False): "", ("on_policy", True): "round"}  # an option's value in the config.json of an old run -> its name now


def open_folder(config, algorithm, resuming=None) -> tuple[Path, int]:
    """A folder that exists is only touched if the user said how."""
    folder = Path(config.out or f"runs/{config.env}__{algorithm}__{config.enrich}__{config.seed}")
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder} is a file: choose another --out")
    if config.resume:
        return folder, (resuming or last_step)(folder, config, algorithm) + 1
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


def last_step(folder, config, algorithm) -> int:
    """The last step that is done, 0 where none was saved yet; refuses another run's options, and cuts off what was logged after
    the checkpoint."""
    same_options(folder, config, algorithm, FREE)
    step = checkpoint_step(folder)
    if step > config.steps:
        raise BadInput(f"the checkpoint in {folder} is of step {step}, after --steps {config.steps}: pass --steps {step} or more")
    done = [row["step"] for row in read(folder / "evaluations.jsonl") if is_final(row)]
    if step >= config.steps and config.steps in done:
        raise BadInput(f"the run in {folder} has done its {step} steps; to go on, raise --steps")
    for name in ("metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl", "tokens.jsonl"):
        keep_rows(folder / name, lambda row: 0 < step >= row["step"])
    return step


def same_options(folder, config, algorithm, free):
    """Refuse to go on with another algorithm, or with other options than those of the run, `free` ones excepted. The config gets the
    time when the run began."""
    if not folder.is_dir():
        raise BadInput(f"there is no run in {folder} to resume; start without --resume")
    if not any(folder.iterdir()):
        return  # a start that was stopped at once
    was = about(folder)
    if was.get("algorithm") != algorithm:
        raise BadInput(f"the run in {folder} is one of {was.get('algorithm')}.py, not {algorithm}.py")
    config.started = was.get("started", config.started)
    if hasattr(config, "enrich_history") and "enrich_history" not in was and was.get("history", "full") != "full":
        raise BadInput(f"the run in {folder} was started when --history {was['history']} made other prompts: start another run")
    was = BEFORE | was
    for name, value in dataclasses.asdict(config).items():
        before = was.get(name, value)
        before = RENAMED.get((name, before), before) if isinstance(before, bool) else before
        if name not in free and before != value:
            before, value = ("nothing" if one == "" else one for one in (before, value))
            raise BadInput(f"the run in {folder} has --{name.replace('_', '-')} {before}, not {value}: resume with its "
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
    replace_file(folder / "config.json", json.dumps({"algorithm": algorithm, **dataclasses.asdict(config), "commit": commit(),
                                                "python": sys.version.split()[0], "versions": versions}, indent=2) + "\n")


def commit() -> str:
    """The commit of this code, or "" where it is not a checkout."""
    done = subprocess.run(["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
                          capture_output=True, text=True)
    return done.stdout.strip()


# Stopping and going on

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
    """Of a run's options, without those that a resumed one may change, and those that say what was so before they were there."""
    options = {name: value for name, value in about(folder).items()
               if name not in FREE | {"started", "commit", "python", "versions"} and BEFORE.get(name) != value}
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
