"""The one rule that reads an action in what a policy writes. docs/actions.md has the table of forms.

    thinking       what stands up to the last </think> does not count. Where thinking was begun and not ended there is no action,
                   whatever stands in the text.
    a tag          the last complete <action>...</action> counts, in any case. One that is opened and never closed is no action.
    no tag         the last line that is a command. What is one, the environment says by `is_command`; the first line without that.
    decoration     around a command is taken off: "Action:", "Action 9:", "1.", "-", ">", quotation as code, bold, a final full stop.
                   A line that is a command as it stands stays as it is.
"""
import re
import string

UNFINISHED = "Your thinking did not end: end it sooner, then write the answer."
LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)  # str.lower may change the length
FENCE = re.compile(r"\s*`{3,}\w*\s*")
BEFORE = re.compile(r"(?:[\s*`>]|action(?:\s+\d+)?[\s*]*:|(?:\d+[.)]|-)\s)+", re.IGNORECASE)


def after_thinking(text: str) -> str | None:
    """The text behind the thinking, or None where thinking was begun and not ended."""
    rest = text.rpartition("</think>")[2]
    return None if "<think>" in rest else rest


def last_tag(text: str, names=("action",)) -> tuple[str, str] | None:
    """(name, content) of the complete tag that ends last, in any case, or None. A stray end behind it, <a>x</a></a>, changes
    nothing. Linear in the text, whatever it holds."""
    lower = text.translate(LOWER)
    end, name = max((lower.rfind(f"</{name}>"), name) for name in names)
    start = lower.rfind(f"<{name}>", 0, end) if end >= 0 else -1
    return (name, text[start + len(name) + 2:lower.find(f"</{name}>", start)].strip()) if start >= 0 else None


def parse_action(text: str, is_command=None) -> str:
    """The command in a policy's raw text of a turn, or "" where there is none.

    is_command: says of a line whether it is a command here. Of several lines the last that is one counts; a single line comes back
    even if it is none, so that the environment can say so in its own words.
    """
    text = after_thinking(text) or ""
    if tag := last_tag(text):
        text = tag[1]
    elif "<action>" in text.translate(LOWER):
        return ""
    lines = [line.strip() for line in text.splitlines() if not FENCE.fullmatch(line)]
    lines = [line if is_command and is_command(line) else bare(line) for line in lines]
    lines = [line for line in lines if line]
    if is_command is None or len(lines) == 1:
        return lines[0] if lines else ""
    return next((line for line in reversed(lines) if is_command(line)), "")


def bare(line: str) -> str:
    """A line without the decoration of a command."""
    begin = BEFORE.match(line)
    return line[begin.end() if begin else 0:].rstrip("*`. \t")


def invalid(answer: str, text: str) -> str:
    """An environment's answer to an invalid action, and where thinking did not end, that."""
    return f"{answer}\n{UNFINISHED}" if after_thinking(text) is None else answer
