"""funnel/edits.py: what of a model's answer becomes an edit."""
import json
import re
import time

import pytest
from conftest import edit

from funnel.edits import parse_edits, parse_numbers

WANT = [edit("append", content="Look first."), edit("replace", "- Old.", "New: [a], {b}, it's #1."), edit("delete", "1. Gone.")]
ONE, TWO, THREE = EACH = [json.dumps(change) for change in WANT]
LIST = json.dumps(WANT)
PRETTY = json.dumps(WANT, indent=2)
DRAFT = json.dumps([edit("append", content="Draft.")])


def requoted(begin, end):
    """The list with other quotes around its texts."""
    return "[" + ", ".join("{" + ", ".join(f"{begin}{key}{end}: {begin}{text}{end}" for key, text in change.items()) + "}"
                           for change in WANT) + "]"


FORMS = {
    "a list": LIST, "over many lines": PRETTY, "an object": f'{{"edits": {LIST}}}',
    "a patch": f'{{"reasoning": "[1] says {{so}}", "patch": {{"edits": {LIST}}}}}',
    "an analysis first": f'{{"analysis": "They {{stop}} [early].", "failures": [{{"kind": "stops", "count": 3}}], "edits": {LIST}}}',
    "an analysis last": f'{{"edits": {LIST}, "failures": [{{"kind": "stops", "count": 3}}]}}',
    "an unknown wrapper": f'{{"changes": {LIST}}}', "patches": f'[{{"edits": [{ONE}, {TWO}]}}, {{"edits": [{THREE}]}}]',
    "numbered": json.dumps({"1": WANT[0], "2": WANT[1], "3": WANT[2]}), "quoted": json.dumps({"edits": LIST}),
    "quoted whole": json.dumps(LIST),
    "a fence": f"Here you are:\n```json\n{PRETTY}\n```\nDone.", "a fence without an end": f"```json\n{PRETTY}",
    "several fences": "\n".join(f"Edit {n}:\n```json\n{one}\n```" for n, one in enumerate(EACH, 1)),
    "several fences with prose": "\n".join(f"This will help.\n```\n{one}\n```" for one in EACH),
    "JSON lines": "\n".join(EACH), "JSON lines of lists": "\n".join(f"[{one}]" for one in EACH),
    "on numbered lines": "\n".join(f"{n}. {one}" for n, one in enumerate(EACH, 1)),
    "prose with []": f"As [1] says, an empty list, [], is wrong here.\n\n{LIST}\n\nI would not answer [] here.",
    "prose with an example": f'An edit such as {{"op": "append", "content": "..."}} adds a line.\n{LIST}',
    "an example before JSON lines": 'As in {"op": "append", "content": "..."}:\n' + "\n".join(EACH),
    "an example after": f'{LIST}\nI left out {{"op": "append", "content": "Wait."}} on purpose.',
    "an example of a list": f'In the form [{{"op": "append", "content": "..."}}]:\n{LIST}',
    "a draft": f"Draft:\n{DRAFT}\nBetter:\n{LIST}", "a broken draft": f"Draft:\n{DRAFT[:-4]}\n\nFinal:\n{LIST}",
    "a draft in a fence": f"```json\n{DRAFT}\n```\nToo short. Final:\n```json\n{LIST}\n```",
    "a draft in thinking": f"<think>{DRAFT}</think>{LIST}", "a thought whose beginning was the template's": f"{DRAFT}</think>\n\n{LIST}",
    "trailing commas": PRETTY.replace('"\n  }', '",\n  },').rstrip("]").rstrip() + ",\n]",
    "comments": "[\n// first\n" + ",\n".join(f"{one} // it's why" for one in EACH) + "\n# last\n]",
    "block comments": "[/* [1] */" + ", /* it's */ ".join(EACH) + "]",
    "no commas": "[" + "\n".join(EACH) + "]", "no commas inside": PRETTY.replace('",\n', '"\n'), "semicolons": "[" + "; ".join(EACH) + "]",
    "single quotes": requoted("'", "'"), "as Python prints it": str(WANT), "curly quotes": requoted("“", "”"),
    "quotes that all open": requoted("“", "“"), "single curly quotes": requoted("‘", "’"), "keys without quotes":
    LIST.replace('"op"', "op").replace('"target"', "target").replace('"content"', "content"),
    "op without quotes": LIST.replace('"append"', "append"), "op in capitals": LIST.replace('"append"', '"APPEND"'),
    "no bracket at the end": LIST[:-1], "no brackets at the end": LIST[:-2], "no bracket at the beginning": LIST[1:],
    "an edit without its end": LIST.replace('."}, {', '.", {'), "an edit without its beginning": LIST.replace(', {"op": "r', ', "op": "r'),
    "brackets too many": LIST.replace('."}, {', '."}}, {') + "]}", "ended too early": f"[{ONE}], {TWO}, {THREE}]",
    "cut in the next edit": LIST[:-1] + ', {"op": "append", "content": "And then',
    "cut in the next key": LIST[:-1] + ', {"op": "append", "con',
    "cut in the next, with the end of a fence": f'```json\n{LIST[:-1]}, {{"op": "append", "content": "And then\n```\nThat "is" all.',
    "one bad edit between": f'[{ONE}, {{"op": "append", "content": oh no}}, {TWO}, {THREE}]',
    "one that is none": f"[{ONE}, 7, {TWO}, {THREE}]",
    "two unknown wrappers": f'{{"of_failures": [{ONE}], "of_successes": [{TWO}, {THREE}]}}', "empty edits, then a patch":
    f'{{"edits": [], "patch": {{"edits": {LIST}}}}}', "each in an object": json.dumps([{"edit": change} for change in WANT]),
    "ops as keys": json.dumps([{change["op"]: {key: change[key] for key in change if key != "op"}} for change in WANT]),
    "ops as keys of lists": json.dumps({"edits": {"append": ["Look first."], "replace": [WANT[1]], "delete": ["1. Gone."]}}),
    "other names of ops": LIST.replace("append", "add").replace("replace", "Update").replace("delete", "remove"),
    "quoted whole, over many lines": json.dumps(PRETTY), "lines of JSON in quotes": json.dumps({"edits": "\n".join(EACH)}),
    "a list of other things after": f'```json\n{LIST}\n```\nThe kinds:\n```json\n[{{"kind": "stops", "count": 3}}]\n```',
    "equals signs": "\n".join(re.sub(r'"(\w+)": ', r"\1 = ", one) for one in EACH),
    "more in an edit": LIST.replace('"op"', '"why": "it, \\"helps\\": yes", "op"'), "NaN in it": LIST.replace('"op"', '"score": NaN, "op"'),
}


@pytest.mark.parametrize("form", FORMS)
def test_three_of_three_edits_survive(form):
    edits, dropped = parse_edits(FORMS[form], 8)
    assert edits == WANT
    assert all(row["reason"] and set(row) == {"answer", "reason"} for row in dropped)


def test_the_table_is_large_enough():
    assert len(FORMS) >= 25


@pytest.mark.parametrize("text, want", [
    ('"Look\nfirst."', "Look\nfirst."), ('"Say "yes" first."', 'Say "yes" first.'), ('"Say "yes", then go."', 'Say "yes", then go.'),
    ('"When it says "done": stop."', 'When it says "done": stop.'), ("'Don't look.'", "Don't look."),
    ('"A \\"b\\" \\u00e9 \\(c\\)."', 'A "b" é \\(c\\).'),
    ('"\\ud83d\\ude00 good"', "😀 good"), ('"""Two\nlines."""', "Two\nlines."), ('"Say “yes”, \'no\'."', "Say “yes”, 'no'."),
    ('["Two", "lines."]', "Two\nlines."), ('"a: {\\"op\\": \\"x\\"}, b"', 'a: {"op": "x"}, b'),
    ('"| a | b |\n|---|---|\n| 1 | 2 |"', "| a | b |\n|---|---|\n| 1 | 2 |"),
    ('"Run:\n```\nls\n```"', "Run:\n```\nls\n```")])
def test_a_text_is_read_as_it_was_meant(text, want):
    answer = f'[{{"op": "append", "content": {text}}}, {TWO}, {THREE},]'
    assert parse_edits(answer, 8) == ([edit("append", content=want), *WANT[1:]], [])


@pytest.mark.parametrize("more", ["", "\n```\nThat is \"all\", I think.", "\n\n```json\n[]\n```", f"\n\nOnce more:\n{DRAFT}"])
def test_a_cut_answer_gives_whole_edits_alone(more):
    """Wherever it is cut, and whatever stands behind the cut, each edit is one of the three."""
    for whole in (LIST, PRETTY, requoted("“", "”"), requoted("'", "'")):
        for end in range(len(whole)):
            edits, dropped = parse_edits(whole[:end] + more, 8)
            assert all(change in [*WANT, edit("append", content="Draft.")] for change in edits), whole[:end]
            if not more:
                assert edits == WANT[:len(edits)] and (not end or edits or dropped)
                assert whole != LIST or len(edits) == sum(end >= LIST.index(one) + len(one) - 1 for one in EACH)


@pytest.mark.parametrize("answer, reason", [
    (f"<think>Perhaps {LIST}", "thinking did not end"), (f"<think>a</think>b<think>{LIST}", "thinking did not end"),
    ('[{"op": "append", "content": "half a sen', "cut off"), ('{"op": "append", "content": "half a sen', "cut off"),
    ('```json\n[{"op": "append", "content": "half a sen\n```\nThat is "all"]', "cut off"),
    (f"Draft:\n{DRAFT}\nFinal:\n[]", "a later list"), ('[{"op": "append", "content": NaN}]', "as text"),
    ('[{"op": "append", "content": 12}]', "as text"), ('[{"op": "append", "content": ["a", 1]}]', "as text"),
    ("[[[[[[[[[[[[1]]]]]]]]]]]]", "no JSON list"), ("[{}]", "op is not one of"), ('[{"op": NaN}]', "op is not one of")])
def test_what_gives_no_edit_says_why(answer, reason):
    edits, dropped = parse_edits(answer, 8)
    assert edits == [] and any(reason in row["reason"] for row in dropped)


@pytest.mark.parametrize("answer, reason", [
    ("", "no JSON list"), ("I would not change anything.", "no JSON list"), ("[1, 2]", "no JSON list"), ('"append"', "no JSON list"),
    ('[{"op": "rewrite", "content": "x"}]', "op is not one of"),
    ('[{"op": ["append"], "content": "x"}]', "op is not one of"),
    ('[{"op": "append", "content": 5}]', "append needs content as text"), ('[{"op": "append"}]', "append needs content"),
    ('[{"op": "replace", "content": "x"}]', "replace needs target and content"),
    ('[{"op": "append", "content": " "}]', "needs"),
    ('[{"op": "append", "content": "a\\u0000b"}]', "control character"),
    ('[{"op": "append", "content": "a\\ud800b"}]', "control character")])
def test_the_parse_is_strict_about_each_edit(answer, reason):
    edits, dropped = parse_edits(answer, 4)
    assert edits == [] and reason in dropped[0]["reason"] and len(str(dropped)) < 600


def test_edits_over_the_budget_are_dropped():
    edits, dropped = parse_edits(str([edit("append", content=f"{n}") for n in range(5)]), 4)
    assert (len(edits), dropped[0]["reason"]) == (4, "over the budget of 4 edits")


@pytest.mark.parametrize("answer", ["[]", "```json\n[]\n```", '{"analysis": "All is well.", "edits": []}', '{"patch": {"edits": []}}'])
def test_no_edits_on_purpose_is_no_fault(answer):
    assert parse_edits(answer, 8) == ([], [])


def test_a_draft_is_logged_and_a_final_list_that_was_cut_leaves_it():
    edits, dropped = parse_edits(f"Draft:\n{DRAFT}\nFinal:\n{LIST}", 8)
    assert edits == WANT and "Draft." in dropped[0]["answer"]
    assert parse_edits(f'Draft:\n{LIST}\nFinal:\n[{{"op": "append", "con', 8)[0] == WANT


def test_what_stands_beside_the_edits_of_an_answer_is_logged():
    """An edit under an unknown key, in an unknown place, or in a later list that holds no whole one."""
    for other in ({"edit": "append", "content": "x"}, {"append": 5}, [1]):
        edits, dropped = parse_edits(json.dumps([WANT[0], other]), 8)
        assert edits == WANT[:1] and len(dropped) == 1
    edits, dropped = parse_edits(f'{LIST}\n\nFinal:\n[{{"op": "rewrite", "content": "x"}}]', 8)
    assert edits == WANT and "op is not one of" in dropped[0]["reason"]


@pytest.mark.parametrize("begin, end", [('{"a":', "}"), ("[[1],", "]"), ('{"edits":', "}"), ("[", "]"), ('{"a":[', "]}")])
@pytest.mark.parametrize("times", [100, 700, 5000])
def test_brackets_in_brackets_are_no_edits(begin, end, times):
    edits, dropped = parse_edits(begin * times + "1" + end * times, 8)
    assert edits == [] and dropped[0]["reason"]


@pytest.mark.parametrize("piece", ["[", "{", "[{", "]", '"', "'", '{"a":', "[1,", '["', "[/*", "[//",
                                   '[{"op": "', "{op:", "\\", '{"a":"', "[{'op':'", "<think>", "</think>", '{"edits":[',
                                   '{"op": "append", "content": "', '[{"op": "append", "content": "a"},'])
def test_two_hundred_thousand_characters_of_anything_are_read_at_once(piece):
    begin = time.process_time()
    parse_edits(piece * (200_000 // len(piece)), 8)
    parse_numbers(piece * (200_000 // len(piece)), 8)
    assert time.process_time() - begin < 1


def test_support_is_kept_where_it_is_a_number():
    for given, want in ((3, {"support": 3}), ("4", {"support": 4}), (float("nan"), {}), ("many", {}), (-1, {}), (None, {}),
                        (3.0, {"support": 3}), ("3 episodes", {"support": 3}), ("12345", {})):
        edits, _ = parse_edits(json.dumps([{**WANT[0], "support": given}]), 8)
        assert edits == [{**WANT[0], **want}]


@pytest.mark.parametrize("answer, want", [("[3, 1, 99, 1]", [3, 1]), ("[1, 2", [1, 2]),
                                          ("First [0].\n```json\n{\"order\": [2, 0]}\n```", [2, 0]),
                                          ('{"order": ["2", "0"], "analysis": "see [1]"}', [2, 0]), ('{"order": [edit 2, edit 0', [2, 0]),
                                          ("none", []), ("[]", []), ("<think>[1]", []), ("[" + "9" * 10_000 + "]", [])])
def test_numbers_of_a_ranking(answer, want):
    assert parse_numbers(answer, 4) == want
