"""The policy: a Hugging Face causal LM with a LoRA adapter, and the log-probs of the tokens it sampled.

    from model import load_model, add_lora, token_logps
    python model.py --plan --model Qwen/Qwen3-4B --gpu 24      # does it fit? (plan.py)

`token_logps` is the one function for new, old and reference log-probs, so their ratios carry no error of a second
code path. It projects the hidden states to logits only where a token was sampled, in chunks, with a softmax in fp32,
and makes them again in the backward pass: at a vocabulary of 151,936 the logits of 256 tokens take 0.15 GiB in fp32.
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


def in_input_dtype(model):
    """Let adapters compute in the type of what they are given, with weights and gradients in fp32.

    PEFT casts what a layer is given to fp32 instead, layer by layer, and keeps each copy for the backward pass: with a
    base model in bf16 that is half of all activations. To be called again after an adapter was added.
    """
    from peft.tuners.lora import LoraLayer

    def cast(linear):
        return lambda x: torch.nn.functional.linear(x, linear.weight.to(x.dtype))

    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.cast_input_dtype_enabled = False
            for linear in (*layer.lora_A.values(), *layer.lora_B.values()):
                linear.forward = cast(linear)
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


class ScoreTokens(torch.autograd.Function):
    """[N, D] hidden states, the head's [V, D] weight, [N] targets -> their log-probs and the entropies, [N] each, in fp32.

    Logits exist for `chunk` tokens at a time, in one buffer for all chunks, and are made again in the backward pass.
    """

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, targets_N, temperature, chunk):
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N)
        ctx.how, scored, p_CV = (temperature, chunk), [], None
        for logits_CV, targets_C in chunks(hidden_ND, weight_VD, targets_N, temperature, chunk):
            p_CV = torch.empty_like(logits_CV) if p_CV is None else p_CV[:len(logits_CV)]
            logits_CV.sub_(logits_CV.amax(1, keepdim=True))
            norm_C = torch.exp(logits_CV, out=p_CV).sum(1)
            mean_C = torch.bmm(p_CV[:, None], logits_CV[:, :, None]).flatten() / norm_C
            scored.append((logits_CV.gather(1, targets_C[:, None])[:, 0] - norm_C.log(), norm_C.log() - mean_C))
        logp_N, entropy_N = map(torch.cat, zip(*scored))
        ctx.mark_non_differentiable(entropy_N)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx, grad_N, _):
        hidden_ND, weight_VD, targets_N = ctx.saved_tensors
        grads, at = [], 0
        for p_CV, targets_C in chunks(hidden_ND, weight_VD, targets_N, *ctx.how):
            p_CV.sub_(p_CV.amax(1, keepdim=True)).exp_()
            grad_C = grad_N[at:at + len(p_CV)] / ctx.how[0]
            p_CV.mul_((-grad_C / p_CV.sum(1))[:, None])
            p_CV.scatter_add_(1, targets_C[:, None], grad_C[:, None])  # grad (1[target] - p) / temperature
            grads.append(p_CV.to(weight_VD.dtype) @ weight_VD)
            at += len(p_CV)
        return torch.cat(grads), None, None, None, None


def chunks(hidden_ND, weight_VD, targets_N, temperature, chunk):
    """([C, V] logits in fp32, [C] targets), chunk by chunk; the logits of one are gone when the next are asked for."""
    shape = min(chunk, len(hidden_ND)), len(weight_VD)
    raw_CV = hidden_ND.new_empty(shape)
    logits_CV = raw_CV if raw_CV.dtype == torch.float32 else raw_CV.new_empty(shape, dtype=torch.float32)
    for hidden_CD, targets_C in zip(hidden_ND.split(chunk), targets_N.split(chunk)):
        size = len(hidden_CD)
        torch.mm(hidden_CD, weight_VD.t(), out=raw_CV[:size])
        logits_CV[:size].copy_(raw_CV[:size])
        yield (logits_CV[:size] if temperature == 1 else logits_CV[:size].div_(temperature)), targets_C


def token_logps(model, ids_BT, mask_BT, temperature: float = 1.0, chunk: int = 256):
    """Log-probs and entropies of the masked tokens: ([B, T], [B, T]) in fp32, in nats, 0 where the mask is 0.

    ids_BT: token ids, padded on the right, where causal attention never sees a pad, so no attention mask is needed.
    mask_BT: 1 where the policy sampled the token (never in column 0). `temperature` is that of the sampling.
    """
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    hidden_BTD = causal.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
    rows, columns = mask_BT[:, 1:].nonzero(as_tuple=True)  # the token in column t + 1 is predicted at t
    logp_BT = torch.zeros(ids_BT.shape, dtype=torch.float32, device=ids_BT.device)
    if not len(rows):
        return logp_BT, logp_BT.clone()
    logp_N, entropy_N = ScoreTokens.apply(hidden_BTD[rows, columns], causal.get_output_embeddings().weight,
                                          ids_BT[rows, columns + 1], temperature, chunk)
    where = (rows, columns + 1)
    return logp_BT.index_put(where, logp_N), logp_BT.index_put(where, entropy_N)


def make_optimizer(model, lr: float, name: str = "adamw"):
    """AdamW over the trainable parameters, without weight decay; "paged_adamw_8bit" keeps its state in 8 bits."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    if name == "paged_adamw_8bit":
        from bitsandbytes.optim import PagedAdamW8bit
        return PagedAdamW8bit(parameters, lr=lr, weight_decay=0.0)
    raise ValueError(f"optimizer must be adamw or paged_adamw_8bit, got {name!r}")


if __name__ == "__main__":
    from plan import main
    from train import cli
    cli(main)
