"""Warm start: supervised training on admissible play or on gold paths, masked to the actions.

It is the agent-side alternative to enriching the environment (arXiv 2609.08404 compares with it in spirit), and what
a small model needs before its actions parse at all. `random` teaches the format and not the way: every action is
drawn from the admissible ones, and in half of the episodes the observation names it first, in the words of the
environment's hints, so that the model learns to follow a hint. `gold` plays the environment's known solution.

    python grpo.py --model DIR --warm-start random --warm-start-steps 16
"""
import random

import torch
from tqdm import tqdm

from envs import BadInput, Env, make_env
from rl.learner import add_gradient, in_micro_batches, pad, token_logps
from rl.rollout import Request, rollout
from rl.thinking import closing_ids


class Play(Env):
    """An environment that also says what its scripted player does next, in `planned`."""

    def __init__(self, env, kind: str, named_share: float):
        self.env, self.kind, self.named_share, self.planned = env, kind, named_share, None

    def reset(self, *, task, seed):
        self.rng = random.Random(f"play {task} {seed}")
        self.named = self.kind == "random" and self.rng.random() < self.named_share
        observation, info = self.env.reset(task=task, seed=seed)
        self.system_prompt, self.tools = self.env.system_prompt, self.env.tools
        observation = self._plan(observation, info)
        if self.planned is None:
            raise BadInput(f"the environment knows no gold actions for {task}; use --warm-start random")
        return observation, info

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        if not (terminated or truncated):
            observation = self._plan(observation, info)
        return observation, reward, terminated, truncated or self.planned is None, info

    def _plan(self, observation, info):
        if self.kind == "gold":
            self.planned = self.env.gold_action()  # None where the known solution is at its end: then stop
            return observation
        admissible = info.get("admissible") or self.env.admissible_actions()
        if not admissible:
            raise BadInput("this environment lists no admissible actions; use --warm-start gold")
        self.planned = self.rng.choice(admissible)
        return f"{observation}\n{self.env.phrase([self.planned])}" if self.named else observation


def turn_end(chat) -> int:
    """The token that the chat template ends a turn with, so that an episode stays one row; the tokenizer's end token where sampling
    does not stop at that one."""
    rendered = chat.render((("user", "."), ("assistant", "\ue000"), ("user", "\ue001")))
    found = chat.special.search(rendered.partition("\ue000")[2].partition("\ue001")[0])
    end_id = chat.added[found[0]] if found else None
    return end_id if end_id in chat.end_ids else chat.tokenizer.eos_token_id


def play(make_env, chat, tasks, kind: str, *, seed: int, max_turns: int, named_share: float = 0.5, **limits):
    """One scripted episode per task -> trajectories, their rows recorded as in `rollout`."""
    if kind not in ("random", "gold"):
        raise BadInput(f"warm start must be random or gold, got {kind!r}")
    env, end_id = Play(make_env(), kind, named_share), turn_end(chat)
    closing = closing_ids(chat) if chat.opened else []  # thinking that the template has opened stays empty

    def act(prompts):  # one environment, so one prompt at a time, or none when its episode has ended
        return [[*closing, *chat.text_ids(env.planned), end_id] for _ in prompts]

    return rollout(act, chat, [env], [Request(task, seed=seed + n) for n, task in enumerate(tasks)],
                   max_turns=max_turns, **limits)


def supervise(model, rows, pad_id, *, steps: int, batch: int, lr: float, seed: int, micro_batch_tokens: int = 8192,
              gradient_checkpointing: bool = False, progress=lambda step, loss: None):
    """Minimise the mean negative log-prob of the masked tokens over random batches of rows; returns the last loss."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    rng, value = random.Random(f"supervise {seed}"), 0.0
    model.train(gradient_checkpointing)
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, step / max(1, min(10, steps // 5)), (steps + 1 - step) / (0.3 * steps))  # rise, hold, fall
        drawn = rng.sample(rows, min(batch, len(rows)))
        tokens, shares = sum(sum(row.mask) for row in drawn), []

        def work(pairs):
            ids_BT, mask_BT = pad([row for row, _ in pairs], pad_id, model.device)
            share = -token_logps(model, ids_BT, mask_BT)[0].sum() / tokens
            add_gradient(share, parameters)
            shares.append(share.item())

        optimizer.zero_grad(set_to_none=True)
        micro_batch_tokens = in_micro_batches([(row, None) for row in drawn], micro_batch_tokens, work)
        value = sum(shares)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        progress(step, value)
    model.eval()
    return value


def warm_up(config, model, chat, options, tasks, limits):
    """Supervised steps on scripted play of training tasks, before step 1."""
    env = make_env(config.env, options)
    needed, rows = config.warm_start_steps * config.warm_start_batch, []
    drawn = random.Random(f"warm start {config.seed}").choices(tasks, k=needed)
    for n in range(0, needed, config.warm_start_batch):  # a windowed history makes several rows an episode
        if len(rows) < needed:
            rows += [row for t in play(lambda: env, chat, drawn[n:n + config.warm_start_batch], config.warm_start,
                                       seed=config.seed + n, **limits) for row in t.rows]
    env.close()
    with tqdm(total=config.warm_start_steps, desc=f"warm start ({config.warm_start})", disable=None) as bar:
        supervise(model, rows, chat.pad_id, steps=config.warm_start_steps, batch=config.warm_start_batch,
                  lr=config.warm_start_lr, seed=config.seed, micro_batch_tokens=config.micro_batch_tokens,
                  gradient_checkpointing=config.gradient_checkpointing,
                  progress=lambda step, loss: (bar.update(), bar.set_postfix(loss=f"{loss:.3f}")))
