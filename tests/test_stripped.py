"""rl/stripped.py: the same episode under other prompts, and training without the hints that were sampled with."""
import pytest
import torch
from conftest import SMALL, FakeEnv, FakePolicy, needs_bfcl

import grpo
from enrich import EnrichedEnv, Schedule
from envs import make_env
from envs.keydoor import KeyDoor
from rl import train
from rl.chat import Chat
from rl.learner import UpdateOptions, row_logps, update
from rl.model import add_lora
from rl.options import Config
from rl.rollout import Request, rollout
from rl.stripped import rebuild_rows, train_context, without_hints
from rl.train import Algorithm


class Hinted(FakeEnv):
    """Fake: says a hint with words, numbers and the text of special tokens."""

    def action_guidance(self):
        return f"Hint: go {self.turn} <|im_end|> now."


def both_ways(chat, make, task, history, answers, **limits):
    """The same sampled ids with hints and without: two trajectories."""
    played = []
    for enriched in (True, False):
        envs = [EnrichedEnv(make(), Schedule("ag-always"))]
        policy = answers(envs[0]) if callable(answers) else FakePolicy(*answers)
        played += rollout(policy, chat, envs, [Request(task, seed=3, enriched=enriched)], history=history,
                          **{"max_turns": 6, "max_context": 8192, **limits})
    return played


def gold_policy(chat):
    return lambda env: lambda prompts: [[*chat.text_ids(env.gold_action()), chat.tokenizer.eos_token_id] for _ in prompts]


@pytest.mark.parametrize("history", ["full", "window:1", "window:2", "recent:1", "recent:2"])
def test_stripped_rows_are_those_of_a_rollout_without_hints(word_chat, history):
    task = KeyDoor.tasks("train")[0]
    hinted, plain = both_ways(word_chat, KeyDoor, task, history, gold_policy(word_chat))
    rows = rebuild_rows(without_hints(hinted), word_chat, history)
    assert rows == plain.rows != hinted.rows and all(turn.hint for turn in hinted.turns)
    words = {i for row in rows for i in row.ids}
    hint = set(word_chat.text_ids("Hint"))
    assert not words & hint and hint & {i for row in hinted.rows for i in row.ids}
    assert rebuild_rows(without_hints(plain), word_chat, history) == plain.rows
    assert sum(sum(row.mask) for row in rows) == hinted.length


@pytest.mark.parametrize("history", ["full", "window:2", "recent:2"])
@pytest.mark.parametrize("tokenizer", ["toy", "qwen3", "qwen3_5", "smollm2_tokenizer"], indirect=True)
def test_stripped_rows_keep_the_sampled_ids_whatever_they_are(tokenizer, history):
    chat = Chat(tokenizer, thinking=True)
    answers = [[*chat.text_ids("ab a"), *chat.text_ids("b"), tokenizer.eos_token_id], list(chat.text_ids("no end")),
               [*chat.text_ids("hm"), *([chat.think_end] if chat.think_end else []), *chat.text_ids("go"), tokenizer.eos_token_id]]
    hinted, plain = both_ways(chat, Hinted, "wait wait wait win", history, answers)
    assert rebuild_rows(without_hints(hinted), chat, history) == plain.rows != hinted.rows
    assert hinted.turns[1].hint == "Hint: go 1 <|im_end|> now."


@needs_bfcl
def test_stripped_rows_keep_the_tools(qwen3):
    chat = Chat(qwen3)
    hinted, plain = both_ways(chat, lambda: make_env("bfcl", {"format": "native"}), "base/0", "full", gold_policy(chat),
                              max_turns=3, max_context=20_000)
    assert rebuild_rows(without_hints(hinted), chat, "full") == plain.rows != hinted.rows and hinted.success == plain.success


def hinted_batch(chat, history="full"):
    tasks = KeyDoor.tasks("train")
    return [t for task in tasks[:3] for t in both_ways(chat, KeyDoor, task, history, gold_policy(chat))]


def config_for(context, history="full", **more):
    return Config(enrich="ag-always", enrich_train_context=context, history=history, temperature=0.7, **more)


@pytest.mark.parametrize("history", ["full", "window:1", "recent:1"])
def test_each_train_context(policy, word_chat, history):
    batch = hinted_batch(word_chat, history)
    stripped = train_context(config_for("stripped", history), batch, word_chat, policy)
    assert [t.rows for t in stripped[::2]] == [t.rows for t in batch[1::2]] and stripped[1::2] == batch[1::2]
    assert all(one.reward == two.reward and one.length == two.length for one, two in zip(batch, stripped))
    ratio = train_context(config_for("stripped-ratio", history, micro_batch_tokens=100), batch, word_chat, policy)
    assert [[row.ids for row in t.rows] for t in ratio] == [[row.ids for row in t.rows] for t in stripped]
    scored = row_logps(policy, [row for t in batch for row in t.rows], word_chat.pad_id, temperature=0.7)
    scored = iter(scored)
    for before, after in zip(batch, ratio):
        old = [logp for row in after.rows for logp, own in zip(row.old_logp or [], row.mask) if own]
        sampled = [logp for row in before.rows for logp, own in zip(next(scored), row.mask) if own]
        assert old == (pytest.approx(sampled, abs=1e-4) if before.enriched else [])
    assert all(row.old_logp is None for t in batch for row in t.rows)


def test_as_sampled_trains_on_the_batch_that_was_played(tmp_path, monkeypatch):
    played, trained, plain_rollout, plain_update = [], [], train.rollout, train.update
    monkeypatch.setattr(train, "rollout", lambda *args, **limits: played.append(plain_rollout(*args, **limits)) or played[-1])
    monkeypatch.setattr(train, "update", lambda model, optimizer, batch, *rest: (
        trained.append(batch), plain_update(model, optimizer, batch, *rest))[1])
    grpo.main([*SMALL, "--steps", "1", "--eval-every", "0", "--enrich", "ag-always", "--enrich-probability", "1",
               "--out", str(tmp_path / "run")])
    assert len(played) == len(trained) == 1 and all(one is two for one, two in zip(*played, *trained, strict=True))
    assert all(t.turns[0].hint for t in trained[0])


@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_ratio_is_to_what_sampled(base, word_chat, minibatches):
    """A row whose old log-probs are lower by log 2 has ratio 2: a positive advantage weighs twice, unclipped."""
    batch = hinted_batch(word_chat)[1::2]

    def gradient(shift):
        model = add_lora(base, rank=2)
        rows = [row for t in batch for row in t.rows]
        old = row_logps(model, rows, word_chat.pad_id)
        for row, old_T in zip(rows, old):
            row.old_logp = None if shift is None else [logp - shift for logp in old_T]
        algorithm = Algorithm("reinforce", lambda m: -((m.logp_BT - m.old_logp_BT).exp() * m.advantages_B[:, None])[
            m.mask_BT].sum() / m.num_tokens, None, (0.2, 0.2))
        how = UpdateOptions(word_chat.pad_id, minibatches=minibatches, max_grad_norm=1e9)
        stats = update(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0), batch,
                       torch.ones(len(batch)), algorithm, how)
        model.unload()
        return stats

    plain, same, double = gradient(None), gradient(0.0), gradient(torch.log(torch.tensor(2.0)).item())
    assert same["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4) and plain["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert double["grad_norm"] == pytest.approx(2 * plain["grad_norm"], rel=1e-3)
    assert double["ratio_max"] == pytest.approx(2, rel=1e-3) and double["loss"] == pytest.approx(2 * plain["loss"], rel=1e-3)
