"""rl/memory.py: what it counts is what a process takes, on the CPU."""
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from transformers import LlamaConfig, Qwen3_5TextConfig, Qwen3Config

import plan
from rl import memory
from rl.presets import config_of

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
from rl.learner import add_gradient, token_logps
from rl.model import add_lora
from rl.sampling import sampler
from test_memory import CONFIGS

def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

phase, rows, length, sampled, checkpointing = {phase!r}, {rows}, {length}, {sampled}, {checkpointing}
model = add_lora(AutoModelForCausalLM.from_config(CONFIGS[{name!r}](), dtype={dtype}).requires_grad_(False), 16)
trainable = [p for p in model.parameters() if p.requires_grad]

class chat:
    end_ids, pad_id, keep_cache = {{0}}, 0, True

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


@pytest.mark.slow
@pytest.mark.parametrize("name, dtype, phase, rows, length, sampled, checkpointing", [
    ("qwen3", torch.float32, "learn", 4, 512, 0.25, False),
    ("llama", torch.bfloat16, "learn", 2, 512, 0.25, False),
    ("llama", torch.float32, "learn", 4, 512, 0.5, True),
    ("wide", torch.float32, "learn", 1, 1024, 0.5, False),
    ("llama", torch.float32, "roll", 4, 512, 0, False)])
def test_the_plan_is_what_a_process_takes(name, dtype, phase, rows, length, sampled, checkpointing):
    model = memory.builder(CONFIGS[name](), dtype, 16, checkpointing)()
    planned = (memory.learn(model, rows * length, length, sampled) if phase == "learn" else
               sum(memory.roll(model, rows, length)) + memory.merged(model, 32))
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
        model = memory.builder(config_of(name))()
        weights, unpacked = memory.weight_bytes(model, 16)
        assert weights / 2e9 == pytest.approx(billions, rel=0.02) and unpacked == 0, name
        embedded = sum({id(p): p.nbytes for p in (model.get_input_embeddings().weight, model.get_output_embeddings().weight)}
                       .values())
        packed = memory.weight_bytes(model, 4)[0]
        assert packed == pytest.approx(embedded + (weights - embedded) / 4, rel=0.06), name


def test_a_recurrent_model_can_be_planned():
    config = Qwen3_5TextConfig(vocab_size=500, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
                               num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2,
                               linear_key_head_dim=16, linear_value_head_dim=16)
    model = memory.builder(config, torch.float32, 4)()
    assert memory.learn(model, 512, 128) > 0
    cache, rest = memory.roll(model, 4, 128)
    kv = 2 * 4 * 2 * 16 * 128 * 4  # of the one layer of attention
    assert kv < cache < 10 * kv and rest > 0


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kinds", [["full_attention"] * 8, [*["linear_attention"] * 3, "full_attention"] * 7])
def test_a_few_layers_tell_what_all_take(kinds, checkpointing, monkeypatch):
    shape = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": len(kinds), "layer_types": kinds,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    recurrent = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    config = Qwen3_5TextConfig(**shape, **recurrent) if "linear_attention" in kinds else Qwen3Config(**shape)
    build = memory.builder(config, torch.float32, 4, checkpointing)
    monkeypatch.setattr(plan, "config_of", lambda name: config)
    of_teacher = plan.with_teacher("", 16, 32)(SimpleNamespace(fixed=0, unpacked=0, build=build))
    (_, _, teach, *_), (_, _, distil, *_) = of_teacher["teacher, alone"], of_teacher["distil"]
    for phase, *sizes in ((memory.learn, 512, 128), (distil, 512, 128), (teach, 512, 128), (memory.roll, 4, 128)):
        assert memory.deep(phase, build, *sizes) == pytest.approx(phase(build(), *sizes), rel=1e-4), phase.__name__
    assert memory.period_of(build().get_base_model().model.layers, kinds) == len(set(kinds)) ** 2
