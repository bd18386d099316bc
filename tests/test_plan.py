"""rl/presets.py and plan.py: what fits on a card, and what is said of cards too small."""
import pytest
import torch
from transformers import LlamaConfig

import plan
from envs import BadInput
from rl import memory, presets
from rl.presets import PRESETS, fit

TINY = LlamaConfig(vocab_size=4000, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
                   num_key_value_heads=2, tie_word_embeddings=True)


@pytest.fixture
def tiny_config(monkeypatch):
    for module in (presets, plan):
        monkeypatch.setattr(module, "config_of", lambda name: TINY)


def test_a_context_above_the_usual_tokens_of_a_micro_batch():
    assert presets.largest(lambda n: n, 10 ** 6, 65_536, 131_072) == 131_072


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, 4, 16, 32])
def test_a_plan_fits_and_is_the_largest(tiny_config, bits):
    found = fit("tiny", 1.5, bits=bits, max_context=1024)
    room, left = found.room, found.room - found.fixed - found.unpacked
    assert all(sum(parts) <= room for parts in found.phases.values()) and set(found.phases) == {"rollout", "learn"}
    assert found.tokens % 1024 == 0 and found.bits == (bits or 16)
    assert found.tokens == presets.MOST_TOKENS or memory.learn(found.build(), int(1.1 * found.tokens) + 1024, 1024) > left
    assert found.envs == presets.MOST_ENVS or sum(memory.roll(found.build(), int(1.1 * found.envs) + 1, 1024)) > left
    if bits == 4:
        assert found.weights < fit("tiny", 1.5, bits=16, max_context=1024).weights


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_fits_its_card(preset):
    options = PRESETS[preset]
    build = memory.builder(presets.config_of("Qwen/Qwen3-4B"), torch.bfloat16, 16, options["gradient_checkpointing"])
    weights, unpacked = memory.weight_bytes(build(), options["bits"])
    fixed = weights + unpacked + 16 * sum(p.numel() for p in build().parameters() if p.requires_grad)
    room = (float(preset.removesuffix("gb")) - presets.CONTEXT) * (1 - presets.SHARE) * presets.GIB
    learning = memory.deep(memory.learn, build, options["micro_batch_tokens"], options["max_context"])
    rolling = sum(memory.deep(memory.roll, build, options["num_envs"], options["max_context"]))
    assert 0.7 * room < fixed + max(learning, rolling) and fixed + learning <= room and fixed + rolling <= room


@pytest.mark.parametrize("gpu, context, message", [(1.02, 1024, "the smallest card is 2 GiB"), (1.2, 65536, "--max-context")])
def test_a_card_too_small_says_what_fits(tiny_config, gpu, context, message):
    with pytest.raises(BadInput, match=message):
        fit("tiny", gpu, max_context=context)


# The program, with a teacher

@pytest.mark.slow
def test_a_teacher_is_planned_alone(tiny_config):
    found = fit("tiny", 2, max_context=512, further=plan.with_teacher("tiny", 4, 64))
    assert set(found.phases) == {"rollout", "learn", "teacher, alone", "distil"}
    assert all(sum(parts) <= found.room for parts in found.phases.values())
    assert "does not fit" not in plan.memory_table(found) and "--micro-batch-tokens" in plan.memory_table(found)


@pytest.mark.slow
def test_a_large_teacher_lowers_the_tokens(tiny_config, monkeypatch):
    """It has the card for itself, and the same micro-batches: what it needs is not left to a line that says "does not fit"."""
    large = LlamaConfig(**{**TINY.to_dict(), "hidden_size": 2048, "intermediate_size": 5376})
    monkeypatch.setattr(plan, "config_of", lambda name: large)
    alone, beside = (fit("tiny", 1.9, max_context=512, **more) for more in ({}, {"further": plan.with_teacher("large", 16, 64)}))
    assert 512 < beside.tokens < alone.tokens and all(sum(parts) <= beside.room for parts in beside.phases.values())


@pytest.mark.parametrize("argv, message", [
    (["--model", "x/y", "--gpu", "0.5"], "--gpu"), (["--model", "no/such", "--gpu", "24"], "Qwen/Qwen3-4B"),
    (["--gpu", "24"], "--model"), (["--model", "m", "--gpu", "24", "--wrong"], "--wrong")])
def test_bad_input_is_one_line(argv, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(BadInput, match=message):
        plan.main(argv)
