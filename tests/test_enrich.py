"""enrich.py: when hints are shown, to whom, that they change nothing else, and runs with them."""
import json
import random
from collections import Counter

import pytest
import torch
from conftest import CLOCK, ROOT, drawn_requests, needs_bfcl, needs_simulator
from hypothesis import HealthCheck, given, settings, strategies as st

import enrich
import grpo
import gspo
from enrich import STRATEGIES, EnrichedEnv, Schedule, feedback_kind, group_is_enriched, rollout_is_enriched
from envs import BadInput, Env, make_env
from envs.keydoor import KeyDoor
from rl import evaluation, train
from rl.logs import read
from rl.options import Config

SMALL = ["--tasks-per-step", "4", "--group", "4", "--eval-episodes", "12", "--eval-every", "2", "--env-options", "stages=3",
         "commands=3", "--enrich-late", "3,5"]


# When: training step and turn

EARLY, LATE, ALL = {1, 2, 3}, {6, 7, 8, 9, 10}, set(range(1, 13))
TABLE = {  # strategy: {turn: kind} in the first and in the second half of training
    "none": ({}, {}),
    "ag-early": (dict.fromkeys(EARLY, "guidance"),) * 2, "ag-late": (dict.fromkeys(LATE, "guidance"),) * 2,
    "oe-early": (dict.fromkeys(EARLY, "enrichment"),) * 2, "oe-late": (dict.fromkeys(LATE, "enrichment"),) * 2,
    "hybrid": (dict.fromkeys(EARLY, "guidance"), dict.fromkeys(LATE, "enrichment")),
    "reversed": (dict.fromkeys(LATE, "enrichment"), dict.fromkeys(EARLY, "guidance")),
    "ag-always": (dict.fromkeys(ALL, "guidance"),) * 2, "oe-always": (dict.fromkeys(ALL, "enrichment"),) * 2,
    "both": (dict.fromkeys(ALL, "both"),) * 2, "wrong-hint": (dict.fromkeys(EARLY, "guidance"),) * 2}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_schedule_is_the_papers_table(strategy):
    for step in (1, 50, 100, 101, 150, 200):
        shown = {turn: feedback_kind(strategy, step, 200, turn) for turn in ALL}
        assert shown == {turn: TABLE[strategy][step > 100].get(turn) for turn in ALL}, step


def test_windows_and_switch_are_options():
    assert [feedback_kind("hybrid", 1, 10, turn, early=(2, 2)) for turn in (1, 2, 3)] == [None, "guidance", None]
    assert [feedback_kind("hybrid", 10, 10, turn, late=(4, 5)) for turn in (3, 4, 5, 6)] == [None, *["enrichment"] * 2, None]
    for total, switch, first in ((10, 0.3, 4), (10, 0.7, 8), (100, 0.29, 30), (5, 0.5, 3), (4, 0.0, 1), (4, 1.0, 5)):
        kinds = [feedback_kind("hybrid", step, total, 1, late=(1, 3), switch=switch) for step in range(1, total + 1)]
        assert kinds == ["guidance"] * (first - 1) + ["enrichment"] * (total - first + 1)


@pytest.mark.parametrize("options, word", [
    ({"strategy": "ag"}, "ag-early"), ({"early": (3, 1)}, "early 3,1"), ({"early": (0, 3)}, "early 0,3"),
    ({"late": (10, 6)}, "late 10,6"), ({"early": (6, 10), "late": (1, 3)}, "after the early one"),
    ({"early": (1, 9), "late": (2, 3)}, "after the early one"), ({"switch": 1.5}, "switch"), ({"probability": -0.1}, "prob"),
    ({"probability": 1.1}, "prob")])
def test_a_schedule_that_makes_no_sense_is_refused(options, word):
    with pytest.raises(ValueError, match=word) as caught:
        Schedule(**{"strategy": "hybrid", **options})
    assert "\n" not in str(caught.value)


def test_a_single_window_may_lie_anywhere():
    Schedule("ag-early", early=(6, 9), late=(1, 2))
    Schedule("hybrid", early=(1, 20), late=(1, 20))  # BFCL: enrichment after every call


# Whom: the coin

def chi_square(pairs):
    """Pearson's statistic and degrees of freedom of a table of (row, bool) pairs."""
    cells, rows, columns, total = Counter(pairs), Counter(r for r, _ in pairs), Counter(c for _, c in pairs), len(pairs)
    expected = {(r, c): rows[r] * columns[c] / total for r in rows for c in columns}
    return sum((cells[cell] - e) ** 2 / e for cell, e in expected.items()), (len(rows) - 1) * (len(columns) - 1)


def far_out(statistic, freedom):
    """Beyond the normal approximation's 99.9 %."""
    return statistic > freedom + 3.1 * (2 * freedom) ** 0.5 + 4


def drawn(steps=400, seeds=(0, 1, 2), **options):
    """(task, episode seed, enriched) of every group, as training draws them; 4 categories of 10 tasks."""
    tasks = [f"{category}/{n}" for category in ("base", "miss_func", "miss_param", "long_context") for n in range(10)]
    found = []
    for seed in seeds:
        schedule = Schedule("ag-early", total_steps=steps, seed=seed, **options)
        for step in range(1, steps + 1):
            requests = drawn_requests(Config(group=2, seed=seed), step, tasks, 16, enriched=schedule.at(step).enriched)
            found += [(one.task, one.seed, one.enriched) for one in requests[::2]]
            assert options or all(one.enriched == two.enriched for one, two in zip(requests[::2], requests[1::2]))
    return found


def test_the_coin_is_independent_of_the_task():
    """docs/enrich.md, the released code: one seed for coin and task made P(enriched) 0.22 for base, 1.0 for miss_param."""
    found = drawn()
    assert abs(sum(enriched for *_, enriched in found) / len(found) - 0.5) < 0.01  # 19,200 groups: 2.8 sigma
    for of in (lambda task, seed: task.split("/")[0], lambda task, seed: task, lambda task, seed: seed % 2,
               lambda task, seed: seed * 8 // 2 ** 31):
        for part in (found, found[::16]):  # all groups, and the first of each step
            assert not far_out(*chi_square([(of(task, seed), enriched) for task, seed, enriched in part]))


def test_the_test_of_the_coin_would_notice_a_shared_seed(monkeypatch):
    monkeypatch.setattr(enrich, "group_is_enriched", lambda seed, step, group, probability:
                        random.Random(f"tasks {seed} {step}").random() < probability)
    assert far_out(*chi_square([(task.split("/")[0], enriched) for task, _, enriched in drawn()[::16]]))


def test_the_coin_is_its_own_function_of_seed_step_and_group():
    coins = [[group_is_enriched(seed, step, group) for seed in range(20) for step in range(20)] for group in range(20)]
    assert len(set(map(tuple, coins))) == 20 and coins[0] == [group_is_enriched(s, t, 0) for s in range(20) for t in range(20)]
    pairs = [(group_is_enriched(0, step, group), group_is_enriched(0, step, group + 1))
             for step in range(300) for group in range(8)]
    assert not far_out(*chi_square(pairs))
    for probability in (0.0, 0.2, 1.0):
        share = sum(group_is_enriched(0, step, 0, probability) for step in range(4000)) / 4000
        assert abs(share - probability) < 0.025


def test_mixed_groups_have_a_coin_for_each_rollout():
    assert abs(sum(enriched for *_, enriched in drawn(steps=100, mixed=True)) / 4800 - 0.5) < 0.03
    schedule = Schedule("ag-early", mixed=True)
    groups = [[schedule.enriched(group, n) for n in range(8)] for group in range(200)]
    assert sum(0 < sum(group) < 8 for group in groups) > 180
    assert groups[3] == [rollout_is_enriched(0, 1, 3, n) for n in range(8)]


def test_half_of_every_group():
    schedule = Schedule("ag-early", half=True)
    assert all(sum(schedule.at(step).enriched(group, n) for n in range(8)) == 4 for step in range(1, 4) for group in range(5))
    for more in ({"mixed": True}, {"anneal": True}, {"probability": 0.3}):
        with pytest.raises(ValueError, match="--enrich-half"):
            Schedule("ag-early", half=True, **more)


def test_annealing_ends_at_zero():
    schedule = Schedule("ag-early", total_steps=5, probability=0.8, anneal=True)
    shares = [sum(schedule.at(step).enriched(group, 0) for group in range(3000)) / 3000 for step in range(1, 6)]
    assert shares == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0], abs=0.03) and shares[-1] == 0


# What: nothing but observations

def twins(make, task, strategy, choose, turns):
    """Play the same actions in the plain environment and in the enriched one, and compare all that is no observation.
    choose(rng, env, info) -> an action. Returns the (plain, enriched) observations."""
    plain, env, rng = make(), EnrichedEnv(make(), Schedule(strategy, late=(3, 6))), random.Random(f"{task} {strategy}")
    (seen, info), (hinted, hinted_info) = plain.reset(task=task, seed=5), env.reset(task=task, seed=5, enriched=True)
    pairs, over = [], False
    for _ in range(turns):
        hint = hinted_info.pop("hint", None)
        assert info == hinted_info and hinted == (f"{seen}\n{hint}" if hint else seen)
        assert plain.system_prompt == env.system_prompt and plain.max_turns == env.max_turns and plain.tools == env.tools
        pairs.append((seen, hinted))
        if over:
            break
        action = choose(rng, plain, info)
        seen, *rest, info = plain.step(action)
        hinted, *hinted_rest, hinted_info = env.step(action)
        assert rest == hinted_rest  # reward, terminated, truncated
        over = rest[1] or rest[2]
    for one in (plain, env):
        one.close()
    return pairs


@pytest.mark.parametrize("strategy", ["ag-early", "oe-late", "both", "wrong-hint"])
def test_keydoor_is_the_same_game_with_hints(strategy):
    def choose(rng, env, info):
        return env.gold_action() if rng.random() < 0.7 else rng.choice([*info["admissible"], "sing", ""])

    tasks = KeyDoor.tasks("train", stages=4)
    pairs = [pair for task in tasks[:60] for pair in twins(lambda: KeyDoor(stages=4), task, strategy, choose, 8)]
    assert 30 < sum(plain != hinted for plain, hinted in pairs) < len(pairs)


@needs_simulator
@pytest.mark.parametrize("strategy", ["both", "wrong-hint"])
@pytest.mark.parametrize("task", ["lifespan-longest-lived/1", "find-non-living-thing/2"])
def test_scienceworld_is_the_same_world_with_hints(task, strategy):
    def choose(rng, env, info):
        admissible = env.admissible_actions()
        assert admissible
        return env.gold_action() if rng.random() < 0.4 else rng.choice([*admissible[:200], "xyzzy"])

    pairs = twins(lambda: make_env("sciworld", {"reward": "score"}), task, strategy, choose, 8)
    assert any(plain != hinted for plain, hinted in pairs)


def bfcl_actions(calls, order):
    """Ground-truth calls in the drawn order: a number beyond them is prose, which ends the user turn."""
    return [f"[{calls[n]}]" if n < len(calls) else "All done." for n in order]


@needs_bfcl
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_bfcl_reward_is_that_of_the_standard_environment(data):
    """docs/enrich.md, the released code: enriched results went into the response check, so swapped calls failed."""
    task = data.draw(st.sampled_from(["base/0", "base/60", "miss_func/3", "miss_param/8", "long_context/55"]))
    from envs.bfcl import load_data
    plan = []
    for turn in load_data()[0][task]["ground_truth"]:  # swapped, repeated and dropped calls, then the end of the turn
        order = data.draw(st.permutations(range(len(turn))) | st.just(list(range(len(turn)))))
        order += data.draw(st.lists(st.sampled_from(order), max_size=1)) if order else []
        plan += bfcl_actions(turn, [*order, len(turn)])
    steps = iter(plan)
    twins(lambda: make_env("bfcl"), task, "both", lambda *_: next(steps, "All done."), 60)


@needs_bfcl
def test_bfcl_gold_and_swapped_calls_pass_with_hints_too():
    env, passed = EnrichedEnv(make_env("bfcl"), Schedule("both")), 0
    for task in ("base/0", "miss_func/3", "miss_param/8", "long_context/55"):
        *_, (observation, info, _) = enrich.walk(env, task, enriched=True)
        passed += info["success"]
        assert info["abstained"] == info["abstain_turns"]  # docs/enrich.md, the released code: reported beside the reward
    assert passed == 4


def test_hints_stand_before_the_action_they_are_for_and_only_in_enriched_episodes():
    schedule = Schedule("hybrid", total_steps=2, early=(1, 2), late=(4, 5))
    task = KeyDoor.tasks("train", stages=6, impossible=0.0)[0]
    for step in (1, 2):
        [env] = schedule.at(step).wrap([KeyDoor(stages=6)])
        for enriched in (True, False):
            seen = list(enrich.walk(env, task, enriched=enriched))
            for turn, (observation, info, action) in enumerate(seen, 1):
                guidance, state = f"Hint: {action}." in observation, "stages are done" in observation
                assert guidance == (enriched and step == 1 and turn in (1, 2))
                assert state == (enriched and step == 2 and turn in (4, 5))
                assert ("hint" in info) == (guidance or state)
        env.reset(task=task, seed=0, enriched=True)
        observation, info = env.reset(task=task, seed=0)
        assert "hint" not in info and "Hint" not in observation  # what the last episode was told is forgotten


def test_the_wrong_hint_names_an_admissible_action_that_is_not_the_right_one():
    env, named = EnrichedEnv(KeyDoor(stages=3), Schedule("wrong-hint")), set()
    for task in KeyDoor.tasks("train")[:40]:
        first = env.reset(task=task, seed=0, enriched=True)
        assert first == env.reset(task=task, seed=0, enriched=True)  # the same for all rollouts of a group
        for _, info, action in enrich.walk(env, task, enriched=True):
            if action:
                wrong = info["hint"].removeprefix("Hint: ").removesuffix(".")
                assert wrong in info["admissible"] and wrong != action
                named.add(wrong)
    assert len(named) > 8


# In a run

@pytest.fixture
def spied(monkeypatch):
    """Every rollout of a run: (in an evaluation?, trajectories, calls of hint methods during it)."""
    seen, hints = [], []

    def spy_on(module):
        plain_rollout = module.rollout

        def spy(*args, **limits):
            hints.clear()
            trajectories = plain_rollout(*args, **limits)
            seen.append((module is evaluation, trajectories, len(hints)))
            return trajectories

        monkeypatch.setattr(module, "rollout", spy)

    for name in ("action_guidance", "observation_enrichment"):
        monkeypatch.setattr(KeyDoor, name, lambda self, plain=getattr(KeyDoor, name): hints.append(self) or plain(self))
    for module in (train, evaluation):
        spy_on(module)
    return seen


def test_evaluation_is_never_enriched_and_its_tasks_never_change(spied, tmp_path):
    grpo.main([*SMALL, "--out", str(tmp_path / "run"), "--steps", "4", "--enrich", "both", "--enrich-probability", "1"])
    evaluations = [(trajectories, hints) for evaluating, trajectories, hints in spied if evaluating]
    training = [(trajectories, hints) for evaluating, trajectories, hints in spied if not evaluating]
    assert len(evaluations) in (5, 6) and len(training) == 4  # valid at 0, 2, 4, then base model, last (and best, if another) on test
    for trajectories, hints in evaluations:
        text = [obs for t in trajectories for obs in (t.first_observation, *(turn.observation for turn in t.turns))]
        assert hints == 0 and all(t.turns for t in trajectories)
        assert not any("Hint" in obs or "stages are done" in obs for obs in text)
        assert not any(t.enriched or turn.hint for t in trajectories for turn in t.turns)
    assert all(t.enriched and t.turns[0].hint for trajectories, _ in training for t in trajectories)
    # docs/enrich.md, the released code: drawn anew each time
    first = [(t.task, t.seed, t.first_observation) for t in evaluations[0][0]]
    for trajectories, _ in evaluations[1:3]:
        assert [(t.task, t.seed, t.first_observation) for t in trajectories] == first
    assert not {t.task for t in evaluations[0][0]} & {t.task for trajectories, _ in training for t in trajectories}


OPTIONS = [["--enrich", "hybrid"], ["--enrich", "ag-early", "--enrich-mixed"], ["--enrich", "wrong-hint"],
           ["--enrich", "reversed", "--enrich-switch", "0.4"], ["--enrich", "ag-always", "--enrich-anneal"],
           ["--enrich", "both", "--enrich-positive-only"], ["--enrich", "ag-early", "--enrich-train-context", "stripped"],
           ["--enrich", "ag-early", "--enrich-train-context", "stripped-ratio", "--enrich-mixed", "--enrich-positive-only"]]


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_a_short_run_with_each_option(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    grpo.main([*SMALL, "--steps", "2", "--eval-every", "0", *options])
    folder = tmp_path / f"runs/keydoor__grpo__{options[1]}__0"
    schedule = Schedule(options[1], 2, late=(3, 5), switch=0.4 if "--enrich-switch" in options else 0.5)
    metrics, episodes = read(folder / "metrics.jsonl"), read(folder / "rollouts.jsonl")
    assert json.loads((folder / "config.json").read_text())["enrich"] == options[1]
    for row in metrics:
        played = [episode for episode in episodes if episode["step"] == row["step"]]
        for name, part in (("success_hinted", [e for e in played if e["enriched"]]),
                           ("success_plain", [e for e in played if not e["enriched"]])):
            assert row.get(name) == (sum(e["success"] for e in part) / len(part) if part else None)
        assert row["enriched_fraction"] == sum(e["enriched"] for e in played) / len(played)
        mixed = {len({e["enriched"] for e in played if e["group"] == group}) for group in range(4)}
        assert mixed == {1} or "--enrich-mixed" in options
        kind = schedule.at(row["step"]).kind
        for episode in played:
            for number, turn in enumerate(episode["turns"], 1):
                assert ("hint" in turn) == (episode["enriched"] and kind(number) is not None)
    assert any(row["enriched_fraction"] for row in metrics) or options[1] == "ag-always"
    assert "--enrich-anneal" not in options or metrics[-1]["enriched_fraction"] == 0
    if "stripped-ratio" in options:
        assert any(row["approx_kl"] > 0 for row in metrics)


def test_none_and_a_coin_that_never_falls_are_the_same_run(tmp_path):
    runs = []
    for name, options in (("none", []), ("never", ["--enrich", "both", "--enrich-probability", "0"]),
                          ("stripped", ["--enrich-train-context", "stripped-ratio"])):
        gspo.main([*SMALL, "--steps", "2", "--minibatches", "2", "--out", str(tmp_path / name), *options])
        runs.append([[{key: value for key, value in row.items() if key not in CLOCK} for row in read(tmp_path / name / file)]
                     for file in ("metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl")])
        runs[-1].append((tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes())
    assert runs[0] == runs[1] == runs[2]
    assert "success_hinted" not in runs[0][0][0] and runs[0][0][0]["success_plain"] == runs[0][0][0]["success"]


def test_positive_only_leaves_no_negative_advantage(tmp_path, monkeypatch):
    seen, plain = [], train.update
    monkeypatch.setattr(train, "update", lambda *args, **kwargs: (seen.append(args[3]), plain(*args, **kwargs))[1])
    for flag in ([], ["--enrich-positive-only"]):
        grpo.main([*SMALL, "--steps", "1", "--eval-every", "0", "--enrich", "ag-always", "--enrich-mixed", "--out",
                   str(tmp_path / "".join(["run", *flag])), *flag])
    assert (seen[0] < 0).any() and torch.equal(seen[1], seen[0].clamp(min=0))


# Bad input

class Bare(Env):
    """Fake: an environment without any hint, admissible action or gold path."""

    max_turns = 3

    @classmethod
    def tasks(cls, split):
        return ["a/0", "b/0"]

    def reset(self, *, task, seed):
        return "hello", {"success": False, "valid": True}

    def step(self, action):
        return "hello", 0.0, False, False, {"success": False, "valid": True}


class OnlyGuided(Bare):
    def action_guidance(self):
        return "Hint: look."


BARE, GUIDED = f"{__name__}:Bare", f"{__name__}:OnlyGuided"
BAD = [(["--enrich", "ag"], "--enrich takes one of none, ag-early"), (["--enrich-early", "3,1"], "early 3,1"),
       (["--enrich-early", "3"], "FIRST,LAST"), (["--enrich-late", "0,4"], "late 0,4"), (["--enrich-late", "a,b"], "FIRST,LAST"),
       (["--enrich-late", ""], "FIRST,LAST"), (["--enrich-early", "-1,3"], "FIRST,LAST|expected"),
       (["--enrich", "hybrid", "--enrich-early", "4,5", "--enrich-late", "1,2"], "after the early one"),
       (["--enrich", "oe-late", "--enrich-late", "6,10"], "begins in turn 6, and an episode has 5"),
       (["--enrich-probability", "2"], "0..1"), (["--enrich-switch", "-1"], "0..1"),
       (["--enrich-train-context", "plain"], "stripped"), (["--env", BARE, "--enrich", "ag-early"], "no guidance hint"),
       (["--env", GUIDED, "--enrich", "both"], "no enrichment hint"),
       (["--env", GUIDED, "--enrich", "wrong-hint"], "no list of wrong actions")]


@pytest.mark.parametrize("argv, word", BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_bad_input_is_one_line_and_leaves_nothing(argv, word, tmp_path):
    options = SMALL[:8] + SMALL[11:] if "--env" in argv else SMALL
    with pytest.raises(BadInput, match=word) as caught:
        grpo.main([*options, "--out", str(tmp_path / "run"), "--model", str(ROOT / "tiny-keydoor"), *argv])
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_an_environment_with_the_hints_that_are_asked_for_is_accepted():
    assert Schedule("ag-early").why_no_hints(OnlyGuided(), ["a/0"], 3) == ""
    assert Schedule("none").why_no_hints(Bare(), ["a/0"], 3) == ""
    for strategy in STRATEGIES:
        assert Schedule(strategy, late=(4, 5)).why_no_hints(KeyDoor(), KeyDoor.tasks("train"), 5) == ""
