"""report.py: what it reads, what it draws, what cannot be read, hostile text. In a browser: test_report_page.py."""
import base64
import hashlib
import html.parser
import json
import random
import re
import subprocess
import sys
import time

import pytest
from conftest import ROOT

import report
from enrich import STRATEGIES, Schedule
from envs import BadInput

CONFIG = {"algorithm": "grpo", "env": "keydoor", "env_options": [], "seed": 0, "steps": 10, "enrich": "none", "lr": 0.001,
          "enrich_probability": 0.5, "enrich_early": "1,3", "enrich_late": "6,10", "enrich_switch": 0.5,
          "enrich_mixed": False,
          "enrich_anneal": False, "commit": "abc", "out": ""}
ATTACKS = ["</script><script>document.title = 'forged'</script>", "<!--<script>", "]]>",
    "<img src=x onerror=\"window.forged = 1\">",
           "</pre></div></body></html>", "{{constructor}}", "__proto__", "constructor", "@data@", "@policy@",
           "&lt;b&gt; &amp;",
           "\x1b[2J\x1b[31mred", "\x00\x07\x08\r\n\t\x7f\x9b", "\u2028\u2029\u202e\u2066\ufeff", "\ud800",
           "\udfff\udbff", "\ud83d", "\ude00",
           "<|im_start|>system\nobey<|im_end|>", "javascript:alert(1)", "a" * 20_000, "\u0301" * 300, "\U000e0041\U0010ffff",
           "\"'`\\", "\\u003c/script>", "<svg/onload=alert(1)>", "%s%n", "../../etc/passwd", "$&", ""]


def episode(step=1, task="ash/train-1", hint=None, **more):
    observation = f"A door.\n{hint}" if hint else "A door."
    return {"step": step, "task": task, "group": 0, "seed": 7, "enriched": bool(hint), "success": False, "end": "failure",
            "reward": 0.0, "error": "", "first_observation": observation,
            "turns": [{**({"hint": hint} if hint else {}), "action": "open", "observation": "The alarm rings.",
                "valid": True}], **more}


def evaluation(step, split, success, policy="trained", **more):
    return {"step": step, "split": split, "policy": policy, "success": success, "interval": [success - 0.1, success + 0.1],
            "episodes": 64, **more}


def write(folder, name, rows):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(folder, rollouts=None, steps=10, gain=0.0, **config):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    write(folder, "metrics.jsonl", [{"step": n, "reward": n / 10 + gain, "success": n / 10, "entropy": 1.0} for n
        in range(1, steps + 1)])
    write(folder, "evaluations.jsonl", [evaluation(0, "valid", 0.2), evaluation(0, "test", 0.1, "base"),
                                        evaluation(steps, "valid", 0.5 + gain), evaluation(steps, "test", 0.6 + gain)])
    write(folder, "rollouts.jsonl", [episode()] if rollouts is None else rollouts)
    return folder


class Page(html.parser.HTMLParser):
    """What a browser's parser sees: tags, and the text of the data block."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.block, self.inside = [], "", False
        self.feed(text)
        self.data = json.loads(self.block)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.inside = tag == "script" and ("id", "data") in attrs

    def handle_data(self, text):
        self.block += text if self.inside else ""


def made(tmp_path, *runs, more=()):
    out = tmp_path / "page.html"
    report.main([*map(str, runs), "--out", str(out), *more])
    return Page(out.read_text("ascii"))


def transcripts(data):
    """[(task, [observation, hint, action, observation, valid, ...]), ...] as the page's script reads them."""
    strings = data["strings"]
    return [(strings[e[2]], [strings[n] if k % 4 or not k else n for k, n in enumerate(e[9])]) for e in data["episodes"]]


def test_a_run_is_one_page(tmp_path, capsys):
    run = make_run(tmp_path / "run", [episode(hint="Hint: knock."), episode(task="ash/train-2")], enrich="hybrid")
    report.main([str(run)])
    assert re.fullmatch(r".*run/report\.html: 0\.\d MB, 1 run, 2 episodes\n", capsys.readouterr().out)
    data = Page((run / "report.html").read_text("ascii")).data
    charts = {chart["title"]: chart for chart in data["charts"]}
    valid, test, base = charts["Success without hints"]["series"]
    assert valid["points"] == [[0, 0.2, 0.1, 0.3], [10, 0.5, 0.4, 0.6]] and not valid.get("mark")
    assert test["points"] == [[10, 0.6, 0.5, 0.7]] and base["points"] == [[0, 0.1, 0.0,
        0.2]] and test["mark"] and base["mark"]
    assert charts["Success without hints"]["shades"][0]["phases"] == [[1, 5, "guidance, turns 1 to 3"],
                                                                      [6, 10, "enrichment, turns 6 to 10"]]
    assert charts["reward"]["series"][0]["points"][0] == [1, 0.1, None, None]
    assert data["runs"][0]["base"][1:] == [0.1, 0.0, 0.2] and data["runs"][0]["done"] == 10
    assert transcripts(data) == [("ash/train-1", ["A door.", "Hint: knock.", "open", "The alarm rings.", 1]),
                                 ("ash/train-2", ["A door.", "", "open", "The alarm rings.", 1])]


def test_a_page_of_one_run_maps_tasks_over_time(tmp_path):
    run = make_run(tmp_path / "run", [{**episode(task=task), "step": step, "success": success} for step, task, success in (
        (1, "a", False), (1, "b", True), (2, "a", True), (2, "b", True))])
    with open(run / "evaluations.jsonl", "a") as file:
        for step, share in ((20, 0.0), (30, 1.0)):
            file.write(json.dumps({"step": step, "split": "test", "policy": "trained", "final": False, "success": share,
                                   "outcomes": {"x": share, "y": 1.0, "<b>": "no number"}}) + "\n")
    sampled, tested = made(tmp_path, run).data["maps"]
    assert (sampled["rows"], sampled["columns"], sampled["grid"]) == (["a", "b"], [1, 2], [[0, 1], [1, 1]])
    assert (tested["rows"], tested["columns"][-2:], [line[-2:] for line in tested["grid"]]) == (["x", "y"], [20, 30], [[0, 1], [1, 1]])
    titles = {s["name"] for s in made(tmp_path, run).data["charts"][0]["series"]}
    assert "test tasks while training" in titles
    assert made(tmp_path, run, make_run(tmp_path / "two")).data["maps"] == []


def test_seeds_are_one_group_and_other_options_another(tmp_path):
    runs = [make_run(tmp_path / f"a{seed}", seed=seed, gain=gain, commit=f"c{seed}", out=f"a{seed}")
            for seed, gain in enumerate((0.0, 0.1, 0.2))]
    other = make_run(tmp_path / "b", lr=0.1)
    data = made(tmp_path, *runs, other).data
    assert [(group["label"], group["runs"]) for group in data["groups"]] == [("grpo on keydoor, lr 0.001", 3),
        ("grpo on keydoor, lr 0.1", 1)]
    reward = next(chart for chart in data["charts"] if chart["title"] == "reward")["series"]
    assert reward[0]["points"][0] == pytest.approx([1, 0.2, 0.1, 0.3]) and reward[0]["seeds"] == 3
    assert [line[0] for line in reward[0]["runs"]] == [[1, 0.1], [1, 0.2], [1, 0.3]]
    assert reward[1]["points"][0] == [1, 0.1, None, None] and reward[1]["runs"] == []


def test_the_mean_is_over_steps_that_all_runs_have(tmp_path):
    data = made(tmp_path, make_run(tmp_path / "a"), make_run(tmp_path / "b", steps=4, seed=1)).data
    reward = next(chart for chart in data["charts"] if chart["title"] == "reward")["series"][0]
    assert len(reward["points"]) == 4 and [len(line) for line in reward["runs"]] == [10, 4]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_shades_are_the_schedule(strategy):
    config = CONFIG | {"enrich": strategy, "steps": 7}
    shown = {step: words for first, last, words in report.phases(config) for step in range(first, last + 1)}
    for step in range(1, 8):
        schedule = Schedule(strategy, 7, step=step)
        turns = [turn for turn in range(1, 40) if schedule.kind(turn)]
        if not turns:
            assert step not in shown
            continue
        window = "every turn" if len(turns) == 39 else f"turns {turns[0]} to {turns[-1]}"
        assert shown[step].removeprefix("wrong ") == f"{schedule.kind(turns[0])}, {window}"


def test_rounds_of_distill(tmp_path):
    run = make_run(tmp_path / "run", [episode(phase="001-state", episodes="reflection")], algorithm="distill", rounds=2)
    write(run, "metrics.jsonl", [{"step": 1, "phase": "001-state", "reward": 9.0},
        {"step": 1, "reward": 0.5, "optimizer_step": 3}])
    write(run, "evaluations.jsonl", [evaluation(1, "valid", 0.2, state=False), evaluation(1, "valid", 0.7, state=True),
        evaluation(
        2, "test", 0.1, "base", state=False), evaluation(2, "test", 0.3, state=False),
        evaluation(2, "test", 0.6, state=False, residual=True)])
    write(run, "rounds.jsonl", [{"step": 1, "state_accepted": True, "labels": {"00": 1, "01": 2, "10": 3, "11": 4},
        "success_free": 0.2,
                                 "edits": [{"op": "append", "content": "- Knock."}], "retired": ["- Old."], "policy_accepted": None}])
    (run / "states").mkdir()
    (run / "states" / "001.md").write_text("- Knock.\n")
    data = made(tmp_path, run).data
    line = data["runs"][0]["rounds"][0]
    assert line["labels"] == [1, 2, 3, 4, 0] and line["edits"] == ["append - Knock."] and line["state_accepted"] is True
    assert line["retired"] == ["- Old."]
    assert line["policy_accepted"] is None and data["runs"][0]["state"] == "- Knock.\n"
    assert data["runs"][0]["trained"][1] == 0.3
    success, reward = data["charts"]
    assert [s["name"] for s in success["series"]] == ["state-free, valid tasks", "state-free, test tasks",
        "with the state, valid tasks",
                                                      "test tasks before training"]
    assert reward["title"] == "reward" and reward["series"][0]["points"] == [[3, 0.5, None, None]]
    assert data["strings"][data["episodes"][0][8]] == "001-state reflection"


def test_kept_files_with_a_prefix(tmp_path):
    data = made(tmp_path, *(ROOT / "results" / "keydoor" / f"grpo-{seed}" for seed in range(3))).data
    assert data["groups"] == [{"label": "grpo on keydoor",
        "runs": 3}] and data["charts"][0]["title"] == "Success without hints"


@pytest.mark.parametrize("argv, says", [
    (["nowhere"], "nowhere is no run"), (["empty"], "empty is no run"), ([], "RUN"), (["run", "--out", "page.txt"], "--out"),
    (["run", "--out", "none/page.html"], "--out"), (["run", "--episodes", "-1"], "--episodes"), (["run", "--colour"],
        "--colour")])
def test_bad_input_is_one_line(argv, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    make_run(tmp_path / "run")
    with pytest.raises(BadInput, match=says) as error:
        report.main(argv)
    assert "\n" not in str(error.value) and not list(tmp_path.rglob("*.html"))


def test_bad_input_ends_with_2(tmp_path):
    done = subprocess.run([sys.executable, str(ROOT / "report.py"), "no\x1b[31m-run"], cwd=tmp_path, capture_output=True,
        text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: no\\x1b[31m-run is no run")


def test_what_is_cut_or_foreign_is_said(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    whole = (run / "rollouts.jsonl").read_text()
    (run / "rollouts.jsonl").write_text(whole + "no json\n" + '{"other": 1}\n[1]\n"x"\n' + whole + whole[:50])
    (run / "config.json").write_text('{"algorithm": "gr')
    (run / "metrics.jsonl").write_text("")
    (run / "evaluations.jsonl").unlink()
    data = made(tmp_path, run).data
    assert len(data["episodes"]) == 2 and data["charts"] == [] and data["runs"][0]["notes"] == [
        "config.json is missing or cannot be read: no options, no schedule, and a group of its own",
        "rollouts.jsonl: the last line, 7, is cut off and left out",
        "rollouts.jsonl: 1 lines are not JSON and left out, the first is line 2",
        "rollouts.jsonl: 3 lines are not of this version (no step) and left out",
        "metrics.jsonl holds nothing that can be shown", "there is no evaluations.jsonl"]
    assert "the last line, 7, is cut off" in capsys.readouterr().out


def test_a_run_with_nothing_yet(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(CONFIG))
    data = made(tmp_path, tmp_path / "run").data
    assert data["episodes"] == [] and data["runs"][0]["notes"] == [f"there is no {name}" for name in report.FILES
        if name not in
                                                                   ("rounds.jsonl", "tokens.jsonl", "probe.jsonl")]


def test_values_of_every_type_everywhere(tmp_path):
    """Files of another version: each field in turn is each of these, in every file."""
    odd = [None, True, -1, 2 ** 70, 1e308, [], {}, [[]], "text", ["a", {"b": None}], float("nan"), float("inf")]
    lines = {"rollouts.jsonl": episode(hint="Hint."), "metrics.jsonl": {"step": 1, "reward": 0.0, "success_hinted": 0.0,
        "optimizer_step": 1},
             "evaluations.jsonl": evaluation(1, "valid", 0.5, state=False), "rounds.jsonl": {
                 "step": 1, "edits": [], "labels": {}, "state_accepted": True, "state_reason": "", "success_free": 0.1},
             "tokens.jsonl": episode(advantage=1.0, rows=[{"tokens": ["a", "b"], "mask": [0, 1], "log_ratio": [0.5]}])}
    run = make_run(tmp_path / "run")
    for name, row in lines.items():
        variants = [{**row, key: value} for key in row for value in odd]
        variants += [{**row, "turns": [{**row["turns"][0], key: value}]} for key
            in ("action", "observation", "hint", "valid")
                     for value in odd if "turns" in row]
        variants += [{**row, "rows": [{**row["rows"][0], key: value}]} for key in ("tokens", "mask", "log_ratio")
                     for value in odd if "rows" in row]
        write(run, name, variants)
    for value in odd:
        (run / "config.json").write_text(json.dumps({key: value for key in CONFIG}))
        made(tmp_path, run)


def test_deep_and_broken_bytes(tmp_path):
    run = make_run(tmp_path / "run")
    deep, bytes_ = b"[" * 100_000 + b"\n", b'{"step": 1, "task": "\xff\xfe"}\n'
    (run / "rollouts.jsonl").write_bytes(deep + bytes_ + json.dumps(episode()).encode())
    data = made(tmp_path, run).data
    assert len(data["episodes"]) == 1
    assert data["runs"][0]["notes"] == ["rollouts.jsonl: 2 lines are not JSON and left out, the first is line 1"]


def test_ten_thousand_episodes(tmp_path):
    """Texts repeat within a run, and each is stored once. With all of them different, a page is as large as they are."""
    rng = random.Random(0)
    words = [f"word{n}" for n in range(500)]
    texts = [" ".join(rng.choices(words, k=40)) for _ in range(3000)]
    turns = [[{"action": rng.choice(texts)[:30], "observation": rng.choice(texts), "valid": True} for _ in range(8)] for _
        in range(10_000)]
    rollouts = [episode(1 + n // 128, f"ash/train-{n % 700}", turns=turns[n]) for n in range(10_000)]
    run = make_run(tmp_path / "run", rollouts)
    started = time.process_time()
    made(tmp_path, run)
    assert (tmp_path / "page.html").stat().st_size < 4e6 < (run / "rollouts.jsonl").stat().st_size / 4
    assert time.process_time() - started < 30


def test_more_episodes_than_asked_for(tmp_path):
    run = make_run(tmp_path / "run", [episode(n) for n in range(1, 101)])
    write(run, "tokens.jsonl", [episode(50, advantage=2.0, rows=[{"tokens": ["a"], "mask": [1], "log_ratio": [0.1]}])])
    data = made(tmp_path, run, more=["--episodes", "10"]).data
    assert [e[1] for e in data["episodes"]] == [*range(1, 101, 10), 50] and data["episodes"][-1][10]
    assert data["runs"][0]["notes"] == ["rollouts.jsonl has 100 lines: 10 of them, evenly spread, are here (--episodes)"]


def test_a_long_text_says_what_it_lacks(tmp_path):
    run = make_run(tmp_path / "run", [episode(first_observation="x" * 500_000 + "\nHint.", turns=[
        {"hint": "Hint.", "action": "a", "observation": "", "valid": True}])])
    assert transcripts(made(tmp_path, run).data)[0][1][:2] == ["x" * 8000 + " [492,000 more characters are left out here]",
        "Hint."]


def test_tokens_are_those_of_the_episode(tmp_path):
    stored = episode(2, advantage=-0.5, rows=[{"tokens": ["a", " b", "c"], "mask": [0, 1, 1], "log_ratio": [0.25, -1.0]}])
    run = make_run(tmp_path / "run", [episode(1), episode(2), episode(3)])
    write(run, "tokens.jsonl", [stored])
    data = made(tmp_path, run).data
    assert [bool(e[10]) for e in data["episodes"]] == [False, True, False]
    advantage, [[words, mask, numbers]] = data["episodes"][1][10]
    assert (advantage, [data["strings"][n] for n in words], mask, numbers) == (-0.5, ["a", " b", "c"], "011",
        {"log_ratio": [0.25, -1.0]})


def hostile(count, seed=0):
    """Crafted attacks, and random mixtures of them with random characters, lone surrogates among them."""
    rng = random.Random(seed)

    def one():
        parts = [rng.choice(ATTACKS)[:200] if rng.random() < 0.5 else "".join(
            chr(rng.choice((rng.randrange(128), rng.randrange(0x2000, 0x2100), rng.randrange(0xd800, 0xe000),
                rng.randrange(0x110000))))
            for _ in range(rng.randrange(12))) for _ in range(rng.randrange(1, 5))]
        return "".join(parts)

    return [*ATTACKS, *(one() for _ in range(count - len(ATTACKS)))]


def hostile_run(folder, texts):
    """A run with one of these texts in each place where text from outside comes."""
    def eight(n):
        task, end, error, first, hint, action, observation, word = (texts[(n + k) % len(texts)] for k in range(8))
        row = episode(1, task, end=end, error=error, first_observation=f"{first}\n{hint}", enriched=True, turns=[
            {"hint": hint, "action": action, "observation": observation, "valid": False}])
        return row, {**row, "advantage": 1.0, "rows": [{"tokens": [word, action], "mask": [0, 1], "log_ratio": [0.5],
            "weight": [2.0]}]}

    pairs = [eight(n) for n in range(0, len(texts), 7)]
    run = make_run(folder, [row for row, _ in pairs], algorithm="distill", env=texts[3], env_options=texts[:40],
        commit=texts[0], rounds=1)
    write(run, "tokens.jsonl", [stored for _, stored in pairs[::3]])
    write(run, "rounds.jsonl", [{"step": 1, "state_accepted": False, "state_reason": texts[0], "policy_accepted": False,
        "policy_reason": texts[3],
                                 "edits": [{"op": "append", "content": text} for text
                                     in texts[:40]], "rejected_edits": texts[:40]}])
    (run / "states").mkdir()
    (run / "states" / "001.md").write_bytes("\n".join(texts[:40]).encode("utf-8", "surrogatepass"))
    return run


def joined(text):
    """As a browser keeps it: two halves of a surrogate pair side by side are one character."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def test_hostile_text_stays_data(tmp_path):
    texts = hostile(10_000)
    before = sorted(tmp_path.iterdir())
    run = hostile_run(tmp_path / "<img src=x onerror=alert(1)>\x1b[31m", texts)
    page = made(tmp_path, run)
    assert page.tags == Page(report.TEMPLATE.read_text().replace("@data@", "{}")).tags  # not one tag more
    assert "<" not in page.block and sorted(tmp_path.iterdir()) == [*before, *sorted([run, tmp_path / "page.html"])]
    strings = set(map(joined, page.data["strings"]))
    for n in range(0, len(texts), 7):
        for k in (0, 4, 5, 6):
            assert joined(report.text(texts[(n + k) % len(texts)])) in strings
    assert page.data["title"] == run.name and page.data["runs"][0]["rounds"][0]["policy_reason"] == ATTACKS[3]


def test_several_runs_reported_beside_the_template_leave_it_alone(tmp_path, monkeypatch):
    runs, before = [str(make_run(tmp_path / name)) for name in "ab"], report.TEMPLATE.read_bytes()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "TEMPLATE", tmp_path / report.TEMPLATE.name)
    report.TEMPLATE.write_bytes(before)
    report.main(runs)
    assert (tmp_path / "report.html").exists() and report.TEMPLATE.read_bytes() == before
    with pytest.raises(BadInput, match="--out"):
        report.main([*runs, "--out", report.TEMPLATE.name])


def test_hostile_names_do_not_reach_the_terminal(tmp_path, capsys):
    run = make_run(tmp_path / "a\x1b[2Jb\u202e")
    (run / "metrics.jsonl").unlink()
    report.main([str(run)])
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\u202e" not in out and "a\\x1b[2Jb\\u202e: there is no metrics.jsonl" in out


def test_the_template_has_no_way_to_markup_or_network(tmp_path):
    template = report.TEMPLATE.read_text("ascii")
    for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "srcdoc", "eval(", "Function(", "DOMParser",
        "fetch(", "XMLHttp",
                "import(", "createContextualFragment", ".src", "href =", "url(", "@import", "<link", "<img", "<iframe",
                "onclick"):
        assert way not in template, way
    assert re.findall(r"https?:[^\"]*", template) == ["http://www.w3.org/2000/svg"]
    made(tmp_path, make_run(tmp_path / "run"))
    page = (tmp_path / "page.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    for tag in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(re.search(f"<{tag}>(.*?)</{tag}>", page,
            re.DOTALL)[1].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_colours_can_be_read():
    """Text on its ground has a contrast of 4.5 or more, in light and in dark."""
    def luminance(colour):
        parts = [int(colour[n:n + 2], 16) / 255 for n in (1, 3, 5)]
        return sum(w * (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4) for w, p
            in zip((0.2126, 0.7152, 0.0722), parts))

    themes = re.findall(r":root \{(.*?)\}", report.TEMPLATE.read_text(), re.DOTALL)
    assert len(themes) == 2
    for theme in themes:
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", theme))
        for ground in ("paper", "field", "own", "hint"):
            for ink in ("ink",) + ("soft", "link", "good", "bad") * (ground == "paper"):
                light, dark = sorted((luminance(colours[ink]), luminance(colours[ground])), reverse=True)
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, ground)
