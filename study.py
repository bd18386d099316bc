"""A study: arms × seeds of a training program at equal steps, and a table that says how sure it is.

    python enrich.py --study --quick                 # a few arms, short runs, a minute or two
    python enrich.py --study --jobs 2                # every strategy and control of enrich.py on the built-in game
    python enrich.py --study --arms none hybrid ag-always+stripped+positive --seeds 3 --env sciworld --name mine
    python distill.py --study --jobs 2               # the loop of arXiv 2609.08919 against its halves and its controls
    python study.py results/keydoor-enrich hybrid    # its table again, with differences to another arm

An arm is a strategy of enrich.py, with modifiers behind plus signs (MODIFIERS; key=value is an option of the environment);
"supervised" is no reinforcement at all, but supervised training on known solutions: as many optimizer steps, and as many
rows in each as the others play episodes. For distill.py an arm is one of DISTILL_ARMS; some are programs of their own
(OTHER_PROGRAMS), which must know the options that every run gets. Every run is a process of its own, in
runs/<name>/<arm>__<seed>/. A run that is finished is not done again, so a study that was stopped goes on where it was.

    results/<name>/study.json      options, commit; for every run its curve, final and peak success; for every arm the
                                   means, and the difference to the first arm, paired by seed
    results/<name>/study.md, study.png                  the same as a table and a picture

final: success on the test tasks after the last step. peak: the best evaluation while training (--eval-split), which is what
papers often report; it rises with the number of evaluations alone. final of the best adapter: that evaluation's adapter on the
test tasks. All are hint-free. An interval is Student's t over seeds
(95 %); it knows nothing of other tasks, models and settings.
"""
import concurrent.futures
import dataclasses
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from enrich import STRATEGIES
from envs import BadInput
from rl.logs import is_final, picture, read, replace_file
from rl.options import Config, parse, schedule_of_run
from rl.runs import Parser, about, cli, commit

HERE = Path(__file__).parent
MODIFIERS = {"mixed": ["--enrich-mixed"], "half": ["--enrich-half"], "anneal": ["--enrich-anneal"], "positive": ["--enrich-positive-only"],
             "stripped": ["--enrich-train-context", "stripped"], "ratio": ["--enrich-train-context", "stripped-ratio"]}
T975 = [math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131]
MEANS = {"final": "final", "valid": "the same on valid tasks", "peak": "peak",
         "best": "final of the best adapter", "clean": "final without an invalid action",
         "success_hinted": "training episodes with hints, at the end", "success_plain": "without",
         "final_with_state": "final with the state"}  # figures of a run that are averaged over seeds -> title in the table


def paired(differences: list[float]) -> dict:
    """Differences of the same seeds -> mean, its 95 % interval (Student's t) and the sign-flip test's two-sided p.

    The p of n seeds is exact and never below 2 / 2**n: with 5 seeds 0.0625 says that all five have one sign.
    """
    n, mean = len(differences), statistics.fmean(differences)
    half = T975[min(n - 1, 15)] * statistics.stdev(differences) / math.sqrt(n) if n > 1 else math.inf
    flips = [abs(sum(sign * d for sign, d in zip(signs, differences))) for signs in itertools.product((1, -1), repeat=n)]
    p = sum(flip >= abs(sum(differences)) - 1e-9 for flip in flips) / len(flips)
    return {"mean": mean, "low": mean - half, "high": mean + half, "p": p}


def verdict(difference: dict) -> str:
    return "higher" if difference["low"] > 0 else "lower" if difference["high"] < 0 else "not decided"


def read_run(folder) -> dict | None:
    """What a study keeps of a finished run; None if it is not finished."""
    evaluations = [row for row in read(folder / "evaluations.jsonl") if not row.get("residual")]
    rows = [row for row in evaluations if not row.get("state")]
    tests = {row["policy"]: row for row in rows if is_final(row) and row["split"] == "test"}
    if not {"base", "trained"} <= set(tests):
        return None
    curve = [[row["step"], row["success"]] for row in rows if not is_final(row)]
    final, metrics = tests["trained"], read(folder / "metrics.jsonl")
    run = {"base": tests["base"]["success"], "final": final["success"], "curve": curve,
           "valid": curve[-1][1] if curve else None, "peak": max([success for _, success in curve], default=None),
           "best": tests.get("best", final)["success"] if curve else None,
           "clean": final["clean_success"], "commit": about(folder)["commit"]}
    for row in evaluations:
        if row.get("state") and (row["split"], row["policy"]) == ("test", "trained"):
            run["final_with_state"] = row["success"]
    run |= {key: final[key] for key in ("abstained", "abstain_turns") if key in final}
    for key in ("success_hinted", "success_plain", "dead_group_fraction"):  # the last tenth of training
        last = [row[key] for row in metrics[-max(1, len(metrics) // 10):] if row.get(key) is not None]
        if last:
            run[key] = statistics.fmean(last)
    return run


def run_all(program, arms, seeds, folder, jobs):
    """Run what is not finished, `jobs` processes at once. {arm: options} -> {arm: [a run's figures for each seed]}"""
    def one(arm, seed):
        start = ["-m", OTHER_PROGRAMS[arm]] if arm in OTHER_PROGRAMS else [str(HERE / program)]
        run, words = folder / f"{arm}__{seed}", [*arms[arm], "--seed", str(seed)]
        said = run.with_name(run.name + ".options")
        if (figures := read_run(run)) is not None:
            if said.read_text().splitlines() != words:
                raise BadInput(f"{run} was run with other options (see {said}): choose another --name, or delete it")
            return {"seed": seed, **figures}
        said.write_text("\n".join(words) + "\n")
        command, started = [sys.executable, *start, *words, "--out", str(run)], time.perf_counter()
        command += ["--overwrite"] if run.exists() else []
        with open(run.with_name(run.name + ".log"), "w") as log:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False,
                           env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path})
        figures = read_run(run)
        if figures is None:
            raise BadInput(f"{arm}, seed {seed}, failed: see {log.name}; what is finished is kept, run the study again")
        print(f"{arm}, seed {seed}: {figures['base']:.3f} -> {figures['final']:.3f} in "
              f"{time.perf_counter() - started:.0f} s", flush=True)
        return {"seed": seed, **figures}

    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))  # where OTHER_PROGRAMS are found
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:  # seed by seed, so that a stopped study has whole seeds
        todo = {(arm, seed): pool.submit(one, arm, seed) for seed in seeds for arm in arms}
        try:
            return {arm: [todo[arm, seed].result() for seed in seeds] for arm in arms}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def summary(facts: dict, arms: dict, results: dict) -> dict:
    """study.json: `results` as of `run_all`; the first arm is the baseline of the differences."""
    baseline, study = next(iter(arms)), {**facts, "arms": {}}
    for arm, runs in results.items():
        entry = {"options": arms[arm], "runs": runs}
        for key in MEANS:
            values = [run[key] for run in runs if run.get(key) is not None]
            if values:
                entry[key] = {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else 0.0}
        if arm != baseline:
            entry["difference"] = paired([run["final"] - other["final"] for run, other in zip(runs, results[baseline])])
        study["arms"][arm] = entry
    return study


def study_table(study, baseline=None) -> str:
    """Markdown, with differences to the arm `baseline` (default: the first)."""
    baseline = baseline or next(iter(study["arms"]))
    arms, asks = study["arms"], any("abstain_turns" in run for arm in study["arms"].values() for run in arm["runs"])
    columns = {key: title for key, title in MEANS.items() if any(key in arm for arm in arms.values())}
    head = ["arm", *columns.values(), f"final − {baseline} [95 %], p", "", *(["abstained"] if asks else [])]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, arm in arms.items():
        cells = [f"`{name}`"]
        cells += [f"{arm[key]['mean']:.3f} ± {arm[key]['std']:.3f}" if key in arm else "" for key in columns]
        d = paired([run["final"] - other["final"] for run, other in zip(arm["runs"], arms[baseline]["runs"])])
        difference = f"{d['mean']:+.3f} [{d['low']:+.3f}, {d['high']:+.3f}], {d['p']:.3f}"
        cells += [difference, verdict(d)] if name != baseline else ["", ""]
        if asks:
            cells.append(" of ".join(str(sum(run.get(key, 0) for run in arm["runs"])) for key in ("abstained", "abstain_turns")))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw_study(study, path):
    """Left: mean success on valid tasks over training. Right: final test success, a dot a seed, a bar for the mean."""
    arms = study["arms"]
    with picture(path, 1, 2, figsize=(11, 1.6 + 0.3 * max(len(arms), 8))) as (_, (left, right)):
        for number, (name, arm) in enumerate(arms.items()):
            colour, style = f"C{number % 10}", ("-", "--")[number // 10 % 2]
            curves = [run["curve"] for run in arm["runs"]]
            if min(map(len, curves)) > 1:
                means = [statistics.fmean(success for _, success in points) for points in zip(*curves)]
                left.plot([step for step, _ in curves[0]], means, color=colour, linestyle=style, label=name)
            right.plot([run["final"] for run in arm["runs"]], [number] * len(arm["runs"]), "o", color=colour, alpha=0.5)
            right.plot([arm["final"]["mean"]], [number], "|", color="black", markersize=14)
        left.set(xlabel="training step", ylabel="success on valid tasks, without hints", ylim=(-0.02, 1.02))
        left.legend(fontsize=7)
        right.set(xlabel="final success on test tasks, without hints", xlim=(-0.02, 1.02), yticks=range(len(arms)))
        right.set_yticklabels(list(arms), fontsize=8)
        right.invert_yaxis()


def report(folder):
    """study.json -> study.md and study.png; prints the table."""
    study = json.loads((folder / "study.json").read_text())
    text = study_table(study)
    (folder / "study.md").write_text(text + "\n")
    draw_study(study, folder / "study.png")
    print(f"\n{text}\n\n{folder}/ holds study.json, study.md, study.png")


def parse_study(argv, arms, algorithms=()):
    """(the study's own options, the words for every run)."""
    parser = Parser(allow_abbrev=False, description="Arms × seeds at equal steps. Other options go to each run.")
    parser.add_argument("--arms", nargs="+", default=arms, help="the first is the baseline (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each arm: seeds 0, 1, ...")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, a core each")
    parser.add_argument("--name", default="", help="results go to results/NAME/")
    parser.add_argument("--quick", action="store_true", help="three arms, two seeds, short runs")
    if algorithms:
        parser.add_argument("--algorithm", default=algorithms[0], choices=algorithms)
    args, words = parser.parse_known_args(argv)
    if not (1 <= args.seeds <= 16 and args.jobs >= 1):
        raise BadInput(f"--seeds must be in 1..16 and --jobs at least 1, got {args.seeds} and {args.jobs}")
    if len(set(args.arms)) < max(2, len(args.arms)):
        raise BadInput("--arms wants two or more different arms, the first as the baseline")
    if refused := {"--seed", "--out", "--resume", "--overwrite", "--enrich"} & set(words):
        raise BadInput(f"a study sets {', '.join(sorted(refused))} itself")
    return args, words


def study(args, program, arms, facts):
    """Run the arms, {name: options}, of `program` and write results/<name>/ with these facts in study.json."""
    seeds, folder = list(range(args.seeds)), Path("results") / args.name
    results = run_all(program, arms, seeds, Path("runs") / args.name, args.jobs)
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"program": program, "seeds": seeds, "commit": commit(), **facts}
    replace_file(folder / "study.json", json.dumps(summary(facts, arms, results), indent=1) + "\n")
    report(folder)


def enrichment(argv):
    """The study of `enrich.py`."""
    controls = ["hybrid+mixed", "ag-always+mixed", "ag-always+stripped+positive", "none+positive", "supervised"]
    args, words = parse_study(argv, [*STRATEGIES, *controls], ("grpo", "dapo", "gspo"))
    if args.quick:
        args.arms, args.seeds, words = ["none", "hybrid", "ag-always"], min(args.seeds, 2), [*words, "--steps", "15"]
    config = parse(Config, words, common=Config)
    if config.env == "keydoor" and not config.env_options:
        words += ["--env-options", "stages=6", "commands=4"]
        if config.enrich_late == Config.enrich_late:
            words += ["--enrich-late", "4,8"]  # the game has eight turns
    config = parse(Config, words, common=Config)
    args.name = args.name or f"{config.env}-{args.algorithm}-enrich" + ("-quick" if args.quick else "")

    def words_of_arm(arm):
        strategy, *modifiers = arm.split("+")
        settings = [m for m in modifiers if "=" in m]
        modifiers = [m for m in modifiers if m not in settings]
        if arm == "supervised" and not config.warm_start:
            return ["--steps", "0", "--warm-start", "gold", "--warm-start-steps", str(config.steps * config.minibatches),
                    "--warm-start-lr", str(config.lr), "--warm-start-batch",
                    str(max(1, config.tasks_per_step * config.group // config.minibatches))]
        if strategy not in STRATEGIES or not set(modifiers) <= set(MODIFIERS):
            raise BadInput(f"unknown arm {arm!r}: a strategy ({', '.join(STRATEGIES)}), with modifiers as in hybrid+mixed "
                           f"({', '.join(MODIFIERS)}, or an environment's key=value), or, without --warm-start, supervised")
        schedule_of_run(dataclasses.replace(config, enrich=strategy))  # raises BadInput
        keep = [o for o in config.env_options if o.partition("=")[0] not in [m.partition("=")[0] for m in settings]]
        return [*(["--enrich", strategy] if strategy != "none" else []), *(word for m in modifiers for word in MODIFIERS[m]),
                *(["--env-options", *keep, *settings] if settings else [])]

    arms = {arm: [*words, *words_of_arm(arm)] for arm in args.arms}
    study(args, f"{args.algorithm}.py", arms, {"env": config.env, "algorithm": args.algorithm, "steps": config.steps})


DISTILL_ARMS = {
    "full": [], "new": ["--select", "new"], "persistent": ["--select", "persistent"], "all": ["--select", "all"],
    "random": ["--select", "random"], "uniform": ["--token-weights", "uniform"], "blind-teacher": ["--no-teacher-state"],
    "no-teacher": ["--teacher", "none"], "no-rl": ["--rl-weight", "0"], "state-only": ["--mode", "state-only"],
    "policy-only": ["--mode", "policy-only"], "base-teacher": ["--teacher", "base"],
    "base-teacher-blind": ["--teacher", "base", "--no-teacher-state"], "on-policy-step": ["--on-policy", "step"],
    "no-retire": ["--no-retire"], "skillopt": ["--mode", "state-only"],
    "skillopt-lite": ["--mode", "state-only", "--lite"], "opid": [], "skillrl": [], "skill0": []}
OTHER_PROGRAMS = {arm: f"baselines.{arm}" for arm in ("opid", "skillrl", "skill0")}


def distillation(argv):
    """The study of `distill.py`: the full loop against selections, token weights, teachers and halves of it."""
    args, words = parse_study(argv, [arm for arm in DISTILL_ARMS if arm not in OTHER_PROGRAMS and arm != "skillopt"])  # skillopt: state-only
    if unknown := [arm for arm in args.arms if arm not in DISTILL_ARMS]:
        raise BadInput(f"unknown arm {unknown[0]!r}: choose from {', '.join(DISTILL_ARMS)}")
    if args.quick:
        args.arms, args.seeds, words = ["full", "random", "policy-only"], min(args.seeds, 2), [*words, "--rounds", "2"]
    args.name = args.name or "distill" + ("-quick" if args.quick else "")
    others = {arm: OTHER_PROGRAMS[arm] for arm in args.arms if arm in OTHER_PROGRAMS}
    study(args, "distill.py", {arm: [*words, *DISTILL_ARMS[arm]] for arm in args.arms}, {"other_programs": others} if others else {})


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) not in (1, 2) or not (Path(argv[0]) / "study.json").is_file():
        raise BadInput("usage: python study.py results/NAME [ARM], a folder with a study.json; to run one: "
                       "python enrich.py --study")
    if len(argv) == 1:
        return report(Path(argv[0]))
    study = json.loads((Path(argv[0]) / "study.json").read_text())
    if argv[1] not in study["arms"]:
        raise BadInput(f"{argv[0]} has no arm {argv[1]!r}; it has: {', '.join(study['arms'])}")
    print(study_table(study, argv[1]))


if __name__ == "__main__":
    cli(main)
