"""funnel/editors.py: the counting editor and the language model as editor."""
import random
from types import SimpleNamespace

import pytest
from conftest import edit

from envs.keydoor import METALS, KeyDoor, lock_metal
from funnel.editors import count_edits, model_edits
from funnel.state import StateEnv
from rl.rollout import Trajectory, Turn


# The counting editor

def keydoor_episodes(number=60, env=None, **options):
    """Random admissible play."""
    env, episodes = env or KeyDoor(**options), []
    tasks = env.tasks("train", **options)
    for n in range(number):
        rng, turns = random.Random(n), []
        first, info = env.reset(task=tasks[n], seed=n)
        over = False
        while not over:
            hint = info.get("hint")
            action = rng.choice(info["admissible"])
            observation, reward, over, _, info = env.step(action)
            turns.append(Turn([], [], action, observation, reward, True, "end", hint))
        episodes.append(Trajectory(tasks[n], n, n, False, first_observation=first, turns=turns, success=info["success"]))
    return episodes


def rules(houses, doors):
    """What the hidden rule and the order of the stages come to, one door each."""
    return {f"- You are in the {house} house. The door here is {door}: take {lock_metal(house, door)} key."
            for house in houses for door in doors} | {
            f"- {done}. The door here is {door}: {verb} {door} door." for door in doors
            for done, verb in (("Taken", "unlock"), ("Unlocked", "open"))}


def test_the_counting_editor_finds_the_rule_in_episodes_alone(monkeypatch):
    episodes = keydoor_episodes(900, families=2, colours=2, commands=3)
    for name in ("gold_action", "action_guidance", "observation_enrichment"):
        monkeypatch.setattr(KeyDoor, name, lambda self: pytest.fail("the editor asked for the solution"))
    edits = count_edits(episodes, "", 100)
    assert {change["content"] for change in edits} == rules(("ash", "elm"), ("red", "blue"))
    assert ["take" in change["content"] for change in edits[:4]] == [True] * 4  # what comes up most often first
    assert count_edits(episodes, "", 3) == edits[:3]
    assert count_edits(episodes, "\n".join(change["content"] for change in edits), 100) == []  # nothing to mend


def test_the_counting_editor_needs_more_than_one_episode_and_a_rival_that_failed():
    episodes = keydoor_episodes(900, families=1, colours=2)
    went_on = next(t for t in episodes if "take" in t.turns[0].action and len(t.turns) > 1)
    failed = next(t for t in episodes if "take" in t.turns[0].action and len(t.turns) == 1
                  and went_on.first_observation.splitlines()[-1] in t.first_observation)
    assert count_edits([went_on, failed, failed], "", 10) == []
    assert count_edits([went_on, went_on], "", 10) == []
    assert len(count_edits([went_on, went_on, failed, failed], "", 10)) == 1
    assert not any("impossible" in change["content"] for change in count_edits(episodes, "", 100))


def test_the_counting_editor_replaces_and_deletes_what_failed():
    episodes = keydoor_episodes(900, families=1, colours=2)
    right = [change["content"] for change in count_edits(episodes, "", 2)]
    wrong = right[0].replace(right[0].split()[-2], next(metal for metal in METALS if metal not in "".join(right)))
    first, *rest = count_edits(episodes, f"Mind the alarm.\n{wrong}", 2)
    assert first == {"op": "replace", "target": wrong, "content": right[0]}  # failures first
    assert [change["content"] for change in rest] == [right[1]]
    failures = [t for t in episodes if len(t.turns) == 1]
    assert count_edits(failures, wrong, 10) == [{"op": "delete", "target": wrong}]


def test_the_counting_editor_tries_rejected_edits_last():
    episodes = keydoor_episodes(900, families=2, colours=2, commands=3)
    edits = count_edits(episodes, "", 100)
    assert count_edits(episodes, "", 8, rejected=edits[:2]) == [*edits[2:], *edits[:2]] and len(edits) == 8


NOTED = "- You are in the ash house. The door here is red: take iron key.\n- Taken. The door here is red: unlock red door."


def test_the_counting_editor_does_not_read_its_own_notes():
    def episodes(state):
        return keydoor_episodes(300, StateEnv(KeyDoor(), state, "observation"))
    for trajectory in episodes(NOTED):
        for turn, following in zip(trajectory.turns, trajectory.turns[1:]):
            assert (following.hint is None) == ("Hint:" not in turn.observation)
    assert any(t.turns[0].hint for t in episodes(NOTED))
    assert count_edits(episodes(NOTED), "", 100) == count_edits(episodes(""), "", 100)


# The language model

def words_episode(n, success):
    return SimpleNamespace(first_observation=f"You see {n}.", success=success,
                           turns=[SimpleNamespace(action=f"go {n}", observation="x" * 3000, valid=True)])


def test_the_model_reflects_on_failures_and_successes_apart_then_merges_then_ranks():
    asked = []

    def ask(prompts):
        asked.append(prompts)
        if "Rank" in prompts[0][0]:
            return ["[3, 1, 99, true]"]
        return [str([edit("append", content=f"{len(asked)} {i} {n}") for n in range(2)]).replace("'", '"')
                if "Merge" not in system else "no idea" for i, (system, _) in enumerate(prompts)]

    episodes = [words_episode(n, success=n % 4 == 0) for n in range(40)]  # 30 failures, 10 successes
    rejected = [edit("append", content="Bad idea.")]
    edits, dropped = model_edits(ask, episodes, "- Old.", 2, rejected)
    reflections = asked[0]
    assert len(reflections) == 4 + 2  # eight at a time
    for system, user in reflections:
        kinds = {line.split("(")[1][:7] for line in user.splitlines() if line.startswith("Episode")}
        assert kinds == ({"failure"} if "failed in the episodes" in system else {"success"})
        assert 1 <= user.count("Episode (") <= 8 and "Bad idea." in user and "- Old." in user and len(user) < 8 * 1700
    assert [len(prompts) for prompts in asked] == [6, 3, 3, 1, 1, 1, 1, 1]  # a tree of merges, each asked for twice, then the ranking
    assert [change["content"] for change in edits] == ["1 1 1", "1 0 1"]
    assert sum(row["reason"] == "over the budget of 2 edits" for row in dropped) == 10
    assert sum("no JSON list" in row["reason"] for row in dropped) == 10


@pytest.mark.parametrize("answer", ["", "nonsense", "[[[[", "[]"])
def test_a_model_without_an_idea_edits_nothing(answer):
    edits, dropped = model_edits(lambda prompts: [answer] * len(prompts), [words_episode(1, False)], "", 4)
    assert edits == [] and len(dropped) == 2 * (answer != "[]")  # it is asked once more


def test_an_answer_without_an_edit_is_asked_for_once_more_with_its_fault():
    asked = []

    def ask(prompts):
        asked.append(prompts)
        return ["I would add: look first."] if len(asked) == 1 else ['[{"op": "append", "content": "Look first."}]']

    edits, dropped = model_edits(ask, [words_episode(1, False)], "", 4)
    assert edits == [edit("append", content="Look first.")] and len(dropped) == 1
    [(system, user)], [(system_again, again)] = asked
    assert system == system_again and again.startswith(user)
    assert "I would add: look first." in again and "no JSON list" in again  # what it wrote, and why it cannot be used
    assert model_edits(None, [], "", 4) == ([], [])  # no episode, no question
