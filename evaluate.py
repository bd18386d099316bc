"""Success on a fixed list of tasks of the standard environment: not enriched, the same tasks each time.

    python evaluate.py runs/keydoor__grpo__none__0                 # a finished run: its base model beside its adapter
    python evaluate.py --model DIR --env sciworld --tasks find-plant --temperature 1 --samples 8      # a bare model
    python evaluate.py RUN --enrich ag-always --hinted    # and once more with hints, in rows that say so

With `--samples n` each task is played n times and pass@k is the unbiased estimate of arXiv 2107.03374, Eq. 1.
"""
import math
import sys
from functools import partial
from pathlib import Path


def wilson(successes: int, episodes: int, z: float = 1.959964) -> list[float]:
    """95 % interval of a share (Wilson's score interval): [low, high]."""
    if episodes == 0:
        return [0.0, 1.0]
    share, z2 = successes / episodes, z * z
    centre = (share + z2 / (2 * episodes)) / (1 + z2 / episodes)
    half = z / (1 + z2 / episodes) * math.sqrt(share * (1 - share) / episodes + z2 / (4 * episodes ** 2))
    return [max(0.0, centre - half), min(1.0, centre + half)]


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased chance that one of k samples is correct, from `correct` of `samples`: 1 - C(n-c, k) / C(n, k)."""
    if not 1 <= k <= samples:
        raise ValueError(f"k must lie in 1..{samples}, got {k}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def fixed_tasks(tasks: list[str], number: int) -> list[str]:
    """`number` tasks spread evenly over the list (all of them if there are fewer): the same ones each time."""
    return tasks if number >= len(tasks) else [tasks[n * len(tasks) // number] for n in range(number)]


def evaluate(act, chat, envs, tasks, *, samples: int = 1, **limits) -> dict:
    """Play each task `samples` times; episode n of the list has seed n, whatever was played before.

    An episode whose environment broke counts as no success. The interval treats episodes as independent: with
    samples > 1 they are not quite, and it is too narrow. Returns success, interval, episodes, clean_success (success
    without an invalid action before it), score (mean of the benchmark's own score, 0 to 100 on ScienceWorld, else of the
    return), valid_action_fraction, turns, env_errors; abstain_turns and abstained, summed, where the benchmark asks what
    cannot be done; success_by_name where the tasks have several names; and pass@k for samples > 1.
    """
    from rollout import Request, refuse_if_nothing_fits, rollout

    requests = [Request(task, group=n, seed=n) for n, task in enumerate(tasks) for _ in range(samples)]
    played = rollout(act, chat, envs, requests, **limits)
    refuse_if_nothing_fits(played, limits.get("max_context"))
    successes = sum(t.success for t in played)
    turns = [turn for t in played for turn in t.turns]
    scores = [t.reward if t.info.get("score") is None else t.info["score"] for t in played if t.end != "env_error"]
    clean = sum(t.success and all(turn.valid for turn in t.turns) for t in played)
    result = {"success": successes / len(played), "interval": wilson(successes, len(played)), "episodes": len(played),
              "clean_success": clean / len(played), "score": sum(scores) / max(len(scores), 1),
              "valid_action_fraction": sum(turn.valid for turn in turns) / max(len(turns), 1),
              "turns": len(turns) / len(played),
              "env_errors": sum(t.end == "env_error" for t in played)}
    if any("abstain_turns" in t.info for t in played):
        result |= {key: sum(t.info.get(key, 0) for t in played) for key in ("abstain_turns", "abstained")}
    names = [t.task.split("/")[0] for t in played]
    if len(set(names)) > 1:
        result["success_by_name"] = {name: sum(t.success for t, own in zip(played, names) if own == name) / names.count(name)
                                     for name in sorted(set(names))}
    if samples > 1:
        correct = [sum(t.success for t in played[n:n + samples]) for n in range(0, len(played), samples)]
        result["pass@k"] = {k: sum(pass_at_k(samples, c, k) for c in correct) / len(correct)
                            for k in (2 ** n for n in range(samples.bit_length())) if k <= samples}
    return result


def table(env_name: str, rows, split: str = "test") -> str:
    """Text for the terminal: [(name, result of evaluate), ...]. Valid acts is the share of actions that were valid."""
    rows, title = list(rows), f"{split} tasks, standard {env_name}"
    width = max(36, len(title), *(len(name) for name, _ in rows))
    lines = [f"{title:<{width}}  success  95 % interval    score  valid acts  episodes"]
    for name, r in rows:
        low, high = r["interval"]
        lines.append(f"{name:<{width}}  {r['success']:>7.3f}  [{low:.3f}, {high:.3f}]  {r['score']:>7.3f}  "
                     f"{r['valid_action_fraction']:>10.3f}  {r['episodes']:>8}")
        if "pass@k" in r:
            lines.append("    " + "  ".join(f"pass@{k} {share:.3f}" for k, share in r["pass@k"].items()))
    return "\n".join(lines)


def main(argv=None):
    from dataclasses import dataclass, fields

    from envs import BadInput
    from train import Config, option, parse

    @dataclass
    class EvaluateConfig(Config):
        split: str = option("test", "train, valid or test")
        samples: int = option(1, "episodes per task; above 1 (with --temperature) also pass@k")
        temperature: float = option(0.0, "sampling temperature (0: greedy)")
        hinted: bool = option(False, "play once more with every episode enriched as --enrich says at the end of training")

    argv = list(sys.argv[1:] if argv is None else argv)
    run = argv.pop(0) if argv and not argv[0].startswith("-") else None
    defaults = []
    if run:  # the run's own options first, then what the command line says
        defaults = options_of(run, {f.name for f in fields(Config)} - {"temperature", "resume", "overwrite", "out", "preset"})
        if any(word.startswith("--adapter") for word in argv):
            raise BadInput(f"{run} has its own adapter: leave out --adapter, or the run")
    if any(word.startswith("--eval-temperature") for word in argv):
        raise BadInput("here it is --temperature")
    config = parse(EvaluateConfig, defaults + argv, description="Success on fixed tasks of the standard environment.")
    evaluate_config(config, run)


def options_of(run, names) -> list[str]:
    """The options of a finished run, as command line words."""
    from envs import BadInput

    from runs import about

    if "algorithm" not in about(run) or not (Path(run) / "adapter").exists():
        raise BadInput(f"{run} is no finished run (no config.json or no adapter/); for a bare model pass --model")
    words = ["--temperature", str(about(run).get("eval_temperature", 0.0))]
    for name, value in about(run).items():
        if name in names and value not in ("", []):
            words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return words


def evaluate_config(config, run):
    import torch

    from enrich import EnrichedEnv, schedule_of
    from envs import BadInput, make_env, parse_options
    from sampling import sampler
    from train import load_policy, tasks_of

    if config.samples < 1:
        raise BadInput(f"--samples must be at least 1, got {config.samples}")
    if config.samples > 1 and config.temperature == 0:
        raise BadInput("--samples above 1 needs --temperature above 0: greedy episodes are all alike")
    if config.hinted and config.enrich == "none":
        raise BadInput("--hinted needs --enrich with the strategy to show, such as ag-always")
    schedule, options = schedule_of(config), parse_options(config.env_options)
    if config.split not in ("train", "valid", "test"):
        raise BadInput(f"--split must be train, valid or test, got {config.split!r}")
    tasks = fixed_tasks(tasks_of(config, options)[config.split], config.eval_episodes)
    if run:
        config.adapter = str(Path(run) / "adapter")
    model, chat = load_policy(config, options)
    envs = [make_env(config.env, options) for _ in range(min(config.num_envs, len(tasks) * config.samples))]
    max_turns = config.max_turns or envs[0].max_turns
    settings = [("", envs)]
    if config.hinted:
        schedule.check(envs[0], tasks, max_turns)
        schedule.step = config.steps
        enriched_envs = [EnrichedEnv(env, schedule) for env in envs]
        for env in enriched_envs:
            env.reset = partial(env.reset, enriched=True)
        settings.append((f", hinted ({config.enrich}): not the standard environment", enriched_envs))
    act = sampler(model, chat, temperature=config.temperature, max_new_tokens=config.max_new_tokens)

    def scores(name):
        for note, own in settings:
            torch.manual_seed(config.seed)
            result = evaluate(act, chat, own, tasks, samples=config.samples, max_turns=max_turns,
                              max_new_tokens=config.max_new_tokens, max_context=config.max_context, history=config.history,
                              step_timeout=config.step_timeout)
            rows.append((name + note, result))

    rows = []
    with model.disable_adapter():
        scores("base model")
    if config.adapter:
        scores(config.adapter)
    for env in envs:
        env.close()
    print(table(" ".join([config.env, *config.env_options]), rows, config.split))


if __name__ == "__main__":
    from train import cli
    cli(main)
