"""memory.py, plan.py: what they say is what a process takes, on the CPU; what is said of cards too small."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Qwen3_5TextConfig, Qwen3Config

import memory
import plan
from envs import BadInput
from options import PRESETS, Config, parse

ROOT = Path(__file__).parent.parent
CONFIGS = {
    "qwen3": lambda: Qwen3Config(vocab_size=151_936, hidden_size=128, intermediate_size=512, num_hidden_layers=4,
                                 num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=12,
                                 num_attention_heads=9, num_key_value_heads=3, head_dim=64, tie_word_embeddings=True),
    "wide": lambda: Qwen3Config(vocab_size=2000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=3,
                                num_attention_heads=8, num_key_value_heads=8, head_dim=128, tie_word_embeddings=False)}
MEASURE = """
import sys; sys.path[:0] = [{root!r}, {tests!r}]
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from model import add_lora, token_logps
from learner import add_gradient
from sampling import sampler
from test_plan import CONFIGS

def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

phase, rows, length, sampled, checkpointing = {phase!r}, {rows}, {length}, {sampled}, {checkpointing}
model = add_lora(AutoModelForCausalLM.from_config(CONFIGS[{name!r}](), dtype={dtype}).requires_grad_(False), 16)
trainable = [p for p in model.parameters() if p.requires_grad]

class chat:
    end_ids, pad_id = {{0}}, 0

def learn(rows, length):
    mask = torch.zeros(rows, length, dtype=torch.bool)
    mask[:, length - int(sampled * length):] = True
    add_gradient(token_logps(model, torch.ones(rows, length, dtype=torch.long), mask)[0].sum(), trainable)

def roll(rows, length):
    prompts = [[1 + n, *[2] * (length - 2)] for n in range(rows)]
    sampler(model, chat, max_new_tokens=2)(prompts)

if checkpointing:
    model.get_base_model().gradient_checkpointing_enable(gradient_checkpointing_kwargs={{"use_reentrant": False}})
    model.train()
{phase}(1, 64)
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
{phase}(rows, length)
print(status("VmHWM") - before)
"""


def measured(**what):
    """Bytes that the phase took beyond what the process had: a process of its own, without the allocator's reserves."""
    script = MEASURE.format(root=str(ROOT), tests=str(ROOT / "tests"), **what)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env={
        **os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"})
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


@pytest.mark.parametrize("name, dtype, phase, rows, length, sampled, checkpointing", [
    ("qwen3", torch.float32, "learn", 4, 512, 0.25, False),
    ("llama", torch.bfloat16, "learn", 2, 512, 0.25, False),
    ("llama", torch.float32, "learn", 4, 512, 0.5, True),
    ("wide", torch.float32, "learn", 1, 1024, 0.5, False),
    ("llama", torch.float32, "roll", 4, 512, 0, False)])
def test_the_plan_is_what_a_process_takes(name, dtype, phase, rows, length, sampled, checkpointing):
    model = memory.on_meta(CONFIGS[name](), dtype, 16, checkpointing)
    planned = memory.learn(model, rows * length, length, sampled) if phase == "learn" else sum(memory.roll(model, rows, length))
    took = measured(name=name, dtype=dtype, phase=phase, rows=rows, length=length, sampled=sampled, checkpointing=checkpointing)
    assert 0.85 < planned / took < 1.15, f"planned {planned / 1e6:.0f} MB, took {took / 1e6:.0f} MB"


def test_every_storage_is_counted_once_and_let_go():
    with memory.Live() as live:
        a = torch.empty(1000, device="meta")
        b = a.view(10, 100) + 1
        c = a[:10]
        assert live.now == 8000
        del b, a
        assert live.now == 4000  # c is a view of a
        del c
    assert (live.now, live.most) == (0, 8000)


def test_the_weights_of_known_models():
    """Parameters as published, in billions; NF4 packs what is linear, and neither embedding nor output."""
    for name, billions in (("Qwen/Qwen3-4B", 4.02), ("Qwen/Qwen3-8B", 8.19), ("Qwen/Qwen3.5-4B", 4.2), ("Qwen/Qwen3.5-27B", 26.9)):
        model = memory.on_meta(plan.config_of(name))
        weights, unpacked = memory.weight_bytes(model, 16)
        assert weights / 2e9 == pytest.approx(billions, rel=0.02) and unpacked == 0, name
        embedded = sum({id(p): p.nbytes for p in (model.get_input_embeddings().weight, model.get_output_embeddings().weight)}
                       .values())
        packed = memory.weight_bytes(model, 4)[0]
        assert packed == pytest.approx(embedded + (weights - embedded) / 4, rel=0.06), name


TINY = LlamaConfig(vocab_size=4000, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
                   num_key_value_heads=2, tie_word_embeddings=True)


@pytest.fixture
def tiny_config(monkeypatch):
    monkeypatch.setattr(plan, "config_of", lambda name: TINY)


def test_a_context_above_the_usual_tokens_of_a_micro_batch():
    assert plan.largest(lambda n: n, 10 ** 6, 65_536, 131_072) == 131_072


@pytest.mark.parametrize("bits", [None, 4, 16, 32])
def test_a_plan_fits_and_is_the_largest(tiny_config, bits):
    found = plan.plan("tiny", 1.5, bits=bits, max_context=1024)
    room, left = found.room, found.room - found.fixed - found.unpacked
    assert all(sum(parts) <= room for parts in found.phases.values()) and set(found.phases) == {"rollout", "learn"}
    assert found.tokens % 1024 == 0 and found.bits == (bits or 16)
    assert found.tokens == plan.MOST_TOKENS or memory.learn(found.model, int(1.1 * found.tokens) + 1024, 1024) > left
    assert found.envs == plan.MOST_ENVS or sum(memory.roll(found.model, int(1.1 * found.envs) + 1, 1024)) > left
    if bits == 4:
        assert found.weights < plan.plan("tiny", 1.5, bits=16, max_context=1024).weights


def test_a_teacher_is_planned_alone(tiny_config):
    found = plan.plan("tiny", 2, max_context=512, teacher="tiny", top_k=64)
    assert set(found.phases) == {"rollout", "learn", "teacher, alone", "distil"}
    assert all(sum(parts) <= found.room for parts in found.phases.values())
    assert "does not fit" not in plan.table(found) and "--micro-batch-tokens" in plan.table(found)


def test_a_large_teacher_lowers_the_tokens(monkeypatch):
    """It has the card for itself, and the same micro-batches: what it needs is not left to a line that says "does not fit"."""
    large = LlamaConfig(**{**TINY.to_dict(), "hidden_size": 2048, "intermediate_size": 5376})
    monkeypatch.setattr(plan, "config_of", lambda name: large if name == "large" else TINY)
    sizes = {"max_context": 512, "top_k": 64, "teacher_bits": 16}
    alone, beside = plan.plan("tiny", 1.9, **sizes), plan.plan("tiny", 1.9, teacher="large", **sizes)
    assert 512 < beside.tokens < alone.tokens and all(sum(parts) <= beside.room for parts in beside.phases.values())


def test_a_recurrent_model_can_be_planned():
    config = Qwen3_5TextConfig(vocab_size=500, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
                               num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2,
                               linear_key_head_dim=16, linear_value_head_dim=16)
    model = memory.on_meta(config, torch.float32, 4)
    assert memory.learn(model, 512, 128) > 0
    cache, rest = memory.roll(model, 4, 128)
    kv = 2 * 4 * 2 * 16 * 128 * 4  # of the one layer of attention
    assert kv < cache < 10 * kv and rest > 0


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kinds", [["full_attention"] * 8, [*["linear_attention"] * 3, "full_attention"] * 7])
def test_a_few_layers_tell_what_all_take(kinds, checkpointing):
    shape = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": len(kinds), "layer_types": kinds,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    recurrent = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    config = Qwen3_5TextConfig(**shape, **recurrent) if "linear_attention" in kinds else Qwen3Config(**shape)
    model = memory.on_meta(config, torch.float32, 4, checkpointing)
    for phase, *sizes in ((memory.learn, 512, 128), (memory.distil, 512, 128, 32), (memory.teach, 512, 128, 32), (memory.roll, 4, 128)):
        assert memory.deep(phase, model, *sizes) == pytest.approx(phase(model, *sizes), rel=1e-4), phase.__name__
    assert memory.period_of(model.get_base_model().model.layers, kinds) == len(set(kinds)) ** 2


@pytest.mark.parametrize("gpu, context, message", [(1.02, 1024, "the smallest card is 2 GiB"), (1.2, 65536, "--max-context")])
def test_a_card_too_small_says_what_fits(tiny_config, gpu, context, message):
    with pytest.raises(BadInput, match=message):
        plan.plan("tiny", gpu, max_context=context)


@pytest.mark.parametrize("argv, message", [
    (["--model", "x/y", "--gpu", "0.5"], "--gpu"), (["--model", "no/such", "--gpu", "24"], "Qwen/Qwen3-4B"),
    (["--gpu", "24"], "--model"), (["--model", "m", "--gpu", "24", "--wrong"], "--wrong")])
def test_bad_input_is_one_line(argv, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(BadInput, match=message):
        plan.main(argv)


# Presets

def test_a_preset_sets_what_the_user_did_not(capsys):
    argv = ["--model", "Qwen/Qwen3-4B-Instruct-2507", "--preset", "24gb"]
    config = parse(Config, argv)
    for name, value in PRESETS["24gb"].items():
        assert getattr(config, name) == value
    assert parse(Config, [*argv, "--num-envs=3"]).num_envs == 3 and capsys.readouterr().err == ""
    assert parse(Config, [*argv, "--num-envs", "3"]).micro_batch_tokens == config.micro_batch_tokens


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_fits_its_card(preset):
    options = PRESETS[preset]
    model = memory.on_meta(plan.config_of("Qwen/Qwen3-4B"), torch.bfloat16, 16, options["gradient_checkpointing"])
    weights, unpacked = memory.weight_bytes(model, options["bits"])
    fixed = weights + unpacked + 16 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    room = (float(preset.removesuffix("gb")) - plan.CONTEXT) * (1 - plan.SHARE) * plan.GIB
    learning = memory.deep(memory.learn, model, options["micro_batch_tokens"], options["max_context"])
    rolling = sum(memory.deep(memory.roll, model, options["num_envs"], options["max_context"]))
    assert 0.7 * room < fixed + max(learning, rolling) and fixed + learning <= room and fixed + rolling <= room


@pytest.mark.parametrize("argv", [["--model", "tiny-llama"], ["--model", "tiny-llama", "--max-context", "1024"]])
def test_a_preset_is_planned_anew_for_what_it_was_not_made_for(argv, tiny_config, capsys):
    config = parse(Config, [*argv, "--preset", "24gb"])
    assert "was made for Qwen/Qwen3-4B; planned anew for tiny-llama: --bits 16" in capsys.readouterr().err
    assert config.num_envs == plan.MOST_ENVS and config.max_context == (1024 if "--max-context" in argv else 4096)


@pytest.mark.parametrize("argv, message", [(["--preset", "12gb", "--model", "Qwen/Qwen3-4B"], "24gb, 48gb, 80gb"),
                                           (["--preset", "24gb"], "pass --model")])
def test_a_preset_that_makes_no_sense_is_one_line(argv, message):
    with pytest.raises(BadInput, match=message):
        parse(Config, argv)
