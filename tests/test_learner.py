"""From rows to a step: the gradient does not depend on the packing, and the warm start teaches what it should.

"fault N" numbers a list of faults found in other implementations; each is named by its test.
"""
import random

import pytest
import torch
from conftest import batch_of, make_rows, shake

import learner
import warmstart
from dapo import dapo_loss
from envs import BadInput
from envs.keydoor import KeyDoor
from grpo import group_advantages, grpo_loss
from gspo import gspo_loss
from learner import in_micro_batches, pad, update
from model import add_lora, freeze_reference, make_optimizer, token_logps
from rollout import Chat, Row

LOSSES = {
    "grpo": lambda b: grpo_loss(b.logp_BT, b.old_logp_BT, b.advantages_B, b.mask_BT, lengths_B=b.lengths_B,
                                num_trajectories=b.num_trajectories),
    "grpo+kl": lambda b: grpo_loss(b.logp_BT, b.old_logp_BT, b.advantages_B, b.mask_BT, lengths_B=b.lengths_B,
                                   num_trajectories=b.num_trajectories, beta=0.1, ref_logp_BT=b.ref_logp_BT),
    "dapo": lambda b: dapo_loss(b.logp_BT, b.old_logp_BT, b.advantages_B, b.mask_BT, num_tokens=b.num_tokens),
    "gspo": lambda b: gspo_loss(b.logp_BT, b.old_logp_BT, b.advantages_B, b.mask_BT, lengths_B=b.lengths_B,
                                num_trajectories=b.num_trajectories),
}
every_loss = pytest.mark.parametrize("name", LOSSES)
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
    stats = update(model, recorder, batch, advantages, LOSSES[name], **{"pad_id": 0, "max_grad_norm": 1e9, **how,
                                                                        "use_reference": name == "grpo+kl"})
    return recorder.steps, stats


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
def test_the_gradient_does_not_depend_on_the_packing(policy, rows, name, budget):  # fault 6
    [few], stats = gradient(policy, batch_of(rows), ADVANTAGES, name, micro_batch_tokens=budget)
    [whole], stats_whole = gradient(policy, batch_of(rows), ADVANTAGES, name, micro_batch_tokens=10**6)
    assert whole.abs().max() > 1e-3
    close(few, whole)
    assert (stats.pop("micro_batch_tokens"), stats_whole.pop("micro_batch_tokens")) == (budget, 10**6)
    assert stats == pytest.approx(stats_whole, abs=1e-5)


@every_loss
def test_splitting_a_trajectory_changes_nothing(policy, name):  # fault 5
    """Rows that repeat their context, so that each token is predicted from the same tokens as in one row."""
    rows = make_rows(policy.config.vocab_size, lengths=(14, 12, 11))
    parts = [[Row(row.ids[:8], row.mask[:8]), Row(row.ids, [0] * 8 + row.mask[8:])] for row in rows]
    A = ADVANTAGES[:3]
    [one], _ = gradient(policy, batch_of(rows), A, name)
    [two], _ = gradient(policy, batch_of(parts), A, name, micro_batch_tokens=30)
    close(one, two)


def test_the_order_of_trajectories_changes_nothing(policy, rows):  # fault 4
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
    for row in rows[1:]:
        gap = [rng.uniform(-0.5, 0.5) * own for own in row.mask]
        row.sampled_logp = [logp - g for logp, g in zip(scored[id(row)], gap)]
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


def test_pad_takes_the_mask_from_sampling():  # fault 19: pad == end, and both also sampled
    ids, mask = pad([Row([5, 2, 6, 2], [0, 0, 1, 1]), Row([5, 2], [0, 1])], 2, "cpu")
    assert ids.tolist() == [[5, 2, 6, 2], [5, 2, 2, 2]] and mask.tolist() == [[0, 0, 1, 1], [0, 1, 0, 0]]
    assert mask.dtype == torch.bool


@pytest.mark.parametrize("pad_id", [2, 17])
def test_the_padding_does_not_matter(policy, rows, pad_id):  # fault 19
    rows[0].ids[-1] = rows[3].ids[-1] = 2
    [a], _ = gradient(policy, batch_of(rows), ADVANTAGES)
    [b], _ = gradient(policy, batch_of(rows), ADVANTAGES, pad_id=pad_id)
    close(a, b)


def test_observations_after_the_last_action_and_garbage_in_them_do_not_matter(policy, rows):  # fault 14
    [a], _ = gradient(policy, batch_of(rows), ADVANTAGES)
    longer = [Row(row.ids + [9, 8, 7], row.mask + [0, 0, 0]) for row in rows]
    close(a, gradient(policy, batch_of(longer), ADVANTAGES)[0][0])
    seen = []
    loss = lambda b: seen.append((b.logp_BT, b.mask_BT)) or b.logp_BT.retain_grad() or LOSSES["dapo"](b)  # noqa: E731
    update(policy, Recorder(policy), batch_of(rows), ADVANTAGES, loss, pad_id=0)
    [(logp, mask)] = seen
    assert (logp.grad[mask] != 0).all() and not logp.grad[~mask].any() and not logp[~mask].any()


# Advantages of zero, broken episodes


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo"])
def test_skipping_rows_without_advantage_changes_nothing(policy, rows, name, monkeypatch):  # fault 2
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
def test_equal_rewards_take_no_step(policy, rows, name):  # faults 1, 2
    A = group_advantages(torch.full((6,), 0.7), torch.tensor([0, 0, 0, 1, 1, 1]))
    steps, stats = gradient(policy, batch_of(rows), A, name, minibatches=2)
    assert steps == [] and stats["loss"] == 0 and stats["grad_norm"] == 0 and stats["ratio_max"] == 1


def test_equal_rewards_still_pay_the_kl(policy, rows):  # fault 2, pinned
    [step], stats = gradient(policy, batch_of(rows), torch.zeros(6), "grpo+kl")
    assert step.any() and stats["kl_reference"] > 0 and stats["loss"] == pytest.approx(0.1 * stats["kl_reference"], rel=0.5)


def test_a_broken_episode_is_left_out(policy, rows):  # fault 3
    rewards = torch.tensor([1.0, 0.0, float("nan"), 0.0, 1.0, 1.0])
    A = group_advantages(rewards, torch.tensor([0, 0, 0, 1, 1, 1]))
    [got], stats = gradient(policy, batch_of(rows), A)
    assert got.isfinite().all() and all(value == value for value in stats.values())
    rows[2].ids[5:] = [1] * (len(rows[2].ids) - 5)
    close(gradient(policy, batch_of(rows), A)[0][0], got)


def test_no_episode_at_all(policy):
    steps, stats = gradient(policy, [], torch.tensor([]))
    assert steps == [] and stats["loss"] == 0


def test_a_gradient_that_is_not_finite_takes_no_step_and_is_counted(policy, rows):
    recorder = Recorder(policy)
    stats = update(policy, recorder, batch_of(rows), ADVANTAGES, lambda b: b.logp_BT.sum() * float("nan"), pad_id=0)
    assert recorder.steps == [] and stats["skipped_steps"] == 1


# Ratios and mini-batches


def ratios(model, rows, advantages=ADVANTAGES, real=None, **how):
    """What the loss gets: per micro-batch (log-ratio on the mask, number of steps taken before)."""
    seen, recorder = [], Recorder(model, real)

    def loss(b):
        seen.append(((b.logp_BT - b.old_logp_BT).detach()[b.mask_BT], len(recorder.steps), b))
        return LOSSES["grpo"](b)

    stats = update(model, recorder, batch_of(rows), advantages, loss, pad_id=0, **how)
    return seen, stats


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_one_update_has_ratio_one_and_reinforces(policy, rows, temperature):  # faults 9, 10, 11
    seen, stats = ratios(policy, rows, temperature=temperature, micro_batch_tokens=30)
    assert all(not log_ratio.any() for log_ratio, _, _ in seen) and not any(b.old_logp_BT.requires_grad for *_, b in seen)
    assert stats["ratio_max"] == 1 and stats["clip_fraction"] == stats["approx_kl"] == 0
    assert stats["grad_norm"] > 1e-3 and stats["entropy"] > 0
    assert stats["loss"] == pytest.approx(-ADVANTAGES.mean().item(), abs=1e-6)  # the value says nothing about learning


def test_old_log_probs_are_from_before_the_first_of_several_updates(policy, rows):  # fault 11
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


def test_the_first_of_several_updates_has_ratio_one_whatever_the_batch_shape_does(policy, rows, monkeypatch):  # fault 11
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
    update(policy, recorder, batch_of(rows), ADVANTAGES, LOSSES["gspo"], pad_id=0, minibatches=3, sequence_ratio=True,
           clip=(3e-4, 4e-4))
    assert len(recorder.steps) == 3


# The step


def test_one_update_moves_b_and_nothing_but_the_adapter(base, rows):  # fault 26
    policy = add_lora(base, rank=4)
    before = {n: p.detach().clone() for n, p in policy.named_parameters()}
    update(policy, make_optimizer(policy, 1e-3), batch_of(rows), ADVANTAGES, LOSSES["grpo"], pad_id=0)
    moved = {n for n, p in policy.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if "lora_B" in n}  # A has no gradient while B is 0
    update(policy, make_optimizer(policy, 1e-3), batch_of(rows), ADVANTAGES, LOSSES["grpo"], pad_id=0)
    moved = {n for n, p in policy.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if "lora_" in n}


@pytest.mark.parametrize("frozen", [False, True])
def test_the_reference_stays_and_the_kl_starts_at_zero(base, rows, frozen):  # fault 24
    policy = add_lora(base, rank=4)
    if frozen:
        shake(policy)
        freeze_reference(policy)
    optimizer, kls, refs = make_optimizer(policy, 1e-2), [], []

    def loss(b):
        refs.append(b.ref_logp_BT)
        return LOSSES["grpo+kl"](b)

    for _ in range(3):
        kls.append(update(policy, optimizer, batch_of(rows), ADVANTAGES, loss, pad_id=0, use_reference=True)["kl_reference"])
    assert kls[0] == 0 < kls[1] < kls[2]
    assert torch.equal(refs[0], refs[1]) and torch.equal(refs[0], refs[2]) and not refs[0].requires_grad


def test_the_update_raises_good_rows_and_lowers_bad_ones(policy, rows):
    sums = lambda: token_logps(policy, *pad(rows, 0, "cpu"))[0].detach().sum(1)  # noqa: E731
    before, optimizer = sums(), make_optimizer(policy, 2e-3)
    for _ in range(5):
        update(policy, optimizer, batch_of(rows), ADVANTAGES.sign(), LOSSES["dapo"], pad_id=0)
    assert torch.equal((sums() - before).sign(), ADVANTAGES.sign())


def test_the_gradient_norm_is_clipped(policy, rows):
    [full], stats = gradient(policy, batch_of(rows), ADVANTAGES)
    [cut], stats_cut = gradient(policy, batch_of(rows), ADVANTAGES, max_grad_norm=1e-3)
    assert stats["grad_norm"] == stats_cut["grad_norm"] == pytest.approx(full.norm().item(), rel=1e-4)
    assert cut.norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_gradient_checkpointing_changes_nothing(policy, rows):  # fault 13
    how = {"minibatches": 2, "temperature": 0.7}
    plain, stats = gradient(policy, batch_of(rows), ADVANTAGES, "grpo+kl", **how)
    policy.get_base_model().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again, stats_again = gradient(policy, batch_of(rows), ADVANTAGES, "grpo+kl", gradient_checkpointing=True, **how)
    for a, b in zip(plain, again, strict=True):
        close(a, b)
    assert stats == pytest.approx(stats_again, abs=1e-6) and not policy.training


# Warm start


@pytest.fixture(scope="module")
def played_randomly(word_chat):
    return warmstart.play(KeyDoor, word_chat, KeyDoor.tasks("train")[:60], "random", seed=3, max_turns=5)


def test_random_play_is_admissible_and_names_half(played_randomly):
    for t in played_randomly:
        hints = []
        for turn, observation in zip(t.turns, [t.first_observation] + [turn.observation for turn in t.turns]):
            assert turn.valid and turn.stop == "end" and turn.action in observation
            hints.append("Hint: " in observation)
            if hints[-1]:
                assert observation.endswith(f"Hint: {turn.action}.")
        assert len(set(hints)) == 1  # an episode names all of its actions or none
    named = sum("Hint: " in t.first_observation for t in played_randomly)
    assert 18 <= named <= 42 and not all(t.success for t in played_randomly)


@pytest.mark.parametrize("share, count", [(0.0, 0), (1.0, 8)])
def test_the_named_share(word_chat, share, count):
    played = warmstart.play(KeyDoor, word_chat, KeyDoor.tasks("train")[:8], "random", seed=0, max_turns=5, named_share=share)
    assert sum("Hint: " in t.first_observation for t in played) == count


def test_play_depends_on_its_seed_alone(word_chat, played_randomly):
    how = {"make_env": KeyDoor, "chat": word_chat, "tasks": KeyDoor.tasks("train")[:60], "kind": "random", "max_turns": 5}
    assert warmstart.play(**how, seed=3) == played_randomly != warmstart.play(**how, seed=4)


@pytest.mark.parametrize("tokenizer", ["words", "qwen3", "smollm2_tokenizer"], indirect=True)
def test_gold_play_succeeds_and_is_trained_on_to_the_end_token(tokenizer):
    chat = Chat(tokenizer)
    tasks = KeyDoor.tasks("train")[:12]
    env, doable = KeyDoor(), []
    for task in tasks:
        doable.append(env.reset(task=task, seed=0)[1]["doable"])
    played = warmstart.play(KeyDoor, chat, tasks, "gold", seed=0, max_turns=5)
    assert any(doable) and [t.success for t in played if t.info["doable"]] == [True] * sum(doable)
    for t in played:
        assert [i for row in t.rows for i, m in zip(row.ids, row.mask) if m] == [
            i for turn in t.turns for i in [*chat.text_ids(turn.action), tokenizer.eos_token_id]]


def test_play_refuses_what_it_cannot_play(word_chat):
    class Silent(KeyDoor):
        def gold_action(self):
            return None

        def _info(self, valid, success=False):
            return {"success": success, "valid": valid}

    for kind, message in (("gold", "no gold"), ("random", "no admissible"), ("expert", "random or gold")):
        with pytest.raises(BadInput, match=message):
            warmstart.play(Silent, word_chat, KeyDoor.tasks("train")[:2], kind, seed=0, max_turns=5)


def test_supervise_lowers_the_loss_and_moves_the_adapter_alone(policy, played_randomly):
    rows = [row for t in played_randomly for row in t.rows]
    before, losses = {n: p.detach().clone() for n, p in policy.named_parameters()}, []
    last = warmstart.supervise(policy, rows, 0, steps=30, batch=8, lr=1e-2, seed=0, micro_batch_tokens=400,
                               progress=lambda step, loss: losses.append(loss))
    assert len(losses) == 30 and losses[-1] == last < 0.7 * losses[0]
    moved = {n for n, p in policy.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n, p in policy.named_parameters() if p.requires_grad}


def test_supervise_weighs_every_token_alike_however_packed(base, rows):  # fault 6
    results = []
    for budget in (1, 30, 10_000):
        losses = []
        policy = add_lora(base, rank=4)
        warmstart.supervise(policy, rows, 0, steps=2, batch=5, lr=1e-2, seed=0, micro_batch_tokens=budget,
                            progress=lambda step, loss: losses.append(loss))
        base = policy.unload()
        results.append(losses)
    assert results[0] == pytest.approx(results[1], abs=1e-4) and results[1] == pytest.approx(results[2], abs=1e-4)
    base_logp = token_logps(base, *pad(random.Random("supervise 0").sample(rows, 5), 0, "cpu"))[0]
    drawn_tokens = (base_logp != 0).sum()
    assert results[0][0] == pytest.approx(-(base_logp.sum() / drawn_tokens).item(), abs=1e-4)
