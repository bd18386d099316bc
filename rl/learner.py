"""From episodes to a gradient: token log-probs, micro-batches, the shares of a loss, optimizer steps.

    logp_BT, entropy_BT = token_logps(model, ids_BT, mask_BT)
    stats = update(model, optimizer, batch, advantages_N, algorithm, UpdateOptions(pad_id=...))

`token_logps` is the one function for new, old and reference log-probs, so their ratios carry no error of a second code path. It makes
logits only where a token was sampled, in chunks, with a softmax in fp32, and makes them again in the backward pass: at a vocabulary
of 151,936 the logits of 256 tokens take 0.15 GiB in fp32.

A loss returns its micro-batch's share of the whole batch's loss (the normalisers are arguments), so the gradient does
not depend on how rows are packed, up to rounding. Where memory runs out, rows are packed smaller, and the run goes on.
"""
import gc
import math
import random
import sys
from dataclasses import dataclass

import torch

from envs import BadInput
from rl.model import reference


@dataclass
class UpdateOptions:
    pad_id: int
    temperature: float = 1.0  # of the sampling
    minibatches: int = 1  # optimizer steps
    micro_batch_tokens: int = 8192  # padded tokens of a forward pass
    max_grad_norm: float = 1.0
    gradient_checkpointing: bool = False
    importance_cap: float = 0.0  # C > 0: a token's gradient (also that of the KL term) is weighed by min(pi_old / pi_sampler, C)
    seed: int = 0  # of the order of trajectories


@dataclass
class MicroBatch:
    """What a loss sees: B rows, padded on the right to T tokens. Log-probs are in nats, and 0 where the mask is 0."""
    logp_BT: torch.Tensor  # by the policy that is trained: the gradient flows through these alone
    old_logp_BT: torch.Tensor  # by the policy before this batch
    ref_logp_BT: torch.Tensor | None  # by the reference, where the algorithm has one
    mask_BT: torch.Tensor  # bool, true where the policy sampled the token
    advantages_B: torch.Tensor
    lengths_B: torch.Tensor  # sampled tokens of the whole trajectory that a row belongs to
    num_trajectories: int  # of the whole mini-batch, those without rows here included
    num_tokens: int  # sampled tokens of the whole mini-batch
    entropy_BT: torch.Tensor  # of the distributions that the tokens were drawn from, in nats; differentiable as logp_BT is
    sampler_log_weight_BT: torch.Tensor  # for the metrics: log pi_old / pi_sampler
    log_ratio_sums_B: torch.Tensor | None  # over the whole trajectory of a row; None: rows are whole, or every ratio is 1
    token_advantages_BT: torch.Tensor  # what a token's advantage is beside its trajectory's; 0 unless the rows have it


class ScoreTokens(torch.autograd.Function):
    """[N, D] hidden states, the head's [V, D] weight, [N] targets -> their log-probs and the entropies, [N] each, in fp32.

    Logits exist for `chunk` tokens at a time, in one buffer for all chunks, and are made again in the backward pass.
    """

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, targets_N, temperature, chunk):
        ctx.how, scored, p_CV = (temperature, chunk), [], None
        for logits_CV, targets_C in logits_in_chunks(hidden_ND, weight_VD, targets_N, temperature, chunk):
            p_CV = torch.empty_like(logits_CV) if p_CV is None else p_CV[:len(logits_CV)]
            logits_CV.sub_(logits_CV.amax(1, keepdim=True))
            norm_C = torch.exp(logits_CV, out=p_CV).sum(1)
            mean_C = torch.bmm(p_CV[:, None], logits_CV[:, :, None]).flatten() / norm_C
            scored.append((logits_CV.gather(1, targets_C[:, None])[:, 0] - norm_C.log(), norm_C.log() - mean_C))
        logp_N, entropy_N = map(torch.cat, zip(*scored))
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, entropy_N)
        ctx.set_materialize_grads(False)  # where the loss has no entropy in it, its gradient takes no time
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx, grad_N, grad_entropy_N):
        hidden_ND, weight_VD, targets_N, entropy_N = ctx.saved_tensors
        grads, at = [], 0
        for p_CV, targets_C in logits_in_chunks(hidden_ND, weight_VD, targets_N, *ctx.how):
            part_N = slice(at, at + len(p_CV))
            p_CV.sub_(p_CV.amax(1, keepdim=True))
            log_p_CV = None if grad_entropy_N is None else p_CV.clone()
            norm_C = p_CV.exp_().sum(1)
            if log_p_CV is not None:  # grad p (-log p - entropy) / temperature
                log_p_CV.add_((entropy_N[part_N] - norm_C.log())[:, None]).mul_(p_CV)
                log_p_CV.mul_((-grad_entropy_N[part_N] / norm_C / ctx.how[0])[:, None])
            grad_C = (torch.zeros_like(norm_C) if grad_N is None else grad_N[part_N]) / ctx.how[0]
            p_CV.mul_((-grad_C / norm_C)[:, None])
            p_CV.scatter_add_(1, targets_C[:, None], grad_C[:, None])  # grad (1[target] - p) / temperature
            grads.append((p_CV if log_p_CV is None else p_CV.add_(log_p_CV)).to(weight_VD.dtype) @ weight_VD)
            at += len(p_CV)
        return torch.cat(grads), None, None, None, None


def logits_in_chunks(hidden_ND, weight_VD, targets_N, temperature, chunk):
    """([C, V] logits in fp32, [C] targets), chunk by chunk; the logits of one are gone when the next are asked for."""
    shape = min(chunk, len(hidden_ND)), len(weight_VD)
    raw_CV = hidden_ND.new_empty(shape)
    logits_CV = raw_CV if raw_CV.dtype == torch.float32 else raw_CV.new_empty(shape, dtype=torch.float32)
    for hidden_CD, targets_C in zip(hidden_ND.split(chunk), targets_N.split(chunk)):
        size = len(hidden_CD)
        torch.mm(hidden_CD, weight_VD.t(), out=raw_CV[:size])
        logits_CV[:size].copy_(raw_CV[:size])
        yield (logits_CV[:size] if temperature == 1 else logits_CV[:size].div_(temperature)), targets_C


def sampled_states(model, ids_BT, mask_BT):
    """([N, D] hidden states that predict the N masked tokens, their rows [N], their columns [N]), row after row."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    hidden_BTD = causal.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
    rows, before = mask_BT[:, 1:].nonzero(as_tuple=True)  # the token in column t + 1 is predicted at t
    return hidden_BTD[rows, before], rows, before + 1


def token_logps(model, ids_BT, mask_BT, temperature: float = 1.0, chunk: int = 256):
    """Log-probs and entropies of the masked tokens: ([B, T], [B, T]) in fp32, in nats, 0 where the mask is 0.

    ids_BT: token ids, padded on the right, where causal attention never sees a pad, so no attention mask is needed.
    mask_BT: 1 where the policy sampled the token (never in column 0). `temperature` is that of the sampling.
    """
    hidden_ND, *where = sampled_states(model, ids_BT, mask_BT)
    logp_BT = torch.zeros(ids_BT.shape, dtype=torch.float32, device=ids_BT.device)
    if not len(hidden_ND):
        return logp_BT, logp_BT.clone()
    logp_N, entropy_N = ScoreTokens.apply(hidden_ND, model.get_output_embeddings().weight, ids_BT[*where], temperature, chunk)
    return logp_BT.index_put(where, logp_N), logp_BT.index_put(where, entropy_N)


@torch.no_grad()
def row_logps(model, rows, pad_id, *, temperature=1.0, micro_batch_tokens=8192) -> list[list[float]]:
    """For each row the log-probs of its tokens, 0 where the mask is 0, by the code path of the update."""
    logps = [None] * len(rows)

    def work(pairs):
        logp_BT = token_logps(model, *pad([row for row, _ in pairs], pad_id, model.device), temperature)[0].tolist()
        for (row, n), logp_T in zip(pairs, logp_BT):
            logps[n] = logp_T[:len(row.ids)]

    in_micro_batches([(row, n) for n, row in enumerate(rows)], micro_batch_tokens, work)
    return logps


def pad(rows, pad_id, device):
    """Rows of ids and masks -> ids_BT, mask_BT (bool), padded on the right. The mask comes from sampling, not from ids."""
    width = max(len(row.ids) for row in rows)
    ids = [row.ids + [pad_id] * (width - len(row.ids)) for row in rows]
    mask = [row.mask + [0] * (width - len(row.mask)) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device, dtype=torch.bool)


def in_micro_batches(items, budget, work):
    """work(some of the items, tuples that begin with a row), longest rows first, as many as keep rows times the longest row within
    `budget` padded tokens; returns the budget.

    Where memory runs out, `work` is called again with half of them, and the budget stays that small. So `work` must leave
    nothing behind when it fails (`add_gradient`). Raises BadInput where a single row is too much.
    """
    items = sorted(items, key=lambda item: len(item[0].ids), reverse=True)
    while items:
        width = len(items[0][0].ids)
        size = min(len(items), max(1, budget // width))
        try:
            work(items[:size])
            items = items[size:]
            continue
        except torch.OutOfMemoryError:
            pass  # what `work` held goes with its frames, here
        if size == 1:
            raise BadInput(f"out of memory on one row of {width} tokens: pass --gradient-checkpointing (a run goes on with it "
                           f"and --resume), or start with --bits 4 or a lower --max-context (python plan.py says what fits)")
        budget = size // 2 * width
        print(f"out of memory on {size} rows of {width} tokens; from here on --micro-batch-tokens {budget}", file=sys.stderr)
        gc.collect()
        torch.cuda.empty_cache()  # nothing without a GPU
    return budget


def add_gradient(share, parameters):
    """share.backward(), but all of it or, where memory runs out half-way, nothing."""
    for p, grad in zip(parameters, torch.autograd.grad(share, parameters, allow_unused=True)):
        if grad is not None:
            p.grad = grad if p.grad is None else p.grad.add_(grad)


def log_ratio_sums(model, items, how, budget) -> dict:
    """{number of a trajectory: its log-ratio by the policy of now, summed over the sampled tokens of all its rows}."""
    sums, logps = {}, row_logps(model, [row for row, *_ in items], how.pad_id, temperature=how.temperature, micro_batch_tokens=budget)
    for (row, _, _, old, n), logp_T in zip(items, logps):
        sums[n] = sums.get(n, 0.0) + sum(new - known for own, new, known in zip(row.mask, logp_T, old or logp_T) if own)
    return sums


def score(model, items, algorithm, how, of_batch, sums=None) -> MicroBatch:
    """The micro-batch of these items, (row, advantage, tokens of its trajectory, old log-probs or None, its trajectory's number).
    of_batch: its normalisers; sums: what `log_ratio_sums` found, where it is needed."""
    rows, advantages, lengths, old_logps, numbers = zip(*items)
    ids_BT, mask_BT = pad(rows, how.pad_id, model.device)
    ref_logp_BT = None
    if algorithm.use_reference:
        with torch.no_grad(), reference(model):
            ref_logp_BT = token_logps(model, ids_BT, mask_BT, how.temperature)[0]
    logp_BT, entropy_BT = token_logps(model, ids_BT, mask_BT, how.temperature)
    old_logp_BT = logp_BT.detach().clone()  # on-policy, unless they are known
    log_weight_BT, token_advantages_BT = torch.zeros_like(old_logp_BT), torch.zeros_like(old_logp_BT)
    for b, (row, known) in enumerate(zip(rows, old_logps)):
        own = b, slice(len(row.ids))
        token_advantages_BT[own] = torch.tensor(row.token_advantages or 0.0)
        if known is not None:
            old_logp_BT[own] = torch.tensor(known, device=logp_BT.device)
        if len(row.sampled_logp) == len(row.ids):
            log_weight_BT[own] = old_logp_BT[own] - log_weight_BT.new_tensor(row.sampled_logp)
    if how.importance_cap:
        logp_BT = logp_BT.detach() + log_weight_BT.exp().clamp(max=how.importance_cap) * (logp_BT - logp_BT.detach())  # the gradient alone
    return MicroBatch(logp_BT, old_logp_BT, ref_logp_BT, mask_BT, torch.stack(advantages).to(logp_BT.device),
                      torch.tensor(lengths, device=logp_BT.device), *of_batch, entropy_BT, log_weight_BT,
                      logp_BT.new_tensor([sums[n] for n in numbers]) if sums else None, token_advantages_BT)


# The update

def make_optimizer(model, lr: float, name: str = "adamw"):
    """AdamW over the trainable parameters, without weight decay; "paged_adamw_8bit" keeps its state in 8 bits."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    if name == "paged_adamw_8bit":
        from bitsandbytes.optim import PagedAdamW8bit
        return PagedAdamW8bit(parameters, lr=lr, weight_decay=0.0)
    raise ValueError(f"optimizer must be adamw or paged_adamw_8bit, got {name!r}")


def update(model, optimizer, batch, advantages_N, algorithm, how, more=None):
    """`how.minibatches` optimizer steps on a batch of N trajectories; returns the metrics. algorithm: see rl/train.py.

    Old log-probs come from the same code path as the new ones: detached from them when there is one update, computed before the
    first of several; a row that was sampled in another context brings its own (`Row.old_logp`). Rows without advantage are not computed
    unless the loss has a KL or an entropy, which they take part in; the normalisers count them all the same. more(k, micro-batch tokens)
    adds the gradient of another term of the loss to optimizer step k and returns its value and these tokens, fewer where memory ran
    out (the Funnel's Eq. 9); the batch may then be empty. An optimizer step whose gradient is not finite is left out and counted
    (`skipped_steps`). Raises FloatingPointError when a step makes a parameter that is not finite.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    order = random.Random(f"minibatches {how.seed}").sample(range(len(batch)), len(batch))
    parts, sums, norms = [], {"kl_reference": 0.0} if algorithm.use_reference else {}, []
    for k in range(how.minibatches):
        part = order[k::how.minibatches]
        items = [(row, advantages_N[n], batch[n].length, row.old_logp, n) for n in part for row in batch[n].rows
                 if algorithm.use_reference or algorithm.use_entropy or advantages_N[n]]
        if how.minibatches > 1:  # packed as below: in bf16 a log-prob depends on the shape of its batch
            old_logps = row_logps(model, [row for row, *_ in items], how.pad_id, temperature=how.temperature,
                                  micro_batch_tokens=how.micro_batch_tokens)
            items = [(*item[:3], old if item[3] is None else item[3], item[4]) for item, old in zip(items, old_logps)]
        parts.append((items, (len(part), sum(batch[n].length for n in part))))

    model.train(how.gradient_checkpointing)
    budget = how.micro_batch_tokens
    for k, (items, of_batch) in enumerate(parts):
        # One ratio for all rows of a trajectory, whichever micro-batch they are in; before the first step every ratio is 1
        whole = {}
        if algorithm.ratio == "trajectory" and len(items) > len({n for *_, n in items}) and (k or any(row.old_logp for row, *_ in items)):
            whole = log_ratio_sums(model, items, how, budget)

        def work(some, of_batch=of_batch, whole=whole):
            micro_batch = score(model, some, algorithm, how, of_batch, whole)
            share = algorithm.loss(micro_batch)
            found = sums_of(micro_batch, share.item() / how.minibatches, algorithm)
            found["known"] = sum(sum(row.mask) for row, *_ in some if len(row.sampled_logp) == len(row.ids))
            add_gradient(share, trainable)
            for name, value in found.items():
                merge = max if name in ("ratio_max", "sampler_gap_max") else sum
                sums[name] = merge((sums[name], value)) if name in sums else value

        optimizer.zero_grad(set_to_none=True)
        budget = in_micro_batches(items, budget, work)
        if more:
            value, budget = more(k, budget)
            sums["more"] = sums.get("more", 0) + value / how.minibatches
        elif not items:
            continue
        norm = torch.nn.utils.clip_grad_norm_(trainable, how.max_grad_norm).item()
        if not math.isfinite(norm):
            sums["skipped_steps"] = sums.get("skipped_steps", 0) + 1
            continue
        norms.append(norm)
        optimizer.step()
        if not all(p.isfinite().all() for p in trainable):
            raise FloatingPointError("the step made parameters that are not finite")
    model.eval()
    return metrics_of(sums, norms, budget)


@torch.no_grad()
def sums_of(batch, loss, algorithm):
    """The figures of a micro-batch: k3 estimates of KL, entropy, where the clip acts, and how far sampler and learner differ."""
    log_ratio_BT = batch.logp_BT - batch.old_logp_BT  # 0 where the mask is 0
    A_B, mask_BT, clip = batch.advantages_B, batch.mask_BT, algorithm.clip
    if algorithm.ratio == "token":
        ratio, A = log_ratio_BT.exp()[mask_BT], (A_B[:, None] + batch.token_advantages_BT)[mask_BT]
    elif batch.log_ratio_sums_B is None:
        ratio, A = (log_ratio_BT.sum(1) / mask_BT.sum(1)).exp(), A_B
    else:
        ratio, A = (batch.log_ratio_sums_B / batch.lengths_B).exp(), A_B
    clipped = ((A > 0) & (ratio > 1 + clip[1])) | ((A < 0) & (ratio < 1 - clip[0]))
    unit = mask_BT.sum(1) / batch.lengths_B if algorithm.ratio == "trajectory" else torch.ones_like(ratio)  # a row is a part of one
    gap_BT = batch.sampler_log_weight_BT.abs()
    sums = {"tokens": int(mask_BT.sum()), "units": unit.sum().item(), "clipped": (unit * clipped).sum().item(),
            "ratio_max": ratio.max().item(), "entropy": batch.entropy_BT.sum().item(),
            "approx_kl": (log_ratio_BT.exp() - 1 - log_ratio_BT).sum().item(), "loss": loss,
            "sampler_gap": gap_BT.sum().item(), "sampler_gap_max": gap_BT.max().item()}
    if batch.ref_logp_BT is not None:
        log_ref_BT = batch.ref_logp_BT - batch.logp_BT
        sums["kl_reference"] = (log_ref_BT.exp() - 1 - log_ref_BT).sum().item()
    return sums


def metrics_of(sums, norms, budget) -> dict:
    """The figures of all micro-batches and the norms of all optimizer steps as means (docs/grpo.md explains each)."""
    tokens, units = max(sums.get("tokens", 0), 1), sums.get("units", 1)
    metrics = {"learn_tokens": sums.get("tokens", 0), "loss": sums.get("loss", 0.0), "grad_norm": sum(norms) / max(len(norms), 1),
               "approx_kl": sums.get("approx_kl", 0.0) / tokens,
               "clip_fraction": sums.get("clipped", 0) / units, "ratio_max": sums.get("ratio_max", 1.0),
               "micro_batch_tokens": budget, "skipped_steps": sums.get("skipped_steps", 0), "optimizer_steps": len(norms)}
    if sums.get("known"):
        metrics |= {"sampler_gap": sums["sampler_gap"] / sums["known"], "sampler_gap_max": sums["sampler_gap_max"]}
    if "entropy" in sums:  # of the rows that were computed
        metrics["entropy_learner"] = sums["entropy"] / tokens
    if "more" in sums:
        metrics["distill_loss"] = sums["more"]
    return metrics | ({"kl_reference": sums["kl_reference"] / tokens} if "kl_reference" in sums else {})
