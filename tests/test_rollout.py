"""rl/rollout.py: what is sampled is what is trained on, and how an episode ends."""
import itertools
import math
from dataclasses import replace

import pytest
from conftest import FakeEnv, FakePolicy, ended, every_tokenizer, play, sampled

from envs import BadInput
from envs.keydoor import KeyDoor
from rl.chat import Chat
from rl.rollout import Request, Row, add_turn, messages_of, refuse_if_hopeless, rollout
from rl.sampling import sampler


# How an episode ends

SCRIPTS = {"wait win": ("success", 1.0), "wait lose": ("failure", 0.0), "wait wait wait wait": ("turn_limit", 0.0),
           "half stop": ("turn_limit", 0.5), "half break": ("env_error", math.nan), "break-reset": ("env_error", math.nan),
           "wait nan win": ("success", math.nan), "wait wait wait win": ("success", 1.0), "invalid win": ("success", 1.0)}


@pytest.mark.parametrize("task", SCRIPTS)
def test_how_an_episode_ends(word_chat, task):  # docs/faults.md, 23
    [t] = play(word_chat, FakePolicy(ended(word_chat)), task)
    end, reward = SCRIPTS[task]
    assert t.end == end and t.success == (end == "success")
    assert t.reward == reward or math.isnan(t.reward) and math.isnan(reward)


def test_a_broken_environment_ends_its_own_episode_only(word_chat, capsys):
    tasks = [*SCRIPTS, "break-reset", "wait win"]
    together = play(word_chat, FakePolicy(ended(word_chat)), *tasks, envs=3)
    assert [t.task for t in together] == tasks
    for n, t in enumerate(together):
        [alone] = rollout(FakePolicy(ended(word_chat)), word_chat, [FakeEnv()], [Request(t.task, n, n)], max_turns=4)
        assert (t.end, t.rows, str(t.reward)) == (alone.end, alone.rows, str(alone.reward))
    assert "break-reset: the environment broke" in capsys.readouterr().err
    assert together[4].error == "ZeroDivisionError: the door is gone" and len(together[4].turns) == 2


class DeadEnv(FakeEnv):
    def reset(self, *, task, seed):
        raise OSError("connection refused")


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_dead_environment_breaks_one_episode_and_not_all_that_wait(word_chat, place):
    envs = [FakeEnv() for _ in range(3)]
    envs.insert(place, DeadEnv())
    requests = [Request("wait win", group=n, seed=n) for n in range(40)]
    played = rollout(FakePolicy(ended(word_chat)), word_chat, envs, requests, max_turns=4)
    assert [t.end for t in played].count("env_error") == 1 and [t.end for t in played].count("success") == 39
    played = rollout(FakePolicy(ended(word_chat)), word_chat, [DeadEnv(), DeadEnv()], requests, max_turns=4)
    assert {t.end for t in played} == {"env_error"} and all(math.isnan(t.reward) for t in played)


class BreaksAfterAnEpisode(FakeEnv):
    """Answers as it should until a step breaks; from then on nothing works."""
    dead = False

    def reset(self, *, task, seed):
        if self.dead:
            raise OSError("connection refused")
        return super().reset(task=task, seed=seed)

    def step(self, action):
        if self.script[self.turn] == "break":
            BreaksAfterAnEpisode.dead = True
        return super().step(action)


def test_an_environment_that_broke_in_a_step_is_used_again_only_when_no_other_is_left(word_chat):
    envs = [FakeEnv(), BreaksAfterAnEpisode()]
    requests = [Request("wait break" if n == 0 else "wait win", n, n) for n in range(12)]
    played = rollout(FakePolicy(ended(word_chat)), word_chat, envs, requests, max_turns=4)
    assert [t.end for t in played] == ["env_error"] + ["success"] * 11


def test_context_full_at_a_later_turn(word_chat):  # docs/faults.md, 23
    act = FakePolicy(ended(word_chat))
    third = len(play(word_chat, act, "half wait win")[0].turns[2].prompt_ids)
    assert play(word_chat, act, "half wait win", max_context=third + 8)[0].end == "success"  # 8 new tokens just fit
    [t] = play(word_chat, act, "half wait win", max_context=third + 7)
    assert t.end == "context_full" and t.reward == 0.5 and not t.success and len(t.turns) == 2


def test_one_prompt_too_long_is_context_full_all_too_long_is_bad_input(word_chat):
    act, limits = FakePolicy(ended(word_chat)), {"env": lambda: FakeEnv("door " * 200), "max_context": 100}
    long, short = play(word_chat, act, "long win", "wait win", **limits)
    assert (long.end, long.turns, long.rows) == ("context_full", [], []) and short.end == "success"
    refuse_if_hopeless([long, short], 100)
    with pytest.raises(BadInput, match="no first prompt fits"):
        refuse_if_hopeless(play(word_chat, act, "long win", "long win", **limits), 100)


@pytest.mark.parametrize("history", ["", "window", "recent", "recent:0", "window:0", "window:-1", "window:2x", "all"])
def test_unknown_history_is_refused(word_chat, history):
    with pytest.raises(BadInput, match="history"):
        play(word_chat, FakePolicy(ended(word_chat)), "win", history=history)


@pytest.mark.parametrize("envs", [1, 3, 8])
def test_results_in_the_order_of_the_requests(word_chat, envs):
    tasks = [" ".join(["wait"] * (n % 4) + ["win"]) for n in (3, 0, 2, 1, 0, 3, 1)]
    act = FakePolicy(ended(word_chat))
    played = play(word_chat, act, *tasks, envs=envs)
    assert [(t.task, t.group, t.seed, len(t.turns)) for t in played] == [
        (task, n, n, len(task.split())) for n, task in enumerate(tasks)]
    assert max(act.batches) == min(envs, len(tasks)) and len(act.prompts) == sum(len(t.turns) for t in played)


def test_rollout_says_when_no_episode_goes_on(base, word_chat):
    inner, calls = sampler(base, word_chat, max_new_tokens=4), []
    rollout(lambda prompts: calls.append(len(prompts)) or inner(prompts), word_chat, [KeyDoor()],
            [Request(task) for task in KeyDoor.tasks("train")[:2]], max_turns=2)
    assert calls[-1] == 0 and 0 not in calls[:-1]


# Sampled tokens and masks

@every_tokenizer
def test_masks_mark_exactly_what_was_sampled(tokenizer):  # docs/faults.md, 14, 15, 17
    chat = Chat(tokenizer)
    answers = [ended(chat, "open the door"), list(chat.text_ids("go")), ended(chat, "wait")]  # the 2nd: cut by length
    [t] = play(chat, FakePolicy(*answers), "wait wait win")
    assert [turn.action_ids for turn in t.turns] == answers and [turn.stop for turn in t.turns] == ["end", "length", "end"]
    assert [i for row in t.rows for i in sampled(row)] == sum(answers, [])
    assert t.length == sum(map(len, answers)) == sum(sum(row.mask) for row in t.rows)
    assert all(len(row.ids) == len(row.mask) and row.mask[0] == 0 for row in t.rows)


@every_tokenizer
def test_one_end_of_turn_per_message(tokenizer):  # docs/faults.md, 17
    chat, end = Chat(tokenizer), tokenizer.eos_token_id
    [t] = play(chat, FakePolicy(ended(chat), list(chat.text_ids("go")), ended(chat)), "wait wait win")
    ids = t.turns[-1].prompt_ids + t.turns[-1].action_ids
    assert ids.count(end) == 1 + 3 + 3  # system, observations, actions
    row = t.rows[-1]
    ends = [m for i, m in zip(row.ids, row.mask) if i == end]
    if len(t.rows) == 1:
        assert ends == [0, 0, 1, 0, 0, 0, 1]  # the turn cut by length is closed by the scaffold, not by the policy
    assert row.mask[-1] == 1 and row.ids[-1] == end


def test_sampled_ids_survive_a_tokenizer_that_does_not_round_trip(toy):  # docs/faults.md, 15
    chat, a, b = Chat(toy), *toy("a b")["input_ids"][::2]
    answer = [a, b, a, b, toy.eos_token_id]
    assert toy(toy.decode(answer[:-1]))["input_ids"] == toy("abab")["input_ids"] != answer[:-1]
    [t] = play(chat, FakePolicy(answer), "wait wait win")
    assert len(t.rows) == 1 and sampled(t.rows[0]) == answer * 3
    for earlier, later in itertools.pairwise(t.turns):
        so_far = earlier.prompt_ids + earlier.action_ids
        assert later.prompt_ids[:len(so_far)] == so_far


@every_tokenizer
@pytest.mark.parametrize("history", ["full", "window:2", "recent:2"])
def test_rows_hold_each_turn_as_it_was_sampled(tokenizer, history):  # docs/faults.md, 15, 16
    chat = Chat(tokenizer)
    [t] = play(chat, FakePolicy(ended(chat, "open door"), list(chat.text_ids("go"))), "wait wait wait win", history=history)
    turns = iter(t.turns)
    for row in t.rows:
        covered = []
        while len(covered) < len(row.ids):
            turn = next(turns)
            assert turn.prompt_ids[:len(covered)] == covered
            covered = turn.prompt_ids + turn.action_ids
        assert covered == row.ids
    assert next(turns, None) is None


@pytest.mark.parametrize("tokenizer, rows", [("words", 1), ("toy", 1), ("smollm2_tokenizer", 1), ("qwen3", 3),
                                             ("qwen3_5", 3)], indirect=["tokenizer"])
def test_a_template_that_strips_starts_a_row(tokenizer, rows):  # docs/faults.md, 16: without thinking, an empty block is stripped
    chat = Chat(tokenizer)
    [t] = play(chat, FakePolicy(ended(chat)), "wait wait win")
    assert len(t.rows) == rows
    if rows == 3:
        assert [row.ids for row in t.rows] == [turn.prompt_ids + turn.action_ids for turn in t.turns]
        assert [tokenizer.decode(turn.prompt_ids).count("<think>\n\n</think>") for turn in t.turns] == [1, 1, 1]


@pytest.mark.parametrize("tokenizer", ["qwen3", "qwen3_5"], indirect=True)
def test_thinking_is_stripped_from_history_and_trained_on_in_its_row(tokenizer):  # docs/faults.md, 16
    chat = Chat(tokenizer, thinking=True)
    opened = "" if chat.tokenizer.decode(chat.prompt([("user", "x")])).endswith("<think>\n") else "<think>\n"
    thought = tokenizer(f"{opened}The door is red.\n</think>\n\nopen door<|im_end|>")["input_ids"]
    plain, dangling = ended(chat, "go"), tokenizer(f"{opened}No end")["input_ids"]
    [t] = play(chat, FakePolicy(thought, plain, dangling, thought), "wait wait wait win")
    assert [i for row in t.rows for i in sampled(row)] == thought + plain + dangling + thought
    later = tokenizer.decode(t.turns[-1].prompt_ids)
    assert "The door is red." not in later and "assistant\nopen door<|im_end|>" in later
    assert t.turns[0].action.endswith("</think>\n\nopen door") and chat.think_end in t.rows[0].ids
    messages = [{"role": "system", "content": "Play."}, {"role": "user", "content": "You see a door 0."},
                {"role": "assistant", "content": tokenizer.decode(thought[:-1])}, {"role": "user", "content": "obs1 wait"}]
    assert t.turns[1].prompt_ids == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, enable_thinking=True, return_dict=False)


def test_add_turn_compares_token_by_token():
    rows = []
    add_turn(rows, [1, 2], [3])
    add_turn(rows, [1, 2, 3, 4], [5, 6])
    assert rows == [Row([1, 2, 3, 4, 5, 6], [0, 0, 1, 0, 1, 1])]
    add_turn(rows, [1, 2, 3, 4, 5, 9, 9], [5])
    assert rows[1] == Row([1, 2, 3, 4, 5, 9, 9, 5], [0] * 7 + [1]) and len(rows) == 2


def test_a_window_shows_its_past_observations_the_current_one_and_all_actions(words, word_chat):
    names = ["alpha", "beta", "gamma", "delta", "epsilon", "wait"]
    act = FakePolicy(*[ended(word_chat, name) for name in names])

    class Numbered(FakeEnv):
        def step(self, action):
            _, *rest = super().step(action)
            return f"you see {self.turn}", *rest

    [t] = play(word_chat, act, "wait wait wait wait wait win", env=Numbered, max_turns=6, history="window:2")
    assert [turn.action for turn in t.turns] == names and len(t.rows) == 3  # the fifth prompt is the first to leave something out
    for n, turn in enumerate(t.turns):
        text = words.decode(turn.prompt_ids)
        assert text.count("you see a door") == 1 and [name for name in names if name in text] == names[:n]
        assert [k for k in range(1, 7) if f"you see {k}" in text] == list(range(max(n - 2, 1), n + 1))
        before = word_chat.prompt(messages_of(replace(t, turns=t.turns[:n]), word_chat, "full"))
        assert (turn.prompt_ids == before) == (n < 4)
        for earlier in t.turns[:n]:  # as sampled: who copies it acts as before
            assert any(turn.prompt_ids[k:k + len(earlier.action_ids)] == earlier.action_ids for k in range(len(turn.prompt_ids)))


@pytest.mark.parametrize("history", ["full", "window:2", "recent:2"])
def test_batched_episodes_are_those_played_one_by_one(base, word_chat, history):  # docs/faults.md, 20
    act = sampler(base, word_chat, temperature=0, max_new_tokens=8)
    requests = [Request(task, n, n) for n, task in enumerate(KeyDoor.tasks("train")[:6])]
    one_by_one, together = (rollout(act, word_chat, [KeyDoor() for _ in range(n)], requests, max_turns=3, history=history)
                            for n in (1, 8))
    assert one_by_one == together and len({str(t.rows) for t in together}) == 6
