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
import math
import os
import random
import re
import sys
import time
import warnings
from dataclasses import dataclass, field

from envs import BadInput


def option(default, help_text):
    """A field of Config with its help text."""
    how = {"default_factory": lambda: list(default)} if isinstance(default, list) else {"default": default}
    return field(**how, metadata={"help": help_text})


@dataclass
class Config:
    # What is trained on what
    env: str = option("keydoor", "environment: a file name in envs/, or your_module:YourEnv")
    env_options: list[str] = option([], "options of the environment, as key=value key=value")
    tasks: list[str] = option([], "only these tasks, by name or by full id (default: all)")
    model: str = option("tiny", "a model on the hub, a folder, or tiny (built in)")
    adapter: str = option("", "start from this LoRA adapter (a folder in PEFT's format)")
    bits: int = option(0, "weights of the base model: 4 (NF4), 16 (bf16), 32 (fp32); 0: bf16 on a GPU, else fp32")
    lora_rank: int = option(16, "rank of the LoRA adapter (alpha is twice that)")
    preset: str = option("", "24gb, 48gb or 80gb: bits, context, batches that fit on such a card; your own options win (plan.py)")
    # How long, where to
    seed: int = option(0, "seed of everything random")
    steps: int = option(60, "training steps: batches of episodes (0: the warm start alone)")
    out: str = option("", "the run's folder (default: runs/<env>__<algo>__<enrich>__<seed>)")
    resume: bool = option(False, "go on from the checkpoint in the run's folder")
    overwrite: bool = option(False, "delete what is in the run's folder first")
    # A batch
    tasks_per_step: int = option(16, "groups per step, one task each")
    group: int = option(8, "episodes per group")
    minibatches: int = option(1, "optimizer steps per batch of episodes; with 1, every update is on-policy")
    micro_batch_tokens: int = option(8192, "padded tokens in one forward pass; only rounding depends on it")
    # Episodes
    max_turns: int = option(0, "turns per episode at most (0: the environment's own limit)")
    max_new_tokens: int = option(32, "tokens per turn at most")
    max_context: int = option(2048, "tokens of prompt and action at most")
    history: str = option("full", "full: the whole conversation; window:N: past actions and the last N observations")
    temperature: float = option(1.0, "sampling temperature, in the log-probs too")
    thinking: bool = option(False, "let a model that can think do so (chat templates with enable_thinking)")
    num_envs: int = option(128, "episodes played at the same time")
    # Optimizer
    lr: float = option(1e-3, "learning rate (1e-3 suits tiny; the papers use 1e-6 for full weights, LoRA wants 1e-5 to 1e-4)")
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm")
    optimizer: str = option("adamw", "adamw or paged_adamw_8bit")
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass: slower, less memory")
    importance_cap: float = option(0.0, "weigh a token's gradient by the learner's probability over the sampler's, up to this "
                                        "(2 is usual; 0: off)")
    # Warm start
    warm_start: str = option("", "supervised training before step 1, on random (admissible play) or gold (known solutions)")
    warm_start_steps: int = option(16, "optimizer steps of the warm start")
    warm_start_batch: int = option(16, "rows (with full history, episodes) per optimizer step of the warm start")
    warm_start_lr: float = option(5e-4, "learning rate of the warm start")
    # Enriched feedback (enrich.py)
    enrich: str = option("none", "strategy: none, ag-early, ag-late, oe-early, oe-late, hybrid, or a control of enrich.py")
    enrich_probability: float = option(0.5, "chance that a group of episodes is enriched")
    enrich_early: str = option("1,3", "first and last turn of the early window")
    enrich_late: str = option("6,10", "first and last turn of the late window")
    enrich_switch: float = option(0.5, "share of the steps after which hybrid and reversed switch")
    enrich_mixed: bool = option(False, "a coin for each episode instead of each group (the paper's ablation)")
    enrich_anneal: bool = option(False, "ours: the chance falls linearly to 0 over training")
    enrich_positive_only: bool = option(False, "ours: negative advantages are set to 0, in every episode")
    enrich_train_context: str = option("as-sampled", "as-sampled, or ours: stripped or stripped-ratio (train without the hints)")
    # Evaluation and logs
    eval_every: int = option(10, "evaluate on valid tasks of the standard environment every so many steps (0: never)")
    eval_episodes: int = option(64, "tasks per evaluation, the same ones each time")
    eval_temperature: float = option(0.0, "temperature of evaluations (0: greedy)")
    save_every: int = option(10, "checkpoint every so many steps; the last step always")
    tensorboard: bool = option(False, "write TensorBoard files into the run's folder too")


def parse(config_class, argv=None, description=None):
    """The command line -> a checked config. Raises BadInput with one line; `--help` prints and leaves."""
    from transformers.hf_argparser import HfArgumentParser

    parser = HfArgumentParser(config_class, description=description, allow_abbrev=False)

    def refuse(message):
        raise BadInput(f"{message} (see --help)")

    parser.error = refuse
    config, unknown = parser.parse_args_into_dataclasses(args=argv, return_remaining_strings=True)
    if unknown:
        refuse(f"unknown option {' '.join(unknown)}")
    if config.preset:
        from plan import apply_preset
        apply_preset(config, sys.argv[1:] if argv is None else argv)
    check(config)
    return config


def check(config):
    """Refuse what cannot work, before anything is loaded or written."""
    at_least = {"steps": 0, "group": 2, "tasks_per_step": 1, "minibatches": 1, "micro_batch_tokens": 1, "lora_rank": 1,
                "max_turns": 0, "max_new_tokens": 1, "max_context": 2, "num_envs": 1, "eval_every": 0,
                "eval_episodes": 1, "save_every": 1, "warm_start_steps": 1, "warm_start_batch": 1}
    for name, least in at_least.items():
        if getattr(config, name) < least:
            why = ": an advantage compares the episodes of a group" if name == "group" else ""
            raise BadInput(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(config, name)}{why}")
    for name in ("lr", "max_grad_norm", "warm_start_lr"):
        if not 0 < getattr(config, name) < math.inf:
            raise BadInput(f"--{name.replace('_', '-')} must be above 0, got {getattr(config, name)}")
    if not 0 <= config.importance_cap < math.inf:
        raise BadInput(f"--importance-cap must be 0 (off) or above, got {config.importance_cap}")
    for name in ("temperature", "eval_temperature"):
        if not 0 <= getattr(config, name) < math.inf:
            raise BadInput(f"--{name.replace('_', '-')} must be 0 (greedy) or above, got {getattr(config, name)}")
    choices = {"bits": (0, 4, 16, 32), "optimizer": ("adamw", "paged_adamw_8bit"), "warm_start": ("", "random", "gold"),
               "enrich_train_context": ("as-sampled", "stripped", "stripped-ratio")}
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            raise BadInput(f"--{name.replace('_', '-')} must be one of {', '.join(str(a) or 'nothing' for a in allowed)}, "
                           f"got {getattr(config, name)}")
    if not re.fullmatch(r"full|window:[1-9][0-9]*", config.history):
        raise BadInput(f"--history must be full or window:N, got {config.history!r}")
    if config.steps == 0 and not config.warm_start:
        raise BadInput("--steps 0 trains nothing: pass --warm-start random or gold, or more steps")
    if config.resume and config.overwrite:
        raise BadInput("--resume and --overwrite exclude each other")


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
    from learner import update
    from model import freeze_reference, make_optimizer
    from rollout import refuse_if_nothing_fits, rollout
    from runs import (append, draw_curve, episode_metrics, read, record, run_folder, save_checkpoint, speed, tensorboard,
                      write_config)
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
    with run_folder(config, algorithm) as (folder, first_step):
        fresh = first_step == 1
        model, chat = load_policy(config, options, None if fresh else str(folder / "checkpoint"))
        write_config(folder, config, algorithm)
        limits = {"max_turns": config.max_turns or envs[0].max_turns, "max_new_tokens": config.max_new_tokens,
                  "max_context": config.max_context, "history": config.history}
        act = sampler(model, chat, temperature=config.temperature, max_new_tokens=config.max_new_tokens)
        test_act = sampler(model, chat, temperature=config.eval_temperature, max_new_tokens=config.max_new_tokens)

        board = tensorboard(folder) if config.tensorboard else None

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
                                                 map_location=model.device))
            for group in optimizer.param_groups:  # the saved state holds the old one
                group["lr"] = config.lr
        success = test(0, "valid")["success"] if config.eval_every and fresh else None
        micro_batch_tokens = config.micro_batch_tokens

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
                stats = update(model, optimizer, context, advantages_N, loss, pad_id=chat.pad_id, clip=clip, seed=step,
                               temperature=config.temperature, minibatches=config.minibatches,
                               micro_batch_tokens=micro_batch_tokens, use_reference=use_reference,
                               sequence_ratio=sequence_ratio, max_grad_norm=config.max_grad_norm,
                               gradient_checkpointing=config.gradient_checkpointing, importance_cap=config.importance_cap)
            except FloatingPointError as error:
                raise diverged(step, error) from error
            micro_batch_tokens = stats["micro_batch_tokens"]
            metrics = {"step": step, **episode_metrics(played, config.group), "groups": len(groups), **stats,
                       **speed(played, stats["learn_tokens"], played_at - started, time.perf_counter() - played_at)}
            append(folder / "metrics.jsonl", metrics)
            for trajectory in played:
                append(folder / "rollouts.jsonl", record(step, trajectory))
            if config.eval_every and step % config.eval_every == 0:
                success = test(step, "valid")["success"]
            if step % config.save_every == 0 or step == config.steps:
                save_checkpoint(folder, model, optimizer, step)
            if not sys.stderr.isatty():  # no bar there
                print(f"step {step}/{config.steps} reward {metrics['reward']:.3f} success {success}", flush=True)
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
    print("\n" + table(config.env, [("base model", base), (trained, final)]))
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
            in_input_dtype(model)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise BadInput(f"cannot load the model {config.model!r}: {str(error).strip().splitlines()[0]}") from error
    if config.gradient_checkpointing:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, Chat(tokenizer, config.thinking, base.generation_config.eos_token_id)


def cli(main):
    """Run a script's main: what the user can mend is one line on stderr and exit code 2."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # says on every start that CPU kernels are not there
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")  # peft's use of an old name
    try:
        main()
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
