"""The training loop: sample groups of episodes, turn rewards into advantages, update, evaluate, save.

    from rl.train import Algorithm, train
    train(config, Algorithm(**grpo.algorithm(config)))        # config: rl.options.Config with the algorithm's own options

It knows no algorithm: an `Algorithm` is made by the algorithm's file. One step:

    groups of one task and seed each  ->  episodes (rollout.py)  ->  rewards_N, advantages_N  ->  rows, micro-batches
    ->  log-probs and loss shares that add up to the batch's loss (learner.py)  ->  one optimizer step per mini-batch

Every random draw is a function of (seed, step): which tasks, the episodes' seeds, the sampling (whose order also depends
on --num-envs). So a run that is resumed from its checkpoint goes on as if it had never stopped.
"""
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tqdm import tqdm

from envs import BadInput, make_env, parse_options, split_tasks
from rl.learner import UpdateOptions, update
from rl.logs import append, episode_metrics, record, save_adapter, speed, tensorboard
from rl.options import limits_of, schedule_of_run
from rl.policy import first_policy
from rl.results import Evaluations
from rl.rollout import Request, refuse_if_hopeless, rollout
from rl.runs import interrupts, run_folder, save_checkpoint
from rl.sampling import sampler
from rl.stripped import train_context
from rl.tokens import log_step_tokens, watch


@dataclass
class Algorithm:
    """What the loop asks of an algorithm. N trajectories; a group is a list of them, episodes of one task and seed."""
    name: str
    loss: Callable  # MicroBatch (learner.py) -> its share of the loss, a scalar
    advantages: Callable  # rewards_N, groups_N -> advantages_N
    clip: tuple[float, float]  # (below, above) 1, for the metric clip_fraction
    use_reference: bool = False  # does the loss need the reference's log-probs?
    use_entropy: bool = False  # does it need the entropy of rows without advantage?
    ratio: str = "token"  # what has one: a token, a row or a trajectory (all its rows)
    fill: Callable = lambda sample, num_groups: sample(num_groups)  # -> the groups to train on; sample(n) plays n new ones
    shape_rewards: Callable = lambda rewards_N, lengths_N: rewards_N  # -> what the advantages see; metrics keep rewards_N


def diverged(step, why) -> BadInput:
    return BadInput(f"step {step}: {why}; lower --lr, and --resume if a checkpoint was saved before")


class Step:
    """Runs training steps, for `train` and for the Funnel's Phase II (funnel/rounds.py).

    It keeps, from step to step, the tokens of a micro-batch (fewer once memory ran out) and how many steps in a row had no finite
    gradient.
    """

    def __init__(self, config, algorithm, model, optimizer, chat):
        self.config, self.algorithm, self.model, self.optimizer, self.chat = config, algorithm, model, optimizer, chat
        self.micro_batch_tokens, self.skipped = config.micro_batch_tokens, 0

    def play(self, step, tasks, episodes, enriched=None, stream=""):
        """(groups to train on, all episodes that were played). episodes(requests) -> trajectories; enriched(group, n) -> does
        episode n of the group get hints? stream: sets the draws of one use of a step apart from those of another."""
        config, played = self.config, []
        rng, order = random.Random(f"tasks {config.seed} {step}"), []

        def sample(num_groups):
            first, requests = len(played) // config.group, []
            for group in range(first, first + num_groups):  # a task and a seed each; no task comes again before all have come
                if group == len(order):
                    order.extend(rng.sample(tasks, len(tasks)))
                seed = rng.randrange(2 ** 31)
                requests += [Request(order[group], group, seed, bool(enriched and enriched(group, n))) for n in range(config.group)]
            new = episodes(requests)
            played.extend(new)
            return [new[n:n + config.group] for n in range(0, len(new), config.group)]

        torch.manual_seed(random.Random(f"sampling {config.seed} {stream}{step}").randrange(2 ** 31))
        try:
            groups = self.algorithm.fill(sample, config.tasks_per_step)
        except FloatingPointError as error:
            raise diverged(step, error) from error
        refuse_if_hopeless(played, config.max_context, f"step {step}: ")
        return groups, played

    def advantages(self, batch):
        """The advantage of each trajectory, [N]."""
        invalid_N = [sum(not turn.valid for turn in t.turns) / max(len(t.turns), 1) for t in batch]
        rewards_N = torch.tensor([t.reward - self.config.invalid_action_penalty * invalid for t, invalid in zip(batch, invalid_N)],
                                 dtype=torch.float64)
        lengths_N, groups_N = torch.tensor([t.length for t in batch]), torch.tensor([t.group for t in batch])
        return self.algorithm.advantages(self.algorithm.shape_rewards(rewards_N, lengths_N), groups_N)

    def learn(self, step, batch, advantages_N, more=None) -> dict:
        """The optimizer steps of one training step (`update` says what `more` is); returns the metrics."""
        config = self.config
        how = UpdateOptions(self.chat.pad_id, config.temperature, config.minibatches, self.micro_batch_tokens,
                            config.max_grad_norm, config.gradient_checkpointing, config.importance_cap, seed=step)
        try:
            stats = update(self.model, self.optimizer, batch, advantages_N, self.algorithm, how, more)
        except FloatingPointError as error:
            raise diverged(step, error) from error
        self.micro_batch_tokens = stats["micro_batch_tokens"]
        self.skipped = 0 if stats["optimizer_steps"] else self.skipped + bool(stats["skipped_steps"])
        return stats

    def refuse_to_go_on(self, step, save=lambda step: None):
        """Stop after five steps in a row without a finite gradient: the weights are those from before the first of them."""
        if self.skipped == 5:
            save(step - 5)
            raise diverged(step, "the gradient was not finite in five steps in a row; the state before them is kept")


def train(config, algorithm):
    """Run it; returns the run's folder. config: rl.options.Config, with the algorithm's own options."""
    # Environments and tasks; hints go into the environments of training alone
    options = parse_options(config.env_options)
    tasks = split_tasks(config.env, config.tasks, options)
    envs = [make_env(config.env, options) for _ in range(min(config.num_envs, config.tasks_per_step * config.group))]
    limits = limits_of(config, envs[0])
    schedule = schedule_of_run(config)
    if why := schedule.why_no_hints(envs[0], tasks["train"], limits["max_turns"]):
        raise BadInput(why)
    with (run_folder(config, algorithm.name) as (folder, first_step), interrupts() as stopping,
          tensorboard(folder, first_step, config.tensorboard) as to_board):
        # The policy, and its success before training
        model, chat, optimizer = first_policy(config, algorithm, options, folder, first_step, tasks["train"], limits)
        act, test_act = (sampler(model, chat, temperature=temperature, max_new_tokens=config.max_new_tokens,
                                 thinking_budget=config.thinking_budget)
                         for temperature in (config.temperature, config.eval_temperature))
        evaluations = Evaluations(config, folder, test_act, chat, envs, tasks, limits, to_board)
        if config.eval_every and first_step == 1:
            evaluations.while_training(0, model)
        trainer = Step(config, algorithm, model, optimizer, chat)
        bar = tqdm(range(first_step, config.steps + 1), initial=first_step - 1, total=config.steps, disable=None)
        for step in bar:
            # Play: groups of episodes, of one task and one seed each, until the algorithm has its batch
            started, now = time.perf_counter(), schedule.at(step)
            shown, enriched = (envs, None) if config.enrich == "none" else (now.wrap(envs), now.enriched)
            groups, played = trainer.play(
                step, tasks["train"], lambda requests: rollout(act, chat, shown, requests, **limits), enriched)
            played_at = time.perf_counter()

            # Advantages: how far each episode stands out in its group
            batch = [trajectory for group in groups for trajectory in group]
            advantages_N = trainer.advantages(batch)
            if config.enrich_positive_only:
                advantages_N = advantages_N.clamp(min=0)

            # Update: optimizer steps on the rows that were sampled
            if config.enrich_train_context != "as-sampled":
                batch = train_context(config, batch, chat, model)
            watched = watch(config, model, batch, chat, trainer.micro_batch_tokens) if config.log_tokens else None
            stats = trainer.learn(step, batch, advantages_N)
            trainer.refuse_to_go_on(step, lambda last: save_checkpoint(folder, model, optimizer, last))

            # Log
            metrics = {"step": step, **episode_metrics(played, config.group), "groups": len(groups), **stats,
                       **speed(played, stats["learn_tokens"], played_at - started, time.perf_counter() - played_at)}
            append(folder / "metrics.jsonl", metrics)
            for trajectory in played:
                append(folder / "rollouts.jsonl", record(step, trajectory))
            if watched:
                log_step_tokens(folder / "tokens.jsonl", chat, step, batch, advantages_N, watched)

            # Evaluate, without hints
            best = config.eval_every and step % config.eval_every == 0 and evaluations.while_training(step, model)

            # Save; Ctrl-C ends the run here
            stop = stopping()
            if step % config.save_every == 0 or step == config.steps or stop or best:
                save_checkpoint(folder, model, optimizer, step)
            if config.keep_every and step % config.keep_every == 0:
                save_adapter(model, folder / "adapters" / f"{step:06d}")
            if stop:
                raise KeyboardInterrupt(f"stopped after step {step}, which is saved: the same command with --resume goes on")
            if not sys.stderr.isatty():  # no bar there
                print(f"step {step}/{config.steps} reward {metrics['reward']:.3f} success on {config.eval_split} tasks "
                      f"{evaluations.last}", flush=True)
            bar.set_postfix(reward=f"{metrics['reward']:.2f}", success=evaluations.last)
            to_board(metrics, step)

        print(f"\n{evaluations.at_the_end(model)}")
    for env in envs:
        env.close()
    if (folder / "report.html").exists():
        print(f"{folder}/report.html shows an earlier state of the run: python report.py {folder} makes it anew")
    print(f"{folder}/ holds {', '.join(sorted(path.name for path in folder.iterdir()))}")
    return folder
