"""Group Sequence Policy Optimization (GSPO): arXiv 2507.18071, Eqs. 5 to 7.

    python gspo.py                      # the built-in game and model, no network, a few minutes on a laptop
    from gspo import gspo_loss          # needs torch alone

The ratio is the sequence's, not the token's: the geometric mean of the token ratios. The advantage is GRPO's (Eq. 6):

    s_i = exp( 1/|o_i| sum_t (lp - lp_old) )                                       (Eq. 7)
    J   = 1/N sum_i min(s_i A_i, clip(s_i, 1 - eps_low, 1 + eps_high) A_i)         (Eq. 5)

There is no KL term. With one update per batch s = 1 and nothing is ever clipped, so `--minibatches 4` is the default
here, as in the paper (section 5.1): the batch is sampled once and cut into four, each one optimizer step.

What differs from the paper:
1. An answer is a whole episode, and |o_i| counts the policy's tokens in all its turns.
2. Where an episode is cut into several rows (a windowed history, a template that strips thinking), each row has its
   own ratio and weighs its share of the episode's tokens, so that the weights of an episode's rows add up to 1.
3. GSPO-token (Eqs. 13 and 14) is not here: with one advantage per episode its value and gradient are these.
"""
from dataclasses import dataclass, field

import torch


def gspo_loss(logp_BT, old_logp_BT, advantages_B, mask_BT, *, num_trajectories, lengths_B=None, eps_low=3e-4,
              eps_high=4e-4):
    """Eq. 5, negated: this micro-batch's share. The shares of all micro-batches add up to the loss of the batch.

    logp_BT, old_logp_BT: log-probs of the tokens [B, T]; mask_BT: 1 where the policy sampled the token;
    advantages_B: one per row. num_trajectories: N of the whole batch. lengths_B: sampled tokens of the whole
    trajectory that a row belongs to; default: of the row.
    """
    mask_BT = mask_BT.bool()
    row_lengths_B = mask_BT.sum(1)
    lengths_B = row_lengths_B if lengths_B is None else lengths_B
    log_ratio_BT = torch.where(mask_BT, logp_BT - old_logp_BT, 0.0)  # before exp: NaN * 0 is NaN
    s_B = (log_ratio_BT.sum(1) / row_lengths_B.clamp(min=1)).exp()  # Eq. 7
    objective_B = torch.min(s_B * advantages_B, s_B.clamp(1 - eps_low, 1 + eps_high) * advantages_B)  # Eq. 5
    weight_B = row_lengths_B / lengths_B.clamp(min=1)  # 1 for a whole trajectory, its share for a part of one
    return -torch.where(row_lengths_B > 0, objective_B * weight_B, 0.0).sum() / num_trajectories


# GSPO for the training loop

@dataclass
class Options:
    minibatches: int = field(default=4, metadata={"help": "the batch is cut into so many parts, an optimizer step each; with 1 part every ratio is 1"})
    eps_low: float = field(default=3e-4, metadata={"help": "clip range below 1"})
    eps_high: float = field(default=4e-4, metadata={"help": "clip range above 1"})

    def __post_init__(self):
        if not (self.eps_low > 0 and self.eps_high > 0):
            raise ValueError(f"--eps-low and --eps-high must be above 0, got {self.eps_low} and {self.eps_high}")


def algorithm(options, group_advantages) -> dict:
    """The fields of rl/train.py's `Algorithm`, for anything with the attributes of `Options`. The advantages are GRPO's (Eq. 6)."""
    return {"name": "gspo", "advantages": group_advantages, "clip": (options.eps_low, options.eps_high), "sequence_ratio": True,
            "loss": lambda batch: gspo_loss(
                batch.logp_BT, batch.old_logp_BT, batch.advantages_B, batch.mask_BT, num_trajectories=batch.num_trajectories,
                lengths_B=batch.lengths_B, eps_low=options.eps_low, eps_high=options.eps_high)}


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
