"""Skills as text: what they are, who writes them, how the policy sees them. For skillrl.py and skill0.py.

A skill is {"title", "principle", "when"}: what to do, and in which situation. The counting editor of the built-in game
(funnel/counting.py) makes one of each of its entries: the situation is `when`, the action is `principle`. A language model is
asked as `WRITE` says, in our words.
"""
from dataclasses import dataclass, replace

from envs import BadInput, after_thinking
from funnel.counting import count_edits
from funnel.edits import MOST, Reader
from funnel.editors import shown
from funnel.state import bare
from grpo import Options as GrpoOptions
from rl.options import option

FIELDS = ("title", "principle", "when")
FORM = """Answer with JSON alone, a list of at most {most} skills, most useful first:
[{{"title": "three to five words", "principle": "one or two sentences that say what to do", "when": "the situation it is for"}}]
A skill must help in other tasks: no names, answers or values of a single one.
An empty list, [], means that there is nothing to add."""
WRITE = {
    "general": "Below are episodes of an agent in different tasks. Write skills that help in every task.",
    "type": "Below are episodes of an agent in tasks of one kind. Write skills for tasks of this kind.",
    "mistakes": "Below are episodes in which an agent failed. Write down the mistakes that recur: what goes wrong as the title, how to "
                "avoid it as the principle.",
    "failures": "Below is how some episodes of an agent ended, all of them failures. Write new skills that would have prevented this. "
                "Do not repeat a skill that is there already."}


@dataclass
class SkillOptions(GrpoOptions):
    state_place: str = option("", "where skills stand: prompt (after the system prompt) or observation (quoted under the observation "
                                  "that they are about; default: prompt, with tiny: observation)")
    reflection_batch: int = option(256, "training tasks that the base policy plays, for the skills before step 1 (as in four rounds of "
                                          "distill.py)")
    skills: int = option(6, "skills of a kind that are written from them at most (with --editor count: 3 times as many)")


def task_type(task: str) -> str:
    """What kind of task an id is of: the part before "/"."""
    return task.partition("/")[0]


def by_type(episodes) -> dict[str, list]:
    return {kind: [t for t in episodes if task_type(t.task) == kind] for kind in sorted({task_type(t.task) for t in episodes})}


def text_of(skills, place) -> str:
    """For `StateEnv`: lines of a prompt, or entries of which each is quoted under the observation that it is about."""
    if place == "observation":
        return "\n".join(f"- {skill['when']}: {skill['principle']}." for skill in skills)
    return "\n".join(f"- {skill['title']}: {skill['principle']} (When: {skill['when']})" for skill in skills)


def counted(episodes, most, known=()):
    """At most `most` new skills by counting, those that came up in most episodes first."""
    edits = count_edits(episodes, text_of(known, "observation"), 10 ** 6)
    entries = [bare(edit["content"]).removesuffix(".").rpartition(": ") for edit in edits if edit["op"] == "append"]
    return [{"title": action, "principle": action, "when": about} for about, _, action in entries[:most]]


def written(run, kind, episodes, most, known=(), last=0):
    """At most `most` new skills by a language model. kind: one of `WRITE`; last: of an episode only this many turns are shown (0: all of
    them)."""
    if not episodes:
        return []
    titles = "\n".join(f"- {skill['title']}" for skill in known) or "(none)"
    user = f"Skills that are there already:\n{titles}\n\n" + "\n\n".join(
        transcript(run, replace(t, turns=t.turns[-last:])) for t in episodes)
    return parse_skills(run.ask([(f"{WRITE[kind]}\n{FORM.format(most=most)}", user)])[0])[:most]


def transcript(run, trajectory) -> str:
    """An episode as the editor of distill.py reads it."""
    return f"Episode of {task_type(trajectory.task)} {shown(run.envs[0], trajectory, run.config.editor_characters)}"


def json_values(answer) -> list:
    """The JSON lists and objects in a model's answer, read as its edits would be (funnel/edits.py)."""
    return [value for *_, value in Reader((after_thinking(answer) or "")[:MOST]).values()]


def parse_skills(answer) -> list[dict]:
    """The skills in a model's answer, of the last list that has some; what is not whole is dropped."""
    found = [skills_of(value) for value in json_values(answer)]
    return next((skills for skills in reversed(found) if skills), [])


def skills_of(value) -> list[dict]:
    """The skills of a list, of {"skills": list}, or of one that stands alone."""
    items = value or []
    if isinstance(value, dict):
        items = [value, *(item for part in value.values() if isinstance(part, list) for item in part)]
    return [{field: item[field].strip() for field in FIELDS} for item in items if isinstance(item, dict) and all(
        isinstance(item.get(field), str) and item[field].strip() for field in FIELDS)]


def refuse_empty(skills, what):
    if not skills:
        raise BadInput(f"no skill was written from {what}: raise --reflection-batch, or take a stronger --editor-model")
