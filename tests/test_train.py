"""The loop, the run's folder, evaluation and the command line, with the built-in game and model."""
import dataclasses
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dapo
import evaluate
import grpo
import gspo
import train
import warmstart
from envs import BadInput, Env
from envs.keydoor import KeyDoor
from runs import read
from tiny import SHIPPED

ROOT = Path(__file__).parent.parent
SMALL = ["--steps", "2", "--tasks-per-step", "3", "--group", "4", "--eval-episodes", "12", "--eval-every", "2",
         "--env-options", "stages=2", "commands=4"]
CLOCK = {"rollout_seconds", "learn_seconds", "rollout_tokens_per_second", "learn_tokens_per_second", "peak_memory_bytes"}


def metrics(folder):
    return [{key: value for key, value in row.items() if key not in CLOCK} for row in read(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    grpo.main([*SMALL, "--out", str(folder)])
    return folder


@pytest.mark.parametrize("algorithm", [grpo, dapo, gspo], ids=lambda module: module.__name__)
def test_each_script_writes_the_whole_folder(algorithm, tmp_path, capsys):
    folder = tmp_path / "run"
    algorithm.main([*SMALL, "--out", str(folder), "--tensorboard"])
    out = capsys.readouterr().out
    assert "base model" in out and "after 2 steps" in out and str(folder) in out
    rows = read(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for name in ("reward", "success", "enriched_fraction", "valid_action_fraction", "dead_group_fraction", "entropy",
                 "clip_fraction", "approx_kl", "ratio_max", "grad_norm", *CLOCK):
        assert isinstance(rows[-1][name], (int, float)), name
    assert rows[0]["enriched_fraction"] == 0.0
    evaluations = read(folder / "evaluations.jsonl")
    last = evaluations[-1]
    assert (last["step"], last["split"], last["policy"], last["episodes"]) == (2, "test", "trained", 12)
    assert 0 <= last["interval"][0] <= last["success"] <= last["interval"][1] <= 1
    assert [row["step"] for row in evaluations if row["split"] == "valid"] == [0, 2]
    assert json.loads((folder / "config.json").read_text())["algorithm"] == algorithm.__name__
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "adapter" / "adapter_model.safetensors").exists() and (folder / "checkpoint" / "step.json").exists()
    assert list(folder.glob("events.out.tfevents*"))
    episodes = read(folder / "rollouts.jsonl")
    assert {row["step"] for row in episodes} == {1, 2} and len(episodes) == sum(r["groups_sampled"] for r in rows) * 4
    for row in episodes:  # the episodes of a group share task, seed and first observation
        twins = [other for other in episodes if (other["step"], other["group"]) == (row["step"], row["group"])]
        assert len({(t["task"], t["seed"], t["first_observation"]) for t in twins}) == 1 and len(twins) == 4


def test_a_resumed_run_equals_an_unbroken_one(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    options = [*SMALL, "--save-every", "2", "--minibatches", "2"]
    gspo.main([*options, "--out", str(one), "--steps", "4"])
    gspo.main([*options, "--out", str(two), "--steps", "2"])
    with open(two / "metrics.jsonl", "a") as file:  # a step that was done after the checkpoint, then lost
        file.write(json.dumps({"step": 3, "reward": 9.0}) + "\n")
    gspo.main([*options, "--out", str(two), "--steps", "4", "--resume"])
    assert metrics(one) == metrics(two) and len(metrics(one)) == 4
    assert read(one / "rollouts.jsonl") == read(two / "rollouts.jsonl")
    assert read(one / "evaluations.jsonl")[-1] == read(two / "evaluations.jsonl")[-1]


def test_evaluation_does_not_touch_training_and_is_the_same_each_time(run, tmp_path):
    grpo.main([*SMALL, "--out", str(tmp_path / "often"), "--eval-every", "1"])
    grpo.main([*SMALL, "--out", str(tmp_path / "never"), "--eval-every", "0"])
    assert metrics(run) == metrics(tmp_path / "often") == metrics(tmp_path / "never")
    rows = [read(folder / "evaluations.jsonl")[-2:] for folder in (run, tmp_path / "often", tmp_path / "never")]
    assert rows[0] == rows[1] == rows[2]


def test_other_seed_other_run(run, tmp_path):
    grpo.main([*SMALL, "--out", str(tmp_path / "run"), "--seed", "1"])
    assert metrics(tmp_path / "run") != metrics(run)


def test_the_gradient_does_not_depend_on_the_micro_batch(run, tmp_path):
    grpo.main([*SMALL, "--out", str(tmp_path / "run"), "--micro-batch-tokens", "1"])
    for one, two in zip(metrics(run), metrics(tmp_path / "run")):
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-3)


def test_kl_to_the_reference_is_zero_before_the_first_update(tmp_path):
    argv = [*SMALL, "--out", str(tmp_path / "run"), "--beta", "0.1", "--env-options", "stages=1", "commands=3",
            "--warm-start", "gold", "--warm-start-steps", "2"]
    grpo.main(argv)
    first, second = metrics(tmp_path / "run")
    assert abs(first["kl_reference"]) < 1e-9 < second["kl_reference"]
    assert (tmp_path / "run" / "checkpoint" / "reference" / "adapter_model.safetensors").exists()
    grpo.main([*argv, "--steps", "3", "--resume"])
    assert metrics(tmp_path / "run")[-1]["kl_reference"] > second["kl_reference"] / 10


def test_warm_start_on_gold_paths_teaches_the_way(tmp_path):
    grpo.main([*SMALL, "--out", str(tmp_path / "run"), "--steps", "1", "--warm-start", "gold", "--warm-start-steps", "60",
               "--warm-start-lr", "2e-3"])
    assert read(tmp_path / "run" / "evaluations.jsonl")[0]["success"] >= 0.5  # step 0 on valid tasks


class Short(KeyDoor):
    """Its known solution ends before the game does, as some of ScienceWorld's do."""
    def reset(self, **how):
        self.played = 0
        return super().reset(**how)

    def step(self, action):
        done = super().step(action)
        self.played += 1
        return done

    def gold_action(self):
        return None if self.played else super().gold_action()


def test_a_known_solution_that_ends_early_ends_its_episode(word_chat):
    tasks = Short.tasks("train", stages=2)[:3]
    played = warmstart.play(lambda: Short(stages=2), word_chat, tasks, "gold", seed=0, max_turns=5)
    assert [len(t.turns) for t in played] == [1] * 3 and all(t.end != "env_error" for t in played)


def test_no_steps_is_the_warm_start_alone(tmp_path):
    grpo.main([*SMALL, "--steps", "0", "--warm-start", "gold", "--warm-start-steps", "2", "--out", str(tmp_path / "run")])
    rows = read(tmp_path / "run" / "evaluations.jsonl")
    assert [(row["split"], row["policy"]) for row in rows] == [("valid", "trained"), ("test", "base"), ("test", "trained")]
    assert read(tmp_path / "run" / "metrics.jsonl") == [] and (tmp_path / "run" / "adapter" / "adapter_config.json").exists()
    evaluate.main([str(tmp_path / "run"), "--eval-episodes", "4"])


class Asking(Env):
    """The first answer is invalid in every second task; what cannot be done is asked in the task "moon"."""
    max_turns = 2

    def reset(self, *, task, seed):
        self.task, self.turn = task, 0
        return "go", {}

    def step(self, action):
        self.turn += 1
        over, moon = self.turn == 2, self.task == "moon/0"
        info = {"success": over and self.task != "car/0", "valid": self.turn == 2 or self.task != "cart/0"}
        return "on", float(over), over, False, info | ({"abstain_turns": 1, "abstained": int(self.turn == 2)} if moon else {})


def test_evaluations_tell_clean_success_abstention_and_success_by_name(tmp_path):
    from rollout import Request, rollout
    from runs import episode_metrics
    from train import load_policy, parse
    _, chat = load_policy(parse(train.Config, []), {})
    tasks, act = ["moon/0", "car/0", "cart/0", "cart/1"], lambda prompts: [[5] for _ in prompts]
    result = evaluate.evaluate(act, chat, [Asking() for _ in range(3)], tasks, max_turns=2)
    assert (result["success"], result["clean_success"]) == (0.75, 0.5)
    assert (result["abstain_turns"], result["abstained"]) == (1, 1)
    assert result["success_by_name"] == {"moon": 1.0, "car": 0.0, "cart": 1.0}
    assert "abstain_turns" not in evaluate.evaluate(act, chat, [Asking()], tasks[1:], max_turns=2)
    played = rollout(act, chat, [Asking()], [Request(task) for task in tasks], max_turns=2)
    assert episode_metrics(played, 1)["abstention"] == 1.0 and "abstention" not in episode_metrics(played[1:], 1)


def test_training_can_start_from_an_adapter(run, tmp_path):
    grpo.main([*SMALL, "--out", str(tmp_path / "run"), "--adapter", str(run / "adapter")])
    before = [row for row in read(run / "evaluations.jsonl") if row["split"] == "valid"][-1]["success"]
    assert read(tmp_path / "run" / "evaluations.jsonl")[0]["success"] == before


def test_dynamic_sampling_hits_its_cap_on_a_hopeless_game(tmp_path, capsys):
    dapo.main([*SMALL, "--out", str(tmp_path / "run"), "--env-options", "stages=9", "commands=10", "--max-rounds", "2"])
    assert "cap of 2 rounds hit with 0 of 3 groups (6 sampled)" in capsys.readouterr().out
    rows = read(tmp_path / "run" / "metrics.jsonl")
    assert [(row["groups"], row["groups_sampled"], row["grad_norm"]) for row in rows] == [(0, 6, 0.0)] * 2


def test_overlong_penalty_reaches_the_advantages_and_not_the_metrics(run, tmp_path):
    dapo.main([*SMALL, "--out", str(tmp_path / "run"), "--overlong-max", "2", "--overlong-cache", "2"])
    assert all(0 <= row["reward"] <= 1 for row in read(tmp_path / "run" / "metrics.jsonl"))


def test_evaluate_a_finished_run_and_a_bare_model(run, capsys):
    evaluate.main([str(run)])
    printed = capsys.readouterr().out
    last = read(run / "evaluations.jsonl")[-1]
    assert f"{last['success']:.3f}" in printed.splitlines()[-1] and "base model" in printed
    evaluate.main(["--env-options", "stages=1", "--temperature", "1", "--samples", "4", "--eval-episodes", "8"])
    printed = capsys.readouterr().out
    assert "pass@4" in printed and "32" in printed and "adapter" not in printed and "hinted" not in printed


def test_evaluate_with_hints_beside_without(run, capsys):
    """The game's hint names the action that is right: copying it is the warm start's task, so success is near 1."""
    small = ["--env-options", "stages=1", "--eval-episodes", "32"]
    evaluate.main(small)
    standard = capsys.readouterr().out.splitlines()[-1]
    evaluate.main([*small, "--enrich", "ag-always", "--hinted"])
    _, plain, hinted = capsys.readouterr().out.splitlines()
    note = "base model, hinted (ag-always): not the standard environment"
    assert plain.split() == standard.split() and hinted.startswith(note)
    assert float(plain.removeprefix("base model").split()[0]) < 0.7 < 0.9 < float(hinted.removeprefix(note).split()[0])
    evaluate.main([str(run), "--enrich", "hybrid", "--enrich-late", "1,4", "--hinted", "--split", "valid"])
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.startswith("valid tasks") and ["hinted (hybrid)" in row for row in rows] == [False, True, False, True]


@pytest.mark.parametrize("algorithm", [grpo, dapo, gspo], ids=lambda module: module.__name__)
def test_each_algorithm_learns_a_game_of_one_stage(algorithm, tmp_path):
    """From random play (a third) to the hidden rule: what breaks the gradient's sign, the masks or the ratio fails here."""
    algorithm.main(["--env-options", "stages=1", "commands=4", "impossible=0", "--steps", "20", "--tasks-per-step", "8",
                    "--eval-every", "0", "--out", str(tmp_path / "run")])
    rewards = [row["reward"] for row in read(tmp_path / "run" / "metrics.jsonl")]
    assert sum(rewards[:3]) / 3 < 0.45 and sum(rewards[-3:]) / 3 > 0.65


def test_wilson_interval():
    assert evaluate.wilson(8, 10) == pytest.approx([0.4901625, 0.9433178], abs=1e-6)
    assert evaluate.wilson(0, 20)[0] == 0.0 and evaluate.wilson(20, 20)[1] == 1.0 and evaluate.wilson(0, 0) == [0.0, 1.0]


def test_pass_at_k_is_the_mean_over_all_subsets():
    for n, c in ((5, 0), (5, 2), (6, 6), (4, 1)):
        outcomes = [1] * c + [0] * (n - c)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(outcomes, k))
            assert evaluate.pass_at_k(n, c, k) == pytest.approx(sum(map(max, subsets)) / len(subsets))
    with pytest.raises(ValueError):
        evaluate.pass_at_k(3, 1, 4)


def test_fixed_tasks_are_spread_over_the_list():
    tasks = [str(n) for n in range(100)]
    assert evaluate.fixed_tasks(tasks, 4) == ["0", "25", "50", "75"] and evaluate.fixed_tasks(tasks, 200) == tasks


def test_each_task_once_before_any_comes_again():
    config = train.Config(group=2, seed=5)
    requests_of = train.group_requests(config, 3, ["a", "b", "c"])
    requests = requests_of(2) + requests_of(4)
    assert [r.group for r in requests] == [g for g in range(6) for _ in range(2)]
    tasks = [r.task for r in requests[::2]]
    assert sorted(tasks[:3]) == sorted(tasks[3:]) == ["a", "b", "c"]
    assert train.group_requests(config, 3, ["a", "b", "c"])(6) == requests
    assert train.group_requests(config, 4, ["a", "b", "c"])(6) != requests


class Broken(Env):
    """Fake: two training tasks, of which one always breaks in its second turn."""

    system_prompt, max_turns = "Open every door.", 3

    @classmethod
    def tasks(cls, split):
        return ["ash/0", "elm/0"]

    def reset(self, *, task, seed):
        self.task, self.turn = task, 0
        return "take iron key", {"success": False, "valid": True}

    def step(self, action):
        self.turn += 1
        if self.task == "elm/0" and self.turn == 2:
            raise OSError("the simulator is gone")
        return "take gold key", float("iron" in action), self.turn == 3, False, {"success": "iron" in action, "valid": True}


def test_a_broken_environment_ends_its_episodes_and_not_the_run(tmp_path, capsys):
    grpo.main(["--env", f"{__name__}:Broken", "--model", str(ROOT / "tiny-keydoor"), *SMALL[:-3], "--out",
               str(tmp_path / "run"), "--tasks-per-step", "2"])
    rows = read(tmp_path / "run" / "metrics.jsonl")
    assert [row["end_env_error"] for row in rows] == [0.5, 0.5] and all(math.isfinite(row["reward"]) for row in rows)
    assert all(row["reward"] is None and "simulator is gone" in row["error"]
               for row in read(tmp_path / "run" / "rollouts.jsonl") if row["end"] == "env_error")
    assert "the simulator is gone" in capsys.readouterr().err


BAD = [(["--group", "1"], "at least two|at least 2"), (["--steps", "0"], "steps"), (["--steps", "-3"], "steps"),
       (["--steps", "x"], "steps"), (["--lr", "0"], "lr"), (["--lora-rank", "0"], "lora-rank"), (["--bits", "3"], "bits"),
       (["--temperature", "0"], "temperature"), (["--temperature", "-1"], "temperature"), (["--history", "window:0"], "history"),
       (["--history", "all"], "history"), (["--env", "nope"], "nope"), (["--model", "./nope"], "no folder"),
       (["--model", "tests"], "config.json"), (["--adapter", "./nope"], "adapter"), (["--tasks", "oak"], "oak"),
       (["--env-options", "stages=0"], "stages"), (["--env-options", "doors=2"], "doors"), (["--env-options", "x"], "key=value"),
       (["--frobnicate", "3"], "frobnicate"), (["--max-context", "20"], "max-context"), (["--optimizer", "sgd"], "optimizer"),
       (["--warm-start", "silver"], "warm-start"), (["--resume"], "no run in"), (["--resume", "--overwrite"], "exclude"),
       (["--minibatches", "0"], "minibatches"), (["--beta", "-1"], "beta"), (["--lr", "inf"], "lr"),
       (["--temperature", "nan"], "temperature"), (["--history", "window:\u00b2"], "history"), (["--eps", "0"], "eps"),
       (["--env", "envs/keydoor.py"], "unknown environment"), (["--step", "5"], "--step")]


@pytest.mark.parametrize("argv, word", BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_bad_input_is_one_line_and_leaves_nothing(argv, word, tmp_path):
    with pytest.raises(BadInput, match=word) as caught:
        grpo.main([*SMALL, "--out", str(tmp_path / "run"), *argv])
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize("main, argv, word", [
    (dapo.main, ["--max-rounds", "0"], "max-rounds"), (dapo.main, ["--overlong-max", "-5"], "overlong"),
    (dapo.main, ["--overlong-max", "5", "--overlong-cache", "6"], "overlong"), (gspo.main, ["--eps-low", "-1"], "eps-low")])
def test_bad_input_to_one_algorithm(main, argv, word, tmp_path):
    with pytest.raises(BadInput, match=word):
        main([*SMALL, "--out", str(tmp_path / "run"), *argv])
    assert not (tmp_path / "run").exists()


def test_exit_code_two_one_line_and_no_traceback(tmp_path):
    done = subprocess.run([sys.executable, "grpo.py", "--group", "1"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and not done.stdout


def test_a_folder_that_exists_is_never_overwritten_silently(run, tmp_path):
    before = (run / "metrics.jsonl").read_text()
    with pytest.raises(BadInput, match="--resume.*--overwrite.*--out"):
        grpo.main([*SMALL, "--out", str(run)])
    with pytest.raises(BadInput, match="raise --steps"):
        grpo.main([*SMALL, "--out", str(run), "--resume"])
    assert (run / "metrics.jsonl").read_text() == before
    foreign = tmp_path / "thesis"
    foreign.mkdir()
    (foreign / "chapter1.tex").write_text("all of it")
    with pytest.raises(BadInput, match="not a run's folder"):
        grpo.main([*SMALL, "--out", str(foreign), "--overwrite"])
    assert (foreign / "chapter1.tex").exists()


def test_overwrite_keeps_the_old_run_until_the_new_one_has_done_a_step(tmp_path):
    folder = tmp_path / "run"
    grpo.main([*SMALL, "--steps", "1", "--out", str(folder)])
    before = (folder / "config.json").read_text()
    with pytest.raises(BadInput, match="nope"):
        grpo.main([*SMALL, "--out", str(folder), "--overwrite", "--model", "./nope"])
    assert (folder / "config.json").read_text() == before and (folder / "adapter").exists()
    assert list(tmp_path.iterdir()) == [folder]


def test_a_models_folder_is_no_run_to_overwrite(tmp_path):
    model = shutil.copytree(ROOT / "tiny-keydoor", tmp_path / "model")
    with pytest.raises(BadInput, match="not a run's folder"):
        grpo.main([*SMALL, "--out", str(model), "--overwrite"])
    assert (model / "model.safetensors").exists()


def test_resume_takes_the_new_learning_rate_and_refuses_another_run(tmp_path):
    folder = tmp_path / "run"
    grpo.main([*SMALL, "--out", str(folder)])
    for main, argv, word in ((grpo.main, ["--lora-rank", "4"], "lora-rank"), (dapo.main, [], "grpo.py"),
                             (grpo.main, ["--env-options", "stages=1"], "env-options"), (grpo.main, ["--beta", "1"], "beta")):
        with pytest.raises(BadInput, match=word):
            main([*SMALL, "--out", str(folder), "--steps", "3", "--resume", *argv])
    config = (folder / "config.json").read_text()
    grpo.main([*SMALL, "--out", str(folder), "--steps", "3", "--resume", "--lr", "1e-7"])
    state = torch.load(folder / "checkpoint" / "optimizer.pt", weights_only=True)
    assert state["param_groups"][0]["lr"] == 1e-7 and config != (folder / "config.json").read_text()


def test_a_run_killed_before_its_final_test_can_be_finished(tmp_path):
    folder = tmp_path / "run"
    grpo.main([*SMALL, "--out", str(folder)])
    whole = read(folder / "evaluations.jsonl")
    shutil.rmtree(folder / "adapter")
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in whole[:2]) + '{"step": 2, "sp')
    grpo.main([*SMALL, "--out", str(folder), "--resume"])
    assert read(folder / "evaluations.jsonl") == whole and (folder / "adapter" / "adapter_config.json").exists()


def test_an_adapter_of_another_base_is_refused(run, tmp_path):
    other = shutil.copytree(ROOT / "tiny-keydoor", tmp_path / "other-model")
    with pytest.raises(BadInput, match="was trained on"):
        grpo.main([*SMALL, "--out", str(tmp_path / "new"), "--model", str(other), "--adapter", str(run / "adapter")])


def test_a_step_that_makes_nonsense_stops_the_run(tmp_path):
    with pytest.raises(BadInput, match="lower --lr"):
        grpo.main([*SMALL, "--out", str(tmp_path / "run"), "--lr", "1e30", "--env-options", "stages=1", "commands=3"])


def test_evaluate_a_run_on_one_task(tmp_path, capsys):
    grpo.main([*SMALL, "--steps", "1", "--out", str(tmp_path / "run"), "--tasks", "ash/train-0003"])
    assert {row["task"] for row in read(tmp_path / "run" / "rollouts.jsonl")} == {"ash/train-0003"}
    evaluate.main([str(tmp_path / "run")])
    assert "adapter" in capsys.readouterr().out


def test_overwrite_starts_again(tmp_path):
    for _ in range(2):
        grpo.main([*SMALL, "--steps", "1", "--out", str(tmp_path / "run"), "--overwrite"])
    assert len(read(tmp_path / "run" / "metrics.jsonl")) == 1


def test_evaluate_takes_the_temperature_and_adapter_of_the_run(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    grpo.main([*SMALL, "--steps", "1", "--out", str(folder), "--eval-temperature", "0.7"])
    seen = []
    monkeypatch.setattr(evaluate, "evaluate_config", lambda config, run: seen.append(config.temperature))
    evaluate.main([str(folder)])
    evaluate.main([str(folder), "--temperature", "0"])
    assert seen == [0.7, 0.0]
    for argv, word in ((["--adapter", "x"], "own adapter"), (["--eval-temperature", "1"], "--temperature")):
        with pytest.raises(BadInput, match=word):
            evaluate.main([str(folder), *argv])


def test_a_run_is_not_resumed_to_a_step_before_its_checkpoint(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    last = read(run / "metrics.jsonl")[-1]["step"]
    (tmp_path / "run" / "evaluations.jsonl").unlink()
    with pytest.raises(BadInput, match=f"pass --steps {last} or more"):
        grpo.main([*SMALL, "--out", str(tmp_path / "run"), "--resume", "--steps", str(last - 1)])


def test_weights_that_are_no_weights_are_one_line(tmp_path):
    shutil.copytree(SHIPPED, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(BadInput, match="cannot load the model"):
        grpo.main([*SMALL, "--model", str(tmp_path / "model"), "--out", str(tmp_path / "run")])
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="another --out"):
        grpo.main([*SMALL, "--out", str(tmp_path / "file" / "run")])


def test_ctrl_c_outside_of_a_training_loop_says_how_to_go_on(capsys):
    def main():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stop:
        train.cli(main)
    assert stop.value.code == 130 and "--resume goes on" in capsys.readouterr().err


@pytest.mark.parametrize("error, words", [(torch.OutOfMemoryError("CUDA out of memory"), "lower --num-envs"),
                                          (FloatingPointError("probabilities are not finite"), "lower --lr")])
def test_out_of_memory_and_lost_numbers_outside_of_the_learner_are_one_line(error, words, capsys):
    def main():
        raise error

    with pytest.raises(SystemExit) as stop:
        train.cli(main)
    assert stop.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("argv, word", [
    (["somewhere"], "no finished run"), (["--samples", "2"], "temperature"), (["--samples", "0"], "samples"),
    (["--split", "dev"], "dev"), (["--hinted"], "--enrich"), (["--hinted", "--enrich", "ag-late", "--max-turns", "2"], "window")])
def test_bad_input_to_evaluate(argv, word):
    with pytest.raises(BadInput, match=word):
        evaluate.main(argv)


def test_every_option_has_a_help_text_and_the_named_ones_exist():
    names = {field.name for field in dataclasses.fields(train.Config)}
    assert all(field.metadata["help"] for field in dataclasses.fields(train.Config))
    assert {"seed", "steps", "out", "env", "model", "group", "tasks", "lr", "bits", "lora_rank", "max_turns", "history",
            "temperature"} <= names


def test_the_loop_names_no_algorithm():
    for file in ("train.py", "learner.py", "rollout.py", "model.py", "runs.py"):
        code = re.sub(r'""".*?"""', "", (ROOT / file).read_text(), flags=re.DOTALL).lower()
        assert not re.search("grpo|dapo|gspo|ppo", code), file


