"""AppWorld: what is read as code, the known solution, the real engine in its jail, killed and hanging engines, bad input.

    python tests/test_appworld.py [ROOT]      # gold play and doing nothing in all 147 tasks, and the speed; prints counts alone

AppWorld's tasks may be passed on encrypted only, so no test shows their text where it fails: hashes, counts and truth values alone.
"""
import ast
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]
from enrich import EnrichedEnv, Schedule
from envs import BadInput, appworld_engine, appworld_setup, env_class, guard, make_env, select_tasks
from envs.action import UNFINISHED
from envs.appworld import NO_CODE, AppWorld, names_called, read_code, solution
from envs.appworld_engine import EngineDied
from rl.rollout import Request, Trajectory, Turn, rollout

BUNDLE = Path(os.environ.get("SCAFFOLD_FUNNEL_DATA", ROOT.parent / "shared" / "data")) / "appworld_regenerated.bundle"


def why_not():
    try:
        appworld_setup.checked_python()
    except BadInput as error:
        return str(error)
    return "" if BUNDLE.exists() else "no appworld_regenerated.bundle in ../shared/data or $SCAFFOLD_FUNNEL_DATA"


needs_engine = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


def one_line(match, call):
    with pytest.raises(BadInput, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


def sha(*texts):
    return hashlib.sha256(json.dumps(texts, default=str).encode()).hexdigest()


def holds(condition):
    """An assertion that shows no text of a task where it fails."""
    assert condition is True


def block(code):
    return f"```python\n{code}\n```"


# --- what is read as code -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, code", [
    ("```python\nprint(1)\n```", "print(1)"), ("```\nprint(1)\n```", "print(1)"), ("```py\nprint(1)```", "print(1)"),
    ("I look.\n``` Python\r\nx = 1\r\nprint(x)\n```\nDone.", "x = 1\r\nprint(x)"),
    ("  ```python\n  if x:\n      y()\n  ```", "if x:\n    y()"),
    ("```python\na()\n```\nand\n```python\nb()\n```", "a()"),              # the first: the second was written without its output
    ("```json\n{}\n```\n```python\na()\n```", "a()"), ("```python\n\n```\n```python\na()\n```", "a()"),
    ("```text\n```\na\n```python\nb()\n```", "b()"), ("<think>```python\na()\n```</think>```python\nb()\n```", "b()"),
    ("a()\n```</think>```python\nb()\n```", "b()"), ("<action>```python\na()\n```</action>", "a()"),
    ("", None), ("print(1)", None), ("```python\nprint(1)", None), ("```bash\nls\n```", None), ("```python print(1)```", None),
    ("<think>```python\na()\n```", None), ("```python\na()\n```<think>", None), ("```" * 9, None), ("`" * 100_000, None)])
def test_the_code_in_a_text(text, code):
    assert read_code(text) == code


def test_reading_code_is_linear():
    began = time.process_time()
    for text in ("```x\n" * 200_000, "```python\n" * 200_000, "```" + " " * 500_000, "``` \n" * 200_000):
        read_code(text)
    assert time.process_time() - began < 5


# --- the known solution, on one that is made up ---------------------------------------------------------------------

COMPILED = """import re
from appworld.requester import Requester
from collections import Counter
def solution(apis, requester):
    # words
    profile = apis.supervisor.show_profile()
    token = apis.radio.login(username=profile["email"], password="x")["access_token"]
    limit = 3
    for page in apis.radio.show_pages(token=token):
        if page > limit:
            apis.radio.stop(page=page, by=apis.radio.who(token))
    names = [apis.radio.show_song(song=song) for song in apis.radio.show_list()]
    apis.supervisor.complete_task(answer=names[0])
"""
AUTHOR = "def _solution(apis):\n    apis.radio.stop(page=1, raise_on_failure=False)\n    return apis.radio.who()"


@pytest.fixture
def made_up(tmp_path):
    (tmp_path / "compiled_solution.py").write_text(COMPILED)
    (tmp_path / "solution.py").write_text(AUTHOR)
    return tmp_path


def test_gold_blocks_are_the_solutions_statements(made_up):
    blocks, calls = solution(made_up)
    assert len(blocks) == 5 and blocks[0] == "import re\nfrom collections import Counter\nprofile = apis.supervisor.show_profile()"
    assert blocks[2].startswith("limit = 3\nfor page in") and blocks[4] == "apis.supervisor.complete_task(answer=names[0])"
    assert "apis.radio.stop(page=page, by=apis.radio.who(token), raise_on_failure=False)" in blocks[2]     # the author lets it fail
    assert sum("raise_on_failure" in text for text in blocks) == 1
    assert list(calls) == ["supervisor.show_profile", "radio.login", "radio.show_pages", "radio.who", "radio.stop", "radio.show_list",
                           "radio.show_song", "supervisor.complete_task"]
    assert calls["radio.login"] == "apis.radio.login(username=profile['email'], password='x')"


def test_calls_stand_in_the_order_in_which_they_are_made():
    order = [ast.unparse(call.func)[5:] for call in names_called(ast.parse(
        "x[apis.a.three()] = apis.a.two(apis.a.one())\n{apis.a.six(k): 1 for k in apis.a.four() if apis.a.five(k)}\nother.a.b()"))]
    assert order == ["a.one", "a.two", "a.three", "a.four", "a.five", "a.six"]


def test_no_solution_is_one_line(tmp_path):
    one_line("no known solution.*FileNotFoundError", lambda: solution(tmp_path))
    for name in ("compiled_solution.py", "solution.py"):
        (tmp_path / name).write_text("def (")
    one_line("no known solution.*SyntaxError", lambda: solution(tmp_path))


# --- bad input ------------------------------------------------------------------------------------------------------

def fake_engine(cache, version=appworld_setup.VERSION, unpacked=True):
    site = cache / "appworld" / "venv" / "lib" / "python3.11" / "site-packages"
    (site / f"appworld-{version}.dist-info").mkdir(parents=True)
    (cache / "appworld" / "venv" / "bin").mkdir()
    (cache / "appworld" / "venv" / "bin" / "python").write_text("#!/bin/false\n")
    (cache / "appworld" / "venv" / "bin" / "python").chmod(0o755)
    if unpacked:
        (site / "appworld" / "apps" / "spotify").mkdir(parents=True)
        (site / "appworld" / "apps" / "spotify" / "apis.py").write_text("")


def fake_data(root, version="0.1.0", missing=()):
    for name in ("datasets", "tasks", "base_dbs", "api_docs"):
        if name not in missing:
            (root / "data" / name).mkdir(parents=True)
    (root / "data" / "version.txt").write_text(version)
    for name, tasks in (("train", "aaa_1 aaa_2"), ("dev", "bbb_1 bbb_2 ccc_1 ccc_2 ddd_1")):
        if name not in missing:
            (root / "data" / "datasets" / f"{name}.txt").write_text("\n".join(tasks.split()))
    return str(root)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SCAFFOLD_FUNNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("APPWORLD_ROOT", raising=False)
    return tmp_path / "cache"


def test_no_engine_or_another_is_one_line(cache):
    one_line("no engine in .*python -m envs.appworld_setup", AppWorld)
    fake_engine(cache, "0.2.0")
    one_line("version 0.2.0, needed is 0.1.3.post1: remove", AppWorld)


def test_an_engine_that_is_not_unpacked_is_one_line(cache):
    fake_engine(cache, unpacked=False)
    one_line("not unpacked.*python -m envs.appworld_setup", AppWorld)


def test_no_data_or_others_are_one_line(cache, tmp_path):
    fake_engine(cache)
    one_line("no data in .*cache/appworld/data.*data=FOLDER", AppWorld)
    one_line("no data in .*none/data", lambda: AppWorld(data=tmp_path / "none"))
    one_line("no data in .*none/data", lambda: select_tasks("appworld", "train", options={"data": str(tmp_path / "none")}))
    one_line("version 0.2, needed are 0.1.0: remove", lambda: AppWorld(data=fake_data(tmp_path / "a", "0.2")))
    one_line("has no base_dbs, so it is not whole", lambda: AppWorld(data=fake_data(tmp_path / "b", missing=["base_dbs"])))
    one_line("has no datasets/dev.txt", lambda: AppWorld(data=fake_data(tmp_path / "c", missing=["dev"])))


def test_an_engine_that_does_not_start_is_one_line_of_an_episode(cache, tmp_path):
    fake_engine(cache)
    env = AppWorld(data=fake_data(tmp_path / "a"))
    one_line("specs.json cannot be read .FileNotFoundError", lambda: env.reset(task="aaa/1", seed=0))
    (tmp_path / "a" / "data" / "tasks" / "aaa_1").mkdir()
    (tmp_path / "a" / "data" / "tasks" / "aaa_1" / "specs.json").write_text("{}")
    with pytest.raises(EngineDied, match="died .exit code 1"):
        env.reset(task="aaa/1", seed=0)
    env.close()


def test_splits_options_and_tasks(cache, tmp_path, monkeypatch):
    fake_engine(cache)
    data = fake_data(tmp_path / "a")
    assert [AppWorld.tasks(split, data) for split in ("train", "valid", "test")] == [
        ["aaa/1", "aaa/2"], ["bbb/1", "bbb/2", "ddd/1"], ["ccc/1", "ccc/2"]]
    monkeypatch.setenv("APPWORLD_ROOT", data)
    assert select_tasks("appworld", "train") == ["aaa/1", "aaa/2"] and env_class("appworld") is AppWorld
    for options, word in (({"difficulty": 4}, "difficulty"), ({"reward": "x"}, "reward"), ({"jail": 3}, "jail"),
                          ({"seconds": 0}, "seconds"), ({"memory_mb": "2"}, "memory_mb"),
                          ({"characters": 1.5}, "characters"), ({"colour": 1}, "colour")):
        one_line(word, lambda: make_env("appworld", options))
    one_line("unknown split", lambda: AppWorld.tasks("dev"))
    one_line("metadata.json cannot be read", lambda: AppWorld.tasks("train", difficulty=1))
    for task in ("aaa/3", "", "x" * 1000, "../../etc"):
        one_line("unknown task", lambda: AppWorld().reset(task=task, seed=0))


def test_the_set_up_command_refuses_in_one_line(cache, tmp_path):
    fake_engine(cache)
    one_line("there is no bundle", lambda: appworld_setup.main(["--bundle", str(tmp_path / "none")]))
    one_line("see --help", lambda: appworld_setup.main(["--bundel", "x"]))
    fake_data(tmp_path / "a", "0.0")
    one_line("version 0.0", lambda: appworld_setup.main(["--data", str(tmp_path / "a")]))
    done = subprocess.run([sys.executable, "-m", "envs.appworld_setup", "--bundle", "/nowhere"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == "error: appworld: there is no bundle /nowhere\n"


# --- the real engine ------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The root with the regenerated data."""
    root = tmp_path_factory.mktemp("appworld")
    appworld_setup.make_data(root, BUNDLE)
    return str(root)


@pytest.fixture(scope="module")
def env(data):
    """One process for most tests: an episode begins with `reset`."""
    env = AppWorld(data=data)
    yield env
    env.close()


@pytest.fixture(scope="module")
def quick(data):
    """One whose code has 2 s a turn, for what hangs."""
    env = AppWorld(data=data, seconds=2)
    yield env
    env.close()


def processes(word):
    """Of this machine, with a word in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found += [int(folder.name)] if word.encode() in (folder / "cmdline").read_bytes() else []
        except OSError:
            pass
    return found


def gold(env, task):
    """([observation, reward, success of each turn], the last info) of gold play."""
    seen, info = [sha(env.reset(task=task, seed=0)[0])], {}
    while (action := env.gold_action()) is not None:
        observation, reward, terminated, truncated, info = env.step(action)
        assert info["valid"] and not truncated
        holds(not observation.startswith("Execution failed"))
        seen.append((sha(observation), reward, terminated))
        if terminated:
            break
    return seen, info


FAILING_ON_PURPOSE = ["07b42fd/1", "0d8a4ee/1", "37a8675/1", "3ab5b8b/1", "57c3486/1", "b7a9ee9/1", "ccb4494/1", "d4e9306/1"]


@needs_engine
def test_splits_by_scenario(data):
    splits = {split: AppWorld.tasks(split, data) for split in ("train", "valid", "test")}
    assert {split: len(tasks) for split, tasks in splits.items()} == {"train": 90, "valid": 30, "test": 27}
    scenarios = {split: {task.split("/")[0] for task in tasks} for split, tasks in splits.items()}
    assert sum(map(len, scenarios.values())) == len(set().union(*scenarios.values())) == 49
    assert [sum(len(AppWorld.tasks(split, data, level)) for split in splits) for level in (1, 2, 3)] == [66, 60, 21]


@needs_engine
def test_gold_play_succeeds_and_ends(env, data):
    """One task of each kind that needs care, and one of every third scenario; all 147: `python tests/test_appworld.py`."""
    everything = [task for split in ("train", "valid", "test") for task in AppWorld.tasks(split, data)]
    for task in dict.fromkeys([*FAILING_ON_PURPOSE, *everything[::9]]):
        seen, info = gold(env, task)
        assert info["success"] is True and info["score"] == 100 and seen[-1][1:] == (1.0, True) and 5 <= len(seen) - 1 <= 12, task
        assert info["reference"]["failed"] == "none"
    with pytest.raises(RuntimeError, match="reset"):
        env.step(block("print(1)"))
    assert env.gold_action() is env.action_guidance() is env.observation_enrichment() is None


@needs_engine
def test_doing_nothing_scores_0(env, data):
    for task in AppWorld.tasks("valid", data)[::5]:
        env.reset(task=task, seed=0)
        _, reward, terminated, _, info = env.step(block("apis.supervisor.complete_task()"))
        assert (reward, terminated, info["success"], info["score"]) == (0.0, True, False, 0.0)
        assert info["reference"]["failed"] != "none"


@needs_engine
def test_same_task_same_episode_whatever_the_seed_and_whatever_hints(env, data):
    task = AppWorld.tasks("train", data)[0]
    first, _ = gold(env, task)
    assert gold(env, task)[0] == first
    hinted = EnrichedEnv(env, Schedule("both"))
    observation, info = hinted.reset(task=task, seed=5, enriched=True)
    seen, hints = [], []
    while True:
        plain = observation.removesuffix("\n" + info["hint"]) if "hint" in info else observation
        seen.append(sha(plain) if not seen else (sha(plain), reward, terminated))
        hints.append(info.get("hint"))
        if (action := hinted.gold_action()) is None:
            break
        observation, reward, terminated, _, info = hinted.step(action)
    holds(seen == first and all(hints[:-1]) and hints[-1] is None)


@needs_engine
def test_hints_say_what_comes_next_and_what_was_changed(env, data):
    task = next(task for task in AppWorld.tasks("train", data) if any(name.startswith("simple_note.") and name.endswith("login") for name in
                solution(Path(data) / "data" / "tasks" / task.replace("/", "_") / "ground_truth")[1]))
    env.reset(task=task, seed=0)
    guidance, enrichment = env.action_guidance(), env.observation_enrichment()
    holds(guidance.startswith("Hint: apis.supervisor.") and guidance.count(", then ") == 2)
    holds(enrichment.startswith("Changed so far: nothing. Logged in to: no app. Log-in still missing: ") and "simple_note" in enrichment)
    env.step(block("apis.simple_note.login(username='x', password='y')"))       # fails
    holds(env.observation_enrichment() == enrichment)
    env.step(block("""
me = apis.supervisor.show_profile()
passwords = {a["account_name"]: a["password"] for a in apis.supervisor.show_account_passwords()}
token = apis.simple_note.login(username=me["email"], password=passwords["simple_note"])["access_token"]"""))
    holds("Logged in to: simple_note" in env.observation_enrichment())
    holds("show_profile" not in env.action_guidance())                          # it was made, out of turn
    env.step(block("apis.simple_note.create_note(title='a', content='b', access_token=token)"))
    holds("Changed so far: simple_note.notes (1 added)" in env.observation_enrichment())


@needs_engine
def test_turns_without_code_change_nothing_and_say_so(env, data):
    env.reset(task=AppWorld.tasks("train", data)[0], seed=0)
    for text in ("", "print(1)", "```python\nprint(1)", "x" * 300_000, "\ud800", "<action>look</action>"):
        observation, reward, terminated, truncated, info = env.step(text)
        assert (observation, reward, terminated, truncated, info["valid"], info["success"]) == (NO_CODE, 0.0, False, False, False, False)
    assert UNFINISHED in env.step("<think>" + block("apis.supervisor.complete_task()"))[0]
    assert "Syntax error" in env.step(block("if"))[0] and "\x00" not in env.step(block("print(1) # \x00 \ud800"))[0]
    assert env.step(block("x = 41"))[0] == "Execution successful." and env.step(block("print(x + 1)"))[0] == "42\n"
    assert "No app named" in env.step(block("apis.x.y()"))[0]


@needs_engine
def test_output_is_cut_with_a_notice(env, data):
    env.reset(task=AppWorld.tasks("train", data)[0], seed=0)
    observation = env.step(block("print('a' * 100_000)"))[0]
    assert observation == "a" * 3000 + "\n[cut here: 3000 of 100001 characters are shown; print less at a time]"
    assert env.step(block("print('a' * 2999)"))[0] == "a" * 2999 + "\n"
    assert env.step(block("print('\\ud800')"))[4]["valid"] is True


@needs_engine
def test_two_at_once_do_not_touch_each_other(env, data):
    other = AppWorld(data=data)
    first, second = AppWorld.tasks("train", data)[:2]
    try:
        env.reset(task=first, seed=0), other.reset(task=first, seed=0)      # the same task, two names
        assert env._world.name != other._world.name
        env.step(block("x = 1"))
        assert "NameError" in other.step(block("print(x)"))[0]
        other.reset(task=second, seed=0)
        ended = {}
        while len(ended) < 2:       # in turn, a block each
            for one in (env, other):
                if one not in ended:
                    _, reward, terminated, _, info = one.step(one.gold_action())
                    ended |= {one: (reward, info["success"])} if terminated else {}
        assert set(ended.values()) == {(1.0, True)}
    finally:
        name = other._world.name
        other.close()
    assert processes(name) == []


# --- the jail -------------------------------------------------------------------------------------------------------

# The engine's own guard is no jail: this is one way around it. What follows holds with the guard gone.
FREE = """
import appworld
sys = appworld.environment.sys
px, net = sys.modules['posix'], sys.modules['socket']       # under names that its list of words does not have
def tried(what, *args):
    try:
        return 'done ' + str(what(*args))
    except BaseException as error:
        return type(error).__name__ + ' ' + str(error)
"""


def inside(env, code):
    return env.step(block(FREE + code))[0]


@needs_engine
def test_no_network(env, data):
    """The same attempts succeed from here."""
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    socket.create_connection(("127.0.0.1", port), 2).close()
    env.reset(task=AppWorld.tasks("train", data)[0], seed=0)
    try:
        for address in ("127.0.0.1", "1.1.1.1"):
            said = inside(env, f"print(tried(net.create_connection, ('{address}', {port}), 2))")
            assert ("unreachable" in said or "refused" in said) is True, address
        assert "gaierror" in inside(env, "print(tried(net.getaddrinfo, 'pypi.org', 443))")
    finally:
        server.close()


@needs_engine
def test_files_of_the_user_are_neither_there_nor_writable(env, data, tmp_path):
    env.reset(task=AppWorld.tasks("train", data)[0], seed=0)
    (tmp_path / "mine").write_text("x")
    for path in (tmp_path / "mine", Path.home() / ".bashrc", ROOT / "README.md", "/etc/passwd", "/proc/self/status", "/work"):
        assert inside(env, f"print(tried(px.open, {str(path)!r}, 0))").startswith("FileNotFoundError"), path
    for path in ("/x", "/usr/x", "/dev/x", str(env._world.work / "data" / "x"), str(Path(appworld_setup.home()) / "venv" / "x")):
        assert "Read-only file system" in inside(env, f"print(tried(px.open, {path!r}, 65))"), path
    assert inside(env, "print(tried(px.open, 'tmp/mine', 65))").startswith("done")          # its own folder
    assert (env._world.work / "tmp" / "mine").exists()
    for attempt in ("px.chroot, '.'", "px.setuid, 1", "px.mknod, 'tmp/dev', 0o60600, 0", "px.kill, px.getppid() or 2, 9"):
        said = inside(env, f"print(tried({attempt}))")
        assert said.startswith(("PermissionError", "ProcessLookupError", "OSError [Errno 22]", "done None")), attempt
    assert inside(env, "print(px.getpid())") == "1\n" and env._world.alive()


@needs_engine
def test_solutions_and_tests_are_not_there(env, data):
    task = AppWorld.tasks("train", data)[0]
    env.reset(task=task, seed=0)
    folder = env._world.work / "data" / "tasks" / task.replace("/", "_")
    assert inside(env, f"print(len(px.listdir({str(folder / 'dbs')!r})) > 5, px.listdir({str(folder / 'ground_truth')!r}))") == "True []\n"
    assert inside(env, f"print(tried(px.listdir, {data!r}))").startswith("FileNotFoundError")


@needs_engine
def test_a_verdict_cannot_be_changed_from_inside(env, data):
    env.reset(task=AppWorld.tasks("train", data)[0], seed=0)
    *_, terminated, _, info = env.step(block(FREE + """
import appworld.evaluator as evaluator
class Won: success, passes, failures, test_data = True, [], [], []
evaluator.evaluate_task = appworld.environment.appworld.evaluator.evaluate_task = lambda **_: Won
evaluator.TestTracker.success = True
apis.supervisor.complete_task()"""))
    assert terminated and info["success"] is False and info["score"] == 0


@needs_engine
def test_nothing_of_our_variables(data, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    env = AppWorld(data=data)
    try:
        env.reset(task=AppWorld.tasks("train", data)[0], seed=0)
        said = inside(env, "print(sorted(key.decode() for key in px.environ))")
        assert "SECRET" not in said and set(ast.literal_eval(said)) <= {
            "APPWORLD_CACHE", "APPWORLD_ROOT", "HOME", "LANG", "OMP_NUM_THREADS", "PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED",
            "TMPDIR", "TZ", "LC_CTYPE"}
        assert inside(env, "print(px.getcwd())").strip() == str(env._world.work)
    finally:
        env.close()


@needs_engine
def test_memory_is_limited(env, data):
    env.reset(task=AppWorld.tasks("train", data)[0], seed=0)
    assert "MemoryError" in env.step(block("x = bytearray(4 << 30)"))[0]
    assert env.step(block("x = bytearray(64 << 20); print(len(x))"))[0] == f"{64 << 20}\n"
    assert "OSError" in inside(env, "f = px.open('tmp/big', 65)\nprint(tried(px.truncate, f, 1 << 30))")     # and a file's size


# --- killed and hanging engines -------------------------------------------------------------------------------------

@needs_engine
def test_a_killed_engine_ends_its_episode_and_the_next_begins(env, data):
    first = AppWorld.tasks("train", data)[0]
    env.reset(task=first, seed=0)
    old = env._world
    assert len(processes(old.name)) == 2        # the one that waits, and process 1 of the jail
    os.kill(max(processes(old.name)), signal.SIGKILL)
    with pytest.raises(guard.EnvironmentBroke, match="EngineDied"):
        guard.step(env, 60, block("print(1)"))
    assert processes(old.name) == [] and not old.work.exists()
    _, info = gold(env, first)
    assert info["success"] and env._world is not old
    os.kill(env._world.process.pid, signal.SIGKILL)     # the outer one: the inner one goes with it
    env._world.process.wait()
    for _ in range(50):
        time.sleep(0 if not processes(env._world.name) else 0.1)
    assert processes(env._world.name) == []
    assert gold(env, first)[1]["success"]


@needs_engine
def test_a_process_is_replaced_after_some_episodes(env, data, monkeypatch):
    first, old = AppWorld.tasks("train", data)[0], env._world
    env._played = 200
    env.reset(task=first, seed=0)
    assert not old.alive() and env._world.alive() and env._played == 1


HANG = """
while True:
    try:
        while True:
            pass
    except BaseException:
        pass
"""


@needs_engine
def test_a_loop_is_stopped_and_one_that_goes_on_is_killed_with_its_children(quick, data):
    env = quick
    task = AppWorld.tasks("train", data)[0]
    env.reset(task=task, seed=0)
    observation = env.step(block("while True:\n    pass"))[0]
    assert "timed out after 2 seconds" in observation and env.step(block("print(2)"))[0] == "2\n"      # the engine's own limit
    name = env._world.name
    assert inside(env, "if px.fork() == 0:\n    while True: pass").strip() == "Execution successful."
    assert len(processes(name)) == 3
    began = time.monotonic()
    with pytest.raises(guard.EnvironmentBroke, match="no answer in time"):
        guard.step(env, 60, block(HANG))
    assert time.monotonic() - began < 20 and processes(name) == []
    env.reset(task=task, seed=0)
    with pytest.raises(guard.EnvironmentBroke, match="no answer in 1 s"):      # the caller's limit
        guard.step(env, 1, block(HANG))
    assert processes(env._world.name) == []
    env.reset(task=task, seed=0)
    assert env.step(block("print(3)"))[0] == "3\n"


@needs_engine
def test_answers_that_are_none_end_the_episode(env, data):
    """Model code that writes on the pipe itself."""
    env.reset(task=AppWorld.tasks("train", data)[0], seed=0)
    for forged in (b'{"id": 1, "completed": true}', b"[]", b"nonsense", b"\xff" * 10):
        with pytest.raises(guard.EnvironmentBroke, match="EngineDied"):
            guard.step(env, 60, block(FREE + f"for n in range(3, 30):\n    tried(px.write, n, {forged!r} + b'\\n')"))
        assert not env._world.alive()
        env.reset(task=AppWorld.tasks("train", data)[0], seed=0)


class Scripted:
    """The environment, with the next text of a script for whatever a policy writes."""

    def __init__(self, env, *texts):
        self.env, self.texts = env, iter(texts)

    def __getattr__(self, name):
        return getattr(self.env, name)

    def step(self, action):
        return self.env.step(next(self.texts))


@needs_engine
def test_a_broken_episode_is_env_error_and_the_others_go_on(quick, data, word_chat):
    task, scripted = AppWorld.tasks("train", data)[0], Scripted(quick, block(HANG), block("apis.supervisor.complete_task()"))
    broken, whole = rollout(lambda prompts: [[1] for _ in prompts], word_chat, [scripted], [Request(task), Request(task)], max_turns=2,
                            max_context=10**6, step_timeout=60)
    assert broken.end == "env_error" and "EngineDied" in broken.error and broken.reward != broken.reward
    assert whole.end == "failure" and whole.reward == 0 and whole.info["score"] == 0


@needs_engine
def test_engines_end_with_the_program(data):
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from envs.appworld import AppWorld
from envs import appworld_engine
env = AppWorld(data={data!r})
env.reset(task="82e2fac/1", seed=0)
env.step("```python\\napis.supervisor.complete_task()\\n```")
print(len(appworld_engine._alive), appworld_engine.folder())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    count, folder = done.stdout.split()
    assert done.returncode == 0 and count == "2" and not Path(folder).exists() and processes(folder) == []
    code += "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"        # without any chance to tidy up
    killed = subprocess.run([sys.executable, "-c", code.replace("print(", "print(flush=True, *(").replace("folder())", "folder()))")],
                            capture_output=True, text=True)
    folder = killed.stdout.split()[1]
    for _ in range(50):
        time.sleep(0 if not processes(folder) else 0.1)
    assert killed.returncode == -9 and processes(folder) == []
    shutil.rmtree(folder)


@needs_engine
def test_a_system_without_namespaces_is_one_line(data, monkeypatch):
    monkeypatch.setattr(appworld_engine, "VERSION", "9.9")
    one_line("needed is 9.9", lambda: AppWorld(data=data).reset(task="82e2fac/1", seed=0))
    # as a process that may make none: there is already a limit of 0 in its own namespace
    monkeypatch.undo()
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom envs.appworld import AppWorld\n"
            f"AppWorld(data={data!r}).reset(task='82e2fac/1', seed=0)")
    limited = ["unshare", "-r", "sh", "-c", f"echo 0 > /proc/sys/user/max_user_namespaces; exec '{sys.executable}' -c \"$0\"", code]
    done = subprocess.run(limited, capture_output=True, text=True)
    if "Read-only" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip("no way here to forbid namespaces")
    assert done.stderr.strip().splitlines()[-1].startswith("envs.BadInput: appworld: this system does not let an ordinary user make")


@needs_engine
def test_without_the_jail_it_plays_too(data):
    env = AppWorld(data=data, jail="false")
    try:
        assert gold(env, "82e2fac/1")[1]["success"] and env._world.jailed is None
    finally:
        env.close()


# --- the rest -------------------------------------------------------------------------------------------------------

@needs_engine
def test_a_cut_bundle_is_one_line(tmp_path):
    for name, content in (("cut", BUNDLE.read_bytes()[:100_000]), ("none", b""), ("text", b"version https://git-lfs.github.com/spec/v1\n")):
        (tmp_path / name).write_bytes(content)
        one_line(f"{name} is no whole bundle", lambda: appworld_setup.make_data(tmp_path / "root", tmp_path / name))
        assert list((tmp_path / "root").iterdir()) == []


@needs_engine
def test_reflection_shows_code_and_what_failed(env, data):
    task = AppWorld.tasks("train", data)[0]
    played = Trajectory(task, 0, 0, False)
    played.first_observation, _ = env.reset(task=task, seed=0)
    for text in ("I look.\n" + block("print('b' * 2000)"), "hm", block("apis.supervisor.complete_task()")):
        observation, reward, _, _, played.info = env.step(text)
        played.turns.append(Turn([], [], text, observation, reward, True, "end"))
    shown = env.reflection(played)
    holds("> print('b' * 2000)\n" + "b" * 900 + "\n> (no code) hm\n" in shown and "\nfailed: " in shown and "I look" not in shown
          and shown.startswith("Task of "))


@needs_engine
def test_enrich_shows_an_episode(data, tmp_path):
    done = subprocess.run([sys.executable, "enrich.py", "--env", "appworld", "--env-options", f"data={data}", "--picture",
                           str(tmp_path / "s.png")], cwd=ROOT, capture_output=True, text=True)
    holds(done.returncode == 0 and done.stdout.count("turn ") >= 6 and "Hint: apis." in done.stdout)


@needs_engine
def test_no_text_of_a_task_stands_in_this_repository(data):
    """Instructions, and lines of solutions that are long enough to be theirs."""
    texts = {}
    rooms = ("docs", "envs", "rl", "funnel", "baselines", "tools", "tests", "results", "examples", ".ci")
    for path in [*ROOT.glob("*"), *(path for room in rooms for path in (ROOT / room).rglob("*"))]:
        if path.is_file() and path.suffix not in (".png", ".safetensors", ".pyc", ".xz"):
            texts[path] = " ".join(path.read_text(errors="replace").split())
    assert len(texts) > 100
    for folder in sorted((Path(data) / "data" / "tasks").iterdir()):
        instruction = json.loads((folder / "specs.json").read_text())["instruction"]
        lines = [line.strip() for line in (folder / "ground_truth" / "solution.py").read_text().splitlines()]
        for piece in [instruction[:60], *[line for line in lines if len(line) > 60 and "import" not in line]]:
            found = [path.name for path, text in texts.items() if " ".join(piece.split()) in text]
            assert found == [], f"text of {folder.name}"


def main(root=None):
    """Counts and times alone."""
    env, began = AppWorld(data=root), time.monotonic()
    tasks = [task for split in ("train", "valid", "test") for task in AppWorld.tasks(split, root)]
    env.reset(task=tasks[0], seed=0)
    print(f"started in {time.monotonic() - began:.1f} s")
    for name in ("gold", "doing nothing"):
        won, scores, steps, seconds, loads = 0, 0.0, 0, 0.0, 0.0
        for task in tasks:
            began = time.monotonic()
            env.reset(task=task, seed=0)
            loads += time.monotonic() - began
            began, terminated = time.monotonic(), False
            while not terminated:
                *_, terminated, _, info = env.step(env.gold_action() if name == "gold" else block("apis.supervisor.complete_task()"))
                steps += 1
            seconds += time.monotonic() - began
            won, scores = won + info["success"], scores + info["score"]
        print(f"{name}: success in {won} of {len(tasks)}, mean score {scores / len(tasks):.1f}, {steps} turns, "
              f"{steps / seconds:.1f} steps/s, {loads / len(tasks):.2f} s to begin an episode")
    for engine in sorted(appworld_engine._alive, key=lambda engine: engine.role):
        status = Path(f"/proc/{max(processes(engine.name))}/status").read_text()
        peak = {line.split()[0]: int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith(("VmHWM", "VmPeak"))}
        print(f"{engine.role}: {peak['VmHWM:']} MB at the most, {peak['VmPeak:']} MB of addresses")
    env.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
