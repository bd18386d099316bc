"""grpo.py, dapo.py, gspo.py: the losses and the advantages against plain loops written from the equations.

Shapes: N trajectories, B rows, T tokens. Observations are the tokens inside a row whose mask is 0. Losses in float64.
"""
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from dapo import dapo_loss, fill_batch, keep_group, overlong_penalty
from grpo import group_advantages, grpo_loss
from gspo import gspo_loss
from rl.logs import episode_metrics

NAN, INF = math.nan, math.inf
BETA, COEF = 0.1, 0.2
TERMS = ("", "+kl", "+entropy")
LOSSES = [name + term for name in ("grpo", "dapo", "gspo") for term in TERMS]
every_loss = pytest.mark.parametrize("name", LOSSES)
three_seeds = pytest.mark.parametrize("seed", range(3))


@dataclass
class Batch:
    logp: torch.Tensor
    old: torch.Tensor
    ref: torch.Tensor
    A: torch.Tensor
    mask: torch.Tensor
    entropy: torch.Tensor
    lengths: torch.Tensor | None = None  # None: the loss's own default
    N: int = 0
    num_tokens: int = 0
    sums: torch.Tensor | None = None  # GSPO: log-ratios of the whole trajectory


def make_batch(seed, on_policy=False, equal_lengths=False, B=12, T=9):
    """Ragged rows: a prompt, then sampled tokens with observations between them, then padding."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(B, T, generator=g) < 0.7
    mask[:, 0], mask[:, 1], mask[::3, 5:] = False, True, False
    if equal_lengths:
        mask = torch.stack([row[torch.randperm(T, generator=g)] for row in (torch.arange(T) < 4).expand(B, T)])
    logp = -3 * torch.rand(B, T, generator=g, dtype=torch.float64)
    # every fourth row is so near the old policy that even GSPO's narrow band leaves it alone
    scale = torch.tensor([0.4, 0.4, 0.2, 1e-4], dtype=torch.float64).repeat(B // 4)[:, None]
    old = logp - (0 if on_policy else scale * torch.randn(B, T, generator=g, dtype=torch.float64))
    ref = logp + 0.5 * torch.randn(B, T, generator=g, dtype=torch.float64)
    A = group_advantages(torch.rand(B, generator=g), torch.arange(B) // 4).double()
    entropy = 3 * torch.rand(B, T, generator=g, dtype=torch.float64)
    return Batch(logp, old, ref, A, mask, entropy, N=B, num_tokens=int(mask.sum()))


def loss(name, b, rows=slice(None)):
    args = b.logp[rows], b.old[rows], b.A[rows], b.mask[rows]
    lengths, sums = (None if x is None else x[rows] for x in (b.lengths, b.sums))
    name, _, term = name.partition("+")
    more = {"kl": {"beta": BETA, "ref_logp_BT": b.ref[rows]}, "entropy": {"entropy_coef": COEF, "entropy_BT": b.entropy[rows]},
            "": {}}[term]
    if name == "dapo":
        return dapo_loss(*args, num_tokens=b.num_tokens, **more)
    if name == "gspo":
        return gspo_loss(*args, num_trajectories=b.N, lengths_B=lengths, log_ratio_sums_B=sums, **more)
    return grpo_loss(*args, num_trajectories=b.N, lengths_B=lengths, **more)


def value_and_grad(function, b, *args):
    """`function(batch, *args)` and its gradient with respect to logp [B, T]."""
    logp = b.logp.clone().requires_grad_()
    value = function(replace(b, logp=logp), *args)
    value.backward()
    return value.detach(), logp.grad


def run(name, b):
    return value_and_grad(lambda batch: loss(name, batch), b)


def assert_same(left, right, rtol=1e-9):
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-12)


def loop_surrogate(ratio, A, low, high):
    clipped = ratio if low <= ratio <= high else (low if ratio < low else high)
    return min(ratio * A, clipped * A)


def loop_loss(b, name):
    total, (name, _, extra) = 0 * b.logp.sum(), name.partition("+")
    for i in range(len(b.logp)):
        A, tokens = b.A[i].item(), [t for t in range(b.mask.shape[1]) if b.mask[i, t]]
        if name == "gspo":
            s = (sum(b.logp[i, t] - b.old[i, t] for t in tokens) / len(tokens)).exp()
            total = total + loop_surrogate(s, A, 1 - 3e-4, 1 + 4e-4) / b.N
        for t in tokens:
            ratio = b.logp[i, t].exp() / b.old[i, t].exp()
            term = 0 if name == "gspo" else loop_surrogate(ratio, A, 0.8, 1.28 if name == "dapo" else 1.2)
            if extra == "kl":
                term = term - BETA * (b.ref[i, t].exp() / b.logp[i, t].exp() - (b.ref[i, t] - b.logp[i, t]) - 1)
            if extra == "entropy":
                term = term + COEF * b.entropy[i, t]
            total = total + term / (sum(int(m) for m in b.mask.flatten()) if name == "dapo" else len(tokens) * b.N)
    return -total


def loop_advantages(rewards, groups, eps=1e-6):
    result = []
    for reward, group in zip(rewards, groups):
        peers = [r for r, g in zip(rewards, groups) if g == group and not math.isnan(r)]
        mean = sum(peers) / max(len(peers), 1)
        if math.isnan(reward) or len(peers) < 2:
            result.append(0.0)
            continue
        std = math.sqrt(sum((r - mean) ** 2 for r in peers) / (len(peers) - 1))
        result.append((reward - mean) / (std + eps))
    return result


@three_seeds
@every_loss
def test_loss_equals_its_equation(name, seed):
    b = make_batch(seed)
    assert_same(run(name, b), value_and_grad(loop_loss, b, name))


@three_seeds
def test_advantages_equal_their_equation(seed):
    g = torch.Generator().manual_seed(seed)
    groups = [7] * 2 + [3] * 3 + [100] * 5 + [-1] * 4
    groups = [groups[i] for i in torch.randperm(len(groups), generator=g)]
    rewards = torch.rand(len(groups), generator=g, dtype=torch.float64)
    rewards[groups.index(100)] = NAN
    torch.testing.assert_close(group_advantages(rewards, torch.tensor(groups)).tolist(),
                               loop_advantages(rewards.tolist(), groups), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("A", [1.0, -1.0])
@pytest.mark.parametrize("name, low, high", [("grpo", 0.8, 1.2), ("dapo", 0.8, 1.28), ("gspo", 0.9997, 1.0004)])
def test_clip_in_both_directions(name, low, high, A):
    """Beyond the clip, and only on the side where A pushes outwards, the value is the clip's and the gradient 0."""
    margin = 1e-4 if name == "gspo" else 0.02
    ratios = torch.tensor([low - margin, low + margin, 1.0, high - margin, high + margin], dtype=torch.float64)
    zeros, mask = torch.zeros(5, 1, dtype=torch.float64), torch.ones(5, 1)
    b = Batch(ratios.log()[:, None], zeros, zeros, torch.full((5,), A, dtype=torch.float64), mask, zeros, N=1, num_tokens=1)
    value, grad = run(name, b)
    clipped = ratios.clamp(max=high) if A > 0 else ratios.clamp(min=low)
    assert_same([value, grad[:, 0]], [-(A * clipped).sum(), -A * ratios * (clipped == ratios)])
    assert (grad == 0).sum() == 1


@pytest.mark.parametrize("rewards", [[0.7] * 8, [0.7] * 7, [0.1] * 3, [0.1] * 10, [0.7] * 6 + [NAN], [0.0] * 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_rewards_give_exactly_zero(rewards, dtype):  # docs/faults.md, 1
    advantages = group_advantages(torch.tensor(rewards, dtype=dtype), torch.zeros(len(rewards), dtype=torch.long))
    assert (advantages == 0).all()


def test_dead_group_counts_in_n_and_gets_kl():  # docs/faults.md, 2: the choice, pinned
    b = make_batch(0, on_policy=True)
    rewards = torch.arange(12.0)
    rewards[:4] = 0.5
    b.A = group_advantages(rewards, torch.arange(12) // 4).double()
    lengths = b.mask.sum(1, keepdim=True)
    surrogate = -b.A[:, None] * b.mask / lengths / 12  # 12, not the 8 of the groups that are alive
    kl = BETA * (1 - (b.ref - b.logp).exp()) * b.mask / lengths / 12
    assert_same([run("grpo", b)[1]], [surrogate])
    assert_same([run("grpo+kl", b)[1]], [surrogate + kl])
    assert (run("grpo", b)[1][:4] == 0).all() and (kl[:4][b.mask[:4]] != 0).all()


def test_nan_reward_stays_out_of_the_baseline():  # docs/faults.md, 3
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 3])
    advantages = group_advantages(torch.tensor([1, NAN, 0, 1, NAN, NAN, NAN, 1, 0, 1, 1]), groups)
    assert_same([advantages[[0, 2, 3]]], [group_advantages([1, 0, 1], [0, 0, 0])])
    assert (advantages[[1, 4, 5, 6, 7]] == 0).all()  # broken, or nothing left to compare with
    assert_same([advantages[8:]], [group_advantages([0, 1, 1], [0, 0, 0])])  # the other groups do not notice


def test_permuting_rows_permutes_advantages():  # docs/faults.md, 4
    rewards, groups = torch.rand(12, generator=torch.Generator().manual_seed(0)), torch.tensor([5, 2, 9] * 4)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    advantages = group_advantages(rewards, groups)
    assert_same([group_advantages(rewards[order], groups[order])], [advantages[order]])
    assert all(advantages[groups == group].sum().abs() < 1e-6 for group in (2, 5, 9))


@pytest.mark.parametrize("rewards, groups", [([1.0], [0]), ([1.0, 0.0, 1.0], [0, 0, 1]), ([NAN, 0.0, 1.0], [1, 0, 0])])
def test_group_of_one_is_an_error(rewards, groups):  # docs/faults.md, 4
    with pytest.raises(ValueError, match="group"):
        group_advantages(rewards, groups)


@every_loss
@pytest.mark.parametrize("k", [2, 3, 9])
def test_splitting_a_trajectory_into_rows_changes_nothing(name, k):  # docs/faults.md, 5
    b = make_batch(0)
    b.A += 0.3  # so that the value is not near 0 and shows the weight too
    value, grad = run(name, split(b, k))
    assert_same([value, grad.view(k, *b.mask.shape).sum(0)], run(name, b), rtol=1e-6)


def split(b, k):
    """Each trajectory cut into k rows, some of them without a sampled token. All first rows, then all second ones, and so on."""
    part = torch.arange(9) * k // 9  # which of the k rows a token goes to
    logp, old, ref, entropy = (x.repeat(k, 1) for x in (b.logp, b.old, b.ref, b.entropy))
    mask = torch.cat([b.mask & (part == j) for j in range(k)])
    sums = ((b.logp - b.old) * b.mask).sum(1).detach()
    return Batch(logp, old, ref, b.A.repeat(k), mask, entropy, b.mask.sum(1).repeat(k), b.N, b.num_tokens, sums.repeat(k))


@pytest.mark.parametrize("size", [1, 5, 7, 36])
@three_seeds
def test_a_trajectory_in_rows_has_one_ratio_wherever_micro_batches_cut(seed, size):
    """FEE's Eqs. 9 and 10: value and gradient are those of one long row, the clip of a trajectory holds or leaves all its rows."""
    b = make_batch(seed)
    value, grad = value_and_grad(lambda cut: sum(loss("gspo", cut, slice(i, i + size)) for i in range(0, 36, size)), split(b, 3))
    assert_same([value, grad.view(3, *b.mask.shape).sum(0)], run("gspo", b), rtol=1e-9)
    alive = (grad.view(3, *b.mask.shape).sum(0) != 0).any(1)
    assert alive.any() and not alive.all()
    own = split(b, 3)  # the rows' own ratios are other ones
    own.sums = None
    assert not torch.allclose(run("gspo", own)[1], grad, rtol=1e-2)


@every_loss
@three_seeds
def test_micro_batches_add_up(name, seed):  # docs/faults.md, 6
    b = make_batch(seed)
    b.lengths, b.sums = b.mask.sum(1), ((b.logp - b.old) * b.mask).sum(1) if seed else None

    def in_micro_batches(batch, size):
        return sum(loss(name, batch, slice(i, i + size)) for i in range(0, 12, size))

    whole = run(name, b)
    for size in (1, 2, 5):
        assert_same(value_and_grad(in_micro_batches, b, size), whole)


@every_loss
def test_masking_a_row_equals_dropping_it(name):  # docs/faults.md, 7
    b = make_batch(0)
    b.mask[[2, 7]] = False
    b.num_tokens = int(b.mask.sum())
    left = [i for i in range(12) if i not in (2, 7)]
    value, grad = run(name, b)
    assert_same([value, grad], value_and_grad(lambda batch: loss(name, batch, left), b))
    assert (grad[[2, 7]] == 0).all() and value != 0


@every_loss
def test_all_masked_is_zero_and_finite(name):  # docs/faults.md, 7
    b = make_batch(0)
    value, grad = run(name, replace(b, mask=torch.zeros_like(b.mask), num_tokens=0))
    assert value == 0 and (grad == 0).all()


@every_loss
@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1e4])
@pytest.mark.parametrize("where", [["logp"], ["old"], ["ref"], ["entropy"], ["logp", "old", "ref"]], ids="+".join)
def test_garbage_behind_the_mask_changes_nothing(name, bad, where):  # docs/faults.md, 8
    b = make_batch(0)
    dirty = replace(b, **{key: torch.where(b.mask, getattr(b, key), bad) for key in where})
    for got, expected in zip(run(name, dirty), run(name, b)):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo"])
def test_on_policy_value_is_zero_and_gradient_is_reinforce(name):  # docs/faults.md, 9
    b = make_batch(0, on_policy=True, equal_lengths=name == "dapo")  # DAPO's value is 0 only where lengths are equal
    value, grad = run(name, b)
    weight = b.num_tokens if name == "dapo" else b.mask.sum(1, keepdim=True) * b.N
    reinforce = value_and_grad(lambda x: -(x.A[:, None] * x.logp * x.mask / weight).sum(), b)[1]
    assert value.abs() < 1e-6 and reinforce.abs().max() > 1e-3
    assert_same([grad], [reinforce])


@every_loss
def test_only_sampled_tokens_are_trained_on(name):  # docs/faults.md, 14
    b = make_batch(0, on_policy=True)
    grad = run(name, b)[1]
    assert (grad[~b.mask] == 0).all() and (grad[b.mask] != 0).all()
    for dtype in (torch.float32, torch.long):  # masks of any dtype mean the same
        assert torch.equal(run(name, replace(b, mask=b.mask.to(dtype)))[1], grad)


@pytest.mark.parametrize("length, penalty", [(0, 0), (79, 0), (80, 0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1),
                                             (101, -1), (10**6, -1)])
def test_overlong_penalty(length, penalty):  # docs/faults.md, 21
    assert overlong_penalty(torch.tensor([length]), max_length=100, cache=20).tolist() == pytest.approx([penalty])


@pytest.mark.parametrize("cache", [0, -1, 101])
def test_overlong_penalty_refuses_a_bad_cache(cache):  # docs/faults.md, 21
    with pytest.raises(ValueError, match="cache"):
        overlong_penalty([1], 100, cache)


@three_seeds
def test_dapo_is_grpo_at_equal_lengths_and_clips(seed):
    b = make_batch(seed, equal_lengths=True)
    assert b.num_tokens == 4 * b.N  # so 1/num_tokens = 1/N 1/|o|
    dapo = value_and_grad(lambda x: dapo_loss(x.logp, x.old, x.A, x.mask, num_tokens=x.num_tokens, eps_high=0.2), b)
    assert_same(dapo, run("grpo", b))


@three_seeds
def test_gspo_is_grpo_at_length_one_and_equal_clips(seed):
    b = make_batch(seed)
    b.mask &= b.mask.cumsum(1) == 1  # one sampled token a row, the rest observations
    gspo = value_and_grad(lambda x: gspo_loss(x.logp, x.old, x.A, x.mask, num_trajectories=x.N, eps_low=0.2,
                                              eps_high=0.2), b)
    assert_same(gspo, run("grpo", b))


@three_seeds
def test_gspo_is_gspo_token_at_one_advantage_per_trajectory(seed):
    def gspo_token(b):  # arXiv 2507.18071, Eqs. 13 and 14
        lengths = b.mask.sum(1, keepdim=True)
        s = (((b.logp - b.old) * b.mask).sum(1, keepdim=True) / lengths).exp().detach()
        s = s * b.logp.exp() / b.logp.exp().detach()
        A = b.A[:, None]
        return -(torch.minimum(s * A, s.clamp(1 - 3e-4, 1 + 4e-4) * A) * b.mask / lengths).sum() / b.N

    b = make_batch(seed)
    assert_same(run("gspo", b), value_and_grad(gspo_token, b))


def test_expected_k3_is_the_kl_to_the_reference():
    p, q = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]], dtype=torch.float64)
    k3 = torch.stack([grpo_loss(lp.view(1, 1), lp.view(1, 1), torch.zeros(1), torch.ones(1, 1), num_trajectories=1,
                                beta=1.0, ref_logp_BT=lq.view(1, 1)) for lp, lq in zip(p.log(), q.log())])
    assert_same([(p * k3).sum()], [(p * (p / q).log()).sum()])  # KL(policy || reference), over all three words
    assert (k3 >= 0).all()


def test_kl_needs_a_reference():
    for loss, total in ((grpo_loss, "num_trajectories"), (dapo_loss, "num_tokens"), (gspo_loss, "num_trajectories")):
        with pytest.raises(ValueError, match="ref_logp"):
            loss(*torch.zeros(2, 1, 1), torch.zeros(1), torch.ones(1, 1), beta=0.1, **{total: 1})


# Numbers that float cannot hold

@every_loss
@pytest.mark.parametrize("log_ratio", [100.0, 1e4, INF, 60.0, -100.0, -1e4, -INF])
@pytest.mark.parametrize("A", [1.0, -1.0, 0.0])
def test_a_log_ratio_that_overflows_leaves_gradients_finite(name, log_ratio, A):  # docs/faults.md, 37
    """A token that the clip holds has gradient 0, and no other token notices it; in fp32, where exp(89) is infinite."""
    b = make_batch(0)
    b = replace(b, **{key: getattr(b, key).float() for key in ("logp", "old", "ref", "A", "entropy")})
    others = b.mask.clone()
    others[1] = False
    b.A[1] = A
    wild = replace(b, old=b.old.clone())
    wild.old[1] = b.logp[1] - (log_ratio if log_ratio < INF else 1e30)
    value, grad = run(name, wild)
    assert value.isfinite() and grad.isfinite().all()
    assert torch.equal(grad[others], run(name, b)[1][others])
    if not name.endswith("+kl") and A * log_ratio >= 0:  # held by the clip, or without a say
        assert not grad[1].any()


@pytest.mark.parametrize("name", ["grpo+kl", "dapo+kl", "gspo+kl"])
@pytest.mark.parametrize("gap", [100.0, -100.0, 60.0])
def test_a_reference_far_away_leaves_gradients_finite(name, gap):  # docs/faults.md, 37
    b = make_batch(0)
    b = replace(b, **{key: getattr(b, key).float() for key in ("logp", "old", "ref", "A", "entropy")})
    b.ref[2] = b.logp[2] + gap
    value, grad = run(name, b)
    assert value.isfinite() and grad.isfinite().all()
    if gap < 0:  # k3 is linear there: the policy is drawn down to the reference
        plain = run(name.removesuffix("+kl"), b)[1]
        assert ((grad - plain)[2][b.mask[2]] > 0).all()


@every_loss
@pytest.mark.parametrize("which", [("logp",), ("old",), ("logp", "old", "ref", "A", "entropy")], ids="+".join)
def test_log_probs_in_bf16_are_computed_in_fp32(name, which):  # docs/faults.md, 38
    """The same rounded numbers give the same loss in either type: between 1 and 1.0078 bf16 has nothing, GSPO's clip range is 4e-4."""
    b = make_batch(0)
    rounded = replace(b, **{key: getattr(b, key).bfloat16() if key in which else getattr(b, key).float()
                            for key in ("logp", "old", "ref", "A", "entropy")})
    exact = replace(rounded, **{key: getattr(rounded, key).float() for key in which})
    assert loss(name, rounded).dtype == torch.float32
    value, grad = run(name, rounded)
    assert_same([value], [run(name, exact)[0]], rtol=1e-6)
    assert grad.dtype == rounded.logp.dtype
    torch.testing.assert_close(grad.float(), run(name, exact)[1], rtol=1e-2, atol=1e-4)


SAME = [[0.07 + 0.6, 0.67], [0.1 + 0.2, 0.3, 0.3], [-0.1 - 0.2, -0.3], [1e-20 * 3, 3e-20], [sum([0.1] * 10), 1.0, NAN],
        [1e6 + 0.1, 1e6 + 0.1 + 1e-9]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rewards", SAME)
def test_rewards_equal_but_for_rounding_are_a_dead_group(rewards, dtype):  # docs/faults.md, 39
    rewards_G = torch.tensor(rewards, dtype=torch.float64).to(dtype)
    if dtype == torch.float32 and rewards[0] == 0.07 + 0.6:  # added in fp32 by an environment, then a Python number
        rewards_G = torch.stack([torch.tensor(0.07) + torch.tensor(0.6), torch.tensor(0.67)]).double()
    assert not group_advantages(rewards_G, [0] * len(rewards_G)).any()
    assert keep_group(rewards_G) is False
    episodes = [SimpleNamespace(reward=r, turns=[], rows=[], length=0, success=False, enriched=False, end="", info={})
                for r in rewards_G.tolist()]
    assert episode_metrics(episodes, len(episodes))["dead_group_fraction"] == 1


@pytest.mark.parametrize("rewards", [[0.67, 0.671], [1e-7, 0], [1.0, 1.0001], [-1e-3, -1.1e-3], [0, 1e-30]])
def test_rewards_that_differ_are_a_live_group(rewards):  # docs/faults.md, 39
    assert keep_group(rewards) is True and (group_advantages(rewards, [0, 0]) != 0).all()


@pytest.mark.parametrize("rewards, kept", [
    ([0, 1], True), ([0, 0], False), ([1, 1], False), ([0, 0.3], True), ([0.3, 1], True), ([-1, 1], True),
    ([-1, -0.5], True), ([1, NAN], False), ([0, NAN], False), ([1, 1, NAN], False), ([0, 1, NAN], True),
    ([NAN, NAN], False)])
def test_keep_group(rewards, kept):
    assert keep_group(rewards) is kept and keep_group(torch.tensor(rewards)) is kept


def scripted(*rewards_of_groups):
    """A `sample` that hands out these groups in turn, the list of them, and the list of what it was asked for."""
    groups, asked = [[SimpleNamespace(reward=r) for r in rewards] for rewards in rewards_of_groups], []

    def sample(n):
        asked.append(n)
        start = sum(asked) - n
        return groups[start:start + n]

    return sample, groups, asked


def test_fill_batch_resamples_only_what_is_missing(capsys):
    sample, groups, asked = scripted([0, 1], [1, 1], [0, 0], [1, NAN, 0], [0, NAN], [1, 0], [NAN, NAN], [0, 0.5])
    kept = fill_batch(sample, 4, max_rounds=4)
    assert asked == [4, 2, 1, 1]
    assert [id(group) for group in kept] == [id(groups[i]) for i in (0, 3, 5, 7)]
    assert capsys.readouterr().out == ""  # the last round filled it: no complaint


def test_fill_batch_stops_at_the_cap_and_says_so(capsys):
    sample, groups, asked = scripted([0, 1], *[[1, 1]] * 20)
    kept = fill_batch(sample, 3, max_rounds=3)
    assert asked == [3, 2, 2] and kept == groups[:1]
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and "3 rounds" in out and "1 of 3" in out
