"""Our losses inside TRL's GRPOTrainer: log-probs, advantages and masks are TRL's, a subclass overrides its loss.

    pip install -r examples/requirements.txt
    python -m examples.trl_loss                    # from the repository's root: two steps on the built-in game
    from examples.trl_loss import LossTrainer      # LossTrainer(loss="gspo", model=..., reward_funcs=..., ...)

Written for TRL 1.16. Equal to TRL's own losses in value and gradient (tests/test_examples.py):

    "grpo"    loss_type="grpo"; with beta > 0 (k3), use_bias_correction_kl=False
    "dapo"    loss_type="dapo"; epsilon below, epsilon_high above; beta=0
    "gspo"    loss_type="grpo", importance_sampling_level="sequence"; epsilon below, epsilon_high above; beta=0

Where TRL's definitions differ from ours:
1. loss_type="grpo" averages a micro-batch's rows and divides by the number of micro-batches: all have the same number of
   rows, so this is num_trajectories = rows * micro-batches.
2. In "dapo" num_tokens is TRL's: the tokens of all that was generated together, shared out evenly over its optimizer steps
   and processes. With one step per generation that is the paper's sum over the batch; with `steps_per_generation` above
   `gradient_accumulation_steps` the mini-batches of rl/learner.py have their own sums instead.
3. A completion is one row, so lengths_B is the row's. Advantages stay TRL's: its eps beside the standard deviation is
   1e-4, ours 1e-6. Dynamic sampling and the overlong penalty of dapo.py are not in the loss, so not here.
4. TRL's other terms (see `foreign`) are refused, not silently left out. Text alone, no images.
"""
import torch
from trl import GRPOTrainer

from dapo import dapo_loss
from grpo import grpo_loss
from gspo import gspo_loss


class LossTrainer(GRPOTrainer):
    def __init__(self, *args, loss="grpo", **kwargs):
        super().__init__(*args, **kwargs)
        config, self.our_loss = self.args, loss
        if loss not in ("grpo", "dapo", "gspo"):
            raise ValueError(f"loss must be grpo, dapo or gspo, got {loss!r}")
        if (loss != "grpo" and self.beta) or (loss == "grpo" and self.epsilon_low != self.epsilon_high):
            raise ValueError("only grpo has a KL term (beta), and it has one clip range (epsilon_high = epsilon)")
        foreign = {"delta": config.delta is not None, "entropy_coef": self._entropy_bonus_enabled,
                   "off_policy_mask_threshold": config.off_policy_mask_threshold is not None,
                   "top_entropy_quantile": config.top_entropy_quantile < 1, "router_aux_loss_coef": self.aux_loss_enabled,
                   "use_bias_correction_kl": self.beta and config.use_bias_correction_kl,
                   "vllm_importance_sampling_correction": self.use_vllm and config.vllm_importance_sampling_correction}
        if any(foreign.values()):
            raise ValueError(f"switch off what our losses have not: {', '.join(name for name in foreign if foreign[name])}")

    def _compute_loss(self, model, inputs):
        """This micro-batch's share of one optimizer step's loss; accelerate averages the gradients of the processes."""
        ids_BT, attended_BT = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1) for x in ("ids", "mask"))
        mask_BT = inputs["completion_mask"] * inputs.get("tool_mask", 1)  # not what tools or environments said
        score = self._get_per_token_logps_and_entropies
        logp_BT, entropy_BT, _ = score(model, ids_BT, attended_BT, mask_BT.shape[1], compute_entropy=True)
        old_logp_BT = inputs.get("old_per_token_logps")
        batch = logp_BT, logp_BT.detach() if old_logp_BT is None else old_logp_BT, inputs["advantages"], mask_BT
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["entropy"].append((entropy_BT * mask_BT).sum().item() / max(mask_BT.sum().item(), 1))
        micro_batches = self.current_gradient_accumulation_steps if mode == "train" else 1
        rows, clip = len(mask_BT) * micro_batches, {"eps_low": self.epsilon_low, "eps_high": self.epsilon_high}
        if self.our_loss == "grpo":
            kl = {"beta": self.beta, "ref_logp_BT": inputs.get("ref_per_token_logps")}
            return grpo_loss(*batch, num_trajectories=rows, eps=self.epsilon_low, **kl)
        if self.our_loss == "gspo":
            return gspo_loss(*batch, num_trajectories=rows, **clip)
        steps = self.args.steps_per_generation / micro_batches if mode == "train" else 1
        return dapo_loss(*batch, num_tokens=inputs["num_items_in_batch"] / self.accelerator.num_processes / steps, **clip)


def main(trainer=LossTrainer, **options):
    """Two steps of `trainer` on the game with one stage, where a completion is an episode. options: of GRPOConfig."""
    from datasets import Dataset
    from envs.keydoor import KeyDoor
    from rl.tiny import tiny
    from trl import GRPOConfig

    def reward(completions, task, **_):
        return [(env.reset(task=one, seed=0), env.step(said[0]["content"])[1])[1] for said, one in zip(completions, task)]

    env, tasks = KeyDoor(stages=1), KeyDoor.tasks("train", stages=1)
    data = [{"task": task, "prompt": [{"role": "system", "content": env.system_prompt},
                                      {"role": "user", "content": env.reset(task=task, seed=0)[0]}]} for task in tasks]
    config = {"output_dir": "runs/trl_loss", "max_steps": 2, "num_generations": 8, "per_device_train_batch_size": 8,
              "gradient_accumulation_steps": 4, "max_completion_length": 8, "learning_rate": 1e-3, "logging_steps": 1,
              "save_strategy": "no", "report_to": "none", "bf16": False, "activation_checkpointing": False}
    made = trainer(tiny(), reward, GRPOConfig(**config | options), Dataset.from_list(data))
    made.train()
    return made


if __name__ == "__main__":
    main()
