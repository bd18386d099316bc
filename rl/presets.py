"""What fits on a card: options as data for three sizes, and planned anew for another model.

    from rl.presets import PRESETS, fit
    fit("Qwen/Qwen3-8B", gpu=24)            # options, and bytes by phase, of rollouts and updates

How it is counted, and against what that was measured: memory.py. The card keeps CONTEXT GiB (of 2**30 bytes) for itself,
and the allocator's fragmentation takes SHARE of the rest. plan.py prints this and adds the phases of distill.py.
"""
import functools
from types import SimpleNamespace

from envs import BadInput

PRESETS = {  # what `fit` says for Qwen/Qwen3-4B, rank 16, at this context
    "24gb": {"bits": 16, "max_context": 4096, "num_envs": 14, "micro_batch_tokens": 36_864, "gradient_checkpointing": True},
    "48gb": {"bits": 16, "max_context": 4096, "num_envs": 38, "micro_batch_tokens": 65_536, "gradient_checkpointing": True},
    "80gb": {"bits": 16, "max_context": 4096, "num_envs": 70, "micro_batch_tokens": 12_288, "gradient_checkpointing": False}}
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


def fit(name, gpu, *, bits=None, rank=16, max_context=4096, optimizer="adamw", further=lambda found: {}):
    """What fits on a card of `gpu` GiB: options, and bytes by phase. Raises BadInput where nothing does.

    further(what was found) -> more phases that must fit, {name: (bytes that stay, bytes of an unpacked layer, phase, builder)}, as
    `passes` below.
    """
    import torch

    from rl.memory import builder, deep, learn, merged, roll, weight_bytes

    config = config_of(name)
    room = (gpu - CONTEXT) * (1 - SHARE) * GIB
    needs, found = [], None
    # The first of these settings under which a few episodes and a batch of two fit
    for width, checkpointing in ((16, False), (16, True), (4, True)) if bits is None else ((bits, False), (bits, True)):
        build = builder(config, torch.float32 if width == 32 else torch.bfloat16, rank, checkpointing)
        weights, unpacked = weight_bytes(build(), width)
        adapter = sum(p.numel() for p in build().parameters() if p.requires_grad)
        fixed = weights + adapter * (4 + 4 + (2 if optimizer == "paged_adamw_8bit" else 8))
        rest, copy = room - fixed - unpacked, merged(build(), width)
        least = max(deep(learn, build, max_context, max_context), copy + sum(deep(roll, build, 1, max_context)))
        needs.append((fixed + unpacked + least, width, checkpointing))
        if needs[-1][0] > room:
            continue
        tokens = largest(lambda n: deep(learn, build, n, max_context), rest, MOST_TOKENS, max_context)
        envs = largest(lambda n: sum(deep(roll, build, n, max_context)), rest - copy, MOST_ENVS)
        found = SimpleNamespace(name=name, gpu=gpu, bits=width, checkpointing=checkpointing, tokens=tokens, envs=envs,
                                context=max_context, weights=weights, fixed=fixed, unpacked=unpacked, copy=copy, room=room,
                                build=build)
        if tokens >= max(2 * max_context, 8192) and envs >= 8:
            break
    if found is None:
        least, width, _ = min(needs)
        raise BadInput(f"{name} does not fit on {gpu} GiB: one episode of {max_context} tokens takes {least / GIB:.1f} GiB at "
                       f"{width} bits with activation checkpointing, so the smallest card is "
                       f"{int(least / GIB / (1 - SHARE) + CONTEXT) + 1} GiB; lower --max-context or take a smaller model")
    # Every phase at these settings, with fewer tokens where one of them needs it
    cache, rolling = deep(roll, found.build, found.envs, max_context)
    passes = {"learn": (found.fixed, found.unpacked, learn, found.build), **further(found)}

    @functools.cache
    def taken(phase, tokens):
        fixed, unpacked, work, build = passes[phase]
        return fixed, 0, unpacked + deep(work, build, tokens, max_context)

    while found.tokens > max_context and any(sum(taken(phase, found.tokens)) > room for phase in passes):
        found.tokens -= max_context
    found.phases = {"rollout": (found.fixed, cache, rolling + found.copy + found.unpacked)}
    found.phases |= {phase: taken(phase, found.tokens) for phase in passes}
    return found


def as_options(found) -> dict:
    """What was found as fields of rl.options.Config."""
    return {"bits": found.bits, "num_envs": found.envs, "micro_batch_tokens": found.tokens, "max_context": found.context,
            "gradient_checkpointing": found.checkpointing}


def as_words(found) -> str:
    return " ".join([f"--bits {found.bits}", f"--num-envs {found.envs}", f"--micro-batch-tokens {found.tokens}",
                     f"--max-context {found.context}", *["--gradient-checkpointing"] * found.checkpointing])


def preset_for(preset, model, rank, optimizer, **wanted):
    """(the fields of a preset, "") or, where the model, rank, optimizer or what is `wanted` (bits, max_context) differ from those it
    was made for, (fields that were planned anew, these as words)."""
    fields, shape = PRESETS[preset], config_of(model)
    made_for = all(getattr(shape, key) == value for key, value in KNOWN["Qwen/Qwen3-4B"].items())
    if made_for and (rank, optimizer) == (16, "adamw") and wanted in ({}, {"max_context": fields["max_context"]}):
        return fields, ""
    found = fit(model, float(preset.removesuffix("gb")), rank=rank, optimizer=optimizer,
                **{"max_context": fields["max_context"]} | wanted)
    return as_options(found), as_words(found)
