"""AppWorld's engine as a process: requests and answers are lines of JSON over pipes. It runs in the engine's own environment and needs
the standard library and appworld alone; envs/appworld_engine.py starts it.

One process has one of two roles. A *world* plays episodes: model code runs in it, and it cannot see solutions and tests. A *judge*
evaluates: it reads the state that a world has saved, so what model code changed inside its own process cannot change the verdict.

The jail, before the engine is imported: Linux namespaces of an ordinary user. A root file system of its own that holds Python, the
engine, the data and the working folder, all but the last read-only; no network but a loopback of its own; no process but its own, and
these end with it; no capability left. docs/trust.md says what this is and what it is not.
"""
import contextlib
import ctypes
import functools
import json
import os
import re
import resource
import sys

# <sched.h>, <sys/mount.h>, <linux/mount.h>, <sys/prctl.h>
NAMESPACES = 0x10000000 | 0x00020000 | 0x40000000 | 0x20000000 | 0x08000000 | 0x04000000     # user, mount, net, pid, ipc, uts
MS_BIND, MS_REC, MS_PRIVATE, MS_NOSUID = 0x1000, 0x4000, 1 << 18, 2
AT_FDCWD, AT_RECURSIVE, RDONLY, NOSUID = -100, 0x8000, 1, 2
MOUNT_SETATTR = 442
PDEATHSIG, CAPBSET_DROP, NO_NEW_PRIVS, SIGKILL = 1, 24, 38, 9
FILE_BYTES = 64 << 20       # of a file that model code could write
libc = ctypes.CDLL(None, use_errno=True)


def call(name, *args):
    """A function of libc that returns -1 on errors."""
    args = [arg.encode() if isinstance(arg, str) else arg for arg in args]
    if getattr(libc, name)(*args) == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}", next((arg.decode() for arg in args if isinstance(arg, bytes)), None))


def set_flags(path, add, clear, recursive):
    attributes = (ctypes.c_uint64 * 4)(add, clear, 0, 0)
    call("syscall", MOUNT_SETATTR, AT_FDCWD, path, AT_RECURSIVE if recursive else 0, ctypes.byref(attributes), 32)


def enter_jail(root, work, mounts, hidden):
    """Goes into the namespaces; the rest of the program is a child that is process 1 there. Raises OSError where the system does not
    allow it.

    root: an empty folder, where the new root is built. work: the folder that stays writable. mounts: [(folder, where it shall be)].
    hidden: (an empty folder, the folders that it covers)."""
    user, group = os.getuid(), os.getgid()
    call("unshare", NAMESPACES)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    call("mount", "none", "/", None, MS_REC | MS_PRIVATE, None)
    call("mount", "tmpfs", root, "tmpfs", MS_NOSUID, "size=1m,mode=755")

    def bind(source, target):
        target = root + target
        if os.path.isdir(source):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            open(target, "a").close()
        call("mount", source, target, None, MS_BIND | MS_REC, None)

    for folder in ("/usr", "/bin", "/lib", "/lib64"):
        if os.path.islink(folder):
            os.symlink(os.readlink(folder), root + folder)
        elif os.path.isdir(folder):
            bind(folder, folder)
    for file in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/etc/ld.so.cache"):
        if os.path.exists(file):
            bind(file, file)
    for folder in (sys.base_prefix, sys.prefix):
        if not os.path.isdir(root + folder):
            bind(folder, folder)
    for source, target in mounts:
        bind(source, target)
    empty, covered = hidden
    for folder in covered:
        call("mount", empty, root + folder, None, MS_BIND, None)
    set_flags(root, RDONLY | NOSUID, 0, recursive=True)
    set_flags(root + work, 0, RDONLY, recursive=False)
    os.chroot(root)     # whoever is in one is allowed no namespaces of its own
    os.chdir(work)
    child = os.fork()
    if child:
        call("prctl", PDEATHSIG, SIGKILL, 0, 0, 0)
        os.closerange(0, 100)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    for capability in range(64):
        libc.prctl(CAPBSET_DROP, capability, 0, 0, 0)       # fails above the last one
    call("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
    call("capset", ctypes.byref((ctypes.c_uint32 * 2)(0x20080522, 0)), ctypes.byref((ctypes.c_uint32 * 6)()))
    call("prctl", PDEATHSIG, SIGKILL, 0, 0, 0)


def limit(megabytes):
    """Memory of this process, size of a file; no core files."""
    for what, most in ((resource.RLIMIT_AS, megabytes << 20), (resource.RLIMIT_FSIZE, FILE_BYTES), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (most, most))


class World:
    """The episodes of one world, one after the other."""

    def __init__(self, name, seconds, characters):
        self.name, self.seconds, self.characters, self.world = name, seconds, characters, None

    def load(self, task):
        from appworld import AppWorld
        if self.world:
            self.world.close()
        self.world = AppWorld(task_id=task, experiment_name=self.name, load_ground_truth=False, timeout_seconds=self.seconds)
        self.calls, self.begin = [], {}
        self.begin = self.changes()
        for app, functions in self.world.apis.items():
            for name, function in list(functions.items()):
                functions[name] = self.noted(f"{app}.{name}", function)
        return {}

    def noted(self, name, function):
        @functools.wraps(function)
        def noting(*args, **kwargs):
            answer, ok = None, False
            try:
                answer = function(*args, **kwargs)
                ok = not name.endswith(".login") or "access_token" in answer
                return answer
            finally:
                self.calls.append([name, ok])
        return noting

    def execute(self, code):
        """`output`: what was printed, cut. `calls`: [name, whether it went well] of the API calls of this code. `changes`: how many rows
        were touched since the start of the episode, {"app.table": {"added", "changed" or "removed": statements}}."""
        self.calls.clear()
        try:
            text = self.world.execute(code)
        except UnicodeEncodeError:      # half of a surrogate pair was printed: the engine's log, its last file, cannot hold it
            last = self.world.environment_io[-1]
            last["output"] = text = last["output"].encode("utf-8", "replace").decode()
            self.world.save_logs()
        if len(text) > self.characters:
            text = f"{text[:self.characters]}\n[cut here: {self.characters} of {len(text)} characters are shown; print less at a time]"
        more = {}
        for (table, word), count in self.changes().items():
            if count > self.begin.get((table, word), 0):
                more.setdefault(table, {})[word] = count - self.begin.get((table, word), 0)
        return {"output": text.encode("utf-8", "replace").decode(), "calls": self.calls[:2000], "changes": more,
                "completed": bool(self.world.task_completed())}

    def changes(self):
        """From the engine's own log of its databases: the SQL statements that came to those of the task's beginning. Those of the
        supervisor's app and of the search tables are not the agent's."""
        words, found = {"INSERT INTO": "added", "UPDATE": "changed", "DELETE FROM": "removed"}, {}
        folder = self.world.output_db_home_path_on_disk
        for file in sorted(os.listdir(folder)):
            app = file.removesuffix(".jsonl")
            if app == file or app == "supervisor":
                continue
            with open(os.path.join(folder, file)) as lines:
                for line in lines:
                    statement = re.match(r'\["(INSERT INTO|UPDATE|DELETE FROM) (\w+)', line)
                    if statement and "_fts" not in statement[2]:
                        what = f"{app}.{statement[2]}", words[statement[1]]
                        found[what] = found.get(what, 0) + 1
        return found


class Judge:
    def evaluate(self, task, folder):
        """The engine's evaluation of the state that a world has saved in `folder`, an absolute path in place of an experiment's name.
        `passed` and `needed`: of the tests that doing nothing fails, and saying at once that it is done too: where no answer is wanted,
        the test of the answer passes then. `failed`: what the tests that failed require."""
        from appworld.apps.model_lib import CachedDBHandler
        from appworld.evaluator import evaluate_task
        from appworld.task import Task
        CachedDBHandler.reset()
        done = evaluate_task(task_id=task, experiment_name=folder, save_report=False)
        free = "answers match" if Task.load(task).ground_truth.answer is None else None
        needed, passed = ([test for test in tests if test["label"] == "no_op_fail" and not (free and free in test["requirement"])]
                          for tests in (done.test_data, done.passes))
        return {"success": bool(done.success), "passed": len(passed), "needed": len(needed), "tests": len(done.test_data),
                "failed": [test["requirement"] for test in done.failures]}


def main():
    how = json.loads(sys.argv[1])
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 0), os.dup2(nothing, 1)

    def answer(number, **what):
        answers.write(json.dumps({"id": number, **what}) + "\n")
        answers.flush()

    if how["jail"]:
        try:
            enter_jail(**how["jail"])
        except (OSError, AttributeError) as error:     # AttributeError: not Linux
            return answer(0, error=str(error), jail=False)
    limit(how["memory_mb"])
    with contextlib.redirect_stdout(sys.stderr):
        import appworld
    part = World(how["name"], how["seconds"], how["characters"]) if how["role"] == "world" else Judge()
    answer(0, version=appworld.__version__)
    for line in requests:
        request = json.loads(line)
        number, do = request.pop("id"), getattr(part, request.pop("do"))
        try:
            done = do(**request)
        except Exception as error:  # the next answer would be of a broken engine
            answer(number, error=f"{type(error).__name__}: {error}"[:500])
            raise
        answer(number, **done)


if __name__ == "__main__":
    main()
