"""Speed and memory of the learner and of rollouts: beside TRL on the same work, and beside the machine's own limits.

    pip install -r bench-requirements.txt                             # the peer; `growth` and `limit` do without it
    OMP_NUM_THREADS=1 python bench.py all --json speed.json           # tiny: a random Qwen3 with the real vocabulary
    OMP_NUM_THREADS=1 python bench.py learner --model DIR --pairs 5   # a real model, in bf16
    OMP_NUM_THREADS=1 python bench.py rehearse --model Qwen/Qwen3-4B --checkpointing     # its shapes, random weights

learner: forward, backward, clipping and AdamW step of GRPO on given rows. rollout: episodes of a fixed number of turns and
tokens. step: a rollout, then the learner on it. growth: late turns of a long episode against early ones, and the learner's
memory against the number of rows. limit: shares of the machine's matrix products and memory copies.
rehearse: one step of grpo.py in full size, part by part, beside the plan's memory (tools/bench_rehearse.py). resume: grpo.py in
full size, killed after its second step and resumed: the step must come out the same.
What is measured is in tools/bench_ours.py (ours, growth, limit) and tools/bench_trl.py (TRL 1.16, transformers backend). How:

1. Each figure comes from a process of its own, which does the work once to warm up and once on the clock. Ours and the
   peer's take turns; a ratio is ours / TRL's, the median over the pairs. Both have the same weights, rows, lengths,
   environment and threads, both sample at temperature 1, and no end token exists that could cut an action short.
2. Memory is the peak of resident memory from just before the first pass, less what was resident then (on a GPU: of
   allocated memory). Linux only.
3. glibc gives large blocks back to the system at once and pays for each page again: half of TRL's time on a CPU. So the
   pairs run with an allocator that keeps its memory (TUNED), on both sides; "stock" is both as they come. Kept memory
   counts as used: the stock figures tell the peak under the default.
4. The gradients of the two sides must agree, and the numbers of tokens sampled and played, else no ratio is told.
5. Activations are kept on both sides; TRL's default is to recompute them (--checkpointing does so on both sides).
"""
import contextlib
import functools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from envs import BadInput
from rl.logs import read
from rl.presets import KNOWN, PRESETS, SAME_SHAPE
from rl.runs import Parser, cli, commit

PEER = "1.16"
TUNED = {"MALLOC_MMAP_THRESHOLD_": "17179869184", "MALLOC_TRIM_THRESHOLD_": "17179869184", "MALLOC_TOP_PAD_": "268435456"}
REAL = {"rows": (16, 4), "episodes": (32, 8), "group": (8, 4), "growth_episodes": (8, 2)}  # defaults: tiny, a real model
say = functools.partial(print, flush=True)


def measured(args, task, side="ours", tuned=True, **more):
    """One side of one task, in a process of its own, as a dict of figures."""
    how = vars(args) | {"task": task, "side": side, "gradient": ""} | more
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    env = kept | {"OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false"} | (TUNED if tuned else {})
    program = "tools.bench_rehearse" if task in ("make", "rehearse") else "tools.bench_side"
    done = subprocess.run([sys.executable, "-m", program, json.dumps(how)], env=env, text=True, check=False,
                          capture_output=True, cwd=Path(__file__).parent)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing said: out of memory?"])[-1].removeprefix("error: ")
        raise BadInput(f"{task}, {side}: the measuring process ended with {done.returncode}: {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def compare(args, task):
    """{task.name: figure} of the pairs: ours beside TRL's."""
    import torch
    pairs, stock, figures = [], {}, {}
    with tempfile.TemporaryDirectory() as folder:
        paths = {side: os.path.join(folder, side) for side in ("ours", "trl")}
        for n in range(args.pairs):
            pair = {side: measured(args, task, side, gradient="" if n or task != "learner" else paths[side]) for side in paths}
            for what in {"sampled", "positions"} & set(pair["ours"]):
                if pair["ours"][what] != pair["trl"][what]:
                    raise RuntimeError(f"{task}: {what} tokens differ, {pair['ours'][what]} and {pair['trl'][what]}")
            if n == 0 and task == "learner":
                ours, trl = (torch.load(path) for path in paths.values())
                figures["gradient_difference"] = ((ours - trl).norm() / trl.norm()).item()
                if not figures["gradient_difference"] < (1e-3 if args.model == "tiny" else 0.1):  # bf16: 8 bits
                    raise RuntimeError(f"the gradients differ by {figures['gradient_difference']:.2g} of their length")
            pairs.append(pair)
            say(f"{task} {n + 1}/{args.pairs}: " + ", ".join(
                f"{side} {p['seconds']:.2f} s {p['peak_bytes'] / 1e9:.2f} GB" for side, p in pair.items()))
    for side in ("ours", "trl") if args.stock else ():
        stock[side] = measured(args, task, side, tuned=False)
        say(f"{task} stock: {side} {stock[side]['seconds']:.2f} s {stock[side]['peak_bytes'] / 1e9:.2f} GB")
    for name, field in (("time_ratio", "seconds"), ("cpu_time_ratio", "cpu_seconds"), ("memory_ratio", "peak_bytes")):
        figures[name] = statistics.median(pair["ours"][field] / pair["trl"][field] for pair in pairs)
        if stock:
            figures[f"stock_{name}"] = stock["ours"][field] / stock["trl"][field]
    return {f"{task}.{name}": value for name, value in (figures | {"pairs": pairs, "stock": stock}).items()}


def alone(args, task):
    """{task.name: figure}: medians over the runs of growth or limit."""
    sizes = {"episodes": args.growth_episodes, "group": 1, "turns": args.growth_turns} if task == "growth" else {}
    runs = [measured(args, task, **sizes) for _ in range(args.pairs)]
    figures = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    if task == "growth":
        for history in ("full", "window"):
            figures[f"{history}.late_over_early"] = figures[f"{history}.late_seconds"] / figures[f"{history}.early_seconds"]
        figures["over_cache"] = figures["full.late_seconds"] / (figures["full.early_seconds"] + figures["cache_seconds"])
        rows = [n * max(args.micro_batch_tokens // args.tokens, 1) for n in (1, 2, 4)]  # micro-batches
        peaks = [measured(args, "learner", rows=n)["peak_bytes"] for n in rows]
        figures |= {"rows": rows, "learner_peak_bytes": peaks, "learner_peak_ratio": peaks[-1] / max(peaks[0], 1)}
    return {f"{task}.{name}": value for name, value in (figures | {"runs": runs}).items()}


# In full size

SHORT = {"episodes": 4, "group": 2, "turns": 1, "new_tokens": 8}  # defaults of rehearse and resume


@contextlib.contextmanager
def full_size(args):
    """The folder of the model: given, or made of random weights for as long as this is open, or in --folder to stay."""
    if args.model == "tiny" or os.path.isdir(args.model):
        yield str(Path(__file__).parent / "tiny-keydoor") if args.model == "tiny" else args.model
        return
    with contextlib.nullcontext(args.folder) if args.folder else tempfile.TemporaryDirectory() as folder:
        os.makedirs(folder, exist_ok=True)
        say(f"writing {args.model} with random weights to {folder}")
        measured(args, "make", folder=folder)
        yield folder


def words_for_grpo(args, folder):
    """The options of grpo.py. What a preset says is left to it, but for what is asked for here."""
    given = {"--max-new-tokens": args.new_tokens, "--group": args.group, "--max-turns": args.turns, "--bits": args.bits,
             "--preset": args.preset, "--max-context": args.context, "--micro-batch-tokens": args.given_tokens,
             "--num-envs": args.given_episodes or ("" if args.preset else args.episodes)}
    return ["--model", folder, "--env", "tools.bench_rehearse:Varied", "--tasks-per-step", str(args.episodes // args.group),
            *["--gradient-checkpointing"] * args.checkpointing,
            *[word for name, value in given.items() if value for word in (name, str(value))]]


def rehearse(args, folder):
    figures = measured(args, "rehearse", tuned=False, argv=words_for_grpo(args, folder), name=args.model,
                       filled=bool(args.preset or args.context))
    return {f"rehearse.{name}": value for name, value in figures.items()}


def resume(args, folder):
    """{resume.name: figure}. Killed as the evaluation of step 2 begins: its row is logged, its checkpoint is not there yet."""
    with tempfile.TemporaryDirectory() as runs:
        run, seconds, came_out = Path(runs) / "run", [], []
        for more, killed_at in (["--eval-every", "2"], 2 * args.episodes + 2), (["--eval-every", "0", "--resume"], 0):
            start = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "grpo.py", *words_for_grpo(args, folder), "--out", str(run), "--steps", "2", "--save-every", "1",
                 "--eval-episodes", "1", *more], cwd=Path(__file__).parent, text=True, capture_output=True, check=False,
                env=os.environ | {"OMP_NUM_THREADS": str(args.threads), "KILLED_AT_RESET": str(killed_at)})
            if done.returncode != (-signal.SIGKILL if killed_at else 0):
                last = (done.stderr.strip().splitlines() or ["nothing said"])[-1].removeprefix("error: ")
                raise BadInput(f"resume: grpo.py ended with {done.returncode}: {last}")
            seconds.append(time.perf_counter() - start)
            came_out.append([{name: value for name, value in row.items() if not re.search("second|memory", name)}
                             for row in read(run / "metrics.jsonl")])
            saved = saved if came_out[1:] else json.loads((run / "checkpoint" / "step.json").read_text())["step"]
        before, after = came_out
        if saved != 1 or len(before) != 2 or before != after:
            raise RuntimeError(f"killed with the checkpoint of step {saved} and these rows: {before}; after resuming: {after}")
        size = sum(path.stat().st_size for path in (run / "checkpoint").rglob("*") if path.is_file())
    return {"resume.saved_step": saved, "resume.rows": before, "resume.rows_again": after, "resume.checkpoint_bytes": size,
            "resume.killed_seconds": seconds[0], "resume.resumed_seconds": seconds[1]}


def parse(argv):
    parser = Parser(allow_abbrev=False, description="Speed and memory, beside TRL's and beside the machine's limits.")
    parser.add_argument("what", choices=("learner", "rollout", "step", "growth", "limit", "all", "rehearse", "resume"))
    parser.add_argument("--model", default="tiny", help="tiny (random Qwen3, real vocabulary, fp32) or a folder (bf16); rehearse and "
                        f"resume: also {', '.join([*KNOWN, *SAME_SHAPE])}, with random weights, and tiny is tiny-keydoor/")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of measurements; growth and limit: measurements")
    parser.add_argument("--no-stock", dest="stock", action="store_false", help="leave out the pair without TUNED")
    parser.add_argument("--json", default="", help="write the figures to this new file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=0, help="learner: rows (tiny: 16, else 4)")
    parser.add_argument("--tokens", type=int, default=560, help="learner: tokens of a row")
    parser.add_argument("--sampled", type=float, default=0.25, help="learner: share of the tokens that was sampled")
    parser.add_argument("--micro-batch-tokens", type=int, default=0, help="ours: padded tokens of a forward pass "
                        "(default: those of the rows, 8192 at most)")
    parser.add_argument("--peer-rows", type=int, default=0, help="TRL's: rows of a forward pass (default: --rows)")
    parser.add_argument("--no-peer-autocast", dest="peer_autocast", action="store_false",
                        help="TRL's: a bf16 model without autocast to bf16, TRL's default")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations, on both sides")
    parser.add_argument("--episodes", type=int, default=0, help="rollout: episodes at a time (tiny: 32, else 8)")
    parser.add_argument("--group", type=int, default=0, help="episodes of a group (tiny: 8, else 4)")
    parser.add_argument("--turns", type=int, default=0, help="(10; rehearse and resume: 1)")
    parser.add_argument("--new-tokens", type=int, default=0, help="sampled tokens of a turn (16; rehearse and resume: 8)")
    parser.add_argument("--prompt-tokens", type=int, default=173, help="of the first prompt")
    parser.add_argument("--observation-tokens", type=int, default=28, help="between two actions, the template's included")
    parser.add_argument("--growth-episodes", type=int, default=0, help="(tiny: 8, else 2)")
    parser.add_argument("--growth-turns", type=int, default=40)
    for flag, kind, default, help_text in (
            ("--bits", int, 0, "of the weights: 4, 16 (default; tiny: 32)"), ("--preset", str, "", "24gb, 48gb or 80gb: as in "
            "grpo.py; a GPU's allocator is held to that size"), ("--context", int, 0, "episodes are filled up to so many tokens"),
            ("--folder", str, "", "the random model is written there and stays (default: it is deleted)")):
        parser.add_argument(flag, type=kind, default=default, help=f"rehearse and resume: {help_text}")
    args = parser.parse_args(argv)
    tiny, large = args.model == "tiny", args.what in ("rehearse", "resume")
    args.given_tokens, args.given_episodes = args.micro_batch_tokens, args.episodes
    args.bits = args.bits or (32 if tiny else 16)
    for name, value in SHORT.items() if large else {"turns": 10, "new_tokens": 16}.items():
        setattr(args, name, getattr(args, name) or value)
    for name, (small, real) in REAL.items():
        setattr(args, name, getattr(args, name) or (small if tiny else real))
    args.peer_rows = args.peer_rows or args.rows
    args.micro_batch_tokens = args.micro_batch_tokens or min(8192, args.rows * args.tokens)
    for name, least in {"pairs": 1, "threads": 1, "rows": 2, "tokens": 20, "group": 2, "turns": 2 - large, "new_tokens": 2,
                        "growth_turns": 4, "micro_batch_tokens": 1, "growth_episodes": 1}.items():
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    if not 0.1 <= args.sampled <= 1:
        parser.error(f"--sampled is a share in 0.1..1, got {args.sampled}")
    if args.episodes % args.group or args.rows % args.group:
        parser.error(f"--episodes {args.episodes} and --rows {args.rows} must be whole groups of {args.group}: change --group")
    if args.rows % args.peer_rows or args.episodes % min(args.peer_rows, args.episodes):
        parser.error(f"--rows {args.rows} and --episodes {args.episodes} must be multiples of --peer-rows {args.peer_rows}")
    named = large and args.model in [*KNOWN, *SAME_SHAPE]
    if not tiny and not named and not os.path.exists(os.path.join(args.model, "config.json")):
        known = f", or one of {', '.join([*KNOWN, *SAME_SHAPE])}" if large else ""
        raise BadInput(f"the folder {args.model} holds no model (no config.json): pass a folder, or tiny{known}")
    if named and args.folder and os.path.isdir(args.folder) and os.listdir(args.folder):
        raise BadInput(f"the folder {args.folder} is not empty: choose another --folder, or pass it as --model if a model is in it")
    if args.preset not in ("", *PRESETS):
        parser.error(f"--preset must be one of {', '.join(PRESETS)}, got {args.preset!r}")
    if args.bits not in (4, 16, 32) or args.context < 0:
        parser.error(f"--bits must be 4, 16 or 32 and --context 0 or above, got {args.bits} and {args.context}")
    if args.json and (os.path.exists(args.json) or not os.path.isdir(os.path.dirname(args.json) or ".")):
        raise BadInput(f"{args.json} exists or its folder does not: choose another --json")
    args.model = args.model if tiny or named else os.path.abspath(args.model)
    args.folder = args.folder and os.path.abspath(args.folder)
    return args


def main(argv=None):
    args = parse(argv)
    if args.what not in ("growth", "limit", "rehearse", "resume"):
        try:
            found = metadata.version("trl")
        except metadata.PackageNotFoundError:
            found = "none"
        if not found.startswith(f"{PEER}."):
            raise BadInput(f"{args.what} needs TRL {PEER}, found {found}: pip install -r bench-requirements.txt "
                           "(growth, limit, rehearse and resume do without)")
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "peft")}
    figures = {"settings": vars(args), "versions": versions, "commit": commit()}
    if args.what in ("rehearse", "resume"):
        with full_size(args) as folder:
            figures |= {"rehearse": rehearse, "resume": resume}[args.what](args, folder)
    for what in ("learner", "rollout", "step", "growth", "limit") if args.what == "all" else (args.what,):
        if what in ("growth", "limit"):
            figures |= alone(args, what)
        elif what not in ("rehearse", "resume"):
            figures |= compare(args, what)
        if args.json:
            with open(args.json, "w") as file:
                json.dump(figures, file, indent=1)
    for name, value in figures.items():
        if isinstance(value, (int, float)):
            say(f"{name} {value:.4g}")


if __name__ == "__main__":
    cli(main)
