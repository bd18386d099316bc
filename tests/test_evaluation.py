"""rl/evaluation.py and evaluate.py: success on fixed tasks of the standard environment."""
import itertools
import json

import pytest
from conftest import SMALL, edit

import evaluate
import grpo
from envs import BadInput, Env, make_env
from funnel import editors, rounds
from funnel.run import Run
from funnel.state import situation
from rl import evaluation
from rl.logs import episode_metrics, read
from rl.options import Config, parse
from rl.policy import load_policy
from rl.rollout import Request, rollout
from rl.stripped import without_hints


def test_wilson_interval():
    assert evaluation.wilson(8, 10) == pytest.approx([0.4901625, 0.9433178], abs=1e-6)
    assert evaluation.wilson(0, 20)[0] == 0.0 and evaluation.wilson(20, 20)[1] == 1.0 and evaluation.wilson(0, 0) == [0.0, 1.0]


def test_pass_at_k_is_the_mean_over_all_subsets():
    for n, c in ((5, 0), (5, 2), (6, 6), (4, 1)):
        outcomes = [1] * c + [0] * (n - c)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(outcomes, k))
            assert evaluation.pass_at_k(n, c, k) == pytest.approx(sum(map(max, subsets)) / len(subsets))
    with pytest.raises(ValueError):
        evaluation.pass_at_k(3, 1, 4)


def test_fixed_tasks_are_spread_over_the_list():
    tasks = [str(n) for n in range(100)]
    assert evaluation.fixed_tasks(tasks, 4) == ["0", "25", "50", "75"] and evaluation.fixed_tasks(tasks, 200) == tasks


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
        info |= {"success_released_rule": info["success"] or self.task == "car/0"} if self.task != "moon/0" else {}
        return "on", float(over), over, False, info | ({"abstain_turns": 1, "abstained": int(self.turn == 2)} if moon else {})


def test_evaluations_tell_clean_success_abstention_and_success_by_name(tmp_path):
    _, chat = load_policy(parse(Config, []), {})
    tasks, act = ["moon/0", "car/0", "cart/0", "cart/1"], lambda prompts: [[5] for _ in prompts]
    result = evaluation.evaluate(act, chat, [Asking() for _ in range(3)], tasks, max_turns=2)
    assert (result["success"], result["clean_success"], result["success_released_rule"]) == (0.75, 0.5, 0.75)
    assert result["reward"] == result["score"] == 1.0
    assert "rule of the released code 0.750" in evaluation.success_table("asking", [("all", result)])
    assert "success_released_rule" not in evaluation.evaluate(act, chat, [Asking()], tasks[:1], max_turns=2)
    assert (result["abstain_turns"], result["abstained"]) == (1, 1)
    assert result["outcomes"] == {"moon/0": 1.0, "car/0": 0.0, "cart/0": 1.0, "cart/1": 1.0}
    assert result["success_by_name"] == {"moon": 1.0, "car": 0.0, "cart": 1.0}
    assert "abstain_turns" not in evaluation.evaluate(act, chat, [Asking()], tasks[1:], max_turns=2)
    wins = itertools.cycle([True, False, False, False])

    class Sometimes(Asking):
        def step(self, action):
            *rest, info = super().step(action)
            return *rest, {**info, "success": info["success"] and next(wins)}

    sampled = evaluation.evaluate(act, chat, [Sometimes()], tasks[:1], samples=4, max_turns=2)
    assert sampled["outcomes"] == {"moon/0": 0.25} and sampled["success"] == 0.25
    played = rollout(act, chat, [Asking()], [Request(task) for task in tasks], max_turns=2)
    assert episode_metrics(played, 1)["abstention"] == 1.0 and "abstention" not in episode_metrics(played[1:], 1)


# The program

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


def test_evaluate_a_run_on_one_task(tmp_path, capsys):
    grpo.main([*SMALL, "--steps", "1", "--out", str(tmp_path / "run"), "--tasks", "ash/train-0003"])
    assert {row["task"] for row in read(tmp_path / "run" / "rollouts.jsonl")} == {"ash/train-0003"}
    evaluate.main([str(tmp_path / "run")])
    assert "adapter" in capsys.readouterr().out


def test_evaluate_takes_the_temperature_and_adapter_of_the_run(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    grpo.main([*SMALL, "--steps", "1", "--out", str(folder), "--eval-temperature", "0.7"])
    seen = []
    monkeypatch.setattr(evaluate, "evaluate_run", lambda config, run: seen.append(config.temperature))
    evaluate.main([str(folder)])
    evaluate.main([str(folder), "--temperature", "0"])
    assert seen == [0.7, 0.0]
    for argv, word in ((["--adapter", "x"], "own adapter"), (["--eval-temperature", "1"], "--temperature")):
        with pytest.raises(BadInput, match=word):
            evaluate.main([str(folder), *argv])


# States and pairs of a run of distill.py

@pytest.fixture(scope="module")
def loop(tmp_path_factory):
    """A run of distill.py of two rounds, each of which writes two entries that tell a right action; the state starts with another."""
    folder, game = tmp_path_factory.mktemp("loop"), make_env("keydoor", {"stages": 1, "colours": 4})
    (folder / "first.md").write_text("- Knock.\n")

    def right_actions(episodes, state, budget, rejected):
        known = {situation(t.first_observation): t for t in map(without_hints, episodes) if situation(t.first_observation) not in state}
        return [edit("append", content=f"- {about}: {game.reset(task=t.task, seed=t.seed) and game.gold_action()}.")
                for about, t in list(known.items())[:2]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(editors, "count_edits", right_actions)
        success = Run.success
        patch.setattr(Run, "success", lambda self, split, policy, state: success(self, split, policy, state) | (
            {"success": 0.1 * policy + 0.05 * state.count("- ")} if split == "valid" else {}))
        rounds.main(["--rounds", "2", "--steps", "1", "--tasks-per-step", "2", "--group", "2", "--instances", "6", "--reflection-batch",
                     "48", "--eval-episodes", "24", "--lr", "1e-2", "--select", "all", "--env-options", "stages=1", "colours=4",
                     "--state", str(folder / "first.md"), "--out", str(folder / "run")])
    return folder / "run"


def test_pairs_are_every_policy_with_every_state(loop, capsys, monkeypatch):
    evaluate.main([str(loop), "--pairs"])
    printed = capsys.readouterr().out
    rows = read(loop / "pairs.jsonl")
    assert [(row["policy"], row["state"]) for row in rows] == [(policy, state) for policy in (0, 1, 2) for state in (None, 0, 1, 2)]
    report = {(row["policy"], row["state"], row.get("residual")): row for row in read(loop / "evaluations.jsonl") if row["split"] == "test"}
    found = {(row["policy"], row["state"]): row for row in rows}
    for pair, own in (((0, None), ("base", False, None)), ((2, None), ("trained", False, None)), ((2, 2), ("trained", True, None)),
                      ((0, 2), ("base", True, None))):  # as the run itself has them
        assert found[pair]["outcomes"] == report[own]["outcomes"], pair
    assert len({json.dumps(row["outcomes"]) for row in rows}) > 2  # the pairs do differ
    title, head, *lines = printed.splitlines()[:5]
    assert title == "success on test tasks, standard keydoor stages=1 colours=4"
    assert head.split() == ["policy", "no", "state", "state", "0", "state", "1", "state", "2"]
    assert [line.split() for line in lines] == [[str(policy), *(f"{found[policy, state]['success']:.3f}" for state in (None, 0, 1, 2))]
                                                for policy in (0, 1, 2)]
    # Nothing is played twice; another split, and a state that was edited, are
    played, plain = [], evaluation.evaluate
    monkeypatch.setattr(evaluation, "evaluate", lambda *a, **how: played.append(how) or plain(*a, **how))
    evaluate.main([str(loop), "--pairs", "--num-envs", "7"])
    assert played == [] and capsys.readouterr().out == printed and read(loop / "pairs.jsonl") == rows
    evaluate.main([str(loop), "--pairs", "--split", "valid", "--eval-episodes", "3"])
    assert len(played) == 12
    kept = (loop / "states" / "001.md").read_text()
    (loop / "states" / "001.md").write_text("")
    evaluate.main([str(loop), "--pairs"])
    assert len(played) == 12  # an empty state is none, and that was played
    (loop / "states" / "001.md").write_text("- By hand.\n")
    evaluate.main([str(loop), "--pairs"])
    assert len(played) == 15
    (loop / "states" / "001.md").write_text(kept)


def test_a_run_is_evaluated_with_a_state(loop, run, tmp_path, capsys, monkeypatch):
    """Its own last state: as the report of the run has it, in the place where the run had it; and with another run."""
    state = loop / "states" / "002.md"
    evaluate.main([str(loop), "--state", str(state)])
    _, *rows = capsys.readouterr().out.splitlines()
    report = [row for row in read(loop / "evaluations.jsonl") if row["split"] == "test"][:4]
    assert [row.rpartition("  [")[0].split()[-1] for row in rows] == [f"{row['success']:.3f}" for row in report]
    assert [f", with the state {state}" in row for row in rows] == [False, True, False, True]
    assert report[0]["success"] != report[1]["success"]  # it does make a difference
    kept, plain = [], evaluation.evaluate
    monkeypatch.setattr(evaluation, "evaluate", lambda *a, **how: kept.append(how["keep_hints"]) or plain(*a, **how))
    evaluate.main([str(run), "--state", str(state)])
    assert kept == [False, True, False, True]  # notes are no hints: past observations keep them, as in distill.py
    assert capsys.readouterr().out.count(f", with the state {state}") == 2
    for argv, said in (([str(run), "--pairs"], "--pairs wants the folder of a run of distill.py"), (["--pairs"], "--pairs wants"),
                       ([str(loop), "--pairs", "--state", str(state)], "--pairs wants"),
                       ([str(loop), "--state", str(tmp_path / "none.md")], "cannot be read"),
                       ([str(loop), "--state-place", "above"], "--state-place must be prompt or observation")):
        with pytest.raises(BadInput, match=said):
            evaluate.main(argv)


class Dead(Env):
    max_turns = 1

    def reset(self, *, task, seed):
        raise OSError("connection refused")


def test_an_evaluation_in_which_every_environment_broke_is_no_result(word_chat):
    with pytest.raises(BadInput, match="broke in every episode, last with OSError: connection refused"):
        evaluation.evaluate(lambda prompts: [[1]] * len(prompts), word_chat, [Dead()], ["a/0", "a/1"], max_turns=1)


def test_a_broken_episode_is_no_success_and_no_reward(word_chat, capsys):
    class Breaks(Asking):
        def reset(self, *, task, seed):
            return (_ for _ in ()).throw(OSError("gone")) if task == "cart/1" else super().reset(task=task, seed=seed)

    tasks = ["moon/0", "car/0", "cart/0", "cart/1"]
    result = evaluation.evaluate(lambda prompts: [[5] for _ in prompts], word_chat, [Breaks()], tasks, max_turns=2)
    assert (result["success"], result["reward"], result["score"], result["env_errors"]) == (0.5, 0.75, 1.0, 1)


class OnlyValid(Env):
    """An environment without test tasks."""
    max_turns = 1

    @classmethod
    def tasks(cls, split):
        return ["a/0"] if split == "valid" else []


def test_a_split_is_evaluated_without_the_others(monkeypatch):
    from envs import split_tasks
    monkeypatch.setattr("envs.env_class", lambda name: OnlyValid)
    assert split_tasks("any", [], {}, ["valid"]) == {"valid": ["a/0"]}
    with pytest.raises(BadInput, match="no train tasks"):
        split_tasks("any", [], {})
    seen = []
    monkeypatch.setattr(evaluate, "split_tasks", lambda name, only, options, splits: seen.append(splits) or {"valid": []})
    monkeypatch.setattr("rl.policy.load_policy", lambda *_: (_ for _ in ()).throw(BadInput("far enough")))
    with pytest.raises(BadInput, match="far enough"):
        evaluate.main(["--split", "valid"])
    assert seen == [["valid"]]
