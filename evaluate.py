"""Success on a fixed list of tasks of the standard environment: not enriched, the same tasks each time.

    python evaluate.py runs/keydoor__grpo__none__0                 # a finished run: its base model beside its adapter
    python evaluate.py --model DIR --env sciworld --tasks find-plant --temperature 1 --samples 8      # a bare model
    python evaluate.py RUN --enrich ag-always --hinted    # and once more with hints, in rows that say so
    python evaluate.py RUN --state notes.md               # and once more with a state of distill.py in what the policy sees
    python evaluate.py RUN --pairs                        # of distill.py: each policy without a state and with the state of each round

With `--samples n` each task is played n times and pass@k is the unbiased estimate of arXiv 2107.03374, Eq. 1.
"""
import hashlib
import math
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from envs import BadInput, make_env, parse_options, split_tasks
from funnel.state import StateEnv, read_state
from rl.options import Hints, Playing, limits_of, option, parse, schedule_of
from rl.runs import BEFORE, about, cli


@dataclass
class EvaluateOptions(Playing, Hints):
    split: str = option("test", "train, valid or test")
    samples: int = option(1, "episodes per task; above 1 (with --temperature) also pass@k")
    temperature: float = option(0.0, "sampling temperature (0: greedy)")
    hinted: bool = option(False, "play once more with every episode enriched as --enrich says at the end of training")
    state: str = option("", "play once more with the state in this file (funnel/state.py)")
    state_place: str = option("prompt", "prompt or observation, as in distill.py (of a run: as it was)")
    pairs: bool = option(False, "of a run of distill.py: each committed policy without a state and with the state of each round")


KEPT_APART = {"adapter", "preset", "num_envs", "step_timeout", "hinted", "state", "pairs"}  # change no row of pairs.jsonl, but by chance


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
    names = {field.name for field in fields(EvaluateOptions) if field.init} - {"temperature", "preset", "state"}  # state: its first one
    words = ["--temperature", str(about(run).get("eval_temperature", 0.0))]
    for name, value in (BEFORE | about(run)).items():
        if name in names and value not in ("", []):
            words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return words


def evaluate_run(config, run):
    """Play, with the adapter of `run` or of --adapter and without one, or --pairs, and print the table."""
    if config.samples < 1:
        raise BadInput(f"--samples must be at least 1, got {config.samples}")
    if config.samples > 1 and config.temperature == 0:
        raise BadInput("--samples above 1 needs --temperature above 0: greedy episodes are all alike")
    if config.hinted and config.enrich == "none":
        raise BadInput("--hinted needs --enrich with the strategy to show, such as ag-always")
    if config.state_place not in ("prompt", "observation"):
        raise BadInput(f"--state-place must be prompt or observation, got {config.state_place}")
    if config.pairs and (about(run or "").get("algorithm") != "distill" or config.state or config.hinted):
        raise BadInput("--pairs wants the folder of a run of distill.py, with its policies and states, and neither --state nor --hinted")
    schedule, options = schedule_of(config), parse_options(config.env_options)
    if config.split not in ("train", "valid", "test"):
        raise BadInput(f"--split must be train, valid or test, got {config.split!r}")
    import torch

    from rl.evaluation import evaluate, fixed_tasks, success_table
    from rl.policy import load_policy
    from rl.sampling import sampler

    text = read_state(config.state, math.inf) if config.state else ""
    tasks = fixed_tasks(split_tasks(config.env, config.tasks, options, [config.split])[config.split], config.eval_episodes)
    if run:
        config.adapter = str(Path(run) / "adapter")
    model, chat = load_policy(config, options)
    envs = [make_env(config.env, options) for _ in range(min(config.num_envs, len(tasks) * config.samples))]
    limits = limits_of(config, envs[0])
    act = sampler(model, chat, temperature=config.temperature, max_new_tokens=config.max_new_tokens,
                  thinking_budget=config.thinking_budget)

    def played(own, enriched=False, **more):
        torch.manual_seed(config.seed)
        return evaluate(act, chat, own, tasks, samples=config.samples, enriched=enriched, **limits | more)

    def with_state(text):  # its notes are no hints: past observations keep them
        return played([StateEnv(env, text, config.state_place) for env in envs], keep_hints=True)

    if config.pairs:
        print(pairs_table(config, play_pairs(config, Path(run), model, with_state)))
        print(f"{Path(run) / 'pairs.jsonl'} holds them")
        for env in envs:
            env.close()
        return
    settings = [("", lambda: played(envs))]
    if text:
        settings.append((f", with the state {config.state}", lambda: with_state(text)))
    if config.hinted:
        if why := schedule.why_no_hints(envs[0], tasks, limits["max_turns"]):
            raise BadInput(why)
        hinted = schedule.wrap(envs)
        settings.append((f", hinted ({config.enrich}): not the standard environment", lambda: played(hinted, enriched=True)))
    with model.disable_adapter():
        rows = [("base model" + note, play()) for note, play in settings]
    if config.adapter:
        rows += [(config.adapter + note, play()) for note, play in settings]
    for env in envs:
        env.close()
    print(success_table(" ".join([config.env, *config.env_options]), rows, config.split))


def play_pairs(config, run, model, with_state) -> dict:
    """{(policy, state or None): what `evaluate` found}; the policies are those that were committed, called by their round, and None is no
    state. Each is a row of pairs.jsonl; what it holds already, of the same text and the same options, is not played again."""
    from rl.logs import append, read
    from rl.model import other_adapter

    options = {name: value for name, value in asdict(config).items() if name not in KEPT_APART}
    texts = {int(path.stem): read_state(path, math.inf) for path in sorted((run / "states").glob("[0-9]*.md"))}
    known = {(row["policy"], row["text"]): row for row in read(run / "pairs.jsonl") if row["options"] == options}
    found = {}
    for folder in sorted((run / "policies").glob("[0-9]*[0-9]")):
        with other_adapter(model, folder):
            for state, text in {None: "", **texts}.items():
                key = int(folder.name), hashlib.sha256(text.encode()).hexdigest()
                if key not in known:
                    known[key] = {"policy": key[0], "state": state, "split": config.split, "text": key[1], "options": options,
                                  **with_state(text)}
                    append(run / "pairs.jsonl", known[key])
                found[key[0], state] = known[key]
    return found


def pairs_table(config, found) -> str:
    """Success, a line for each policy and a column for each state."""
    policies, states = (list(dict.fromkeys(names)) for names in zip(*found))
    lines = [f"success on {config.split} tasks, standard {' '.join([config.env, *config.env_options])}",
             "policy   no state" + "".join(f"  {f'state {state}':>8}" for state in states if state is not None)]
    lines += [f"{policy:>6}  " + "".join(f" {found[policy, state]['success']:>8.3f} " for state in states) for policy in policies]
    return "\n".join(lines)


if __name__ == "__main__":
    cli(main)
