r"""Our losses as policy losses of verl, by its own registry.

    pip install -r examples/requirements.txt
    VERL_USE_EXTERNAL_MODULES=examples.verl_loss PYTHONPATH=. python -m verl.trainer.main_ppo \
        algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode=scaffold_grpo \
        actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean ...

The variable lets every process of verl register the three names below; the rest of the command is verl's, and was not run
here. Written for verl 0.9.1, of which this file imports `verl.trainer.ppo.core_algos` alone. For that import, and the
tests, this is enough beside the project's own requirements.txt:

    pip install --no-deps verl==0.9.1 tensordict==0.10.0 pyvers orjson cloudpickle omegaconf antlr4-python3-runtime==4.9.3 \
        codetiming ray msgpack jsonschema attrs referencing rpds-py jsonschema-specifications

    scaffold_grpo    loss_agg_mode=seq-mean-token-mean    verl's "vanilla"
    scaffold_dapo    loss_agg_mode=token-mean             verl's "vanilla" with clip_ratio_low and clip_ratio_high
    scaffold_gspo    loss_agg_mode=seq-mean-token-mean    verl's "gspo"

Equal to these in value and gradient (tests/test_examples.py), with and without verl's normalisers over the whole batch.
Where verl's definitions differ:
1. "vanilla" has a second clip: an advantage below 0 stops pulling where the ratio exceeds clip_ratio_c (3). Ours have not.
2. verl clamps the log-ratio to 20 ("gspo": 10).
3. rollout_is_weights multiply verl's value and gradient; here the gradient alone, which comes to the same for training.
4. A row of verl is a whole trajectory here (lengths_B is the row's); advantages are one per row, as "grpo" makes them.
5. KL and entropy terms are added outside the policy loss, by verl: beta is 0.
"""
import torch
from verl.trainer.ppo.core_algos import register_policy_loss

from dapo import dapo_loss
from grpo import grpo_loss
from gspo import gspo_loss


def per_row(advantages_BT, mask_BT):
    """[B, T] advantages that are constant where the mask is 1 -> [B]; 0 for a row without such a token."""
    first_B1 = mask_BT.int().argmax(1, keepdim=True)
    advantages_B1 = advantages_BT.gather(1, first_B1)
    if ((advantages_BT != advantages_B1) & mask_BT).any():
        raise ValueError("an advantage for each token: use algorithm.adv_estimator=grpo, one for each response")
    return torch.where(mask_BT.any(1), advantages_B1[:, 0], 0.0)


def register(name, aggregation, loss):
    """loss(batch, trajectories, tokens, eps_low, eps_high) -> this micro-batch's share; batch: what all losses take."""
    @register_policy_loss(name)
    def policy_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode=aggregation, config=None,
                    rollout_is_weights=None):
        if loss_agg_mode != aggregation:
            raise ValueError(f"{name} wants actor.loss_agg_mode={aggregation}, got {loss_agg_mode}")
        mask_BT, whole = response_mask.bool(), config.global_batch_info  # whole: all micro-batches and processes
        trajectories = whole.get("global_batch_size") or int(mask_BT.any(1).sum())
        tokens = whole.get("batch_num_tokens") or int(mask_BT.sum())
        low, high = (config.clip_ratio if own is None else own for own in (config.clip_ratio_low, config.clip_ratio_high))
        logp_BT = log_prob
        if rollout_is_weights is not None:  # the value stays, the gradient is weighed
            logp_BT = log_prob.detach() + rollout_is_weights * (log_prob - log_prob.detach())
        share = loss((logp_BT, old_log_prob, per_row(advantages, mask_BT), mask_BT), trajectories, tokens, low, high)
        with torch.no_grad():
            kl = torch.where(mask_BT, old_log_prob - log_prob, 0.0).sum() / mask_BT.sum().clamp(min=1)
        return share * whole.get("dp_size", 1), {"actor/ppo_kl": kl.item()}  # verl averages gradients over dp_size processes


def grpo(batch, trajectories, tokens, low, high):
    if low != high:
        raise ValueError(f"scaffold_grpo has one clip range: set actor.clip_ratio_low and _high alike, got {low} and {high}")
    return grpo_loss(*batch, num_trajectories=trajectories, eps=low)


def dapo(batch, trajectories, tokens, low, high):
    return dapo_loss(*batch, num_tokens=tokens, eps_low=low, eps_high=high)


def gspo(batch, trajectories, tokens, low, high):
    return gspo_loss(*batch, num_trajectories=trajectories, eps_low=low, eps_high=high)


register("scaffold_grpo", "seq-mean-token-mean", grpo)
register("scaffold_dapo", "token-mean", dapo)
register("scaffold_gspo", "seq-mean-token-mean", gspo)
