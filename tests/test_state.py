"""funnel/state.py: entries, edits of them, a state's file, and the environment that shows it."""
import pytest
from conftest import FakePolicy, edit

from envs import BadInput
from envs.keydoor import KeyDoor
from funnel.options import FunnelOptions
from funnel.state import (StateEnv, apply_edits, edit_budget, entries, note_of, read_state, situation, with_state, without_entries,
                          without_state)
from rl.rollout import Request, rollout

STATE = "# Keys\n- ash house, red door: take iron key.\n- Look first."


@pytest.mark.parametrize("change, want", [
    (edit("append", content="- New."), f"{STATE}\n- New."), (edit("append", content="New."), f"{STATE}\n\nNew."),
    (edit("insert_after", "ash house, red door: take iron key.", "- New."),
     "# Keys\n- ash house, red door: take iron key.\n- New.\n- Look first."),
    (edit("insert_after", "not there", "- New."), f"{STATE}\n- New."),
    (edit("insert_after", "# Keys", "- New."), STATE.replace("# Keys", "# Keys\n- New.")),
    (edit("replace", "- ash house, red door: take iron key.", "- ash house, red door: take tin key."),
     "# Keys\n- ash house, red door: take tin key.\n- Look first."),
    (edit("delete", "Look first."), "# Keys\n- ash house, red door: take iron key.")])
def test_edits(change, want):
    assert apply_edits(STATE, [change], 1000) == (want, [change], [])


@pytest.mark.parametrize("change, reason", [
    (edit("delete", "Look"), "its target is not in the state"),
    (edit("replace", "not there", "New."), "its target is not in the state"),
    (edit("append", content="Look first."), "its content is in the state already"),
    (edit("append", content="x" * 100_000), "the state would have 100,060 characters, more than the limit of 4,000")])
def test_edits_that_are_refused_leave_the_state(change, reason):
    good = edit("append", content="- Good.")
    state, applied, refused = apply_edits(STATE, [change, good], 4000)
    assert (state, applied) == (f"{STATE}\n- Good.", [good]) and [row["reason"] for row in refused] == [reason]
    assert len(str(refused)) < 600  # what is logged of it


def test_a_target_is_the_line_as_it_stands_before_one_that_is_like_it():
    assert apply_edits("A.\n\n- A.", [edit("delete", "- A.")], 99)[0] == "A."
    assert apply_edits("A.\n\n- A.", [edit("delete", "A.")], 99)[0] == "- A."


def test_edits_of_one_answer_build_on_each_other():
    edits = [edit("append", content="- A."), edit("replace", "A.", "B."), edit("delete", "A.")]
    state, applied, refused = apply_edits("", edits, 99)
    assert (state, len(applied), refused[0]["reason"]) == ("B.", 2, "its target is not in the state")


MARKDOWN = """# Search

1. Read the question.
2. Open it:
   - every drawer
   - every shelf

   then the rest.
3. Stop.

| kind | where |
|---|---|
| cup | shelf |

```
- no entry
```
- Look."""


@pytest.mark.parametrize("change, old, new", [
    (edit("append", content="## More\n\n1. One.\n   - nested\n2. Two."), "- Look.", "- Look.\n\n## More\n\n1. One.\n   - nested\n2. Two."),
    (edit("insert_after", "| cup | shelf |", "| pan | stove |"), "| cup | shelf |", "| cup | shelf |\n| pan | stove |"),
    (edit("insert_after", "2. Open it:", "3. Take it."), "   then the rest.", "   then the rest.\n3. Take it."),
    (edit("insert_after", "   - every shelf", "   - every box"), "   - every shelf", "   - every shelf\n   - every box"),
    (edit("insert_after", "every drawer", "   - every box"), "   - every drawer", "   - every drawer\n   - every box"),
    (edit("insert_after", "# Search", "Search well."), "# Search", "# Search\nSearch well."),
    (edit("insert_after", "3. Stop.", "Then wait."), "3. Stop.", "3. Stop.\n\nThen wait."),
    (edit("replace", "Read the question.", "1. Read it twice."), "1. Read the question.", "1. Read it twice."),
    (edit("replace", "   - every drawer\n   - every shelf", "   - all"), "   - every drawer\n   - every shelf", "   - all"),
    (edit("delete", "2. Open it:"), "2. Open it:\n   - every drawer\n   - every shelf\n\n   then the rest.\n", ""),
    (edit("delete", "# Search"), "# Search\n\n", ""), (edit("delete", "| cup | shelf |"), "| cup | shelf |\n", "")])
def test_markdown_stays_as_it_was_written(change, old, new):
    assert apply_edits(MARKDOWN, [change], 1000) == (MARKDOWN.replace(old, new, 1), [change], [])


def test_entries_are_items_with_what_is_nested_in_them():
    second = "2. Open it:\n   - every drawer\n   - every shelf\n\n   then the rest."
    assert entries(MARKDOWN) == ["1. Read the question.", second, "3. Stop.", "- Look."]
    assert without_entries(MARKDOWN, [second, "- Look."]) == MARKDOWN.replace(second + "\n", "").removesuffix("\n- Look.")
    assert without_entries(MARKDOWN, []) == MARKDOWN and entries("") == [] and without_entries("- A.", ["- A."]) == ""


def test_the_default_limit_holds_a_published_state():
    assert FunnelOptions().state_limit >= 13_175


def test_state_stands_after_the_system_prompt_and_an_empty_one_changes_nothing(word_chat):
    env = KeyDoor()
    assert StateEnv(env, "").system_prompt == env.system_prompt
    assert StateEnv(env, "- A.\n").system_prompt == f"{env.system_prompt}\n\n## Notes\n\n- A."
    played = [rollout(FakePolicy([5]), word_chat, [StateEnv(env, state)], [Request("ash/train-0000")], max_turns=3)[0]
              for state in ("", "key key key", STATE)]
    prompts = [word_chat.tokenizer.decode(t.turns[0].prompt_ids) for t in played]
    heading = word_chat.tokenizer.decode(word_chat.text_ids("## Notes"))
    assert "key key key" not in prompts[0] and prompts[1].replace(f" {heading} key key key", "") == prompts[0]
    assert without_state(played[2].system_prompt, STATE) == without_state(played[0].system_prompt, "") == env.system_prompt
    assert StateEnv(env, STATE).max_turns == env.max_turns
    for prompt in ("", "Play.", "Play.\n\n", f"## Notes\n\n{STATE}"):
        for state in ("", STATE, " A.\n", "## Notes"):
            assert without_state(with_state(prompt, state), state) == prompt


@pytest.mark.parametrize("content, said", [(b"x" * 5000, "more than the limit of 4,000"), (b"\xff\xfe", "cannot be read"),
                                           (b"a\0b", "NUL"), (None, "cannot be read")])
def test_a_state_file_that_is_no_state(tmp_path, content, said):
    if content is not None:
        (tmp_path / "000.md").write_bytes(content)
    with pytest.raises(BadInput, match=said) as caught:
        read_state(tmp_path / "000.md", 4000)
    assert "\n" not in str(caught.value)


def test_a_state_of_exactly_the_limit_is_read_again(tmp_path):
    (tmp_path / "001.md").write_text("x" * 40 + "\n")  # as a run writes it
    assert read_state(tmp_path / "001.md", 40) == "x" * 40


def test_edit_budget_falls_from_four_to_two():
    assert [edit_budget(k, 5) for k in range(1, 6)] == [4, 4, 3, 2, 2] and edit_budget(1, 1) == 4


NOTED = "- You are in the ash house. The door here is red: take iron key.\n- Taken. The door here is red: unlock red door."


def test_an_entry_is_quoted_under_the_observations_it_is_about():
    assert situation("Taken.\nCommands: open red door.\n\nThe door here is red.") == "Taken. The door here is red"
    assert situation("The end.") == "The end" and situation("") == ""
    first = "You are in the ash house.\nCommands: open blue door.\nThe door here is red."
    assert note_of(NOTED, first) == "Hint: take iron key." == KeyDoor().phrase(["take iron key"])
    assert note_of(NOTED, first.replace("red", "blue")) is None and note_of("", first) is None
    assert note_of("- Look first.\n" + NOTED, first.replace("ash", "elm")) is None


def test_quoting_changes_observations_alone():
    plain, noted = KeyDoor(impossible=0.0), StateEnv(KeyDoor(impossible=0.0), NOTED, "observation")
    assert noted.system_prompt == plain.system_prompt
    seen = 0
    for task in KeyDoor.tasks("train", impossible=0.0)[:20]:
        (a, a_info), (b, b_info) = plain.reset(task=task, seed=1), noted.reset(task=task, seed=1)
        while True:
            note = note_of(NOTED, a)
            assert b == (f"{a}\n{note}" if note else a) and b_info == {**a_info, **({"hint": note} if note else {})}
            seen += note is not None
            action = plain.gold_action()
            (a, *a_rest, a_info), (b, *b_rest, b_info) = plain.step(action), noted.step(action)
            assert a_rest == b_rest
            if a_rest[1]:
                assert a == b
                break
    assert seen > 10
    alarmed = StateEnv(KeyDoor(), "- The alarm rings: run.", "observation")
    alarmed.reset(task=KeyDoor.tasks("train")[0], seed=1)
    observation, _, terminated, _, info = alarmed.step("dance")
    assert terminated and observation == "The alarm rings." and "hint" not in info  # nothing answers the last one
