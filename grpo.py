"""Group Relative Policy Optimization (GRPO): DeepSeekMath, arXiv 2402.03300, Eqs. 3 and 4.

    python grpo.py                      # the built-in game and model, no network, about a minute of one core
    from grpo import group_advantages, grpo_loss    # needs torch alone

G answers to one task are a group. An answer's advantage is its reward compared with its group:

    A_i = (R_i - mean R) / std R                                               (outcome supervision, section 4.1.2)
    J   = 1/N sum_i 1/|o_i| sum_t { min(r A, clip(r, 1-eps, 1+eps) A) - beta k3 }             (Eq. 3)
    k3  = exp(lp_ref - lp) - (lp_ref - lp) - 1                                                (Eq. 4)

with r = exp(lp - lp_old) and t over the tokens that the policy sampled. The loss is -J. With one update per batch
r = 1 and the *value* of the loss is near 0 while its gradient is REINFORCE's: a loss near 0 is normal.

What differs from the paper:
1. The standard deviation is the sample's (ddof=1) and eps=1e-6 is added to it, as in TRL and verl; the paper says "std".
2. An answer is a whole episode; the observations between its turns are context, never trained on.
3. A group of equal rewards has advantage exactly 0; it still counts in N, and still gets the KL term when beta > 0. Rewards are
   equal if they lie within 1e-6 of the largest: 0.07 + 0.6 is not 0.67 in floating point, and would make advantages of +-1.
4. An episode whose environment broke (reward NaN) has advantage 0, and the baseline of its group is taken without it;
   like the episodes of note 3 it still counts in N and gets the KL term.
5. beta = 0 by default (the paper: 0.04), as in much later work.
6. One reward at the end of the episode (outcome supervision); process supervision is not here.
7. entropy_coef > 0 adds that much of each token's entropy to the objective, inside the same means.
8. A log-ratio above 20 counts as 20, as in verl: exp(100) is infinite, and its gradient NaN even where the clip holds the token.
"""
from dataclasses import dataclass, field

import torch


def group_advantages(rewards_N, groups_N, eps=1e-6):
    """A_i = (R_i - mean)/(std + eps) within a group: [N] rewards and [N] integer group ids -> [N] advantages.

    Constant group (note 3) -> exactly 0. NaN (or infinite) reward -> 0, and out of its group's baseline. A group of one raises ValueError.
    """
    rewards_N = torch.as_tensor(rewards_N, dtype=torch.float64)
    groups_N = torch.as_tensor(groups_N)
    advantages_N = torch.zeros_like(rewards_N)
    for group in groups_N.unique():
        members = groups_N == group
        if members.sum() < 2:
            raise ValueError(f"group {group.item()} has one trajectory: an advantage needs at least two to compare")
        known = members & rewards_N.isfinite()
        rewards_G = rewards_N[known]
        if len(rewards_G) < 2 or rewards_G.max() - rewards_G.min() <= 1e-6 * rewards_G.abs().max():  # note 3
            continue
        advantages_N[known] = (rewards_G - rewards_G.mean()) / (rewards_G.std() + eps)
    return advantages_N.float()


def grpo_loss(logp_BT, old_logp_BT, advantages_B, mask_BT, *, num_trajectories, lengths_B=None, eps=0.2, beta=0.0,
              ref_logp_BT=None, entropy_coef=0.0, entropy_BT=None):
    """Eq. 3, negated: this micro-batch's share. The shares of all micro-batches add up to the loss of the batch.

    logp_BT, old_logp_BT, ref_logp_BT: log-probs of the tokens [B, T]; mask_BT: 1 where the policy sampled the token.
    advantages_B: one per row. num_trajectories: N of the whole batch. lengths_B: |o_i|, sampled tokens of the whole
    trajectory that a row belongs to; default: of the row. So a trajectory cut into k rows weighs what it weighed as one.
    entropy_BT: of the distributions that the tokens were drawn from, in nats. Computed in fp32 at least.
    """
    mask_BT = mask_BT.bool()
    lengths_B = mask_BT.sum(1) if lengths_B is None else lengths_B
    logp_BT = logp_BT.to(torch.promote_types(logp_BT.dtype, torch.float32))
    log_ratio_BT = torch.where(mask_BT, logp_BT - old_logp_BT, 0.0).clamp(max=20)  # before exp: NaN * 0 and inf * 0 are NaN
    ratio_BT = log_ratio_BT.exp()
    A_B1 = advantages_B[:, None]
    objective_BT = torch.min(ratio_BT * A_B1, ratio_BT.clamp(1 - eps, 1 + eps) * A_B1)  # Eq. 3
    if beta:
        if ref_logp_BT is None:
            raise ValueError("beta > 0 needs ref_logp_BT")
        log_ref_BT = torch.where(mask_BT, ref_logp_BT - logp_BT, 0.0).clamp(max=20)
        objective_BT = objective_BT - beta * (log_ref_BT.exp() - log_ref_BT - 1)  # k3, Eq. 4
    if entropy_coef:
        objective_BT = objective_BT + entropy_coef * entropy_BT.to(logp_BT.dtype)
    per_row_B = torch.where(mask_BT, objective_BT, 0.0).sum(1) / lengths_B.clamp(min=1)
    return -per_row_B.sum() / num_trajectories


# GRPO for the training loop

@dataclass
class Options:
    eps: float = field(default=0.2, metadata={"help": "clip range of the ratio"})
    beta: float = field(default=0.0, metadata={"help": "weight of the KL to the reference (the paper: 0.04)"})
    entropy_coef: float = field(default=0.0, metadata={"help": "weight of an entropy bonus"})

    def __post_init__(self):
        if not (self.eps > 0 and 0 <= self.beta < float("inf") and 0 <= self.entropy_coef < float("inf")):
            raise ValueError(f"--eps must be above 0, --beta and --entropy-coef at least 0, got {self.eps}, {self.beta} and "
                             f"{self.entropy_coef}")


def algorithm(options) -> dict:
    """The fields of `Algorithm` in rl/train.py, for anything with the attributes of `Options`."""
    return {"name": "grpo", "advantages": group_advantages, "clip": (options.eps, options.eps), "use_reference": options.beta > 0,
            "use_entropy": options.entropy_coef > 0, "loss": lambda batch: grpo_loss(
                batch.logp_BT, batch.old_logp_BT, batch.advantages_B, batch.mask_BT, num_trajectories=batch.num_trajectories,
                lengths_B=batch.lengths_B, eps=options.eps, beta=options.beta, ref_logp_BT=batch.ref_logp_BT,
                entropy_coef=options.entropy_coef, entropy_BT=batch.entropy_BT)}


# The file as a program

def main(argv=None):
    from rl.options import parse

    config = parse(Options, argv, "Train with GRPO (arXiv 2402.03300).")
    from rl.train import Algorithm, train

    return train(config, Algorithm(**algorithm(config)))


if __name__ == "__main__":
    from rl.runs import cli
    cli(main)
