"""Does it fit on the card? The memory of every phase, from the configuration of a model alone.

    python model.py --plan --model Qwen/Qwen3-4B --gpu 24
    python model.py --plan --model Qwen/Qwen3.5-4B --gpu 48 --teacher Qwen/Qwen3.5-27B --max-context 8192
    python grpo.py --preset 24gb --model Qwen/Qwen3-4B ...        # passes the options that such a plan ends with

The program's own code (`token_logps`, the backward pass, a turn of sampling) runs on PyTorch's meta device, where a tensor
has a shape and no content, and every storage that is alive is counted. So nothing is downloaded, no memory is needed,
and a change of the code changes the plan. Added by hand, in GiB of 2**30 bytes:

1. The card keeps CONTEXT for itself, and the allocator's fragmentation SHARE of the rest.
2. Weights of 4 bits take half a byte, 8 bits a block of 64 and 4 bytes 256 blocks; a layer's are unpacked while it is used.
3. Attention keeps what a fused kernel keeps: queries, keys, values, output and one number a query.
4. Rollout is planned at its worst: `num_envs` episodes, each as long as the context, encoded anew. A turn that goes on from
   a kept cache takes less.
5. Gradients and optimizer stay where they are during a rollout.

A layer that transformers computes with kernels of other packages where these are installed (the recurrent ones of Qwen3.5)
is planned as it runs without them. Against measurements: tests/test_plan.py.
"""
import weakref
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from envs import BadInput

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


# Counting

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


def on_meta(config, dtype=torch.bfloat16, rank=0, checkpointing=False):
    """The model on the meta device, with a LoRA adapter if `rank` says so."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from model import add_lora

    ALL_ATTENTION_FUNCTIONS.register("fused-plan", fused_attention)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="fused-plan").requires_grad_(False)
        if rank:
            model = add_lora(model, rank)
    if checkpointing:
        (model.get_base_model() if rank else model).gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train(checkpointing)


def weight_bytes(model, bits):
    """(the base model's weights, the largest layer when it is unpacked) in bytes."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    packed = {id(m.weight): m.weight.numel() for m in causal.modules() if isinstance(m, torch.nn.Linear)
              and m is not causal.get_output_embeddings() and not m.weight.requires_grad} if bits == 4 else {}
    others = {id(p): p.nbytes for p in causal.parameters() if not p.requires_grad and id(p) not in packed}
    packed_bytes = sum(n * (1 / 2 + 1 / 64 + 4 / (64 * 256)) for n in packed.values())
    return sum(others.values()) + packed_bytes, 2 * max(packed.values(), default=0)


# The phases: bytes beyond weights, adapter, gradients and optimizer

def working(model, work) -> int:
    with Live(*model.parameters()) as live:
        before = live.now
        work()
    return live.most - before


def rows_on_meta(tokens, length, sampled):
    """ids [B, T] on meta, mask [B, T] on the CPU: it is the mask's content that counts the logits."""
    mask_BT = torch.zeros(max(1, tokens // length), length, dtype=torch.bool)
    mask_BT[:, length - max(1, int(sampled * length)):] = True
    mask_BT[:, 0] = False
    return torch.zeros(mask_BT.shape, dtype=torch.long, device="meta"), mask_BT


def learn(model, tokens, length, sampled=0.5):
    """Forward and backward pass of a micro-batch, the gradients not counted."""
    from learner import add_gradient
    from model import token_logps

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


def answers(model, tokens, length, sampled):
    """[N, D]: the hidden states that predict the sampled tokens, as `teacher.hidden` gives them."""
    from teacher import parts_of

    ids_BT, mask_BT = rows_on_meta(tokens, length, sampled)
    rows, columns = mask_BT[:, 1:].nonzero(as_tuple=True)
    return parts_of(model)[0](input_ids=ids_BT, use_cache=False).last_hidden_state[rows, columns]


def teach(model, tokens, length, top_k=0, sampled=0.5):
    """`teacher.consult` of a micro-batch; what it has found is on the CPU at once."""
    from teacher import CHUNK, buckets, logits

    @torch.no_grad()
    def work():
        found = []
        for part in answers(model, tokens, length, sampled).split(CHUNK):
            logits_NV = logits(model, part, 1.0)
            own = torch.zeros(len(part), top_k // 2, dtype=torch.long, device="meta")
            top = torch.cat([own, logits_NV.scatter(1, own, -torch.inf).topk(top_k - top_k // 2).indices], 1)
            found.append(buckets(logits_NV, top).log_softmax(1))

    return working(model, work)


def distil(model, tokens, length, top_k=0, sampled=0.5):
    """`teacher.distill` of a micro-batch."""
    from torch.utils.checkpoint import checkpoint

    from distill import distill_loss
    from learner import add_gradient
    from teacher import CHUNK, buckets, logits

    trainable = [p for p in model.parameters() if p.requires_grad]

    def work():
        hidden_ND = answers(model, tokens, length, sampled)
        width = top_k + 1 if top_k else model.get_output_embeddings().weight.shape[0]
        logp = torch.empty(len(hidden_ND), width, device="meta")
        top = torch.zeros(len(hidden_ND), top_k, dtype=torch.long, device="meta")
        weights = torch.ones(len(hidden_ND), device="meta")

        def numerator(hidden, weights, top, logp):
            return distill_loss(buckets(logits(model, hidden, 1.0), top)[None], logp[None], weights[None],
                                torch.ones_like(weights)[None])[0]

        parts = zip(*(tensor.split(CHUNK) for tensor in (hidden_ND, weights, top, logp)))
        add_gradient(sum(checkpoint(numerator, *part, use_reentrant=False) for part in parts), trainable)

    return working(model, work)


def roll(model, rows, length):
    """(cache, rest) of a turn of `rows` episodes of `length` tokens: encoding all of it, or sampling its last token."""
    from transformers import DynamicCache

    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    kinds = getattr(causal.config, "layer_types", None) or []
    dense = all(kind == "full_attention" for kind in kinds)
    size = {}

    @torch.no_grad()
    def work():
        def step(new, so_far):
            mask = torch.ones(rows, 1, new, so_far + new, dtype=torch.bool, device="meta") if dense else None
            ids = torch.zeros(rows, new, dtype=torch.long, device="meta")
            scores_NV = causal(input_ids=ids, attention_mask=mask, use_cache=True, cache=cache, logits_to_keep=1,
                               position_ids=torch.zeros_like(ids)).logits[:, -1].float()
            p_NV = scores_NV.sub(scores_NV.amax(1, keepdim=True)).exp_()  # as the sampler does, but for what depends on contents
            torch.nn.functional.pad(p_NV, (0, -p_NV.shape[1] % 1024))

        cache = DynamicCache(config=causal.config)
        step(length - 1, 0)
        step(1, length - 1)
        tensors = [t for layer in cache.layers for t in tree_iter(vars(layer)) if isinstance(t, torch.Tensor)]
        size["cache"] = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())

    training = model.training
    model.eval()
    most = working(model, work)
    model.train(training)
    return size["cache"], most - size["cache"]


# The plan

def period_of(layers, kinds) -> int:
    """The shortest pattern of layers that the whole model repeats, e.g. 1 (all alike), or 4 (three recurrent, one attention)."""
    looks = [(kind, [(name, p.shape) for name, p in layer.named_parameters()]) for layer, kind in zip(layers, kinds, strict=True)]
    return next(n for n in range(1, len(looks) + 1) if len(looks) % n == 0 and looks == looks[:n] * (len(looks) // n))


def deep(phase, model, *args):
    """`phase(model, *args)`, run with two and three periods of layers: each further one adds the same bytes. (The peak of a
    single one can lie elsewhere.)"""
    from teacher import parts_of

    backbone = parts_of(model)[0]
    layers = backbone.layers
    period = period_of(layers, getattr(backbone.config, "layer_types", None) or [""] * len(layers))
    more = len(layers) // period - 3
    if more < 3:  # nothing to gain
        return phase(model, *args)
    try:
        backbone.layers = layers[:2 * period]
        two = phase(model, *args)
        backbone.layers = layers[:3 * period]
        three = phase(model, *args)
    finally:
        backbone.layers = layers
    if isinstance(three, tuple):
        return tuple(b + more * (b - a) for a, b in zip(two, three, strict=True))
    return three + more * (three - two)


def largest(bytes_of, room, most, unit=1):
    """The largest multiple of `unit` up to `most` whose bytes fit into `room`, bytes being nearly linear; 0 if none does."""
    one, two = bytes_of(unit), bytes_of(2 * unit)
    n = min(most // unit, int((room - one) / max(1, two - one)) + 1)
    while n > 0 and bytes_of(n * unit) > room:
        n = min(n - 1, int(0.95 * n))
    return max(n, 0) * unit


def plan(name, gpu, *, bits=None, rank=16, max_context=4096, optimizer="adamw", teacher="", teacher_bits=4, top_k=4096):
    """What fits on a card of `gpu` GiB: options, and bytes by phase. Raises BadInput where nothing does."""
    config = config_of(name)
    room = (gpu - CONTEXT) * (1 - SHARE) * GIB
    needs, chosen = [], None
    for width, checkpointing in ((16, False), (16, True), (4, True)) if bits is None else ((bits, False), (bits, True)):
        model = on_meta(config, torch.float32 if width == 32 else torch.bfloat16, rank, checkpointing)
        weights, unpacked = weight_bytes(model, width)
        adapter = sum(p.numel() for p in model.parameters() if p.requires_grad)
        fixed = weights + adapter * (4 + 4 + (2 if optimizer == "paged_adamw_8bit" else 8))
        rest = room - fixed - unpacked
        least = max(deep(learn, model, max_context, max_context), sum(deep(roll, model, 1, max_context)))
        needs.append((fixed + unpacked + least, width, checkpointing))
        if needs[-1][0] > room:
            continue
        tokens = largest(lambda n: deep(learn, model, n, max_context), rest, MOST_TOKENS, max_context)
        envs = largest(lambda n: sum(deep(roll, model, n, max_context)), rest, MOST_ENVS)
        chosen = SimpleNamespace(name=name, gpu=gpu, bits=width, checkpointing=checkpointing, tokens=tokens, envs=envs,
                                 context=max_context, optimizer=optimizer, weights=weights, fixed=fixed, unpacked=unpacked,
                                 room=room, model=model)
        if tokens >= max(2 * max_context, 8192) and envs >= 8:
            break
    if chosen is None:
        least, width, _ = min(needs)
        raise BadInput(f"{name} does not fit on {gpu} GiB: one episode of {max_context} tokens takes {least / GIB:.1f} GiB at "
                       f"{width} bits with activation checkpointing, so the smallest card is "
                       f"{int(least / GIB / (1 - SHARE) + CONTEXT) + 1} GiB; lower --max-context or take a smaller model")
    cache, rolling = deep(roll, chosen.model, chosen.envs, max_context)
    chosen.phases = {"rollout": (chosen.fixed, cache, rolling),
                     "learn": (chosen.fixed, 0, deep(learn, chosen.model, chosen.tokens, max_context))}
    if teacher:
        distilling = deep(distil, chosen.model, chosen.tokens, max_context, top_k)
        while distilling > room - chosen.fixed - chosen.unpacked and chosen.tokens > max_context:
            chosen.tokens -= max_context
            distilling = deep(distil, chosen.model, chosen.tokens, max_context, top_k)
        other = on_meta(config_of(teacher))
        weights, unpacked = weight_bytes(other, teacher_bits)
        chosen.phases["teacher, alone"] = (weights, 0, unpacked + deep(teach, other, chosen.tokens, max_context, top_k))
        chosen.phases["distil"] = (chosen.fixed, 0, distilling)
    chosen.phases = {phase: (*parts[:2], parts[2] + (chosen.unpacked if "teacher" not in phase else 0))
                     for phase, parts in chosen.phases.items()}
    return chosen


def options_of(found) -> dict:
    """The plan as fields of train.Config."""
    return {"bits": found.bits, "num_envs": found.envs, "micro_batch_tokens": found.tokens, "max_context": found.context,
            "gradient_checkpointing": found.checkpointing}


def as_words(found) -> str:
    return " ".join([f"--bits {found.bits}", f"--num-envs {found.envs}", f"--micro-batch-tokens {found.tokens}",
                     f"--max-context {found.context}", *["--gradient-checkpointing"] * found.checkpointing])


def table(found) -> str:
    lines = [f"{found.name}, context of {found.context} tokens, on {found.gpu} GiB: {found.room / GIB:.1f} to use "
             f"({CONTEXT:.0f} for the card itself, {SHARE:.0%} for fragmentation)", "",
             "GiB              weights, adapter, optimizer   cache   working    peak"]
    for phase, (fixed, cache, rest) in found.phases.items():
        total = fixed + cache + rest
        lines.append(f"{phase:<15}  {fixed / GIB:>27.1f}  {cache / GIB:>6.1f}  {rest / GIB:>8.1f}  {total / GIB:>6.1f}"
                     + ("" if total <= found.room else "   does not fit"))
    return "\n".join([*lines, "", "pass " + as_words(found)])


def main(argv=None):
    import argparse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--plan", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", required=True, help=f"a folder, a name on the hub, or without a network: {', '.join(KNOWN)}")
    parser.add_argument("--gpu", type=float, required=True, help="memory of the card in GiB")
    parser.add_argument("--bits", type=int, choices=(4, 16, 32), help="of the weights (default: 16 if that fits, else 4)")
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--max-context", type=int, default=4096, help="tokens of an episode (default: %(default)s)")
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "paged_adamw_8bit"))
    parser.add_argument("--teacher", default="", help="plan distill.py with this teacher, which is in memory alone")
    parser.add_argument("--teacher-bits", type=int, default=4, choices=(4, 16))
    parser.add_argument("--top-k", type=int, default=4096, help="as in distill.py")

    def refuse(message):
        raise BadInput(f"{message} (see --help)")

    parser.error = refuse
    args = parser.parse_args(argv)
    if args.gpu <= CONTEXT or args.max_context < 16 or args.lora_rank < 1 or args.top_k < 0:
        raise BadInput(f"--gpu must be above {CONTEXT:.0f}, --max-context at least 16, --lora-rank at least 1, --top-k 0 or above")
    found = plan(args.model, args.gpu, bits=args.bits, rank=args.lora_rank, max_context=args.max_context,
                 optimizer=args.optimizer, teacher=args.teacher, teacher_bits=args.teacher_bits, top_k=args.top_k)
    print(table(found))


if __name__ == "__main__":
    from train import cli
    cli(main)
