"""funnel/rounds.py, funnel/run.py, funnel/options.py: labels, gates, whole runs of distill.py, and their bad input."""
import gc
import json
import math
import random
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, edit, tiny_qwen3
from peft import PeftModel

from envs import BadInput, DoesNotFit, Env
from envs.keydoor import HOUSES, KeyDoor
from funnel import editors, rounds, teacher
from funnel import retire as retire_
from funnel import run as run_
from funnel.run import Run
from rl import train
from rl.chat import Chat
from rl.logs import read
from rl.model import load_model
from rl.rollout import Row
from rl.warmstart import supervise


# Labels and what is distilled

def scripted_run(outcomes, n=1, **config):
    """A run whose episodes have these rewards: {"free": [...], ...}, n for each instance."""
    played = []

    def play(k, policy, what, tasks, state, times=1):
        played.append((what, tuple(tasks), state, times))
        rewards = outcomes[what]
        return [SimpleNamespace(reward=float(r), success=r == 1, end="env_error" if r != r else "failure", turns=["a turn"])
                for r in rewards]

    options = {"outcomes_per_condition": n, "instances": len(outcomes["free"]) // n, "label": "gain", "select": "both",
               "alpha": 1.0, "seed": 0, "on_policy": "", "temperature": 1.0, "micro_batch_tokens": 1, "history": "full",
               "token_weights": "jsd", "teacher": "self", "teacher_state": True, "top_k": 0, "log_tokens": 0} | config
    return SimpleNamespace(play=play, played=played, config=SimpleNamespace(state_place="prompt", **options),
                           stored=lambda k: None, chat=SimpleNamespace(pad_id=0), load=lambda policy: None, model=None,
                           sample_tasks=lambda what, size: [f"t{i}" for i in range(size)])


@pytest.fixture
def stored(monkeypatch):
    """What reaches the teacher: (rewards of the episodes, their weights)."""
    seen = []
    monkeypatch.setattr(teacher, "weigh", lambda policy, weighed, *_, **how: seen.append(
        ([t.reward for t, _ in weighed], [a for _, a in weighed])) or [])
    monkeypatch.setattr(rounds, "save_items", lambda items, path: None)
    return seen


def test_three_conditions_make_the_labels(stored):
    run = scripted_run({"free": [0, 0, 0, 1], "previous": [0, 1, 1, 0], "updated": [1, 1, 0, 1]})
    found = rounds.choose_and_teach(run, 1, 0, "- old", "- new")
    assert found["labels"] == {"00": 1, "01": 1, "10": 1, "11": 1, "?": 0} and found["selected"] == 2
    assert found["chosen"] == {"t0": 1.0, "t1": 1.0}
    assert [(what, state) for what, _, state, _ in run.played] == [("free", ""), ("previous", "- old"),
                                                                    ("updated", "- new")]
    assert len({tasks for _, tasks, _, _ in run.played}) == 1
    assert stored[0] == ([1, 1], [1.0, 1.0]) and found["success_in_training"] == [0.25, 0.5, 0.75]


def test_an_empty_previous_state_is_playing_without(stored):
    run = scripted_run({"free": [0, 0], "updated": [1, 0]})
    assert rounds.choose_and_teach(run, 1, 0, "", "- new")["labels"] == {"00": 1, "01": 1, "10": 0, "11": 0, "?": 0}
    assert [what for what, *_ in run.played] == ["free", "updated"]


def test_outcomes_are_means_and_equal_ones_are_equal_in_any_order(stored):
    run = scripted_run({"free": [.3, .2, .1, 0, 0, 0], "updated": [.1, .2, .3, 0, 0, 1]}, n=3)
    assert rounds.choose_and_teach(run, 1, 0, "", "- new")["labels"]["01"] == 1
    assert stored[0] == ([0, 0, 1], [1.0] * 3)  # all episodes of the instance that gained


def test_a_broken_episode_is_no_outcome_and_is_not_distilled(stored):
    nan = math.nan
    run = scripted_run({"free": [0, nan, nan, nan, 0, 0], "updated": [1, nan, 1, 1, nan, nan]}, n=2)
    assert rounds.choose_and_teach(run, 1, 0, "", "- new")["labels"] == {"00": 0, "01": 1, "10": 0, "11": 0, "?": 2}
    assert stored[0] == ([1], [1.0])


@pytest.mark.parametrize("label", ["gain", "success"])
@pytest.mark.parametrize("arm", ["both", "new", "persistent", "all", "random"])
def test_an_instance_with_an_outcome_unknown_on_one_side_is_never_selected(stored, label, arm):
    """With --label success too, whose baseline is no outcome."""
    nan = math.nan
    run = scripted_run({"free": [nan, 0, 0, 0, 0], "previous": [1, nan, 1, 1, 0], "updated": [1, 1, nan, 1, 1]}, label=label,
                       select=arm)
    found = rounds.choose_and_teach(run, 1, 0, "- old", "- new")
    assert found["labels"] == {"00": 0, "01": 1, "10": 0, "11": 1, "?": 3}
    assert set(found["chosen"]) == {"new": {"t4"}, "persistent": {"t3"}}.get(arm, {"t3", "t4"})


def test_the_other_reading_of_the_bits_is_success(stored):
    run = scripted_run({"free": [1, 0, 1, 0], "previous": [1, 1, 0, 0], "updated": [1, 1, 1, 0]}, label="success")
    assert rounds.choose_and_teach(run, 1, 0, "- old", "- new")["labels"] == {"00": 1, "01": 1, "10": 0, "11": 2, "?": 0}


def test_on_policy_distils_fresh_state_free_episodes_of_what_was_selected(stored):
    run = scripted_run({"free": [0, 0, 0], "updated": [0, 1, 1], "student": [0, .5]}, on_policy="round")
    rounds.choose_and_teach(run, 1, 0, "", "- new")
    assert run.played[-1] == ("student", ("t1", "t2"), "", 1) and stored[0] == ([0, .5], [1.0, 1.0])


# The gates

@pytest.fixture
def gate_run(monkeypatch):
    """A run of these successes, whose editor proposes `edits`; what that is asked comes into `asked`, states into `written`."""
    def made(success, edits=(edit("append", content="- New."),), results=(), metric="success", reward=lambda *a: 0.0):
        written, asked = {}, []
        monkeypatch.setattr(rounds, "propose_edits", lambda run, policy, episodes, state, budget, rejected: (
            asked.append((budget, rejected)), (list(edits), []))[1])
        return SimpleNamespace(
            config=SimpleNamespace(reflection_batch=2, rounds=5, edits_first=4, edits_last=2, state_limit=100, gate_metric=metric),
            sample_tasks=lambda what, size: ["a", "b"], play=lambda *a: [], written=written, asked=asked,
            success=lambda split, policy, state: {"success": success(split, policy, state), "reward": reward(split, policy, state)},
            results=lambda name="*": [*([{"state": ""}] if name in "*start" else []), *(results if name in "*state" else [])],
            write_state=lambda name, text: written.update({name: text}))

    return made


@pytest.mark.parametrize("after, accepted", [(0.5, False), (0.4, False), (0.5 + 1 / 128, True)])
def test_the_state_gate_is_strict(gate_run, after, accepted):
    run = gate_run(lambda split, policy, state: after if "New" in state else 0.5)
    found = rounds.evolve_state(run, 1, 0, "")
    assert found["state_accepted"] == accepted and run.written == {"001": "- New." if accepted else ""}
    assert (found["edits"], found["rejected_edits"]) == (([], [edit("append", content="- New.")])[::-1] if accepted else
                                                         ([], [edit("append", content="- New.")]))
    assert accepted or "validation success" in found["reason"]


@pytest.mark.parametrize("metric, success, reward, accepted", [
    ("success", (0.5, 0.6), (0.3, 0.2), True), ("reward", (0.5, 0.6), (0.3, 0.2), False), ("reward", (0.5, 0.5), (0.3, 0.31), True),
    ("reward", (0.5, 0.5), (0.3 + 0.2 + 0.1, 0.1 + 0.2 + 0.3), False)])  # above by rounding alone
def test_the_state_gate_on_success_or_on_reward(gate_run, metric, success, reward, accepted):
    run = gate_run(lambda split, policy, state: success["New" in state], metric=metric,
                   reward=lambda split, policy, state: reward["New" in state])
    found = rounds.evolve_state(run, 1, 0, "")
    assert found["state_accepted"] == accepted and (accepted or f"validation {metric} is {reward[1]:.3f}" in found["reason"])
    assert [found[f"{name}_{when}"] for name in ("success", "reward") for when in ("before", "after")] == [*success, *reward]


@pytest.mark.parametrize("error, rejected", [(DoesNotFit("no first prompt fits"), True),
                                             (BadInput("the environment broke in every episode"), False)])
def test_a_candidate_that_cannot_be_played_is_rejected_with_the_reason(gate_run, error, rejected):
    """A dead environment says nothing of the candidate, and ends the run."""
    def success(split, policy, state):
        if state:
            raise error
        return 0.0

    if not rejected:
        with pytest.raises(BadInput, match="broke in every episode"):
            rounds.evolve_state(gate_run(success), 1, 0, "")
        return
    found = rounds.evolve_state(gate_run(success), 1, 0, "")
    assert not found["state_accepted"] and found["reason"] == "no first prompt fits"


def test_no_edit_and_a_state_of_a_hundred_thousand_characters_leave_the_pair(gate_run):
    for edits in ((), (edit("append", content="x" * 100_000),)):
        run = gate_run(lambda *a: 0.0, edits)
        found = rounds.evolve_state(run, 2, 0, "- Old.")
        assert (found["state_accepted"], found["reason"], run.written) == (False, "no edit was left", {"002": "- Old."})
        assert [row["reason"][:24] for row in found["dropped_edits"]] == ["the state would have 100"] * len(edits)
        assert found["edited_by_hand"]  # the run itself wrote an empty one


def test_later_reflections_see_what_was_rejected(gate_run):
    before = [edit("append", content="Bad.")]
    found = [{"rejected_edits": before, "state": "", "success_before": 0.5, "success_after": 0.25},
             {"rejected_edits": [], "state": "", "success_before": 0.5, "success_after": None}]
    run = gate_run(lambda *a: 0.0, edits=(), results=found)
    rounds.evolve_state(run, 5, 0, "")
    assert run.asked == [(2, [{"edits": before, "before": 0.5, "after": 0.25}])]


def test_residual_state_keeps_what_is_needed():
    asked = []

    def success(split, policy, state):
        asked.append(state)
        return {"success": 0.5, "reward": 0.5 + 0.1 * ("- B." in state) + 0.1 * ("- E." in state)}

    run = SimpleNamespace(success=success, config=SimpleNamespace(gate_metric="reward"))
    state = "# Notes\n" + "\n".join(f"- {letter}." for letter in "ABCDEFGH")
    assert retire_.residual_state(run, 1, state) == "# Notes\n- B.\n- E."
    assert len(asked) < 16
    assert retire_.retire(run, 1, state) == {"before": state, "state": "# Notes\n- B.\n- E.",
                                             "retired": [f"- {letter}." for letter in "ACDFGH"]}
    asked.clear()
    run = SimpleNamespace(success=lambda *a: asked.append(a) or {"success": 1.0}, config=SimpleNamespace(gate_metric="success"))
    assert retire_.residual_state(run, 1, state) == "# Notes"
    assert len(asked) == 2 and {call[0] for call in asked} == {"valid"}


# All rounds, on the built-in game and model

SMALL = ["--rounds", "2", "--steps", "2", "--tasks-per-step", "2", "--group", "2", "--instances", "6",
         "--reflection-batch", "12", "--eval-episodes", "6", "--num-envs", "12", "--distill-batch", "4",
         "--env-options", "stages=1", "commands=3", "--model", str(ROOT / "tiny-keydoor")]


@pytest.fixture
def helpful(monkeypatch):
    """Validation says that every entry helps and every training too; the labels are two of each kind that is selected."""
    def success(self, split, policy, state):
        self.load(policy)
        value = 0.1 + 0.1 * policy + 0.05 * state.count("- ")
        return {"success": value, "interval": [value, value], "episodes": 6, "score": value, "reward": value,
                "valid_action_fraction": 1.0}

    monkeypatch.setattr(Run, "success", success)
    script(monkeypatch)


@pytest.fixture
def absorbing(helpful, monkeypatch, tmp_path):
    """As `helpful`, but "- Knock.", which the state starts with, is of no use to a policy that was trained. -> the options."""
    plain = Run.success

    def success(self, split, policy, state):
        found = plain(self, split, policy, state)
        return {**found, "success": found["success"] - 0.05 * (policy > 0 and "- Knock." in state)}

    monkeypatch.setattr(Run, "success", success)
    (tmp_path / "first.md").write_text("- Knock.\n")
    return [*SMALL, "--state", str(tmp_path / "first.md")]


def script(monkeypatch):
    """An editor that always has a new entry, and labels of every kind."""
    monkeypatch.setattr(editors, "count_edits", lambda episodes, state, budget, rejected: [
        edit("append", content=f"- {next(house for house in HOUSES if house not in state)} house, red door: take iron key.")])
    monkeypatch.setattr(rounds, "transitions", lambda *outcomes: ["01", "11", "00", "10", "01", "11"])


class Stop(BaseException):
    pass


def prompts_of(monkeypatch):
    """Every batch of episodes from now on: (phase, the system prompts)."""
    seen, plain = [], Run.episodes

    def episodes(self, requests, state):
        played = plain(self, requests, state)
        seen.append((self.phase, {t.system_prompt for t in played}))
        return played

    monkeypatch.setattr(Run, "episodes", episodes)
    return seen


def test_a_run_writes_the_whole_folder_and_trains_without_the_state(helpful, tmp_path, capsys, monkeypatch):
    seen = prompts_of(monkeypatch)
    folder = tmp_path / "run"
    rounds.main([*SMALL, "--out", str(folder)])
    out = capsys.readouterr().out
    assert "00/01/10/11/?" in out and "1/2/1/2/0" in out and str(folder) in out
    names = ("initial", "initial, + full state", "consolidated", "consolidated, + full state", "consolidated, + residual state")
    assert [line.partition("  ")[0] for line in out.splitlines()][-len(names) - 1:-1] == list(names)  # Table 5, and one row more
    lines = read(folder / "rounds.jsonl")
    assert [(row["step"], row["state_accepted"], row["policy_accepted"], row["policy"]) for row in lines] == [
        (1, True, True, 1), (2, True, True, 2)]
    for row in lines:
        assert row["labels"] == {"00": 1, "01": 2, "10": 1, "11": 2, "?": 0} and row["selected"] == 4 and row["optimizer_steps"] == 2
        assert row["success_state"] > row["success_free"] > 0 and row["edits"] and not row["edited_by_hand"]
    evaluations = read(folder / "evaluations.jsonl")
    assert [(row["step"], row["split"], row["policy"], row["state"]) for row in evaluations] == [
        (0, "valid", "trained", False), (1, "valid", "trained", False), (1, "valid", "trained", True),
        (2, "valid", "trained", False), (2, "valid", "trained", True), (2, "test", "base", False), (2, "test", "base", True),
        (2, "test", "trained", False), (2, "test", "trained", True), (2, "test", "trained", True)]
    assert json.loads((folder / "config.json").read_text())["algorithm"] == "distill"
    assert sorted(p.name for p in (folder / "states").iterdir()) == ["000.md", "001.md", "002.md", "residual.md"]
    assert (folder / "states" / "000.md").read_text() == ""
    assert (folder / "states" / "001.md").read_text() == "".join(f"{e['content']}\n" for e in lines[0]["edits"])
    assert sorted(p.name for p in (folder / "policies").iterdir()) == ["000", "001", "002"]
    assert (folder / "adapter" / "adapter_model.safetensors").read_bytes() == (
        folder / "policies" / "002" / "adapter_model.safetensors").read_bytes()
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG") and not list(folder.rglob("*.pt"))
    steps = [row for row in read(folder / "metrics.jsonl") if row.get("optimizer_step")]
    assert [row["optimizer_step"] for row in steps] == [1, 2, 3, 4] and all(row["distill_loss"] > 0 for row in steps)
    assert {row["phase"] for row in read(folder / "rollouts.jsonl")} == {
        f"00{k}-{name}" for k in (1, 2) for name in ("state", "teacher", "policy")}
    plain = KeyDoor.system_prompt
    text = (folder / "states" / "001.md").read_text().strip()
    assert all(prompts == {plain} for phase, prompts in seen if phase.endswith("policy"))  # the RL term is state-free
    assert [prompts for phase, prompts in seen if phase == "002-state"] == [{f"{plain}\n\n## Notes\n\n{text}"}]
    assert [len(prompts) for phase, prompts in seen if phase == "001-teacher"] == [1, 1]  # S_0 is empty: two conditions
    assert [prompts for phase, prompts in seen if phase == "002-teacher"][:2] == [{plain}, {f"{plain}\n\n## Notes\n\n{text}"}]


def test_a_run_that_is_stopped_in_every_phase_equals_an_unbroken_one(absorbing, tmp_path, monkeypatch):
    rounds.main([*absorbing, "--out", str(tmp_path / "one")])
    assert [row["retired"] for row in read(tmp_path / "one" / "rounds.jsonl")] == [["- Knock."], []]
    plain, stopped = Run.once, set()

    def once(self, round_, name, work):
        def broken():
            found = work()
            if name != "start" and (round_, name) not in stopped:
                stopped.add((round_, name))
                raise Stop  # at the worst moment: all is done, and not yet said
            return found
        return plain(self, round_, name, broken)

    monkeypatch.setattr(Run, "once", once)
    argv = [*absorbing, "--out", str(tmp_path / "two")]
    for attempt in range(12):
        try:
            rounds.main([*argv, "--resume"] if attempt else argv)
            break
        except Stop:
            continue
    assert len(stopped) == attempt == 11
    clock = {"rollout_seconds"}
    for name in ("rounds.jsonl", "evaluations.jsonl", "rollouts.jsonl", "metrics.jsonl"):
        one, two = ([{key: value for key, value in row.items() if key not in clock} for row in read(tmp_path / run / name)]
                    for run in ("one", "two"))
        assert one == two and one, name
    weights = [(tmp_path / run / "adapter" / "adapter_model.safetensors").read_bytes() for run in ("one", "two")]
    assert weights[0] == weights[1]
    states = [{path.name: path.read_text() for path in (tmp_path / run / "states").iterdir()} for run in ("one", "two")]
    assert states[0] == states[1] and len(states[0]) == 4


# Retirement

def test_what_a_committed_policy_does_without_leaves_the_state(absorbing, tmp_path, monkeypatch, capsys):
    """In the round, before the next one begins; the report at the end has all of what the last policy was taught from."""
    seen, folder = prompts_of(monkeypatch), tmp_path / "run"
    rounds.main([*absorbing, "--out", str(folder)])
    one, two = read(folder / "rounds.jsonl")
    states = [(folder / "states" / f"00{n}.md").read_text().splitlines() for n in range(3)]
    assert states[0] == ["- Knock."] and len(states[1]) == 1 and states[1] == states[2][:1] and "- Knock." not in states[1] + states[2]
    assert (one["retired"], one["entries"], two["retired"], two["entries"]) == (["- Knock."], 1, [], 2)
    assert not two["edited_by_hand"]  # by the run itself
    assert [prompts for phase, prompts in seen if phase == "002-state"] == [{f"{KeyDoor.system_prompt}\n\n## Notes\n\n{states[1][0]}"}]
    assert [prompts for phase, prompts in seen if phase == "001-teacher"][1] == {f"{KeyDoor.system_prompt}\n\n## Notes\n\n- Knock."}
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("    1  accepted"))
    assert line.split()[-4:-2] == ["1", "1"]  # retired, entries
    report = json.loads((folder / "phases" / "002-report.json").read_text())
    assert (report["entries"], report["residual_entries"]) == (2, 2)


def test_the_report_has_the_full_state_beside_the_residual_one(absorbing, tmp_path):
    folder = tmp_path / "run"
    rounds.main([*absorbing, "--rounds", "1", "--out", str(folder)])
    report = json.loads((folder / "phases" / "001-report.json").read_text())
    assert (report["entries"], report["residual_entries"]) == (2, 1)
    full, residual = report["evaluations"][-2:]
    assert (full["success"], residual["success"]) == pytest.approx((0.25, 0.25)) and residual["residual"]
    assert (folder / "states" / "001.md").read_text() == (folder / "states" / "residual.md").read_text() != ""


def test_no_retire_keeps_the_entries_until_the_end(absorbing, tmp_path):
    folder = tmp_path / "run"
    rounds.main([*absorbing, "--no-retire", "--out", str(folder)])
    assert [(row["retired"], row["entries"]) for row in read(folder / "rounds.jsonl")] == [([], 2), ([], 3)]
    assert not list((folder / "phases").glob("*retire*"))
    assert "- Knock." in (folder / "states" / "002.md").read_text() and "- Knock." not in (folder / "states" / "residual.md").read_text()


def test_a_rejected_policy_retires_nothing(absorbing, tmp_path):
    rounds.main([*absorbing, "--policy-gate", "rise", "--rl-weight", "0", "--mode", "state-only", "--out", str(tmp_path / "run")])
    assert [row["retired"] for row in read(tmp_path / "run" / "rounds.jsonl")] == [[], []]


def test_a_state_edited_by_hand_before_its_entries_are_gone_counts(absorbing, tmp_path, monkeypatch):
    plain, folder = Run.once, tmp_path / "run"

    def once(self, round_, name, work):
        if name == "round":
            raise Stop
        return plain(self, round_, name, work)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Run, "once", once)
        rounds.main([*absorbing, "--rounds", "1", "--out", str(folder)])
    assert json.loads((folder / "phases" / "001-retire.json").read_text())["retired"] == ["- Knock."]
    (folder / "states" / "001.md").write_text("- Knock.\n- By hand.\n")
    rounds.main([*absorbing, "--rounds", "1", "--out", str(folder), "--resume"])
    line, = read(folder / "rounds.jsonl")
    assert (folder / "states" / "001.md").read_text() == "- Knock.\n- By hand.\n" and line["entries"] == 2 and line["retired"] == []
    assert json.loads((folder / "phases" / "001-report.json").read_text())["entries"] == 2
    (folder / "states" / "001.md").write_text(f"{json.loads((folder / 'phases' / '001-retire.json').read_text())['before']}\n")
    rounds.main([*absorbing, "--rounds", "2", "--out", str(folder), "--resume"])  # put back by hand: the next round starts from it
    assert read(folder / "rounds.jsonl")[1]["edited_by_hand"] and (folder / "states" / "001.md").read_text().startswith("- Knock.")


# On-policy, per step

@pytest.mark.parametrize("who, parts", [("self", 1), ("base", 1), ("self", 2)])
def test_on_policy_steps_distil_the_students_own_episodes_of_that_step(helpful, tmp_path, monkeypatch, who, parts):
    """pi_k scores them, with its weights as they were, while the student moves away; the RL term has the same episodes."""
    log, plain = [], {name: getattr(where, name) for where, name in (
        (teacher, "weigh"), (teacher, "consult"), (rounds, "distillation_gradient"))}

    def own(model):
        return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad]).clone()

    def without_adapter(model):
        return next(m for m in model.modules() if hasattr(m, "lora_A")).disable_adapters

    def weigh(model, weighed, *a, **how):
        log.append(["weigh", own(model), without_adapter(model), [t for t, _ in weighed], [x for _, x in weighed]])
        return plain["weigh"](model, weighed, *a, **how)

    def consult(model, items, *a, **how):
        log.append(["consult", None, without_adapter(model), how["sees_state"], items])
        return plain["consult"](model, items, *a, **how)

    def gradient(model, items, *a, **how):
        log.append(["gradient", own(model), without_adapter(model), items])
        return plain["distillation_gradient"](model, items, *a, **how)

    for where, name, new in ((teacher, "weigh", weigh), (teacher, "consult", consult), (rounds, "distillation_gradient", gradient)):
        monkeypatch.setattr(where, name, new)
    played, episodes = [], Run.episodes
    monkeypatch.setattr(Run, "episodes", lambda self, requests, state: played.append(
        (self.phase, state, episodes(self, requests, state))) or played[-1][2])
    folder = tmp_path / "run"
    rounds.main([*SMALL, "--on-policy", "step", "--teacher", who, "--rounds", "1", "--lr", "1e-2", "--alpha", "0.5", "--distill-batch", "3",
                 "--minibatches", str(parts), "--out", str(folder)])
    assert [entry[0] for entry in log] == ["weigh", "consult", *["gradient"] * parts] * 2  # all at each step
    chosen = json.loads((folder / "phases" / "001-teacher.json").read_text())["chosen"]
    assert sorted(chosen.values()) == [0.5, 0.5, 1.0, 1.0]
    seeds = {t.task: t.seed for phase, _, part in played if phase == "001-teacher" for t in part}
    steps = [(state, part) for phase, state, part in played if phase == "001-policy"]
    weights, asked = log[0::2 + parts], log[1::2 + parts]
    moved, episodes_distilled = log[2::2 + parts], 3 if parts == 1 else 4  # of the four that are played
    for (state, part), weighed in zip(steps, weights, strict=True):
        assert state == "" and all(t.task in chosen and t.seed == seeds[t.task] for t in part)
        assert len(weighed[3]) == episodes_distilled and all(any(t is other for other in part) for t in weighed[3])  # of that step
        assert weighed[4] == [chosen[t.task] for t in weighed[3]]
    assert torch.equal(weights[0][1], weights[1][1])  # pi_k, at the second step too
    assert torch.equal(moved[0][1], weights[0][1]) and not torch.equal(moved[1][1], weights[0][1])  # the student has moved
    assert [entry[2] for entry in weights + asked + moved] == [False] * 2 + [who == "base"] * 2 + [False] * 2
    assert all(entry[3] for entry in asked)
    for n, entry in enumerate(entry for entry in log if entry[0] == "gradient"):  # nothing of an earlier step is left over
        assert len(entry[3]) == 3 and all(any(item is other for other in asked[n // parts][4]) for item in entry[3])
    line, = read(folder / "rounds.jsonl")
    assert (line["selected"], line["trajectories"]) == (4, 2 * episodes_distilled) and line["tokens"] > 6
    assert not list(folder.rglob("*.pt"))


def test_another_teacher_stands_beside_the_student_with_on_policy_steps(helpful, tmp_path, monkeypatch):
    loaded, asked, plain, consult = [], [], run_.load_frozen, teacher.consult
    monkeypatch.setattr(run_, "load_frozen", lambda *how: loaded.append(plain(*how)) or loaded[-1])
    monkeypatch.setattr(teacher, "consult", lambda model, *a, **how: asked.append(model) or consult(model, *a, **how))
    rounds.main([*SMALL, "--out", str(tmp_path / "run"), "--rounds", "1", "--on-policy", "step", "--teacher", str(ROOT / "tiny-keydoor")])
    assert len(loaded) == 1 and len(asked) == 2 and all(model is loaded[0][0] for model in asked)


def test_on_policy_steps_ask_in_the_micro_batches_that_training_came_down_to(helpful, tmp_path, monkeypatch):
    asked, plain, consult = [], rounds.distillation_gradient, teacher.consult
    monkeypatch.setattr(rounds, "distillation_gradient", lambda *a, **how: (plain(*a, **how)[0], 300))  # memory ran out
    monkeypatch.setattr(teacher, "consult", lambda *a, **how: asked.append(how["micro_batch_tokens"]) or consult(*a, **how))
    rounds.main([*SMALL, "--out", str(tmp_path / "run"), "--rounds", "1", "--on-policy", "step"])
    assert asked == [8192, 300]


def test_base_is_the_model_without_its_adapter(helpful, tmp_path, monkeypatch):
    """In round 1 that is the policy itself, later it is not."""
    found, consult = [], teacher.consult

    def asked(model, items, *a, **how):
        consult(model, items, *a, **how)
        found.append((rounds_of[0], items[0].logp))

    rounds_of, once = [0], Run.once
    monkeypatch.setattr(Run, "once", lambda self, k, name, work: (rounds_of.__setitem__(0, k), once(self, k, name, work))[1])
    monkeypatch.setattr(teacher, "consult", asked)
    for who in ("self", "base"):
        rounds.main([*SMALL, "--out", str(tmp_path / who), "--teacher", who, "--lr", "1e-2", "--no-retire"])
    own, base = ({k: logp for k, logp in part} for part in (found[:2], found[2:]))
    assert torch.equal(own[1], base[1])
    assert own[2].shape != base[2].shape or not torch.allclose(own[2], base[2], atol=1e-3)


def test_test_tasks_are_not_touched_before_the_report(tmp_path, monkeypatch):
    touched, plain, once = {}, KeyDoor.reset, Run.once

    def spied(self, round_, name, work):
        now[0] = name
        return once(self, round_, name, work)

    def reset(self, *, task, seed):
        split = task.split("/")[1].split("-")[0]
        touched[now[0], split] = touched.get((now[0], split), 0) + 1
        return plain(self, task=task, seed=seed)

    now = [""]
    monkeypatch.setattr(Run, "once", spied)
    monkeypatch.setattr(KeyDoor, "reset", reset)
    script(monkeypatch)
    success = Run.success
    monkeypatch.setattr(Run, "success", lambda self, split, policy, state: {
        **success(self, split, policy, state), "success": 0.05 * state.count("- ")})
    rounds.main([*SMALL, "--out", str(tmp_path / "run"), "--rounds", "1"])
    assert touched["report", "test"] >= 6 and {name for name, split in touched if split == "test"} == {"report"}
    assert {split for name, split in touched if name in ("teacher", "state", "policy")} == {"train", "valid"}
    assert ("teacher", "valid") not in touched


ARM_RUNS = {"both": [], "all": ["--select", "all"], "random-uniform": ["--select", "random", "--token-weights", "uniform"],
            "no-teacher": ["--teacher", "none"], "blind": ["--no-teacher-state"], "distil-only": ["--rl-weight", "0"],
            "dapo": ["--rl-loss", "dapo"], "gspo": ["--rl-loss", "gspo", "--on-policy", "round", "--top-k", "8"],
            "step": ["--on-policy", "step"], "step-dapo": ["--on-policy", "step", "--rl-loss", "dapo", "--minibatches", "1"],
            "step-distil-only": ["--on-policy", "step", "--rl-weight", "0"], "base": ["--teacher", "base"],
            "step-base": ["--on-policy", "step", "--teacher", "base", "--top-k", "8"],
            "step-another": ["--on-policy", "step", "--teacher", str(ROOT / "tiny-keydoor")],
            "policy-only": ["--mode", "policy-only"]}


@pytest.mark.parametrize("arm", ARM_RUNS)
def test_every_arm_takes_the_same_number_of_optimizer_steps(helpful, tmp_path, arm, monkeypatch):
    seen = prompts_of(monkeypatch)
    folder = tmp_path / "run"
    rounds.main([*SMALL, "--out", str(folder), "--rounds", "1", *ARM_RUNS[arm]])
    line, = read(folder / "rounds.jsonl")
    steps = [row for row in read(folder / "metrics.jsonl") if row.get("optimizer_step")]
    assert line["optimizer_steps"] == len(steps) == 2
    alone = arm in ("no-teacher", "policy-only")
    assert all(("distill_loss" in row) == (not alone) for row in steps)
    assert line["selected"] == (None if alone else 6 if arm == "all" else 4)
    if arm == "blind":  # before the first step the student is its teacher
        assert steps[0]["distill_loss"] == pytest.approx(0, abs=1e-5)
    assert any(phase.endswith("policy") for phase, _ in seen) == (arm != "distil-only")
    if arm == "policy-only":
        assert {prompt for _, prompts in seen for prompt in prompts} == {KeyDoor.system_prompt}
        assert line["state_accepted"] is None and (folder / "states" / "001.md").read_text() == ""


def test_state_only_never_trains(helpful, tmp_path, capsys):
    rounds.main([*SMALL, "--out", str(tmp_path / "run"), "--mode", "state-only"])
    assert [(row["state_accepted"], row["policy_accepted"], row["optimizer_steps"], row["policy"]) for row in
            read(tmp_path / "run" / "rounds.jsonl")] == [(True, None, 0, 0)] * 2
    assert not any("optimizer_step" in row for row in read(tmp_path / "run" / "metrics.jsonl"))
    out = capsys.readouterr().out
    assert "initial, + full state" in out and "consolidated" not in out  # nothing was


@pytest.mark.parametrize("gate, after, accepted", [("keep", 0.1, True), ("keep", 0.09, False), ("rise", 0.1, False),
                                                   ("rise", 0.11, True)])
@pytest.mark.parametrize("metric", ["success", "reward"])
def test_the_policy_gate_and_a_rejected_policy_is_gone(helpful, tmp_path, monkeypatch, gate, after, accepted, metric):
    weights = {}

    def success(self, split, policy, state):
        model = self.load(policy)
        weights[self.phase, policy] = [p.detach().clone() for p in model.parameters() if p.requires_grad]
        value = 0.1 + (after - 0.1) * (policy > 0) + 0.05 * state.count("- ")
        other = 0.3 - value  # of the metric that is not asked for
        return {"success": other, "reward": other, "interval": [value, value], "episodes": 6, "score": value,
                "valid_action_fraction": 1.0} | {metric: value}

    monkeypatch.setattr(Run, "success", success)
    rounds.main([*SMALL, "--out", str(tmp_path / "run"), "--rounds", "1", "--policy-gate", gate, "--gate-metric",
                 metric])
    line, = read(tmp_path / "run" / "rounds.jsonl")
    assert line["policy_accepted"] == accepted and line["state_accepted"] and line["policy"] == int(accepted)
    assert line["policy_reason"].startswith(f"state-free validation {metric} ")
    assert sorted(p.name for p in (tmp_path / "run" / "policies").iterdir()) == ["000", "001"][:1 + accepted]
    before, now = weights["000-start", 0], weights["001-round", int(accepted)]
    assert all(torch.equal(a, b) for a, b in zip(before, now)) == (not accepted)
    assert not all(torch.equal(a, b) for a, b in zip(before, weights["001-policy", 1]))


def test_a_rejected_round_keeps_the_pair(helpful, tmp_path, monkeypatch):
    plain = Run.success
    monkeypatch.setattr(Run, "success", lambda self, split, policy, state: plain(self, split, policy, ""))
    rounds.main([*SMALL, "--out", str(tmp_path / "run")])
    for row in read(tmp_path / "run" / "rounds.jsonl"):
        assert (row["state_accepted"], row["edits"], row["policy"], row["optimizer_steps"]) == (False, [], 0, 0)
        assert row["rejected_edits"] and (tmp_path / "run" / "states" / f"00{row['step']}.md").read_text() == ""


def test_no_trajectory_selected_is_logged_and_rejected(helpful, tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "transitions", lambda *outcomes: ["00"] * 6)
    rounds.main([*SMALL, "--out", str(tmp_path / "run")])
    for row in read(tmp_path / "run" / "rounds.jsonl"):
        assert row["state_accepted"] and not row["policy_accepted"] and row["policy_reason"] == "no trajectory was selected"
        assert row["selected"] == row["optimizer_steps"] == row["policy"] == 0


def test_a_state_edited_by_hand_between_rounds_is_what_the_next_round_starts_from(helpful, tmp_path, monkeypatch):
    argv, folder = [*SMALL, "--out", str(tmp_path / "run")], tmp_path / "run"
    rounds.main([*argv, "--rounds", "1"])
    file = folder / "states" / "001.md"
    file.write_text("- " + "x" * 17_000)
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(BadInput, match="001.md has 17,002 characters, more than the limit of 16,000"):
        rounds.main([*argv, "--resume"])
    assert {path: path.read_bytes() for path in kept if path.name != "config.json"} == {
        path: data for path, data in kept.items() if path.name != "config.json"}
    file.write_text("Mind the alarm.\n")
    seen = prompts_of(monkeypatch)
    rounds.main([*argv, "--resume"])
    assert seen[0] == ("002-state", {f"{KeyDoor.system_prompt}\n\n## Notes\n\nMind the alarm."})
    assert [row["edited_by_hand"] for row in read(folder / "rounds.jsonl")] == [False, True]
    assert (folder / "states" / "002.md").read_text().startswith("Mind the alarm.\n\n- ")


def test_an_editor_that_answers_nonsense_costs_the_round_alone(helpful, tmp_path):
    rounds.main([*SMALL, "--out", str(tmp_path / "run"), "--editor", "model", "--editor-tokens", "8",
                 "--state-limit", "900", "--editor-characters", "900"])  # tiny: no JSON
    for row in read(tmp_path / "run" / "rounds.jsonl"):
        assert not row["state_accepted"] and row["state_reason"] == "no edit was left" and row["policy"] == 0
        assert {bad["reason"] for bad in row["dropped_edits"]} == {"the editor's answer holds no JSON list of edits"}


def test_another_teacher_comes_while_the_policy_is_out_of_memory(helpful, tmp_path, monkeypatch):
    held, plain, consult = [], run_.load_frozen, teacher.consult

    def load(*how):
        held.append([module for module in gc.get_objects() if isinstance(module, PeftModel)])
        return plain(*how)

    gc.collect()
    others = len([module for module in gc.get_objects() if isinstance(module, PeftModel)])  # of other tests
    monkeypatch.setattr(run_, "load_frozen", load)
    monkeypatch.setattr(teacher, "consult", lambda model, *a, **how: (
        held.append(model.num_parameters()), consult(model, *a, **how)))
    rounds.main([*SMALL, "--out", str(tmp_path / "run"), "--rounds", "1", "--teacher", str(ROOT / "tiny-keydoor"), "--top-k", "16"])
    assert len(held[0]) == others and held[1] > 700_000 and len(held) == 2
    assert read(tmp_path / "run" / "rounds.jsonl")[0]["policy_accepted"]


def test_a_full_disk_while_the_teacher_is_stored_keeps_the_last_pair(helpful, tmp_path, monkeypatch):
    plain = torch.save

    def full(items, path):
        plain([], path)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    folder = tmp_path / "run"
    with pytest.raises(BadInput, match="cannot be stored in .*No space left.*--resume"):
        rounds.main([*SMALL, "--out", str(folder)])
    assert not list(folder.rglob("*.pt*")) and (folder / "policies" / "000").exists()
    assert (folder / "states" / "001.md").read_text()
    monkeypatch.setattr(torch, "save", plain)
    rounds.main([*SMALL, "--out", str(folder), "--resume"])
    assert [row["policy"] for row in read(folder / "rounds.jsonl")] == [1, 2]


def test_five_steps_in_a_row_without_a_finite_gradient_end_the_run(tmp_path, monkeypatch):
    steps = []

    def update(model, optimizer, batch, advantages_N, algorithm, how, more):
        steps.append(how.seed)
        return {"micro_batch_tokens": 8192, "skipped_steps": 1, "optimizer_steps": 0}

    monkeypatch.setattr(train, "update", update)
    with pytest.raises(BadInput, match="five steps in a row.*lower --lr"):
        rounds.main([*SMALL, "--mode", "policy-only", "--rounds", "1", "--steps", "8", "--out", str(tmp_path / "run")])
    assert len(steps) == 5


def test_a_kill_between_a_phase_and_the_files_made_from_it_loses_no_row(tmp_path):
    folder = tmp_path / "run"
    rounds.main([*SMALL, "--out", str(folder)])
    want = [(folder / name).read_text() for name in ("evaluations.jsonl", "rounds.jsonl")]
    kept = want[0].splitlines(keepends=True)
    (folder / "evaluations.jsonl").write_text("".join(line for line in kept if json.loads(line)["split"] != "test"))
    (folder / "rounds.jsonl").unlink()
    rounds.main([*SMALL, "--out", str(folder), "--resume"])
    assert [(folder / name).read_text() for name in ("evaluations.jsonl", "rounds.jsonl")] == want


def test_an_episode_with_an_id_that_has_no_token_is_not_shown_to_another_teacher(stored):  # docs/faults.md, 31
    """Vocabularies are padded: an id without a token can be sampled, and another model may lack it."""
    for teacher, distilled in (("another", ([1.0], [1.0])), ("self", ([1.0, 1.0], [1.0, 1.0]))):
        run = scripted_run({"free": [0, 0], "updated": [1, 1]}, teacher=teacher)
        plain, run.chat = run.play, SimpleNamespace(pad_id=0, tokenizer=range(5))

        def play(*how, plain=plain):
            episodes = plain(*how)
            for episode, ids in zip(episodes, ([4], [5])):
                episode.turns = [SimpleNamespace(action_ids=ids)]
            return episodes

        run.play = play
        rounds.choose_and_teach(run, 1, 0, "", "a state")
        assert stored.pop() == distilled


# Bad input

@pytest.mark.parametrize("argv, said", [
    (["--select", "best"], "--select must be both, new"), (["--rounds", "0"], "--rounds must be at least 1"),
    (["--alpha", "-1"], "--alpha must be 0 or above"), (["--enrich", "hybrid"], "unknown option --enrich hybrid"),
    (["--eval-every", "5"], "unknown option --eval-every 5"), (["--enrich-positive-only"], "--enrich-positive-only"),
    (["--temperature", "0"], "--temperature above 0"), (["--teacher-bits", "3"], "--teacher-bits must be 0, 4, 16, 32"),
    (["--rl-weight", "0", "--teacher", "none"], "nothing would be trained"),
    (["--state", "nothing.md"], "the state nothing.md cannot be read"),
    (["--teacher", "/no/teacher"], "cannot load the teacher"),
    (["--on-policy"], "expected one argument"), (["--on-policy", "always"], "--on-policy must be round, step"),
    (["--gate-metric", "score"], "--gate-metric must be success, reward"),
    (["--tasks", "nowhere"], "unknown task"), (["--editor", "oracle"], "--editor must be count, model"),
    (["--resume"], "no run in .* to resume")])
def test_bad_options_are_one_line_and_leave_no_folder(tmp_path, argv, said):
    folder = tmp_path / "run"
    with pytest.raises(BadInput, match=said) as caught:
        rounds.main([*SMALL, "--out", str(folder), *argv])
    assert "\n" not in str(caught.value) and not folder.exists()


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_an_empty_split_is_one_line(tmp_path, monkeypatch, split):
    plain = KeyDoor.tasks.__func__
    monkeypatch.setattr(KeyDoor, "tasks", classmethod(
        lambda cls, name, **how: [] if name == split else plain(cls, name, **how)))
    with pytest.raises(BadInput, match=f"keydoor has no {split} tasks"):
        rounds.main([*SMALL, "--out", str(tmp_path / "run")])


def test_a_run_from_before_these_options_resumes_or_is_refused_in_one_line(helpful, tmp_path):
    folder = tmp_path / "run"
    argv = [*SMALL, "--out", str(folder), "--mode", "state-only", "--rounds", "1"]
    rounds.main(argv)
    file = folder / "config.json"
    old = {name: value for name, value in json.loads(file.read_text()).items() if name not in ("retire", "gate_metric")}
    for was, words in ((False, []), (True, ["--on-policy", "round"])):
        file.write_text(json.dumps(old | {"on_policy": was}))
        with pytest.raises(BadInput, match="has --retire False, not True"):
            rounds.main([*argv, "--resume", *words])
        with pytest.raises(BadInput, match="has --gate-metric success, not reward"):
            rounds.main([*argv, "--resume", *words, "--no-retire", "--gate-metric", "reward"])
        other = ["--on-policy", "step"]
        with pytest.raises(BadInput, match=f"has --on-policy {'round' if was else 'nothing'}, not step"):
            rounds.main([*argv, "--resume", *other, "--no-retire"])
        rounds.main([*argv, "--resume", *words, "--no-retire"])
        assert json.loads(file.read_text())["on_policy"] == ("round" if was else "")


@pytest.mark.parametrize("options, said", [
    ([], "started when the state had no heading"), (["--state-place", "observation"], "has --lite False, not True"),
    (["--state-place", "observation", "--editor", "model", "--state-limit", "900", "--editor-characters", "900"],
     "started when the state had no heading or its editor other prompts: start another run"), (["--mode", "policy-only"], "")])
def test_a_run_from_before_the_prompts_of_now_never_goes_on_with_other_ones(helpful, tmp_path, options, said):
    folder = tmp_path / "run"
    argv = [*SMALL, "--out", str(folder), "--mode", "state-only", "--rounds", "1", *options]
    rounds.main(argv)
    file = folder / "config.json"
    old = {name: value for name, value in json.loads(file.read_text()).items() if name not in ("retire", "gate_metric", "lite")}
    file.write_text(json.dumps(old | {"on_policy": False}))
    words = ["--resume", "--no-retire"]
    if said:
        with pytest.raises(BadInput, match=said) as caught:
            rounds.main([*argv, *words, *["--lite"] * ("lite" in said)])
        assert "\n" not in str(caught.value)
    if "other prompts" not in said and options:  # else it goes on, and once more, as a run of now
        for _ in range(2):
            rounds.main([*argv, *words])


def test_another_runs_options_are_refused_on_resume(helpful, tmp_path):
    argv = [*SMALL, "--out", str(tmp_path / "run"), "--mode", "state-only", "--rounds", "1"]
    rounds.main(argv)
    with pytest.raises(BadInput, match="--alpha 1.0, not 0.5"):
        rounds.main([*argv, "--resume", "--alpha", "0.5"])
    with pytest.raises(BadInput, match="exists: pass --resume"):
        rounds.main(argv)
    rounds.main([*argv, "--resume", "--rounds", "2"])  # more rounds are fine
    assert len(read(tmp_path / "run" / "rounds.jsonl")) == 2


# The whole of it, with nothing scripted but the editor

class Word(Env):
    """One word is right, and only the state can say which."""

    system_prompt, max_turns = "play.", 1

    @classmethod
    def tasks(cls, split):
        return [f"{split}/{n}" for n in range(24)]

    def reset(self, *, task, seed):
        return f"you see {seed % 9 + 1}.", {"success": False, "valid": True}

    def step(self, action):
        right = action.strip() == "go"
        return "win" if right else "lose", float(right), True, False, {"success": right, "valid": True}


@pytest.fixture(scope="module")
def obedient(words, tmp_path_factory):
    """A model that does what a state says and without one says "wait" two times in three."""
    model, chat, rng = tiny_qwen3(len(words), words.eos_token_id, words.pad_token_id), Chat(words), random.Random(0)
    rows = []
    for n in range(300):
        word = rng.choice(["go", "wait", None])
        said = word or rng.choice(["go", "wait", "wait"])
        system = f"play.\n\n## Notes\n\n- play {word}." if word else "play."
        prompt = chat.prompt([("system", system), ("user", f"you see {n % 9 + 1}.")])
        action = [*chat.text_ids(said), words.eos_token_id]
        rows.append(Row(prompt + action, [0] * len(prompt) + [1] * len(action)))
    supervise(model.requires_grad_(True), rows, chat.pad_id, steps=100, batch=32, lr=3e-3, seed=1)
    folder = tmp_path_factory.mktemp("obedient")
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    assert load_model(str(folder))
    return str(folder)


WORD = ["--env", "test_rounds:Word", "--rounds", "1", "--steps", "24", "--rl-weight", "0", "--lr", "5e-3",
        "--instances", "24", "--eval-episodes", "24", "--max-new-tokens", "3",
        "--state-limit", "99", "--editor-characters", "99", "--editor-tokens", "99"]


@pytest.mark.parametrize("options, teacher_sees", [([], True), (["--no-teacher-state"], False), (["--on-policy", "step"], True),
                                                   (["--on-policy", "step", "--teacher", "base"], True)],
                         ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_what_the_state_says_goes_into_the_weights(obedient, tmp_path, monkeypatch, options, teacher_sees):
    monkeypatch.setattr(rounds, "propose_edits", lambda *a: ([edit("append", content="- play go.")], []))
    rounds.main([*WORD, "--model", obedient, "--out", str(tmp_path / "run"), *options])
    line, = read(tmp_path / "run" / "rounds.jsonl")
    assert line["state_accepted"] and line["labels"]["01"] == line["selected"] >= 6
    assert line["labels"]["11"] == line["labels"]["10"] == 0
    report = read(tmp_path / "run" / "evaluations.jsonl")[-5:]
    before, stated, after, both, residual = [row["success"] for row in report]
    assert before < 0.5 and stated == both == residual == 1.0
    left = (tmp_path / "run" / "states" / "residual.md").read_text()
    if teacher_sees:
        assert line["policy_accepted"] and after == 1.0 and left == ""  # the entry is needless now
        assert line["retired"] == ["- play go."] and (tmp_path / "run" / "states" / "001.md").read_text() == ""
    else:
        assert after < 0.5 and left == "- play go.\n"
