"""Success on a fixed list of tasks of the standard environment: not enriched, the same tasks each time.

    python evaluate.py runs/keydoor__grpo__none__0                 # a finished run: its base model beside its adapter
    python evaluate.py --model DIR --env sciworld --tasks find-plant --temperature 1 --samples 8      # a bare model
    python evaluate.py RUN --enrich ag-always --hinted    # and once more with hints, in rows that say so

With `--samples n` each task is played n times and pass@k is the unbiased estimate of arXiv 2107.03374, Eq. 1.
"""
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from envs import BadInput, make_env, parse_options, split_tasks
from rl.options import Hints, Playing, limits_of, option, parse, schedule_of
from rl.runs import BEFORE, about, cli


@dataclass
class EvaluateOptions(Playing, Hints):
    split: str = option("test", "train, valid or test")
    samples: int = option(1, "episodes per task; above 1 (with --temperature) also pass@k")
    temperature: float = option(0.0, "sampling temperature (0: greedy)")
    hinted: bool = option(False, "play once more with every episode enriched as --enrich says at the end of training")


def main(argv=None):
    argv = list(sys.argv[1:] if argv is None else argv)
    run = argv.pop(0) if argv and not argv[0].startswith("-") else None
    defaults = words_of_run(run) if run else []  # the run's own options first, then what the command line says
    if run and any(word.startswith("--adapter") for word in argv):
        raise BadInput(f"{run} has its own adapter: leave out --adapter, or the run")
    if any(word.startswith("--eval-temperature") for word in argv):
        raise BadInput("here it is --temperature")
    config = parse(EvaluateOptions, defaults + argv, "Success on fixed tasks of the standard environment.", common=EvaluateOptions)
    if run:
        config.started = about(run).get("started", config.started)
    evaluate_run(config, run)


def words_of_run(run) -> list[str]:
    """The options of a finished run, as command line words."""
    if "algorithm" not in about(run) or not (Path(run) / "adapter").exists():
        raise BadInput(f"{run} is no finished run (no config.json or no adapter/); for a bare model pass --model")
    names = {field.name for field in fields(EvaluateOptions) if field.init} - {"temperature", "preset"}
    words = ["--temperature", str(about(run).get("eval_temperature", 0.0))]
    for name, value in (BEFORE | about(run)).items():
        if name in names and value not in ("", []):
            words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return words


def evaluate_run(config, run):
    """Play, with the adapter of `run` or of --adapter and without one, and print the table."""
    if config.samples < 1:
        raise BadInput(f"--samples must be at least 1, got {config.samples}")
    if config.samples > 1 and config.temperature == 0:
        raise BadInput("--samples above 1 needs --temperature above 0: greedy episodes are all alike")
    if config.hinted and config.enrich == "none":
        raise BadInput("--hinted needs --enrich with the strategy to show, such as ag-always")
    schedule, options = schedule_of(config), parse_options(config.env_options)
    if config.split not in ("train", "valid", "test"):
        raise BadInput(f"--split must be train, valid or test, got {config.split!r}")
    import torch

    from rl.evaluation import evaluate, fixed_tasks, success_table
    from rl.policy import load_policy
    from rl.sampling import sampler

    tasks = fixed_tasks(split_tasks(config.env, config.tasks, options, [config.split])[config.split], config.eval_episodes)
    if run:
        config.adapter = str(Path(run) / "adapter")
    model, chat = load_policy(config, options)
    envs = [make_env(config.env, options) for _ in range(min(config.num_envs, len(tasks) * config.samples))]
    limits = limits_of(config, envs[0])
    settings = [("", envs, False)]
    if config.hinted:
        if why := schedule.why_no_hints(envs[0], tasks, limits["max_turns"]):
            raise BadInput(why)
        settings.append((f", hinted ({config.enrich}): not the standard environment", schedule.wrap(envs), True))
    act = sampler(model, chat, temperature=config.temperature, max_new_tokens=config.max_new_tokens,
                  thinking_budget=config.thinking_budget)

    def play(name):
        for note, own, enriched in settings:
            torch.manual_seed(config.seed)
            rows.append((name + note, evaluate(act, chat, own, tasks, samples=config.samples, enriched=enriched, **limits)))

    rows = []
    with model.disable_adapter():
        play("base model")
    if config.adapter:
        play(config.adapter)
    for env in envs:
        env.close()
    print(success_table(" ".join([config.env, *config.env_options]), rows, config.split))


if __name__ == "__main__":
    cli(main)
