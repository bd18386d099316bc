"""Feedback enrichment in TRL's multi-turn training: who outgrows one card goes on with TRL and accelerate.

    pip install -r examples/requirements.txt
    python -m examples.trl_enriched                                       # from the repository's root: two steps, on a CPU
    accelerate launch --num_processes 4 -m examples.trl_enriched          # on four cards (not run; see note 6)

Written for TRL 1.16, by its `rollout_func`: TRL hands over the prompts of this process, here the names of tasks, and gets
back ids, a mask and log-probs. So episodes are played by rl/rollout.py in EnrichedEnv, and losses, optimizer, processes and
checkpoints are TRL's. (`environment_factory`, its other way, lets a model act by tool calls; a policy here acts in text.)

1. The schedule's step is TRL's own count of optimizer steps, so it also holds after a resume.
2. The coin of a group is thrown by (seed, step, task): every process finds the same, wherever it plays the group's episodes.
3. `env_mask` is the mask made while sampling: observations and hints are context, never trained on. TRL has one row a
   completion, so `history` is "full", past hints are kept (in the paper, a hinted turn is a row of its own), and a
   chat template that drops earlier thinking is refused.
4. An episode whose environment broke has the reward None, which TRL leaves out of the baseline and gives advantage 0.
5. Evaluation by TRL is never enriched.
6. Tried by hand on two CPU processes (torchrun, with use_cpu=True and ddp_backend="gloo"), not on GPUs, DeepSpeed or FSDP.
"""
import random
from dataclasses import replace

from trl.models import unwrap_model_for_generation

from enrich import Schedule
from rl.rollout import Request, Row, rollout
from rl.sampling import sampler


def enriched_rollouts(make_env, schedule, chat, max_new_tokens=32, num_envs=32, **limits):
    """A `rollout_func` whose prompts are tasks of `make_env()`; `limits` as in rl.rollout.rollout."""
    envs = [make_env() for _ in range(num_envs)]

    def play(tasks, trainer):
        now = replace(schedule, step=trainer.state.global_step + 1, total_steps=trainer.state.max_steps)
        training, requests = trainer.model.training, []
        for n, task in enumerate(tasks):
            seed = random.Random(f"{now.seed} {now.step} {task}").randrange(2 ** 31)
            requests.append(Request(task, task, seed, enriched=training and now.enriched(task, n)))
        with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as policy:
            act = sampler(policy, chat, temperature=trainer.temperature, max_new_tokens=max_new_tokens)
            played = rollout(act, chat, now.wrap(envs), requests, max_new_tokens=max_new_tokens,
                             **{"max_turns": envs[0].max_turns, "keep_hints": True} | limits)
        if any(len(t.rows) > 1 for t in played):
            raise ValueError("an episode became several rows, and TRL holds one: this chat template changes earlier turns")
        nothing = Row([chat.pad_id] * 2, [0, 0], sampled_logp=[0.0] * 2)  # an episode that broke before its first action
        rows = [t.rows[0] if t.rows else nothing for t in played]
        starts = [max(row.mask.index(1) if 1 in row.mask else 1, 1) for row in rows]
        play.played = played
        return {"prompt_ids": [row.ids[:start] for row, start in zip(rows, starts)],
                "completion_ids": [row.ids[start:] for row, start in zip(rows, starts)],
                "env_mask": [row.mask[start:] for row, start in zip(rows, starts)],
                "logprobs": [row.sampled_logp[start:] for row, start in zip(rows, starts)],
                "outcome": [None if t.end == "env_error" else t.reward for t in played],
                "success": [t.success for t in played], "enriched": [t.enriched for t in played]}

    return play


def episode_reward(completions, outcome, success, enriched, log_metric, **_):
    log_metric("success", sum(success) / len(success))
    log_metric("enriched_fraction", sum(enriched) / len(enriched))
    return outcome


def main(schedule=None, **options):
    """Two steps of the built-in model on the built-in game. options: of GRPOConfig. Returns the trainer."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from envs.keydoor import KeyDoor
    from rl.chat import Chat
    from rl.model import add_lora, load_model
    from rl.tiny import tiny

    base, tokenizer = load_model(tiny())
    schedule = schedule or Schedule("hybrid", early=(1, 1), late=(2, 3))  # guidance in step 1, enrichment in step 2
    config = {"output_dir": "runs/trl_enriched", "max_steps": 2, "num_generations": 8, "per_device_train_batch_size": 8,
              "gradient_accumulation_steps": 4, "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no",
              "report_to": "none", "bf16": False, "activation_checkpointing": False}
    trainer = GRPOTrainer(  # or the LossTrainer of trl_loss.py, with our losses
        model=add_lora(base), processing_class=tokenizer, reward_funcs=episode_reward, args=GRPOConfig(**config | options),
        train_dataset=Dataset.from_list([{"prompt": task} for task in KeyDoor.tasks("train")]),
        rollout_func=enriched_rollouts(KeyDoor, schedule, Chat(tokenizer, end_ids=base.generation_config.eos_token_id)))
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
