"""ScienceWorld with its real simulator. Skipped without Java or the package; about a minute on two cores."""
import importlib.util
import os
import shutil
import threading

import pytest

import envs
from envs import BadInput, make_env, sciworld
from envs.sciworld import SciWorld, SimulatorDied

needs_simulator = pytest.mark.skipif(
    shutil.which("java") is None or importlib.util.find_spec("scienceworld") is None,
    reason="needs Java (apt-get install default-jre-headless) and scienceworld (pip install scienceworld)")

FAST = ["boil", "find-plant", "lifespan-longest-lived", "use-thermometer"]     # to load
SHORT = ["lifespan-longest-lived/1", "find-animal/7", "find-non-living-thing/2", "find-plant/12"]
WANDER = ["teleport to outside", "look around", "wait", "teleport to art studio", "look around", "open door",
          "teleport to greenhouse", "open bee hive", "wait", "wait", "look around", "xyzzy", "teleport to kitchen",
          "open cupboard", "inventory"]     # the bees fly at random


def start(task, **options):
    env = make_env("sciworld", options)
    return env, *env.reset(task=task, seed=0)


def play(env, actions):
    """The turns (observation, reward, terminated, truncated, info), up to the end of the episode."""
    turns = []
    for action in actions:
        turns.append(env.step(action))
        if turns[-1][2]:
            break
    return turns


def gold(env):
    """The gold path as `gold_action` gives it, played."""
    turns = []
    while (action := env.gold_action()) is not None:
        turns.append(env.step(f"<think>hm</think>\n<action>{action}</action>"))
        assert len(turns) < 50, f"stuck at {action}"
    return turns


# --- without a simulator -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("option", [{"reward": "dense"}, {"admissible": "all"}, {"guidance": "first"},
                                    {"simplifications": "hard"}, {"simplifications": "easy,openDoors"}])
def test_an_unknown_option_value_is_named_in_one_line(option):
    with pytest.raises(BadInput, match=next(iter(option.values()))) as caught:
        make_env("sciworld", option)
    assert "\n" not in str(caught.value)


def test_missing_java_says_what_to_install(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sciworld, "_java", None)
    for call in (lambda: SciWorld.tasks("train"), lambda: SciWorld().reset(task="find-plant/0", seed=0)):
        with pytest.raises(BadInput, match="default-jre-headless"):
            call()


def test_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/java")
    monkeypatch.setattr(sciworld, "_java", None)
    monkeypatch.setitem(__import__("sys").modules, "scienceworld", None)
    monkeypatch.setitem(__import__("sys").modules, "scienceworld.constants", None)
    with pytest.raises(BadInput, match="pip install scienceworld"):
        SciWorld.tasks("train")


# --- tasks -------------------------------------------------------------------------------------------------------

@needs_simulator
def test_the_splits_are_the_benchmarks_own_disjoint_and_stable():
    splits = [envs.select_tasks("sciworld", split, options={"reward": "score"}) for split in ("train", "valid", "test")]
    assert [len(split) for split in splits] == [3592, 1796, 1819]
    assert len(set().union(*splits)) == 7207
    assert len({task.split("/")[0] for task in splits[0]}) == 30
    assert splits[0] == SciWorld.tasks("train")
    assert "find-plant/149" in splits[0] and "find-plant/150" in splits[1] and "find-plant/299" in splits[2]
    with pytest.raises(BadInput, match="unknown split"):
        SciWorld.tasks("dev")


@needs_simulator
@pytest.mark.parametrize("task", ["find-unicorn/0", "find-plant", "find-plant/300", "find-plant/-1", "find-plant/x"])
def test_an_unknown_task_is_bad_input(task):
    with pytest.raises(BadInput, match="find-plant"):
        SciWorld().reset(task=task, seed=0)


@needs_simulator
def test_an_electrical_task_refuses_to_lose_its_electrical_actions():
    with pytest.raises(BadInput, match="cannot be done"):
        SciWorld(simplifications="openDoors,noElectricalAction").reset(task="power-component/0", seed=0)


@needs_simulator
def test_electrical_tasks_are_left_out_where_they_cannot_be_done():
    easy, without = SciWorld.tasks("train"), SciWorld.tasks("train", simplifications="openDoors,noElectricalAction")
    gone = {task.split("/")[0] for task in set(easy) - set(without)}
    assert gone == {"power-component", "power-component-renewable-vs-nonrenewable-energy", "test-conductivity",
                    "test-conductivity-of-unknown-substances"}
    assert without == [task for task in easy if task.split("/")[0] not in gone]
    for name in sorted({task.split("/")[0] for task in without} & set(FAST)):
        SciWorld(simplifications="openDoors,noElectricalAction").reset(task=f"{name}/0", seed=0)


def focused(task):
    """What the gold path focuses on."""
    env, *_ = start(task)
    return [action.removeprefix("focus on ") for action in env._gold_path() if action.startswith("focus")]


@needs_simulator
def test_targets_held_out_are_in_no_training_task_and_make_the_test():
    options = {"held_out": "elephant,parrot", "admissible": "none"}
    splits = {split: envs.select_tasks("sciworld", split, options=options) for split in ("train", "valid", "test")}
    longest = {split: [t for t in tasks if t.startswith("lifespan-longest-lived/")] for split, tasks in splits.items()}
    assert {split: len(tasks) for split, tasks in longest.items()} == {"train": 37, "valid": 18, "test": 50}
    assert len(set().union(*splits.values())) == sum(map(len, splits.values()))
    assert {task.split("/")[0] for tasks in splits.values() for task in tasks} == set(sciworld.TARGETS)
    assert set(splits["train"]) < set(SciWorld.tasks("train")) and set(splits["valid"]) < set(SciWorld.tasks("valid"))
    for split, tasks in splits.items():     # by the gold path, which the split is not made from
        for task in tasks[::25]:
            apart = [name for name in focused(task) if "elephant" in name or "parrot" in name]
            assert bool(apart) == (split == "test"), (split, task, focused(task))


@needs_simulator
@pytest.mark.parametrize("held_out", ["unicorn", "elephant,unicorn", "elephant,,parrot", 3, "wolf"])
def test_targets_that_no_task_asks_for_are_refused(held_out):
    with pytest.raises(BadInput, match="brown bear, chameleon") as caught:
        SciWorld.tasks("train", held_out=held_out)
    assert "\n" not in str(caught.value)


# --- an episode --------------------------------------------------------------------------------------------------

@needs_simulator
@pytest.mark.parametrize("task", SHORT)
def test_the_gold_path_is_rewarded_once_at_its_end(task):
    env, observation, info = start(task)
    assert "Your task is to" in observation and "In it, you see" in observation and "You carry" in observation
    assert info == {"success": False, "valid": True, "score": 0, "moves": 0, "turns": 0, "success_released_rule": False}
    turns = gold(env)
    assert [turn[1] for turn in turns] == [0.0] * (len(turns) - 1) + [1.0]
    assert [turn[2] for turn in turns] == [False] * (len(turns) - 1) + [True]
    assert not any(turn[3] for turn in turns)
    assert turns[-1][4]["success"] and turns[-1][4]["score"] == 100 and turns[-1][4]["turns"] == len(turns)
    assert [turn[4]["success_released_rule"] for turn in turns] == [False] * (len(turns) - 1) + [True]
    assert env.gold_action() is None and env.action_guidance() is None and env.observation_enrichment() is None
    with pytest.raises(RuntimeError, match="over"):
        env.step("look around")


@needs_simulator
def test_a_wrong_focus_fails():
    env, *_ = start("find-plant/12")
    (_, reward, terminated, truncated, info), = play(env, ["focus on red box"])
    assert (reward, terminated, truncated) == (0.0, True, False)
    assert not info["success"] and info["valid"] and info["score"] == -100


@needs_simulator
def test_the_released_rule_counts_a_part_of_the_score_after_the_move_limit():
    """Done with a score above 0. Ten times "wait" pass 100 moves: a place that already scores is then a success of that rule."""
    env, *_ = start("find-plant/12")
    turns = play(env, ["wait"] * 9 + ["go to hallway", "look around", "wait1", "teleport to kitchen", "focus on drawer"])
    facts = [(info["moves"], info["success_released_rule"], info["success"]) for *_, info in turns]
    assert facts[8:11] == [(99, False, False), (100, False, False), (100, False, False)]    # at the limit is not past it
    assert facts[11] == (102, True, False) and 0 < turns[11][4]["score"] < 100 and not turns[11][2], "the episode goes on here"
    assert turns[-1][2] and turns[-1][4]["score"] == -100 and facts[-1][1], "there it had ended before the wrong focus"
    env.reset(task="find-plant/12", seed=0)
    assert not play(env, ["look around", "focus on red box"])[-1][4]["success_released_rule"]   # 17, then -100


@needs_simulator
def test_the_return_under_score_is_the_final_score():
    env, *_ = start("find-plant/12", reward="score")
    rewards = [turn[1] for turn in gold(env)]
    assert sum(rewards) == pytest.approx(1.0) and sum(reward > 0 for reward in rewards) > 2
    env.reset(task="find-plant/12", seed=0)
    assert sum(turn[1] for turn in play(env, ["look around", "focus on red box"])) == pytest.approx(-1.0)


@needs_simulator
def test_an_invalid_action_is_told_and_costs_a_turn_but_no_move():
    env, *_ = start("find-plant/12")
    for action in ("dance wildly", "", "Ünïcode ☃"):
        text, reward, terminated, _, info = env.step(action)
        assert text.startswith("No known action") and not info["valid"] and reward == 0.0 and not terminated
    assert (info["turns"], info["moves"]) == (3, 0)
    assert env.step("go to hallway")[4]["valid"]


@needs_simulator
def test_an_ambiguous_action_is_resolved_in_its_own_turn():
    env, *_ = start("find-plant/12")
    env.step("teleport to greenhouse")
    with env._placed(1):    # the simulator does ask here
        assert env._server.step("look at flower pot").startswith(sciworld.AMBIGUOUS)
        env._server.step("")
    text, _, _, _, info = env.step("look at flower pot")
    assert "flower pot" in text and sciworld.AMBIGUOUS not in text and info["valid"] and info["turns"] == 2
    assert env.step("go to hallway")[4]["valid"]     # the parser is not left waiting for a number


@needs_simulator
def test_nothing_of_a_won_episode_is_left_in_the_next():
    """`load` keeps score and completed; "task" is answered without renewing them, and would win again."""
    env, first, _ = start("find-plant/12")
    opening = play(env, WANDER)
    env.reset(task="find-non-living-thing/2", seed=1)
    assert gold(env)[-1][1] == 1.0
    again, info = env.reset(task="find-plant/12", seed=2)
    assert again == first and info["score"] == 0 and not info["success"]
    _, reward, terminated, _, info = env.step("task")
    assert (reward, terminated, info["score"], info["success"]) == (0.0, False, 0, False)
    env.reset(task="find-plant/12", seed=0)
    assert play(env, WANDER) == opening


@needs_simulator
def test_the_score_held_at_reset_pays_nothing():
    """The task objects in reach already score: 17 of 100 here before anything was done."""
    env, *_ = start("find-plant/12")
    _, reward, terminated, _, info = env.step("look around")
    assert info["score"] > 0 and reward == 0.0 and not terminated and not info["success"]


@needs_simulator
@pytest.mark.parametrize("simplifications", ["none", "openDoors,teleportAction"])
def test_simplifications_reach_the_simulator(simplifications):
    env, observation, _ = start("find-plant/12", simplifications=simplifications)
    assert ("hallway (that is open)" in observation) == ("openDoors" in simplifications)
    assert env.step("teleport to kitchen")[4]["valid"] == ("teleport" in simplifications)
    assert ("teleport" in env.system_prompt) == ("teleport" in simplifications)


@needs_simulator
def test_what_each_level_of_admissible_shows():
    bare, text, info = start("find-plant/12", admissible="none")
    assert "Objects here" not in text and "OBJ" not in bare.system_prompt and "an orange" in text
    env, text, info = start("find-plant/12")
    assert "red box" in text.split("Objects here:")[1] and "admissible" not in info
    with env._placed(0):    # the prompt knows every verb of the simulator but the one that takes progress back
        verbs = {template.split()[0] for template in env._server.getPossibleActions()}
    assert {verb for verb in verbs if verb not in env.system_prompt} == {"reset"}
    assert len(env.step("go to hallway")[0].split()) < 150
    full, _, info = start("find-plant/12", admissible="full")
    assert info["admissible"] == full.admissible_actions() and len(info["admissible"]) > 100
    assert "go to hallway" in info["admissible"] and "reset task" not in info["admissible"]
    assert full.step("go to hallway")[4]["admissible"] != info["admissible"]


# --- gold paths --------------------------------------------------------------------------------------------------

def test_after_a_first_closing_what_opens_stays():
    path = ["open door to hallway", "open fridge", "close door to kitchen", "open door to hallway", "close fridge", "open fridge"]
    assert sciworld.without_openings(path, "") == path
    assert sciworld.without_openings(path, "easy") == path[1:]
    assert sciworld.without_openings(path, "openContainers,openDoors") == path[2:]
    assert sciworld.without_openings(path, "openContainers") == [path[0], *path[2:]]


@needs_simulator
@pytest.mark.parametrize("task, options", [(task, {}) for task in (*SHORT, "use-thermometer/0", "grow-fruit/0")]
                         + [("use-thermometer/0", {"simplifications": "openDoors,openContainers"})])
def test_what_is_left_out_of_the_gold_path_changes_nothing(task, options):
    """The whole path answers "already open" to just the steps left out, and the rest reaches 100 with none refused."""
    env, *_ = start(task, **options)
    kept, filtered = list(env._gold_path()), gold(env)
    with sciworld._shared_java() as java:       # the simulator's own path
        server = java.interface()
        java.load(server, *env._loaded, gold=True)
        path = [action for action in server.getGoldActionSequence() if not action.isdecimal()]
    env.reset(task=task, seed=0)
    turns = play(env, path)
    idle = [n for n, turn in enumerate(turns) if "already open" in turn[0][:60]]
    assert bool(idle) == (task != "find-non-living-thing/2")    # what it asks for lies where it begins
    assert kept[:len(filtered)] == [action for n, action in enumerate(path) if n not in idle][:len(filtered)]
    assert filtered[-1][4]["score"] == turns[-1][4]["score"] == 100 and len(filtered) == len(turns) - len(idle)
    assert all(turn[4]["valid"] for turn in filtered)


@needs_simulator
def test_where_the_clock_decides_the_gold_path_stays_whole_and_the_hint_does_not():
    """Without the move that an opening costs, the last tree is not yet in its stage."""
    env, *_ = start("identify-life-stages-2/2")
    path = list(env._gold_path())
    assert path[0] == "open door to outside" and "open door" not in env.action_guidance()
    assert ", then ".join(path[1:4]) in env.action_guidance()
    assert gold(env)[-1][4]["score"] == 100
    env.reset(task="identify-life-stages-2/2", seed=0)
    assert play(env, path[1:10])[-1][4]["score"] < 100


@needs_simulator
def test_a_gold_step_that_is_refused_is_passed_over(monkeypatch):
    env, *_ = start("find-non-living-thing/2", guidance="next")
    path = list(env._gold_path())
    monkeypatch.setitem(sciworld._gold, env._loaded, [path[0], "focus on the unicorn", *path[1:]])
    turns = gold(env)
    assert [turn[4]["valid"] for turn in turns] == [True, False, *[True] * (len(path) - 1)] and turns[-1][1] == 1.0


# --- hints -------------------------------------------------------------------------------------------------------

@needs_simulator
def test_guidance_first_three_stays_and_next_moves_on():
    paper, *_ = start("find-plant/12")
    assert not any(action.startswith("open door") for action in paper._gold_path())
    ours, *_ = start("find-plant/12", guidance="next")
    path = list(paper._gold_path())
    assert all(action in paper.action_guidance() for action in path[:3])
    told = {paper.action_guidance()}
    for done, action in enumerate(path[:-1]):
        assert ", then ".join(path[done:done + 3]) in ours.action_guidance()
        assert ours.gold_action() == action
        told.add(paper.action_guidance())
        paper.step(action), ours.step(action), ours.step("inventory")       # others between do no harm
    assert len(told) == 1
    assert path[-1] in ours.action_guidance()


@needs_simulator
def test_enrichment_lists_the_goals_reached():
    env, *_ = start("find-plant/12")
    before = env.observation_enrichment()
    assert "[ ] focus on a plant" in before and "\n[x]" not in before and "Goal" not in before[5:]
    play(env, env._gold_path()[:-1])
    assert "[x] focus on a plant" in env.observation_enrichment()


@needs_simulator
@pytest.mark.parametrize("task", ["find-animal/7", "power-component/2"])
def test_hints_change_nothing(task):
    env, first, _ = start(task)
    plain = play(env, WANDER)
    hinted, text, _ = start(task)
    assert text == first
    for action, expected in zip(WANDER, plain):
        sciworld._gold.clear()      # so that each turn makes a gold path anew, the most that a hint does
        assert hinted.action_guidance() and hinted.observation_enrichment() and hinted.gold_action()
        assert hinted.admissible_actions()
        assert hinted.step(action) == expected


# --- one JVM for many --------------------------------------------------------------------------------------------

@needs_simulator
def test_interleaved_instances_do_not_disturb_one_another():
    """Different simplifications, bees that fly at random: all of it is the whole JVM's."""
    tasks, options = ["find-animal/7", "power-component/2", "find-plant/12"], [{}, {}, {"simplifications": "none"}]
    alone = []
    for task, option in zip(tasks, options):
        env, text, _ = start(task, **option)
        alone.append([text] + play(env, WANDER))
    started = [start(task, **option) for task, option in zip(tasks, options)]
    together = [[text] for _, text, _ in started]
    for action in WANDER:
        for (env, *_), turns in zip(started, together):
            turns.append(env.step(action))
    assert together == alone


@needs_simulator
def test_eight_threads_reach_100_on_one_jvm():
    results = {}

    def run(number):
        env, *_ = start(SHORT[number % 4])
        for _ in range(2):
            env.reset(task=SHORT[number % 4], seed=number)
            results.setdefault(number, []).append(gold(env)[-1][4]["score"])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert results == {number: [100, 100] for number in range(8)}


@needs_simulator
def test_closing_an_instance_leaves_the_jvm_to_the_others():
    one, *_ = start("find-plant/12")
    other, *_ = start("find-plant/12")
    jvm = other._java.process
    one.close()
    del one
    assert other.step("go to hallway")[4]["valid"] and jvm.poll() is None


@needs_simulator
def test_a_killed_jvm_ends_its_episodes_and_the_next_reset_starts_another():
    env, first, _ = start("find-plant/12")
    late, *_ = start("find-plant/12")
    os.kill(env._java.process.pid, 9)
    with pytest.raises(SimulatorDied, match="reset"):
        env.step("look around")
    assert env.reset(task="find-plant/12", seed=0)[0] == first
    assert env.step("go to hallway")[4]["valid"]
    with pytest.raises(SimulatorDied):      # its own JVM is gone, though there is a new one
        late.step("look around")
    late.reset(task="find-plant/12", seed=0)
    assert late._java is env._java and gold(late)[-1][1] == 1.0
