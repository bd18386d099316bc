"""What a prompt holds of the past: observations with and without their hints, windows, the last turns alone, and the rows that
come of it."""
import importlib.util
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, FakeEnv, FakePolicy, ended, needs_bfcl, needs_simulator, play
from test_enrich import ALL, TABLE

from enrich import STRATEGIES, EnrichedEnv, Schedule, walk
from envs import BadInput, make_env, select_tasks
from rl.chat import Chat
from rl.rollout import LEFT_OUT, Request, messages_of, rollout
from rl.stripped import rebuild_rows

DATA = Path(os.environ.get("SCAFFOLD_FUNNEL_DATA", ROOT.parent / "shared" / "data"))
MARK = "\u00a7"
HISTORIES = {"full": 1000, "window:1": 1, "window:2": 2, "recent:1": 1, "recent:2": 2}


def reachable(name, *packages):
    missing = not (DATA / name).exists() or any(importlib.util.find_spec(package) is None for package in packages)
    return pytest.mark.skipif(missing, reason=f"no {name} in ../shared/data or $SCAFFOLD_FUNNEL_DATA, or no {' '.join(packages)}")


class Recorded:
    """Plays an episode of an environment along the gold path again and again, its hints behind a mark, so that they can be counted."""

    def __init__(self, env, task):
        self.turns, self.actions = [], []
        for observation, info, action in walk(env, task):
            over = action is None
            self.turns.append((observation, info, *(None if over else hint and MARK + hint for hint in (
                env.action_guidance(), env.observation_enrichment())), env.gold_action(), env.admissible_actions()))
            self.actions += [] if over else [action]
        self.system_prompt, self.tools, self.max_turns, self.words = env.system_prompt, env.tools, env.max_turns, env.phrase

    def reset(self, *, task, seed):
        self.n = 0
        return self.turns[0][:2]

    def step(self, action):
        self.n += 1
        observation, info, *_ = self.turns[min(self.n, len(self.turns) - 1)]
        return observation, 0.0, self.n >= len(self.actions), False, info

    def action_guidance(self):
        return self.turns[self.n][2]

    def observation_enrichment(self):
        return self.turns[self.n][3]

    def gold_action(self):
        return self.turns[self.n][4]

    def admissible_actions(self):
        return self.turns[self.n][5]

    def phrase(self, actions):  # of a wrong hint
        return MARK + self.words(actions)

    def close(self):
        pass


def along(env, actions, chat, schedule, **how):
    script = iter(actions)
    [played] = rollout(lambda prompts: [ended(chat, next(script)) for _ in prompts], chat, [EnrichedEnv(env, schedule)],
                       [Request(how.pop("task"), enriched=True)], max_turns=len(actions), max_context=10 ** 6, **how)
    return played


ENVS = {"keydoor": ({"stages": 12}, None), "sciworld": ({}, "find-plant"), "bfcl": ({"guidance": "next"}, "base/0"),
        "bfcl native": ({"guidance": "next", "format": "native"}, "base/0"), "alfworld": ({}, None), "searchqa": ({}, None)}


@pytest.mark.parametrize("name", [
    "keydoor", pytest.param("sciworld", marks=needs_simulator), pytest.param("bfcl", marks=needs_bfcl),
    pytest.param("bfcl native", marks=needs_bfcl),
    pytest.param("alfworld", marks=reachable("alfworld_games.tar.xz", "alfworld", "textworld", "fast_downward")),
    pytest.param("searchqa", marks=reachable("multihop_qa.json", "bm25s"))])
def test_the_prompts_that_hold_a_hint(name, request, tmp_path):
    """For every strategy, in both halves of training: turns 1-3 or 6-10 and nothing else, under every history. Where they are
    kept, a prompt holds the hints of all observations that it shows."""
    options, task = ENVS[name]
    if name == "alfworld":
        with tarfile.open(DATA / "alfworld_games.tar.xz") as tar:
            tar.extractall(tmp_path, filter="data")
        options = {"data": str(tmp_path)}
    elif name == "searchqa":
        options = {"data": str(DATA / "multihop_qa.json")}
    kind, chat = name.split()[0], Chat(request.getfixturevalue("qwen3" if "native" in name else "toy"))
    real = make_env(kind, options)
    task = select_tasks(kind, "train", [task] if task else None, options)[0]
    env = Recorded(real, task)
    real.close()
    actions = env.actions
    for strategy in STRATEGIES:
        for step in (1, 200) if strategy in ("hybrid", "reversed") else (1,):
            window = set(TABLE[strategy][step > 100]) & ALL
            t = along(env, actions, chat, Schedule(strategy, 200, step=step), task=task)
            assert len(t.turns) == len(actions) and rebuild_rows(t, chat, "full") == t.rows
            own = [(turn.hint or "").count(MARK) for turn in t.turns]
            hinted, turns = {number for number, marks in enumerate(own, 1) if marks}, range(1, len(actions) + 1)
            allowed = {number for number in turns if number in window or window == ALL}
            assert hinted == allowed if kind in ("keydoor", "sciworld") else hinted <= allowed  # these always have a hint
            for history, size in HISTORIES.items():
                if history.startswith("recent") and t.tools:
                    continue  # refused
                for n in range(len(t.turns)):
                    so_far = replace(t, turns=t.turns[:n])
                    plain, kept = (messages_of(so_far, chat, history, keep) for keep in (False, True))
                    found = [text.count(MARK) for _, text in plain if isinstance(text, str)]
                    assert (found[-1], sum(found)) == (own[n], own[n]), (strategy, history, n + 1)  # in the last message alone
                    shown = [k for k in range(n + 1) if k == 0 or k >= n - size or (t.tools and not t.turns[k - 1].tool_results)]
                    found = sum(text.count(MARK) for _, text in kept if isinstance(text, str))
                    assert found == sum(own[k] for k in shown), (strategy, history, n + 1)
                    assert history != "full" or chat.prompt(plain, t.tools) == t.turns[n].prompt_ids


def test_a_hinted_turn_starts_a_row_and_one_without_a_hint_goes_on(toy):
    """Of turns 1 to 12: hints before 1-3 start a row each and turn 4 the one that goes on; before 6-10 the first stands at the end
    of the row so far. An enriched episode whose hints are None stays one row."""
    chat, env = Chat(toy), make_env("keydoor", {"stages": 12})
    task = select_tasks("keydoor", "train", None, {"stages": 12})[0]
    actions = [action for _, _, action in walk(env, task) if action]

    def turns_of_rows(strategy, own=env, **how):
        t, cut = along(own, actions, chat, Schedule(strategy), task=task, **how), []
        for row in t.rows:
            cut.append(sum(i in chat.end_ids for i, own in zip(row.ids, row.mask) if own))
        return cut

    assert turns_of_rows("ag-early") == [1, 1, 1, 9] and turns_of_rows("oe-late") == [6, 1, 1, 1, 1, 2]
    assert turns_of_rows("none") == turns_of_rows("ag-early", keep_hints=True) == [12]
    env.action_guidance = lambda: None
    assert turns_of_rows("ag-always") == [12]


class Silent(FakeEnv):
    """Fake: its info is empty from the first step on."""

    def step(self, action):
        return (*super().step(action)[:4], {})


def test_a_hint_is_of_the_current_observation_alone(word_chat):
    env = EnrichedEnv(Silent(), Schedule("ag-early", early=(1, 1)))
    env.env.action_guidance = lambda: "Hint: go."
    [t] = rollout(FakePolicy(ended(word_chat)), word_chat, [env], [Request("wait wait win", enriched=True)], max_turns=4)
    assert [turn.hint for turn in t.turns] == ["Hint: go.", None, None] and t.info == {}


@pytest.mark.parametrize("task", ["wait wait win", "wait break"])
def test_what_the_environment_said_last_stays_where_it_breaks(word_chat, task):
    [t] = play(word_chat, FakePolicy(ended(word_chat)), task)
    assert t.info == {"success": task.endswith("win"), "valid": True}


class Called(FakeEnv):
    """Fake: functions are called in every turn but the third, where the user speaks."""
    tools = [{"type": "function", "function": {"name": "f", "description": "f", "parameters": {}}}]

    def step(self, action):
        observation, *rest, info = super().step(action)
        return (observation, *rest, info) if self.turn == 3 else (f"a\n{observation}", *rest, info | {
            "tool_results": ["a", observation]})


def test_a_window_leaves_out_results_and_no_request(qwen3):
    chat = Chat(qwen3)
    [t] = play(chat, FakePolicy(ended(chat)), " ".join(["wait"] * 6), env=Called, max_turns=6)
    messages = messages_of(t, chat, "window:1")[2:]
    assert [role for role, _ in messages] == ["assistant", "tool", "tool"] * 2 + ["assistant", "user"] + [
        "assistant", "tool", "tool"] * 3
    texts = [text for role, text in messages if role != "assistant"]
    assert texts == [LEFT_OUT] * 4 + ["obs3 wait"] + [LEFT_OUT] * 2 + ["a", "obs5 wait", "a", "obs6 wait"]
    assert all(text == chat.history_ids(t.turns[0].action_ids) for role, text in messages if role == "assistant")


# The last turns alone

class Listing(FakeEnv):
    """Fake: lists in each observation what can be done."""

    def reset(self, *, task, seed):
        observation, info = super().reset(task=task, seed=seed)
        return f"{observation}\nCommands: a0.", info | {"listed": "Commands: a0."}

    def step(self, action):
        observation, *rest, info = super().step(action)
        listed = f"Commands: a{self.turn}."
        return f"{observation}\n{listed}", *rest, info | {"listed": listed}


def test_recent_turns_are_whole_and_older_ones_are_gone(word_chat):
    """The last N actions, each with the observation that it answers; of what came between these and the first observation a number;
    lists of commands in the current observation alone."""
    answers = [ended(word_chat, word) for word in ("alpha", "beta", "gamma", "delta")]
    [t] = play(word_chat, FakePolicy(*answers), "wait wait wait wait", env=Listing)
    words = {1: ["alpha"], 2: ["alpha", "beta"], 3: ["beta", "gamma"], 4: ["gamma", "delta"]}
    for number in range(5):
        (_, first), *rest = messages_of(replace(t, turns=t.turns[:number]), word_chat, "recent:2")[1:]
        assert [role for role, _ in rest] == ["assistant", "user"] * min(number, 2)
        said = [word_chat.tokenizer.decode(ids) for role, ids in rest if role == "assistant"]
        assert said == words.get(number, [])
        told = [text for role, text in rest if role == "user"]
        assert told[:-1] == [f"obs{n} wait" for n in range(max(1, number - 1), number)]
        assert number == 0 or told[-1] == f"obs{number} wait\nCommands: a{number}."
        gone = {3: "\n(1 turn left out)\nobs1 wait", 4: "\n(2 turns left out)\nobs2 wait"}.get(number, "")
        assert first == f"You see a door 0.{gone}" + "\nCommands: a0." * (number == 0)
    full = messages_of(t, word_chat, "full")
    assert sum("Commands:" in text for _, text in full if isinstance(text, str)) == 5  # as before there
    assert t.turns[1].listed == "Commands: a1." and t.info["listed"] == "Commands: a4."


def test_rows_of_recent_turns_grow_linearly(word_chat):
    def tokens(history, turns):
        [t] = play(word_chat, FakePolicy(ended(word_chat, "go wait go wait go wait")), " ".join(["wait"] * 40), max_turns=turns,
                   history=history, max_context=10 ** 6)
        assert rebuild_rows(t, word_chat, history) == t.rows
        return sum(len(row.ids) for row in t.rows), max(len(turn.prompt_ids) for turn in t.turns)

    (short, prompt), (long, longest) = tokens("recent:3", 20), tokens("recent:3", 40)
    assert 1.8 < long / short < 2.2 and longest <= prompt + 1  # the number of turns may be a word more
    assert tokens("window:3", 40)[0] / tokens("window:3", 20)[0] > 2.5


def test_recent_turns_and_tools_exclude_each_other(qwen3):
    chat = Chat(qwen3)
    with pytest.raises(BadInput, match="recent:N would drop what a user asks"):
        play(chat, FakePolicy(ended(chat)), "wait wait", env=Called, history="recent:1")


def test_reflection_has_every_turn_without_lists_and_then_the_reference(word_chat):
    [t] = play(word_chat, FakePolicy(ended(word_chat, "alpha"), ended(word_chat, "beta")), "wait win", env=Listing)
    shown = "You see a door 0.\n> alpha\nobs1 wait\n> beta\nobs2 win"
    assert Listing().reflection(t) == shown
    for reference, lines in (("Bay", "\nBay"), ({"right": "Bay", "F1": 0.5}, "\nright: Bay\nF1: 0.5"), ({}, ""), ("", "")):
        assert Listing().reflection(replace(t, info=t.info | {"reference": reference})) == shown + lines
    assert Listing().reflection(replace(t, turns=[], info={})) == t.first_observation  # an episode that could not begin
