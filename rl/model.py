"""A Hugging Face causal LM with a LoRA adapter: loading, adapters, the reference.

    from rl.model import load_model, add_lora
    base, tokenizer = load_model("Qwen/Qwen3-4B", bits=4)
    model = add_lora(base, rank=16)
"""
import copy
import json
import os
import sys
from contextlib import contextmanager

import torch


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model(name: str, bits: int = 0, device=None):
    """A causal LM from the hub or a folder, frozen, and its tokenizer.

    bits: 16 is bf16, 32 fp32, 4 NF4 with double quantisation through bitsandbytes, 0 bf16 on a GPU and fp32 without.
    Raises OSError (no such model) or ValueError (a kind of model that this file cannot score).
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, GenerationConfig
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()

    device = torch.device(device or default_device())
    if bits not in (0, 4, 16, 32):
        raise ValueError(f"bits must be 4, 16, 32 or 0 (bf16 on a GPU, fp32 without), got {bits}")
    if name.startswith((".", "/", "~")) and not os.path.isdir(name):
        raise OSError(f"there is no folder {name}")
    if os.path.isdir(name) and not os.path.exists(os.path.join(name, "config.json")):
        raise OSError(f"the folder {name} holds no model (no config.json)")
    dtype = torch.float32 if bits == 32 or (bits == 0 and device.type == "cpu") else torch.bfloat16
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                                      bnb_4bit_compute_dtype=torch.bfloat16) if bits == 4 else None
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer of {name} has no chat template: use an instruct model")
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, quantization_config=quantization,
                                                 device_map={"": device} if bits == 4 else None)
    model = model if bits == 4 else model.to(device)
    for field in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(model.config, field, None) not in (None, 0, 1):
            raise ValueError(f"{name} rescales its logits ({field}); token_logps would leave that out")
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ValueError(f"the output layer of {name} has a bias; token_logps would leave that out")
    ends = model.generation_config.eos_token_id
    # A fresh generation config: a shipped one (Qwen: 0.6, top-k 20, top-p 0.95) would change what is sampled.
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    model.requires_grad_(False)  # and no cast of norms or embeddings to fp32: +0.8 GB on a tied 4B embedding
    return model.eval(), tokenizer


def add_lora(model, rank: int = 16, alpha: float | None = None, seed: int = 0):
    """LoRA on all linear layers but the output: dropout 0 (log-probs must not be noisy), no biases, adapter in fp32."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    return in_input_dtype(get_peft_model(model, LoraConfig(
        r=rank, lora_alpha=alpha or 2 * rank, lora_dropout=0.0, bias="none", target_modules="all-linear",
        task_type="CAUSAL_LM"))).eval()


class InInputType(torch.nn.Linear):
    """A linear layer that computes in the type of what it is given; its weights and gradients stay what they are, fp32."""

    def __init__(self, linear):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.weight, self.bias = (
            linear.in_features, linear.out_features, linear.weight, linear.bias)

    def forward(self, x):
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return torch.nn.functional.linear(x, self.weight.to(x.dtype), bias)


def in_input_dtype(model):
    """Let adapters compute in the type of what they are given, with weights and gradients in fp32.

    PEFT casts what a layer is given to fp32 instead, layer by layer, and keeps each copy for the backward pass: with a
    base model in bf16 that is half of all activations. To be called again after an adapter was added.
    """
    from peft.tuners.lora import LoraLayer

    for layer in model.modules():
        if isinstance(layer, LoraLayer) and layer.get_base_layer().weight.dtype != torch.float32:
            layer.cast_input_dtype_enabled = False  # PEFT's own switch
            for parts in (layer.lora_A, layer.lora_B):
                for name, linear in list(parts.items()):
                    parts[name] = linear if isinstance(linear, InInputType) else InInputType(linear)
    return model


def load_adapter(model, folder: str, trainable: bool = True):
    """An adapter in PEFT's format on a base model from `load_model`."""
    from peft import PeftModel

    if not os.path.exists(os.path.join(folder, "adapter_config.json")):
        raise OSError(f"the folder {folder} holds no adapter (no adapter_config.json)")
    model = in_input_dtype(PeftModel.from_pretrained(model, folder, is_trainable=trainable)).eval()
    if not isinstance(model.get_base_model().get_output_embeddings(), torch.nn.Linear):
        raise ValueError(f"the adapter in {folder} changes the output layer; token_logps would leave that out")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # an adapter from elsewhere may bring its own
    return model


def adapter_base(folder: str) -> str | None:
    """The name of the base model that an adapter in `folder` was trained on, or None if it holds no adapter."""
    path = os.path.join(folder, "adapter_config.json")
    if not os.path.exists(path):
        return None
    with open(path) as file:
        return json.load(file)["base_model_name_or_path"]


def freeze_reference(model):
    """Keep a frozen copy of the adapter as it is now: the reference when training does not start from the base model."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    model.add_adapter("reference", copy.deepcopy(model.peft_config["default"]))
    set_peft_model_state_dict(model, get_peft_model_state_dict(model, adapter_name="default"), adapter_name="reference")
    model.set_adapter("default")
    in_input_dtype(model)


def load_reference(model, checkpoint: str):
    """The frozen reference that a checkpoint holds, if it holds one."""
    if os.path.isdir(os.path.join(checkpoint, "reference")):
        model.load_adapter(os.path.join(checkpoint, "reference"), "reference")
        model.set_adapter("default")  # PEFT 0.20 leaves it without gradients
        in_input_dtype(model)


@contextmanager
def reference(model):
    """Inside, `model` is the reference policy: the adapter "reference" if there is one, else no adapter."""
    if "reference" not in model.peft_config:
        with model.disable_adapter():
            yield
        return
    model.set_adapter("reference", inference_mode=True)
    try:
        yield
    finally:
        model.set_adapter("default")
