"""Starts the processes of envs/appworld_worker.py and speaks to them: a time limit on every answer, no port, nothing of ours inside.

A process that does not answer in time, dies or answers nonsense is killed, and `ask` raises EngineDied: the episode ends there, the
next one starts another process. All of them end with this one.
"""
import atexit
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from envs import BadInput
from envs.appworld_setup import VERSION, checked_python

START = 110     # seconds for the import of the engine and the first load, on a busy machine (--step-timeout is 120)
MOST = 8 << 20  # characters of an answer
WITHOUT = "run in a container without network and give --env-options jail=false (docs/trust.md)"
_folder, _number, _alive = None, itertools.count(1), set()
_judges, _judges_lock = {}, threading.Lock()


class EngineDied(RuntimeError):
    """The message says what happened."""


def folder() -> Path:
    """The working folders of this process; removed at its end."""
    global _folder
    if _folder is None:
        _folder = Path(tempfile.mkdtemp(prefix="appworld-"))
        for name in ("root", "empty"):
            (_folder / name).mkdir()
        atexit.register(end)
    return _folder


def end():
    """Every process, and the working folders."""
    for engine in list(_alive):
        engine.kill()
    shutil.rmtree(_folder, ignore_errors=True)


class Engine:
    """One process. role: "world" or "judge"; data: the engine's folder `data`; jail: see envs/appworld_worker.py; memory_mb: of the
    process, its address space; seconds and characters: of one `execute`."""

    def __init__(self, role, data, jail=True, memory_mb=3072, seconds=30, characters=3000):
        self.role, self.name = role, f"{role}-{os.getpid()}-{next(_number)}"
        self.work = folder() / self.name
        self.outputs = self.work / "experiments" / "outputs" / self.name    # a world's saved state
        python, own = checked_python(), self.work / "data"
        (self.work / "tmp").mkdir(parents=True)
        self.jailed = None
        if jail:
            own.mkdir()
            # a judge sees what the worlds have saved, and all of the data
            writable = folder() if role == "judge" else self.work
            hidden = [str(own / "tasks" / task / "ground_truth") for task in sorted(os.listdir(data / "tasks"))
                      if role == "world" and (data / "tasks" / task / "ground_truth").is_dir()]
            self.jailed = {"root": str(folder() / "root"), "work": str(writable), "hidden": [str(folder() / "empty"), hidden],
                           "mounts": [[str(writable), str(writable)], [str(data), str(own)]]}
        else:
            own.symlink_to(data)
        how = {"role": role, "name": self.name, "jail": self.jailed, "memory_mb": memory_mb, "seconds": seconds, "characters": characters}
        # Nothing of our own variables: no tokens, no proxies. Sets of texts have the same order in every process.
        variables = {"PATH": "/usr/bin:/bin", "HOME": str(self.work), "TMPDIR": str(self.work / "tmp"), "LANG": "C.UTF-8", "TZ": "UTC",
                     "APPWORLD_ROOT": str(self.work), "APPWORLD_CACHE": str(self.work / "tmp"), "PYTHONHASHSEED": "0",
                     "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        worker = Path(__file__).with_name("appworld_worker.py")
        self.lock, self.count, self.rest = threading.Lock(), itertools.count(1), b""
        with open(folder() / f"{self.name}.log", "wb") as log:      # outside of the working folder
            self.process = subprocess.Popen([str(python), "-s", "-P", str(worker), json.dumps(how)], cwd=self.work, env=variables,
                                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0, start_new_session=True)
        _alive.add(self)
        with self.watched():
            hello = self.read(0, time.monotonic() + START)
        if not hello.get("jail", True):
            self.kill()
            raise BadInput(f"appworld: this system does not let an ordinary user make namespaces ({hello['error']}): {WITHOUT}")
        if hello.get("version") != VERSION:
            self.kill()
            raise BadInput(f"appworld: the engine says that it is {hello.get('version')!r}, needed is {VERSION}")

    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, do, seconds=START, **what) -> dict:
        """The answer to one request. Raises EngineDied."""
        with self.lock, self.watched():
            number = next(self.count)
            self.process.stdin.write(json.dumps({"id": number, "do": do, **what}).encode() + b"\n")
            answer = self.read(number, time.monotonic() + seconds)
            if "error" in answer:
                raise EngineDied(f"AppWorld's engine failed: {answer['error']}")
            return answer

    @contextlib.contextmanager
    def watched(self):
        """Whatever goes wrong in the block, a time limit of the caller's too, ends the process: its next answer would be of this request."""
        try:
            yield
        except BaseException as error:
            self.kill()
            if isinstance(error, (OSError, ValueError)):
                raise EngineDied(f"AppWorld's engine cannot be spoken to: {error}") from error
            raise

    def read(self, number, deadline) -> dict:
        pipe = self.process.stdout.fileno()
        while b"\n" not in self.rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise EngineDied("AppWorld's engine gave no answer in time")
            part = os.read(pipe, 1 << 16)
            if not part:
                raise EngineDied(f"AppWorld's engine has died{self.last_words()}")
            self.rest += part
            if len(self.rest) > MOST:
                raise EngineDied("AppWorld's engine said too much")
        line, _, self.rest = self.rest.partition(b"\n")
        answer = json.loads(line)
        if not isinstance(answer, dict) or answer.pop("id", None) != number:
            raise EngineDied("AppWorld's engine answered another question")
        return answer

    def last_words(self) -> str:
        lines = (folder() / f"{self.name}.log").read_text(errors="replace").strip().splitlines()
        return f": {lines[-1][:200]}" if lines else f" (exit code {self.process.wait()})"

    def kill(self):
        """The process with everything that it has started, and its working folder."""
        _alive.discard(self)
        if self.alive():
            self.process.kill()     # process 1 of the jail dies with it, and with that all in it
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()
        shutil.rmtree(self.work, ignore_errors=True)
        (folder() / f"{self.name}.log").unlink(missing_ok=True)


def judge(data, **limits) -> Engine:
    """The judge of this process for these data, started when first asked for."""
    with _judges_lock:
        key = (data, *limits.items())
        if key not in _judges or not _judges[key].alive():
            _judges[key] = Engine("judge", data, **limits)
        return _judges[key]


def end_idle_judges():
    """The judges, if no world is left."""
    with _judges_lock:
        if not any(engine.role == "world" for engine in _alive):
            while _judges:
                _judges.popitem()[1].kill()
