"""Decoupled Clip and Dynamic sAmpling Policy Optimization (DAPO): arXiv 2503.14476, Eqs. 8 to 13.

    python dapo.py                      # the built-in game and model, no network, a few minutes on a laptop
    from dapo import dapo_loss, keep_group, fill_batch, overlong_penalty    # needs torch alone

Four changes to GRPO; the advantage is GRPO's (Eq. 9):

    clip-higher        clip(r, 1 - eps_low, 1 + eps_high), 0.2 and 0.28: rare tokens can grow        (Eq. 10)
    dynamic sampling   only groups with 0 < #correct < G; sample until the batch is full             (Eq. 11)
    token-level loss   every token of the batch weighs the same                                      (Eq. 12)
    soft overlong      a penalty that grows from 0 to -1 over the last L_cache tokens                (Eq. 13)

What differs from the paper:
1. The token mean is over the whole batch, as in TRL and verl; Eq. 8 normalises each group by itself.
2. Dynamic sampling stops after `max_rounds` rounds and then trains on what it has, saying so in one line;
   the paper samples without end.
3. A group passes if its rewards are not all equal: for rewards of 0 and 1 this is 0 < #correct < G, and it goes on
   making sense for graded rewards. A broken episode (reward NaN) counts on neither side. Rewards are equal if they lie
   within 1e-6 of the largest, as in grpo.py: 0.07 + 0.6 is not 0.67 in floating point.
4. The overlong length counts the policy's own tokens over the whole episode, not observations or prompts. The
   penalty is added after dynamic sampling has judged the reward itself, and is off unless `--overlong-max` is set.
5. The paper has no KL term. beta > 0 subtracts k3 = exp(lp_ref - lp) - (lp_ref - lp) - 1 (arXiv 2402.03300, Eq. 4), and
   entropy_coef > 0 adds the entropy, of each token inside the same mean.
6. A log-ratio above 20 counts as 20, as in verl: exp(100) is infinite, and its gradient NaN even where the clip holds the token.
"""
from dataclasses import dataclass, field

import torch


def overlong_penalty(lengths_N, max_length, cache):
    """Eq. 13: 0 up to max_length - cache, then linear to -1 at max_length, -1 beyond. [N] own tokens -> [N]."""
    if not 0 < cache <= max_length:
        raise ValueError(f"the cache must lie in 1..max_length, got {cache} of {max_length}")
    lengths_N = torch.as_tensor(lengths_N, dtype=torch.float32)
    return ((max_length - cache - lengths_N) / cache).clamp(-1.0, 0.0)


def keep_group(rewards_G) -> bool:
    """Eq. 11's condition: not all alike (0 < #correct < G for rewards of 0 and 1), over the episodes with a reward."""
    rewards_G = torch.as_tensor(rewards_G, dtype=torch.float64)
    rewards_G = rewards_G[rewards_G.isfinite()]
    return len(rewards_G) > 1 and bool(rewards_G.max() - rewards_G.min() > 1e-6 * rewards_G.abs().max())  # not by rounding


def fill_batch(sample, num_groups, max_rounds):
    """Dynamic sampling: call `sample(n)` -> n fresh groups (lists of episodes with `.reward`) until `num_groups` pass.

    Each round asks for as many as are missing. At the cap the batch stays short, or even empty, and a line says so.
    """
    kept, sampled = [], 0
    for _ in range(max_rounds):
        groups = sample(num_groups - len(kept))
        sampled += len(groups)
        kept += [group for group in groups if keep_group([episode.reward for episode in group])]
        if len(kept) >= num_groups:
            return kept
    print(f"dynamic sampling: cap of {max_rounds} rounds hit with {len(kept)} of {num_groups} groups "
          f"({sampled} sampled)", flush=True)
    return kept


def dapo_loss(logp_BT, old_logp_BT, advantages_B, mask_BT, *, num_tokens, eps_low=0.2, eps_high=0.28, beta=0.0, ref_logp_BT=None,
              entropy_coef=0.0, entropy_BT=None):
    """Eq. 8, negated: this micro-batch's share. The shares of all micro-batches add up to the loss of the batch.

    logp_BT, old_logp_BT, ref_logp_BT: log-probs of the tokens [B, T]; mask_BT: 1 where the policy sampled the token;
    advantages_B: one per row; num_tokens: sampled tokens of the whole batch, sum_i |o_i|. entropy_BT: of the distributions
    that the tokens were drawn from, in nats. Computed in fp32 at least.
    """
    mask_BT = mask_BT.bool()
    logp_BT = logp_BT.to(torch.promote_types(logp_BT.dtype, torch.float32))
    log_ratio_BT = torch.where(mask_BT, logp_BT - old_logp_BT, 0.0).clamp(max=20)  # before exp: NaN * 0 and inf * 0 are NaN
    ratio_BT = log_ratio_BT.exp()
    A_B1 = advantages_B[:, None]
    objective_BT = torch.min(ratio_BT * A_B1, ratio_BT.clamp(1 - eps_low, 1 + eps_high) * A_B1)  # Eq. 10
    if beta:
        if ref_logp_BT is None:
            raise ValueError("beta > 0 needs ref_logp_BT")
        log_ref_BT = torch.where(mask_BT, ref_logp_BT - logp_BT, 0.0).clamp(max=20)
        objective_BT = objective_BT - beta * (log_ref_BT.exp() - log_ref_BT - 1)  # k3
    if entropy_coef:
        objective_BT = objective_BT + entropy_coef * entropy_BT.to(logp_BT.dtype)
    return -torch.where(mask_BT, objective_BT, 0.0).sum() / max(num_tokens, 1)  # Eq. 12


# DAPO for the training loop

@dataclass
class Options:
    eps_low: float = field(default=0.2, metadata={"help": "clip range below 1"})
    eps_high: float = field(default=0.28, metadata={"help": "clip range above 1"})
    max_rounds: int = field(default=10, metadata={"help": "dynamic sampling: rounds of sampling per step at most"})
    overlong_max: int = field(default=0, metadata={"help": "own tokens of an episode at which the soft overlong "
                                                           "penalty reaches -1 (0: no penalty)"})
    overlong_cache: int = field(default=0, metadata={"help": "tokens over which the soft overlong penalty grows (0: a fifth of --overlong-max)"})
    beta: float = field(default=0.0, metadata={"help": "weight of the KL to the reference (the paper has none)"})
    entropy_coef: float = field(default=0.0, metadata={"help": "weight of an entropy bonus"})

    def __post_init__(self):
        if not (0 <= self.beta < float("inf") and 0 <= self.entropy_coef < float("inf")):
            raise ValueError(f"--beta and --entropy-coef must be at least 0, got {self.beta} and {self.entropy_coef}")
        if not (self.eps_low > 0 and self.eps_high > 0 and self.max_rounds >= 1):
            raise ValueError("--eps-low and --eps-high must be above 0, --max-rounds at least 1")
        if self.overlong_max < 0 or self.overlong_cache < 0 or (self.overlong_max and self.overlong_cache > self.overlong_max):
            raise ValueError(f"--overlong-cache {self.overlong_cache} must lie in 0..--overlong-max {self.overlong_max}")


def algorithm(options, group_advantages) -> dict:
    """The fields of rl/train.py's `Algorithm`, for anything with the attributes of `Options`. The advantages are GRPO's (Eq. 9)."""
    def shape_rewards(rewards_N, lengths_N):
        cache = options.overlong_cache or max(options.overlong_max // 5, 1)
        return rewards_N + overlong_penalty(lengths_N, options.overlong_max, cache) if options.overlong_max else rewards_N

    return {"name": "dapo", "advantages": group_advantages, "clip": (options.eps_low, options.eps_high),
            "fill": lambda sample, num_groups: fill_batch(sample, num_groups, options.max_rounds), "shape_rewards": shape_rewards,
            "use_reference": options.beta > 0, "use_entropy": options.entropy_coef > 0, "loss": lambda batch: dapo_loss(
                batch.logp_BT, batch.old_logp_BT, batch.advantages_B, batch.mask_BT, num_tokens=batch.num_tokens,
                eps_low=options.eps_low, eps_high=options.eps_high, beta=options.beta, ref_logp_BT=batch.ref_logp_BT,
                entropy_coef=options.entropy_coef, entropy_BT=batch.entropy_BT)}


# The file as a program

def main(argv=None):
    from rl.options import parse

    config = parse(Options, argv, "Train with DAPO (arXiv 2503.14476).")
    from grpo import group_advantages
    from rl.train import Algorithm, train

    return train(config, Algorithm(**algorithm(config, group_advantages)))


if __name__ == "__main__":
    from rl.runs import cli
    cli(main)
