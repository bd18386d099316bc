"""rl/results.py: the evaluations of a run, the best adapter; tools/analyses.py: what is made of them."""
import json

import pytest
import torch
from conftest import SMALL, metrics

import grpo
from envs import BadInput
from peft import load_peft_weights
from rl.logs import is_final, read, success_map
from rl.results import Evaluations
from study import read_run
from tools import analyses

MORE = [*SMALL, "--eval-every", "1", "--keep-every", "2", "--lr", "0.01"]


@pytest.fixture(scope="module")
def on_test(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results") / "run__0"
    grpo.main([*MORE, "--steps", "4", "--eval-split", "test", "--out", str(folder)])
    return folder


def evaluations(folder, final):
    return [row for row in read(folder / "evaluations.jsonl") if is_final(row) == final]


def test_evaluations_while_training_are_of_the_split_and_told_from_those_of_the_end(on_test):
    rows, ends = evaluations(on_test, False), evaluations(on_test, True)
    assert [(row["step"], row["split"], row["policy"]) for row in rows] == [(n, "test", "trained") for n in range(5)]
    assert {row["policy"] for row in ends} <= {"base", "trained", "best"} and all(row["split"] == "test" for row in ends)
    for row in rows + ends:
        assert len(row["outcomes"]) == row["episodes"] == 12
        assert sum(row["outcomes"].values()) / 12 == pytest.approx(row["success"])
    run = read_run(on_test)
    assert [point[0] for point in run["curve"]] == [0, 1, 2, 3, 4] and run["peak"] == max(row["success"] for row in rows)


def test_the_best_adapter_is_that_of_the_first_best_evaluation(tmp_path):
    """Successes made by hand; the weights are marked with the step."""
    successes = {0: 0.1, 1: 0.5, 2: 0.5, 3: 0.4}

    class Marked:
        def save_pretrained(self, folder, selected_adapters):
            folder.mkdir()
            (folder / "step").write_text(str(self.step))

    evaluations_, model = Evaluations(parsed(), tmp_path, None, None, [], {}, {}, None), Marked()
    evaluations_.play = lambda step, split, **how: play(step)

    def play(step):
        row = {"step": step, "split": "valid", "policy": "trained", "final": False, "success": successes[step]}
        with open(tmp_path / "evaluations.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        return row

    said = []
    for model.step in range(4):
        said.append(evaluations_.while_training(model.step, model))
    assert said == [True, True, False, False]
    assert (tmp_path / "adapter-best" / "step").read_text() == "1" and evaluations_.best() == 1


def parsed(*argv):
    from rl.options import Config, parse
    return parse(Config, list(argv))


def test_the_best_adapter_is_evaluated_beside_the_last(tmp_path, capsys):
    """Training at an absurd rate after step 1 makes the last policy worse than an earlier one."""
    folder = tmp_path / "run"
    grpo.main([*SMALL, "--eval-every", "1", "--steps", "1", "--out", str(folder)])
    grpo.main([*SMALL, "--eval-every", "1", "--steps", "3", "--lr", "1", "--resume", "--out", str(folder)])
    curve = {row["step"]: row["success"] for row in evaluations(folder, False)}
    best = max(curve, key=lambda step: (curve[step], -step))
    assert best < 3, curve
    out = capsys.readouterr().out
    assert f"step {best}, the best on valid tasks" in out and "after 3 steps" in out
    rows = {row["policy"]: row for row in evaluations(folder, True)}
    assert rows["best"]["step"] == best and rows["best"]["success"] > rows["trained"]["success"]
    weights = [load_peft_weights(str(folder / name), device="cpu") for name in ("adapter-best", "adapter")]
    assert not all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_a_resumed_run_has_the_same_best_adapter(on_test, tmp_path):
    folder = tmp_path / "run__0"
    words = [*MORE, "--eval-split", "test", "--save-every", "1", "--out", str(folder)]
    grpo.main([*words, "--steps", "2"])
    grpo.main([*words, "--steps", "4", "--resume"])
    assert metrics(folder) == metrics(on_test)
    assert evaluations(folder, False) == evaluations(on_test, False)
    for name in ("adapter-best", "adapters/000002", "adapters/000004"):
        one, two = (load_peft_weights(str(run / name), device="cpu") for run in (folder, on_test))
        assert set(one) == set(two) and all(torch.equal(one[key], two[key]) for key in one)


def test_other_splits_are_refused(tmp_path):
    with pytest.raises(BadInput, match="--eval-split must be one of valid, test, got train"):
        grpo.main([*SMALL, "--eval-split", "train", "--out", str(tmp_path / "run")])


# Analyses

def test_the_map_is_of_means_and_ordered_from_hard_to_easy():
    episodes = [(1, "easy", 1), (1, "easy", 1), (2, "hard", 0), (3, "easy", 1), (4, "hard", 1), (4, "hard", 0)]
    tasks, starts, grid = success_map(episodes, 2)
    assert (tasks, starts) == (["hard", "easy"], [1, 3]) and grid == [[0.0, 0.5], [1.0, 1.0]]
    assert success_map(episodes, 4)[2] == [[None, 0.0, None, 0.5], [1.0, None, 1.0, None]]
    assert success_map([], 3) == ([], [], [])


def test_the_paper_has_these_tiers():
    assert [analyses.tier(share) for share in (0.0, 0.33, 0.34, 0.66, 0.67, 1.0)] == ["hard", "hard", "medium", "medium", "easy", "easy"]


def made(folder, success, entropies=(1.0,)):
    """A finished run by hand: {task: success} on test tasks."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": n + 1, "entropy": e}) + "\n" for n, e in enumerate(entropies)))
    (folder / "rollouts.jsonl").write_text("")
    (folder / "evaluations.jsonl").write_text(json.dumps({"step": 1, "split": "test", "policy": "trained", "final": True,
                                                          "success": 0, "outcomes": success}) + "\n")
    return str(folder)


def test_tiers_are_made_by_some_runs_and_tell_of_others(tmp_path, capsys):
    none = [made(tmp_path / f"none__{n}", {"a": 0, "b": 0, "c": n, "d": 1}) for n in range(2)]
    hybrid = [made(tmp_path / f"hybrid__{n}", {"a": 1, "b": n, "c": 1, "d": 1}) for n in range(2)]
    analyses.main(["tiers", "--by", *none, "--of", *none, *hybrid])
    out = capsys.readouterr().out
    assert "hard (2)" in out and "medium (1)" in out and "easy (1)" in out
    assert "0.750 +0.750 [-2.426, +3.926]" in out and "effect of selection" in out
    analyses.main(["tiers", "--by", none[0], "--of", none[1], *hybrid])
    assert "effect of selection" not in capsys.readouterr().out
    with pytest.raises(BadInput, match="different tasks"):
        analyses.main(["tiers", "--by", *none, "--of", *hybrid, made(tmp_path / "other__0", {"z": 1})])


def test_entropy_is_a_mean_over_the_runs_of_an_arm_where_it_was_computed(tmp_path):
    runs = [made(tmp_path / f"none__{n}", {}, [1.0 + n, None, 3.0]) for n in range(2)]
    assert analyses.entropy_curves(analyses.arms_of(runs)) == {"none": [(1, 1.5), (3, 3.0)]}
    with pytest.raises(BadInput, match="no step with an entropy"):
        analyses.entropy_curves(analyses.arms_of([made(tmp_path / "dead__0", {}, [None])]))


def test_the_commands_write_pictures_of_a_real_run(on_test, tmp_path, capsys):
    analyses.main(["entropy", str(on_test), "--out", str(tmp_path / "entropy.png")])
    analyses.main(["map", str(on_test), "--bins", "2", "--out", str(tmp_path / "map.png")])
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("entropy.png", "map.png"))
    out = capsys.readouterr().out
    assert "training tasks, 2 bins of 2 steps" in out
    for argv, says in ((["map", str(on_test), str(on_test)], "one folder"), (["map", str(tmp_path)], "no episodes"),
                       (["map", str(on_test), "--bins", "0"], "--bins must be"), (["entropy", str(tmp_path)], "is no run")):
        with pytest.raises(BadInput, match=says):
            analyses.main(argv)
