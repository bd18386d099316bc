"""SearchQA: the score, the data in every form, hostile texts, the search, hints that change nothing."""
import importlib.util
import json
import lzma
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]
from conftest import FakePolicy, ended
from enrich import EnrichedEnv, Schedule, walk
from envs import BadInput, make_env, searchqa, select_tasks
from envs.action import after_thinking
from envs.searchqa import SearchQA, exact_match, f1, normalise, whole_documents
from rl.chat import Chat
from rl.logs import record
from rl.rollout import Request, Trajectory, Turn, rollout

DATA = Path(os.environ.get("SCAFFOLD_FUNNEL_DATA", ROOT.parent / "shared" / "data"))
MULTIHOP, REAL = DATA / "multihop_qa.json", DATA / "searchqa_500.json.xz"
needs_multihop = pytest.mark.skipif(not MULTIHOP.exists(),
                                    reason="no multihop_qa.json in ../shared/data or $SCAFFOLD_FUNNEL_DATA")
needs_search = pytest.mark.skipif(importlib.util.find_spec("bm25s") is None, reason="needs bm25s (pip install bm25s)")

PASSAGES = [{"title": "Iron key", "text": "The iron key opens the red door of the ash house."},
            {"title": "Gold key", "text": "The gold key was lost by Mr Elm in 1912."},
            {"title": "Mr Elm", "text": "Mr Elm lived in the village of Bay, known for its rowan trees."},
            {"title": "Door", "text": "A door is a hinged barrier. Doors have colours."}]
QUESTIONS = [
    {"id": "a", "source": "hand", "question": "Where did the man who lost the gold key live?", "answers": ["Bay", "the Bay"],
     "supporting_titles": ["Gold key", "Mr Elm"], "passages": [0, 1, 2], "split": "train"},
    {"id": "b", "source": "hand", "question": "Which key opens the red door?", "answers": "the iron key!",
     "supporting_titles": ["Iron key"], "passages": [3, 0], "split": "val"},
    {"id": "c", "question": "What is a door?", "answers": ["a hinged barrier"], "split": "test",
     "context": "Doors. " * 2000}]


def write(path, content, lines=False):
    text = "\n".join(map(json.dumps, content)) if lines else json.dumps(content)
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.fixture
def data(tmp_path):
    return write(tmp_path / "qa.json", {"questions": QUESTIONS, "passages": PASSAGES})


def start(task, **options):
    env = make_env("searchqa", options)
    return env, *env.reset(task=task, seed=0)


def judged(info):
    """An info without its reference."""
    return {key: value for key, value in info.items() if key != "reference"}


def one_line(match, call):
    with pytest.raises(BadInput, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


# --- the score ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, normal", [
    ("The  Cat's\n Hat!", "cats hat"), ("an apple a day", "apple day"), ("Theatre", "theatre"), ("U.S.", "us"), ("A", "a"),
    ("The", "the"), ("?!", "?!"), ("", ""), ("  ", ""), ("Ärger—ja", "ärger—ja"), ("1,000", "1000")])
def test_normalisation_is_squads(text, normal):
    assert normalise(text) == normal


@pytest.mark.parametrize("answer, golds, em, score", [
    ("the Bay.", ["Bay"], 1, 1), ("bay", ["x", "BAY"], 1, 1), ("Bay area", ["Bay"], 0, 2 / 3), ("", ["Bay"], 0, 0),
    ("", ["The"], 0, 0), ("a", ["The"], 0, 0), ("b b c", ["b c c"], 0, 2 / 3),
    ("c d", ["w b c d", "c"], 0, 2 / 3), ("x", ["y"], 0, 0)])
def test_exact_match_and_f1_of_hand_made_pairs(answer, golds, em, score):
    assert exact_match(answer, golds) == em and f1(answer, golds) == pytest.approx(score)


@given(st.text(), st.lists(st.text(), min_size=1, max_size=3))
def test_the_scores_agree_with_each_other(answer, golds):
    score = f1(answer, golds)
    assert 0 <= score <= 1 + 1e-12
    if exact_match(answer, golds) and normalise(answer):
        assert score == pytest.approx(1)


# --- single-turn -------------------------------------------------------------------------------------------------

def test_one_answer_ends_it_with_exact_match_as_reward_and_f1_as_score(data):
    env, observation, info = start("hand/a", data=data)
    assert observation.startswith("Context:\nIron key: The iron") and observation.endswith("gold key live?")
    assert env.max_turns == 1 and "<answer>" in env.system_prompt and info == {"success": False, "valid": True, "score": 0.0}
    won = env.step("He lived there: <answer>the bay</answer>")
    assert won[1:4] == (1.0, True, False) and judged(won[4]) == {"success": True, "valid": True, "score": 1.0}
    assert won[4]["reference"] == {"Question": observation.partition("Question: ")[2], "Right answers": "Bay; the Bay",
                                   "Answer that was read": "the bay", "Exact match": 1, "F1": 1.0}
    with pytest.raises(RuntimeError, match="reset"):
        env.step("x")
    env.reset(task="hand/a", seed=0)
    _, reward, terminated, _, info = env.step("<answer>Bay village</answer>")
    assert (reward, terminated, judged(info)) == (0.0, True, {"success": False, "valid": True, "score": pytest.approx(2 / 3)})
    env.reset(task="hand/a", seed=0)
    _, reward, terminated, _, info = env.step(" \n ")
    assert (reward, terminated, judged(info)) == (0.0, True, {"success": False, "valid": False, "score": 0.0})


@pytest.mark.parametrize("text, answer", [
    ("<answer>Bay</answer>", "Bay"), ("<ANSWER> Bay\n</Answer> that is it", "Bay"), ("<answer>x</answer> no, <answer>Bay</answer>", "Bay"),
    ("<answer>Bay</answer></answer>", "Bay"), ("<answer>Bay</answer> <answer>", "Bay"), ("<answer></answer>", ""), ("Bay", "Bay"),
    ("Let me see.\nIt is here.\n\n  Bay  \n\n", "Bay"), ("<answer>Bay", "<answer>Bay"), ("so Bay</answer>", "so Bay</answer>"),
    ("a\r\nb", "b"), ("<answer>two\nlines</answer>", "two\nlines"), ("Final: Bay.", "Final: Bay.")])
def test_the_answer_that_is_read_is_the_released_scorers(data, text, answer):
    """SkillOpt's: the last pair of tags in any case, else the last line that is not empty."""
    found = re.findall("(?is)<answer>(.*?)</answer>", text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    assert answer == (found[-1].strip() if found else lines[-1])
    env, *_ = start("hand/a", data=data)
    info = env.step(text)[4]
    assert info["reference"]["Answer that was read"] == (answer or "none") and info["valid"]
    assert (info["success"], info["score"]) == (exact_match(answer, ["Bay"]), pytest.approx(f1(answer, ["Bay", "the Bay"])))


def test_the_context_ends_at_6000_characters(data):
    _, observation, _ = start("searchqa/c", data=data)
    assert len(observation) == len("Context:\n") + 6000 + len("\n\nQuestion: What is a door?")


def released_cut(context, most=6000):
    """What SkillOpt's released code shows of a context, by its rule: documents from the first on while they fit."""
    if len(context) <= most:
        return context
    shown = ""
    for document in context.split("[DOC]"):
        longer = f"{shown}[DOC]{document}" if shown else document
        if len(longer) > most:
            break
        shown = longer
    return shown or context[:most]


@pytest.mark.parametrize("sizes", [[5990], [5995], [6000], [6001], [7000, 10], [2000, 2000, 2000, 2000], [1990, 1990, 2010],
                                   [1990, 1990, 2011], [10] * 900, [3000, 2995], [3000, 2994, 1], [1, 6500]])
@pytest.mark.parametrize("begin", ["[DOC]", ""])
def test_a_context_is_cut_at_a_documents_border(sizes, begin):
    """Beside the released rule, which drops the first mark where it cuts; no document is cut in two that is not the first."""
    context = begin + "[DOC]".join(f"{'x' * size}" for size in sizes)
    shown = whole_documents(context)
    assert shown.removeprefix("[DOC]")[:6000] == released_cut(context).removeprefix("[DOC]")[:6000]
    assert len(shown.removeprefix("[DOC]")) <= 6000 and context.startswith(shown)
    assert shown == context or context[len(shown):].startswith("[DOC]") or "[DOC]" not in shown[5:]


def test_gold_actions_win_and_hints_never_tell_the_answer(data):
    for split in ("train", "valid", "test"):
        for task in select_tasks("searchqa", split, None, {"data": data}):
            env, *_ = start(task, data=data)
            assert env.observation_enrichment() is None
            hint = env.action_guidance()
            assert hint is None if task == "searchqa/c" else env._record["titles"][0] in hint
            assert env.step(env.gold_action())[1] == 1.0
            assert env.gold_action() is None and env.action_guidance() is None


HOSTILE = ["", " ", "\x00", "\ud800", "<answer>", "</answer>", "<|im_end|>", "{0} {turns} %s", "x" * 300_000, "a " * 100_000,
           "<answer>\ud800</answer>", "<answer>" + "y" * 100_000 + "</answer>", "<answer>" * 3000,
           "\u202e\u2603\u0000\uffff", "\\u0041\n\r\t\x1b[2J"]


def test_hostile_questions_and_outputs_never_crash(tmp_path):
    records = [{"id": f"{n}", "question": text, "answers": [text or "x", "x"], "context": text, "source": text,
                "supporting_titles": [text], "split": "train"} for n, text in enumerate(HOSTILE) if text.strip()]
    data = write(tmp_path / "hostile.jsonl", records, lines=True)
    for options in ({},) if importlib.util.find_spec("bm25s") is None else ({}, {"retrieval": True}):
        path = write(tmp_path / "r.json", {"questions": records, "passages": PASSAGES}) if options else data
        for task in SearchQA.tasks("train", data=path):
            for output in HOSTILE + [f"<search>{text}</search>" for text in HOSTILE]:
                env, observation, _ = start(task, data=path, **options)
                observation += env.system_prompt + env.step(output)[0]
                observation += f"{env.action_guidance()}{env.observation_enrichment()}{env.gold_action()}"
                assert len(observation) < 1_000_000 and observation.encode("utf-8")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.text())
def test_any_output_is_judged(data, output):
    env, *_ = start("hand/a", data=data)
    _, reward, terminated, truncated, info = env.step(output)
    right = info["valid"] and normalise(info["reference"]["Answer that was read"]) == "bay"
    assert info["valid"] == bool((after_thinking(output) or "").strip())
    assert terminated and not truncated and reward == info["success"] == right


# --- what reflection sees, and the policy never ------------------------------------------------------------------

def played(chat, answers, data, task, **options):
    env = make_env("searchqa", {"data": data, **options})
    act = FakePolicy(*(ended(chat, answer) for answer in answers))
    [t] = rollout(act, chat, [env], [Request(task)], max_turns=env.max_turns, max_context=10 ** 6)
    return env, t, [chat.tokenizer.decode(prompt) for prompt in act.prompts]


@needs_search
@pytest.mark.parametrize("options", [{}, {"retrieval": True}])
def test_the_right_answer_goes_to_reflection_alone(tmp_path, toy, options):
    """In no prompt and no observation, in none of the turns; in the trajectory's last info, which rollouts.jsonl does not hold."""
    gold = "Qqwertz"
    data = write(tmp_path / "qa.json", {"passages": PASSAGES, "questions": [QUESTIONS[0] | {"answers": [gold], "context": "A bay."}]})
    answers = ["<search>key</search>"] * 2 * bool(options) + ["I think:\n<answer>Bay</answer>"]
    env, t, prompts = played(Chat(toy), answers, data, "hand/a", **options)
    seen = [*prompts, t.system_prompt, t.first_observation, *(turn.observation for turn in t.turns), json.dumps(record(1, t))]
    assert len(prompts) == len(answers) and not any(gold in text for text in seen)
    assert t.info["reference"]["Right answers"] == gold and "reference" not in env.reset(task="hand/a", seed=0)[1]
    text = env.reflection(t)
    assert text.startswith(f"Question: {QUESTIONS[0]['question']}\nRight answers: {gold}\nAnswer that was read: Bay\n"
                           "Exact match: 0\nF1: 0.0\n")
    assert text.endswith("> I think:\n<answer>Bay</answer>\nWrong.") and ("A bay." in text) == (not options)


needs_500 = pytest.mark.skipif(not REAL.exists(), reason=f"no {REAL.name} in ../shared/data or $SCAFFOLD_FUNNEL_DATA")


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """The 500 real questions as a file."""
    path = tmp_path_factory.mktemp("real") / "questions.json"
    path.write_bytes(lzma.decompress(REAL.read_bytes()))
    return str(path)


@needs_500
def test_the_real_questions(real, qwen3):
    """400 for training and 100 of the 200 for validation; gold wins each; all prompts fit into the default context beside a state of
    13,000 characters; reflection keeps question, answers and score under a cut to 2,000 characters."""
    tasks = {split: SearchQA.tasks(split, data=real) for split in searchqa.SPLITS}
    assert {split: len(found) for split, found in tasks.items()} == {"train": 400, "valid": 100, "test": 0}
    env, chat, longest = SearchQA(data=real), Chat(qwen3), 0
    raw = {item["id"]: item for item in json.loads(Path(real).read_text())}
    for task in tasks["train"] + tasks["valid"]:
        item = raw[task.partition("/")[2]]
        observation, _ = env.reset(task=task, seed=0)
        assert observation == f"Context:\n{item['context']}\n\nQuestion: {item['question'].strip()}"  # none is over the limit
        longest = max(longest, len(chat.prompt([("system", env.system_prompt), ("user", observation)])))
        assert env.step(f"It follows from the context.\n{item['answers'][0]}")[1] == 1.0
        env.reset(task=task, seed=0)
        observation2, reward, *_, info = env.step("I do not know.\nNobody in particular")
        t = Trajectory(task, 0, 0, False, first_observation=observation, turns=[
            Turn([], [], "I do not know.\nNobody in particular", observation2, reward, True, "end")], info=info)
        text = env.reflection(t)
        cut = text[:1000] + text[-1000:]
        for part in (item["question"].strip(), *item["answers"], "Answer that was read: Nobody in particular", "Exact match: 0", "F1: 0"):
            assert part in cut
        assert item["context"] in text and len(text) < 6000
    assert longest < 1500 and longest + 512 + 3500 < SearchQA.defaults["max_context"]


# --- the data ----------------------------------------------------------------------------------------------------

def test_json_and_json_lines_hold_the_same(tmp_path):
    records = [{"key": f"{n}", "question": f"What is {n}?", "answers": [f"{n}"], "context": f"It is {n}."}
               for n in range(50)]
    forms = [write(tmp_path / "list.json", records), write(tmp_path / "lines.jsonl", records, lines=True),
             write(tmp_path / "dict.json", {"questions": records})]
    found = [{split: SearchQA.tasks(split, data=form) for split in searchqa.SPLITS} for form in forms]
    assert found[0] == found[1] == found[2] and {split: len(tasks) for split, tasks in found[0].items()} == \
        {"train": 10, "valid": 5, "test": 35}
    one = write(tmp_path / "one.jsonl", records[:1], lines=True)
    assert SearchQA.tasks("test", data=one) == ["searchqa/0"]


def test_splits_are_disjoint_seeded_and_keep_equal_questions_together(tmp_path):
    records = [{"id": f"{n}", "question": f"What is {n // 2}{'?' * (n % 2)}", "answers": ["x"]} for n in range(200)]
    data = write(tmp_path / "qa.json", records)

    def splits(**options):
        return [select_tasks("searchqa", split, None, {"data": data, **options}) for split in ("train", "valid", "test")]

    first = splits()
    assert [len(split) for split in first] == [40, 20, 140] and len(set().union(*first)) == 200
    for split in first:
        numbers = [int(task.split("/")[1]) for task in split]
        assert numbers == sorted(numbers) and {n ^ 1 for n in numbers} == set(numbers)
    searchqa.load.cache_clear()
    assert splits() == first != splits(split_seed=1)
    assert [len(split) for split in splits(shares=(50, 25, 25))] == [100, 50, 50]
    shuffled = write(tmp_path / "other.json", records[::-1])
    assert set(SearchQA.tasks("train", data=shuffled)) == set(first[0])     # a question's split is not its place


def test_named_splits_are_kept(data):
    assert [SearchQA.tasks(split, data=data) for split in searchqa.SPLITS] == [["hand/a"], ["hand/b"], ["searchqa/c"]]


@pytest.mark.parametrize("content, word", [
    ([{"answers": ["x"]}], "record 0 has no question"), ([QUESTIONS[2], {"question": "q"}], "record 1 has no answers"),
    ([{"question": "q", "answers": [""]}], "answers"), ([{"question": "q", "answers": [3]}], "answers"), ([3], "record 0"),
    ([{"question": "q", "answers": ["x"], "passages": [0]}], "indices"),
    ([{"question": "q", "answers": ["x"], "split": "new"}], "new"),
    ([QUESTIONS[2], QUESTIONS[2]], "searchqa/c.*differ"),
    ({"questions": QUESTIONS, "passages": [{"text": "x"}]}, "title"),
    ({"questions": 3}, "no list"), (3, "records"),
    ([{"question": "q", "answers": ["x"], "supporting_titles": 3}], "titles")])
def test_bad_data_is_one_line(tmp_path, content, word):
    one_line(word, lambda: SearchQA(data=write(tmp_path / "bad.json", content)))


def test_bad_files_are_one_line(tmp_path):
    one_line("cannot be read", lambda: SearchQA(data=str(tmp_path / "none.json")))
    one_line("cannot be read", lambda: SearchQA(data=str(tmp_path)))
    for number, content in enumerate([b"{\"questions\": [", b"\xff\xfe", b"[" * 100_000, b"words"]):
        (tmp_path / f"{number}.json").write_bytes(content)
        one_line("is no JSON", lambda: SearchQA(data=str(tmp_path / f"{number}.json")))


@pytest.mark.parametrize("options, word", [
    ({"retrieval": "maybe"}, "retrieval"), ({"turns": 0}, "turns"), ({"turns": "many"}, "turns"), ({"top": 0}, "top"),
    ({"top": 99}, "top"), ({"shares": "1,2"}, "shares"), ({"shares": "a,b,c"}, "shares"), ({"shares": 7}, "shares"),
    ({"shares": "-1,1,1"}, "shares"), ({"shares": "nan,1,1"}, "shares"), ({"split_seed": "x"}, "split_seed"),
    ({"ids": "folder"}, "not both"), ({"lamps": 1}, "lamps")])
def test_bad_options_are_one_line(data, options, word):
    one_line(word, lambda: make_env("searchqa", {"data": data, **options}))


def test_unknown_tasks_and_splits_are_one_line(data):
    env = SearchQA(data=data)
    for task in ("hand/z", "", "x" * 10_000, "\ud800"):
        one_line("unknown task", lambda: env.reset(task=task, seed=0))
    one_line("unknown split", lambda: SearchQA.tasks("dev", data=data))
    one_line("needs --env-options data=FILE", lambda: SearchQA(retrieval=True))


# --- the hub, by a stand-in of the same form ---------------------------------------------------------------------

class Part(list):
    """What is used of a `datasets.Dataset`: rows by number, columns by name."""

    def __getitem__(self, key):
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


@pytest.fixture
def hub(monkeypatch):
    """3,000 rows with the columns of lucadiliello/searchqa, in two parts."""
    rows = [{"key": f"k{n}", "question": f"question {n}", "context": f"[DOC] context {n}", "answers": [f"{n}"], "labels": []}
            for n in range(3000)]
    parts = {"train": Part(rows[:2500]), "validation": Part(rows[2500:])}
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda name: parts))
    searchqa.load.cache_clear()
    yield
    searchqa.load.cache_clear()


def test_the_hubs_questions_by_the_public_ids(hub, tmp_path):
    for folder, keys in (("train", ["k7", "k2999"]), ("val", ["k3"]), ("test", ["k1", "k0"])):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "items.json", [{"id": key} for key in keys])
    options = {"ids": str(tmp_path)}
    assert [select_tasks("searchqa", split, None, options) for split in searchqa.SPLITS] == \
        [["searchqa/k7", "searchqa/k2999"], ["searchqa/k3"], ["searchqa/k1", "searchqa/k0"]]
    env, observation, _ = start("searchqa/k2999", **options)
    assert observation == "Context:\n[DOC] context 2999\n\nQuestion: question 2999"
    assert env.step("<answer>2999</answer>")[1] == 1.0
    write(tmp_path / "val" / "items.json", [{"id": "gone"}])
    searchqa.load.cache_clear()
    one_line("1 of 5 ids.*'gone'", lambda: SearchQA(**options))
    (tmp_path / "val" / "items.json").unlink()
    one_line("val/items.json", lambda: SearchQA(**options))


def test_without_ids_the_hubs_questions_are_drawn(hub):
    splits = [SearchQA.tasks(split) for split in searchqa.SPLITS]
    assert [len(split) for split in splits] == [400, 200, 1400] and len(set().union(*splits)) == 2000
    searchqa.load.cache_clear()
    assert splits[0] == SearchQA.tasks("train") != SearchQA.tasks("train", split_seed=1)


def test_no_package_and_no_network_are_one_line(monkeypatch):
    searchqa.load.cache_clear()
    monkeypatch.setitem(sys.modules, "datasets", None)
    one_line("needs the package 'datasets'.*data=FILE", SearchQA)

    def fail(name):
        raise ConnectionError("no\nroute")
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=fail))
    one_line("network.*ConnectionError: no.*data=FILE", SearchQA)


# --- retrieval ---------------------------------------------------------------------------------------------------

@needs_search
def test_search_then_answer(data):
    env, observation, _ = start("hand/a", data=data, retrieval=True, top=1)
    assert observation == "Question: Where did the man who lost the gold key live?" and env.max_turns == 6
    text, reward, terminated, truncated, info = env.step("I look. <search>lost gold key</search>")
    assert text == "[Gold key] The gold key was lost by Mr Elm in 1912.\nTurns left: 5."
    assert (reward, terminated, truncated, judged(info)) == (0.0, False, False, {"success": False, "valid": True, "score": 0.0})
    assert env.step("<search>Mr Elm</search>")[0].startswith("[Mr Elm]")
    *won, info = env.step("<answer>Bay</answer>")
    assert won[1:] == [1.0, True, False] and judged(info) == {"success": True, "valid": True, "score": 1.0}


@needs_search
def test_only_passages_that_share_a_word_are_shown_best_first(data):
    env, *_ = start("hand/a", data=data, retrieval=True)
    text = env.step("<search>Hinged zzz!</search>")[0]
    assert text == "[Door] A door is a hinged barrier. Doors have colours.\nTurns left: 5."
    lines = env.step("<search>iron key</search>")[0].splitlines()
    assert [line.split("]")[0] for line in lines] == ["[Iron key", "[Gold key", "Turns left: 4."]


@needs_search
def test_the_turns_are_limited(data):
    env, *_ = start("hand/a", data=data, retrieval="true", turns=2)
    text, _, terminated, truncated, info = env.step("hm")
    assert text.startswith("Invalid") and not (terminated or truncated) and not info["valid"]
    text, reward, terminated, truncated, info = env.step("<search>key</search>")
    assert text.endswith("No turn is left.") and (reward, terminated, truncated) == (0.0, False, True)
    with pytest.raises(RuntimeError, match="reset"):
        env.step("<answer>Bay</answer>")
    assert env.gold_action() is None and env.action_guidance() is None and env.observation_enrichment() is None


@needs_search
@pytest.mark.parametrize("query", ["", "zzz qqq", "the of and", "☃", "\x00", "?" * 500, "key " * 5000, "a" * 19_000])
def test_any_query_finds_something_or_says_that_it_found_nothing(data, query):
    env, *_ = start("hand/a", data=data, retrieval=True)
    text, _, _, _, info = env.step(f"<search>{query}</search>")
    assert info["valid"] == (len(query) < 20_000 - 17) and text
    assert ("Nothing was found." in text) == (not query.startswith("key")) if info["valid"] else "too many" in text


@needs_search
def test_retrieval_hints_name_the_next_search_and_what_was_found(data):
    env, *_ = start("hand/a", data=data, retrieval=True, top=1)
    assert env.action_guidance() == "Hint: <search>Gold key</search>."
    assert env.observation_enrichment() == "Passages shown so far: none. 0 of the 2 that are needed are among them."
    env.step("<search>iron</search>")
    assert "Iron key. 0 of the 2" in env.observation_enrichment() and "Gold key" in env.action_guidance()
    env.step("<search>lost 1912</search>")      # found in another way
    assert "Gold key; Iron key. 1 of the 2" in env.observation_enrichment() and "Mr Elm" in env.action_guidance()
    env.step(env.gold_action())
    assert "2 of the 2" in env.observation_enrichment() and env.action_guidance() == "Hint: search no more, answer now."


@needs_search
def test_the_gold_path_answers_in_the_last_turn_at_the_latest(tmp_path):
    data = write(tmp_path / "qa.json", {"passages": PASSAGES, "questions": [
        QUESTIONS[0] | {"supporting_titles": ["no such title", "nor this", "nor that"]}]})
    for turns in (1, 2, 3, 6):
        env, *_ = start("hand/a", data=data, retrieval=True, turns=turns)
        played = 0
        while (action := env.gold_action()) is not None:
            _, reward, *_ = env.step(action)
            played += 1
        assert reward == 1.0 and played == min(turns, 4)


@needs_search
def test_retrieval_without_passages_is_one_line(tmp_path):
    for content in (QUESTIONS[2:], {"questions": QUESTIONS[2:], "passages": []}):
        one_line("needs passages", lambda: SearchQA(data=write(tmp_path / "qa.json", content), retrieval=True))
        searchqa.index.cache_clear(), searchqa.load.cache_clear()


def test_missing_bm25s_says_what_to_install(data, monkeypatch):
    searchqa.index.cache_clear()
    monkeypatch.setitem(sys.modules, "bm25s", None)
    one_line("pip install bm25s", lambda: SearchQA(data=data, retrieval=True))


@needs_search
def test_same_task_same_episode_and_instances_do_not_disturb_each_other(data):
    actions = ["<search>gold key</search>", "hm", "<search>Mr Elm rowan</search>", "<answer>Bay area</answer>"]
    env, *first = start("hand/a", data=data, retrieval=True)
    alone = [env.step(action) for action in actions]
    other, *_ = start("hand/b", data=data, retrieval=True, top=1)
    again, *second = start("hand/a", data=data, retrieval=True)
    assert first == second == list(env.reset(task="hand/a", seed=7))
    for action, expected in zip(actions, alone):
        if not other._done:
            other.step("<search>red door</search>")
        assert again.step(action) == expected == env.step(action)


@needs_search
@pytest.mark.parametrize("options", [{}, {"retrieval": True}])
def test_hints_change_nothing(data, options):
    plain = make_env("searchqa", {"data": data, **options})
    hinted = EnrichedEnv(make_env("searchqa", {"data": data, **options}), Schedule("both"))
    schedule, turns = (hinted.schedule, 6) if options else (Schedule("ag-always"), 1)
    assert schedule.why_no_hints(plain, ["hand/a"], turns) == ""
    gold = [action for *_, action in walk(plain, "hand/a") if action]
    for actions in (gold, ["nonsense"] * plain.max_turns, ["<search>door</search>"] + gold[-1:]):
        bare, rich = plain.reset(task="hand/a", seed=0), hinted.reset(task="hand/a", seed=0, enriched=True)
        assert rich[0] == f"{bare[0]}\n{rich[1]['hint']}"
        for action in actions:
            one, two = plain.step(action), hinted.step(action)
            assert one[1:4] == two[1:4] and {k: v for k, v in two[4].items() if k != "hint"} == one[4]
            assert two[0] == (f"{one[0]}\n{two[4]['hint']}" if "hint" in two[4] else one[0])
            if one[2] or one[3]:
                break


# --- real questions ----------------------------------------------------------------------------------------------

@needs_multihop
def test_the_multi_hop_questions_are_read_as_they_are():
    splits = [SearchQA.tasks(split, data=str(MULTIHOP)) for split in searchqa.SPLITS]
    assert [len(split) for split in splits] == [28, 14, 98] and len(set().union(*splits)) == 140
    env, *_ = start(splits[0][0], data=str(MULTIHOP))
    for task in splits[0] + splits[1] + splits[2]:
        observation, _ = env.reset(task=task, seed=0)
        assert len(observation) < 6500 and task.split("/")[0] in ("hotpotqa", "musique")
        assert env.step(env.gold_action())[1] == 1.0


@needs_multihop
@needs_search
def test_the_gold_path_wins_and_titles_find_their_passages_among_the_real_ones():
    env, needed, found = SearchQA(data=str(MULTIHOP), retrieval=True), 0, 0
    for task in (task for split in searchqa.SPLITS for task in SearchQA.tasks(split, data=str(MULTIHOP))):
        env.reset(task=task, seed=0)
        while (action := env.gold_action()) is not None:
            observation, reward, *_ = env.step(action)
            assert len(observation) < 6200
        assert reward == 1.0
        needed, found = needed + len(set(env._record["titles"])), found + len(set(env._record["titles"]) & env._found())
    assert found / needed > 0.9
