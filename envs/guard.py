"""An environment's answer within a time limit and of the contract's types, or `EnvironmentBroke`.

A broken environment must not end a run of days: the caller ends that episode alone.
"""
import contextlib
import signal
import threading

from envs import BadInput


class EnvironmentBroke(Exception):
    """The message says what went wrong."""


class TookTooLong(BaseException):
    """Not an Exception, so that an environment that catches everything does not catch this."""


@contextlib.contextmanager
def time_limit(seconds):
    """Raise TookTooLong in the block after so many seconds, whatever it waits for in Python or in a system call. 0: no limit; in the
    main thread only."""
    def late(*_):
        raise TookTooLong

    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # and again each second, if it is swallowed
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def reset(env, seconds, **how) -> tuple[str, dict]:
    """(observation, info) of `env.reset(**how)`. Raises EnvironmentBroke, and BadInput where the environment does."""
    return guarded(lambda: env.reset(**how), (str, dict), seconds)


def step(env, seconds, action) -> tuple[str, float, bool, bool, dict]:
    """(observation, reward, terminated, truncated, info) of `env.step(action)`. Raises as `reset`."""
    return guarded(lambda: env.step(action), (str, float, bool, bool, dict), seconds)


def guarded(call, types, seconds) -> tuple:
    try:
        with time_limit(seconds):
            answer = call()
        if len(answer) != len(types) or not isinstance(answer[0], str):
            raise TypeError(f"expected {len(types)} values, text first, got {type(answer[0]).__name__} of {len(answer)}")
        return tuple(kind(value) for kind, value in zip(types, answer))
    except BadInput:
        raise
    except TookTooLong as error:
        raise EnvironmentBroke(f"no answer in {seconds:g} s") from error
    except Exception as error:
        raise EnvironmentBroke(f"{type(error).__name__}: {error}") from error
