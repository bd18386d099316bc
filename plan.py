"""Does it fit on the card? Options and the memory of every phase, from the configuration of a model alone.

    python model.py --plan --model Qwen/Qwen3-4B --gpu 24
    python model.py --plan --model Qwen/Qwen3.5-4B --gpu 48 --teacher Qwen/Qwen3.5-27B --max-context 8192
    python grpo.py --preset 24gb --model Qwen/Qwen3-4B ...        # passes the options that such a plan ends with

How it is counted, and against what that was measured: memory.py. The card keeps CONTEXT GiB (of 2**30 bytes) for itself,
and the allocator's fragmentation SHARE of the rest. The teacher is in memory alone.
"""
import functools
from types import SimpleNamespace

import torch

from envs import BadInput
from memory import deep, distil, learn, on_meta, roll, teach, weight_bytes

GIB = 2 ** 30
CONTEXT, SHARE = 1.0, 0.05
MOST_TOKENS, MOST_ENVS = 65_536, 256  # more does not make a step faster
QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8, "num_attention_heads": 32,
         "num_hidden_layers": 36}
QWEN3_5 = {"model_type": "qwen3_5_text", "vocab_size": 248_320, "head_dim": 256, "num_key_value_heads": 4,
           "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
KNOWN = {  # shapes of models that can be planned without a network
    "Qwen/Qwen3-4B": {**QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "Qwen/Qwen3-8B": {**QWEN3, "hidden_size": 4096, "intermediate_size": 12_288, "tie_word_embeddings": False},
    "Qwen/Qwen3.5-4B": {**QWEN3_5, "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32,
                        "num_attention_heads": 16, "linear_num_value_heads": 32, "tie_word_embeddings": True},
    "Qwen/Qwen3.5-27B": {**QWEN3_5, "hidden_size": 5120, "intermediate_size": 17_408, "num_hidden_layers": 64,
                         "num_attention_heads": 24, "linear_num_value_heads": 48, "tie_word_embeddings": False}}
SAME_SHAPE = {"Qwen/Qwen3-4B-Instruct-2507": "Qwen/Qwen3-4B", "Qwen/Qwen3-4B-Thinking-2507": "Qwen/Qwen3-4B"}


def config_of(name):
    """The configuration of a known model, a folder or, over the network, a name on the hub."""
    from transformers import AutoConfig

    shape = KNOWN.get(SAME_SHAPE.get(name, name))
    if shape:
        return AutoConfig.for_model(**shape)
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read the configuration of {name!r} ({str(error).strip().splitlines()[0]}); known without a "
                       f"network: {', '.join([*KNOWN, *SAME_SHAPE])}") from error
    return getattr(config, "text_config", config)


def largest(bytes_of, room, most, unit=1):
    """The largest multiple of `unit` up to `most` whose bytes fit into `room`, bytes being nearly linear; 0 if none does."""
    one, two = bytes_of(unit), bytes_of(2 * unit)
    n = min(max(most // unit, 1), int((room - one) / max(1, two - one)) + 1)
    while n > 0 and bytes_of(n * unit) > room:
        n = min(n - 1, int(0.95 * n))
    return max(n, 0) * unit


def plan(name, gpu, *, bits=None, rank=16, max_context=4096, optimizer="adamw", teacher="", teacher_bits=4, top_k=4096):
    """What fits on a card of `gpu` GiB: options, and bytes by phase. Raises BadInput where nothing does."""
    config = config_of(name)
    room = (gpu - CONTEXT) * (1 - SHARE) * GIB
    needs, chosen = [], None
    for width, checkpointing in ((16, False), (16, True), (4, True)) if bits is None else ((bits, False), (bits, True)):
        model = on_meta(config, torch.float32 if width == 32 else torch.bfloat16, rank, checkpointing)
        weights, unpacked = weight_bytes(model, width)
        adapter = sum(p.numel() for p in model.parameters() if p.requires_grad)
        fixed = weights + adapter * (4 + 4 + (2 if optimizer == "paged_adamw_8bit" else 8))
        rest = room - fixed - unpacked
        least = max(deep(learn, model, max_context, max_context), sum(deep(roll, model, 1, max_context)))
        needs.append((fixed + unpacked + least, width, checkpointing))
        if needs[-1][0] > room:
            continue
        tokens = largest(lambda n: deep(learn, model, n, max_context), rest, MOST_TOKENS, max_context)
        envs = largest(lambda n: sum(deep(roll, model, n, max_context)), rest, MOST_ENVS)
        chosen = SimpleNamespace(name=name, gpu=gpu, bits=width, checkpointing=checkpointing, tokens=tokens, envs=envs,
                                 context=max_context, optimizer=optimizer, weights=weights, fixed=fixed, unpacked=unpacked,
                                 room=room, model=model)
        if tokens >= max(2 * max_context, 8192) and envs >= 8:
            break
    if chosen is None:
        least, width, _ = min(needs)
        raise BadInput(f"{name} does not fit on {gpu} GiB: one episode of {max_context} tokens takes {least / GIB:.1f} GiB at "
                       f"{width} bits with activation checkpointing, so the smallest card is "
                       f"{int(least / GIB / (1 - SHARE) + CONTEXT) + 1} GiB; lower --max-context or take a smaller model")
    cache, rolling = deep(roll, chosen.model, chosen.envs, max_context)
    chosen.phases = {"rollout": (chosen.fixed, cache, rolling + chosen.unpacked)}
    passes = {"learn": (chosen.fixed, chosen.unpacked, learn, chosen.model, ())}
    if teacher:
        other = on_meta(config_of(teacher))
        passes |= {"teacher, alone": (*weight_bytes(other, teacher_bits), teach, other, (top_k,)),
                   "distil": (chosen.fixed, chosen.unpacked, distil, chosen.model, (top_k,))}

    @functools.cache
    def taken(phase, tokens):
        fixed, unpacked, work, model, more = passes[phase]
        return fixed, 0, unpacked + deep(work, model, tokens, max_context, *more)

    while chosen.tokens > max_context and any(sum(taken(phase, chosen.tokens)) > room for phase in passes):
        chosen.tokens -= max_context
    chosen.phases |= {phase: taken(phase, chosen.tokens) for phase in passes}
    return chosen


def options_of(found) -> dict:
    """The plan as fields of train.Config."""
    return {"bits": found.bits, "num_envs": found.envs, "micro_batch_tokens": found.tokens, "max_context": found.context,
            "gradient_checkpointing": found.checkpointing}


def as_words(found) -> str:
    return " ".join([f"--bits {found.bits}", f"--num-envs {found.envs}", f"--micro-batch-tokens {found.tokens}",
                     f"--max-context {found.context}", *["--gradient-checkpointing"] * found.checkpointing])


def table(found) -> str:
    lines = [f"{found.name}, context of {found.context} tokens, on {found.gpu} GiB: {found.room / GIB:.1f} to use "
             f"({CONTEXT:.0f} for the card itself, {SHARE:.0%} for fragmentation)", "",
             "GiB              weights, adapter, optimizer   cache   working    peak"]
    for phase, (fixed, cache, rest) in found.phases.items():
        total = fixed + cache + rest
        lines.append(f"{phase:<15}  {fixed / GIB:>27.1f}  {cache / GIB:>6.1f}  {rest / GIB:>8.1f}  {total / GIB:>6.1f}"
                     + ("" if total <= found.room else "   does not fit"))
    return "\n".join([*lines, "", "pass " + as_words(found)])


def main(argv=None):
    import argparse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--plan", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", required=True, help=f"a folder, a name on the hub, or without a network: {', '.join(KNOWN)}")
    parser.add_argument("--gpu", type=float, required=True, help="memory of the card in GiB")
    parser.add_argument("--bits", type=int, choices=(4, 16, 32), help="of the weights (default: 16 if that fits, else 4)")
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--max-context", type=int, default=4096, help="tokens of an episode (default: %(default)s)")
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "paged_adamw_8bit"))
    parser.add_argument("--teacher", default="", help="plan distill.py with this teacher, which is in memory alone")
    parser.add_argument("--teacher-bits", type=int, default=4, choices=(4, 16))
    parser.add_argument("--top-k", type=int, default=4096, help="as in distill.py")

    def refuse(message):
        raise BadInput(f"{message} (see --help)")

    parser.error = refuse
    args = parser.parse_args(argv)
    if args.gpu <= CONTEXT or args.max_context < 16 or args.lora_rank < 1 or args.top_k < 0:
        raise BadInput(f"--gpu must be above {CONTEXT:.0f}, --max-context at least 16, --lora-rank at least 1, --top-k 0 or above")
    found = plan(args.model, args.gpu, bits=args.bits, rank=args.lora_rank, max_context=args.max_context,
                 optimizer=args.optimizer, teacher=args.teacher, teacher_bits=args.teacher_bits, top_k=args.top_k)
    print(table(found))


if __name__ == "__main__":
    from train import cli
    cli(main)
