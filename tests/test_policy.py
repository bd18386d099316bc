"""rl/policy.py: the policy of a run, from its base model and its adapter."""
import json
import shutil

import pytest
from conftest import ROOT, SMALL, metrics

import evaluate
import grpo
from envs import BadInput
from envs.keydoor import KeyDoor
from funnel import rounds
from rl import policy
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


FUNNEL = ["--rounds", "1", "--steps", "1", "--tasks-per-step", "2", "--group", "2", "--instances", "4", "--reflection-batch", "4",
          "--eval-episodes", "4", "--env-options", "stages=1", "commands=3"]


def with_template(folder, *changes):
    """The shipped model with another chat template."""
    shutil.copytree(SHIPPED, folder)
    page = folder / "chat_template.jinja"
    for old, new in changes:
        assert old in page.read_text()
        page.write_text(page.read_text().replace(old, new))
    return str(folder)


@pytest.mark.parametrize("main, argv", [(grpo.main, SMALL), (rounds.main, FUNNEL)])
def test_a_run_keeps_the_date_of_its_start(main, argv, tmp_path, monkeypatch):  # docs/faults.md, 34
    """The run in the folder is made one that began on another day. Its checkpoint is used, as it is the same run."""
    seen, plain = [], policy.Chat
    monkeypatch.setattr(policy, "Chat", lambda *how: seen.append(plain(*how).render((("user", "."),))) or plain(*how))
    model, out = with_template(tmp_path / "model", ("{% for m", "{{ strftime_now('%d %b %Y') }}{% for m")), tmp_path / "run"
    argv = [*argv, "--model", model, "--out", str(out)]
    main(argv)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"started": "2001-02-03T04:05:06"}))
    main([*argv, "--resume", *(["--steps", "3"] if main is grpo.main else ["--rounds", "2"])])
    assert main is rounds.main or [row["step"] for row in metrics(out)] == [1, 2, 3]
    assert json.loads((out / "config.json").read_text())["started"] == "2001-02-03T04:05:06"
    evaluate.main([str(out)])
    assert ["03 Feb 2001" in prompt for prompt in seen] == [False] + [True] * (len(seen) - 1) and len(seen) > 2
    evaluate.main(["--model", model, "--env-options", "stages=1", "--eval-episodes", "4"])
    assert "03 Feb 2001" not in seen[-1]
    policy.load_frozen(model, 0, False, 64, "2001-02-03")  # a teacher
    assert "03 Feb 2001" in seen[-1]


@pytest.mark.parametrize("main, argv", [(grpo.main, SMALL), (rounds.main, FUNNEL),
                                        (evaluate.main, ["--env-options", "stages=1", "--eval-episodes", "4"])])
def test_a_template_without_a_system_message(main, argv, tmp_path, capsys, monkeypatch):  # docs/faults.md, 36
    """Its text begins the first user message; a template that cannot carry an episode is refused before the first one."""
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{% for m"
    monkeypatch.chdir(tmp_path)
    made, plain = [], policy.carrying_chat
    monkeypatch.setattr(policy, "carrying_chat", lambda *how: made.append(plain(*how)) or made[-1])
    main([*argv, "--model", with_template(tmp_path / "folds", ("{% for m", refuses))])
    assert capsys.readouterr().err.count("it begins the first user message") == len(made) > 0
    assert made[0].prompt([("system", "take"), ("user", "key")]) == made[0].prompt([("user", "take key")])
    left = sorted(tmp_path.rglob("*"))
    drops = with_template(tmp_path / "drops", ("{% for m in messages %}", "{% for m in messages if m.role == 'user' %}"))
    with pytest.raises(BadInput, match="^cannot load the model .*drops, reorders or rewrites messages; it cannot carry an episode$"):
        main([*argv, "--model", drops, *(["--overwrite"] if main is not evaluate.main else [])])
    assert [path for path in sorted(tmp_path.rglob("*")) if "drops" not in str(path)] == left
