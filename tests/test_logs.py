"""rl/logs.py and rl/tokens.py: lines of a run. A line that is broken: test_trust.py."""
import pytest
import torch
from conftest import CLOCK, batch_of, make_rows, play_shouting
from test_report import made

import grpo
from rl.learner import pad, row_logps, token_logps
from rl.logs import episode_metrics, read
from rl.tokens import log_ratios


def test_a_run_stores_its_tokens_and_is_the_same_run(tmp_path):
    small = ["--steps", "2", "--tasks-per-step", "3", "--group", "4", "--eval-episodes", "4", "--eval-every", "0",
             "--minibatches", "2", "--env-options", "stages=2", "commands=4", "--enrich", "ag-always"]
    for name, more in (("plain", []), ("tokens", ["--log-tokens", "4"])):
        grpo.main([*small, *more, "--out", str(tmp_path / name)])
    plain, tokens = tmp_path / "plain", tmp_path / "tokens"
    assert not (plain / "tokens.jsonl").exists() and read(plain / "rollouts.jsonl") == read(tokens / "rollouts.jsonl")
    for one, other in zip(read(plain / "metrics.jsonl"), read(tokens / "metrics.jsonl"), strict=True):
        assert {key: one[key] for key in one.keys() - CLOCK} == {key: other[key] for key in other.keys() - CLOCK}
    lines = read(tokens / "tokens.jsonl")
    assert [line["step"] for line in lines] == [1] * 4 + [2] * 4
    for line in lines:
        assert {key: line[key] for key in line if key not in ("rows", "advantage")} in read(tokens / "rollouts.jsonl")
        said = []
        for row in line["rows"]:  # with a hint in every turn, each is a row of its own
            assert len(row["tokens"]) == len(row["mask"]) and len(row["log_ratio"]) == sum(row["mask"]) > 0
            said += [word for word, own in zip(row["tokens"], row["mask"]) if own and "<|" not in word]
        assert said == " ".join(turn["action"] for turn in line["turns"]).split()
    assert any(line["advantage"] for line in lines) and any(any(row["log_ratio"]) for line in lines for row in line["rows"])
    data = made(tmp_path, tokens).data
    assert sum(bool(e[10]) for e in data["episodes"]) == 8 and len(data["episodes"]) == 24


def test_the_entropy_is_that_of_all_sampled_tokens(policy, word_chat):
    """Those of dead groups too, which the learner does not compute; no entropy at all where nothing was sampled."""
    played = play_shouting(policy, word_chat)
    found = [entropy for t in played for turn in t.turns for entropy in turn.action_ids.entropies]
    rows = [row for t in played for row in t.rows]
    _, entropy_BT = token_logps(policy, *pad(rows, word_chat.pad_id, "cpu"))
    assert len(found) == sum(t.length for t in played) == (entropy_BT != 0).sum()
    metrics = episode_metrics(played, 4)
    assert metrics["entropy"] == pytest.approx(entropy_BT.sum().item() / len(found), abs=1e-4)
    assert metrics["dead_group_fraction"] > 0
    assert "entropy" not in episode_metrics(play_shouting(policy, word_chat, temperature=0.0), 4)


def test_log_ratios_are_after_less_sampled(policy, word_chat):
    rows = make_rows(len(word_chat.tokenizer))
    batch = batch_of([rows[:2], rows[2], rows[3]])
    rows[3].old_logp = [-1.0] * len(rows[3].ids)
    before = row_logps(policy, rows, word_chat.pad_id)
    after = log_ratios(policy, batch, word_chat.pad_id)
    assert after()[0] == [0.0] * batch[0].length
    with torch.no_grad():
        next(p for name, p in policy.named_parameters() if "lora_B" in name).add_(0.3)
    parts = zip(rows, row_logps(policy, rows, word_chat.pad_id), before)
    for trajectory, got in zip(batch, after()):
        want = [new - past for _, (row, now_T, before_T) in zip(trajectory.rows, parts)
                for new, past, own in zip(now_T, row.old_logp or before_T, row.mask) if own]
        assert got == pytest.approx(want, abs=1e-5) and len(got) == trajectory.length and any(got)
