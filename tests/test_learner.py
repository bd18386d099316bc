"""rl/learner.py: token log-probs, micro-batches and one update; the gradient does not depend on the packing."""
import random
from dataclasses import replace

import pytest
import torch
from conftest import FakeEnv, batch_of, make_rows, scores, shake, watched

import dapo
import grpo
import gspo
from envs import BadInput
from rl import learner
from rl.chat import Chat
from rl.learner import ScoreTokens, UpdateOptions, in_micro_batches, make_optimizer, pad, token_logps, update
from rl.model import add_lora, freeze_reference, load_model
from rl.rollout import Request, Row, rollout
from rl.sampling import sampler
from rl.train import Algorithm


# Log-probs

def full_pass(model, ids_T, temperature=1.0):
    """Log-softmax of every token given those before it: one row, no padding, all logits."""
    logits = model(input_ids=ids_T[None]).logits[0, :-1].double() / temperature
    return logits.log_softmax(-1)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_log_probs_and_entropies_equal_a_full_pass(policy, temperature):  # docs/faults.md, 10, 14
    rows = make_rows(policy.config.vocab_size)
    ids, mask = pad(rows, 0, policy.device)
    logp, entropy = token_logps(policy, ids, mask, temperature)
    assert logp.dtype == entropy.dtype == torch.float32
    for b, row in enumerate(rows):
        full = full_pass(policy, torch.tensor(row.ids), temperature)
        for t in range(ids.shape[1]):
            if t < len(row.ids) and row.mask[t]:
                assert logp[b, t].item() == pytest.approx(full[t - 1, row.ids[t]].item(), abs=1e-5)
                assert entropy[b, t].item() == pytest.approx(-(full[t - 1].exp() * full[t - 1]).sum().item(), abs=1e-5)
            else:
                assert logp[b, t] == entropy[b, t] == 0


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probs_are_those_of_the_sampling(policy, word_chat, monkeypatch, temperature):  # docs/faults.md, 10, 11: ratio 1
    prompts, seen = [[5, 6, 7], [8] * 11, [9, 10, 11, 12]], watched(policy, monkeypatch)
    answers = sampler(policy, word_chat, temperature=temperature, max_new_tokens=10)(prompts)
    sampling = (torch.stack(seen[0].logits, 1) / temperature).log_softmax(-1)
    for b, (prompt, answer) in enumerate(zip(prompts, answers)):
        row = Row(prompt + answer, [0] * len(prompt) + [1] * len(answer))
        logp = token_logps(policy, *pad([row], 0, "cpu"), temperature)[0][0, len(prompt):].tolist()
        assert logp == pytest.approx([sampling[b, t, i].item() for t, i in enumerate(answer)], abs=1e-5)


@pytest.mark.parametrize("pad_id", [0, 2, 30])
def test_padding_on_the_right_changes_nothing(policy, pad_id):  # docs/faults.md, 19, 20: whatever id the padding has
    rows = make_rows(policy.config.vocab_size)
    together = token_logps(policy, *pad(rows, pad_id, policy.device))[0]
    for row, logp in zip(rows, together):
        alone = token_logps(policy, *pad([row], pad_id, policy.device))[0][0]
        torch.testing.assert_close(logp[:len(row.ids)], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("chunk", [1, 3, 7, 10_000])
def test_the_chunk_size_changes_nothing(policy, chunk):
    results = []
    for size in (chunk, 1024):
        policy.zero_grad()
        logp = scores(policy, chunk=size)[0]
        logp.sum().backward()
        results.append([logp, *(p.grad for p in policy.parameters() if p.requires_grad)])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_gradient_equals_that_of_all_logits(policy):
    ids, mask = scores(policy)[1:]
    token_logps(policy, ids, mask, 0.7)[0].sum().backward()
    got = {n: p.grad.clone() for n, p in policy.named_parameters() if p.requires_grad}
    policy.zero_grad()
    logp = (policy(input_ids=ids).logits[:, :-1] / 0.7).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    (logp * mask[:, 1:]).sum().backward()
    assert got
    for name, p in policy.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(got[name], p.grad, atol=1e-4, rtol=1e-4)


def test_nothing_sampled_is_zero(policy):  # docs/faults.md, 7
    ids = torch.tensor([[5, 6, 7]])
    logp, entropy = token_logps(policy, ids, torch.zeros_like(ids))
    assert not logp.any() and not entropy.any()


def test_only_what_stands_before_a_token_decides_it(policy):
    logp, ids, mask = scores(policy)
    changed = ids.clone()
    changed[:, 8:] = (ids[:, 8:] + 1) % policy.config.vocab_size
    torch.testing.assert_close(token_logps(policy, changed, mask)[0][:, :8], logp[:, :8], atol=1e-5, rtol=0)


@torch.no_grad()
def test_bf16_logits_are_normalised_in_fp32(base):  # docs/faults.md, 11
    base.to(torch.bfloat16)
    logp, ids, mask = scores(base)
    b, t = mask.nonzero()[0].tolist()
    logits = base.lm_head(base.model(input_ids=ids).last_hidden_state[b, t - 1]).float()
    assert logp.dtype == torch.float32
    assert logp[b, t].item() == pytest.approx(logits.log_softmax(-1)[ids[b, t]].item(), abs=1e-5)


def test_logits_are_never_made_for_every_token(base, monkeypatch):
    seen, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *a, out: seen.append(out.shape) or mm(*a, out=out))
    mask = scores(base, chunk=10)[2]
    assert sum(len_ for len_, _ in seen) == mask.sum() and max(seen) <= (10, base.config.vocab_size)


def test_the_fused_head_against_autograd_in_float64():
    """Values and gradient, at a temperature, over chunks, with a weight for each token."""
    torch.manual_seed(0)
    hidden_ND, weight_VD = torch.randn(7, 5, dtype=torch.float64), torch.randn(11, 5, dtype=torch.float64)
    targets_N, weights_N = torch.randint(11, (7,)), torch.randn(7, dtype=torch.float64)
    one, two = hidden_ND.float().requires_grad_(), hidden_ND.clone().requires_grad_()
    logp_N, entropy_N = ScoreTokens.apply(one, weight_VD.float(), targets_N, 0.7, 3)
    (logp_N * weights_N.float()).sum().backward()
    wanted_NV = (two @ weight_VD.t() / 0.7).log_softmax(-1)
    (wanted_NV[range(7), targets_N] * weights_N).sum().backward()
    torch.testing.assert_close(logp_N.double(), wanted_NV[range(7), targets_N], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy_N.double(), -(wanted_NV.exp() * wanted_NV).sum(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(one.grad.double(), two.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("chunk", [2, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_the_entropy_against_autograd(temperature, chunk, dtype):
    """Alone and beside that of the log-probs, with a weight for each token; some distributions are all but sure."""
    torch.manual_seed(0)
    hidden_ND, weight_VD = torch.randn(7, 5, dtype=torch.float64), torch.randn(11, 5, dtype=torch.float64)
    hidden_ND[3] *= 30
    targets_N, (of_logp_N, of_entropy_N) = torch.randint(11, (7,)), torch.randn(2, 7, dtype=torch.float64)
    for weights_N in (0 * of_logp_N, of_logp_N):
        one, two = hidden_ND.clone().to(dtype).requires_grad_(), hidden_ND.clone().requires_grad_()
        logp_N, entropy_N = ScoreTokens.apply(one, weight_VD.to(dtype), targets_N, temperature, chunk)
        terms = (logp_N * weights_N).sum() if weights_N.any() else 0
        (terms + (entropy_N * of_entropy_N).sum()).backward()
        wanted_NV = (two @ weight_VD.t() / temperature).log_softmax(-1)
        (-(wanted_NV.exp() * wanted_NV).sum(-1) @ of_entropy_N + wanted_NV[range(7), targets_N] @ weights_N).backward()
        torch.testing.assert_close(one.grad.double(), two.grad, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_the_real_vocabulary(qwen3_model, qwen3):
    chat = Chat(qwen3)
    torch.manual_seed(0)
    [t] = rollout(sampler(qwen3_model, chat, max_new_tokens=5), chat, [FakeEnv()], [Request("wait win")], max_turns=3)
    ids, mask = pad(t.rows, chat.pad_id, "cpu")
    logp = token_logps(qwen3_model, ids, mask)[0]
    row = t.rows[0]
    full = full_pass(qwen3_model, torch.tensor(row.ids))
    got = [(logp[0, t].item(), full[t - 1, i].item()) for t, (i, m) in enumerate(zip(row.ids, row.mask)) if m]
    assert got and all(a == pytest.approx(b, abs=1e-4) for a, b in got)


@torch.no_grad()
def test_smollm2_log_probs(smollm2):
    model, tokenizer = load_model(smollm2, bits=32)
    chat = Chat(tokenizer)
    prompt, answer = chat.prompt([("user", "What is the capital of France?")]), tokenizer(" Paris.<|im_end|>")["input_ids"]
    ids, mask = torch.tensor([prompt + answer]), torch.tensor([[0] * len(prompt) + [1] * len(answer)])
    logp, _ = token_logps(model, ids, mask)
    full = full_pass(model, ids[0])
    want = [full[len(prompt) + t - 1, i].item() for t, i in enumerate(answer)]
    assert logp[0, len(prompt):].tolist() == pytest.approx(want, abs=1e-4)


# An update

ALGORITHMS = {name: Algorithm(**made) for name, made in {
    "grpo": grpo.algorithm(grpo.Options()), "grpo+kl": grpo.algorithm(grpo.Options(beta=0.1)),
    "dapo": dapo.algorithm(dapo.Options(), grpo.group_advantages),
    "gspo": gspo.algorithm(gspo.Options(), grpo.group_advantages)}.items()}
every_loss = pytest.mark.parametrize("name", list(ALGORITHMS))
ALGORITHMS |= {name: Algorithm(**made) for name, made in {
    "gspo by row": gspo.algorithm(gspo.Options(ratio="row"), grpo.group_advantages),
    "grpo+entropy": grpo.algorithm(grpo.Options(entropy_coef=0.1)),
    "dapo+both": dapo.algorithm(dapo.Options(beta=0.1, entropy_coef=0.1), grpo.group_advantages),
    "gspo+both": gspo.algorithm(gspo.Options(beta=0.1, entropy_coef=0.1), grpo.group_advantages)}.items()}
ADVANTAGES = torch.tensor([1.0, -0.5, 0.7, -1.2, 0.4, -0.4])


class Recorder:
    """An optimizer that keeps the gradients of its steps; it moves nothing unless it is given a real one."""

    def __init__(self, model, real=None):
        self.model, self.real, self.steps = model, real, []

    def zero_grad(self, set_to_none=True):
        for p in self.model.parameters():
            p.grad = None

    def step(self):
        self.steps.append(torch.cat([p.grad.flatten().clone() for p in self.model.parameters() if p.requires_grad]))
        if self.real:
            self.real.step()


def gradient(model, batch, advantages, name="grpo", **how):
    """The gradients of all steps of one update, and its metrics."""
    recorder = Recorder(model)
    stats = update(model, recorder, batch, advantages, ALGORITHMS[name],
                   UpdateOptions(**{"pad_id": 0, "max_grad_norm": 1e9, **how}))
    return recorder.steps, stats


def with_loss(loss, name="grpo"):
    return replace(ALGORITHMS[name], loss=loss)


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


@pytest.fixture
def rows(policy):
    return make_rows(policy.config.vocab_size)


# Micro-batches

@every_loss
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_is_that_of_the_whole_batch(policy, rows, name, temperature):
    [got], _ = gradient(policy, batch_of(rows), ADVANTAGES, name, temperature=temperature)
    policy.zero_grad()
    loss = 0  # the equations once more, on policy, row by row through all logits
    for row, A in zip(rows, ADVANTAGES):
        ids = torch.tensor([row.ids])
        logp = (policy(input_ids=ids).logits[0, :-1] / temperature).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        own = logp[torch.tensor(row.mask[1:], dtype=torch.bool)]
        weight = 1 / sum(sum(row.mask) for row in rows) if name == "dapo" else 1 / len(own) / len(rows)
        loss = loss - weight * A * own.sum()
        if name == "grpo+kl":
            with torch.no_grad(), policy.disable_adapter():
                ref = policy(input_ids=ids).logits[0, :-1] / temperature
            ref = ref.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0][torch.tensor(row.mask[1:], dtype=torch.bool)]
            loss = loss + weight * 0.1 * ((ref - own).exp() - (ref - own) - 1).sum()
    loss.backward()
    close(got, torch.cat([p.grad.flatten() for p in policy.parameters() if p.requires_grad]))


@every_loss
@pytest.mark.parametrize("budget", [1, 15, 30])
def test_the_gradient_does_not_depend_on_the_packing(policy, rows, name, budget):  # docs/faults.md, 6
    [few], stats = gradient(policy, batch_of(rows), ADVANTAGES, name, micro_batch_tokens=budget)
    [whole], stats_whole = gradient(policy, batch_of(rows), ADVANTAGES, name, micro_batch_tokens=10**6)
    assert whole.abs().max() > 1e-3
    close(few, whole)
    assert (stats.pop("micro_batch_tokens"), stats_whole.pop("micro_batch_tokens")) == (budget, 10**6)
    assert stats == pytest.approx(stats_whole, abs=1e-5)


@every_loss
def test_splitting_a_trajectory_changes_nothing(policy, name):  # docs/faults.md, 5
    """Rows that repeat their context, so that each token is predicted from the same tokens as in one row."""
    rows = make_rows(policy.config.vocab_size, lengths=(14, 12, 11))
    parts = [[Row(row.ids[:8], row.mask[:8]), Row(row.ids, [0] * 8 + row.mask[8:])] for row in rows]
    A = ADVANTAGES[:3]
    [one], _ = gradient(policy, batch_of(rows), A, name)
    [two], _ = gradient(policy, batch_of(parts), A, name, micro_batch_tokens=30)
    close(one, two)


def cut(rows):
    """Each row as two or three that repeat their context: what a template makes that keeps no earlier thinking."""
    return [[Row(row.ids[:8], row.mask[:8]), Row(row.ids[:10], [0] * 8 + row.mask[8:10]), Row(row.ids, [0] * 10 + row.mask[10:])]
            if n else [Row(row.ids[:8], row.mask[:8]), Row(row.ids, [0] * 8 + row.mask[8:])] for n, row in enumerate(rows)]


def steps_of(policy, batch, name, advantages=ADVANTAGES, **how):
    """Gradients and metrics of an update that moves the policy; the policy is then as before."""
    before = {n: p.detach().clone() for n, p in policy.named_parameters()}
    recorder = Recorder(policy, torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], 0.3))
    stats = update(policy, recorder, batch, advantages[:len(batch)], ALGORITHMS[name], UpdateOptions(**{
        "pad_id": 0, "max_grad_norm": 1e9, **how}))
    with torch.no_grad():
        for n, p in policy.named_parameters():
            p.copy_(before[n])
    return recorder.steps, stats


@pytest.mark.parametrize("budget", [1, 30, 10**6])
@pytest.mark.parametrize("minibatches, old", [(2, False), (3, False), (1, True), (2, True)])
@pytest.mark.parametrize("name", ["gspo", "gspo+both"])
def test_gspo_has_one_ratio_a_trajectory(policy, name, minibatches, old, budget):
    """Cut in rows, over several optimizer steps, or with old log-probs of another context: the steps are those of one long row."""
    rows = make_rows(policy.config.vocab_size, lengths=(14, 12, 13, 15, 12, 14))
    parts = cut(rows)
    if old:
        for row, logp_T, part in zip(rows, learner.row_logps(policy, rows, 0), parts):
            known = [0.02 * random.Random(n).uniform(-1, 1) for n in range(len(row.ids))]
            for one in (row, *part):
                one.old_logp = [(logp + d) * own for logp, d, own in zip(logp_T, known, one.mask)]
    A = torch.tensor([1.0, -0.5, 0.7, 0.0, 0.4, -0.4])
    one, stats = steps_of(policy, batch_of(rows), name, A, minibatches=minibatches, micro_batch_tokens=10**6)
    two, stats_cut = steps_of(policy, batch_of(parts), name, A, minibatches=minibatches, micro_batch_tokens=budget)
    assert len(one) == len(two) == minibatches
    for left, right in zip(one, two):
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-3)
    for key in ("clip_fraction", "ratio_max", "loss", "entropy_learner", "approx_kl"):
        assert stats[key] == pytest.approx(stats_cut[key], abs=1e-4), key
    assert 0 < stats["clip_fraction"] < 1 or (minibatches, old) == (2, False)
    by_row, _ = steps_of(policy, batch_of(parts), "gspo by row", A, minibatches=minibatches)
    if name == "gspo":
        assert not all(torch.allclose(left, right, rtol=1e-2, atol=1e-4) for left, right in zip(one, by_row))


def test_the_pass_for_a_trajectorys_ratio_is_made_where_it_is_needed(policy, monkeypatch):
    rows, calls, real = make_rows(policy.config.vocab_size, lengths=(14, 12, 13, 15)), [], learner.log_ratio_sums
    monkeypatch.setattr(learner, "log_ratio_sums", lambda *how: calls.append(1) or real(*how))
    for batch, name, minibatches, passes in ((cut(rows), "gspo", 2, 1), (cut(rows), "gspo", 4, 3), (cut(rows), "gspo", 1, 0),
                                             (rows, "gspo", 4, 0), (cut(rows), "gspo by row", 4, 0), (cut(rows), "grpo", 4, 0)):
        steps_of(policy, batch_of(batch), name, minibatches=minibatches)
        assert len(calls) == passes, (name, minibatches)
        calls.clear()


@pytest.mark.parametrize("name, losses", [("grpo+entropy", "grpo"), ("dapo+both", "dapo"), ("gspo+both", "gspo")])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropy_and_kl_are_means_over_the_algorithms_tokens(policy, rows, name, losses, temperature):
    """Rows without advantage take part. The objective's gradient by autograd, row by row through all logits."""
    A = torch.tensor([1.0, 0.0, 0.7, -1.2, 0.0, -0.4])
    [got], stats = gradient(policy, batch_of(rows), A, name, temperature=temperature, micro_batch_tokens=30)
    [plain], _ = gradient(policy, batch_of(rows), A, losses, temperature=temperature)
    policy.zero_grad()
    loss, total, entropies = 0, sum(sum(row.mask) for row in rows), []
    for row in rows:
        ids, own = torch.tensor([row.ids]), torch.tensor(row.mask[1:], dtype=torch.bool)
        logp_TV = (policy(input_ids=ids).logits[0, :-1] / temperature).log_softmax(-1)[own]
        entropies.append(-(logp_TV.exp() * logp_TV).sum(-1))
        weight = 1 / total if losses == "dapo" else 1 / len(logp_TV) / len(rows)
        loss = loss - weight * 0.1 * entropies[-1].sum()
        if "both" in name:
            with torch.no_grad(), policy.disable_adapter():
                ref_TV = (policy(input_ids=ids).logits[0, :-1] / temperature).log_softmax(-1)[own]
            gap_T = (ref_TV - logp_TV).gather(1, ids[0, 1:][own][:, None])[:, 0]
            loss = loss + weight * 0.1 * (gap_T.exp() - gap_T - 1).sum()
    loss.backward()
    extra = torch.cat([p.grad.flatten() for p in policy.parameters() if p.requires_grad])
    assert extra.abs().max() > 1e-5
    torch.testing.assert_close(got - plain, extra, atol=1e-6, rtol=1e-3)
    assert stats["entropy_learner"] == pytest.approx(torch.cat(entropies).mean().item(), abs=1e-5)


def test_the_order_of_trajectories_changes_nothing(policy, rows):  # docs/faults.md, 4
    order = [3, 0, 5, 1, 4, 2]
    [a], _ = gradient(policy, batch_of(rows), ADVANTAGES)
    [b], _ = gradient(policy, batch_of([rows[n] for n in order]), ADVANTAGES[order])
    close(a, b)


@pytest.mark.parametrize("budget", [1, 10, 28, 50, 10_000])
def test_micro_batches(budget):
    rng = random.Random(budget)
    pairs = [(Row([1] * rng.randint(1, 20), []), n) for n in range(30)]
    parts = []
    assert in_micro_batches(pairs, budget, parts.append) == budget
    assert sorted(n for part in parts for _, n in part) == list(range(30))
    assert all(len(part) == 1 or len(part) * max(len(row.ids) for row, _ in part) <= budget for part in parts)
    assert len(parts) == 1 or budget < 10_000


class OutOfMemoryInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError("CUDA out of memory")


@every_loss
@pytest.mark.parametrize("minibatches", [1, 2])
def test_out_of_memory_halves_the_budget_and_repeats(policy, rows, name, minibatches, monkeypatch, capsys):
    """Forward fails with more than two rows, backward with two: nothing is lost, and nothing counted twice."""
    how = {"micro_batch_tokens": 10**6, "minibatches": minibatches}
    whole, whole_stats = gradient(policy, batch_of(rows), ADVANTAGES, name, **how)

    def small_card(model, ids_BT, *rest):
        if len(ids_BT) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        hook = policy.get_base_model().model.layers[0].register_forward_hook(  # when later layers have their gradients
            lambda module, inputs, output: OutOfMemoryInBackward.apply(output) if len(output) == 2 else output)
        try:
            return token_logps(model, ids_BT, *rest)
        finally:
            hook.remove()

    monkeypatch.setattr(learner, "token_logps", small_card)
    halved, stats = gradient(policy, batch_of(rows), ADVANTAGES, name, **how)
    for one, two in zip(whole, halved, strict=True):
        close(one, two)
    longest = max(len(row.ids) for row in rows)
    assert stats.pop("micro_batch_tokens") <= longest < whole_stats.pop("micro_batch_tokens")
    assert stats == pytest.approx(whole_stats, abs=1e-5)
    assert "out of memory on 2 rows of" in capsys.readouterr().err


def test_one_row_that_does_not_fit_is_one_line(policy, rows, monkeypatch):
    def no_card(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(learner, "token_logps", no_card)
    with pytest.raises(BadInput, match="one row of .* --gradient-checkpointing"):
        gradient(policy, batch_of(rows), ADVANTAGES)


@pytest.mark.parametrize("name", ["grpo", "dapo"])
@pytest.mark.parametrize("cap", [0.0, 1e9, 1.2])
def test_the_sampler_gap_and_its_weights(policy, rows, name, cap):
    """Each token's gradient is weighed by min(pi_old / pi_sampler, cap); rows of an unknown sampler are not."""
    [plain], stats = gradient(policy, batch_of(rows), ADVANTAGES, name)
    assert "sampler_gap" not in stats
    scored, rng, gaps = learner.row_logps(policy, rows, 0), random.Random(0), []
    for row, logp_T in zip(rows[1:], scored[1:]):
        gap = [rng.uniform(-0.5, 0.5) * own for own in row.mask]
        row.sampled_logp = [logp - g for logp, g in zip(logp_T, gap)]
        gaps += [abs(g) for g, own in zip(gap, row.mask) if own]
    [got], stats = gradient(policy, batch_of(rows), ADVANTAGES, name, importance_cap=cap)
    assert stats["sampler_gap"] == pytest.approx(sum(gaps) / len(gaps), abs=1e-5)
    assert stats["sampler_gap_max"] == pytest.approx(max(gaps), abs=1e-5)
    if not cap:
        return close(got, plain)
    policy.zero_grad()
    loss, total = 0, sum(sum(row.mask) for row in rows)
    for row, A in zip(rows, ADVANTAGES):
        ids, mask = torch.tensor([row.ids]), torch.tensor([row.mask], dtype=torch.bool)
        logp = token_logps(policy, ids, mask)[0]
        weight = (logp.detach() - torch.tensor([row.sampled_logp])).exp().clamp(max=cap) if row.sampled_logp else 1.0
        loss = loss - (weight * A * logp)[mask].sum() / (total if name == "dapo" else mask.sum() * len(rows))
    loss.backward()
    close(got, torch.cat([p.grad.flatten() for p in policy.parameters() if p.requires_grad]))


def test_pad_takes_the_mask_from_sampling():  # docs/faults.md, 19: pad == end, and both also sampled
    ids, mask = pad([Row([5, 2, 6, 2], [0, 0, 1, 1]), Row([5, 2], [0, 1])], 2, "cpu")
    assert ids.tolist() == [[5, 2, 6, 2], [5, 2, 2, 2]] and mask.tolist() == [[0, 0, 1, 1], [0, 1, 0, 0]]
    assert mask.dtype == torch.bool


@pytest.mark.parametrize("pad_id", [2, 17])
def test_the_padding_does_not_matter(policy, rows, pad_id):  # docs/faults.md, 19
    rows[0].ids[-1] = rows[3].ids[-1] = 2
    [a], _ = gradient(policy, batch_of(rows), ADVANTAGES)
    [b], _ = gradient(policy, batch_of(rows), ADVANTAGES, pad_id=pad_id)
    close(a, b)


def test_observations_after_the_last_action_and_garbage_in_them_do_not_matter(policy, rows):  # docs/faults.md, 14
    [a], _ = gradient(policy, batch_of(rows), ADVANTAGES)
    longer = [Row(row.ids + [9, 8, 7], row.mask + [0, 0, 0]) for row in rows]
    close(a, gradient(policy, batch_of(longer), ADVANTAGES)[0][0])
    seen = []

    def loss(b):
        seen.append((b.logp_BT, b.mask_BT))
        b.logp_BT.retain_grad()
        return ALGORITHMS["dapo"].loss(b)

    update(policy, Recorder(policy), batch_of(rows), ADVANTAGES, with_loss(loss), UpdateOptions(0))
    [(logp, mask)] = seen
    assert (logp.grad[mask] != 0).all() and not logp.grad[~mask].any() and not logp[~mask].any()


# Advantages of zero, broken episodes

@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo"])
def test_skipping_rows_without_advantage_changes_nothing(policy, rows, name, monkeypatch):  # docs/faults.md, 2
    A = ADVANTAGES * torch.tensor([1, 0, 1, 0, 0, 1])
    [skipped], stats = gradient(policy, batch_of(rows), A, name)
    parts = []
    real = learner.in_micro_batches
    monkeypatch.setattr(learner, "in_micro_batches",
                        lambda pairs, budget, work: parts.append(len(pairs)) or real(pairs, budget, work))
    gradient(policy, batch_of(rows), A, name)
    assert parts == [3]
    [tiny], _ = gradient(policy, batch_of(rows), torch.where(A == 0, 1e-30, A), name)  # computed all the same
    assert parts == [3, 6]
    close(skipped, tiny)


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo"])
def test_equal_rewards_take_no_step(policy, rows, name):  # docs/faults.md, 1, 2
    A = grpo.group_advantages(torch.full((6,), 0.7), torch.tensor([0, 0, 0, 1, 1, 1]))
    steps, stats = gradient(policy, batch_of(rows), A, name, minibatches=2)
    assert steps == [] and stats["loss"] == 0 and stats["grad_norm"] == 0 and stats["ratio_max"] == 1
    assert "entropy_learner" not in stats  # nothing was computed, which is not an entropy of 0


def test_equal_rewards_still_pay_the_kl(policy, rows):  # docs/faults.md, 2: pinned
    [step], stats = gradient(policy, batch_of(rows), torch.zeros(6), "grpo+kl")
    assert step.any() and stats["kl_reference"] > 0 and stats["loss"] == pytest.approx(0.1 * stats["kl_reference"], rel=0.5)


def test_a_broken_episode_is_left_out(policy, rows):  # docs/faults.md, 3
    rewards = torch.tensor([1.0, 0.0, float("nan"), 0.0, 1.0, 1.0])
    A = grpo.group_advantages(rewards, torch.tensor([0, 0, 0, 1, 1, 1]))
    [got], stats = gradient(policy, batch_of(rows), A)
    assert got.isfinite().all() and all(value == value for value in stats.values())
    rows[2].ids[5:] = [1] * (len(rows[2].ids) - 5)
    close(gradient(policy, batch_of(rows), A)[0][0], got)


def test_no_episode_at_all(policy):
    steps, stats = gradient(policy, [], torch.tensor([]))
    assert steps == [] and stats["loss"] == 0


def test_a_gradient_that_is_not_finite_takes_no_step_and_is_counted(policy, rows):
    recorder = Recorder(policy)
    stats = update(policy, recorder, batch_of(rows), ADVANTAGES, with_loss(lambda b: b.logp_BT.sum() * float("nan")),
                   UpdateOptions(0))
    assert recorder.steps == [] and stats["skipped_steps"] == 1


# Ratios and mini-batches

def ratios(model, rows, advantages=ADVANTAGES, real=None, **how):
    """What the loss gets: per micro-batch (log-ratio on the mask, number of steps taken before)."""
    seen, recorder = [], Recorder(model, real)

    def loss(b):
        seen.append(((b.logp_BT - b.old_logp_BT).detach()[b.mask_BT], len(recorder.steps), b))
        return ALGORITHMS["grpo"].loss(b)

    stats = update(model, recorder, batch_of(rows), advantages, with_loss(loss), UpdateOptions(0, **how))
    return seen, stats


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_one_update_has_ratio_one_and_reinforces(policy, rows, temperature):  # docs/faults.md, 9, 10, 11
    seen, stats = ratios(policy, rows, temperature=temperature, micro_batch_tokens=30)
    assert all(not log_ratio.any() for log_ratio, _, _ in seen) and not any(b.old_logp_BT.requires_grad for *_, b in seen)
    assert stats["ratio_max"] == 1 and stats["clip_fraction"] == stats["approx_kl"] == 0
    assert stats["grad_norm"] > 1e-3 and stats["entropy_learner"] > 0
    assert stats["loss"] == pytest.approx(-ADVANTAGES.mean().item(), abs=1e-6)  # the value says nothing about learning


def test_old_log_probs_are_from_before_the_first_of_several_updates(policy, rows):  # docs/faults.md, 11
    before = token_logps(policy, *pad(rows, 0, "cpu"))[0].detach()
    by_ids = {tuple(row.ids): logp for row, logp in zip(rows, before)}
    seen, stats = ratios(policy, rows, real=make_optimizer(policy, 1e-2), minibatches=3, micro_batch_tokens=20)
    assert sorted({taken for _, taken, _ in seen}) == [0, 1, 2]
    for log_ratio, taken, b in seen:
        assert not b.old_logp_BT.requires_grad and not b.old_logp_BT[~b.mask_BT].any()
        assert log_ratio.abs().max() < 1e-5 if taken == 0 else log_ratio.abs().max() > 1e-3
        assert b.num_trajectories == 2
    for *_, b in seen:
        for old in b.old_logp_BT:
            assert any(torch.allclose(old, logp[:len(old)], atol=1e-5) for logp in by_ids.values())
    assert stats["ratio_max"] > 1 and stats["approx_kl"] > 0


def test_the_first_of_several_updates_has_ratio_one_whatever_the_batch_shape_does(policy, rows, monkeypatch):  # docs/faults.md, 11
    """In bf16 on a GPU log-probs depend on the shape of the batch, by far more than GSPO's clip range of 3e-4."""

    def noisy(model, ids_BT, mask_BT, temperature=1.0):
        logp_BT, entropy_BT = token_logps(model, ids_BT, mask_BT, temperature)
        return logp_BT + 0.01 * mask_BT * (len(ids_BT) + ids_BT.shape[1]), entropy_BT

    monkeypatch.setattr(learner, "token_logps", noisy)
    for budget in (20, 30, 10**6):
        seen, _ = ratios(policy, rows, minibatches=2, micro_batch_tokens=budget)
        assert all(not log_ratio.any() for log_ratio, taken, _ in seen if taken == 0)


def test_mini_batches_cover_the_batch_once(policy, rows):
    parts = {}
    for seed in (0, 0, 1):
        seen, _ = ratios(policy, rows, minibatches=4, seed=seed)
        lengths = [sorted(b.lengths_B.tolist()) for *_, b in seen]
        assert sorted(sum(lengths, [])) == sorted(sum(row.mask) for row in rows) and len(seen) == 4
        assert [b.num_trajectories for *_, b in seen] == [2, 2, 1, 1]
        assert [b.num_tokens for *_, b in seen] == [sum(part) for part in lengths]
        parts.setdefault(seed, []).append(lengths)
    assert parts[0][0] == parts[0][1] != parts[1][0]


def test_more_mini_batches_than_trajectories(policy, rows):
    steps, stats = gradient(policy, batch_of(rows[:2]), ADVANTAGES[:2], minibatches=5)
    assert len(steps) == 2 and all(value == value for value in stats.values())


def test_clip_fraction_counts_what_the_clip_holds(policy, rows):
    real = make_optimizer(policy, 3e-2)
    _, stats = ratios(policy, rows, real=real, minibatches=3)
    assert 0 < stats["clip_fraction"] < 1 and stats["ratio_max"] > 1.2
    recorder = Recorder(policy, real)
    update(policy, recorder, batch_of(rows), ADVANTAGES, ALGORITHMS["gspo"], UpdateOptions(0, minibatches=3))
    assert len(recorder.steps) == 3


# The step

def test_the_optimizer_holds_the_adapter_alone(policy):
    [group] = make_optimizer(policy, 1e-3).param_groups
    assert {id(p) for p in group["params"]} == {id(p) for p in policy.parameters() if p.requires_grad}
    assert group["weight_decay"] == 0 and group["lr"] == 1e-3


def test_one_update_moves_b_and_nothing_but_the_adapter(base, rows):  # docs/faults.md, 26
    policy = add_lora(base, rank=4)
    before = {n: p.detach().clone() for n, p in policy.named_parameters()}
    update(policy, make_optimizer(policy, 1e-3), batch_of(rows), ADVANTAGES, ALGORITHMS["grpo"], UpdateOptions(0))
    moved = {n for n, p in policy.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if "lora_B" in n}  # A has no gradient while B is 0
    update(policy, make_optimizer(policy, 1e-3), batch_of(rows), ADVANTAGES, ALGORITHMS["grpo"], UpdateOptions(0))
    moved = {n for n, p in policy.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if "lora_" in n}


@pytest.mark.parametrize("frozen", [False, True])
def test_the_reference_stays_and_the_kl_starts_at_zero(base, rows, frozen):  # docs/faults.md, 24
    policy = add_lora(base, rank=4)
    if frozen:
        shake(policy)
        freeze_reference(policy)
    optimizer, kls, refs = make_optimizer(policy, 1e-2), [], []

    def loss(b):
        refs.append(b.ref_logp_BT)
        return ALGORITHMS["grpo+kl"].loss(b)

    for _ in range(3):
        stats = update(policy, optimizer, batch_of(rows), ADVANTAGES, with_loss(loss, "grpo+kl"), UpdateOptions(0))
        kls.append(stats["kl_reference"])
    assert kls[0] == 0 < kls[1] < kls[2]
    assert torch.equal(refs[0], refs[1]) and torch.equal(refs[0], refs[2]) and not refs[0].requires_grad


def test_the_update_raises_good_rows_and_lowers_bad_ones(policy, rows):
    sums = lambda: token_logps(policy, *pad(rows, 0, "cpu"))[0].detach().sum(1)  # noqa: E731
    before, optimizer = sums(), make_optimizer(policy, 2e-3)
    for _ in range(5):
        update(policy, optimizer, batch_of(rows), ADVANTAGES.sign(), ALGORITHMS["dapo"], UpdateOptions(0))
    assert torch.equal((sums() - before).sign(), ADVANTAGES.sign())


def test_the_gradient_norm_is_clipped(policy, rows):
    [full], stats = gradient(policy, batch_of(rows), ADVANTAGES)
    [cut], stats_cut = gradient(policy, batch_of(rows), ADVANTAGES, max_grad_norm=1e-3)
    assert stats["grad_norm"] == stats_cut["grad_norm"] == pytest.approx(full.norm().item(), rel=1e-4)
    assert cut.norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_gradient_checkpointing_changes_nothing(policy, rows):  # docs/faults.md, 13
    how = {"minibatches": 2, "temperature": 0.7}
    plain, stats = gradient(policy, batch_of(rows), ADVANTAGES, "grpo+kl", **how)
    policy.get_base_model().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again, stats_again = gradient(policy, batch_of(rows), ADVANTAGES, "grpo+kl", gradient_checkpointing=True, **how)
    for a, b in zip(plain, again, strict=True):
        close(a, b)
    assert stats == pytest.approx(stats_again, abs=1e-6) and not policy.training
