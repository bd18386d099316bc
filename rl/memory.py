"""What a phase of training takes in memory, counted on PyTorch's meta device from a model's configuration alone.

    build = builder(AutoConfig.from_pretrained("Qwen/Qwen3-4B"), rank=16)
    learn(build(), 8192, 4096) / 2**30        # GiB of a micro-batch beyond weights, adapter, gradients and optimizer

The program's own code (`token_logps`, the backward pass, the sampler's probabilities) runs there, where a tensor has a shape and no
content, and every storage that is alive is counted. So nothing is downloaded, no memory is needed, and a change of the
code changes the count. What that leaves out, and what is put in its place:

1. Weights of 4 bits take half a byte, 8 bits a block of 64 and 4 bytes 256 blocks; a layer's are unpacked while it is used.
2. Attention keeps what a fused kernel keeps: queries, keys, values, output and one number a query.
3. Rollout is counted at its worst: all episodes as long as the context, encoded anew. A turn that goes on from a kept
   cache takes less. Gradients and optimizer stay where they are meanwhile.
4. A layer that transformers computes with kernels of other packages where these are installed (the recurrent ones of
   Qwen3.5) is counted as it runs without them.

What fits on a card: presets.py and plan.py. Against measurements: tests/test_memory.py.
"""
import copy
import functools
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rl.learner import add_gradient, token_logps
from rl.model import add_lora
from rl.sampling import merge


class Live(TorchDispatchMode):
    """Inside, counts the bytes of the meta tensors that are alive: `now`, and `most` so far."""

    def __init__(self, *tensors):
        super().__init__()
        self.now, self.most, self.seen = 0, 0, set()
        for tensor in tensors:
            self.count(tensor)

    def count(self, tensor):
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.seen:
            self.seen.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.free, key, size)

    def free(self, key, size):
        self.seen.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                self.count(tensor)
        return out


class Fused(torch.autograd.Function):
    """Attention's memory: what a fused kernel keeps and makes."""

    @staticmethod
    def forward(ctx, query, key, value):
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def fused_attention(module, query, key, value, attention_mask, **_):
    groups = query.shape[1] // key.shape[1]
    if attention_mask is not None and query.shape[2] > 1:  # with a mask, transformers repeats the heads
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    return Fused.apply(query, key, value).transpose(1, 2).contiguous(), None


def builder(config, dtype=torch.bfloat16, rank=0, checkpointing=False):
    """build(layers=None) -> the model on the meta device, or one with so many layers, with a LoRA adapter if `rank` says so."""
    ALL_ATTENTION_FUNCTIONS.register("fused-plan", fused_attention)

    @functools.cache
    def build(layers=None):
        own = copy.deepcopy(config)
        if layers:
            own.num_hidden_layers = layers
            if getattr(own, "layer_types", None):
                own.layer_types = own.layer_types[:layers]
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(own, dtype=dtype, attn_implementation="fused-plan").requires_grad_(False)
            if rank:
                model = add_lora(model, rank)
        if checkpointing:
            causal_of(model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model.train(checkpointing)

    return build


def causal_of(model):
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def weight_bytes(model, bits):
    """(the base model's weights, the largest layer when it is unpacked) in bytes."""
    causal = causal_of(model)
    packed = {f"{name}.weight": m.weight.numel() for name, m in causal.named_modules() if isinstance(m, torch.nn.Linear)
              and m is not causal.get_output_embeddings() and not m.weight.requires_grad} if bits == 4 else {}
    others = sum(p.nbytes for name, p in causal.named_parameters() if not p.requires_grad and name not in packed)
    packed_bytes = sum(n * (1 / 2 + 1 / 64 + 4 / (64 * 256)) for n in packed.values())
    return others + packed_bytes, 2 * max(packed.values(), default=0)


# The phases: bytes beyond weights, adapter, gradients and optimizer

def working(model, work) -> int:
    with Live(*model.parameters()) as live:
        before = live.now
        work()
    return live.most - before


def rows_on_meta(tokens, length, sampled=0.5):
    """ids [B, T] on meta, mask [B, T] on the CPU: it is the mask's content that counts the logits."""
    mask_BT = torch.zeros(max(1, tokens // length), length, dtype=torch.bool)
    mask_BT[:, length - max(1, int(sampled * length)):] = True
    mask_BT[:, 0] = False
    return torch.zeros(mask_BT.shape, dtype=torch.long, device="meta"), mask_BT


def learn(model, tokens, length, sampled=0.5):
    """Forward and backward pass of a micro-batch, the gradients not counted."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    for p in trainable:
        p.grad = torch.empty_like(p)  # they are there already

    def work():
        logp_BT, _ = token_logps(model, *rows_on_meta(tokens, length, sampled))
        add_gradient(logp_BT.sum(), trainable)

    bytes_ = working(model, work)
    for p in trainable:
        p.grad = None
    return bytes_


def roll(model, rows, length):
    """(cache, rest) of a turn of `rows` episodes of `length` tokens: encoding all of it, or sampling its last token."""
    causal = causal_of(model)
    cache = DynamicCache(config=causal.config)
    dense = all(kind == "full_attention" for kind in getattr(causal.config, "layer_types", None) or [])

    def step(new, so_far):
        mask = torch.ones(rows, 1, new, so_far + new, dtype=torch.bool, device="meta") if dense else None
        ids = torch.zeros(rows, new, dtype=torch.long, device="meta")
        scores_NV = causal(input_ids=ids, attention_mask=mask, use_cache=True, cache=cache, logits_to_keep=1,
                           position_ids=torch.zeros_like(ids)).logits[:, -1]
        p_NV = scores_NV.float().sub(scores_NV.amax(1, keepdim=True)).div_(1.0).exp_()  # as the sampler does
        torch.nn.functional.pad(p_NV, (0, -p_NV.shape[1] % 1024))  # of `draw_tokens`, all but what depends on contents

    training = model.training
    model.eval()
    with torch.no_grad():
        most = working(model, lambda: (step(length - 1, 0), step(1, length - 1)))
    model.train(training)
    tensors = [t for layer in cache.layers for t in tree_iter(vars(layer)) if isinstance(t, torch.Tensor)]
    kept = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
    return kept, most - kept


def merged(model, bits) -> int:
    """The copy of the weights, with the adapter in them, that a rollout of a small model makes (sampling.py)."""
    return 0 if bits == 4 else working(model, lambda: merge(model))


# All layers from a few

def period_of(layers, kinds) -> int:
    """The shortest pattern of layers that the whole model repeats, e.g. 1 (all alike), or 4 (three recurrent, one attention)."""
    looks = [(kind, [(name, p.shape) for name, p in layer.named_parameters()]) for layer, kind in zip(layers, kinds, strict=True)]
    return next(n for n in range(1, len(looks) + 1) if len(looks) % n == 0 and looks == looks[:n] * (len(looks) // n))


def deep(phase, build, *args):
    """`phase(model, *args)`, run with two and three periods of layers: each further one adds the same bytes. (The peak of a
    single one can lie elsewhere.)"""
    backbone = causal_of(build()).base_model
    layers = backbone.layers
    period = period_of(layers, getattr(backbone.config, "layer_types", None) or [""] * len(layers))
    more = len(layers) // period - 3
    if more < 3:  # nothing to gain
        return phase(build(), *args)
    two, three = (phase(build(periods * period), *args) for periods in (2, 3))
    if isinstance(three, tuple):
        return tuple(b + more * (b - a) for a, b in zip(two, three, strict=True))
    return three + more * (three - two)
