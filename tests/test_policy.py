"""rl/policy.py: the policy of a run, from its base model and its adapter."""
import shutil

import pytest
from conftest import ROOT, SMALL, metrics

import grpo
from envs import BadInput
from envs.keydoor import KeyDoor
from rl.logs import read
from rl.options import Config, parse
from rl.policy import load_policy
from rl.tiny import SHIPPED


def test_training_can_start_from_an_adapter(run, tmp_path):
    grpo.main([*SMALL, "--out", str(tmp_path / "run"), "--adapter", str(run / "adapter")])
    before = [row for row in read(run / "evaluations.jsonl") if row["split"] == "valid"][-1]["success"]
    assert read(tmp_path / "run" / "evaluations.jsonl")[0]["success"] == before


def test_an_adapter_of_another_base_is_refused(run, tmp_path):
    other = shutil.copytree(ROOT / "tiny-keydoor", tmp_path / "other-model")
    with pytest.raises(BadInput, match="was trained on"):
        grpo.main([*SMALL, "--out", str(tmp_path / "new"), "--model", str(other), "--adapter", str(run / "adapter")])


def test_weights_that_are_no_weights_are_one_line(tmp_path):
    shutil.copytree(SHIPPED, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(BadInput, match="cannot load the model"):
        grpo.main([*SMALL, "--model", str(tmp_path / "model"), "--out", str(tmp_path / "run")])
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="another --out"):
        grpo.main([*SMALL, "--out", str(tmp_path / "file" / "run")])


def test_the_environment_is_told_how_the_models_template_writes_calls(tmp_path, monkeypatch):
    monkeypatch.setattr(KeyDoor, "tool_call_form", "json")
    load_policy(parse(Config, []), {})
    assert KeyDoor.tool_call_form is None       # the game's own template writes none
    shutil.copytree(SHIPPED, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
        "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
        "</function>\n</tool_call>{% endfor %}{% endfor %}")
    load_policy(parse(Config, ["--model", str(tmp_path / "model")]), {})
    assert KeyDoor.tool_call_form == "xml"


def test_kl_to_the_reference_is_zero_before_the_first_update(tmp_path):
    argv = [*SMALL, "--out", str(tmp_path / "run"), "--beta", "0.1", "--env-options", "stages=1", "commands=3",
            "--warm-start", "gold", "--warm-start-steps", "2"]
    grpo.main(argv)
    first, second = metrics(tmp_path / "run")
    assert abs(first["kl_reference"]) < 1e-9 < second["kl_reference"]
    assert (tmp_path / "run" / "checkpoint" / "reference" / "adapter_model.safetensors").exists()
    grpo.main([*argv, "--steps", "3", "--resume"])
    assert metrics(tmp_path / "run")[-1]["kl_reference"] > second["kl_reference"] / 10
