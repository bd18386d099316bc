"""The teacher of the Experience Funnel: its distributions after the sampled tokens, computed first and stored.

    items = weigh(policy, trajectories, ...)       # Eqs. 6 and 7, by the policy's two branches
    mark(policy, items, ...); consult(teacher, items, ...); save(items, path)     # then the teacher can be freed
    distill(student, items, ...)                   # Eq. 8's gradient from what was stored

Teacher and student read the same sampled tokens after different prompts, with and without the state. What is stored of
the teacher are the log-probs of the whole vocabulary, or of K tokens, the student's and the teacher's most likely ones,
and one bucket for all others: K + 1 numbers a token instead of 151,936. The KL over buckets is never above the full one.

An item is one trajectory: "rows", [(ids, mask), ...] of the student, without the state; for its T sampled tokens, row
after row, "weights" [T], a_i w_it of Eq. 8, "top" [T, K] (K = 0: the whole vocabulary) and "logp" [T, K + 1 or V].
"""
import os
from dataclasses import replace

import torch
from torch.utils.checkpoint import checkpoint

from distill import distill_loss, over_mean, state_response
from envs import BadInput
from learner import add_gradient, in_micro_batches, pad
from rollout import Row, rows_of, without_hints
from state import with_notes, with_state, without_state

CHUNK = 256  # tokens whose logits are held at once, some copies of [256, V] in fp32


def both_rows(trajectory, chat, history, state, place="prompt"):
    """The trajectory's rows after the prompt with the state and after the one without: [(row, row), ...].

    Raises AssertionError unless they hold the same sampled tokens, row by row, and those are the ones that were sampled.
    """
    plain = without_hints(trajectory)
    if place == "prompt":
        plain = replace(plain, system_prompt=without_state(plain.system_prompt, state))
        informed = replace(plain, system_prompt=with_state(plain.system_prompt, state))
    else:
        informed = with_notes(plain, state)
    with_, without = (rows_of(t, chat, history) for t in (informed, plain))
    sampled = [[[i for i, own in zip(row.ids, row.mask) if own] for row in rows] for rows in (with_, without)]
    if sampled[0] != sampled[1] or sum(sampled[0], []) != [i for turn in trajectory.turns for i in turn.action_ids]:
        raise AssertionError("teacher and student do not score the same token ids")
    return list(zip(with_, without))


def parts_of(model):
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    return causal.base_model, causal.get_output_embeddings()


def hidden(model, rows, pad_id):
    """[N, D]: the hidden states that predict the sampled tokens of these rows, row after row."""
    ids_BT, mask_BT = pad(rows, pad_id, model.device)
    hidden_BTD = parts_of(model)[0](input_ids=ids_BT, use_cache=False).last_hidden_state
    return hidden_BTD[:, :-1][mask_BT[:, 1:]]  # the token in column t + 1 is predicted at t


def logits(model, hidden_ND, temperature, width=None):
    return parts_of(model)[1](hidden_ND)[:, :width].float() / temperature


@torch.no_grad()
def by_row(pairs, budget, compute):
    """compute(some of the pairs) -> a tuple of [N, ...], for their sampled tokens; returns each pair's part of it."""
    parts = [None] * len(pairs)

    def work(batch):
        out = [part.cpu().split([sum(row.mask) for row, _ in batch]) for part in compute([pairs[n] for _, n in batch])]
        for (_, n), *part in zip(batch, *out):
            parts[n] = part

    in_micro_batches([(pair[0], n) for n, pair in enumerate(pairs)], budget, work)
    return parts


def weigh(policy, trajectories, weights_N, chat, state, *, place="prompt", history="full", token_weights="jsd",
          temperature=1.0, micro_batch_tokens=8192):
    """Trajectories with a weight a_i above 0 -> items, still without a teacher: rows of both branches, weights a_i w_it.

    token_weights: "jsd" (Eqs. 6 and 7, on the policy's own two branches, whoever the teacher is) or "uniform" (w = 1).
    """
    chosen = [(t, float(a)) for t, a in zip(trajectories, weights_N) if a > 0 and t.turns]
    pairs_N = [both_rows(t, chat, history, state, place) for t, _ in chosen]

    def responses(pairs):
        branches = [hidden(policy, rows, chat.pad_id).split(CHUNK) for rows in zip(*pairs)]
        return (torch.cat([state_response(*(logits(policy, part, temperature) for part in both))
                           for both in zip(*branches)]),)

    if token_weights == "jsd":
        d = iter(by_row([pair for pairs in pairs_N for pair in pairs], micro_batch_tokens, responses))
        w_N = [over_mean(torch.cat([next(d)[0] for _ in pairs])) for pairs in pairs_N]
    else:
        w_N = [torch.ones(t.length) for t, _ in chosen]
    return [{"rows": [(row.ids, row.mask) for _, row in pairs], "state_rows": [(row.ids, row.mask) for row, _ in pairs],
             "weights": a * w_T} for (_, a), pairs, w_T in zip(chosen, pairs_N, w_N)]


def buckets(logits_NV, top_NK):
    """[N, V] logits and [N, K] ids -> [N, K + 1] logits: those of the K ids and of all others as one. K = 0: all of V."""
    if not top_NK.shape[1]:
        return logits_NV
    others_N1 = logits_NV.scatter(1, top_NK, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([logits_NV.gather(1, top_NK), others_N1], 1)


def mark(policy, items, chat, top_k, *, temperature=1.0, micro_batch_tokens=8192):
    """Put half of the K tokens that are stored into the items: the policy's own most likely ones without the state. The
    reverse KL weighs a token by the student's probability, so it needs these as much as the teacher's."""
    if not top_k:
        return
    rows = [(Row(*row),) for item in items for row in item["rows"]]
    width = len(chat.tokenizer)  # every teacher has these

    def answers(rows):
        return (torch.cat([logits(policy, part, temperature, width).topk(min(top_k, width - 1) // 2).indices.int()
                           for part in hidden(policy, [row for row, in rows], chat.pad_id).split(CHUNK)]),)

    found = iter(by_row(rows, micro_batch_tokens, answers))
    for item in items:
        item["own"] = torch.cat([next(found)[0] for _ in item["rows"]])


def consult(teacher, items, pad_id, *, sees_state=True, top_k=0, width=None, temperature=1.0, micro_batch_tokens=8192):
    """Put the teacher's log-probs into the items, of the tokens of `mark` and the teacher's own most likely other ones.
    width: the student's vocabulary, where the teacher's may be larger."""
    rows = []
    for item in items:
        own = item.pop("own", torch.zeros(len(item["weights"]), 0, dtype=torch.int))
        own = own.split([sum(mask) for _, mask in item["rows"]])
        rows += [(Row(*row), part) for row, part in zip(item["state_rows" if sees_state else "rows"], own)]

    def answers(rows):
        found = []
        own_NK = torch.cat([own for _, own in rows]).long().to(teacher.device)
        for part, own in zip(hidden(teacher, [row for row, _ in rows], pad_id).split(CHUNK), own_NK.split(CHUNK)):
            logits_NV = logits(teacher, part, temperature, width)
            others = min(top_k, logits_NV.shape[1] - 1) - own.shape[1]
            top_NK = torch.cat([own, logits_NV.scatter(1, own, -torch.inf).topk(others).indices], 1)
            found.append((top_NK.int(), buckets(logits_NV, top_NK).log_softmax(1)))
        return tuple(map(torch.cat, zip(*found)))

    width = min(width or parts_of(teacher)[1].weight.shape[0], parts_of(teacher)[1].weight.shape[0])
    found = iter(by_row(rows, micro_batch_tokens, answers))
    for item in items:
        item["top"], item["logp"] = map(torch.cat, zip(*(next(found) for _ in item.pop("state_rows"))))
        item["width"] = width


def save(items, path):
    """Written beside, then renamed. A full disk is one line, and leaves nothing behind."""
    beside = f"{path}.new"
    try:
        torch.save(items, beside)
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:  # RuntimeError: what torch's writer says of a full disk
        size = sum(item[key].nbytes for item in items for key in ("top", "logp"))
        if os.path.exists(beside):
            os.remove(beside)
        raise BadInput(f"the teacher's log-probs, {size / 1e6:.0f} MB, cannot be stored in {path}: "
                       f"{str(error).splitlines()[0]}; make room or lower --top-k, then --resume") from error


def distill(student, items, pad_id, *, weight=1.0, temperature=1.0, micro_batch_tokens=8192):
    """Add the gradient of weight * Eq. 8 over these items, under one denominator; returns (Eq. 8's value, the tokens of a
    micro-batch, which are fewer where memory ran out)."""
    total = sum(item["weights"].sum().item() for item in items)
    if not total:
        return 0.0, micro_batch_tokens
    parts = {}  # (item, row) -> its tokens' weights, teacher ids and log-probs
    for i, item in enumerate(items):
        sizes = [sum(mask) for _, mask in item["rows"]]
        for r, part in enumerate(zip(*(item[key].split(sizes) for key in ("weights", "top", "logp")))):
            parts[i, r] = part
    values, trainable = [], [p for p in student.parameters() if p.requires_grad]

    def numerator(hidden_CD, weights_C, top_CK, logp_C):
        student_C = buckets(logits(student, hidden_CD, temperature, items[0]["width"]), top_CK)
        return distill_loss(student_C[None], logp_C[None], weights_C[None], torch.ones_like(weights_C)[None])[0]

    rows = [(Row(*item["rows"][r]), (i, r)) for i, item in enumerate(items) for r in range(len(item["rows"]))]

    def work(batch):
        hidden_ND = hidden(student, [row for row, _ in batch], pad_id)
        taught = [torch.cat(tensors).to(hidden_ND.device) for tensors in zip(*(parts[where] for _, where in batch))]
        taught[1] = taught[1].long()
        shares = [checkpoint(numerator, *part, use_reentrant=False)
                  for part in zip(*(tensor.split(CHUNK) for tensor in (hidden_ND, *taught)))]
        share = sum(shares) / total  # of the whole batch: the shares of its micro-batches add up to Eq. 8
        add_gradient(weight * share, trainable)
        values.append(share.item())

    micro_batch_tokens = in_micro_batches(rows, micro_batch_tokens, work)
    return sum(values), micro_batch_tokens


def check_tokenizer(name, tokenizer):
    """A teacher scores the student's token ids, so it must read them as the same tokens. Raises BadInput."""
    from transformers import AutoTokenizer

    try:
        other = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot load the teacher {name!r}: {str(error).strip().splitlines()[0]}") from error
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    if ours != theirs:
        differ = sum(theirs.get(token) != i for token, i in ours.items())
        raise BadInput(f"the teacher {name} has another tokenizer ({len(theirs):,} tokens against {len(ours):,}, {differ:,} "
                       f"of ours missing or elsewhere): its log-probs would be of other tokens; choose one of its family")
