"""envs/action.py and its use: docs/actions.md's forms are read in each text environment, and thinking that did not end is no action."""
import json
import time
from types import SimpleNamespace

import pytest
from conftest import needs_bfcl, needs_simulator

from envs import alfworld, make_env, parse_action
from envs.action import UNFINISHED, after_thinking, last_tag
from envs.sciworld import COMMAND
from examples.my_env import MyEnv

# {c}: a command that is valid now; {other}: another one
READ = {
    "plain": "{c}", "blank lines": "\n\n  {c}  \n", "full stop": "{c}.", "tag": "<action>{c}</action>", "TAG": "<ACTION>{c}</ACTION>",
    "Tag over lines": "<Action>\n{c}\n</aCTION>", "tag in prose": "I think\n<action> {c} </action> is right.", "label": "Action: {c}",
    "label in lower case": "action : {c}", "numbered label": "Action 9: {c}", "number": "1. {c}", "number with bracket": "2) {c}",
    "prompt sign": "> {c}", "dash": "- {c}", "fence": "```\n{c}\n```", "fence with a language": "```text\n{c}\n```", "backticks": "`{c}`",
    "backticks of a fence": "```{c}```", "bold": "**{c}**", "bold label": "**Action:** {c}", "bold all": "**Action: {c}.**",
    "all at once": "> 1. **Action 9**: `{c}`.", "decoration in a tag": "<action>Action: `{c}`.</action>", "label and tag": "Action 2: <action>{c}</action>",
    "last tag": "<action>{other}</action> No. <action>{c}</action>", "prose first": "There is a lot to do here.\n\n{c}",
    "prose around": "There is a lot to do here.\nAction 2: **{c}**.\nThat will help.", "last command": "{other}\nor rather\n{c}",
    "after thinking": "<think>{other}\n<action>{other}</action></think>\n\n{c}", "opened by the prompt": "So: {other}</think>\n\n{c}",
    "upper case": "{C}"}
NOT_READ = {
    "nothing": "", "blanks": " \n ", "empty tag": "<action></action>", "tag not closed": "<action>{c}", "tag not closed after a command":
    "{c}\n<action>{other}", "only thinking": "<think>{c}</think>", "two with a comma": "{c}, {other}", "two with and": "{c} and {other}",
    "two in a tag": "<action>{c} | {other}</action>", "in a sentence": "I would {c} now", "empty fence": "```\n```", "only a label": "Action:",
    "only bold": "****", "only a number": "1."}
UNENDED = {
    "cut": "<think>{c}", "with a tag": "<think>\nSo <action>{c}</action>", "with a line": "<think>hm\n{c}\n", "behind a command": "{c}\n<think>",
    "second thought": "<think>a</think>\n<action>{c}</action>\n<think>b"}


class FakeEngine:
    """A toy in place of ALFWorld's engine: it knows three commands and how often one was given that is not look."""
    state = SimpleNamespace(admissible_commands=["look", "inventory", "help"], feedback="You see.", won=False)
    given = 0

    def step(self, command):
        known = command in self.state.admissible_commands
        self.given += known and command != "look"
        return SimpleNamespace(**vars(self.state) | {"feedback": "You see." if known else "Nothing happens."}), 0.0, False


@pytest.fixture(params=["keydoor", pytest.param("sciworld", marks=needs_simulator), "alfworld", "my_env"])
def game(request, monkeypatch):
    """step(form) -> (observation, reward, info) of a fresh episode, and `same()`: is the world as it was before that?"""
    game = SimpleNamespace()
    if request.param == "keydoor":
        env = make_env("keydoor", {"practice": True})
        env.reset(task=env.tasks("train")[0], seed=0)
        game.c, game.other = env.lists[0][:2]
        game.same = lambda: env.stage == 0
    elif request.param == "sciworld":
        env = make_env("sciworld")
        env.reset(task="find-plant/12", seed=0)
        game.c, game.other = "open door", "look around"
        game.same = lambda: env._server.getNumMoves() == 0
    elif request.param == "alfworld":
        monkeypatch.setattr(alfworld, "engine", lambda: None)
        monkeypatch.setattr(alfworld, "folder", lambda data: None)
        env = alfworld.ALFWorld()
        env._env, env._state, env._followed, env._done, env._walkthrough = FakeEngine(), FakeEngine.state, 0, False, []
        game.c, game.other, game.same = "inventory", "help", lambda: env._env.given == 0
    else:
        env = MyEnv()
        env.reset(task=MyEnv.tasks("train")[0], seed=0)
        game.c, game.other = env.left[0], env.left[1]
        game.same = lambda: True  # whatever is said ends or goes on
    game.name, game.env = request.param, env

    def step(form):
        text = form.replace("{c}", game.c).replace("{other}", game.other).replace("{C}", game.c.upper())
        observation, reward, terminated, truncated, info = env.step(text)
        return observation, reward, info

    game.step = step
    return game


# An environment that gives no `is_command` cannot find a command in prose, and this one minds the case
NEEDS_COMMANDS = {"prose first", "prose around", "last command", "upper case"}


@pytest.mark.parametrize("form", READ)
def test_a_form_is_read(game, form):
    if game.name == "my_env" and form in NEEDS_COMMANDS:
        return
    observation, _, info = game.step(READ[form])
    assert info["valid"] and UNFINISHED not in observation
    assert game.name == "my_env" or not game.same()


@pytest.mark.parametrize("form", NOT_READ)
def test_a_form_is_not_read(game, form):
    observation, reward, info = game.step(NOT_READ[form])
    assert not info["valid"] and not info["success"] and reward == 0 and game.same() and UNFINISHED not in observation


@pytest.mark.parametrize("form", UNENDED)
def test_thinking_that_did_not_end_is_an_invalid_action(game, form):  # docs/faults.md, 40
    observation, reward, info = game.step(UNENDED[form])
    assert not info["valid"] and not info["success"] and reward == 0 and game.same()
    assert (UNFINISHED in observation) == (game.name != "my_env")


@pytest.mark.parametrize("game", ["alfworld"], indirect=True)
@pytest.mark.parametrize("text, looked", [
    ("", True), ("hm", False), ("I see a lot.\nBut what now?", True), ("<action></action>", True), ("<action>inventory", True),
    ("<think>inventory", True), ("<action>dance</action>", False), ("Action:", True), ("<think>hm</think>", True)])
def test_what_holds_no_command_is_played_as_look_in_alfworld(game, text, looked):
    """As in SkillOpt's released code; here it is said, and the turn stays invalid. What is read and not possible does nothing."""
    observation, reward, info = game.step(text)
    assert (observation.startswith(alfworld.LOOKED), info["valid"], reward) == (looked, False, 0.0)
    assert ("You see." in observation, "Nothing happens." in observation) == (looked, not looked) and game.same()


def test_a_command_as_it_stands_wins_over_decoration():
    listed = {"1", "> look", "say 2. yes.", "`ls`"}
    for line in listed:
        assert parse_action(f"So:\n{line}\nthat is it", listed.__contains__) == parse_action(line, listed.__contains__) == line
    assert parse_action("1. 1", listed.__contains__) == parse_action("1.") == parse_action("1") == "1"


def test_without_commands_the_first_line_counts():
    assert parse_action("\n\n  look  \nmore") == "look" and parse_action("dance", lambda line: False) == "dance"
    assert parse_action("dance\nsing", lambda line: False) == ""


@needs_simulator
def test_scienceworlds_own_actions_are_commands_and_prose_is_none():
    env = make_env("sciworld", {"simplifications": "none"})
    env.reset(task="power-component/0", seed=0)
    assert [action for action in env.admissible_actions() if not COMMAND.fullmatch(action)] == []
    for line in ("Wait, I should look first", "Use it later!", "I will open door", "look: a door", "The task is to open door"):
        assert not COMMAND.fullmatch(line), line


def test_reading_is_linear_in_the_length():
    began = time.perf_counter()
    for piece in ("<answer>", "</answer>", "<answer", "</think>", "<think>", "> ", "**", "1. ", "Action: ", "action ", "`", ". ", "- ", "```\n"):
        parse_action(piece * 100_000, lambda line: False)
        last_tag(piece * 300_000, ("search", "answer"))
    parse_action("use " + "a in " * 100_000 + "!", COMMAND.fullmatch)
    assert time.perf_counter() - began < 20


# Tags and calls of the environments with a grammar of their own

@pytest.mark.parametrize("text, content", [
    ("<answer>Bay</answer>", "Bay"), ("so <answer> Bay\n</answer> I think", "Bay"), ("<answer>a</answer><answer>b</answer>", "b"),
    ("Bay", None), ("", None), ("<answer>Bay", None), ("Bay</answer>", None), ("</answer><answer>", None), ("<answer></answer>", ""),
    ("<answer>a <answer>b</answer>", "b"), ("<answer>Bay</answer></answer>", "Bay"), ("<answer>Bay</answer> <answer>", "Bay"),
    ("<answer>a</answer><answer>b</answer> </answer>", "b"), ("<ANSWER>Bay</Answer>", "Bay"), ("İ<Answer>İ</ANSWER>", "İ")])
def test_the_last_complete_tag_counts(text, content):
    assert last_tag(text, ("answer",)) == (None if content is None else ("answer", content))


def test_of_several_tags_the_last_decides():
    both = ("search", "answer")
    assert last_tag("<search>a</search> so <Answer>b</Answer>", both) == ("answer", "b")
    assert last_tag("<answer>b</answer> no, <SEARCH>a</SEARCH>", both) == ("search", "a")


@pytest.fixture
def question(tmp_path):
    (tmp_path / "one.json").write_text(json.dumps([{"question": "Where?", "answers": ["Bay"], "context": "At the bay.", "id": "a",
                                                    "source": "hand", "split": "train"}]))
    env = make_env("searchqa", {"data": str(tmp_path / "one.json")})
    env.reset(task="hand/a", seed=0)
    return env


@pytest.mark.parametrize("text", ["<answer>Bay</answer>", "<ANSWER>bay.</ANSWER>", "<answer>x</answer> No, <Answer>the bay</Answer>",
                                  "<think>it is <answer>x</answer></think><answer>Bay</answer>", "hm</think>\n<answer>Bay</answer>",
                                  "<answer>Bay</answer></answer>", "<answer>Bay</answer> So: <answer>", "Bay", "It lies there.\n\nThe Bay.\n\n",
                                  "<think>x</think>\nbay"])
def test_searchqa_reads_an_answer(question, text):
    observation, reward, *_, info = question.step(text)
    assert (observation, reward, info["valid"]) == ("Right.", 1.0, True)


@pytest.mark.parametrize("text", ["<think>it is <answer>Bay</answer>", "<think>a</think><answer>Bay</answer><think>or",
                                  "<answer>Bay</answer><think>", "<think><ANSWER>Bay</ANSWER>"])
def test_searchqa_pays_for_no_thought(question, text):  # docs/faults.md, 40
    observation, reward, terminated, _, info = question.step(text)
    assert UNFINISHED in observation and (reward, terminated) == (0.0, True)
    reference = info.pop("reference")
    assert info == {"success": False, "valid": False, "score": 0.0} and reference["Answer that was read"] == "none"


@needs_bfcl
@pytest.mark.parametrize("format, call", [("prompt", "[pwd()]"), ("native", '<tool_call>{"name": "pwd", "arguments": {}}</tool_call>')])
def test_bfcl_ends_no_turn_and_calls_nothing_in_a_thought(format, call):  # docs/faults.md, 40
    env = make_env("bfcl", {"format": format})
    env.reset(task="base/0", seed=0)
    for text in (f"<think>{call}", f"{call}<think>", f"<think>a</think>{call}\n<think>b", "<think>Nothing is left to do."):
        observation, reward, terminated, _, info = env.step(text)
        assert "Invalid action" in observation and UNFINISHED.removesuffix(".") in observation and not env._last
        assert (info["valid"], info["user_turn"], reward, terminated) == (False, 1, 0.0, False)
        assert format == "prompt" or info["tool_results"] == [observation]
    assert env.step(f"<think>{call}</think>\n{call}")[4]["valid"] and len(env._made) == 1


def test_after_thinking():
    assert after_thinking("a") == "a" and after_thinking("<think>a</think>b") == after_thinking("a</think>b") == "b"
    assert after_thinking("<think>a") is after_thinking("a</think>b<think>") is None and after_thinking("<think></think>") == ""
