"""A Hugging Face causal LM with a LoRA adapter: loading, adapters, the reference.

    from rl.model import load_model, add_lora
    base, tokenizer = load_model("Qwen/Qwen3-4B", bits=4)
    model = add_lora(base, rank=16)
"""
import copy
import json
import os
import re
import sys
from contextlib import contextmanager

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, GenerationConfig, PreTrainedConfig
from transformers.utils import logging


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model(name: str, bits: int = 0, device=None):
    """A causal LM from the hub or a folder, frozen, and its tokenizer.

    bits: 16 is bf16, 32 fp32, 4 NF4 with double quantisation through bitsandbytes, 0 bf16 on a GPU and fp32 without.
    Raises OSError (no such model) or ValueError (a kind of model that this file cannot score).
    """
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
    for module in model.modules():  # bitsandbytes on a CPU: its packed layers have no gradient (docs/faults.md)
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ValueError(f"the output layer of {name} has a bias; token_logps would leave that out")
    ends = model.generation_config.eos_token_id
    # A fresh generation config: a shipped one (Qwen: 0.6, top-k 20, top-p 0.95) would change what is sampled.
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    model.requires_grad_(False)  # and no cast of norms or embeddings to fp32: +0.8 GB on a tied 4B embedding
    return without_noise(model).eval(), tokenizer


def without_noise(model):
    """No dropout and no jitter, in training mode either, whether a module, an attribute or the configuration holds the number:
    log-probs of one sequence must be one. To be called again after an adapter was added."""
    for holder in (*model.modules(), *configs(model.config)):
        if isinstance(holder, torch.nn.modules.dropout._DropoutNd):
            holder.p = 0.0
        for name, value in vars(holder).items():
            if re.search("drop|jitter", name) and isinstance(value, float) and value:
                setattr(holder, name, 0.0)
    return model


def configs(config):
    """A configuration and those inside of it."""
    inside = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return [config, *(deeper for value in inside for deeper in configs(value))]


def add_lora(model, rank: int = 16, alpha: float | None = None, seed: int = 0):
    """LoRA on all linear layers but the output, of a composite model on those of its language part: dropout 0 (log-probs must not
    be noisy), no biases, adapter in fp32."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    others = [name for name, _ in model.named_modules() if re.search(r"vision|visual|image|audio|speech|projector", name)]
    return in_input_dtype(get_peft_model(model, LoraConfig(
        r=rank, lora_alpha=alpha or 2 * rank, lora_dropout=0.0, bias="none", target_modules="all-linear",
        exclude_modules=others or None, task_type="CAUSAL_LM"))).eval()


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
        if isinstance(layer, LoraLayer) and next(layer.get_base_layer().parameters()).dtype != torch.float32:
            layer.cast_input_dtype_enabled = False  # PEFT's own switch
            for parts in (layer.lora_A, layer.lora_B):
                for name, linear in list(parts.items()):
                    parts[name] = linear if isinstance(linear, InInputType) else InInputType(linear)
    return model


def load_adapter(model, folder: str, trainable: bool = True):
    """A LoRA adapter in PEFT's format on a base model from `load_model`. Raises OSError (none there) or ValueError (one that cannot
    be kept apart from its base model, or that does not fit it)."""
    from peft import PeftModel, get_peft_model_state_dict, load_peft_weights

    if not os.path.exists(os.path.join(folder, "adapter_config.json")):
        raise OSError(f"the folder {folder} holds no adapter (no adapter_config.json)")
    if why := foreign(folder):
        raise ValueError(f"the adapter in {folder} {why}")
    model = in_input_dtype(PeftModel.from_pretrained(model, folder, is_trainable=trainable)).eval()
    if not isinstance(model.get_base_model().get_output_embeddings(), torch.nn.Linear):
        raise ValueError(f"the adapter in {folder} changes the output layer; token_logps would leave that out")
    own, saved = get_peft_model_state_dict(model), load_peft_weights(folder, device="cpu")
    differ = [name for name in {*own, *saved} if name not in own or name not in saved or own[name].shape != saved[name].shape]
    if differ:
        raise ValueError(f"the adapter in {folder} does not fit this model: {len(differ)} of its {len(saved)} tensors, such as "
                         f"{min(differ)}, are missing or of another shape")
    if not all(tensor.isfinite().all() for tensor in saved.values()):
        raise ValueError(f"the adapter in {folder} holds numbers that are not finite")
    return without_noise(model)


def foreign(folder) -> str:
    """Why an adapter's base model would not be the base model, or ""."""
    with open(os.path.join(folder, "adapter_config.json")) as file:
        config = json.load(file)
    if config.get("peft_type") != "LORA" or config.get("use_dora"):
        return "is no plain LoRA adapter, and this program trains no other"
    if config.get("init_lora_weights") not in (True, False, None, "gaussian", "eva", "orthogonal"):
        return (f"was made with init_lora_weights={config['init_lora_weights']!r}, which changes the base model's weights: convert it "
                f"to a plain one first (PEFT: path_initial_model_for_weight_conversion)")
    if config.get("bias", "none") != "none":
        return f"trains biases of the base model (bias={config['bias']!r}), so that the model without it would not be the base model"
    return ""


@contextmanager
def other_adapter(model, folder):
    """Inside, the policy's adapter is the one saved in `folder`, of the same shape."""
    from peft import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

    own = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(model).items()}
    set_peft_model_state_dict(model, load_peft_weights(str(folder), device=str(model.device)))
    try:
        yield
    finally:
        set_peft_model_state_dict(model, own)


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
    without_noise(in_input_dtype(model))


def load_reference(model, checkpoint: str):
    """The frozen reference that a checkpoint holds, if it holds one."""
    if os.path.isdir(os.path.join(checkpoint, "reference")):
        model.load_adapter(os.path.join(checkpoint, "reference"), "reference")
        model.set_adapter("default")  # PEFT 0.20 leaves it without gradients
        without_noise(in_input_dtype(model))


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
