"""rl/train.py: whole runs with the built-in game and model."""
import json
import math
import re
from types import SimpleNamespace

import pytest
from conftest import CLOCK, ROOT, SMALL, drawn_requests, metrics

import dapo
import grpo
import gspo
from envs import BadInput, Env
from rl.logs import episode_metrics, read
from rl.options import Config
from rl.rollout import Row, Trajectory, Turn
from rl.train import Algorithm, Step


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
    options = [*SMALL, "--save-every", "2", "--minibatches", "2", "--enrich", "ag-early"]
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
    rows = [[row for row in read(folder / "evaluations.jsonl") if row["final"] and row["policy"] != "best"]
            for folder in (run, tmp_path / "often", tmp_path / "never")]
    assert len(rows[0]) == 2
    assert rows[0] == rows[1] == rows[2]


def test_other_seed_other_run(run, tmp_path):
    grpo.main([*SMALL, "--out", str(tmp_path / "run"), "--seed", "1"])
    assert metrics(tmp_path / "run") != metrics(run)


def test_dynamic_sampling_hits_its_cap_on_a_hopeless_game(tmp_path, capsys):
    dapo.main([*SMALL, "--out", str(tmp_path / "run"), "--env-options", "stages=9", "commands=10", "--max-rounds", "2"])
    assert "cap of 2 rounds hit with 0 of 3 groups (6 sampled)" in capsys.readouterr().out
    rows = read(tmp_path / "run" / "metrics.jsonl")
    assert [(row["groups"], row["groups_sampled"], row["grad_norm"]) for row in rows] == [(0, 6, 0.0)] * 2


def test_overlong_penalty_reaches_the_advantages_and_not_the_metrics(run, tmp_path):
    dapo.main([*SMALL, "--out", str(tmp_path / "run"), "--overlong-max", "2", "--overlong-cache", "2"])
    assert all(0 <= row["reward"] <= 1 for row in read(tmp_path / "run" / "metrics.jsonl"))


def test_the_overlong_penalty_counts_the_policys_own_tokens():  # docs/faults.md, 21
    def episode(own, others):
        return Trajectory("a", 0, 0, False, rows=[Row([1] * (own + others), [0] * others + [1] * own)], reward=1.0)

    options = dapo.Options(overlong_max=10, overlong_cache=5)
    step = Step(Config(), Algorithm(**dapo.algorithm(options, grpo.group_advantages)), None, None, None)
    short, long, beside_much_else = step.advantages([episode(4, 0), episode(8, 0), episode(4, 500)]).tolist()
    assert short == beside_much_else > long


def test_an_invalid_action_costs_advantage_and_not_reward():
    """Its share of the episode's turns, so that a success with invalid turns stands above a failure without one."""
    def episode(reward, *valid):
        return Trajectory("a", 0, 0, False, turns=[Turn([], [], "", "", 0, v, "end") for v in valid], reward=reward)

    played = [episode(1.0, True, True), episode(1.0, False, True), episode(0.0, True), episode(math.nan, False)]
    for penalty, wanted in ((0.0, [1, 1, 0, math.nan]), (0.1, [1, 0.95, 0, math.nan])):
        for module in (grpo, dapo, gspo):
            more = [] if module is grpo else [grpo.group_advantages]
            algorithm = Algorithm(**module.algorithm(module.Options(), *more))
            step = Step(Config(invalid_action_penalty=penalty), algorithm, None, None, None)
            assert step.advantages(played).tolist() == grpo.group_advantages(wanted, [0] * 4).tolist()
    assert episode_metrics(played, 4)["reward"] == pytest.approx(2 / 3)
    step = Step(Config(invalid_action_penalty=0.1), algorithm, None, None, None)
    all_lost = step.advantages([episode(0.0, True), episode(0.0, False), episode(0.0)]).tolist()
    assert all_lost[0] == all_lost[2] > 0 > all_lost[1]  # a group without success has an advantage then


def test_a_run_takes_the_released_scripts_terms(tmp_path):
    """KL, penalty and an entropy bonus with each algorithm: they reach the update, and the reward stays the benchmark's."""
    for module in (grpo, dapo, gspo):
        module.main([*SMALL, "--out", str(tmp_path / module.__name__), "--eval-every", "0", "--beta", "0.01", "--entropy-coef", "0.01",
                     "--invalid-action-penalty", "0.1"])
        for row in read(tmp_path / module.__name__ / "metrics.jsonl"):
            assert 0 <= row["reward"] <= 1 and row["entropy"] > 0 and row["entropy_learner"] > 0 and row["kl_reference"] >= 0


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [grpo, dapo, gspo], ids=lambda module: module.__name__)
def test_each_algorithm_learns_a_game_of_one_stage(algorithm, tmp_path):
    """From random play (a third) to the hidden rule: what breaks the gradient's sign, the masks or the ratio fails here."""
    algorithm.main(["--env-options", "stages=1", "commands=4", "impossible=0", "--steps", "20", "--tasks-per-step", "8",
                    "--eval-every", "0", "--out", str(tmp_path / "run")])
    rewards = [row["reward"] for row in read(tmp_path / "run" / "metrics.jsonl")]
    assert sum(rewards[:3]) / 3 < 0.45 and sum(rewards[-3:]) / 3 > 0.65


def test_each_task_once_before_any_comes_again():
    config = Config(group=2, seed=5)
    requests = drawn_requests(config, 3, ["a", "b", "c"], 2, 4)
    assert [r.group for r in requests] == [g for g in range(6) for _ in range(2)]
    tasks = [r.task for r in requests[::2]]
    assert sorted(tasks[:3]) == sorted(tasks[3:]) == ["a", "b", "c"]
    assert drawn_requests(config, 3, ["a", "b", "c"], 6) == requests
    assert drawn_requests(config, 4, ["a", "b", "c"], 6) != requests


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


@pytest.mark.parametrize("found, skipped", [
    ((1, 0), [1, 2, 3, 4, 5]),  # (skipped steps, optimizer steps) of each training step
    ((2, 2), [0] * 5), ((0, 4), [0] * 5), ((0, 0), [0] * 5)])
def test_steps_without_a_finite_gradient_are_counted_beside_dead_mini_batches(monkeypatch, found, skipped):
    from rl import train
    config = Config(minibatches=4)
    trainer, seen, saved = Step(config, Algorithm("grpo", None, None, (0.2, 0.2)), None, None, SimpleNamespace(pad_id=0)), [], []
    monkeypatch.setattr(train, "update", lambda *_: dict(zip(("skipped_steps", "optimizer_steps"), found), micro_batch_tokens=8))
    for step in range(10, 15):
        trainer.learn(step, [], None)
        seen.append(trainer.skipped)
    assert seen == skipped
    if skipped[-1] == 5:
        with pytest.raises(BadInput, match="five steps in a row"):
            trainer.refuse_to_go_on(14, saved.append)
    else:
        trainer.refuse_to_go_on(14, saved.append)
    assert saved == ([9] if skipped[-1] == 5 else [])


def test_a_step_that_makes_nonsense_stops_the_run(tmp_path):
    with pytest.raises(BadInput, match="lower --lr"):
        grpo.main([*SMALL, "--out", str(tmp_path / "run"), "--lr", "1e30", "--env-options", "stages=1", "commands=3"])


def test_the_loop_names_no_algorithm():
    for file in ("train", "learner", "rollout", "chat", "sampling", "cache", "model", "policy", "runs", "logs", "stripped"):
        code = re.sub(r'""".*?"""', "", (ROOT / "rl" / f"{file}.py").read_text(), flags=re.DOTALL).lower()
        assert not re.search(r"grpo|dapo|gspo|\bppo", code), file
