"""rl/options.py: what is refused before anything is loaded or written, and presets that the user's own options win over."""
import dataclasses

import pytest
from conftest import ROOT, SMALL

import dapo
import evaluate
import grpo
import gspo
from envs import BadInput, env_class
from envs.keydoor import KeyDoor
from funnel.options import FunnelOptions
from rl import presets
from rl.logs import read
from rl.options import Config, parse
from rl.presets import PRESETS
from rl.runs import about
from test_plan import TINY
from tools import show

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


# Defaults of an environment

class Patient(KeyDoor):
    """Fake: the built-in game with defaults of its own."""
    defaults = {"history": "recent:2", "max_context": 512, "max_new_tokens": 12}


OWN = ["--env", "test_options:Patient", "--model", str(ROOT / "tiny-keydoor")]


def test_an_environments_default_stands_where_the_user_gives_none():
    for common in (Config, FunnelOptions, evaluate.EvaluateOptions):
        config = parse(common, OWN, common=common)
        assert (config.history, config.max_context, config.max_new_tokens) == ("recent:2", 512, 12)
        config = parse(common, [*OWN, "--history=full", "--max_context", "99"], common=common)
        assert (config.history, config.max_context, config.max_new_tokens) == ("full", 99, 12)
    assert parse(show.ShowOptions, OWN[:2], common=show.ShowOptions).history == "recent:2"
    plain = parse(Config, [])
    assert (plain.history, plain.max_context, plain.max_new_tokens) == ("full", 2048, 32)


@pytest.mark.parametrize("name", ["alfworld", "searchqa", "webshop", "sciworld", "bfcl", "keydoor"])
def test_defaults_are_options_that_the_programs_take(name):
    defaults = env_class(name).defaults
    assert set(defaults) <= {"history", "max_context", "max_new_tokens"}
    config = parse(Config, ["--env", name])  # refuses what cannot be
    assert all(getattr(config, key) == value for key, value in defaults.items())
    assert (name == "alfworld") == config.history.startswith("recent:")


def test_a_preset_is_planned_for_the_environments_context(capsys):
    config = parse(Config, ["--model", "Qwen/Qwen3-4B", "--preset", "24gb", "--env", "alfworld"])
    assert config.max_context == env_class("alfworld").defaults["max_context"] and config.num_envs < PRESETS["24gb"]["num_envs"]
    assert "planned anew" in capsys.readouterr().err


def test_config_says_what_was_used_and_a_run_from_before_the_default_goes_on_with_its_own(tmp_path):
    folder, small = tmp_path / "run", [*SMALL, *OWN, "--steps", "1", "--eval-every", "0", "--eval-episodes", "1"]
    grpo.main([*small, "--history", "full", "--max-context", "2048", "--max-new-tokens", "32", "--out", str(folder)])  # as it then was
    again = [*small, "--steps", "2", "--out", str(folder), "--resume"]
    with pytest.raises(BadInput, match="has --max-new-tokens 32, not 12: resume with its options"):
        grpo.main(again)
    grpo.main([*again, "--history", "full", "--max-context", "2048", "--max-new-tokens", "32"])
    assert [row["step"] for row in read(folder / "metrics.jsonl")] == [1, 2]
    grpo.main([*small, "--out", str(tmp_path / "new")])
    config = about(tmp_path / "new")
    assert (config["history"], config["max_context"], config["max_new_tokens"]) == ("recent:2", 512, 12)


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
