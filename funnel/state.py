"""The state of the Experience Funnel: a text of entries, edits of it, and the environment that shows it.

    from funnel.state import StateEnv, apply_edits

Phase I of arXiv 2609.08919, which follows SkillOpt (arXiv 2605.23904). A state is Markdown, and stays as it was written. An entry
is an item of a list, "- ..." or "1. ...", with what is nested in it; headings, tables and other text are no entries. An edit is
{"op", "target", "content"}; op is append, insert_after, replace or delete. A target is a line of the state, or several, matched
exactly, or but for the marks of a list. Where it is missing, replace and delete are refused, and insert_after appends.

What differs from SkillOpt: 1. targets are whole lines, not any substring; 2. an edit that would make the state longer than its limit,
or that adds what is there already, is refused; 3. what is inserted after an item goes behind what is nested in it, and an item that
is deleted takes that along.
"""
import math
import re
from dataclasses import replace
from pathlib import Path

from envs import BadInput

HEADING = "## Notes"  # above the state, in the policy's prompts and the editor's
MARK = re.compile(r"(?:[-*+]|\d+[.)])[ \t]+")  # of an item of a list


class StateEnv:
    """Any environment with the state in what the policy sees. Everything else is the wrapped one's. An empty state
    changes nothing.

    place  "prompt": the state stands after the system prompt, under a heading (as SkillOpt's does). "observation", ours, for a
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
    return "\n\n".join(filter(None, (system_prompt, headed(state))))


def without_state(system_prompt: str, state: str) -> str:
    """The same prompt without it."""
    return system_prompt.removesuffix(headed(state)).removesuffix("\n\n") if state.strip() else system_prompt


def headed(state: str) -> str:
    return f"{HEADING}\n\n{state.strip()}" if state.strip() else ""


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
    """The items of lists at the top level, each with the indented lines below it."""
    lines = state.splitlines()
    return ["\n".join(lines[begin:end]) for begin, end in items(lines)]


def items(lines) -> list[tuple[int, int]]:
    """Where the entries stand: [(first line, line after the last)]. Code between fences holds none."""
    found, code = [], False
    for n, line in enumerate(lines):
        code ^= line.startswith("```")
        if not code and MARK.match(line):
            below = (m for m in range(n + 1, len(lines)) if lines[m].strip() and not lines[m][0].isspace())
            end = next(below, len(lines))
            while not lines[end - 1].strip():
                end -= 1
            found.append((n, end))
    return found


def without_entries(state: str, gone) -> str:
    """The state without these of its entries."""
    lines = state.splitlines()
    for begin, end in reversed(items(lines)):
        if "\n".join(lines[begin:end]) in gone:
            del lines[begin:end]
    return "\n".join(lines).strip()


def bare(line: str) -> str:
    """A line without the marks of a list."""
    return MARK.sub("", line.strip(), count=1).strip()


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
    op, content = edit["op"], edit.get("content", "").strip("\n").rstrip().splitlines()
    begin, end = place_of(edit.get("target", ""), lines)
    if op in ("replace", "delete") and begin is None:
        return lines, "its target is not in the state"
    if op != "delete" and not any(bare(line) for line in content):
        return lines, "it has no content"
    there = {bare(line) for line in lines}
    if op != "delete" and all(bare(line) in there for line in content if bare(line)):
        return lines, "its content is in the state already"
    if op == "append" or begin is None:
        begin = end = len(lines)
    elif op == "insert_after" or op == "delete":
        inside = op == "insert_after" and content[0][:1].isspace()  # it is to be nested itself
        end = next((last for first, last in items(lines) if first == end - 1 and not inside), end)
        begin = end if op == "insert_after" else begin
    if op == "delete":
        content = []
    head, tail = lines[:begin], lines[end:]
    if not content:
        tail = tail[1:] if head and tail and not head[-1].strip() and not tail[0].strip() else tail  # one blank line, not two
        return head + tail, ""
    return [*head, *[""] * apart(head, content), *content, *[""] * apart(content, tail), *tail], ""


def place_of(target: str, lines):
    """(first line, line after the last) of the target in the lines, or (None, None): as it stands, else but for marks of lists."""
    for as_it_is in (str.rstrip, bare):
        wanted = [as_it_is(line) for line in target.strip("\n").splitlines()]
        shown = [as_it_is(line) for line in lines]
        for n in range(len(lines) - len(wanted) + 1):
            if any(wanted) and shown[n:n + len(wanted)] == wanted:
                return n, n + len(wanted)
    return None, None


def apart(above, below) -> bool:
    """Does Markdown need a blank line between these lines? Not between items of a list, rows of a table, or under a heading."""
    def kind(line):
        return "list" if MARK.match(line.lstrip()) or line[:1].isspace() else "table" if line.startswith("|") else ""

    if not above or not below or not above[-1].strip() or not below[0].strip():
        return False
    if above[-1].startswith("#"):
        return below[0].startswith("#")
    return not kind(above[-1]) or kind(above[-1]) != kind(below[0])


def shortened(edit, most=200):
    """For logs: an edit of a hundred thousand characters is not written out."""
    return {key: f"{text[:most]}... ({len(text):,} characters)" if isinstance(text, str) and len(text) > most else text
            for key, text in edit.items()}


def edit_budget(round_, rounds, first=4, last=2) -> int:
    """Edits in this round (from 1): from `first` down to `last` along half a cosine."""
    share = (round_ - 1) / max(rounds - 1, 1)
    return round(last + (first - last) * (1 + math.cos(math.pi * share)) / 2)
