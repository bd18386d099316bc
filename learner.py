"""From episodes to a gradient: rows, micro-batches, log-probs, the shares of a loss, one optimizer step.

    stats = update(model, optimizer, batch, advantages_N, loss, pad_id=..., temperature=1.0)

A loss returns its micro-batch's share of the whole batch's loss (the normalisers are arguments), so the gradient does
not depend on how rows are packed, up to rounding. Where memory runs out, rows are packed smaller, and the run goes on.
"""
import gc
import math
import random
import sys
from types import SimpleNamespace

import torch

from envs import BadInput
from model import reference, token_logps


def pad(rows, pad_id, device):
    """Rows of ids and masks -> ids_BT, mask_BT (bool), padded on the right. The mask comes from sampling, not from ids."""
    width = max(len(row.ids) for row in rows)
    ids = [row.ids + [pad_id] * (width - len(row.ids)) for row in rows]
    mask = [row.mask + [0] * (width - len(row.mask)) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device, dtype=torch.bool)


def in_micro_batches(pairs, budget, work):
    """work(some of the (row, n) pairs), longest rows first, as many as keep rows times the longest row within `budget`
    padded tokens; returns the budget.

    Where memory runs out, `work` is called again with half of them, and the budget stays that small. So `work` must leave
    nothing behind when it fails (`add_gradient`). Raises BadInput where a single row is too much.
    """
    pairs = sorted(pairs, key=lambda pair: len(pair[0].ids), reverse=True)
    while pairs:
        width = len(pairs[0][0].ids)
        size = min(len(pairs), max(1, budget // width))
        if fits(work, pairs[:size]):
            pairs = pairs[size:]
            continue
        if size == 1:
            raise BadInput(f"out of memory on one row of {width} tokens: pass --gradient-checkpointing (a run goes on with it "
                           f"and --resume), or start with --bits 4 or a lower --max-context (python model.py --plan says what fits)")
        budget = size // 2 * width
        print(f"out of memory on {size} rows of {width} tokens; from here on --micro-batch-tokens {budget}", file=sys.stderr)
        gc.collect()
        torch.cuda.empty_cache()  # nothing without a GPU
    return budget


def fits(work, pairs) -> bool:
    try:
        work(pairs)
    except torch.OutOfMemoryError:  # what it held goes with its frames, once this returns
        return False
    return True


def add_gradient(share, parameters):
    """share.backward(), but all of it or, where memory runs out half-way, nothing."""
    for p, grad in zip(parameters, torch.autograd.grad(share, parameters, allow_unused=True)):
        if grad is not None:
            p.grad = grad if p.grad is None else p.grad.add_(grad)


@torch.no_grad()
def row_logps(model, rows, pad_id, *, temperature=1.0, micro_batch_tokens=8192) -> dict:
    """{id(row): log-probs of its tokens (a list of floats, 0 where the mask is 0)}, by the code path of the update."""
    logps = {}

    def work(pairs):
        ids_BT, mask_BT = pad([row for row, _ in pairs], pad_id, model.device)
        logp_BT = token_logps(model, ids_BT, mask_BT, temperature)[0].tolist()
        logps.update({id(row): logp_T[:len(row.ids)] for (row, _), logp_T in zip(pairs, logp_BT)})

    in_micro_batches([(row, None) for row in rows], micro_batch_tokens, work)
    return logps


def log_ratios(model, trajectories, pad_id, **how):
    """To be called before `update`; what it returns is called after, and gives for each trajectory the log-probs of its
    sampled tokens now less those when they were sampled, in nats. In `update` itself that ratio is 1 until a second step."""
    def logps():
        found = row_logps(model, [row for t in trajectories for row in t.rows], pad_id, **how)
        return [[found[id(row)] for row in t.rows] for t in trajectories]

    before = [[row.old_logp or logp_T for row, logp_T in zip(t.rows, old)] for t, old in zip(trajectories, logps())]
    return lambda: [[after - old for row, after_T, old_T in zip(t.rows, *both) for own, after, old in
                     zip(row.mask, after_T, old_T) if own] for t, both in zip(trajectories, zip(logps(), before))]


def update(model, optimizer, batch, advantages_N, loss, *, pad_id, temperature=1.0, minibatches=1,
           micro_batch_tokens=8192, use_reference=False, clip=(0.2, 0.2), sequence_ratio=False, max_grad_norm=1.0,
           gradient_checkpointing=False, seed=0, more=None, importance_cap=0.0):
    """`minibatches` optimizer steps on a batch of N trajectories; returns the metrics.

    loss(micro_batch) -> scalar share; see `train.train` for its fields. Old log-probs come from this same code path:
    detached from the new ones when there is one update, computed before the first of several; a row that was sampled in
    another context brings its own (`Row.old_logp`). Rows without advantage
    are not computed unless there is a reference, whose KL they pay; the normalisers count them all the same, and the
    metrics are over the rows computed. more(k) adds the gradient of another term of the loss to optimizer step k and
    returns its value (distill.py); the batch may then be empty. An optimizer step whose gradient is not finite is left
    out and counted (`skipped_steps`). Raises FloatingPointError when a step makes a parameter that is not finite.

    importance_cap C > 0: where the sampler's log-probs differ from the learner's (a model of 4 bits, bf16), each token's
    gradient is weighed by min(pi_old / pi_sampler, C), the KL's to a reference too. The metrics sampler_gap and
    sampler_gap_max, the mean and largest |log pi_old - log pi_sampler| over sampled tokens, say whether that is needed.
    """
    rows_N = [[(row, n) for row in trajectory.rows] for n, trajectory in enumerate(batch)]
    lengths_N = torch.tensor([trajectory.length for trajectory in batch])
    order = random.Random(f"minibatches {seed}").sample(range(len(batch)), len(batch))
    parts = [order[k::minibatches] for k in range(minibatches)]
    trainable = [p for p in model.parameters() if p.requires_grad]

    def score(pairs):
        ids_BT, mask_BT = pad([row for row, _ in pairs], pad_id, model.device)
        return *token_logps(model, ids_BT, mask_BT, temperature), mask_BT

    def rows_of(part):
        return [pair for n in part for pair in rows_N[n] if use_reference or advantages_N[n]]

    old_logp = {}
    if minibatches > 1:
        for part in parts:  # packed as below: in bf16 a log-prob depends on the shape of its batch
            old_logp |= row_logps(model, [row for row, _ in rows_of(part)], pad_id, temperature=temperature,
                                  micro_batch_tokens=micro_batch_tokens)
    old_logp |= {id(row): row.old_logp for rows in rows_N for row, _ in rows if row.old_logp is not None}

    totals, norms = {}, []

    def work(pairs):  # one micro-batch of part k
        ref_logp_BT = None
        if use_reference:
            with torch.no_grad(), reference(model):
                ref_logp_BT = score(pairs)[0]
        logp_BT, entropy_BT, mask_BT = score(pairs)
        old_logp_BT = logp_BT.detach().clone()
        log_weight_BT = torch.zeros_like(old_logp_BT)  # log pi_old / pi_sampler
        for b, (row, _) in enumerate(pairs):
            if id(row) in old_logp:
                old_logp_BT[b, :len(row.ids)] = torch.tensor(old_logp[id(row)], device=logp_BT.device)
            if len(row.sampled_logp) == len(row.ids):
                log_weight_BT[b, :len(row.ids)] = old_logp_BT[b, :len(row.ids)] - log_weight_BT.new_tensor(row.sampled_logp)
        if importance_cap:
            weight_BT = log_weight_BT.exp().clamp(max=importance_cap)
            logp_BT = logp_BT.detach() + weight_BT * (logp_BT - logp_BT.detach())  # the value stays, the gradient is weighed
        members = [n for _, n in pairs]
        micro_batch = SimpleNamespace(
            logp_BT=logp_BT, old_logp_BT=old_logp_BT, ref_logp_BT=ref_logp_BT, mask_BT=mask_BT,
            advantages_B=advantages_N[members].to(logp_BT.device), lengths_B=lengths_N[members].to(logp_BT.device),
            num_trajectories=len(parts[k]), num_tokens=int(lengths_N[parts[k]].sum()))
        share = loss(micro_batch)
        sums = ratio_sums(micro_batch, entropy_BT, clip, sequence_ratio)
        sums |= {"loss": share.item() / minibatches, "sampler_gap": log_weight_BT.abs().sum().item(),
                 "known": sum(sum(row.mask) for row, _ in pairs if len(row.sampled_logp) == len(row.ids)),
                 "sampler_gap_max": log_weight_BT.abs().max().item()}
        add_gradient(share, trainable)
        for name, value in sums.items():
            totals[name] = max(totals.get(name, value), value) if name.endswith("_max") else totals.get(name, 0) + value

    model.train(gradient_checkpointing)
    for k, part in enumerate(parts):
        optimizer.zero_grad(set_to_none=True)
        pairs_of_part = rows_of(part)
        micro_batch_tokens = in_micro_batches(pairs_of_part, micro_batch_tokens, work)
        if more:
            totals["more"] = totals.get("more", 0) + more(k) / minibatches
        elif not pairs_of_part:
            continue
        norm = torch.nn.utils.clip_grad_norm_(trainable, max_grad_norm).item()
        if not math.isfinite(norm):
            totals["skipped_steps"] = totals.get("skipped_steps", 0) + 1
            continue
        norms.append(norm)
        optimizer.step()
        if not all(p.isfinite().all() for p in trainable):
            raise FloatingPointError("the step made parameters that are not finite")
    model.eval()
    tokens, units = max(totals.get("tokens", 0), 1), max(totals.get("units", 0), 1)
    stats = {"learn_tokens": totals.get("tokens", 0), "loss": totals.get("loss", 0.0), "grad_norm": sum(norms) / max(len(norms), 1),
             "entropy": totals.get("entropy", 0.0) / tokens, "approx_kl": totals.get("approx_kl", 0.0) / tokens,
             "clip_fraction": totals.get("clipped", 0) / units, "ratio_max": totals.get("ratio_max", 1.0),
             "micro_batch_tokens": micro_batch_tokens, "skipped_steps": totals.get("skipped_steps", 0),
             "optimizer_steps": len(norms)}
    if totals.get("known"):
        stats |= {"sampler_gap": totals["sampler_gap"] / totals["known"], "sampler_gap_max": totals["sampler_gap_max"]}
    if more:
        stats["distill_loss"] = totals["more"]
    return stats | ({"kl_reference": totals.get("kl_reference", 0.0) / tokens} if use_reference else {})


@torch.no_grad()
def ratio_sums(batch, entropy_BT, clip, sequence_ratio):
    """Sums over a micro-batch for the metrics: k3 estimates of KL, entropy, and where the clip acts."""
    log_ratio_BT = batch.logp_BT - batch.old_logp_BT  # 0 where the mask is 0
    A_B, mask_BT = batch.advantages_B, batch.mask_BT
    if sequence_ratio:
        ratio, A = (log_ratio_BT.sum(1) / mask_BT.sum(1)).exp(), A_B
    else:
        ratio, A = log_ratio_BT.exp()[mask_BT], A_B[:, None].expand_as(mask_BT)[mask_BT]
    clipped = ((A > 0) & (ratio > 1 + clip[1])) | ((A < 0) & (ratio < 1 - clip[0]))
    sums = {"tokens": int(mask_BT.sum()), "units": ratio.numel(), "clipped": int(clipped.sum()),
            "ratio_max": ratio.max().item(), "entropy": entropy_BT.sum().item(),
            "approx_kl": (log_ratio_BT.exp() - 1 - log_ratio_BT).sum().item()}
    if batch.ref_logp_BT is not None:
        log_ref_BT = batch.ref_logp_BT - batch.logp_BT
        sums["kl_reference"] = (log_ref_BT.exp() - 1 - log_ref_BT).sum().item()
    return sums
