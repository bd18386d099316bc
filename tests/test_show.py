"""tools/show.py: an episode, standard beside enriched, and the schedule as a picture."""
import shutil

import pytest
from conftest import needs_bfcl, needs_simulator

from envs import BadInput
from tools import show


@pytest.mark.parametrize("env, task, words", [
    pytest.param("keydoor", "ash", ["Hint: ", "stages are done", "> take", "Right."], id="keydoor"),
    pytest.param("sciworld", "find-non-living-thing", ["Caution! Begin with", "Goals"], id="sciworld", marks=needs_simulator),
    pytest.param("bfcl", "base/0", ["a good next call is", "Current directory", "> [cd("], id="bfcl", marks=needs_bfcl)])
def test_show(env, task, words, tmp_path, capsys):
    show.main(["--env", env, "--task", task, "--picture", str(tmp_path / "schedule.png")])
    out = capsys.readouterr().out
    assert "turn 1, standard" in out and all(word in out for word in words) and "(the end)" in out
    assert not any(word in line[:58] for word in words[:2] for line in out.splitlines() if line[58:61] == " | ")
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG") and str(tmp_path / "schedule.png") in out


def test_show_refuses_what_it_does_not_know(tmp_path):
    for argv, word in ((["--task", "oak"], "unknown task oak"), (["--env", "nope"], "nope"), (["--enrich", "no"], "ag-early")):
        with pytest.raises(BadInput, match=word):
            show.main([*argv, "--picture", str(tmp_path / "schedule.png")])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("history", ["full", "window:1"])
def test_prompts_as_a_model_reads_them(history, qwen_folder, capsys):
    show.main(["--prompts", "--model", str(qwen_folder / "qwen3_tokenizer"), "--env-options", "stages=4", "--history", history,
               "--enrich", "ag-early"])
    head, *turns = capsys.readouterr().out.split("----- turn ")
    assert f"--history {history}, --enrich-history plain" in head and len(turns) == 4
    for number, turn in enumerate(turns, 1):
        assert turn.startswith(f"{number}: row {number} begins") and turn.count("[[Hint: ") == (number <= 3)
        assert turn.count("{{") == 1 and turn.count("(left out)") == (history == "window:1" and number == 4)
    assert "4 turns, 4 rows of " in turns[-1]


def test_prompts_of_one_row_and_of_the_built_in_tokenizer(capsys):
    show.main(["--prompts", "--enrich", "ag-early", "--enrich-history", "kept"])
    out = capsys.readouterr().out
    assert "row 1 goes on after" in out and "row 2" not in out and out.count("[[hint : ") == 3 and ", 1 rows of " in out


@needs_bfcl
def test_prompts_are_those_of_training(qwen_folder, tmp_path, capsys):
    """Calls in the template's own form; and a template without a place for a system message gets it in the first user message."""
    folder = tmp_path / "folds"
    shutil.copytree(qwen_folder / "qwen3_5_tokenizer", folder)
    argv = ["--prompts", "--model", str(folder), "--env", "bfcl", "--env-options", "format=native", "--enrich", "ag-early"]
    show.main(argv)
    out = capsys.readouterr().out
    assert "{{<tool_call>\n<function=" in out and "[[Hint: a good next call is <tool_call>\n<function=" in out
    page = folder / "chat_template.jinja"
    page.write_text("{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + page.read_text())
    show.main(["--prompts", "--model", str(folder)])
    said = capsys.readouterr()
    assert "it begins the first user message" in said.err and said.out.count("Open every door.") == said.out.count("----- turn")


def test_prompts_refuse_what_has_no_tokenizer(tmp_path, capsys):
    for argv, word in ((["--model", str(tmp_path)], "cannot load a tokenizer"), (["--model", "./nope"], "no folder"),
                       (["--env", "nope"], "nope"), (["--history", "all"], "--history"),
                       (["--enrich-history", "some"], "--enrich-history must be one of plain, kept")):
        with pytest.raises(BadInput, match=word) as caught:
            show.main(["--prompts", *argv])
        assert "\n" not in str(caught.value)
