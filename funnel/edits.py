"""Edits as language models write them: JSON with prose, fences and drafts around it, or JSON that is not quite JSON.

    edits, dropped = parse_edits(answer, most=8)     # dropped: what was not kept, each with its reason
    order = parse_numbers(answer, below=12)          # of a ranking

An edit is {"op", "target", "content"} as state.py has it, and "support" where the model counted episodes. What can be read as strict
JSON is read so. The rest is read with these liberties: comments, commas too many or too few, single, curly or missing quotes, line
breaks and unescaped quotes inside a text, brackets that are missing, wrappers of any name, an op as a key or by another name, a text
as a list of its lines. An edit is kept whole or not at all: a text that has no end is never guessed. (The library json_repair ends it
where the next quote stands, so that prose becomes part of an edit, and takes 18 s for 200,000 brackets; so it is not used.) Text of a
model is never executed, and is read in time linear in its length.
"""
import json
import re
import unicodedata

from envs import after_thinking

OPS = {"append": ("content",), "insert_after": ("target", "content"), "replace": ("target", "content"),
       "delete": ("target",)}  # and what each needs
SAME = {"add": "append", "insert": "insert_after", "insertafter": "insert_after", "update": "replace", "remove": "delete"}
WRAPPERS = ("edits", "patch", "edit")
MOST = 200_000  # characters of an answer that are read
DEPTH = 8  # brackets inside brackets
CLOSERS = {'"': '"', "'": "'", "“": "”“\"", "”": "”", "‘": "’‘'", "’": "’"}
QUOTE = "[\"'“”‘’]"
GAP = re.compile(r"(?:[\s,;]|//[^\n]*+|/\*(?s:.{0,999}?)\*/|#[^\n]*+)*+")  # what may stand between two values
KEY = re.compile(rf"{QUOTE}([\w -]{{1,60}}+){QUOTE}\s*+:|(\w{{1,60}}+)\s*+[:=]")
EDIT = re.compile(rf"\{{\s*+(?:{QUOTE}\w{{1,60}}+{QUOTE}|\w{{1,60}}+)\s*+:")  # where an object begins
OPENED = re.compile(rf"\w{{1,60}}+{QUOTE}\s*+:")  # behind "{" and a quote: no text goes on there, an object begins
WORD = re.compile(r"[\w.+-]++")
LAST = re.compile(r"\s*+\Z")
WORDS = {"true": True, "false": False, "null": None, "none": None, "nan": None}
# A quote ends a text where this follows. Other quotes are part of the text
KNOWN = "(?:op|target|content|support)"
ENDS = {"object": re.compile(rf"\s*+(?:[}}\]]|$|//|/\*|\#|,\s*+(?:[}}\]{{]|$|//|/\*|\#|{QUOTE}[\w -]{{1,60}}+{QUOTE}\s*+:|{KNOWN}\s*+[:=])"
                             rf"|\{{|{QUOTE}{KNOWN}{QUOTE}\s*+:)"), "list": re.compile(r"\s*+(?:[\],]|$)")}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "'": "'", "\\": "\\", "/": "/", "\n": "\n"}


class Broken(ValueError):
    """A value that cannot be read whole."""


class Exhausted(Exception):
    """The answer has been read over and over: it goes no further."""


class Reader:
    """Values in a text. `dropped`: the objects that began like an edit and could not be read whole."""

    def __init__(self, text):
        self.text, self.at, self.dropped = text, 0, []
        self.left = 20 * len(text) + 10_000  # characters that may be looked at, in all tries together

    def spend(self, characters):
        self.left -= characters
        if self.left < 0:
            raise Exhausted

    def skip(self):
        """Go to the next character that says something, and return it."""
        end = GAP.match(self.text, self.at).end()
        self.spend(end - self.at + 1)
        self.at = end
        return self.text[end:end + 1]

    def values(self):
        """[(where it begins, where it ends, value)] of the lists and objects that stand in the text."""
        found = []
        try:
            while begin := re.compile(r"[\[{]").search(self.text, self.at):
                self.at = begin.start()
                try:
                    value = self.value(0, "list")
                    found.append((begin.start(), self.at, value))
                except Broken:
                    self.drop(begin.start())
                    self.at = begin.end()
        except Exhausted:
            self.drop(self.at, always=True)
        return found

    def drop(self, start, always=False):
        piece = self.text[start:start + 200]
        if always or EDIT.match(piece) and re.search(rf"{QUOTE}?\bop\b{QUOTE}?\s*[:=]", piece):
            self.dropped.append({"answer": piece, "reason": "it is cut off, or cannot be read"})

    def value(self, depth, inside):
        if depth > DEPTH:
            raise Broken
        first = self.text[self.at]
        if first in "[{":
            start = self.at
            try:
                value, self.at = json.JSONDecoder(strict=False).raw_decode(self.text, start)
                self.spend(self.at - start)
                return value
            except (ValueError, RecursionError):
                self.spend(len(self.text) // 20)  # the error counts the lines up to it
            self.at = start + 1
            return self.list(depth) if first == "[" else self.object(depth)
        if self.text.startswith('"""', self.at) and (end := self.text.find('"""', self.at + 3)) > 0:
            start, self.at = self.at + 3, end + 3
            return self.text[start:end]
        if first in CLOSERS:
            return self.string(CLOSERS[first], ENDS[inside])
        word = WORD.match(self.text, self.at)
        if not word:
            raise Broken
        text, self.at = word[0], word.end()
        if text.lower() in WORDS:
            return WORDS[text.lower()]
        if re.fullmatch(r"[+-]?\d{1,15}", text):
            return int(text)
        if not re.match(r"\s*+[,}\]]", self.text[self.at:self.at + 20]) or inside == "list" and text[0].isalpha():
            raise Broken  # prose
        return text

    def list(self, depth):
        items = []
        while (first := self.skip()) != "]":
            start = self.at
            if not first:
                return items or None  # its bracket is missing
            if first == "}":  # one too many
                self.at += 1
                continue
            try:
                items.append(self.object(depth + 1) if KEY.match(self.text, start) else self.value(depth + 1, "list"))
            except Broken:
                self.drop(start)
                begin = EDIT.search(self.text, start + 1)
                self.spend((begin.start() if begin else len(self.text)) - start)
                between = self.text[start:begin.start()].rstrip() if begin else ""
                if not begin or between.endswith("[") or "\n```" in between:  # another list
                    self.at = max(start + 1, start + len(between) - between.endswith("["))
                    return items or None
                self.at = begin.start()
        self.at += 1
        return items

    def object(self, depth):
        found = {}
        while (first := self.skip()) != "}":
            if not first or first == "]" or first == "{" and found:
                return found  # its bracket is missing
            key = KEY.match(self.text, self.at)
            if not key:
                raise Broken
            self.at = key.end()
            if not self.skip():
                raise Broken
            found[key[1] or key[2]] = self.value(depth + 1, "object")
        self.at += 1
        return found

    def string(self, closers, ends):
        start = last = self.at + 1
        for mark in re.compile(rf"\\.|[{closers}]", re.DOTALL).finditer(self.text, start):
            self.spend(mark.start() - last + 1)
            last = mark.start()
            if mark[0][0] == "\\":
                continue
            if ends.match(self.text, mark.end()):
                self.at, text = mark.end(), self.text[start:mark.start()]
                if text.count("\n```") % 2:  # the end of a fence: what was inside was cut
                    raise Broken
                if LAST.match(self.text, self.at) and ("'" in closers or text[-1:].isspace()):  # cut behind an apostrophe, or in a quote
                    raise Broken
                return unescaped(text)
            if self.text[max(start, last - 9):last].rstrip().endswith("{") and OPENED.match(self.text, mark.end()):
                raise Broken
        self.spend(len(self.text) - last)
        raise Broken


def unescaped(text):
    text = re.sub(r"(?s)\\(u[0-9a-fA-F]{4}|.)", lambda m: chr(int(m[1][1:], 16)) if len(m[1]) == 5 else ESCAPES.get(m[1], m[0]), text)
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")  # halves of a pair are joined
    except UnicodeDecodeError:
        return text


def edits_of(value, depth=0):
    """The list of edits that a value is or holds, in whatever is wrapped around them, or None."""
    if depth > DEPTH:
        return None
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{") and "op" in value:
        return last_list(value)[0]
    if isinstance(value, list):
        found = [(item, edits_of(item, depth + 1)) for item in value if item is not None]
        if found and not any(isinstance(item, dict) or edits for item, edits in found):
            return None
        return [edit for item, edits in found for edit in ([item] if edits is None else edits)]
    if not isinstance(value, dict):
        return None
    if "op" in value:
        return [value]
    wrapped = [edits_of(value[key], depth + 1) for key in WRAPPERS if key in value]
    if wrapped:
        return next(filter(None, wrapped), wrapped[0])
    if OPS.keys() & value.keys():  # {"append": content} or {"append": [content, ...]}
        return [{"op": op, **(item if isinstance(item, dict) else {**value, OPS[op][0]: item})} for op in value if op in OPS
                for item in (value[op] if isinstance(value[op], list) else [value[op]])]
    held = [edits_of(item, depth + 1) for item in value.values() if isinstance(item, (dict, list))]
    return [edit for edits in held if edits and any(isinstance(edit, dict) and "op" in edit for edit in edits) for edit in edits] or None


def last_list(text):
    """(the edits that count or None, [dropped ones]). Objects that stand by themselves make one list, and of several lists the last
    one counts: before it come drafts and examples."""
    if re.search(r'\{(?:\s|\\[nrt])*+\\"', text) and not re.search(rf"(?<!\\){QUOTE}\s*+:", text):  # JSON quoted as JSON
        text = unescaped(text)
    reader, lists, before = Reader(text), [], 0
    for start, end, value in reader.values():
        line = text[text.rfind("\n", 0, start) + 1:start]
        edits, alone = edits_of(value), isinstance(value, dict) and "op" in value
        prose = bool(re.search(r"[^\W\d_]", line)) and not lists_on(line)
        rest = text[end:(text.find("\n", end) + 1 or len(text) + 1) - 1]
        if edits is None or not edits and isinstance(value, list) and (line.strip(" `*") or rest.strip(" `*.")):
            continue  # no edits, or "[]" in a sentence
        joined = lists and not re.search(r"[^\s,;\[\]{}]", text[before:start])
        if lists and (joined or alone and lists[-1]["alone"] and lists[-1]["prose"] == prose):
            lists[-1]["edits"] += edits
        else:
            lists.append({"edits": list(edits), "alone": alone, "prose": prose})
        before = end
    if any(not (found["alone"] and found["prose"]) for found in lists):  # an edit in the middle of a sentence is an example
        lists.sort(key=lambda found: not (found["alone"] and found["prose"]))
    counts = max(range(len(lists)), key=lambda n: (any(not checked(edit)[1] for edit in lists[n]["edits"]), bool(lists[n]["edits"]), n),
                 default=-1)
    if lists and not lists[-1]["edits"] and not reader.dropped:
        counts = len(lists) - 1  # the last word was: no edits
    return lists[counts]["edits"] if lists else None, reader.dropped + [
        dropped(edit, checked(edit)[1] or "a later list in the answer takes its place")
        for n, found in enumerate(lists) if n != counts for edit in found["edits"]]


def lists_on(line):
    """A label before an edit, such as "Edit 2:"."""
    return re.fullmatch(r"\W*(?:edit|patch|change|json)?\W*\d*\W*", line, re.IGNORECASE)


def dropped(edit, reason):
    return {"answer": json.dumps(edit, ensure_ascii=False)[:200], "reason": reason}


def checked(item):
    """(edit, "") or (None, why it is none): a known op, its texts there and of text; no more than that is kept, and "support" if it
    begins with a number of episodes."""
    op = item.get("op") if isinstance(item, dict) else None
    op = re.sub(r"[\s-]+", "_", op.strip().lower()) if isinstance(op, str) else None
    op = SAME.get(op, op)
    needs = OPS.get(op, ())
    if not needs:
        return None, f"op is not one of {', '.join(OPS)}"
    texts = {key: item.get(key) for key in needs}
    texts = {key: "\n".join(text) if isinstance(text, list) and all(isinstance(line, str) for line in text) else text
             for key, text in texts.items()}
    if not all(isinstance(text, str) and text.strip() for text in texts.values()):
        return None, f"{op} needs {' and '.join(needs)} as text"
    texts = {key: text.replace("\r\n", "\n").strip("\n").rstrip() for key, text in texts.items()}
    if any(unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t" for text in texts.values() for c in text):
        return None, "it holds a control character"
    support = re.match(r"\d{1,4}\b", str(item.get("support", item.get("support_count", ""))).strip())
    return {"op": op, **texts, **({"support": int(support[0])} if support else {})}, ""


def parse_edits(answer, most):
    """A model's answer -> (at most `most` edits, [what was dropped, with its reason]). Tolerant of the form, strict about each edit."""
    text = after_thinking(answer)
    if text is None:
        return [], [{"answer": answer[-200:], "reason": "the editor's thinking did not end"}]
    found, lost = last_list(text[:MOST])
    if found is None:
        return [], lost or [{"answer": answer[:200], "reason": "the editor's answer holds no JSON list of edits"}]
    edits = []
    for item in found:
        edit, reason = checked(item)
        if edit and len(edits) < most:
            edits.append(edit)
        else:
            lost.append(dropped(item, reason or f"over the budget of {most} edits"))
    return edits, lost


def parse_numbers(answer, below):
    """The distinct whole numbers under `below` in the last list of an answer that is called "order", else in its last list of numbers."""
    text = (after_thinking(answer) or "")[:MOST]
    lists = re.findall(r"order[\"'\s:=]*+\[([^\[\]]*)", text) or re.findall(r"\[\s*+(\d[\d\s,]*)", text)
    numbers = [int(number) for number in re.findall(r"\b\d{1,6}\b", lists[-1])] if lists else []
    return [number for number in dict.fromkeys(numbers) if number < below]
