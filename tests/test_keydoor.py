"""envs/keydoor.py, the built-in game, and envs/__init__.py: choosing environments, tasks and actions."""
import random

import pytest

from envs import BadInput, env_class, make_env, parse_options, select_tasks
from envs.keydoor import COLOURS, GIVE_UP, HOUSES, lock_metal

DIFFICULTIES = [{}, {"stages": 1, "commands": 3}, {"stages": 4, "commands": 8}, {"stages": 6, "commands": 10, "families": 8},
                {"impossible": 1.0}, {"impossible": 0.0}]


def play(env, task, seed, choose):
    observation, info = env.reset(task=task, seed=seed)
    trace = [(observation, info)]
    while not env.over:
        trace.append(env.step(choose(env, trace[-1][-1])))
    return trace


@pytest.mark.parametrize("options", DIFFICULTIES, ids=str)
def test_the_gold_path_wins_every_task_and_reward_comes_once_at_the_end(options):
    env = make_env("keydoor", options)
    for split in ("train", "valid", "test"):
        for task in select_tasks("keydoor", split, None, options)[:60]:
            trace = play(env, task, 3, lambda env, info: env.gold_action())
            rewards = [step[1] for step in trace[1:]]
            assert rewards == [0.0] * (env.stages - 1) + [1.0]
            assert [step[2] for step in trace[1:]] == [False] * (env.stages - 1) + [True]
            assert trace[-1][-1]["success"] and not any(step[-1]["success"] for step in trace[:-1])


def test_every_listed_wrong_command_ends_the_episode_without_reward():
    env = make_env("keydoor")
    for task in select_tasks("keydoor", "train")[:20]:
        env.reset(task=task, seed=0)
        for stage, commands in enumerate(env.lists):
            for command in commands:
                env.reset(task=task, seed=0)
                for _ in range(stage):
                    env.step(env.gold_action())
                right = command == env.gold_action()
                _, reward, terminated, truncated, info = env.step(command)
                assert reward == (1.0 if right and stage == env.stages - 1 else 0.0) and not truncated
                assert terminated == (not right or stage == env.stages - 1)
                assert info["success"] == (right and stage == env.stages - 1)


def test_random_play_is_as_sparse_as_the_docstring_says():
    env, rng = make_env("keydoor", {"stages": 2, "commands": 4}), random.Random(0)
    tasks = select_tasks("keydoor", "train", None, {"stages": 2, "commands": 4})
    wins = sum(play(env, rng.choice(tasks), rng.random(), lambda env, info: rng.choice(info["admissible"]))[-1][1]
               for _ in range(4000))
    assert abs(wins / 4000 - 4 ** -2) < 0.015


def test_splits_are_disjoint_by_content_fixed_and_cover_all_families():
    options = {"families": 3, "colours": 8}
    env, seen = make_env("keydoor", options), {}
    for split in ("train", "valid", "test"):
        tasks = select_tasks("keydoor", split, None, options)
        assert tasks == select_tasks("keydoor", split, None, options) and len(tasks) >= 100
        for task in tasks:
            env.reset(task=task, seed=0)
            content = (env.house, *env.doors, env.doable, *map(frozenset, env.lists))
            assert content not in seen, (task, seen[content])
            seen[content] = task
        assert {task.split("/")[0] for task in tasks} == set(HOUSES[:3])


def test_the_hidden_rule_is_one_to_one_in_a_family_and_differs_between_families():
    rules = {house: tuple(lock_metal(house, colour) for colour in COLOURS) for house in HOUSES}
    assert all(len(set(rule)) == len(COLOURS) for rule in rules.values())
    assert len(set(rules.values())) == len(HOUSES)


def test_same_task_and_seed_same_episode_other_seed_other_order_same_commands():
    first, second = make_env("keydoor"), make_env("keydoor")
    task = select_tasks("keydoor", "train")[5]
    def gold(env, info):
        return env.gold_action()
    assert play(first, task, 7, gold) == play(second, task, 7, gold)
    orders = {tuple(first.reset(task=task, seed=seed)[1]["admissible"]) for seed in range(20)}
    assert len(orders) > 5 and len({frozenset(order) for order in orders}) == 1


def test_in_an_impossible_task_only_giving_up_at_the_last_stage_is_right():
    env = make_env("keydoor", {"impossible": 1.0})
    for task in select_tasks("keydoor", "test", None, {"impossible": 1.0})[:20]:
        env.reset(task=task, seed=0)
        assert env.step(GIVE_UP)[1:3] == (0.0, True)  # too early
        trace = play(env, task, 0, lambda env, info: env.gold_action())
        assert trace[-1][1] == 1.0 and not trace[-1][-1]["doable"]
    share = [make_env("keydoor").reset(task=task, seed=0)[1]["doable"] for task in select_tasks("keydoor", "train")]
    assert 0.03 < 1 - sum(share) / len(share) < 0.1
    env = make_env("keydoor", {"impossible": 0.0})
    for task in select_tasks("keydoor", "test", None, {"impossible": 0.0})[:50]:
        env.reset(task=task, seed=0)
        assert env.step(GIVE_UP)[1:3] == (0.0, True)


@pytest.mark.parametrize("practice", [False, True])
def test_an_unlisted_command_rings_the_alarm(practice):
    env = make_env("keydoor", {"practice": practice})
    for text in ("", "dance", "take", "x" * 100_000, "<action></action>", "\x00", "take iron key | " * 3):
        env.reset(task=select_tasks("keydoor", "train")[0], seed=0)
        observation, reward, terminated, truncated, info = env.step(text)
        assert (reward, terminated, truncated, info["valid"], info["admissible"]) == (0.0, True, False, False, [])
        assert len(observation) < 40


def test_hints_tell_the_truth_hide_nothing_new_and_change_nothing():
    env, plain = make_env("keydoor", {"stages": 6}), make_env("keydoor", {"stages": 6})
    for task in select_tasks("keydoor", "train", None, {"stages": 6})[:30]:
        observation, _ = env.reset(task=task, seed=1)
        assert plain.reset(task=task, seed=1)[0] == observation
        while not env.over:
            gold, state = env.gold_action(), env.observation_enrichment()
            assert gold in env.action_guidance()
            if gold.startswith("take"):
                assert f"is {gold.split()[1]}." in state and state not in observation
            assert env.step(gold) == (step := plain.step(gold))
            observation = step[0]
        assert env.action_guidance() is None and env.observation_enrichment() is None


def test_practice_never_ends_early_and_never_pays():
    env, rng = make_env("keydoor", {"practice": True}), random.Random(1)
    for task in select_tasks("keydoor", "train")[:30]:
        trace = play(env, task, 0, lambda env, info: rng.choice(info["admissible"]))
        assert len(trace) == 4 and sum(step[1] for step in trace[1:]) == 0 and not trace[-1][-1]["success"]


def test_step_after_the_end_is_the_callers_error():
    env = make_env("keydoor")
    with pytest.raises(RuntimeError, match="reset"):
        env.step("x")


@pytest.mark.parametrize("options, word", [
    ({"stages": 0}, "stages"), ({"stages": -1}, "stages"), ({"stages": "many"}, "stages"), ({"commands": 2}, "commands"),
    ({"commands": 11}, "commands"), ({"families": 9}, "families"), ({"colours": 0}, "colours"), ({"impossible": 2}, "impossible"),
    ({"impossible": "x"}, "impossible"), ({"lamps": 3}, "lamps")])
def test_bad_options_are_one_line(options, word):
    with pytest.raises(BadInput, match=word) as caught:
        make_env("keydoor", options)
    assert "\n" not in str(caught.value)


def test_unknown_environments_splits_tasks_and_options_are_one_line():
    for call in (lambda: env_class("nope"), lambda: env_class("random:Random"), lambda: env_class("nope:Env"),
                 lambda: select_tasks("keydoor", "dev"), lambda: select_tasks("keydoor", "train", ["oak"]),
                 lambda: make_env("keydoor").reset(task="ash/train-9999", seed=0), lambda: parse_options(["stages"]),
                 lambda: select_tasks("keydoor", "train", None, {"lamps": 1})):
        with pytest.raises(BadInput) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_select_tasks_by_name_and_by_id():
    tasks = select_tasks("keydoor", "test", ["elm"], {"families": 2})
    assert tasks and all(task.startswith("elm/") for task in tasks)
    assert select_tasks("keydoor", "test", [tasks[3]], {"families": 2}) == [tasks[3]]
    assert parse_options(["stages=4", "impossible=0.5", "name=a,b"]) == {"stages": 4, "impossible": 0.5, "name": "a,b"}
