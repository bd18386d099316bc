"""The state of the Experience Funnel: a text of entries, edits of it, and the environment that shows it.

    from funnel.state import StateEnv, apply_edits

Phase I of arXiv 2609.08919, which follows SkillOpt (arXiv 2605.23904). A state is Markdown; an entry is a line "- ...".
An edit is {"op", "target", "content"}; op is append, insert_after, replace or delete. A target is an entry, matched
exactly (with or without its "- "). Where it is missing, replace and delete are refused, and insert_after appends.

What differs from SkillOpt: 1. targets are whole lines, not any substring; 2. an edit that would make the state longer
than its limit, or that adds what is there already, is refused.
"""
import math
from dataclasses import replace
from pathlib import Path

from envs import BadInput


class StateEnv:
    """Any environment with the state in what the policy sees. Everything else is the wrapped one's. An empty state
    changes nothing.

    place  "prompt": the state stands after the system prompt and a blank line (the paper's). "observation", ours, for a
           model too small to look a page up: an entry is quoted under each observation that it is about (`note_of`).
    """

    def __init__(self, env, state: str, place: str = "prompt"):
        self.env, self.state, self.place = env, state, place

    def __getattr__(self, name):
        return getattr(self.env, name)

    @property
    def system_prompt(self):
        return with_state(self.env.system_prompt, self.state if self.place == "prompt" else "")

    def reset(self, **how):
        return self._noted(*self.env.reset(**how))

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        if not (terminated or truncated):
            observation, info = self._noted(observation, info)
        return observation, reward, terminated, truncated, info

    def _noted(self, observation, info):
        """As a hint of enrich.py: `info["hint"]` says what was put under the observation."""
        note = note_of(self.state, observation) if self.place == "observation" else None
        return (f"{observation}\n{note}", {**info, "hint": note}) if note else (observation, info)


def situation(observation: str) -> str:
    """What an entry calls an observation by: its first and its last line."""
    lines = [line.strip() for line in observation.splitlines() if line.strip()] or [""]
    return " ".join(dict.fromkeys((lines[0], lines[-1]))).removesuffix(".")


def note_of(state: str, observation: str) -> str | None:
    """The first entry "- situation: action." about this observation, as the hint that names the action; else None."""
    for line in entries(state):
        about, colon, action = bare(line).removesuffix(".").rpartition(": ")
        if colon and about == situation(observation):
            return f"Hint: {action}."  # the words of Env.phrase
    return None


def with_notes(trajectory, state: str):
    """A trajectory without hints as it reads with the state in place "observation"."""
    def noted(text):
        return "\n".join(filter(None, (text, note_of(state, text))))

    return replace(trajectory, first_observation=noted(trajectory.first_observation),
                   turns=[replace(turn, observation=noted(turn.observation)) for turn in trajectory.turns])


def with_state(system_prompt: str, state: str) -> str:
    """The system prompt of a policy that sees the state; an empty state changes nothing."""
    return "\n\n".join(filter(None, (system_prompt, state.strip())))


def without_state(system_prompt: str, state: str) -> str:
    """The same prompt without it."""
    return system_prompt.removesuffix(state.strip()).removesuffix("\n\n") if state.strip() else system_prompt


def read_state(path, limit: int) -> str:
    """A state's file, which may have been edited by hand. Raises BadInput with one line."""
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"the state {path} cannot be read: {error}") from error
    if len(text) > limit:
        raise BadInput(f"the state {path} has {len(text):,} characters, more than the limit of {limit:,}: shorten it, or "
                       f"raise --state-limit")
    if "\0" in text:
        raise BadInput(f"the state {path} is not text: it holds a NUL character")
    return text


def entries(state: str) -> list[str]:
    return [line for line in state.splitlines() if line.startswith("- ")]


def bare(line: str) -> str:
    return line.strip().removeprefix("- ").strip()


def apply_edits(state: str, edits: list[dict], limit: int):
    """(the new state, edits applied, edits refused with their "reason"), one edit after the other."""
    lines, applied, refused = state.splitlines(), [], []
    for edit in edits:
        new, reason = apply_edit(lines, edit)
        if not reason and len("\n".join(new)) > limit:
            reason = f"the state would have {len(chr(10).join(new)):,} characters, more than the limit of {limit:,}"
        if reason:
            refused.append({**shortened(edit), "reason": reason})
        else:
            lines, applied = new, applied + [edit]
    return "\n".join(lines).strip(), applied, refused


def apply_edit(lines, edit):
    """(new lines, "") or (the lines, why not)."""
    op, target = edit["op"], bare(edit.get("target", ""))
    content = [f"- {bare(line)}" if not line.startswith("#") else line for line in edit.get("content", "").splitlines()
               if bare(line)]
    at = next((n for n, line in enumerate(lines) if target and bare(line) == target), None)
    if op in ("replace", "delete") and at is None:
        return lines, "its target is not in the state"
    if op != "delete" and not content:
        return lines, "it has no content"
    if op != "delete" and all(line in lines for line in content):
        return lines, "its content is in the state already"
    if op == "delete":
        return lines[:at] + lines[at + 1:], ""
    if op == "replace":
        return lines[:at] + content + lines[at + 1:], ""
    at = len(lines) - 1 if op == "append" or at is None else at
    return lines[:at + 1] + content + lines[at + 1:], ""


def shortened(edit, most=200):
    """For logs: an edit of a hundred thousand characters is not written out."""
    return {key: text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)" for key, text in edit.items()}


def edit_budget(round_, rounds, first=4, last=2) -> int:
    """Edits in this round (from 1): from `first` down to `last` along half a cosine."""
    share = (round_ - 1) / max(rounds - 1, 1)
    return round(last + (first - last) * (1 + math.cos(math.pi * share)) / 2)
