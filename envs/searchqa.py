"""SearchQA: a question, a context, an answer in <answer></answer>; and the same over a search of passages.

Benchmark: Dunn et al., "SearchQA", arXiv 1704.05179, as the Experience Funnel (arXiv 2609.08919) uses it: single-turn
reading comprehension, most likely on the 400 / 200 / 1400 questions that SkillOpt (arXiv 2605.23904) lists by id from the
hub's `lucadiliello/searchqa`. As in SkillOpt's released code (microsoft/SkillOpt, skillopt/envs/searchqa), the context is cut before
the "[DOC]" that would go over 6,000 characters, and the answer is the content of the last <answer></answer>, in any case, else the
last line that is not empty. Reward: exact match after SQuAD's normalisation
(lower case, no punctuation, no a/an/the), 1 or 0; `info["score"]`: F1 over the normalised words; the best over the gold
answers for both.

    (nothing)            the hub's questions, 400 / 200 / 1400 of them drawn by us
    ids=DIR              the hub's questions with the ids in DIR/{train,val,test}/items.json, as microsoft/SkillOpt releases them in
                         data/searchqa_id_split: lists of {"id": the hub's "key"}
    data=FILE            your own: JSON lines of records, a JSON list of them, or {"questions": [...], "passages": [...]}
    data=FILE retrieval=true    several turns: <search>query</search> shows passages of the file, until <answer></answer>

A record is {"question", "answers" (a list or one text), "context" or "passages" (indices into the file's list)} and, where
there are, "id" (or "key"), "source" (the first part of the task id), "supporting_titles" (for hints and gold actions) and
"split" (train, valid or test). A passage is {"title", "text"}. Records without "split" are drawn: by the hash of
the question, so equal questions share a split. The hub could not be reached where this was written: loading from it was
tried on a stand-in of the same form alone.

Deviations and decisions, ours
 1. What stands up to the last </think> is no answer and holds none, and thinking that did not end has no answer at all; the released
    scorer reads the whole text. `<answer>a <answer>b</answer>` is b here, and wrong there. In retrieval a turn without a tag is
    invalid and no answer.
 2. A text that normalises to nothing ("The", "?") is compared as it is; officially it would equal an empty answer.
 3. An output over 20,000 characters is invalid. The question ends at 6,000 characters, and so does a context without a "[DOC]".
 4. Retrieval (not in the paper): BM25 over all passages of the file, those of other questions included; `top` passages a
    search, 6,000 characters in all; after `turns` turns without an answer the episode is truncated. Of several
    complete tags the last decides, search or answer.
 5. Hints are ours. Guidance names the supporting passages: in retrieval the next search by title. Enrichment (retrieval):
    which passages were shown so far, and how many of the needed ones are among them.
"""
import functools
import hashlib
import json
import re
import string
from collections import Counter
from dataclasses import replace
from pathlib import Path

from envs import BadInput, Env, reference_lines, refuse_unknown
from envs.action import after_thinking, invalid, last_tag

HUB = "lucadiliello/searchqa"
SPLITS = ("train", "valid", "test")
NAMES = {"val": "valid", "validation": "valid", "dev": "valid"}     # other names of a split
MAX_CONTEXT = 6000      # characters
DOC = "[DOC]"           # begins each document of a context
MAX_OUTPUT = 20_000     # characters; a query beyond its first 1,000 is cut

ANSWER = """Answer the question from the context. Think first if you like, then give the answer alone, as short as it can \
be, inside <answer></answer>."""
SEARCH = """You answer a question with the help of a search over passages. Each turn, write one of:
<search>words to look for</search>   to see the best passages
<answer>the answer alone, as short as it can be</answer>   once, which ends it
You have {turns} turns."""


# The score

def normalise(text: str) -> str:
    """SQuAD's: lower case, no punctuation, no articles, single spaces; see deviation 2."""
    bare = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split()) or text.lower().strip()


def exact_match(answer: str, golds: list[str]) -> float:
    return float(normalise(answer) in map(normalise, golds))


def f1(answer: str, golds: list[str]) -> float:
    """The best over the gold answers of 2 * common words / all words of both."""
    words, *golds = (Counter(normalise(text).split()) for text in (answer, *golds))
    return max((2 * (words & gold).total() / max(words.total() + gold.total(), 1) for gold in golds), default=0.0)


# The data

def clean(value, limit=None) -> str:
    """A text that any tokenizer can encode (no lone surrogates), cut."""
    return str(value).encode("utf-8", "replace").decode("utf-8")[:limit]


def whole_documents(context: str) -> str:
    """At most MAX_CONTEXT characters of a context, cut before a "[DOC]" where it has several. As in SkillOpt's released code the first
    "[DOC]" is not counted; here it stays."""
    most = MAX_CONTEXT + len(DOC) * context.startswith(DOC)
    border = context.rfind(DOC, 1, most + len(DOC))
    return context if len(context) <= most else context[:border] if border > 0 else context[:MAX_CONTEXT]


def record_of(raw, number: int, passages: list[dict]) -> dict:
    """One record of the file or the hub, checked. Raises BadInput."""
    def fail(reason):
        raise BadInput(f"searchqa: record {number} {reason}; envs/searchqa.py says what a record holds")
    if not isinstance(raw, dict) or not isinstance(raw.get("question"), str):
        fail("has no question")
    answers = raw.get("answers", raw.get("answer"))
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        fail("has no answers (a list of texts)")
    titles, own, context = raw.get("supporting_titles") or [], raw.get("passages"), raw.get("context")
    if not isinstance(titles, list):
        fail("has supporting_titles that are no list")
    if context is None and own is not None:
        if not isinstance(own, list) or not all(type(index) is int and 0 <= index < len(passages) for index in own):
            fail(f"has passages that are no indices below {len(passages)}")
        context = "\n".join(f"{passages[index]['title']}: {passages[index]['text']}" for index in own)
    split = raw.get("split")
    split = NAMES.get(split, split) if isinstance(split, str) else split
    if split is not None and split not in SPLITS:
        fail(f"has the split {split!r}: use {', '.join(SPLITS)}")
    name = re.sub(r"[^\w.-]+", "-", clean(raw.get("source") or "searchqa"))
    return {"task": f"{name}/{clean(raw.get('id', raw.get('key', f'{number:05d}')))}", "split": split,
            "question": clean(raw["question"], MAX_CONTEXT).strip(), "answers": [clean(a).strip() for a in answers],
            "context": None if context is None else whole_documents(clean(context)), "titles": [clean(t) for t in titles]}


def read_file(path: str):
    """(raw records, passages) of a local file. Raises BadInput."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        try:
            content = json.loads(text)
        except ValueError:
            content = [json.loads(line) for line in text.splitlines() if line.strip()]      # JSON lines
        if not isinstance(content, dict) or "questions" not in content:
            content = {"questions": [content] if isinstance(content, dict) else content}    # a single line is a record
        passages = [{"title": clean(p["title"]), "text": clean(p["text"])} for p in content.get("passages", [])]
        if not isinstance(content["questions"], list):
            raise TypeError("questions is no list")
    except OSError as error:
        raise BadInput(f"searchqa: data={path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise BadInput(f"searchqa: data={path} is no JSON of records and passages ({type(error).__name__}: {error}); "
                       "envs/searchqa.py says what it holds") from error
    return content["questions"], passages


def read_hub(ids: str | None, seed: int) -> list[dict]:
    """The hub's rows that are wanted, each with its split: by the id lists, or 400 / 200 / 1400 of all."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise BadInput("searchqa needs the package 'datasets' for the public questions (pip install -r "
                       "envs/searchqa-requirements.txt), or --env-options data=FILE") from error
    try:
        parts = list(datasets.load_dataset(HUB).values())
    except Exception as error:      # a missing network has many names here
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise BadInput(f"searchqa: {HUB} could not be loaded, which needs the network the first time ({reason}); "
                       "or pass --env-options data=FILE") from error
    places = {str(key): (part, row) for part in parts for row, key in enumerate(part["key"])}
    if ids:
        wanted = {}
        for split, folder in zip(SPLITS, ("train", "val", "test")):
            try:
                items = json.loads((Path(ids).expanduser() / folder / "items.json").read_text(encoding="utf-8"))
                wanted |= {str(item["id"]): split for item in items}
            except (OSError, ValueError, TypeError, KeyError) as error:
                raise BadInput(f"searchqa: ids={ids} needs {folder}/items.json, a list of records with an id "
                               f"({error!r})") from error
        missing = [key for key in wanted if key not in places]
        if missing:
            raise BadInput(f"searchqa: {len(missing)} of {len(wanted)} ids in {ids} are not in {HUB}: {missing[0]!r}, ...")
    else:
        drawn = sorted(places, key=lambda key: digest(key, seed))[:2000]
        wanted = dict(zip(drawn, ["train"] * 400 + ["valid"] * 200 + ["test"] * 1400))
    return [{**dict(places[key][0][places[key][1]]), "id": key, "split": split} for key, split in wanted.items()]


def digest(text: str, seed: int) -> bytes:
    return hashlib.sha256(f"searchqa {seed} {text}".encode()).digest()


@functools.lru_cache(8)
def load(data, ids, shares, seed) -> tuple[dict[str, dict[str, dict]], list[dict]]:
    """({split: {task: record}}, passages): read once in a process, never changed."""
    raw, passages = read_file(data) if data else (read_hub(ids, seed), [])
    records = [record_of(item, number, passages) for number, item in enumerate(raw)]
    drawn = sorted({normalise(r["question"]) for r in records if not r["split"]}, key=lambda text: digest(text, seed))
    cuts = [round(len(drawn) * sum(shares[:n]) / sum(shares)) for n in range(4)]
    of = {question: split for n, split in enumerate(SPLITS) for question in drawn[cuts[n]:cuts[n + 1]]}
    splits = {split: {} for split in SPLITS}
    for record in records:
        if any(record["task"] in tasks for tasks in splits.values()):
            raise BadInput(f"searchqa: two records have the id {record['task']!r}: ids must differ")
        splits[record["split"] or of[normalise(record["question"])]][record["task"]] = record
    return splits, passages


@functools.lru_cache(8)
def index(data):
    """search(query, top) -> numbers of the `top` best passages of the file, by BM25, that share a word with the query, best
    first; ties in the file's order."""
    try:
        import bm25s
    except ModuleNotFoundError as error:
        raise BadInput("searchqa retrieval=true needs the package 'bm25s': pip install bm25s") from error
    words_of = functools.partial(bm25s.tokenize, return_ids=False, show_progress=False)
    words = words_of([f"{p['title']} {p['text']}" for p in read_file(data)[1]])
    if not any(words):
        raise BadInput(f"searchqa: retrieval=true needs passages, and data={data} has no list of them")
    made = bm25s.BM25()
    made.index(words, show_progress=False)

    def search(query: str, top: int) -> list[int]:
        words = words_of([clean(query, 1000)])[0]
        if not words:
            return []
        scores = made.get_scores(words)      # words of no passage count nothing
        return [int(n) for n in (-scores).argsort(kind="stable")[:top] if scores[n] > 0]

    return search


# The environment

class SearchQA(Env):
    """Options: data, ids, retrieval (see above), shares (of train, valid and test where we draw them; the default is
    SkillOpt's 400 / 200 / 1400), split_seed, and for retrieval turns and top (passages a search). `info["reference"]` has, after
    each step, the question, the right answers, the answer that was read, exact match and F1."""

    defaults = {"max_context": 6144, "max_new_tokens": 512}
    analyst_note = ("An answer is right if it equals one of the right answers but for case, punctuation and articles. The context is "
                    "what a search engine found, and need not hold the answer.")

    def __init__(self, data=None, ids=None, shares="20,10,70", split_seed=0, retrieval=False, turns=6, top=3):
        options = checked_options(data, ids, shares, split_seed)
        refuse_unknown("retrieval", str(retrieval).lower(), ("true", "false"))
        for option, value, most in (("turns", turns, 100), ("top", top, 20)):
            if type(value) is not int or not 1 <= value <= most:
                raise BadInput(f"searchqa: {option} must be a whole number in 1..{most}, got {value!r}")
        self.retrieval, self.top = str(retrieval).lower() == "true", top
        if self.retrieval and not data:
            raise BadInput("searchqa: retrieval=true needs --env-options data=FILE with a list of passages")
        self._splits, self._passages = load(*options)
        self._find = index(options[0]) if self.retrieval else None
        self.max_turns = turns if self.retrieval else 1
        self.system_prompt = SEARCH.format(turns=turns) if self.retrieval else ANSWER
        self._done = True

    @classmethod
    def tasks(cls, split, data=None, ids=None, shares="20,10,70", split_seed=0):
        """Ids `source/id`, in the order of the file or of the id lists."""
        refuse_unknown("split", split, SPLITS)
        return list(load(*checked_options(data, ids, shares, split_seed))[0][split])

    def reset(self, *, task, seed):
        """Nothing is drawn at random: `seed` changes nothing."""
        record = next((tasks[task] for tasks in self._splits.values() if task in tasks), None)
        if record is None:
            known = next((known for tasks in self._splits.values() for known in tasks), "source/id")
            raise BadInput(f"searchqa: unknown task {clean(task, 80)!r}: ids look like {known}")
        self._record, self._turn, self._shown, self._queries, self._done = record, 0, [], [], False
        question = f"Question: {record['question']}"
        if record["context"] and not self.retrieval:
            question = f"Context:\n{record['context']}\n\n{question}"
        return question, {"success": False, "valid": True, "score": 0.0}

    def step(self, action):
        """`info["score"]` is F1. Raises RuntimeError after the end."""
        if self._done:
            raise RuntimeError("the episode is over: call reset")
        self._turn += 1
        names = ("search", "answer") if self.retrieval else ("answer",)
        text = after_thinking(action) or ""
        tag = last_tag(text, names) if len(action) <= MAX_OUTPUT else None
        if tag is None and not self.retrieval and len(action) <= MAX_OUTPUT and text.strip():
            tag = "answer", text.strip().splitlines()[-1].strip()
        if tag is None and len(action) > MAX_OUTPUT:
            text = f"Invalid: {len(action)} characters are too many."
        elif tag is None:
            text = f"Invalid: write {'<search></search> or ' if self.retrieval else ''}<answer></answer>."
            text = invalid(text, action)
        elif tag[0] == "answer":
            self._done, right = True, exact_match(tag[1], self._record["answers"])
            info = {"success": bool(right), "valid": True, "score": f1(tag[1], self._record["answers"])}
            return "Right." if right else "Wrong.", right, True, False, info | self._reference(tag[1], right, info["score"])
        else:
            text = self._search(tag[1])
        self._done = self._turn == self.max_turns
        text += "\nNo turn is left." if self._done and self.retrieval else ""
        text += f"\nTurns left: {self.max_turns - self._turn}." if not self._done else ""
        info = {"success": False, "valid": tag is not None, "score": 0.0, **self._reference("", 0.0, 0.0)}
        return text, 0.0, self._done and not self.retrieval, self._done and self.retrieval, info

    def _reference(self, answer, right, score):
        return {"reference": {"Question": self._record["question"], "Right answers": "; ".join(self._record["answers"]),
                              "Answer that was read": answer[:500] or "none", "Exact match": int(right), "F1": round(score, 3)}}

    def reflection(self, trajectory):
        """The reference first and the policy's own words last, so that a cut in the middle falls into the context."""
        lines = reference_lines(trajectory.info.get("reference"))
        return "\n".join([*lines, super().reflection(replace(trajectory, info={}))])

    def _search(self, query):
        found = self._find(query, self.top)
        self._queries.append(query)
        self._shown += [n for n in found if n not in self._shown]
        shown = [f"[{self._passages[n]['title']}] {self._passages[n]['text']}"[:MAX_CONTEXT // self.top] for n in found]
        return "\n".join(shown) or "Nothing was found."

    def _found(self):
        return {self._passages[n]["title"] for n in self._shown}

    def gold_action(self):
        """Single-turn: the answer. Retrieval: a search for each supporting title that was not shown yet, once each, then
        the answer, in the last turn at the latest."""
        if self._done:
            return None
        left = [title for title in self._record["titles"] if title not in self._found() and title not in self._queries]
        if self.retrieval and left and self._turn < self.max_turns - 1:
            return f"<search>{left[0]}</search>"
        return f"<answer>{self._record['answers'][0]}</answer>"

    def action_guidance(self):
        """Never the answer itself: single-turn, the titles to read; retrieval, the next search or that it is time."""
        titles = self._record["titles"] if not self._done else []
        if not titles:
            return None
        if not self.retrieval:
            return f"Hint: the answer follows from {' and '.join(titles)}."
        action = self.gold_action()
        return self.phrase([action]) if action.startswith("<search>") else "Hint: search no more, answer now."

    def observation_enrichment(self):
        if self._done or not self.retrieval:
            return None
        titles, found = set(self._record["titles"]), self._found()
        needed = f" {len(titles & found)} of the {len(titles)} that are needed are among them." if titles else ""
        return f"Passages shown so far: {'; '.join(sorted(found)) or 'none'}.{needed}"


def checked_options(data, ids, shares, split_seed):
    """The options of `load`, hashable. Raises BadInput."""
    try:
        numbers = tuple(float(n) for n in (shares.split(",") if isinstance(shares, str) else shares))
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) != 3 or min(numbers) < 0 or not 0 < sum(numbers) < 1e9:
        raise BadInput(f"searchqa: shares are three numbers, of train, valid and test, such as 20,10,70; got {shares!r}")
    if type(split_seed) is not int:
        raise BadInput(f"searchqa: split_seed must be a whole number, got {split_seed!r}")
    if data and ids:
        raise BadInput("searchqa: give data=FILE or ids=DIR, not both")
    return str(data) if data else None, str(ids) if ids else None, numbers, split_seed
