"""rl/options.py: what is refused before anything is loaded or written, and presets that the user's own options win over."""
import dataclasses

import pytest
from conftest import SMALL

import dapo
import evaluate
import grpo
import gspo
from envs import BadInput
from rl import presets
from rl.options import Config, parse
from rl.presets import PRESETS
from test_plan import TINY

BAD = [(["--group", "1"], "at least two|at least 2"), (["--steps", "0"], "steps"), (["--steps", "-3"], "steps"),
       (["--steps", "x"], "steps"), (["--lr", "0"], "lr"), (["--lora-rank", "0"], "lora-rank"), (["--bits", "3"], "bits"),
       (["--temperature", "0"], "temperature"), (["--temperature", "-1"], "temperature"), (["--history", "window:0"], "history"),
       (["--history", "all"], "history"), (["--history", "recent:0"], "history"), (["--enrich-history", "all"], "enrich-history"), (["--env", "nope"], "nope"), (["--model", "./nope"], "no folder"),
       (["--model", "tests"], "config.json"), (["--adapter", "./nope"], "adapter"), (["--tasks", "oak"], "oak"),
       (["--env-options", "stages=0"], "stages"), (["--env-options", "doors=2"], "doors"), (["--env-options", "x"], "key=value"),
       (["--frobnicate", "3"], "frobnicate"), (["--max-context", "20"], "max-context"), (["--optimizer", "sgd"], "optimizer"),
       (["--warm-start", "silver"], "warm-start"), (["--resume"], "no run in"), (["--resume", "--overwrite"], "exclude"),
       (["--minibatches", "0"], "minibatches"), (["--beta", "-1"], "beta"), (["--lr", "inf"], "lr"),
       (["--temperature", "nan"], "temperature"), (["--history", "window:\u00b2"], "history"), (["--eps", "0"], "eps"),
       (["--env", "envs/keydoor.py"], "unknown environment"), (["--step", "5"], "--step")]


@pytest.mark.parametrize("argv, word", BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_bad_input_is_one_line_and_leaves_nothing(argv, word, tmp_path):
    with pytest.raises(BadInput, match=word) as caught:
        grpo.main([*SMALL, "--out", str(tmp_path / "run"), *argv])
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize("main, argv, word", [
    (dapo.main, ["--max-rounds", "0"], "max-rounds"), (dapo.main, ["--overlong-max", "-5"], "overlong"),
    (dapo.main, ["--overlong-max", "5", "--overlong-cache", "6"], "overlong"), (gspo.main, ["--eps-low", "-1"], "eps-low"),
    (gspo.main, ["--ratio", "token"], "--ratio must be trajectory or row"), (dapo.main, ["--beta", "-1"], "beta"),
    (gspo.main, ["--entropy-coef", "-1"], "entropy-coef"), (dapo.main, ["--entropy-coef", "inf"], "entropy-coef"),
    (grpo.main, ["--entropy-coef", "nan"], "entropy-coef"), (grpo.main, ["--invalid-action-penalty", "-0.1"], "invalid-action-penalty"),
    (gspo.main, ["--invalid-action-penalty", "inf"], "invalid-action-penalty")])
def test_bad_input_to_one_algorithm(main, argv, word, tmp_path):
    with pytest.raises(BadInput, match=word):
        main([*SMALL, "--out", str(tmp_path / "run"), *argv])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("argv, word", [
    (["somewhere"], "no finished run"), (["--samples", "2"], "temperature"), (["--samples", "0"], "samples"),
    (["--split", "dev"], "dev"), (["--hinted"], "--enrich"), (["--hinted", "--enrich", "ag-late", "--max-turns", "2"], "window")])
def test_bad_input_to_evaluate(argv, word):
    with pytest.raises(BadInput, match=word):
        evaluate.main(argv)


def test_every_option_has_a_help_text_and_the_named_ones_exist():
    names = {field.name for field in dataclasses.fields(Config)}
    assert all(field.metadata["help"] for field in dataclasses.fields(Config) if field.init)
    assert {"seed", "steps", "out", "env", "model", "group", "tasks", "lr", "bits", "lora_rank", "max_turns", "history",
            "temperature"} <= names


# Presets

def test_a_preset_sets_what_the_user_did_not(capsys):
    argv = ["--model", "Qwen/Qwen3-4B-Instruct-2507", "--preset", "24gb"]
    config = parse(Config, argv)
    for name, value in PRESETS["24gb"].items():
        assert getattr(config, name) == value
    assert parse(Config, [*argv, "--num-envs=3"]).num_envs == 3 and capsys.readouterr().err == ""
    assert parse(Config, [*argv, "--num-envs", "3"]).micro_batch_tokens == config.micro_batch_tokens


@pytest.mark.parametrize("argv", [["--model", "tiny-llama"], ["--model", "tiny-llama", "--max-context", "1024"]])
def test_a_preset_is_planned_anew_for_what_it_was_not_made_for(argv, monkeypatch, capsys):
    monkeypatch.setattr(presets, "config_of", lambda name: TINY)
    config = parse(Config, [*argv, "--preset", "24gb"])
    assert "was made for Qwen/Qwen3-4B; planned anew for tiny-llama: --bits 16" in capsys.readouterr().err
    assert config.num_envs == presets.MOST_ENVS and config.max_context == (1024 if "--max-context" in argv else 4096)


@pytest.mark.parametrize("argv, message", [(["--preset", "12gb", "--model", "Qwen/Qwen3-4B"], "24gb, 48gb, 80gb"),
                                           (["--preset", "24gb"], "pass --model")])
def test_a_preset_that_makes_no_sense_is_one_line(argv, message):
    with pytest.raises(BadInput, match=message):
        parse(Config, argv)
