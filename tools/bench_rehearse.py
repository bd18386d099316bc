"""What `bench.py rehearse` measures: one training step at the size of a real model, before its weights are there.

    python bench.py rehearse --model Qwen/Qwen3-4B --checkpointing --json rehearsal.json

The model has the real architecture, the real tokenizer and random weights: `make` writes it as a folder, a module at a time, so that
even 8B never fill the memory while they are made. Then a process of its own does what `python grpo.py` does, with the same functions:
load (4 bits are packed here), adapter, trial, rollout on the built-in game, update. Figures are "part.figure", in seconds and bytes:

1. Parts: load, trial (rl/trial.py), rollout, learn. Of the rollout, prefill is the passes over more than one new token, decode all
   else of the sampler; of learn, optimizer is its step. `cpu_seconds` is processor time: other work on the machine does not count.
2. Peaks: on a CPU the resident high-water mark of the process in that part, nothing subtracted (what it had before the model is
   `process_bytes`); on a GPU the allocator's peak. `plan.*` is what rl/memory.py says for the same rows.
3. Shares: products and bytes that the part needs, over what this machine does (`rates` in bench_ours.py), over its time. Logits and
   activations that are made again are no progress; `with_recompute` counts the activations. With 4 bits the time to unpack them is in.
4. Random weights win no game, so `Varied` rewards by the answer's letters: a group has a spread, and the learner something to do.
"""
import ctypes
import json
import math
import os
import shutil
import signal
import sys
import tarfile
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from envs import BadInput, parse_options, select_tasks
from envs.keydoor import KeyDoor
from grpo import Options, algorithm
from rl.learner import make_optimizer
from rl.memory import builder, causal_of, deep, learn, roll, weight_bytes
from rl.model import add_lora, default_device, load_model
from rl.options import limits_of, parse
from rl.policy import tried_chat
from rl.presets import CONTEXT, GIB, config_of
from rl.rollout import rollout
from rl.runs import cli
from rl.sampling import sampler
from rl.train import Algorithm, Step
from tools.bench_ours import learner_flops, rates
from tools.bench_side import memory

TIMES = "seconds", "cpu_seconds"
WATCH = 0 if torch.cuda.is_available() else 1  # of TIMES, for shares
SHARD = 2 * 10 ** 9  # bytes of a file of weights
KEPT = {"qwen3": "qwen3_tokenizer", "qwen3_5_text": "qwen3_5_tokenizer"}  # in qwen_tokenizers.tar.xz, by model type


class Varied(KeyDoor):
    """The game goes on whatever is said. words: so many more in the first observation. A process whose environment says
    KILLED_AT_RESET=n ends with its nth reset, as by `kill -9`."""

    resets = 0

    def __init__(self, words: int = 0):
        super().__init__(stages=1, commands=3)
        self.words = words

    @classmethod
    def tasks(cls, split):
        return KeyDoor.tasks(split, stages=1, commands=3)

    def reset(self, *, task, seed):
        Varied.resets += 1
        if str(Varied.resets) == os.environ.get("KILLED_AT_RESET"):
            os.kill(os.getpid(), signal.SIGKILL)
        text, info = super().reset(task=task, seed=seed)
        return text + self.words * " go", info

    def step(self, action):
        self.stage = min(self.stage + 1, self.stages - 1)
        return self._view(), sum(map(ord, action)) % 97 / 97, False, False, self._info(valid=True)


# The model

def make(how):
    """Write the model named `how.model` to `how.folder`, with random weights in bf16 and its tokenizer."""
    config = config_of(how.model)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    size, free = sum(p.nbytes for p in model.parameters()), shutil.disk_usage(how.folder).free
    if size > free:
        raise BadInput(f"{how.model} takes {size / 1e9:.1f} GB of disk, {how.folder} has {free / 1e9:.1f}: pass a --folder elsewhere")
    tokenizer_of(how.model, config).save_pretrained(how.folder)
    torch.manual_seed(0)
    shards, shard = [], {}
    for prefix, module in model.named_modules():
        if all(p is None for p in module._parameters.values()) or (
                config.tie_word_embeddings and module is model.get_output_embeddings()):
            continue
        module.to_empty(device=default_device(), recurse=False)
        model._init_weights(module)  # the architecture's own
        shard |= {name: p.detach().cpu() for name, p in module.named_parameters(prefix, recurse=False)}
        module.to_empty(device="meta", recurse=False)
        if sum(p.nbytes for p in shard.values()) > SHARD:
            shards, shard = write(how.folder, shards, shard), {}
    shards = write(how.folder, shards, shard)
    (Path(how.folder) / "model.safetensors.index.json").write_text(json.dumps(
        {"metadata": {"total_size": size}, "weight_map": {name: file for file, names in shards for name in names}}))
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    config.save_pretrained(how.folder)  # last: a folder with it is whole
    return {"weight_file_bytes": size}


def write(folder, shards, shard):
    file = f"model-{len(shards) + 1:05d}.safetensors"
    save_file(shard, os.path.join(folder, file), metadata={"format": "pt"})
    return [*shards, (file, list(shard))]


def tokenizer_of(name, config):
    """The real tokenizer: of the tests' data where it is there, else of the hub."""
    archive = Path(os.environ.get("SCAFFOLD_FUNNEL_DATA", "../shared/data")) / "qwen_tokenizers.tar.xz"
    if archive.exists() and config.model_type in KEPT:
        with tempfile.TemporaryDirectory() as folder, tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
            return AutoTokenizer.from_pretrained(os.path.join(folder, KEPT[config.model_type]))
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise BadInput(f"no tokenizer of {name}: neither {archive} is there nor the hub ({str(error).strip().splitlines()[0]}); "
                       "set SCAFFOLD_FUNNEL_DATA to the folder of qwen_tokenizers.tar.xz") from error


# The step

def now():
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def own_seconds(work):
    """Seconds of work(): on a GPU as they pass, on a CPU those of the processor, since other work runs there."""
    start = now()
    work()
    return now()[WATCH] - start[WATCH]


@contextmanager
def part(figures, name):
    """Adds the time that is spent inside to `name`."""
    start = now()
    yield
    for key, spent in zip(TIMES, (b - a for a, b in zip(start, now()))):
        figures[f"{name}.{key}"] = figures.get(f"{name}.{key}", 0.0) + spent


@contextmanager
def phase(figures, name):
    """The same, and the peak of memory."""
    memory(reset=True)
    with part(figures, name):
        yield
    figures[f"{name}.peak_bytes"] = memory("VmHWM")
    if torch.cuda.is_available():
        figures[f"{name}.reserved_bytes"] = torch.cuda.max_memory_reserved()


def refuse_if_too_large(how, config, least):
    """Before anything is loaded; `least` bytes are what stays there all the time."""
    room = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else next(
        int(line.split()[1]) * 1024 for line in open("/proc/meminfo") if line.startswith("MemAvailable"))
    if 1.1 * least > room:
        raise BadInput(f"{how.name} at {config.bits} bits takes at least {1.1 * least / 1e9:.1f} GB, {room / 1e9:.1f} are free here: "
                       "pass --bits 4, a smaller --model, or end what else runs")


def rehearse(how):
    """One step of `python grpo.py` with the options `how.argv`, as a dict of figures."""
    config = parse(Options, how.argv, "")
    shape = config_of(config.model)
    whole = config.bits == 32 or config.bits == 0 and not torch.cuda.is_available()
    build = builder(shape, torch.float32 if whole else torch.bfloat16, config.lora_rank, config.gradient_checkpointing)
    weights, unpacked = weight_bytes(build(), config.bits)  # `unpacked` is a layer of 4 bits while it is used
    adapter = sum(p.numel() for p in build().parameters() if p.requires_grad)
    fixed = weights + 16 * adapter + unpacked  # fp32 with its gradient and AdamW's two
    refuse_if_too_large(how, config, fixed)
    figures = {"process_bytes": memory(), "cap_bytes": 0}
    if config.preset and torch.cuda.is_available():  # a smaller card: what its own context takes is outside of the allocator
        figures["cap_bytes"] = int((float(config.preset.removesuffix("gb")) - CONTEXT) * GIB)
        torch.cuda.set_per_process_memory_fraction(min(1.0, figures["cap_bytes"] / torch.cuda.mem_get_info()[1]))

    # The policy, as load_policy makes it
    with phase(figures, "load"):
        base, tokenizer = load_model(config.model, config.bits)
        if config.bits == 4 and base.device.type == "cpu":  # let go of what loading leaves resident and nobody uses
            for p in base.parameters():  # one tensor in the mapped file of 16-bit weights keeps all of its pages
                p.data = p.data if p.dtype == torch.uint8 else p.data.clone()
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        model = add_lora(base, config.lora_rank, seed=config.seed)
    with phase(figures, "trial"):
        chat = tried_chat(model, tokenizer, config.thinking, config.max_context)
    if config.gradient_checkpointing:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = make_optimizer(model, config.lr, config.optimizer)
    step = Step(config, Algorithm(**algorithm(config)), model, optimizer, chat)
    options = parse_options(config.env_options)
    tasks = select_tasks(config.env, "train", options=options)
    if how.filled:  # one turn, whose prompt and answer are the whole context
        config.tasks_per_step = config.num_envs // config.group
        first = Varied(**options).reset(task=tasks[0], seed=0)[0]
        prompt = chat.prompt([("system", Varied.system_prompt), ("user", first)])
        options["words"] = config.max_context - config.max_new_tokens - len(prompt) - 16  # tasks differ by some tokens
    envs = [Varied(**options) for _ in range(min(config.num_envs, config.tasks_per_step * config.group))]

    # Rollout, with a watch on the passes over more than one new token
    act, counts, begun = sampler(model, chat, max_new_tokens=config.max_new_tokens), {"prefill": 0, "decode": 0}, []

    def before(_, args, kwargs):
        rows, width = kwargs["input_ids"].shape
        counts["prefill" if width > 1 else "decode"] += rows * width if width > 1 else 1
        if width > 1:
            begun.append(part(figures, "prefill"))
            begun[-1].__enter__()

    def after(*_):
        if begun:
            begun.pop().__exit__(None, None, None)

    def timed(prompts):
        with part(figures, "sampler"):
            return act(prompts)

    hooks = [causal_of(model).base_model.register_forward_pre_hook(before, with_kwargs=True),
             causal_of(model).base_model.register_forward_hook(after)]
    with phase(figures, "rollout"):
        groups, played = step.play(1, tasks, lambda requests: rollout(timed, chat, envs, requests, **limits_of(config, envs[0])))
    for hook in hooks:
        hook.remove()
    for key in TIMES:
        figures[f"decode.{key}"] = figures.pop(f"sampler.{key}") - figures[f"prefill.{key}"]

    # Update
    stats, watch = {}, []
    optimizer.register_step_pre_hook(lambda *_: watch.append(now()))
    optimizer.register_step_post_hook(lambda *_: watch.append(now()))
    with phase(figures, "learn"):
        stats = step.learn(1, played, step.advantages(played))
    for n, key in enumerate(TIMES):
        figures[f"optimizer.{key}"] = sum(end[n] - start[n] for start, end in zip(watch[::2], watch[1::2]))
        figures[f"learn.{key}"] -= figures[f"optimizer.{key}"]
    if not (stats["optimizer_steps"] and math.isfinite(stats["sampler_gap"])):
        raise BadInput("the step had no gradient: no group had a spread; pass a larger --group")

    # Beside the plan for the same rows, and the machine's own rates
    lengths = [len(row.ids) for t in played for row in t.rows]
    longest, sampled = max(lengths), stats["learn_tokens"]
    together = max(1, min(len(lengths), step.micro_batch_tokens // longest)) * longest
    figures |= {"plan.rollout_bytes": fixed + sum(deep(roll, build, len(envs), longest)),
                "plan.learn_bytes": fixed + deep(learn, build, together, longest, sampled / sum(lengths)),
                "peak_bytes": max(figures["rollout.peak_bytes"], figures["learn.peak_bytes"]),
                **rates(model.dtype, model.device, own_seconds), "device": device_name(),
                "row_tokens": lengths, "prefill.tokens": counts["prefill"], "decode.steps": counts["decode"],
                "decode.rows": len(envs), "keeps_cache": chat.keep_cache, "micro_batch_tokens": step.micro_batch_tokens,
                **{name: stats[name] for name in ("learn_tokens", "sampler_gap", "sampler_gap_max", "grad_norm", "entropy_learner")}}
    figures["plan_over_peak"] = max(figures["plan.rollout_bytes"], figures["plan.learn_bytes"]) / figures["peak_bytes"]
    return figures | shares(figures, model, build(), config.gradient_checkpointing)


def device_name():
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return next((line.partition(": ")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "a CPU")


def shares(figures, model, on_meta, checkpointing):
    """{part.share}: the time that the part's products or bytes take at the machine's own rates, over the part's time. on_meta: the same
    model, whose weights are not packed."""
    def outside(named):
        return [p for name, p in named if "embed" not in name and "lm_head" not in name]

    numbers, head = sum(p.numel() for p in outside(on_meta.named_parameters())), model.get_output_embeddings().weight
    lengths, rate, bandwidth = (figures[name] for name in ("row_tokens", "product_flops_per_second", "copy_bytes_per_second"))
    read = head.nbytes + sum(p.nbytes for p in outside(model.named_parameters()))
    token = max(read / bandwidth, 2 * figures["decode.rows"] * (numbers + head.numel()) / rate)
    needed, _ = learner_flops(on_meta, len(lengths), sum(lengths) / len(lengths), figures["learn_tokens"])
    again = 2 * numbers * sum(lengths) * checkpointing
    return {f"{name}.share": seconds / figures[f"{name.removesuffix('_with_recompute')}.{TIMES[WATCH]}"] for name, seconds in (
        ("prefill", 2 * numbers * figures["prefill.tokens"] / rate), ("decode", token * figures["decode.steps"]),
        ("learn", needed / rate), ("learn_with_recompute", (needed + again) / rate))}


if __name__ == "__main__":
    asked = SimpleNamespace(**json.loads(sys.argv[1]))
    torch.set_num_threads(asked.threads)
    cli(lambda: print(json.dumps({"make": make, "rehearse": rehearse}[asked.task](asked))))
