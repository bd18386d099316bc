"""envs/guard.py: an environment's answer in time and of the contract's types, or the end of its episode."""
import math
import threading

import pytest
import torch
from conftest import FakeEnv, FakePolicy, ended, play

from envs import BadInput
from rl.rollout import Request, rollout


@pytest.mark.parametrize("answer", [None, "text", ("text", 0.0, False, {}), (None, 0.0, False, False, {}),
                                    ("text", None, False, False, {}), ("text", "much", False, False, {}),
                                    ("text", 0.0, False, False, None), (7, 0.0, False, False, {})], ids=str)
def test_an_answer_of_another_form_breaks_its_episode(word_chat, answer):
    class Malformed(FakeEnv):
        def step(self, action):
            return answer

    [t] = play(word_chat, FakePolicy(ended(word_chat)), "wait win", env=Malformed)
    assert t.end == "env_error" and math.isnan(t.reward) and t.error and not t.success


@pytest.mark.parametrize("answer", [None, "text", ("text",), (None, {}), ("text", None)], ids=str)
def test_a_reset_of_another_form_breaks_its_episode(word_chat, answer):
    class Malformed(FakeEnv):
        def reset(self, *, task, seed):
            return answer

    [t] = play(word_chat, FakePolicy(ended(word_chat)), "wait win", env=Malformed)
    assert t.end == "env_error" and not t.turns and not t.rows


def test_a_reward_of_another_number_type_becomes_a_float(word_chat):
    class Whole(FakeEnv):
        def step(self, action):
            return "text", torch.tensor(1), True, False, {"success": True}

    [t] = play(word_chat, FakePolicy(ended(word_chat)), "wait win", env=Whole)
    assert t.reward == 1.0 and type(t.reward) is float and t.end == "success"


@pytest.mark.parametrize("task", ["bad-reset", "wait bad"])
def test_bad_input_of_an_environment_reaches_the_caller(word_chat, task):
    with pytest.raises(BadInput):
        play(word_chat, FakePolicy(ended(word_chat)), "wait win", task)


def test_threads_without_a_signal_still_play(word_chat):
    """A time limit needs the main thread; elsewhere an episode is played without."""
    found = []

    def work():
        act = lambda prompts: [[*word_chat.text_ids("win"), word_chat.tokenizer.eos_token_id] for _ in prompts]  # noqa: E731
        found.extend(rollout(act, word_chat, [FakeEnv()], [Request("win")], max_turns=3, step_timeout=5))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [t.end for t in found] == ["success"]
