"""TRL's side of bench.py: its GRPOTrainer on the model, texts and rows of bench_ours.py.

learner: `compute_loss` (loss_type "grpo", beta 0) on the rows, the observations masked by `tool_mask`, in batches of
`peer_rows`; backward, clipping and AdamW step as on our side.
rollout: `_generate_and_score_completions`, all that the trainer does before a loss: its multi-turn loop over an
`environment_factory` with plain `generate`. No model here writes tool calls, so its parser of answers is replaced by one
that takes every action for a call; the loop itself is untouched.

The adapter is PEFT's as it comes. A bf16 model runs under TRL's default, autocast to bf16, unless --no-peer-autocast.
"""
import os
import tempfile

import torch
from peft import LoraConfig, get_peft_model

from rl.learner import make_optimizer
from tools.bench_ours import make_rows, signs, text_of


def add_lora(model, rank):
    """The weights of rl.model.add_lora, computed with as PEFT does."""
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, bias="none",
                                            target_modules="all-linear", task_type="CAUSAL_LM")).eval()


def make_trainer(how, model, tokenizer, rows):
    """A GRPOTrainer for `rows` rows a step, in batches of `how.peer_rows`."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from datasets import Dataset
    from trl.trainer import grpo_trainer

    grpo_trainer.parse_response = lambda *_, **__: {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "act", "arguments": {}}}]}
    tokenizer.response_template = {}  # TRL knows no parser for TEMPLATE and would refuse it

    class PeerEnv:
        made, observation = 0, ""

        def __init__(self):
            PeerEnv.made += 1
            self._reward = float(PeerEnv.made % 2)

        def reset(self, **_):
            return None

        def act(self) -> str:
            """Act."""
            return PeerEnv.observation

        def get_reward(self):
            return self._reward

    def length(text):
        return len(tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True,
                                                 return_dict=False))

    groups = range(max(how.episodes // how.group, 1))
    prompts = [[{"role": "user", "content": text_of(length, how.prompt_tokens, group)}] for group in groups]
    batch, autocast = min(how.peer_rows, rows), how.peer_autocast and model.dtype == torch.bfloat16
    args = grpo_trainer.GRPOConfig(
        output_dir=tempfile.gettempdir(), report_to="none", use_cpu=not torch.cuda.is_available(), bf16=autocast,
        loss_type="grpo", beta=0.0, temperature=1.0, per_device_train_batch_size=batch, num_generations=how.group,
        gradient_accumulation_steps=rows // batch, gradient_checkpointing=how.checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False}, max_completion_length=10 ** 6,
        max_tool_calling_iterations=how.turns - 1,
        generation_kwargs={"max_new_tokens": how.new_tokens, "eos_token_id": [model.config.vocab_size]})
    trainer = grpo_trainer.GRPOTrainer(model=model, args=args, train_dataset=Dataset.from_dict({"prompt": prompts}),
                                       processing_class=tokenizer, environment_factory=PeerEnv)
    trainer.eos_token_ids = [model.config.vocab_size]
    trainer.current_gradient_accumulation_steps = rows // batch
    trainer.inputs = [{"prompt": prompt} for prompt in prompts for _ in range(how.group)]
    PeerEnv.observation = text_of(lambda text: len(trainer._get_tool_suffix_ids(
        [{"role": "tool", "name": "act", "content": text}])), how.observation_tokens)
    model.train()
    return trainer


def optimizer_step(how, trainer, model):
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer, size = make_optimizer(model, 1e-6), trainer.args.per_device_train_batch_size

    def learn(inputs):
        optimizer.zero_grad(set_to_none=True)
        for start in range(0, len(inputs["completion_ids"]), size):
            part = {key: value[start:start + size] for key, value in inputs.items()
                    if isinstance(value, torch.Tensor) and value.dim()}
            trainer.accelerator.backward(trainer.compute_loss(model, part))
        torch.nn.utils.clip_grad_norm_(trainable, 1e9)
        optimizer.step()

    return learn


def learner_work(how, model, tokenizer):
    rows = make_rows(how, model)
    learn = optimizer_step(how, make_trainer(how, model, tokenizer, len(rows)), model)
    ids_BT = torch.tensor([t.rows[0].ids for t in rows], device=model.device)
    mask_BT = torch.tensor([t.rows[0].mask for t in rows], device=model.device)
    prompt = rows[0].rows[0].mask.index(1)
    inputs = {"prompt_ids": ids_BT[:, :prompt], "completion_ids": ids_BT[:, prompt:], "tool_mask": mask_BT[:, prompt:],
              "prompt_mask": torch.ones_like(ids_BT[:, :prompt]), "completion_mask": torch.ones_like(ids_BT[:, prompt:]),
              "advantages": signs(how.rows).to(model.device)}
    return lambda: learn(inputs)


def rollout_work(how, model, tokenizer, learns=False):
    trainer = make_trainer(how, model, tokenizer, how.episodes)
    learn = optimizer_step(how, trainer, model)

    def work():
        inputs = trainer._generate_and_score_completions(trainer.inputs)
        if learns:
            learn(inputs)
        return {"sampled": int((inputs["tool_mask"] * inputs["completion_mask"]).sum()),
                "positions": int(inputs["prompt_mask"].sum() + inputs["completion_mask"].sum())}

    return work


def step_work(how, model, tokenizer):
    return rollout_work(how, model, tokenizer, learns=True)
