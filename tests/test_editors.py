"""funnel/editors.py: the counting editor and the language model as editor."""
import json
import random
from types import SimpleNamespace

import pytest
from conftest import edit, tiny_qwen3

from envs import BadInput, Env
from envs.keydoor import METALS, KeyDoor, lock_metal
from funnel.counting import count_edits
from funnel.editors import (check_editor, context, cut, distinct, merge, merge_system, model_edits, one_a_line, packed, propose_edits,
                            reflection_system, shown)
from funnel.options import FunnelOptions, with_defaults
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

class Shop(Env):
    system_prompt, analyst_note = "Buy what is asked for.", "Prices are in dollars."

    def reflection(self, trajectory):
        return f"{trajectory.first_observation}\n{'x' * 3000}\nThe right answer was {trajectory.task}."


def episode(n, success, **more):
    turns = [Turn([], [], f"go {n}", "You went.", 0.0, True, "end")]
    return Trajectory(f"task-{n}", n, n, False, first_observation=f"You see {n}.", turns=turns, success=success, **more)


def answer(*edits):
    return json.dumps({"analysis": "Well.", "failures": [{"kind": "lost", "count": 2}], "edits": list(edits)})


def asking(reply):
    """An editor of prompts: what it is asked comes into `asked`, a list for each call; reply(system, user) is its answer."""
    asked = []

    def ask(prompts):
        asked.append(prompts)
        return [reply(*prompt) for prompt in prompts]

    return ask, asked


def stage(system):
    return "rank" if "Rank the numbered" in system else "merge" if "Several reviewers" in system else "reflect"


def test_the_model_reflects_on_failures_and_successes_apart_then_merges_then_ranks():
    def reply(system, user):
        if stage(system) == "rank":
            return '{"analysis": "[0] is vague.", "order": [3, 1, 99]}'
        if stage(system) == "merge":
            return "no idea"
        return answer(*[edit("append", content=f"- {user.count('### Episode')} {'failed in' in system or 'failed.' in system} {n}")
                        for n in range(2)])

    ask, asked = asking(reply)
    episodes = [episode(n, success=n % 10 == 0) for n in range(100)]  # 90 failures, 10 successes
    rejected = [{"edits": [edit("append", content="- Bad idea.")], "before": 0.5, "after": 0.25}]
    edits, dropped = model_edits(ask, Shop(), episodes, "- Old.", 2, rejected, most=1000)
    for system, user in asked[0] + asked[5]:
        kinds = {line.split("(")[1][:7] for line in user.splitlines() if line.startswith("### Episode")}
        assert kinds == ({"failure"} if "failed" in system else {"success"})
        assert 1 <= user.count("### Episode") <= 8 and len(user) < 8 * 1200 + 600
    assert [(len(prompts), stage(prompts[0][0])) for prompts in asked] == [
        (12, "reflect"), (2, "merge"), (2, "merge"), (1, "merge"), (1, "merge"),  # 90 failures: 12 lists, 2, 1; each asked for twice
        (2, "reflect"), (1, "merge"), (1, "merge"), (1, "merge"), (1, "merge"), (1, "rank")]
    assert [prompts[1].count("### List") for prompts in asked[1]] == [8, 4]
    final = asked[-2][0]
    assert "List 1 corrects failures" in final[0] and final[1].count("### List") == 2
    assert len(edits) == 2 and sum("no JSON list" in row["reason"] for row in dropped) == 2 * 5
    numbered = asked[-1][0][1].partition("## Numbered edits")[2].strip().splitlines()
    assert [json.loads(numbered[n].partition(": ")[2]) for n in (3, 1)] == edits  # the order that was asked for
    assert sum(row["reason"] == "over the budget of 2 edits" for row in dropped) == len(numbered) - 2


def test_every_prompt_holds_the_notes_the_instructions_the_note_and_what_was_rejected():
    def reply(system, user):
        return "[1, 0]" if stage(system) == "rank" else answer(*[edit("append", content=f"- {len(asked)} {n}") for n in range(3)])

    ask, asked = asking(reply)
    rejected = [{"edits": [edit("append", content="- Bad idea.")], "before": 0.5, "after": 0.25},
                {"edits": [edit("delete", "- Old.")], "before": 0.5, "after": None}]
    model_edits(ask, Shop(), [episode(n, n > 1) for n in range(3)], "# Keys\n- Old.", 2, rejected, most=9000)
    assert {stage(system) for prompts in asked for system, _ in prompts} == {"reflect", "merge", "rank"}
    for system, user in [prompt for prompts in asked for prompt in prompts]:
        for part in ("Buy what is asked for.", "Prices are in dollars.", "## Notes\n\n# Keys\n- Old.", "Bad idea.", "0.500", "0.250",
                     "unknown"):
            assert part in user, part
        if stage(system) == "reflect":
            assert system.index('"analysis"') < system.index('"kind"') < system.index('"edits"')  # kinds and counts come first
            assert "right answer was task-" in user and "1 turns" in user
    assert "(There are none yet.)" in context(Shop(), "", []) and "rejected" not in context(Shop(), "", [])


def test_the_form_that_the_prompt_shows_is_read_and_its_examples_are_no_edits():
    form = reflection_system("failure", 4).partition("in this form:\n")[2].rpartition('"support" is')[0]
    ask, _ = asking(lambda *_: form)
    edits, dropped = model_edits(ask, Shop(), [episode(1, False)], "", 8, most=9)
    assert [change["op"] for change in edits] == ["delete"] and sum("the example" in row["reason"] for row in dropped) == 3


@pytest.mark.parametrize("reply", ["", "nonsense", "[[[[", "[]"])
def test_a_model_without_an_idea_edits_nothing(reply):
    edits, dropped = model_edits(lambda prompts: [reply] * len(prompts), Shop(), [episode(1, False)], "", 4, most=9)
    assert edits == [] and len(dropped) == 2 * (reply != "[]")  # it is asked once more
    assert model_edits(None, Shop(), [], "", 4, most=9) == ([], [])  # no episode, no question


def test_an_answer_without_an_edit_is_asked_for_once_more_with_its_fault():
    ask, asked = asking(lambda *_: "I would add: look first." if len(asked) == 1 else answer(edit("append", content="- Look first.")))
    edits, dropped = model_edits(ask, Shop(), [episode(1, False)], "", 4, most=9)
    assert edits == [edit("append", content="- Look first.")] and len(dropped) == 1
    [(system, user)], [(system_again, again)] = asked
    assert system == system_again and again.startswith(user)
    assert "I would add: look first." in again and "no JSON list" in again  # what it wrote, and why it cannot be used


def test_lite_has_no_budget_no_merge_no_ranking_and_shows_nothing_rejected():
    ask, asked = asking(lambda system, user: answer(*[edit("append", content=f"- {len(asked)} {n}") for n in range(9)]))
    run = SimpleNamespace(config=SimpleNamespace(lite=True, editor="model", editor_model="any", editor_tokens=9, editor_characters=99),
                          envs=[Shop()], with_another=lambda name, work: work)
    assert callable(propose_edits(run, 0, [], "", 4, [{"edits": [], "before": 0.0, "after": 0.0}]))
    edits, dropped = model_edits(ask, Shop(), [episode(n, n > 8) for n in range(10)], "", 1000, most=99, lite=True)
    assert len(edits) == 18 and dropped == [] and [len(prompts) for prompts in asked] == [2, 1]
    assert "at most" not in asked[0][0][0]


# Its pieces

def test_support_is_kept_through_joining_and_merging():
    a, b = edit("append", content="- A."), edit("append", content="- B.")
    joined = distinct([[{**b, "support": 1}], [{**a, "support": 2}], [{**a, "support": 3}], [a]])
    assert joined == [{**a, "support": 5}, {**b, "support": 1}]
    ask, asked = asking(lambda system, user: answer({**a, "support": 5}, {**b, "support": 1}))
    lists, dropped = merge(ask, "failure", "", [[{**a, "support": 2}], [], [{**a, "support": 3}, b]], 4, lambda *_: True)
    assert lists == [[{**a, "support": 5}, {**b, "support": 1}]] and dropped == []
    assert '"support": 2' in asked[0][0][1] and asked[0][0][1].count("### List") == 2  # empty lists are no lists


def test_the_last_merge_asks_for_no_more_than_one_thing_of_each_edit():
    """Both of its lists are merged ones: no edit in them is one reviewer's, and list 1 gives way to what has far more support."""
    last, first = merge_system("both", 4), merge_system("failure", 4)
    assert "Edits of list 1 come first" in last and "unless far more episodes" in last and "one reviewer alone" not in last
    assert "one reviewer alone" in first and "list 1" not in first
    assert all("No two edits may touch the same line" in system and "at most 4 edits" in system for system in (last, first))


def test_no_two_edits_touch_one_line():
    replace, delete, other = edit("replace", "- A.", "- A, then B."), edit("delete", "A."), edit("delete", "- C.")
    below, more = edit("insert_after", "- C.", "- D."), edit("insert_after", "- E.", "- F.")
    kept, dropped = one_a_line([replace, delete, other, below, more, {**more, "content": "- G."}, edit("append", content="- A.")])
    assert kept == [replace, other, more, {**more, "content": "- G."}, edit("append", content="- A.")]
    assert [row["reason"] for row in dropped] == ["another edit touches the same line"] * 2
    assert one_a_line([more, edit("delete", "- E.")])[0] == [more]
    ask, _ = asking(lambda *_: answer(replace, delete))
    assert model_edits(ask, Shop(), [episode(1, False)], "- A.", 4, most=9)[0] == [replace]


def test_an_episode_says_how_it_ended_and_is_cut_in_its_middle_with_a_notice():
    t = episode(7, False, info={"score": 0.25}, end="turn_limit")
    text = shown(Shop(), t, 10_000)
    assert text.startswith("(failure, score 0.25, 1 turns, no turn was left)\nYou see 7.\n")
    assert text.endswith("The right answer was task-7.")
    short = shown(Shop(), t, 101).partition("\n")[2]
    assert "You see 7." in short and "The right answer was task-7." in short and "2,9" in short and "left out" in short
    assert cut("x" * 10, 10) == "x" * 10 and cut("abcdefg", 3) == "ab\n(... 4 characters are left out here ...)\ng"


def test_what_does_not_fit_has_fewer_episodes_or_shorter_ones():
    assert packed([1, 2, 3, 4, 5], lambda part: sum(part) < 6, 2) == [[1, 2], [3], [4], [5]]
    ask, asked = asking(lambda *_: answer(edit("append", content="- A.")))
    empty = len(context(Shop(), "", [])) + len(reflection_system("failure", 4))
    room = empty + 7000
    model_edits(ask, Shop(), [episode(n, False) for n in range(5)], "", 4, most=9000, fits=lambda system, user: len(system + user) <= room)
    assert [user.count("### Episode") for _, user in asked[0]] == [2, 2, 1]
    asked.clear()
    model_edits(ask, Shop(), [episode(0, False)], "", 4, most=9000, fits=lambda system, user: len(system + user) <= empty + 1000)
    assert len(asked[0][0][1]) < empty + 1000 and "left out" in asked[0][0][1]


def test_the_counting_editor_is_for_the_built_in_game_alone():
    def editor(**options):
        return with_defaults(FunnelOptions(**options)).editor

    assert editor() == "count" and editor(env="searchqa", model="m") == "model" and editor(editor="model") == "model"
    assert editor(env="searchqa", model="m", editor="count", mode="policy-only") == "count"  # it is never asked
    with pytest.raises(BadInput, match="pass --editor model") as caught:
        editor(env="searchqa", model="m", editor="count")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("more, said", [
    ({}, None), ({"state_limit": 40_000}, "--state-limit 40,000"), ({"mode": "policy-only", "state_limit": 40_000}, None),
    ({"editor_model": "./nowhere"}, "cannot load the editor './nowhere'")])
def test_the_editor_is_checked_before_training(words, word_chat, more, said):
    options = {"editor": "model", "editor_model": "", "mode": "full", "edits_first": 4, "state_limit": 4000, "editor_characters": 4000,
               "editor_tokens": 512, "thinking": False, "started": ""}
    run = SimpleNamespace(config=SimpleNamespace(**options | more), envs=[Shop()], chat=word_chat, load=lambda: tiny_qwen3(len(words)))
    if said is None:
        return check_editor(run)
    with pytest.raises(BadInput, match=said) as caught:
        check_editor(run)
    assert "\n" not in str(caught.value)
