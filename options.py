"""The options of a run: a dataclass with a help text for each, read from the command line.

    from options import Config, parse
    config = parse(Config, ["--steps", "3"])

An algorithm's file adds its own fields in a subclass. What cannot work is refused before anything is loaded or written.
"""
import math
import re
import sys
from dataclasses import dataclass, field

from envs import BadInput


def option(default, help_text):
    """A field of Config with its help text."""
    how = {"default_factory": lambda: list(default)} if isinstance(default, list) else {"default": default}
    return field(**how, metadata={"help": help_text})


PRESETS = {  # what plan.py says for Qwen/Qwen3-4B, rank 16, at this context
    "24gb": {"bits": 16, "max_context": 4096, "num_envs": 14, "micro_batch_tokens": 36_864, "gradient_checkpointing": True},
    "48gb": {"bits": 16, "max_context": 4096, "num_envs": 38, "micro_batch_tokens": 65_536, "gradient_checkpointing": True},
    "80gb": {"bits": 16, "max_context": 4096, "num_envs": 70, "micro_batch_tokens": 12_288, "gradient_checkpointing": False}}


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
    out: str = option("", "the run's folder (default: runs/<env>__<algo>__<enrich, of distill.py mode>__<seed>)")
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
    step_timeout: float = option(120.0, "seconds that an environment may take for one step or reset (0: no limit)")
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
    enrich: str = option("none", "strategy: none, ag-early, ag-late, oe-early, oe-late, hybrid; ours: ag-always, oe-always, both, "
                                "reversed, wrong-hint (enrich.py)")
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
    log_tokens: int = option(0, "episodes a step whose tokens, with advantage and log-ratio, go into tokens.jsonl")
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
        apply_preset(config, sys.argv[1:] if argv is None else argv)
    check(config)
    return config


def check(config):
    """Refuse what cannot work, before anything is loaded or written."""
    at_least = {"steps": 0, "group": 2, "tasks_per_step": 1, "minibatches": 1, "micro_batch_tokens": 1, "lora_rank": 1,
                "max_turns": 0, "max_new_tokens": 1, "max_context": 2, "num_envs": 1, "eval_every": 0,
                "eval_episodes": 1, "save_every": 1, "warm_start_steps": 1, "warm_start_batch": 1, "log_tokens": 0}
    for name, least in at_least.items():
        if getattr(config, name) < least:
            why = ": an advantage compares the episodes of a group" if name == "group" else ""
            raise BadInput(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(config, name)}{why}")
    for name in ("lr", "max_grad_norm", "warm_start_lr"):
        if not 0 < getattr(config, name) < math.inf:
            raise BadInput(f"--{name.replace('_', '-')} must be above 0, got {getattr(config, name)}")
    for name, zero in (("temperature", "greedy"), ("eval_temperature", "greedy"), ("importance_cap", "off"),
                       ("step_timeout", "no limit")):
        if not 0 <= getattr(config, name) < math.inf:
            raise BadInput(f"--{name.replace('_', '-')} must be 0 ({zero}) or above, got {getattr(config, name)}")
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


def apply_preset(config, argv):
    """Set the fields of a train.Config that --preset speaks of and `argv` does not. For another model, context, rank or
    optimizer than it was made for they are planned anew, and a line says what came out."""
    if config.preset not in PRESETS:
        raise BadInput(f"--preset must be one of {', '.join(PRESETS)}, got {config.preset!r}")
    given = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in argv if word.startswith("--")}
    if config.model == "tiny":
        raise BadInput("--preset is for a model of billions of parameters: pass --model, or leave it out")
    preset = dict(PRESETS[config.preset])
    if "max_context" in given:
        preset["max_context"] = config.max_context
    from plan import KNOWN, as_words, config_of, options_of, plan

    shape = config_of(config.model)
    made_for = all(getattr(shape, key) == value for key, value in KNOWN["Qwen/Qwen3-4B"].items())
    if not made_for or preset["max_context"] != PRESETS[config.preset]["max_context"] or config.lora_rank != 16 \
            or config.optimizer != "adamw" or "bits" in given:
        found = plan(config.model, float(config.preset.removesuffix("gb")), rank=config.lora_rank, optimizer=config.optimizer,
                     bits=config.bits if "bits" in given and config.bits else None, max_context=preset["max_context"])
        preset |= options_of(found)
        print(f"--preset {config.preset} was made for Qwen/Qwen3-4B; planned anew for {config.model}: {as_words(found)}",
              file=sys.stderr)
    for name, value in preset.items():
        if name not in given:
            setattr(config, name, value)
