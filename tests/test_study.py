"""study.py: figures against hand-made ones, and a fake program that stands for a training run."""
import json
import math
import random
import statistics
import sys

import pytest

import study
from envs import BadInput
from funnel.options import FunnelOptions, with_defaults
from rl.options import Config, parse
from study import paired, read_run, verdict

FAKE_PROGRAM = '''
import json, pathlib, sys
words = sys.argv[1:]
seed, out = int(words[words.index("--seed") + 1]), pathlib.Path(words[words.index("--out") + 1])
with open("calls.txt", "a") as file:
    file.write(out.name + "\\n")
if "fail" in words and not pathlib.Path("mended").exists():
    sys.exit("it broke")
out.mkdir(parents=True, exist_ok=True)
final = 0.1 * seed + (0.5 if "hybrid" in words else 0.0)
row = {"interval": [0, 1], "episodes": 4, "clean_success": final / 2, "abstain_turns": 3, "abstained": 1}
rows = [{"step": 0, "split": "valid", "policy": "trained", "success": 0.0}, {"step": 2, "split": "valid", "policy":
        "trained", "success": final + 0.1}, {"step": 0, "split": "test", "policy": "base", "success": 0.05, **row},
        {"step": 4, "split": "test", "policy": "trained", "success": final, **row}]
(out / "evaluations.jsonl").write_text("".join(json.dumps(r) + "\\n" for r in rows))
(out / "metrics.jsonl").write_text("".join(json.dumps({"step": s, "success_hinted": s / 10}) + "\\n" for s in range(1, 5)))
(out / "config.json").write_text(json.dumps({"algorithm": "grpo", "commit": "abc"}))
'''


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """grpo.py is a fake program; the study runs in an empty folder."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "grpo.py").write_text(FAKE_PROGRAM)
    monkeypatch.setattr(study, "HERE", tmp_path / "code")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def calls(folder):
    return (folder / "calls.txt").read_text().split() if (folder / "calls.txt").exists() else []


def test_paired_difference_by_hand():
    differences = [0.1, 0.3, 0.2, 0.0, 0.4]
    got = paired(differences)
    half = 2.776 * statistics.stdev(differences) / math.sqrt(5)  # Student's t, 4 degrees of freedom
    assert got["mean"] == pytest.approx(0.2) and got["low"] == pytest.approx(0.2 - half)
    assert got["high"] == pytest.approx(0.2 + half) and got["p"] == pytest.approx(4 / 32)  # one zero: two ways each
    assert verdict(got) == "higher" and verdict(paired([-d for d in differences])) == "lower"


def test_no_difference_is_not_decided_and_one_seed_never_decides():
    assert verdict(paired([0.1, -0.1, 0.0])) == "not decided"
    assert verdict(paired([0.9])) == "not decided" and paired([0.9])["p"] == 1.0
    assert paired([0.0, 0.0])["p"] == 1.0


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = random.Random(0)
    covered = 0
    for _ in range(2000):
        d = paired([rng.gauss(0.3, 1.0) for _ in range(5)])
        covered += d["low"] <= 0.3 <= d["high"]
    assert 0.935 < covered / 2000 < 0.965


def test_a_study_writes_its_figures(fake, capsys):
    study.enrichment(["--arms", "none", "hybrid", "hybrid+mixed", "--seeds", "3", "--steps", "4", "--jobs", "2"])
    got = json.loads((fake / "results" / "keydoor-grpo-enrich" / "study.json").read_text())
    assert list(got["arms"]) == ["none", "hybrid", "hybrid+mixed"] and got["seeds"] == [0, 1, 2]
    arm = got["arms"]["hybrid"]
    assert [run["final"] for run in arm["runs"]] == pytest.approx([0.5, 0.6, 0.7])
    assert arm["valid"]["mean"] == pytest.approx(0.7)
    assert [run["peak"] for run in arm["runs"]] == pytest.approx([0.6, 0.7, 0.8])
    assert arm["final"] == pytest.approx({"mean": 0.6, "std": 0.1}) and arm["clean"]["mean"] == pytest.approx(0.3)
    assert arm["success_hinted"]["mean"] == pytest.approx(0.4) and arm["difference"]["mean"] == pytest.approx(0.5)
    assert "--enrich-mixed" in got["arms"]["hybrid+mixed"]["options"] and "--enrich-mixed" not in arm["options"]
    assert "difference" not in got["arms"]["none"] and got["arms"]["none"]["options"][:3] == ["--steps", "4", "--env-options"]
    assert "| `hybrid` | 0.600 ± 0.100 |" in capsys.readouterr().out
    assert "3 of 9" in (fake / "results" / "keydoor-grpo-enrich" / "study.md").read_text()
    assert (fake / "results" / "keydoor-grpo-enrich" / "study.png").stat().st_size > 1000


def test_finished_runs_are_not_done_again_and_other_options_are_refused(fake):
    study.enrichment(["--arms", "none", "hybrid", "--seeds", "1", "--steps", "4"])
    assert len(calls(fake)) == 2
    study.enrichment(["--arms", "none", "hybrid", "--seeds", "2", "--steps", "4"])
    assert sorted(calls(fake)) == ["hybrid__0", "hybrid__1", "none__0", "none__1"]
    with pytest.raises(BadInput, match="was run with other options"):
        study.enrichment(["--arms", "none", "hybrid", "--seeds", "2", "--steps", "5"])
    assert len(calls(fake)) == 4


def test_a_run_that_fails_is_named_and_the_rest_is_kept(fake):
    argv = ["--arms", "none", "hybrid", "--seeds", "1", "--env-options", "fail"]
    study.HERE.joinpath("grpo.py").write_text(FAKE_PROGRAM.replace('"fail" in words', '"hybrid" in words'))
    with pytest.raises(BadInput, match="hybrid, seed 0, failed: see .*hybrid__0.log"):
        study.enrichment(argv)
    assert "it broke" in (fake / "runs" / "keydoor-grpo-enrich" / "hybrid__0.log").read_text()
    (fake / "mended").touch()
    study.enrichment(argv)
    assert calls(fake) == ["none__0", "hybrid__0", "hybrid__0"]


def test_an_arm_may_set_an_option_of_the_environment(fake):
    study.enrichment(["--arms", "none", "ag-early+mixed+commands=3", "--seeds", "1"])
    arms = json.loads((fake / "results" / "keydoor-grpo-enrich" / "study.json").read_text())["arms"]
    assert arms["ag-early+mixed+commands=3"]["options"][-6:] == ["--enrich", "ag-early", "--enrich-mixed", "--env-options",
                                                                 "stages=6", "commands=3"]
    assert arms["none"]["options"] == ["--env-options", "stages=6", "commands=4", "--enrich-late", "4,8"]


def test_the_study_of_distillation(fake):
    fake.joinpath("code", "distill.py").write_text(FAKE_PROGRAM)
    study.distillation(["--arms", "full", "random", "--seeds", "2", "--rounds", "3"])
    got = json.loads((fake / "results" / "distill" / "study.json").read_text())
    assert got["program"] == "distill.py" and got["arms"]["random"]["options"] == ["--rounds", "3", "--select", "random"]
    with pytest.raises(BadInput, match="unknown arm 'both'"):
        study.distillation(["--arms", "full", "both"])


def test_the_arms_of_distillation_are_options_of_it_and_all_different_but_skillopt(monkeypatch):
    made = {arm: vars(with_defaults(parse(FunnelOptions, words, common=FunnelOptions))) | {"started": ""}
            for arm, words in study.DISTILL_ARMS.items() if arm not in study.OTHER_PROGRAMS}
    same = [{one, other} for one in made for other in made if one < other and made[one] == made[other]]
    assert same == [{"skillopt", "state-only"}]
    seen = []
    monkeypatch.setattr(study, "study", lambda args, program, arms, facts: seen.extend(arms))
    study.distillation([])
    assert set(seen) == {*study.DISTILL_ARMS} - {"skillopt", *study.OTHER_PROGRAMS}  # state-only is not run twice
    study.distillation(["--arms", "full", "skillopt", "skillopt-lite"])
    assert seen[-2:] == ["skillopt", "skillopt-lite"]


def test_supervised_has_as_many_steps(fake):
    study.enrichment(["--arms", "none", "supervised", "--seeds", "1", "--steps", "7", "--tasks-per-step", "3", "--group", "5",
                      "--minibatches", "2"])
    options = json.loads((fake / "results" / "keydoor-grpo-enrich" / "study.json").read_text())["arms"]["supervised"]["options"]
    assert options[-10:] == ["--steps", "0", "--warm-start", "gold", "--warm-start-steps", "14", "--warm-start-lr", "0.001",
                             "--warm-start-batch", "7"]


@pytest.mark.parametrize("argv, says", [
    (["--arms", "none", "hybird"], "unknown arm 'hybird'"), (["--arms", "none", "hybrid+mxed"], "unknown arm"),
    (["--arms", "none"], "two or more"), (["--arms", "none", "none"], "two or more"),
    (["--arms", "none", "supervised", "--warm-start", "random"], "without --warm-start"),
    (["--enrich", "hybrid"], "a study sets --enrich itself"), (["--seed", "3"], "a study sets --seed itself"),
    (["--stpes", "3"], "unknown option"), (["--seeds", "0"], "--seeds"), (["--jobs", "0"], "--jobs"),
    (["--algorithm", "ppo"], "--algorithm"), (["--arms", "none", "hybrid", "--enrich-late", "1,2"], "late window")])
def test_bad_input_is_one_line(fake, argv, says):
    with pytest.raises(BadInput, match=says) as error:
        study.enrichment(argv)
    assert "\n" not in str(error.value) and calls(fake) == []


def test_the_table_can_be_made_again(fake, capsys):
    study.enrichment(["--arms", "none", "hybrid", "--seeds", "2", "--steps", "4"])
    folder = fake / "results" / "keydoor-grpo-enrich"
    before = (folder / "study.md").read_text()
    (folder / "study.md").unlink()
    study.main([str(folder)])
    assert (folder / "study.md").read_text() == before
    capsys.readouterr()
    study.main([str(folder), "hybrid"])
    assert "final − hybrid [95 %], p" in (said := capsys.readouterr().out) and "-0.500 [-0.500, -0.500]" in said
    assert (folder / "study.md").read_text() == before
    for argv, says in ((["nowhere"], "usage"), ([str(folder), "both"], "no arm 'both'; it has: none, hybrid")):
        with pytest.raises(BadInput, match=says):
            study.main(argv)


def test_the_final_state_is_told_and_not_the_residual_one(tmp_path):
    rows = [("base", False, None, 0.1), ("base", True, None, 0.2), ("trained", False, None, 0.3), ("trained", True, None, 0.4),
            ("trained", True, True, 0.5), ("trained", False, True, 0.6)]  # a residual state may be empty
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(
        {"step": 1, "split": "test", "policy": policy, "state": state, "residual": residual, "success": success,
         "clean_success": success}) + "\n" for policy, state, residual, success in rows))
    (tmp_path / "config.json").write_text('{"algorithm": "distill", "commit": "abc"}')
    run = read_run(tmp_path)
    assert (run["base"], run["final"], run["final_with_state"]) == (0.1, 0.3, 0.4)


def test_an_unfinished_run_has_no_figures(tmp_path):
    assert read_run(tmp_path) is None
    rows = [{"step": 0, "split": "test", "policy": "base", "success": 0.1}]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_run(tmp_path) is None


def test_every_modifier_is_an_option_of_training():
    for words in study.MODIFIERS.values():
        assert parse(Config, words) != Config()
    assert "torch" not in study.__dict__ and sys.modules["study"] is study
