"""tools/show.py: an episode, standard beside enriched, and the schedule as a picture."""
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
