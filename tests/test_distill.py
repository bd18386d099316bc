"""distill.py: its equations and the arms of its selection."""
import math
import random

import pytest
import torch
from conftest import random_logits

import distill
from distill import distill_loss, selection_weights, state_response_weights, transitions


def softmax64(logits):
    top = max(logits)
    parts = [math.exp(x - top) for x in logits]
    return [part / sum(parts) for part in parts]


def kl64(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q))


def test_transitions_are_gains_over_the_state_free_outcome():
    r0, r_prev, r_new = [0, 0, 0, 1, 1, .5], [0, 0, 1, 0, 1, .5], [0, 1, 1, 1, 1, .25]
    assert transitions(r0, r_prev, r_new) == ["00", "01", "11", "00", "00", "00"]
    assert transitions([0.0], [1.0], [0.0]) == ["10"]


def test_an_unknown_outcome_on_any_side_is_never_selected():
    nan = math.nan
    labels = transitions([nan, 0, 0, nan, 0], [1, nan, 1, nan, 0], [1, 1, nan, nan, 1])
    assert labels == ["?", "?", "?", "?", "01"]
    for arm in ("both", "new", "all", "random"):
        assert all(distill.select(labels, arm, 1.0, random.Random(seed)).tolist() == [0, 0, 0, 0, 1] for seed in range(20)), arm
    assert distill.select(labels, "persistent", 1.0, None).tolist() == [0] * 5
    assert distill.select(["?"] * 3, "random", 1.0, random.Random(0)).tolist() == [0] * 3


def test_the_same_rewards_in_another_order_are_the_same_outcome():
    """A return is a sum over turns: 0.1 + 0.2 + 0.3 is above 0.3 + 0.2 + 0.1 by rounding alone."""
    one, other = 0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1
    assert one > other
    assert transitions([other], [one], [one]) == ["00"] and transitions([one], [other], [other]) == ["00"]
    assert transitions([0], [0], [1 / 1400]) == ["01"] and transitions([100.0], [100.0], [100.01]) == ["01"]


def test_selection_weights():
    assert selection_weights(["00", "01", "10", "11"], alpha=0.5).tolist() == [0.0, 1.0, 0.0, 0.5]
    with pytest.raises(KeyError):
        selection_weights(["0"])


def test_token_weights_against_a_loop():
    state, free = random_logits(5, 7), random_logits(5, 7, seed=1)
    d = []
    for t in range(5):
        p, q = softmax64(state[t].tolist()), softmax64(free[t].tolist())
        m = [(a + b) / 2 for a, b in zip(p, q)]
        d.append(kl64(p, m) / 2 + kl64(q, m) / 2)
    want = [x / (sum(d) / 5 + 1e-6) for x in d]
    assert state_response_weights(state, free).tolist() == pytest.approx(want, rel=1e-4)
    assert all(0 < x < math.log(2) for x in d) and sum(want) / 5 == pytest.approx(1, rel=1e-4)
    assert state_response_weights(free, free).tolist() == pytest.approx([0] * 5, abs=0.2)  # no response, no weight
    extreme = torch.tensor([[0.0, -200.0], [-200.0, 0.0]])
    assert state_response_weights(extreme, extreme.flip(0)).tolist() == pytest.approx([1, 1], rel=1e-5)


def test_distill_loss_against_a_loop_and_its_direction():
    student, teacher = random_logits(2, 3, 6), random_logits(2, 3, 6, seed=1)
    weights = torch.rand(2, 3, generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    top = bottom = forward = 0.0
    for b in range(2):
        for t in range(3):
            if mask[b, t]:
                p, q = softmax64(student[b, t].tolist()), softmax64(teacher[b, t].tolist())
                top, bottom = top + weights[b, t].item() * kl64(p, q), bottom + weights[b, t].item()
                forward += weights[b, t].item() * kl64(q, p)
    got = distill_loss(student, teacher, weights, mask)
    assert (got[0].item(), got[1].item()) == pytest.approx((top, bottom), rel=1e-5)
    assert abs(forward - top) > 0.05 * top  # the other direction would be seen


def test_the_gradient_goes_to_the_student_alone_and_drives_it_to_the_teacher():
    student, teacher = random_logits(1, 4, 6).requires_grad_(), random_logits(1, 4, 6, seed=1).requires_grad_()
    mask = torch.tensor([[1, 0, 1, 1]])
    top, _ = distill_loss(student, teacher, torch.ones(1, 4), mask)
    top.backward()
    assert teacher.grad is None
    assert (student.grad[0, 1] == 0).all() and (student.grad[0, [0, 2, 3]].abs().sum(-1) > 0).all()
    after = distill_loss(student - 0.1 * student.grad, teacher, torch.ones(1, 4), mask)[0]
    assert after < top
    assert distill_loss(teacher, teacher, torch.ones(1, 4), mask)[0].item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("where", ["student", "teacher", "weights"])
def test_nan_in_masked_positions_changes_nothing(where):
    mask = torch.tensor([[1, 0, 1]])
    parts = {"student": random_logits(1, 3, 6), "teacher": random_logits(1, 3, 6, seed=1), "weights": torch.rand(1, 3)}
    clean = [x.item() for x in distill_loss(*parts.values(), mask)]
    parts[where][0, 1] = math.nan
    parts["student"].requires_grad_()
    top, bottom = distill_loss(*parts.values(), mask)
    assert [top.item(), bottom.item()] == clean
    top.backward()
    assert parts["student"].grad.isfinite().all()


def test_micro_batches_add_up_under_one_denominator():
    student, teacher = random_logits(4, 5, 6).requires_grad_(), random_logits(4, 5, 6, seed=1)
    weights, mask = torch.rand(4, 5), torch.rand(4, 5) > 0.4
    top, bottom = distill_loss(student, teacher, weights, mask)
    whole = torch.autograd.grad(top / bottom, student)[0]
    parts = torch.zeros_like(whole)
    for b in range(4):
        share = distill_loss(student[b:b + 1], teacher[b:b + 1], weights[b:b + 1], mask[b:b + 1])[0] / bottom
        parts += torch.autograd.grad(share, student)[0]
    assert torch.allclose(whole, parts, atol=1e-7)
    nothing = distill_loss(student, teacher, weights, torch.zeros(4, 5))
    assert nothing[0].item() == nothing[1].item() == 0.0


def test_arms_select_what_they_say():
    labels = ["00", "01", "11", "10", "01", "00", "00", "11", "00", "00"]
    def arm(name, alpha=0.5, seed=0):
        return distill.select(labels, name, alpha, random.Random(seed)).tolist()

    assert arm("both") == [0, 1, .5, 0, 1, 0, 0, .5, 0, 0] and arm("all") == [1.0] * 10
    assert arm("new") == [0, 1, 0, 0, 1, 0, 0, 0, 0, 0] and arm("persistent") == [0, 0, .5, 0, 0, 0, 0, .5, 0, 0]
    assert sorted(arm("random")) == sorted(arm("both"))  # size-matched, weights too
    draws = [arm("random", seed=seed) for seed in range(200)]
    assert all(0.2 < sum(draw[i] > 0 for draw in draws) / 200 < 0.6 for i in range(10))  # any instance, each 4 in 10
