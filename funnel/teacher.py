"""The teacher of the Experience Funnel: its next-token distributions at the sampled positions, computed before they are trained on.

    items = teach(run, weighed, state, tokens)     # for episodes and their a_i: the two lines below, by the options of a run
        items = weigh(policy, weighed, ...)        # Eqs. 6 and 7, by the policy's two branches
        add_likely_tokens(policy, items, ...); consult(teacher, items, ...)
    save_items(items, path)                        # then the teacher can be freed
    distillation_gradient(student, items, ...)     # Eq. 8's gradient from what was stored

Teacher and student read the same sampled tokens after different prompts, with and without the state. What is stored of
the teacher are the log-probs of the whole vocabulary, or of K tokens, the student's and the teacher's most likely ones,
and one bucket for all others: K + 1 numbers a token instead of 151,936. The KL over buckets is never above the full one.
"""
import os
from dataclasses import dataclass, replace

import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoTokenizer

from distill import distill_loss, over_mean, state_response
from envs import BadInput
from funnel.state import with_notes, with_state, without_state
from rl.learner import add_gradient, in_micro_batches, pad, sampled_states
from rl.rollout import Row
from rl.stripped import rebuild_rows, without_hints

OWN = ("self", "base")  # teachers that are the policy's own model, with and without its adapter
CHUNK = 256  # tokens whose logits are held at once, some copies of [256, V] in fp32


@dataclass
class Item:
    """One trajectory, with values for its T sampled tokens, row after row."""
    rows: list  # [(ids, mask), ...] of the student, without the state
    weights: torch.Tensor  # [T], a_i w_it of Eq. 8
    state_rows: list | None = None  # the same with the state; deleted by `consult`
    likely: torch.Tensor | None = None  # [T, K / 2], ids of the policy's likeliest tokens; deleted by `consult`
    top: torch.Tensor | None = None  # [T, K], ids of the tokens that are stored; K = 0: the whole vocabulary
    logp: torch.Tensor | None = None  # [T, K + 1 or V], the teacher's log-probs of these and of all others, in nats
    width: int = 0  # V, the smaller vocabulary of the two models


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
    with_, without = (rebuild_rows(t, chat, history) for t in (informed, plain))
    sampled = [[[i for i, own in zip(row.ids, row.mask) if own] for row in rows] for rows in (with_, without)]
    own = [i for row in trajectory.rows for i, own in zip(row.ids, row.mask) if own]
    if sampled[0] != sampled[1] or sum(sampled[0], []) != own:
        raise AssertionError("teacher and student do not score the same token ids")
    return list(zip(with_, without))


def hidden_states(model, rows, pad_id):
    """[N, D]: the hidden states that predict the sampled tokens of these rows, row after row."""
    return sampled_states(model, *pad(rows, pad_id, model.device))[0]


def logits(model, hidden_ND, temperature, width=None):
    return model.get_output_embeddings()(hidden_ND)[:, :width].float() / temperature


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


def weigh(policy, weighed, chat, state, *, place="prompt", history="full", token_weights="jsd", temperature=1.0,
          micro_batch_tokens=8192):
    """[(trajectory, a_i above 0), ...] -> items, still without a teacher: rows of both branches, weights a_i w_it.

    token_weights: "jsd" (Eqs. 6 and 7, on the policy's own two branches, whoever the teacher is) or "uniform" (w = 1).
    """
    pairs_N = [both_rows(t, chat, history, state, place) for t, _ in weighed]

    def responses(pairs):
        branches = [hidden_states(policy, rows, chat.pad_id).split(CHUNK) for rows in zip(*pairs)]
        return (torch.cat([state_response(*(logits(policy, part, temperature) for part in both))
                           for both in zip(*branches)]),)

    if token_weights == "jsd":
        d = iter(by_row([pair for pairs in pairs_N for pair in pairs], micro_batch_tokens, responses))
        w_N = [over_mean(torch.cat([next(d)[0] for _ in pairs])) for pairs in pairs_N]
    else:
        w_N = [torch.ones(t.length) for t, _ in weighed]
    return [Item([(row.ids, row.mask) for _, row in pairs], a * w_T, [(row.ids, row.mask) for row, _ in pairs])
            for (_, a), pairs, w_T in zip(weighed, pairs_N, w_N)]


def buckets(logits_NV, top_NK):
    """[N, V] logits and [N, K] ids -> [N, K + 1] logits: those of the K ids and of all others as one. K = 0: all of V."""
    if not top_NK.shape[1]:
        return logits_NV
    others_N1 = logits_NV.scatter(1, top_NK, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([logits_NV.gather(1, top_NK), others_N1], 1)


def add_likely_tokens(policy, items, chat, top_k, *, temperature=1.0, micro_batch_tokens=8192):
    """Put half of the K tokens that are stored into the items: the policy's own most likely ones without the state. The
    reverse KL weighs a token by the student's probability, so it needs these as much as the teacher's."""
    if not top_k:
        return
    rows = [(Row(*row),) for item in items for row in item.rows]
    width = len(chat.tokenizer)  # every teacher has these

    def likeliest(rows):
        return (torch.cat([logits(policy, part, temperature, width).topk(min(top_k, width - 1) // 2).indices.int()
                           for part in hidden_states(policy, [row for row, in rows], chat.pad_id).split(CHUNK)]),)

    found = iter(by_row(rows, micro_batch_tokens, likeliest))
    for item in items:
        item.likely = torch.cat([next(found)[0] for _ in item.rows])


def consult(teacher, items, pad_id, *, sees_state=True, top_k=0, width=None, temperature=1.0, micro_batch_tokens=8192):
    """Put the teacher's log-probs into the items, of the tokens of `add_likely_tokens` and the teacher's own most likely other ones.
    width: the student's vocabulary, where the teacher's may be larger."""
    rows = []
    for item in items:
        likely = torch.zeros(len(item.weights), 0, dtype=torch.int) if item.likely is None else item.likely
        likely = likely.split([sum(mask) for _, mask in item.rows])
        rows += [(Row(*row), part) for row, part in zip(item.state_rows if sees_state else item.rows, likely)]
    width = min(width or len(teacher.get_output_embeddings().weight), len(teacher.get_output_embeddings().weight))

    def answers(rows):
        likely_NK = torch.cat([likely for _, likely in rows]).long().to(teacher.device)
        return targets(teacher, hidden_states(teacher, [row for row, _ in rows], pad_id), likely_NK, top_k, width, temperature)

    found = iter(by_row(rows, micro_batch_tokens, answers))
    for item in items:
        item.top, item.logp = map(torch.cat, zip(*(next(found) for _ in item.state_rows)))
        item.state_rows, item.likely, item.width = None, None, width


def targets(teacher, hidden_ND, likely_NK, top_k, width, temperature):
    """([N, top_k] ids, [N, top_k + 1] log-probs): the `likely` ids and the teacher's likeliest others, and all others in one."""
    found = []
    for part, likely in zip(hidden_ND.split(CHUNK), likely_NK.split(CHUNK)):
        logits_NV = logits(teacher, part, temperature, width)
        others = min(top_k, logits_NV.shape[1] - 1) - likely.shape[1]
        top_NK = torch.cat([likely, logits_NV.scatter(1, likely, -torch.inf).topk(others).indices], 1)
        found.append((top_NK.int(), buckets(logits_NV, top_NK).log_softmax(1)))
    return tuple(map(torch.cat, zip(*found)))


# What a run asks

def usable(run, weighed):
    """Of [(trajectory, a_i), ...] those that can be distilled."""
    weighed = [(t, a) for t, a in weighed if t.turns and t.end != "env_error"]
    if run.config.teacher not in OWN:  # ids without a token, of a padded vocabulary, can be sampled, and another teacher may lack them
        known = len(run.chat.tokenizer)
        weighed = [(t, a) for t, a in weighed if all(i < known for turn in t.turns for i in turn.action_ids)]
    return weighed


def teach(run, weighed, state, micro_batch_tokens, beside=None):
    """Token weights (Eqs. 6 and 7), by the two branches of pi_k, whose weights the model has; and what the teacher thinks of the same
    tokens (Eq. 5). beside: another teacher that is in memory; without it, it comes, and the policy leaves. -> [Item, ...]"""
    config = run.config
    how = {"temperature": config.temperature, "micro_batch_tokens": micro_batch_tokens}
    items = weigh(run.model, weighed, run.chat, state, place=config.state_place, history=config.history,
                  token_weights=config.token_weights, **how)
    if not items:
        return []
    add_likely_tokens(run.model, items, run.chat, config.top_k, **how)
    how |= {"sees_state": config.teacher_state, "top_k": config.top_k, "width": len(run.model.get_output_embeddings().weight)}

    def ask(teacher):
        consult(teacher, items, run.chat.pad_id, **how)

    if config.teacher == "self":
        ask(run.model)
    elif config.teacher == "base":
        with run.model.disable_adapter():
            ask(run.model)
    elif beside:
        ask(beside)
    else:
        run.with_another(config.teacher, lambda teacher, _: ask(teacher))
    return items


# What is stored, and the gradient

def save_items(items, path):
    """Written beside, then renamed. A full disk is one line, and leaves nothing behind."""
    beside = f"{path}.new"
    try:
        torch.save([vars(item) for item in items], beside)
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:  # RuntimeError: what torch's writer says of a full disk
        size = sum(item.top.nbytes + item.logp.nbytes for item in items)
        if os.path.exists(beside):
            os.remove(beside)
        raise BadInput(f"the teacher's log-probs, {size / 1e6:.0f} MB, cannot be stored in {path}: "
                       f"{str(error).splitlines()[0]}; make room or lower --top-k, then --resume") from error


def load_items(path) -> list[Item]:
    return [Item(**fields) for fields in torch.load(path)]


def distillation_gradient(student, items, pad_id, *, weight=1.0, temperature=1.0, micro_batch_tokens=8192):
    """Add the gradient of weight * Eq. 8 over these items, under one denominator; returns (Eq. 8's value, the tokens of a
    micro-batch, which are fewer where memory ran out)."""
    total = sum(item.weights.sum().item() for item in items)
    if not total:
        return 0.0, micro_batch_tokens
    rows = []  # of all items: (row, its tokens' weights, teacher ids and log-probs)
    for item in items:
        sizes = [sum(mask) for _, mask in item.rows]
        rows += zip((Row(*row) for row in item.rows), *(tensor.split(sizes) for tensor in (item.weights, item.top, item.logp)))
    values, trainable = [], [p for p in student.parameters() if p.requires_grad]

    def work(some):
        hidden_ND = hidden_states(student, [row for row, *_ in some], pad_id)
        taught = [torch.cat(tensors).to(hidden_ND.device) for tensors in list(zip(*some))[1:]]
        share = numerator(student, hidden_ND, *taught, items[0].width, temperature) / total  # the shares add up to Eq. 8
        add_gradient(weight * share, trainable)
        values.append(share.item())

    micro_batch_tokens = in_micro_batches(rows, micro_batch_tokens, work)
    return sum(values), micro_batch_tokens


def numerator(student, hidden_ND, weights_N, top_NK, logp_NK, width, temperature):
    """Eq. 8's numerator over N tokens; logits are made again in the backward pass."""
    def of_chunk(hidden_CD, weights_C, top_CK, logp_CK):
        student_C = buckets(logits(student, hidden_CD, temperature, width), top_CK.long())
        return distill_loss(student_C[None], logp_CK[None], weights_C[None], torch.ones_like(weights_C)[None])[0]

    parts = (tensor.split(CHUNK) for tensor in (hidden_ND, weights_N, top_NK, logp_NK))
    return sum(checkpoint(of_chunk, *part, use_reentrant=False) for part in zip(*parts))


def check_tokenizer(name, tokenizer):
    """A teacher scores the student's token ids, so it must read them as the same tokens. Raises BadInput."""
    try:
        other = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot load the teacher {name!r}: {str(error).strip().splitlines()[0]}") from error
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    if ours != theirs:
        differ = sum(theirs.get(token) != i for token, i in ours.items())
        raise BadInput(f"the teacher {name} has another tokenizer ({len(theirs):,} tokens against {len(ours):,}, {differ:,} "
                       f"of ours missing or elsewhere): its log-probs would be of other tokens; choose one of its family")
