"""Group Sequence Policy Optimization (GSPO): arXiv 2507.18071, Eqs. 5 to 7.

    python gspo.py                      # the built-in game and model, no network, a few minutes on a laptop
    from gspo import gspo_loss          # needs torch alone

The ratio is the sequence's, not the token's: the geometric mean of the token ratios. The advantage is GRPO's (Eq. 6):

    s_i = exp( 1/|o_i| sum_t (lp - lp_old) )                                       (Eq. 7)
    J   = 1/N sum_i min(s_i A_i, clip(s_i, 1 - eps_low, 1 + eps_high) A_i)         (Eq. 5)

With one update per batch s = 1 and nothing is ever clipped, so `--minibatches 4` is the default
here, as in the paper (section 5.1): the batch is sampled once and cut into four, each one optimizer step.

What differs from the paper:
1. An answer is a whole episode, and |o_i| counts the policy's tokens in all its turns. So s_i is one ratio, and one clip, of all
   rows of the episode, where a windowed history or a template that strips thinking cuts it into several (FEE, arXiv 2609.08404,
   Eqs. 9 and 10). With `--ratio row` each row has its own ratio and clip, and weighs its share of the episode's tokens.
2. GSPO-token (Eqs. 13 and 14) is not here: with one advantage per episode its value and gradient are these.
3. The paper has no KL term. beta > 0 subtracts k3 = exp(lp_ref - lp) - (lp_ref - lp) - 1 (arXiv 2402.03300, Eq. 4), and
   entropy_coef > 0 adds the entropy, both as a mean over an episode's tokens, then over episodes, as in verl.
4. A log s_i above 20 counts as 20: exp(100) is infinite, and its gradient NaN even where the clip holds the episode.
"""
from dataclasses import dataclass, field

import torch


def gspo_loss(logp_BT, old_logp_BT, advantages_B, mask_BT, *, num_trajectories, lengths_B=None, eps_low=3e-4,
              eps_high=4e-4, log_ratio_sums_B=None, beta=0.0, ref_logp_BT=None, entropy_coef=0.0, entropy_BT=None):
    """Eq. 5, negated: this micro-batch's share. The shares of all micro-batches add up to the loss of the batch.

    logp_BT, old_logp_BT, ref_logp_BT: log-probs of the tokens [B, T]; mask_BT: 1 where the policy sampled the token;
    advantages_B: one per row. num_trajectories: N of the whole batch. lengths_B: sampled tokens of the whole
    trajectory that a row belongs to; log_ratio_sums_B: sum_t (lp - lp_old) over all of these, known from a pass without
    gradient by the policy of now. Default of both: of the row. entropy_BT: of the distributions that the tokens were drawn
    from, in nats. Computed in fp32 at least.

    A row that is a part of a trajectory adds its share of the value and of the gradient, whichever micro-batch it is in:
    with s and its clip known, d(s A) = A s 1/|o| sum_t d lp is a sum over rows.
    """
    mask_BT = mask_BT.bool()
    row_lengths_B = mask_BT.sum(1)
    lengths_B = row_lengths_B if lengths_B is None else lengths_B
    logp_BT = logp_BT.to(torch.promote_types(logp_BT.dtype, torch.float32))  # bf16 has nothing between 1 and 1 + eps
    log_ratio_BT = torch.where(mask_BT, logp_BT - old_logp_BT, 0.0)  # before exp: NaN * 0 is NaN
    log_s_B = log_ratio_BT.sum(1) / row_lengths_B.clamp(min=1)  # Eq. 7
    if log_ratio_sums_B is not None:  # the trajectory's value; the gradient is the row's
        log_s_B = log_ratio_sums_B / lengths_B.clamp(min=1) + (log_s_B - log_s_B.detach())
    s_B = log_s_B.clamp(max=20).exp()
    objective_B = torch.min(s_B * advantages_B, s_B.clamp(1 - eps_low, 1 + eps_high) * advantages_B)  # Eq. 5
    if beta:
        if ref_logp_BT is None:
            raise ValueError("beta > 0 needs ref_logp_BT")
        log_ref_BT = torch.where(mask_BT, ref_logp_BT - logp_BT, 0.0).clamp(max=20)
        objective_B = objective_B - beta * (log_ref_BT.exp() - log_ref_BT - 1).sum(1) / row_lengths_B.clamp(min=1)  # k3
    if entropy_coef:
        entropy_BT = torch.where(mask_BT, entropy_BT.to(logp_BT.dtype), 0.0)
        objective_B = objective_B + entropy_coef * entropy_BT.sum(1) / row_lengths_B.clamp(min=1)
    share_B = objective_B * row_lengths_B / lengths_B.clamp(min=1)  # all of it for a whole trajectory, a part for a part of one
    return -torch.where(row_lengths_B > 0, share_B, 0.0).sum() / num_trajectories


# GSPO for the training loop

@dataclass
class Options:
    minibatches: int = field(default=4, metadata={"help": "the batch is cut into so many parts, an optimizer step each; with 1 part every ratio is 1"})
    eps_low: float = field(default=3e-4, metadata={"help": "clip range below 1"})
    eps_high: float = field(default=4e-4, metadata={"help": "clip range above 1"})
    ratio: str = field(default="trajectory", metadata={"help": "trajectory: one ratio for all rows of an episode; row: each its own"})
    beta: float = field(default=0.0, metadata={"help": "weight of the KL to the reference (the paper has none)"})
    entropy_coef: float = field(default=0.0, metadata={"help": "weight of an entropy bonus"})

    def __post_init__(self):
        if not (self.eps_low > 0 and self.eps_high > 0):
            raise ValueError(f"--eps-low and --eps-high must be above 0, got {self.eps_low} and {self.eps_high}")
        if self.ratio not in ("trajectory", "row"):
            raise ValueError(f"--ratio must be trajectory or row, got {self.ratio!r}")
        if not (0 <= self.beta < float("inf") and 0 <= self.entropy_coef < float("inf")):
            raise ValueError(f"--beta and --entropy-coef must be at least 0, got {self.beta} and {self.entropy_coef}")


def algorithm(options, group_advantages) -> dict:
    """The fields of rl/train.py's `Algorithm`, for anything with the attributes of `Options`. The advantages are GRPO's (Eq. 6)."""
    return {"name": "gspo", "advantages": group_advantages, "clip": (options.eps_low, options.eps_high), "ratio": options.ratio,
            "use_reference": options.beta > 0, "use_entropy": options.entropy_coef > 0, "loss": lambda batch: gspo_loss(
                batch.logp_BT, batch.old_logp_BT, batch.advantages_B, batch.mask_BT, num_trajectories=batch.num_trajectories,
                lengths_B=batch.lengths_B, eps_low=options.eps_low, eps_high=options.eps_high,
                log_ratio_sums_B=batch.log_ratio_sums_B, beta=options.beta, ref_logp_BT=batch.ref_logp_BT,
                entropy_coef=options.entropy_coef, entropy_BT=batch.entropy_BT)}


# The file as a program

def main(argv=None):
    from rl.options import parse

    config = parse(Options, argv, "Train with GSPO (arXiv 2507.18071).")
    from grpo import group_advantages
    from rl.train import Algorithm, train

    return train(config, Algorithm(**algorithm(config, group_advantages)))


if __name__ == "__main__":
    from rl.runs import cli
    cli(main)
