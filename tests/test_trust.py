"""What a run survives: kills, Ctrl-C, broken checkpoints, broken environments, gradients that are not finite, full disks,
clocks that jump, hostile text. docs/trust.md is the table.

KILLS=5 python -m pytest -m slow tests/test_trust.py -k killed     # five cases a program instead of one
"""
import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, FakeEnv

import grpo
import gspo
from envs import BadInput, parse_action, plain
from envs.toolcalls import InvalidAction, parse_calls, parse_tool_calls
from envs.keydoor import KeyDoor
from funnel.edits import parse_edits
from funnel.state import apply_edits
from rl import learner, runs, train
from rl.chat import Chat
from rl.logs import read
from rl.rollout import Request, rollout

KILLS = int(os.environ.get("KILLS", "1"))
TIMES = ("seconds", "per_second", "peak_memory_bytes")  # what a stop may change
TRAIN = ["--env-options", "stages=2", "--steps", "6", "--tasks-per-step", "2", "--group", "2", "--save-every", "2",
         "--eval-every", "3", "--eval-episodes", "4", "--max-new-tokens", "8"]
LOOP = ["--rounds", "2", "--steps", "3", "--reflection-batch", "8", "--instances", "8", "--tasks-per-step", "2", "--group", "2",
        "--eval-episodes", "8", "--max-new-tokens", "8"]
PROGRAMS = {"grpo": TRAIN, "dapo": TRAIN, "gspo": [*TRAIN, "--minibatches", "2"], "distill": LOOP}


def start(program, folder, *more):
    return subprocess.Popen([sys.executable, str(ROOT / f"{program}.py"), *PROGRAMS[program], "--out", str(folder), *more],
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=folder.parent,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})


def finish(program, folder, *more):
    process = start(program, folder, *more)
    said = process.communicate()[1]
    assert process.returncode == 0, said
    return said


def outcome(folder):
    """Everything that a run has found: lines without times, and the files of the adapter and the states, byte for byte."""
    found = {name: [{key: value for key, value in row.items() if not key.endswith(TIMES)} for row in read(folder / name)]
             for name in ("metrics.jsonl", "evaluations.jsonl", "rollouts.jsonl", "rounds.jsonl")}
    files = [*(folder / "adapter").glob("*.safetensors"), *folder.glob("states/*.md")]
    return found | {path.name: path.read_bytes() for path in files}


def lines(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The outcome of each program when nothing happens, made when first asked for."""
    made = {}

    def outcome_of(program):
        if program not in made:
            folder = tmp_path_factory.mktemp(program) / "run"
            finish(program, folder)
            made[program] = outcome(folder)
        return made[program]

    return outcome_of


# Kills

@pytest.mark.slow
@pytest.mark.parametrize("kill", range(KILLS))
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_killed_run_that_is_resumed_equals_an_unbroken_one(program, kill, unbroken, tmp_path):
    """Killed at a random moment once some random number of lines is written, and again, then resumed to the end."""
    rng, folder = random.Random(f"{program} {kill}"), tmp_path / "run"
    want = unbroken(program)
    for attempt in range(2):
        process = start(program, folder, *["--resume"] * attempt)
        until, pause = rng.randint(0, len(want["metrics.jsonl"]) - 1), rng.uniform(0, 0.5)
        while process.poll() is None and (not folder.exists() or lines(folder) < until):
            time.sleep(0.005)
        time.sleep(pause)
        process.kill()
        process.communicate()
        if not folder.exists():  # killed before it was made
            folder.mkdir()
    if process.returncode:
        process = start(program, folder, "--resume")
        said = process.communicate()[1]
        assert process.returncode == 0 or "has done its 6 steps" in said, said  # killed after its last line: no picture
    assert outcome(folder) == want


@pytest.mark.slow
def test_ctrl_c_ends_the_step_saves_and_says_how_to_go_on(unbroken, tmp_path):
    folder = tmp_path / "run"
    process = start("grpo", folder, "--save-every", "100")
    while lines(folder) < 2:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    said = process.communicate()[1]
    assert process.returncode == 130 and "--resume" in said and "Traceback" not in said, said
    step = json.loads((folder / "checkpoint" / "step.json").read_text())["step"]
    assert step == lines(folder) < 6
    finish("grpo", folder, "--resume")
    assert outcome(folder) == unbroken("grpo")


# Checkpoints

def cut(checkpoint):
    path = checkpoint / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:1000])


def another_runs(checkpoint):
    kept = json.loads((checkpoint / "step.json").read_text())
    (checkpoint / "step.json").write_text(json.dumps(kept | {"run": "0" * 64}))


BREAK = {"cut": (cut, "not those that were saved"), "another run's": (another_runs, "of another run"),
         "no step": (lambda checkpoint: (checkpoint / "step.json").write_text("{"), "step.json cannot be read"),
         "a file more": (lambda checkpoint: (checkpoint / "adapter_model.bin").write_bytes(b"x"), "not those that were saved")}


@pytest.mark.parametrize("how", BREAK)
def test_a_broken_checkpoint_is_refused_and_the_one_before_it_used(how, tmp_path, capsys):
    whole, folder = tmp_path / "whole", tmp_path / "run"
    gspo.main([*TRAIN, "--out", str(whole)])
    gspo.main([*TRAIN, "--out", str(folder), "--steps", "4"])
    break_it, said = BREAK[how]
    break_it(folder / "checkpoint")
    capsys.readouterr()
    gspo.main([*TRAIN, "--out", str(folder), "--resume"])
    assert said in (err := capsys.readouterr().err) and "the one before, step 2" in err
    assert outcome(folder)["metrics.jsonl"] == outcome(whole)["metrics.jsonl"]
    assert outcome(folder)["adapter_model.safetensors"] == outcome(whole)["adapter_model.safetensors"]
    for checkpoint in ("checkpoint", "checkpoint.old"):
        cut(folder / checkpoint)
    with pytest.raises(BadInput, match="no checkpoint can be used.*--overwrite"):
        gspo.main([*TRAIN, "--out", str(folder), "--steps", "7", "--resume"])


class Trap:
    """Unpickled, it makes a file: a stand-in for foreign code."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


def test_an_adapter_that_is_a_pickle_is_not_run(tmp_path):
    good, sprung = tmp_path / "run", tmp_path / "sprung"
    grpo.main([*TRAIN, "--steps", "1", "--out", str(good)])
    adapter = shutil.copytree(good / "adapter", tmp_path / "adapter")
    (adapter / "adapter_model.safetensors").unlink()
    with open(adapter / "adapter_model.bin", "wb") as file:
        pickle.dump({"base_model.model.lora_A.weight": Trap(str(sprung))}, file)
    with pytest.raises(BadInput, match="cannot load"):
        grpo.main([*TRAIN, "--out", str(tmp_path / "new"), "--adapter", str(adapter)])
    torch.save(Trap(str(sprung)), good / "checkpoint" / "optimizer.pt")
    kept = json.loads((good / "checkpoint" / "step.json").read_text())
    (good / "checkpoint" / "step.json").write_text(json.dumps(kept | {"sha256": runs.sums(good / "checkpoint")}))
    with pytest.raises(Exception, match="[Ww]eights.only|cannot"):  # even with sums that fit
        grpo.main([*TRAIN, "--out", str(good), "--steps", "2", "--resume"])
    assert not sprung.exists()


# Environments

class Broken(FakeEnv):
    """Does to each of its tasks what the task is called."""

    def step(self, action):
        kind, (observation, *rest) = self.task, super().step(action)
        if kind == "raises":
            raise ValueError("no \x1b[31m such room")
        if kind == "hangs":
            while True:
                try:
                    time.sleep(30)
                except Exception:  # it swallows what it can
                    pass
        return ({"bytes": b"\xff", "none": None, "list": ["a"]}.get(kind, "a " * 250_000 if kind == "long" else observation), *rest)

    def reset(self, *, task, seed):
        self.task = task
        if task == "no reset":
            raise OSError("gone")
        return super().reset(task="wait wait wait wait", seed=seed)


@pytest.mark.parametrize("kind, end, said", [
    ("raises", "env_error", "ValueError: no"), ("hangs", "env_error", "no answer in 0.2 s"), ("bytes", "env_error", "TypeError"),
    ("none", "env_error", "TypeError"), ("list", "env_error", "TypeError"), ("no reset", "env_error", "OSError: gone"),
    ("long", "context_full", "a prompt of")])
def test_a_broken_environment_ends_its_episode_alone(word_chat, capsys, kind, end, said):
    tasks, wait = ["fine", kind, "fine"], [*word_chat.text_ids("wait"), word_chat.tokenizer.eos_token_id]
    started = time.perf_counter()
    played = rollout(lambda prompts: [wait] * len(prompts), word_chat, [Broken() for _ in tasks],
                     [Request(task, n, n) for n, task in enumerate(tasks)], max_turns=3, step_timeout=0.2)
    assert [t.end for t in played] == ["turn_limit", end, "turn_limit"] and said in played[1].error
    assert time.perf_counter() - started < 20 and "\x1b" not in capsys.readouterr().err
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_an_environment_that_always_breaks_is_one_line(tmp_path, monkeypatch):
    def broken(*_):
        raise ConnectionError("the server is gone")

    monkeypatch.setattr(KeyDoor, "step", broken)
    with pytest.raises(BadInput, match="broke in every episode, last with ConnectionError"):
        grpo.main([*TRAIN, "--eval-every", "0", "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_a_killed_jvm_ends_its_episodes_and_the_run_goes_on(word_chat):
    pytest.importorskip("scienceworld", reason="the package scienceworld is not installed")
    if shutil.which("java") is None:
        pytest.skip("no Java")
    from envs.sciworld import SciWorld
    envs, turns = [SciWorld(admissible="none") for _ in range(2)], []

    def act(prompts):
        turns.append(len(prompts))
        if len(turns) == 2:
            envs[0]._java.process.kill()
            envs[0]._java.process.wait()
        return [[*word_chat.text_ids("look"), word_chat.tokenizer.eos_token_id] for _ in prompts]

    tasks = [task for task in SciWorld.tasks("train") if task.startswith("lifespan-longest-lived")][:4]
    played = rollout(act, word_chat, envs, [Request(task, n, n) for n, task in enumerate(tasks)], max_turns=3, max_context=10**5)
    assert [t.end for t in played] == ["env_error"] * 2 + ["turn_limit"] * 2
    for env in envs:
        env.close()


# Gradients, disks, clocks

def test_a_step_whose_gradient_is_not_finite_is_left_out_and_five_in_a_row_stop(tmp_path, monkeypatch):
    real, bad_steps, calls = learner.token_logps, {2, 4}, []

    def sometimes_nan(*args):
        logp_BT, entropy_BT = real(*args)
        return logp_BT * (torch.nan if len(calls) in bad_steps else 1.0), entropy_BT

    def count(model, optimizer, batch, advantages_N, algorithm, how, *more):
        calls.append(how.seed)
        return update(model, optimizer, batch, advantages_N, algorithm, how, *more)

    update = train.update
    monkeypatch.setattr(learner, "token_logps", sometimes_nan)
    monkeypatch.setattr(train, "update", count)
    options = [*TRAIN[:2], *TRAIN[4:], "--env-options", "stages=1", "commands=3", "--tasks-per-step", "8"]
    grpo.main([*options, "--steps", "5", "--out", str(tmp_path / "some")])
    assert [row["skipped_steps"] for row in read(tmp_path / "some" / "metrics.jsonl")] == [0, 1, 0, 1, 0]
    calls.clear()
    bad_steps |= set(range(3, 100))
    bad_steps -= {2}
    with pytest.raises(BadInput, match="five steps in a row.*--resume"):
        grpo.main([*options, "--steps", "20", "--out", str(tmp_path / "all")])
    checkpoint = tmp_path / "all" / "checkpoint"
    assert json.loads((checkpoint / "step.json").read_text())["step"] == 2
    from safetensors.torch import load_file
    assert all(t.isfinite().all() for t in load_file(checkpoint / "adapter_model.safetensors").values())
    monkeypatch.setattr(learner, "token_logps", real)
    grpo.main([*options, "--steps", "6", "--out", str(tmp_path / "all"), "--resume"])
    assert [row["step"] for row in read(tmp_path / "all" / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_checkpoint_before_stays(tmp_path):
    """RLIMIT_FSIZE stands in for the disk: a write beyond it fails."""
    folder = tmp_path / "run"
    finish("grpo", folder, "--steps", "2")
    size = (folder / "checkpoint" / "optimizer.pt").stat().st_size
    done = subprocess.run([sys.executable, str(ROOT / "grpo.py"), *TRAIN, "--out", str(folder), "--resume"], text=True,
                          capture_output=True, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
                          preexec_fn=lambda: (signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
                                              resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))))
    assert done.returncode == 2 and "the disk is full" in done.stderr and "--resume" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    finish("grpo", folder, "--resume")
    assert len(read(folder / "metrics.jsonl")) == 6


@pytest.mark.parametrize("broken", [b'{"a": "\xff"}', b'{"a": ', b"\x00\x00"])
def test_a_broken_line_of_a_log_is_left_out_at_the_end_and_named_elsewhere(tmp_path, broken):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + broken)
    assert read(path) == [{"step": 1}]
    path.write_bytes(b'{"step": 1}\n' + broken + b'\n{"step": 2}\n')
    with pytest.raises(BadInput, match="line 2, is not JSON"):
        read(path)


@pytest.mark.slow
def test_a_clock_that_jumps_changes_nothing(tmp_path, monkeypatch):
    grpo.main([*TRAIN, "--out", str(tmp_path / "one")])
    hours = iter([n * (-1) ** n * 3600.0 for n in range(10**6)])
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(hours))
    grpo.main([*TRAIN, "--out", str(tmp_path / "two")])
    assert outcome(tmp_path / "one") == outcome(tmp_path / "two")
    assert all(0 <= row["rollout_seconds"] < 600 for row in read(tmp_path / "two" / "metrics.jsonl"))


# Hostile text

PIECES = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "assistant\n", "system\n", "</think>", "<tool_call>", "</tool_response>",
          "<action>", "</action>", "\x00", "\x1b[2J", "\x1b]0;x\x07", "\r", "\u202e", "\u2028", "\ue000", "\ue001", "\ud800", "\udfff",
          "\ufeff", "</script>", "<img src=x onerror=alert(1)>", "../../etc/passwd", "{{7*7}}", "${x}", "__import__('os')",
          "lambda: 0", '{"edits": [', '"op": "append"', "]}", "\\", "'", '"', "`", "a" * 3000, " ", "\n", "é", "漢", "🙂", "<", "|", ">",
          "[", "]", "(", ")", "{", "}", ",", "=", ".", ":", "*", "-", "ls", "a"]


def hostile(rng):
    whole = rng.random()
    if whole < 0.1:
        return "".join(chr(rng.randrange(0x110000)) for _ in range(rng.randint(0, 30)))
    return "".join(rng.choice(PIECES) for _ in range(rng.randint(0, 12)))


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["words", "toy", "smollm2_tokenizer"], indirect=True)
def test_hostile_text_forges_no_turn_and_breaks_nothing(tokenizer):
    """10,000 strings as observation, action and edit."""
    chat, rng = Chat(tokenizer), random.Random(0)
    scaffold = [i for i in chat.prompt([("system", "x"), ("user", "x")]) if i in chat.special_ids]
    for _ in range(10_000):
        text = hostile(rng)
        ids = chat.prompt([("system", text), ("user", text[::-1])])
        assert [i for i in ids if i in chat.special_ids] == scaffold
        assert "\x1b" not in plain(text) and "\x1b" not in parse_action(plain(text))
        assert isinstance(parse_action(text), str) and "\n" not in parse_action(text)
        edits, dropped = parse_edits(text, 5)
        state, applied, refused = apply_edits("- one\n- two", edits, 500)
        assert len(state) <= 500 and len(applied) + len(refused) == len(edits)


def test_hostile_text_is_no_call_or_an_invalid_one(recwarn):
    """10,000 strings, as they are and where a call has its argument."""
    rng, calls = random.Random(1), 0
    for n in range(10_000):
        text = hostile(rng)
        text = (text, f"[ls({text})]", f'[ls(a="{text}")]', f"<tool_call>{text}</tool_call>",
                f'<tool_call>{{"name": "ls", "arguments": {text}}}</tool_call>',
                f"<tool_call><function=ls><parameter=a>{text}</parameter></function></tool_call>")[n % 6]
        for parse, how in ((parse_calls, ()), (parse_tool_calls, ({"ls": {"a": {"type": "array"}}},))):
            try:
                found = parse(text, *how)
            except InvalidAction as error:
                assert len(str(error)) < 200
            else:
                assert all(isinstance(call.name, str) for call in found)
                calls += len(found)
    assert calls > 1000  # strings are arguments too
    assert not recwarn.list  # Python's parser warns of what it is given, on the terminal


def test_a_state_or_task_of_hostile_text_leaves_nothing_outside_the_run(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    before = sorted(path for path in tmp_path.rglob("*"))
    with pytest.raises(BadInput):
        grpo.main([*TRAIN, "--out", str(inside / "run"), "--tasks", "../../../../tmp/x\x1b[2J"])
    assert sorted(path for path in tmp_path.rglob("*")) == before
