"""rl/tiny.py, the built-in models: rows that teach copying, and a build with a small recipe."""
import random
import re

import pytest

from envs import BadInput
from envs.keydoor import KeyDoor
from rl import tiny
from rl.chat import Chat
from rl.model import load_model


class Unlisted(KeyDoor):
    """The game, where admissible actions are listed only on demand."""

    def _info(self, valid, success=False):
        return {key: value for key, value in super()._info(valid, success).items() if key != "admissible"}

    def admissible_actions(self):
        return [] if self.over else list(self.lists[self.stage])

    def phrase(self, actions):
        return f"A way that works goes on with: {', then '.join(actions)}."


@pytest.fixture(scope="module")
def game():
    """(environment, chat, words) of `Unlisted`."""
    env = Unlisted()
    tokenizer = tiny.word_tokenizer(tiny.texts_of(env, Unlisted.tasks("train")[:20], 0))
    return env, Chat(tokenizer), sorted(w for w in tokenizer.get_vocab() if re.fullmatch(r"[\w'-]+", w))


def parts(chat, row):
    """[(what the user said, what was answered), ...] of a row, as words; only answers and their end tokens are learned."""
    said = chat.tokenizer.decode(row.ids).split("<|im_start|> user ")[1:]
    pairs = [re.fullmatch(r"(.*?) ?<\|im_end\|> <\|im_start\|> assistant (.*?) <\|im_end\|> ?", text).groups() for text in said]
    learned = chat.tokenizer.decode([i for i, own in zip(row.ids, row.mask) if own]).split("<|im_end|>")[:-1]
    assert [words.strip() for words in learned] == [answer for _, answer in pairs]
    return pairs


def test_a_row_of_repetition_answers_what_was_said(game):
    env, chat, words = game
    for seed in range(20):
        (said, answer), = parts(chat, tiny.copy_row(env, chat, words, random.Random(seed), 0, 0))
        assert said == answer and 8 <= len(set(answer.split())) == len(answer.split()) <= 14


def test_a_row_of_hints_answers_the_first_named_action(game):
    env, chat, words = game
    named, noises, answers = set(), set(), set()
    for seed in range(60):
        pairs = parts(chat, tiny.copy_row(env, chat, words, random.Random(seed), 3, 12))
        assert len(pairs) == 3
        for said, answer in pairs:
            noise, hint = re.fullmatch(r"(.*?) ?a way that works goes on with : (.*) \.", said).groups()
            actions = hint.split(" , then ")
            assert answer == actions[0] and all(2 <= len(action.split()) <= 6 for action in actions)
            named.add(len(actions)), noises.add(len(noise.split())), answers.add(answer)
    assert named == {1, 2, 3} and max(noises) == 12 and min(noises) < 3 and len(answers) > 170


@pytest.fixture
def quick(monkeypatch):
    """A recipe of seconds."""
    monkeypatch.setattr(tiny, "SLOW", {"episodes": 8, "texts": 8})
    monkeypatch.setattr(tiny, "LESSONS", [{**lesson, "steps": 3, "batch": 4} for lesson in tiny.LESSONS])


def test_a_build_where_actions_are_not_listed(tmp_path, quick, monkeypatch):
    seen, supervise = [], tiny.supervise
    monkeypatch.setattr(tiny, "supervise", lambda model, rows, pad, **how: (
        seen.append((rows, how)), supervise(model, rows, pad, **how)))
    for name in ("a", "b"):
        tiny.build(tmp_path / name, f"{__name__}:Unlisted", [{"practice": True}], seed=1, max_turns=2)
    weights = [load_model(str(tmp_path / name))[0].state_dict() for name in ("a", "b")]
    assert all(weights[0][key].equal(weights[1][key]) for key in weights[0])    # the same seed, the same model
    assert [(how["steps"], how["batch"]) for _, how in seen[:4]] == [(3, 4)] * 4
    chat = Chat(load_model(str(tmp_path / "a"))[1])
    last = [chat.tokenizer.decode(row.ids) for row in seen[3][0]]
    play = [text for text in last if "you are in the" in text and "commands :" in text]
    assert len(last) == 2 * len(play) == 16        # half play, half copying
    assert all(text.count("assistant") == 2 for text in play)      # whole episodes of max_turns


def test_a_build_where_they_are_listed_learns_from_play_alone(tmp_path, quick, monkeypatch):
    seen = []
    monkeypatch.setattr(tiny, "RECIPE", {"episodes": 6, "steps": 2, "batch": 2, "lr": 3e-3})
    monkeypatch.setattr(tiny, "supervise", lambda model, rows, pad, **how: seen.append((len(rows), how["steps"])))
    tiny.build(tmp_path / "model", "keydoor", [{}])
    assert seen == [(6, 2)]


def test_another_lesson_is_another_model(tmp_path, quick, monkeypatch):
    monkeypatch.setenv("SCAFFOLD_FUNNEL_CACHE", str(tmp_path))
    made = []
    monkeypatch.setattr(tiny, "build", lambda folder, *how: made.append(folder))
    tiny.tiny("envs.keydoor:KeyDoor"), tiny.tiny("envs.keydoor:KeyDoor")
    monkeypatch.setattr(tiny, "LESSONS", tiny.LESSONS[:2])
    tiny.tiny("envs.keydoor:KeyDoor")
    assert made[0] == made[1] != made[2]


def test_one_action_of_each_verb_is_listed():
    env = Unlisted(commands=10)
    env.reset(task=Unlisted.tasks("train")[0], seed=0)
    everything = env.admissible_actions()
    one_each = tiny.OneOfEachVerb(env, 0)
    drawn = [one_each.admissible_actions() for _ in range(50)]
    verbs = {action.split()[0] for action in everything}
    assert all(sorted(action.split()[0] for action in actions) == sorted(verbs) for actions in drawn)
    assert {action for actions in drawn for action in actions} == set(everything) and len(verbs) < len(everything)


class Silent(Unlisted):
    def admissible_actions(self):
        return None


def test_an_environment_that_lists_no_actions_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("SCAFFOLD_FUNNEL_CACHE", str(tmp_path))
    with pytest.raises(BadInput, match="admissible_actions"):
        tiny.tiny("test_tiny:Silent")
