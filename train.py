"""The training loop: sample groups of episodes, turn rewards into advantages, step, evaluate, save.

    from train import Config, parse, train

It knows no algorithm. An algorithm's file hands in its loss, its advantages and, where it has them, its own way to
fill a batch (`collect`) and to shape rewards. One step:

    groups of one task and seed each  ->  episodes (rollout.py)  ->  rewards_N, advantages_N  ->  rows, micro-batches
    ->  log-probs (model.py)  ->  loss shares that add up to the batch's loss  ->  one optimizer step per mini-batch

Every random draw is a function of (seed, step): which tasks, the episodes' seeds, the sampling (whose order also depends
on --num-envs). So a run that is resumed from its checkpoint goes on as if it had never stopped.

What a run writes is in runs.py; what happens between episodes and an optimizer step is in learner.py.
"""
import logging
import os
import pickle
import random
import sys
import time
import warnings

from envs import BadInput, plain
from options import Config, check, option, parse  # noqa: F401 (this is where other files take them from)


def everything(sample, num_groups):
    """The plain way to fill a batch: sample once, keep all."""
    return sample(num_groups)


def train(config, algorithm, loss, advantages, *, clip, use_reference=False, sequence_ratio=False, collect=everything,
          shape_rewards=lambda rewards_N, lengths_N: rewards_N):
    """Run it; returns the run's folder.

    loss(batch) -> this micro-batch's share of the loss; batch has logp_BT, old_logp_BT, ref_logp_BT (None without
    `use_reference`), mask_BT, advantages_B, lengths_B, num_trajectories, num_tokens (both of the whole mini-batch).
    advantages(rewards_N, groups_N) -> advantages_N. clip: (below, above) 1, for the metric clip_fraction, which is over
    tokens or, with `sequence_ratio`, over rows. collect(sample, num_groups) -> the groups to train on.
    shape_rewards(rewards_N, lengths_N) -> rewards_N that the advantages see; metrics keep the environment's own.
    """
    import torch
    from tqdm import tqdm

    from enrich import EnrichedEnv, schedule_of, train_context
    from envs import make_env, parse_options
    from evaluate import evaluate, fixed_tasks, table
    from learner import log_ratios, update
    from model import freeze_reference, make_optimizer
    from rollout import refuse_if_nothing_fits, rollout
    from runs import (append, draw_curve, episode_metrics, interrupts, log_tokens, read, record, run_folder, save_checkpoint,
                      speed, tensorboard, write_config)
    from sampling import sampler
    from warmstart import warm_up

    if config.temperature == 0:
        raise BadInput("training needs --temperature above 0: greedy episodes of a group are all alike")
    options = parse_options(config.env_options)
    tasks = tasks_of(config, options)
    num_envs = min(config.num_envs, config.tasks_per_step * config.group)
    envs = [make_env(config.env, options) for _ in range(num_envs)]
    schedule = schedule_of(config)
    schedule.check(envs[0], tasks["train"], config.max_turns or envs[0].max_turns)
    enriched_envs = [EnrichedEnv(env, schedule) for env in envs]  # for training; evaluations get `envs`
    with run_folder(config, algorithm) as (folder, first_step), interrupts() as stopping:
        fresh = first_step == 1
        model, chat = load_policy(config, options, None if fresh else str(folder / "checkpoint"))
        write_config(folder, config, algorithm)
        limits = {"max_turns": config.max_turns or envs[0].max_turns, "max_new_tokens": config.max_new_tokens,
                  "max_context": config.max_context, "history": config.history, "step_timeout": config.step_timeout}
        act = sampler(model, chat, temperature=config.temperature, max_new_tokens=config.max_new_tokens)
        test_act = sampler(model, chat, temperature=config.eval_temperature, max_new_tokens=config.max_new_tokens)

        board = tensorboard(folder, first_step) if config.tensorboard else None

        def test(step, split, policy="trained"):
            torch.manual_seed(config.seed)
            result = evaluate(test_act, chat, envs, fixed_tasks(tasks[split], config.eval_episodes), **limits)
            append(folder / "evaluations.jsonl", {"step": step, "split": split, "policy": policy, **result})
            if board:
                board.add_scalar(f"success/{split}", result["success"], step)
            return result

        if fresh and config.warm_start:
            warm_up(config, model, chat, options, tasks["train"], limits)
        if fresh and use_reference and (config.warm_start or config.adapter):
            freeze_reference(model)
        optimizer = make_optimizer(model, config.lr, config.optimizer)
        if not fresh:
            optimizer.load_state_dict(torch.load(folder / "checkpoint" / "optimizer.pt", weights_only=True,
                                                 map_location="cpu"))  # where AdamW keeps its count of steps
            for group in optimizer.param_groups:  # the saved state holds the old one
                group["lr"] = config.lr
        success = test(0, "valid")["success"] if config.eval_every and fresh else None
        micro_batch_tokens, skipped = config.micro_batch_tokens, 0

        bar = tqdm(range(first_step, config.steps + 1), initial=first_step - 1, total=config.steps, disable=None)
        for step in bar:
            started, played = time.perf_counter(), []
            schedule.step = step
            requests_of = group_requests(config, step, tasks["train"], schedule.enriched)

            def sample(num_groups):
                new = rollout(act, chat, enriched_envs, requests_of(num_groups), **limits)
                played.extend(new)
                return [new[n:n + config.group] for n in range(0, len(new), config.group)]

            torch.manual_seed(random.Random(f"sampling {config.seed} {step}").randrange(2 ** 31))
            try:
                groups = collect(sample, config.tasks_per_step)
            except FloatingPointError as error:
                raise diverged(step, error) from error
            batch = [trajectory for group in groups for trajectory in group]
            played_at = time.perf_counter()
            if step == first_step:
                refuse_if_nothing_fits(played, config.max_context)
            if all(t.end == "env_error" for t in played):
                raise BadInput(f"step {step}: the environment broke in every episode, last with {played[-1].error}; "
                               f"mend it, then --resume if a checkpoint was saved before")

            rewards_N = torch.tensor([t.reward for t in batch], dtype=torch.float64)
            lengths_N = torch.tensor([t.length for t in batch])
            groups_N = torch.tensor([t.group for t in batch])
            advantages_N = advantages(shape_rewards(rewards_N, lengths_N), groups_N)
            if config.enrich_positive_only:
                advantages_N = advantages_N.clamp(min=0)
            try:
                context = train_context(config, batch, chat, model)
                shown = fixed_tasks(range(len(batch)), config.log_tokens)  # evenly spread
                ratios = log_ratios(model, [context[n] for n in shown], chat.pad_id, temperature=config.temperature,
                                    micro_batch_tokens=micro_batch_tokens)
                stats = update(model, optimizer, context, advantages_N, loss, pad_id=chat.pad_id, clip=clip, seed=step,
                               temperature=config.temperature, minibatches=config.minibatches,
                               micro_batch_tokens=micro_batch_tokens, use_reference=use_reference,
                               sequence_ratio=sequence_ratio, max_grad_norm=config.max_grad_norm,
                               gradient_checkpointing=config.gradient_checkpointing, importance_cap=config.importance_cap)
            except FloatingPointError as error:
                raise diverged(step, error) from error
            micro_batch_tokens = stats["micro_batch_tokens"]
            skipped = skipped + 1 if stats["skipped_steps"] == config.minibatches else 0
            if skipped == 5:  # the adapter is still what it was before the first of them
                save_checkpoint(folder, model, optimizer, step - 5)
                raise diverged(step, "the gradient was not finite in five steps in a row; the state before them is saved")
            metrics = {"step": step, **episode_metrics(played, config.group), "groups": len(groups), **stats,
                       **speed(played, stats["learn_tokens"], played_at - started, time.perf_counter() - played_at)}
            append(folder / "metrics.jsonl", metrics)
            for trajectory in played:
                append(folder / "rollouts.jsonl", record(step, trajectory))
            for n, ratios_T in zip(shown, ratios() if shown else []):
                log_tokens(folder / "tokens.jsonl", chat, {**record(step, batch[n]), "advantage": advantages_N[n].item()},
                           [(row.ids, row.mask) for row in context[n].rows], log_ratio=ratios_T)
            if config.eval_every and step % config.eval_every == 0:
                success = test(step, "valid")["success"]
            stop = stopping()
            if step % config.save_every == 0 or step == config.steps or stop:
                save_checkpoint(folder, model, optimizer, step)
            if stop:
                raise KeyboardInterrupt(f"stopped after step {step}, which is saved: the same command with --resume goes on")
            if not sys.stderr.isatty():  # no bar there
                print(f"step {step}/{config.steps} reward {metrics['reward']:.3f} success on valid tasks {success}", flush=True)
            bar.set_postfix(reward=f"{metrics['reward']:.2f}", success="-" if success is None else f"{success:.2f}")
            if board:
                for name, value in metrics.items():
                    board.add_scalar(name, value, step)

        model.save_pretrained(folder / "adapter", selected_adapters=["default"])
        base = next((row for row in read(folder / "evaluations.jsonl") if row["policy"] == "base"), None)
        if base is None:
            with model.disable_adapter():
                base = test(0, "test", policy="base")
        final = test(config.steps, "test")
        draw_curve([folder], folder / "curve.png")
        if board:
            board.close()
    for env in envs:
        env.close()
    trained = f"after {config.steps} steps" if config.steps else "after the warm start"
    print("\n" + table(" ".join([config.env, *config.env_options]), [("base model", base), (trained, final)]))
    if (folder / "report.html").exists():
        print(f"{folder}/report.html is of before: python report.py {folder} makes it anew")
    print(f"{folder}/ holds {', '.join(sorted(path.name for path in folder.iterdir()))}")
    return folder


def tasks_of(config, options) -> dict[str, list[str]]:
    """The tasks of each split. A full id in --tasks picks training tasks; evaluations take its name."""
    from envs import select_tasks

    names = [task.split("/")[0] for task in config.tasks]
    tasks = {split: select_tasks(config.env, split, config.tasks if split == "train" else names, options)
             for split in ("train", "valid", "test")}
    for split in tasks:
        if not tasks[split]:
            raise BadInput(f"{config.env} has no {split} tasks with these options: change --tasks or --env-options")
    return tasks


def group_requests(config, step, tasks, enriched=lambda group, rollout: False):
    """`requests_of(n)` -> the episodes of the next n groups of this step: a task and a seed for each group, every
    task once before any comes again."""
    from rollout import Request

    rng, order = random.Random(f"tasks {config.seed} {step}"), []

    def requests_of(num_groups):
        requests = []
        for _ in range(num_groups):
            group = requests_of.groups
            requests_of.groups += 1
            if group == len(order):
                order.extend(rng.sample(tasks, len(tasks)))
            seed = rng.randrange(2 ** 31)
            requests += [Request(order[group], group, seed, enriched(group, n)) for n in range(config.group)]
        return requests

    requests_of.groups = 0
    return requests_of


def diverged(step, error) -> BadInput:
    return BadInput(f"step {step}: {error}; lower --lr, and --resume if a checkpoint was saved before")


def load_policy(config, options, checkpoint=None):
    """(model with its adapter, Chat). What cannot be loaded is one line."""
    from model import adapter_base, add_lora, in_input_dtype, load_adapter, load_model
    from rollout import Chat
    from safetensors import SafetensorError

    name, folder = config.model, checkpoint or config.adapter
    trained_on = adapter_base(folder) if folder else None
    if name == "tiny":
        from tiny import tiny
        name = trained_on if os.path.isdir(trained_on or "") else tiny(config.env, options, config.tasks)
    if trained_on and os.path.basename(trained_on.rstrip("/")) != os.path.basename(name.rstrip("/")):
        raise BadInput(f"the adapter in {folder} was trained on {trained_on}, not on {name}: pass that as --model")
    try:
        base, tokenizer = load_model(name, config.bits)
        model = load_adapter(base, folder) if folder else add_lora(base, config.lora_rank, seed=config.seed)
        if checkpoint and os.path.isdir(os.path.join(checkpoint, "reference")):
            model.load_adapter(os.path.join(checkpoint, "reference"), "reference")
            model.set_adapter("default")  # PEFT 0.20 leaves it without gradients
            in_input_dtype(model)
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
        raise BadInput(f"cannot load the model {config.model!r}: {str(error).strip().splitlines()[0]}") from error
    if config.gradient_checkpointing:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, Chat(tokenizer, config.thinking, base.generation_config.eos_token_id)


def cli(main):
    """Run a script's main: what the user can mend is one line on stderr and exit code 2."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # says on every start that CPU kernels are not there
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing")  # old names, in peft and here
    try:
        main()
    except BadInput as error:
        print(plain(f"error: {error}"), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        print(str(stop) or "stopped: the same command with --resume goes on from what was saved last", file=sys.stderr)
        sys.exit(130)
    except FloatingPointError as error:
        print(f"error: {error}; lower --lr, and --resume if a checkpoint was saved before", file=sys.stderr)
        sys.exit(2)
    except (OSError, RuntimeError) as error:  # RuntimeError: what torch's writer says of a full disk
        if type(error).__name__ == "OutOfMemoryError":
            print("error: out of memory: lower --num-envs, and --resume if a checkpoint was saved before; or start with a lower "
                  "--max-context (python model.py --plan says what fits)", file=sys.stderr)
            sys.exit(2)
        if not any(words in str(error) for words in ("No space left", "Disk quota", "File too large")):
            raise
        print(f"error: the disk is full ({str(error).splitlines()[0]}): make room, then --resume", file=sys.stderr)
        sys.exit(2)
