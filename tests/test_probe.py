"""tools/probe.py: the paper's probe, on a real tokenizer and BFCL's real back end."""
import json

import pytest
import torch
from conftest import needs_bfcl, tiny_qwen3

from envs import BadInput
from rl.chat import Chat
from rl.model import add_lora
from tools import probe

pytestmark = needs_bfcl


def test_the_options_are_what_the_standard_tool_returns_and_what_enrichment_adds():
    found = probe.outputs()
    assert list(found) == ["cd", "mkdir", "touch", "rm", "rmdir", "mv", "cp", "echo"]
    for call, usual, enriched in found.values():
        assert "error" not in usual.lower() and enriched.startswith(usual + "\n") and "Current directory: /workspace" in enriched
    assert found["cd"][2].endswith("Current directory: /workspace/reports\nIt contains: may.txt") and found["mkdir"][1] == "None"


@pytest.mark.parametrize("tokenizer", ["qwen3"], indirect=True)
def test_a_probability_is_the_models_own_and_the_mean_over_both_orders(tokenizer):
    model = add_lora(tiny_qwen3(len(tokenizer)), rank=2)
    chat = Chat(tokenizer)
    found = probe.probe(model, chat)
    call, usual, enriched = probe.outputs()["mv"]
    p = []
    for a, b in ((usual, enriched), (enriched, usual)):
        prompt = chat.prompt([("user", probe.QUESTION.format(call=call, a=a, b=b))])
        p.append(model(input_ids=torch.tensor([prompt])).logits[0, -1].float().softmax(-1)[tokenizer.convert_tokens_to_ids(["A", "B"])])
    assert found["mv"] == pytest.approx([((p[0][0] + p[1][1]) / 2).item(), ((p[0][1] + p[1][0]) / 2).item()], rel=1e-3)


@pytest.mark.parametrize("tokenizer", ["qwen3"], indirect=True)
def test_a_love_of_one_letter_shows_nothing_and_a_love_of_the_path_does(tokenizer, monkeypatch):
    chat, (a, b) = Chat(tokenizer), tokenizer.convert_tokens_to_ids(["A", "B"])
    monkeypatch.setattr(probe, "row_logps", lambda model, rows, pad: [[-1.0 if row.ids[-1] == a else -2.0] for row in rows])
    assert all(p == pytest.approx(q) for p, q in probe.probe(None, chat).values())

    def likes_paths(model, rows, pad):
        options = [tokenizer.decode(row.ids).split("A:")[1].split("B:")[:2] for row in rows]
        return [[-0.1 if "/workspace" in option[row.ids[-1] == b] else -3.0] for row, option in zip(rows, options)]

    monkeypatch.setattr(probe, "row_logps", likes_paths)
    assert all(q > 0.9 and p < 0.1 for p, q in probe.probe(None, chat).values())


@pytest.mark.parametrize("tokenizer", ["qwen3"], indirect=True)
def test_every_kept_adapter_is_probed(tokenizer, tmp_path, monkeypatch, capsys):
    """The run's folder is made by hand; the policy is loaded as evaluate.py loads it."""
    run, model, chat = tmp_path / "run", add_lora(tiny_qwen3(len(tokenizer)), rank=2), Chat(tokenizer)
    for step in (None, 10, 20):
        if step:
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.data.normal_(generator=torch.Generator().manual_seed(step))
        model.save_pretrained(run / ("adapter" if step is None else f"adapters/{step:06d}"), selected_adapters=["default"])
    (run / "config.json").write_text(json.dumps({"algorithm": "grpo", "env": "bfcl", "steps": 30}))
    monkeypatch.setattr(probe, "load_policy", lambda config, options: (model, chat))
    probe.main([str(run)])
    rows = [json.loads(line) for line in (run / "probe.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows[::8]] == [0, 10, 20, 30] and len(rows) == 32
    at = {row["step"]: row["p_enriched"] for row in rows if row["operation"] == "cd"}
    assert len({at[0], at[10], at[20]}) == 3 and at[30] == at[20]  # by hand: the model holds the last weights
    assert (run / "probe.png").exists() and "mean" in capsys.readouterr().out
    for path in (run / "adapters").iterdir():
        path.rename(run / path.name)
    with pytest.raises(BadInput, match="kept no adapters"):
        probe.main([str(run)])


@pytest.mark.parametrize("tokenizer", ["words"], indirect=True)
def test_a_tokenizer_without_the_letters_is_refused(tokenizer):
    with pytest.raises(BadInput, match="no token for A"):
        probe.probe(None, Chat(tokenizer))
