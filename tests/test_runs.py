"""rl/runs.py: a run's folder, going on with it, and one line for what the user can mend."""
import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import SafetensorError
from conftest import ROOT, SMALL

import dapo
import grpo
import gspo
from envs import BadInput
from rl.logs import read
from rl.runs import cli, fingerprint


def test_a_folder_that_exists_is_never_overwritten_silently(run, tmp_path):
    before = (run / "metrics.jsonl").read_text()
    with pytest.raises(BadInput, match="--resume.*--overwrite.*--out"):
        grpo.main([*SMALL, "--out", str(run)])
    with pytest.raises(BadInput, match="raise --steps"):
        grpo.main([*SMALL, "--out", str(run), "--resume"])
    assert (run / "metrics.jsonl").read_text() == before
    foreign = tmp_path / "thesis"
    foreign.mkdir()
    (foreign / "chapter1.tex").write_text("all of it")
    with pytest.raises(BadInput, match="not a run's folder"):
        grpo.main([*SMALL, "--out", str(foreign), "--overwrite"])
    assert (foreign / "chapter1.tex").exists()


def test_overwrite_starts_again(tmp_path):
    for _ in range(2):
        grpo.main([*SMALL, "--steps", "1", "--out", str(tmp_path / "run"), "--overwrite"])
    assert len(read(tmp_path / "run" / "metrics.jsonl")) == 1


def test_overwrite_keeps_the_old_run_until_the_new_one_has_done_a_step(tmp_path):
    folder = tmp_path / "run"
    grpo.main([*SMALL, "--steps", "1", "--out", str(folder)])
    before = (folder / "config.json").read_text()
    with pytest.raises(BadInput, match="nope"):
        grpo.main([*SMALL, "--out", str(folder), "--overwrite", "--model", "./nope"])
    assert (folder / "config.json").read_text() == before and (folder / "adapter").exists()
    assert list(tmp_path.iterdir()) == [folder]


def test_a_models_folder_is_no_run_to_overwrite(tmp_path):
    model = shutil.copytree(ROOT / "tiny-keydoor", tmp_path / "model")
    with pytest.raises(BadInput, match="not a run's folder"):
        grpo.main([*SMALL, "--out", str(model), "--overwrite"])
    assert (model / "model.safetensors").exists()


# Going on

def test_resume_takes_the_new_learning_rate_and_refuses_another_run(tmp_path):
    folder = tmp_path / "run"
    grpo.main([*SMALL, "--out", str(folder)])
    for main, argv, word in ((grpo.main, ["--lora-rank", "4"], "lora-rank"), (dapo.main, [], "grpo.py"),
                             (grpo.main, ["--env-options", "stages=1"], "env-options"), (grpo.main, ["--beta", "1"], "beta")):
        with pytest.raises(BadInput, match=word):
            main([*SMALL, "--out", str(folder), "--steps", "3", "--resume", *argv])
    config = (folder / "config.json").read_text()
    grpo.main([*SMALL, "--out", str(folder), "--steps", "3", "--resume", "--lr", "1e-7"])
    state = torch.load(folder / "checkpoint" / "optimizer.pt", weights_only=True)
    assert state["param_groups"][0]["lr"] == 1e-7 and config != (folder / "config.json").read_text()


def test_a_run_from_before_enrich_history_kept_its_hints(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    old = json.loads((folder / "config.json").read_text())
    del old["enrich_history"]
    (folder / "config.json").write_text(json.dumps(old | {"history": "window:2"}))
    argv = [*SMALL, "--out", str(folder), "--resume", "--steps", "3"]
    with pytest.raises(BadInput, match="window:2 made other prompts: start another run"):
        grpo.main([*argv, "--history", "window:2"])
    (folder / "config.json").write_text(json.dumps(old))
    kept = json.loads((folder / "checkpoint" / "step.json").read_text())
    kept["run"] = fingerprint(folder)  # as that run wrote it
    (folder / "checkpoint" / "step.json").write_text(json.dumps(kept))
    with pytest.raises(BadInput, match="--enrich-history kept, not plain: resume with its options"):
        grpo.main(argv)
    (folder / "config.json").write_text(json.dumps(old | {"enrich_history": "kept"}))
    assert kept["run"] == fingerprint(folder)  # its checkpoint is still its own
    (folder / "config.json").write_text(json.dumps(old | {"enrich_history": "plain"}))
    assert kept["run"] != fingerprint(folder)


def test_a_run_of_gspo_from_before_ratio_had_one_for_each_row(tmp_path):
    argv = [*SMALL, "--out", str(tmp_path / "run")]
    gspo.main([*argv, "--ratio", "row"])
    config = tmp_path / "run" / "config.json"
    old = json.loads(config.read_text())
    assert old.pop("ratio") == "row"
    config.write_text(json.dumps(old))
    with pytest.raises(BadInput, match="has --ratio row, not trajectory: resume with its options"):
        gspo.main([*argv, "--resume", "--steps", "3"])
    gspo.main([*argv, "--resume", "--steps", "3", "--ratio", "row"])
    assert [row["step"] for row in read(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


def test_a_run_killed_before_its_final_test_can_be_finished(tmp_path):
    folder = tmp_path / "run"
    grpo.main([*SMALL, "--out", str(folder)])
    whole = read(folder / "evaluations.jsonl")
    shutil.rmtree(folder / "adapter")
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in whole[:2]) + '{"step": 2, "sp')
    grpo.main([*SMALL, "--out", str(folder), "--resume"])
    assert read(folder / "evaluations.jsonl") == whole and (folder / "adapter" / "adapter_config.json").exists()


def test_a_run_is_not_resumed_to_a_step_before_its_checkpoint(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    last = read(run / "metrics.jsonl")[-1]["step"]
    (tmp_path / "run" / "evaluations.jsonl").unlink()
    with pytest.raises(BadInput, match=f"pass --steps {last} or more"):
        grpo.main([*SMALL, "--out", str(tmp_path / "run"), "--resume", "--steps", str(last - 1)])


# One line

def test_exit_code_two_one_line_and_no_traceback(tmp_path):
    done = subprocess.run([sys.executable, "grpo.py", "--group", "1"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and not done.stdout


def test_ctrl_c_outside_of_a_training_loop_says_how_to_go_on(capsys):
    def main():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stop:
        cli(main)
    assert stop.value.code == 130 and "--resume goes on" in capsys.readouterr().err


def test_a_full_disk_while_an_adapter_is_written_is_one_line(capsys):
    def main():
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(SystemExit) as stop:
        cli(main)
    assert stop.value.code == 2 and "the disk is full" in capsys.readouterr().err


@pytest.mark.parametrize("error, words", [(torch.OutOfMemoryError("CUDA out of memory"), "lower --num-envs"),
                                          (FloatingPointError("probabilities are not finite"), "lower --lr")])
def test_out_of_memory_and_lost_numbers_outside_of_the_learner_are_one_line(error, words, capsys):
    def main():
        raise error

    with pytest.raises(SystemExit) as stop:
        cli(main)
    assert stop.value.code == 2 and words in capsys.readouterr().err
