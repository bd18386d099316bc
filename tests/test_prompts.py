"""tools/prompts.py, `python distill.py --prompts`: what an editor is asked, of real episodes."""
import json
import subprocess
import sys

import pytest
from conftest import ROOT

from envs import BadInput
from tools import prompts


def asked(capsys, *argv):
    """[(system, user)] of what is printed, and the last line."""
    prompts.main(["--prompts", *argv])
    out = capsys.readouterr().out
    pieces = [piece.partition("-" * 40 + " user\n") for piece in out.split("=" * 40 + " system\n")[1:]]
    return [(system, user) for system, _, user in pieces], out.splitlines()[-1]


def test_every_kind_of_prompt_is_printed_once_with_real_episodes(capsys, tmp_path):
    state = tmp_path / "state.md"
    state.write_text("- Mind the alarm.\n")
    shown, last = asked(capsys, "--state", str(state), "--edits-first", "3")
    assert [("Sort the failures" in system, "Sort what" in system, "read episodes" in system, "List 1" in system, "Rank" in system)
            for system, _ in shown] == [(True, *[False] * 4), (False, False, True, False, False), (False, True, *[False] * 3),
                                        (False, False, True, False, False), (False, False, False, True, False), (*[False] * 4, True)]
    assert all("## Notes\n\n- Mind the alarm." in user and "a rejected edit" in user for _, user in shown)
    assert "at most 3 edits" in shown[0][0] and "at most 6 edits" in shown[1][0] and shown[-1][1].count("support") > 3
    assert "### Episode 1 of 2 (failure" in shown[0][1] and "> " in shown[0][1]
    assert "6 episodes of keydoor, of which 3 succeeded" in last


def test_searchqa_shows_the_right_answers_to_the_editor(capsys, tmp_path):
    file = tmp_path / "questions.json"
    file.write_text(json.dumps([{"question": f"What is {n}?", "answers": [f"gold-{n}"], "context": f"It is about {n}.", "split": split}
                                for split in ("train", "valid", "test") for n in range(4)]))
    shown, _ = asked(capsys, "--env", "searchqa", "--env-options", f"data={file}")
    assert "Right answers: gold-" in shown[0][1] and "Answer that was read: I do not know." in shown[0][1] and "What is" in shown[0][1]


def test_it_runs_as_a_program_and_says_in_one_line_what_is_wrong():
    done = subprocess.run([sys.executable, "distill.py", "--prompts", "--env", "nowhere"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: unknown environment") and done.stderr.count("\n") == 1
    with pytest.raises(BadInput, match="--editor count"):
        prompts.main(["--prompts", "--env", "searchqa", "--editor", "count"])
