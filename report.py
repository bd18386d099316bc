"""A run as one page: curves, rounds, transcripts. One HTML file that needs nothing else and no network.

    python report.py runs/keydoor__grpo__none__0                  # writes report.html into the run's folder
    python report.py runs/keydoor-enrich/*/ --out report.html     # several runs laid over each other
    python report.py results/keydoor/grpo-0 --out report.html     # files that were kept as PREFIX.metrics.jsonl ...

Runs whose options differ by the seed alone are one group: mean and standard deviation over its runs, at the steps that
all of them have. What a file lacks, or holds broken, is left out, and the page says so.

Texts of a run (tasks, observations, actions, states, options, names) are from outside. They go into the page as JSON in a
block that no browser executes, with `<` escaped, and tools/report_page.html puts them on the screen as text nodes alone; the
page allows one script and one style by their hashes, and no request.
"""
import base64
import hashlib
import itertools
import json
import math
import re
import statistics
from pathlib import Path
from types import SimpleNamespace

from envs import BadInput, plain
from rl.evaluation import fixed_tasks
from rl.logs import is_final, replace_file, success_map
from rl.options import schedule_of
from rl.runs import Parser, cli

TEMPLATE = Path(__file__).resolve().parent / "tools" / "report_page.html"
FILES = ("metrics.jsonl", "evaluations.jsonl", "rounds.jsonl", "rollouts.jsonl", "tokens.jsonl", "probe.jsonl")
ALIKE = {"seed", "out", "resume", "overwrite", "save_every", "micro_batch_tokens", "num_envs", "tensorboard", "log_tokens",
         "step_timeout", "preset", "commit", "python", "versions"}  # runs of one group may differ in these
CUT = 8000  # characters of a text; what is longer says how much more there is
PANELS = {"reward": "", "entropy": ", nats a token", "approx_kl": ", nats a token", "grad_norm": "",  # metrics, units
          "dead_group_fraction": "", "valid_action_fraction": "", "distill_loss": ", nats a token"}
QUANTITIES = ("log_ratio", "weight")  # numbers of each sampled token in tokens.jsonl


def finite(value):
    """A finite number to five digits, or None: a page's JSON has no NaN."""
    if type(value) not in (int, float) or not abs(value) < 1e300:
        return None
    return value if type(value) is int and abs(value) < 2 ** 53 else float(f"{value:.5g}")


def text(value) -> str:
    """A value from outside as text, cut where it is too long."""
    value = value if isinstance(value, str) else "" if value is None else json.dumps(value)
    return value if len(value) <= CUT else f"{value[:CUT]} [{len(value) - CUT:,} more characters are left out here]"


def read_rows(path, notes, most=math.inf) -> list[dict]:
    """The rows of a file of JSON lines, or `most` of them, evenly spread. What is left out is said in `notes`."""
    if not path.is_file():
        return []
    with open(path, "rb") as file:
        total = sum(1 for _ in file)
    chosen, rows, broken = set(fixed_tasks(range(total), most)), [], []
    with open(path, "rb") as file:
        for n, line in enumerate(file):
            if n in chosen and line.strip():
                try:
                    rows.append(json.loads(line.decode()))
                except (ValueError, RecursionError):
                    broken.append(n)
    ours = [row for row in rows if isinstance(row, dict) and type(row.get("step")) is int and 0 <= row["step"] < 2 ** 53]
    if total > most:
        notes.append(f"{path.name} has {total:,} lines: {most:,} of them, evenly spread, are here (--episodes)")
    if broken and broken[-1] == total - 1 and not line.endswith(b"\n"):
        notes.append(f"{path.name}: the last line, {broken.pop() + 1}, is cut off and left out")
    if broken:
        notes.append(f"{path.name}: {len(broken):,} lines are not JSON and left out, the first is line {broken[0] + 1}")
    if len(ours) < len(rows):
        notes.append(f"{path.name}: {len(rows) - len(ours):,} lines are not of this version (no step) and left out")
    return ours


def load(run, most) -> SimpleNamespace:
    """What the page shows of one run."""
    folder, notes = Path(run), []
    name = folder.name or folder.resolve().name

    def path(file):
        return folder / file if folder.is_dir() else folder.with_name(f"{name}.{file}")

    if not any(path(file).is_file() for file in ("config.json", *FILES)):
        raise BadInput(f"{run} is no run: it has neither config.json nor metrics.jsonl; pass the folder of a run")
    try:
        config = json.loads(path("config.json").read_text())
    except (OSError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        config = {}
        notes.append("config.json is missing or cannot be read: no options, no schedule, and a group of its own")
    metrics, evaluations, rounds, rollouts, tokens, probe = (
        read_rows(path(file), notes, most if file == "rollouts.jsonl" else math.inf) for file in FILES)
    evaluations = [row for row in evaluations if finite(row.get("success")) is not None]
    for file, rows in zip(FILES, (metrics, evaluations, rounds, rollouts)):
        if not rows and (file != "rounds.jsonl" or config.get("algorithm") == "distill"):
            notes.append(f"{file} holds nothing that can be shown" if path(file).exists() else f"there is no {file}")
    distill = config.get("algorithm") == "distill" or bool(rounds)
    states = sorted((folder / "states").glob("[0-9][0-9][0-9].md"))
    state = text(states[-1].read_text(errors="replace")) if states else ""
    return SimpleNamespace(name=name, config=config, notes=notes, metrics=metrics, evaluations=evaluations, rounds=rounds,
                           rollouts=rollouts, tokens=tokens, probe=probe, distill=distill, state=state)


def grouped(runs) -> list[SimpleNamespace]:
    """Groups of runs that differ only in ALIKE, each with a label that says what tells it from the others of its kind."""
    found = {}
    for n, run in enumerate(runs):
        same = {key: value for key, value in run.config.items() if key not in ALIKE} or n
        found.setdefault(json.dumps([run.distill, same], sort_keys=True), []).append(run)
    groups = [SimpleNamespace(runs=members, n=n, distill=members[0].distill, config=members[0].config)
              for n, members in enumerate(found.values())]
    for group in groups:
        for run in group.runs:
            run.group = group.n
        configs = [other.config for other in groups if other.distill == group.distill and other.config]
        differ = {key: {json.dumps(config.get(key)) for config in configs} for config in configs for key in config}
        config = group.config
        words = [f"{text(config.get('algorithm'))} on {text(config.get('env'))}"] if config else [group.runs[0].name]
        words += [f"{key} {text(value)}" for key, value in config.items() if key not in {"algorithm", "env", *ALIKE}
                  and (len(differ[key]) > 1 and all(key in other for other in configs)
                       or key == "enrich" and value not in (None, "none"))]
        label = ", ".join(words)
        group.label = f"{label[:117]}..." if len(label) > 120 else label
    return groups


def curve(group, name, points_of, **more) -> list[dict]:
    """[] or one series: points [x, y, low, high] of a run, or of the mean over a group's runs with its deviation."""
    each = [{point[0]: point for point in points_of(run) if point[1] is not None} for run in group.runs]
    each = [points for points in each if points]
    if not each:
        return []
    steps = sorted(set.intersection(*map(set, each)))
    if len(each) == 1:
        points, lines = [each[0][x] for x in steps], []
    else:
        ys = [[points[x][1] for points in each] for x in steps]
        spread = [(statistics.fmean(y), statistics.stdev(y)) for y in ys]
        points = [[x, finite(mean), finite(mean - std), finite(mean + std)] for x, (mean, std) in zip(steps, spread)]
        lines = [[points[x][:2] for x in sorted(points)] for points in each]
    half = len(points) // 40  # a running mean over a twentieth of the steps, where single points would be noise
    smooth = [[point[0], finite(statistics.fmean(p[1] for p in points[max(0, n - half):n + half + 1]))]
              for n, point in enumerate(points)] if half and "smooth" in more else []
    return [{"group": group.n, "name": name, "points": points, "runs": lines, "seeds": len(each), **more, "smooth": smooth}]


def successes(split, policy="trained", state=None, at=None, final=None):
    """points_of for hint-free success, with its 95 % interval. `at`: the step, if not the line's own. final: of the run's end, or while
    it trained; default: as the split says."""
    final = split == "test" if final is None else final

    def points_of(run):
        rows = [row for row in run.evaluations if (row.get("split"), row.get("policy")) == (split, policy)
                and is_final(row) == final and not row.get("residual") and (state is None or bool(row.get("state")) == state)]
        return [[row["step"] if at is None else at, finite(row["success"]), *interval(row)] for row in rows]
    return points_of


def interval(row):
    ends = row.get("interval")
    return [finite(end) for end in ends] if isinstance(ends, list) and len(ends) == 2 else [None, None]


def metric(key, distill):
    step = "optimizer_step" if distill else "step"
    return lambda run: [[row[step], finite(row.get(key)), None, None] for row in run.metrics
                        if finite(row.get(step)) is not None]


def margins(run) -> list[list]:
    """What tools/probe.py found, by step."""
    found = {}
    for row in run.probe:
        plain_, enriched = finite(row.get("p_plain")), finite(row.get("p_enriched"))
        if plain_ is not None and enriched is not None:
            found.setdefault(row["step"], []).append(enriched - plain_)
    return [[step, finite(statistics.fmean(values)), None, None] for step, values in sorted(found.items())]


def phases(config) -> list:
    """[first step, last step, what is shown to enriched groups] over training, as the schedule of enrich.py says."""
    try:
        schedule = schedule_of(SimpleNamespace(**config), config["steps"])
    except (BadInput, AttributeError, KeyError, TypeError, ValueError):
        return []

    def shown(step):
        now, windows = schedule.at(step), (schedule.early, schedule.late)
        turn = max((turn for turn in (1, schedule.early[0], schedule.late[0]) if now.kind(turn)), default=None)
        if turn is None:
            return ""
        last = next((last for first, last in windows if first == turn and not now.kind(last + 1)), None)
        kind = ("wrong " if schedule.strategy == "wrong-hint" else "") + now.kind(turn)
        return f"{kind}, turns {turn} to {last}" if last else f"{kind}, every turn"

    spans = [(words, list(steps)) for words, steps in itertools.groupby(range(1, min(schedule.total_steps, 100_000) + 1), shown)]
    return [[steps[0], steps[-1], words] for words, steps in spans if words]


def charts(groups, distill) -> list[dict]:
    """The charts of one kind of run: over training steps, or over the rounds of distill.py."""
    groups = [group for group in groups if group.distill == distill]
    free, played = [], []
    for group in groups:
        for words, state in (("state-free, ", False), ("with the state, ", True)) if distill else (("", None),):
            free += curve(group, f"{words}valid tasks", successes("valid", state=state))
            free += curve(group, f"{words}test tasks while training", successes("test", state=state, final=False))
            free += curve(group, f"{words}test tasks", successes("test", state=state), mark=True)
        free += curve(group, "test tasks, the best adapter", successes("test", "best"), mark=True)
        free += curve(group, "test tasks before training", successes("test", "base", state=False, at=0), mark=True)
        hinted = curve(group, "episodes with hints", metric("success_hinted", distill), smooth=True)
        kinds = hinted + curve(group, "episodes without", metric("success_plain", distill), smooth=True)
        played += kinds if hinted else curve(group, "all episodes", metric("success", distill), smooth=True)
    shades = [{"group": group.n, "phases": found} for group in groups if (found := phases(group.config))]
    unit = "optimizer step" if distill else "training step"
    found = [{"title": "Success without the state, and with it" if distill else "Success without hints", "y": [0, 1],
              "x": "round" if distill else unit, "series": free, "shades": [] if distill else shades},
             {"title": "Success while training (sampled)", "y": [0, 1], "x": unit, "series": played, "shades": shades}]
    for key, words in PANELS.items():
        series = sum((curve(group, "", metric(key, distill), smooth=True) for group in groups), [])
        found.append({"title": key + words, "x": unit, "series": series, "shades": [], "small": True})
    found.append({"title": "Probe: P(enriched output) − P(plain output), mean over the operations", "x": unit, "shades": shades, "series":
                  sum((curve(group, "", margins) for group in groups), [])})
    return [chart for chart in found if chart["series"]]


def maps(run) -> list[dict]:
    """Success of each task over time: of the episodes that training sampled, and of the evaluations while training."""
    def episodes_of(rows):
        return [(row["step"], row["task"], int(row["success"])) for row in rows
                if isinstance(row.get("task"), str) and isinstance(row.get("success"), bool) and row["step"] >= 1]

    def outcomes_of(rows):
        return [(n + 1, task, share) for n, row in enumerate(rows) if isinstance(row.get("outcomes"), dict)
                for task, value in row["outcomes"].items() if (share := finite(value)) is not None and 0 <= share <= 1]

    curve_rows = [row for row in run.evaluations if row.get("policy") == "trained" and row.get("split") in ("valid", "test")
                  and not is_final(row)]
    found = []
    for title, x, points, bins, starts_of in (
            ("Training tasks over time (sampled episodes)", "training steps in bins", episodes_of(run.rollouts), 20, list),
            ("Tasks of the evaluations while training, without hints", "the evaluations", outcomes_of(curve_rows), 10 ** 9,
             lambda starts: [curve_rows[n - 1]["step"] for n in starts])):
        tasks, starts, grid = success_map(points, bins)
        if 1 < len(tasks) <= 1000 and len(starts) > 1:
            found.append({"title": title, "x": x, "rows": list(map(text, tasks)), "columns": starts_of(starts),
                          "grid": [list(map(finite, line)) for line in grid]})
    return found


def about_run(run) -> dict:
    """A run as a line of the table, with its options."""
    played = {name: points[-1] for name, split, policy in (
        ("base", "test", "base"), ("trained", "test", "trained"), ("best", "test", "best"), ("valid", "valid", "trained"))
        if (points := successes(split, policy, state=False)(run))}
    done = max((row["step"] for row in (run.rounds if run.distill else run.metrics)), default=0)
    return {"name": run.name, "group": run.group, "distill": run.distill, "done": done, "seed": text(run.config.get("seed")),
            "of": finite(run.config.get("rounds" if run.distill else "steps")), "commit": text(run.config.get("commit")),
            **played, "notes": run.notes, "state": run.state, "rounds": list(map(about_round, run.rounds)),
            "options": [[text(key), text(value)] for key, value in run.config.items()]}


def about_round(row) -> dict:
    """A line of rounds.jsonl; None where it does not say."""
    def words(edit):
        if not isinstance(edit, dict):
            return text(edit)
        return " ".join(text(edit[key]) for key in ("op", "target", "content", "reason") if edit.get(key))

    lists = {key: row[key] if isinstance(row.get(key), list) else [] for key in ("edits", "rejected_edits", "dropped_edits", "retired")}
    labels = row["labels"] if isinstance(row.get("labels"), dict) else {}
    keys = ("step", "success_before", "success_after", "success_free", "success_state", "selected", "entries")
    return {**{key: finite(row.get(key)) for key in keys}, **{key: list(map(words, edits)) for key, edits in lists.items()},
            **{key: row[key] if isinstance(row.get(key), bool) else None for key in ("state_accepted", "policy_accepted")},
            **{key: text(row.get(key)) for key in ("state_reason", "policy_reason")},
            "labels": [finite(({"?": 0} | labels).get(label)) for label in ("00", "01", "10", "11", "?")] if labels else None}


def episode(n, row, put, tokens=None) -> list:
    """A line of rollouts.jsonl as the page stores it; `put(text)` is a text's number in the page's list."""
    def without(observation, hint):  # what was read is the observation, a line break and the hint
        return put(text(observation.removesuffix(f"\n{hint}") if hint and isinstance(observation, str) else observation))

    turns = row["turns"] if isinstance(row.get("turns"), list) else []
    turns = [turn if isinstance(turn, dict) else {} for turn in turns]
    hints = [turn.get("hint") for turn in turns] + [None]
    stored = [without(row.get("first_observation"), hints[0])]
    for turn, hint, following in zip(turns, hints, hints[1:]):
        stored += [put(text(hint)), put(text(turn.get("action"))), without(turn.get("observation"), following),
                   int(bool(turn.get("valid")))]
    phase = " ".join(text(row.get(key)) for key in ("phase", "episodes") if row.get(key))
    return [n, row["step"], put(text(row.get("task"))), put(text(row.get("end"))), int(bool(row.get("success"))),
            int(bool(row.get("enriched"))), finite(row.get("reward")), put(text(row.get("error"))), put(phase), stored,
            about_tokens(tokens, put) if tokens else 0]


def about_tokens(row, put):
    """The tokens of a line of tokens.jsonl, or 0 where it does not hold them as this version does."""
    rows = []
    for part in row["rows"] if isinstance(row.get("rows"), list) else []:
        words, mask = (part.get("tokens"), part.get("mask")) if isinstance(part, dict) else (None, None)
        if not isinstance(words, list) or not isinstance(mask, list) or len(words) != len(mask):
            return 0
        numbers = {key: list(map(finite, part[key])) for key in QUANTITIES
                   if isinstance(part.get(key), list) and len(part[key]) == sum(bool(own) for own in mask)}
        rows.append([[put(text(word)) for word in words], "".join(str(int(bool(own))) for own in mask), numbers])
    return [finite(row.get("advantage")), rows] if rows else 0


def episodes(runs, put) -> list:
    """Every transcript. An episode's line in tokens.jsonl is its line in rollouts.jsonl, and more."""
    def identity(row):
        return json.dumps({key: value for key, value in row.items() if key not in ("rows", "advantage")}, sort_keys=True)

    found = []
    for n, run in enumerate(runs):
        stored = {}
        for row in run.tokens:
            stored.setdefault(identity(row), []).append(row)  # episodes can be alike in everything but their tokens
        found += [episode(n, row, put, (stored.get(identity(row)) or [None]).pop(0)) for row in run.rollouts]
        found += [episode(n, row, put, row) for rows in stored.values() for row in rows]  # left out by --episodes
    return found


def page(runs) -> str:
    """The whole page, in ASCII."""
    groups, strings = grouped(runs), {}
    data = {"title": runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
            "groups": [{"label": group.label, "runs": len(group.runs)} for group in groups],
            "runs": list(map(about_run, runs)), "charts": charts(groups, False) + charts(groups, True),
            "maps": maps(runs[0]) if len(runs) == 1 and not runs[0].distill else [],
            "episodes": episodes(runs, lambda string: strings.setdefault(string, len(strings))), "strings": list(strings)}
    template = TEMPLATE.read_text()
    policy = "default-src 'none'; base-uri 'none'; form-action 'none'"
    for tag in ("script", "style"):
        content = re.search(f"<{tag}>(.*?)</{tag}>", template, re.DOTALL)[1].encode()
        policy += f"; {tag}-src 'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"
    content = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return template.replace("@policy@", policy).replace("@data@", content)


def main(argv=None):
    parser = Parser(allow_abbrev=False, description="A run, or several, as one HTML page.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, or PREFIX of files PREFIX.metrics.jsonl ...")
    parser.add_argument("--out", default="", help="default: report.html, in the run's folder or, of several, here")
    parser.add_argument("--episodes", type=int, default=10_000, help="transcripts at most (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.episodes < 0:
        raise BadInput(f"--episodes must be 0 or above, got {args.episodes}")
    out = Path(args.out or Path(args.runs[0] if len(args.runs) == 1 and Path(args.runs[0]).is_dir() else "") / "report.html")
    if out.suffix != ".html" or not out.parent.is_dir() or out.is_dir() or out.resolve() == TEMPLATE:
        raise BadInput(f"--out must be a file NAME.html in a folder that exists, got {out}")
    try:
        runs = [load(run, args.episodes // len(args.runs)) for run in args.runs]
        html = page(runs)
    except RecursionError as error:
        raise BadInput("a line of these runs is nested too deeply to be shown") from error
    replace_file(out, html)
    size = f"{len(html) / 1e6:.1f} MB, {len(runs)} run{'s' * (len(runs) > 1)}"
    print(f"{plain(str(out))}: {size}, {sum(len(run.rollouts) for run in runs):,} episodes")
    for run in runs:
        for note in run.notes:
            print(f"  {plain(run.name)}: {note}")


if __name__ == "__main__":
    cli(main)
