"""What bench.py starts: one side of one task in a process of its own, its figures as a line of JSON.

    python -m tools.bench_side JSON
"""
import json
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from rl.model import add_lora
from rl.runs import cli
from tools import bench_ours, bench_trl


def memory(key="VmRSS", reset=False):
    """Bytes now (VmRSS) or at most since the last reset (VmHWM)."""
    if torch.cuda.is_available():
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated() if key == "VmHWM" else torch.cuda.memory_allocated()
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def measure(how):
    """In a process of its own: one side of one task, as a dict of figures."""
    torch.set_num_threads(how.threads)
    model, tokenizer = bench_ours.policy(how, add_lora if how.side == "ours" else bench_trl.add_lora)
    if how.task in ("growth", "limit"):
        return {"growth": bench_ours.growth, "limit": bench_ours.limit}[how.task](how, model, tokenizer)
    side = {"ours": bench_ours, "trl": bench_trl}[how.side]
    work = {"learner": side.learner_work, "rollout": side.rollout_work, "step": side.step_work}[how.task](how, model, tokenizer)
    before = memory(reset=True)
    done = work() or {}
    if how.gradient:
        trainable = [p for _, p in sorted(model.named_parameters()) if p.requires_grad]
        torch.save(torch.cat([p.grad.flatten() for p in trainable]), how.gradient)
    cpu = time.process_time()
    seconds = bench_ours.clock(work)
    return {"seconds": seconds, "cpu_seconds": time.process_time() - cpu, "peak_bytes": memory("VmHWM") - before, **done}


if __name__ == "__main__":
    cli(lambda: print(json.dumps(measure(SimpleNamespace(**json.loads(sys.argv[1]))))))
