"""The options of the programs: dataclasses with a help text for each field, read from the command line.

    from rl.options import parse
    config = parse(Options, argv, "Train with ...")      # Options: the program's own, beside the common ones

`Playing` is what every program takes that plays episodes with a policy, `Learning` is that and what a training run takes, `Config`
what grpo.py, dapo.py and gspo.py share. What cannot work is refused before anything is loaded or written.
"""
import math
import re
import sys
from dataclasses import dataclass, field, make_dataclass
from datetime import datetime

from enrich import Schedule
from envs import BadInput, env_class
from rl.presets import PRESETS, preset_for
from rl.rollout import HISTORY
from rl.runs import OneLine


def option(default, help_text):
    """A field with its help text."""
    how = {"default_factory": lambda: list(default)} if isinstance(default, list) else {"default": default}
    return field(**how, metadata={"help": help_text})


@dataclass
class Environment:
    env: str = option("keydoor", "environment: a file name in envs/, or your_module:YourEnv")
    env_options: list[str] = option([], "options of the environment, as key=value key=value")
    tasks: list[str] = option([], "only these tasks, by name or by full id (none given: all)")
    max_turns: int = option(0, "turns per episode at most (0: the environment's own limit)")


@dataclass
class Playing(Environment):
    model: str = option("tiny", "a model on the hub, a folder, or tiny (built in)")
    adapter: str = option("", "start from this LoRA adapter (a folder in PEFT's format)")
    bits: int = option(0, "weights of the base model: 4 (NF4), 16 (bf16), 32 (fp32); 0: bf16 on a GPU, else fp32")
    preset: str = option("", "24gb, 48gb or 80gb: bits, context, batches that fit on such a card; your own options win (plan.py)")
    seed: int = option(0, "seed of everything random")
    # These three: alfworld and searchqa have other defaults, in the `defaults` of their environments
    max_new_tokens: int = option(32, "tokens per turn at most")
    max_context: int = option(2048, "tokens of a prompt plus --max-new-tokens at most")
    history: str = option("full", "full: the whole conversation; window:N: of the past observations the first and the last N, with "
                                  "the current one and all actions; recent:N: the first observation and the last N turns alone")
    thinking: bool = option(False, "let a model that can think do so (chat templates with enable_thinking)")
    thinking_budget: int = option(0, "tokens of thinking per turn; then its end is written into the answer (0: off)")
    num_envs: int = option(128, "parallel episodes")
    step_timeout: float = option(120.0, "seconds that an environment may take for one step or reset (0: no limit)")
    eval_episodes: int = option(64, "tasks per evaluation, the same ones each time")
    # No option: when the run began, to the second; what a chat template prints as today's date
    started: str = field(default_factory=lambda: datetime.now().isoformat(timespec="seconds"), init=False)


@dataclass
class Hints:
    enrich: str = option("none", "strategy: none, ag-early, ag-late, oe-early, oe-late, hybrid; ours: ag-always, oe-always, both, "
                                 "reversed, wrong-hint (enrich.py)")
    enrich_early: str = option("1,3", "first and last turn of the early window")
    enrich_late: str = option("6,10", "first and last turn of the late window")
    enrich_switch: float = option(0.5, "share of the steps after which hybrid and reversed switch")
    enrich_history: str = option("plain", "past observations in a prompt: plain (the paper's: a hint is in the current one alone), "
                                          "or kept, with their hints")


@dataclass
class Learning(Playing):
    # How long, where to
    steps: int = option(60, "training steps: batches of episodes (0: the warm start alone)")
    out: str = option("", "the run's folder (nothing: runs/<env>__<algorithm>__<enrich>__<seed>; distill.py has its --mode in place "
                          "of <enrich>)")
    resume: bool = option(False, "go on from the checkpoint in the run's folder")
    overwrite: bool = option(False, "start again: what is in the run's folder is deleted after the first step")
    # A batch
    tasks_per_step: int = option(16, "groups per step, one task each")
    group: int = option(8, "episodes per group")
    minibatches: int = option(1, "the batch is cut into so many parts, an optimizer step each; with 1, every update is on-policy")
    micro_batch_tokens: int = option(8192, "padded tokens in one forward pass; only rounding depends on it")
    temperature: float = option(1.0, "sampling temperature, in the log-probs too")
    invalid_action_penalty: float = option(0.0, "subtract this times the share of an episode's turns whose action was invalid from its "
                                                "reward, for the advantages alone")
    # Adapter and optimizer
    lora_rank: int = option(16, "rank of the LoRA adapter (alpha is twice that)")
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
    # Evaluation and logs
    eval_temperature: float = option(0.0, "temperature of evaluations (0: greedy)")
    log_tokens: int = option(0, "episodes a step whose tokens, with advantage and log-ratio, go into tokens.jsonl")


@dataclass
class Config(Learning, Hints):
    enrich_probability: float = option(0.5, "chance that a group of episodes is enriched")
    enrich_mixed: bool = option(False, "a coin for each episode instead of each group (the paper's ablation)")
    enrich_half: bool = option(False, "hints for exactly half of the episodes of every group (the released code's mixed groups)")
    enrich_anneal: bool = option(False, "ours: the chance falls linearly to 0 over training")
    enrich_positive_only: bool = option(False, "ours: negative advantages are set to 0, in every episode")
    enrich_train_context: str = option("as-sampled", "as-sampled, or ours: stripped or stripped-ratio (train without the hints)")
    eval_every: int = option(10, "evaluate on tasks of the standard environment every so many steps (0: never)")
    eval_split: str = option("valid", "the tasks of these evaluations: valid, or test (the paper chooses its best on its test tasks)")
    save_every: int = option(10, "checkpoint every so many steps; the last step always")
    keep_every: int = option(0, "keep the adapter of every so many steps, in adapters/STEP/ (0: none), for tools/probe.py")
    tensorboard: bool = option(False, "write TensorBoard files into the run's folder too")


def parse(own, argv=None, description=None, common=Config):
    """The command line -> a checked object with the fields of the dataclasses `own` and `common`. What it does not give is the
    environment's default, where it has one (`Env.defaults`), else the option's. Raises BadInput with one line; `--help` prints
    and leaves."""
    from transformers.hf_argparser import HfArgumentParser

    class Parser(OneLine, HfArgumentParser):
        pass

    parser = Parser(make_dataclass(own.__name__, [], bases=(own, common) if own is not common else (own,)),
                    description=description, allow_abbrev=False)
    argv = sys.argv[1:] if argv is None else argv
    try:
        config, unknown = parser.parse_args_into_dataclasses(args=argv, return_remaining_strings=True)
    except BadInput:
        raise
    except ValueError as error:  # what the dataclass says of its own fields
        raise BadInput(str(error)) from error
    if unknown:
        parser.error(f"unknown option {' '.join(unknown)}")
    given = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in argv if word.startswith("--")}
    for name, value in env_class(config.env).defaults.items():
        if name not in given and hasattr(config, name):
            setattr(config, name, value)
            given.add(name)
    if getattr(config, "preset", ""):
        apply_preset(config, given)
    refuse_bad_values(config)
    return config


def refuse_bad_values(config):
    """Refuse what cannot work, before anything is loaded or written. A program has some of these options."""
    at_least = {"steps": 0, "group": 2, "tasks_per_step": 1, "minibatches": 1, "micro_batch_tokens": 1, "lora_rank": 1,
                "max_turns": 0, "max_new_tokens": 1, "max_context": 2, "num_envs": 1, "eval_every": 0,
                "eval_episodes": 1, "save_every": 1, "keep_every": 0, "warm_start_steps": 1, "warm_start_batch": 1, "log_tokens": 0,
                "thinking_budget": 0}
    why = {"group": ": an advantage compares the episodes of a group"}
    zero = {"temperature": "greedy", "eval_temperature": "greedy", "importance_cap": "off", "step_timeout": "no limit",
            "invalid_action_penalty": "none"}
    choices = {"bits": (0, 4, 16, 32), "optimizer": ("adamw", "paged_adamw_8bit"), "warm_start": ("", "random", "gold"),
               "eval_split": ("valid", "test"), "enrich_history": ("plain", "kept"),
               "enrich_train_context": ("as-sampled", "stripped", "stripped-ratio")}
    for name, value in vars(config).items():
        flag = f"--{name.replace('_', '-')}"
        if name in at_least and value < at_least[name]:
            raise BadInput(f"{flag} must be at least {at_least[name]}, got {value}{why.get(name, '')}")
        if name in ("lr", "max_grad_norm", "warm_start_lr") and not 0 < value < math.inf:
            raise BadInput(f"{flag} must be above 0, got {value}")
        if name in zero and not 0 <= value < math.inf:
            raise BadInput(f"{flag} must be 0 ({zero[name]}) or above, got {value}")
        if name in choices and value not in choices[name]:
            raise BadInput(f"{flag} must be one of {', '.join(str(a) or 'nothing' for a in choices[name])}, got {value}")
        if name == "history" and not re.fullmatch(HISTORY, value):
            raise BadInput(f"--history must be full, window:N or recent:N, got {value!r}")
    if budget := getattr(config, "thinking_budget", 0):
        if not config.thinking:
            raise BadInput("--thinking-budget needs --thinking")
        if budget >= config.max_new_tokens:
            raise BadInput(f"--thinking-budget {budget} leaves no room for an answer in --max-new-tokens {config.max_new_tokens}")
    if isinstance(config, Learning):
        if config.steps == 0 and not config.warm_start:
            raise BadInput("--steps 0 trains nothing: pass --warm-start random or gold, or more steps")
        if config.resume and config.overwrite:
            raise BadInput("--resume and --overwrite exclude each other")
        if config.temperature == 0:
            raise BadInput("training needs --temperature above 0: greedy episodes of a group are all alike")


def apply_preset(config, given):
    """Set the fields that --preset speaks of, that the program has and that are not `given` by the user or the environment. For
    another model, context, rank or optimizer than it was made for they are planned anew, and a line says what came out."""
    if config.preset not in PRESETS:
        raise BadInput(f"--preset must be one of {', '.join(PRESETS)}, got {config.preset!r}")
    if config.model == "tiny":
        raise BadInput("--preset is for a model of billions of parameters: pass --model, or leave it out")
    wanted = {"max_context": config.max_context} if "max_context" in given else {}
    if "bits" in given:
        wanted["bits"] = config.bits or None
    fields, words = preset_for(config.preset, config.model, getattr(config, "lora_rank", 16),
                               getattr(config, "optimizer", "adamw"), **wanted)
    if words:
        print(f"--preset {config.preset} was made for Qwen/Qwen3-4B; planned anew for {config.model}: {words}", file=sys.stderr)
    for name, value in fields.items():
        if name not in given and hasattr(config, name):
            setattr(config, name, value)


def schedule_of(config, total_steps=1, **more) -> Schedule:
    """The schedule of enrich.py from a program's options, `Hints`; more: its further fields. Raises BadInput."""
    def window(name, text):
        first, comma, last = text.partition(",")
        if not (first.strip().isdecimal() and last.strip().isdecimal()):
            raise BadInput(f"--enrich-{name} must be FIRST,LAST (two turns, such as 1,3), got {text!r}")
        return int(first), int(last)

    try:
        return Schedule(config.enrich, total_steps, window("early", config.enrich_early), window("late", config.enrich_late),
                        config.enrich_switch, **more)
    except ValueError as error:
        raise BadInput(str(error)) from error


def schedule_of_run(config) -> Schedule:
    """The schedule of a training run from its `Config`."""
    return schedule_of(config, config.steps, seed=config.seed, probability=config.enrich_probability,
                       mixed=config.enrich_mixed, half=config.enrich_half, anneal=config.enrich_anneal)


def limits_of(config, env) -> dict:
    """The limits of an episode, as `rollout` takes them. The Funnel's notes (funnel/state.py) are no enrichment: they are kept."""
    return {"keep_hints": getattr(config, "enrich_history", "kept") == "kept",
            "max_turns": config.max_turns or env.max_turns, "max_new_tokens": config.max_new_tokens,
            "max_context": config.max_context, "history": config.history, "step_timeout": config.step_timeout}
