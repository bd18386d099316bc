"""The editors of Phase I: who proposes edits of the state, from episodes that were played with it.

    frozen batch -> reflect: failures and successes apart, up to 8 episodes at a time, kinds and counts before edits
                 -> merge: up to 8 lists at a time, failures and successes apart, then both -> rank, cut to the budget

This is the order of SkillOpt (arXiv 2605.23904) and of its released code; the words are ours. With `--lite`, as SkillOpt-Lite: no
budget, no merge, no ranking, and rejected edits are not shown. What differs:

1. A list holds at most the budget after reflection, as there, and twice the budget after a merge, which has no limit there.
2. Equal edits are joined in code, and so is what a model's merge leaves unread: then the order is most often proposed first, failures
   first. Of two edits on one line of the state the first one stays. There the prompt alone asks for that.
3. Ranking asks for impact, support, novelty and generality; there, for actionability in the place of support.
4. A prompt that does not fit into the editor's context has fewer episodes, or shorter ones.
5. Rejected edits of all earlier rounds are shown with the scores of their gates, the last ten; there those of the epoch, in reflection
   alone.
docs/distill.md lists what else SkillOpt has.
"""
import json

from transformers import AutoConfig, AutoTokenizer

from envs import BadInput
from funnel.counting import count_edits
from funnel.edits import parse_edits, parse_numbers
from funnel.state import HEADING, bare, headed, shortened
from rl.policy import CANNOT_LOAD, carrying_chat
from rl.sampling import sampler

TOGETHER = 8  # episodes in a prompt of reflection, lists in a prompt of merging
ANY = 1000  # edits: no budget


def propose_edits(run, policy, episodes, state, budget, rejected):
    """(edits, dropped ones) by --editor: counted, or written by a language model, the policy's base model if no other is named.
    rejected: [{"edits", "before", "after"}] of rounds whose candidate was rejected, with the scores of its gate."""
    config = run.config
    budget, rejected = (ANY, []) if config.lite else (budget, rejected)
    if config.editor == "count":
        return count_edits(episodes, state, budget, [edit for row in rejected for edit in row["edits"]]), []

    def edits_by(model, chat):
        act = sampler(model, chat, temperature=0.0, max_new_tokens=config.editor_tokens)
        room = context_of(model.config) - config.editor_tokens - 300  # for the fault of an answer that is asked for again

        def ask(prompts):
            return [chat.action_text(act([chat.prompt(messages(*prompt))])[0]) for prompt in prompts]

        return model_edits(ask, run.envs[0], episodes, state, budget, rejected, most=config.editor_characters, lite=config.lite,
                           fits=lambda *prompt: len(chat.prompt(messages(*prompt))) <= room)

    if config.editor_model:
        return run.with_another(config.editor_model, edits_by)
    model = run.load(policy)
    with model.disable_adapter():
        return edits_by(model, run.chat)


def messages(system, user):
    return [("system", system), ("user", user)]


def context_of(model_config):
    """Tokens that a model can read and write, as its configuration says."""
    return getattr(model_config.get_text_config(), "max_position_embeddings", None) or 1_000_000


def check_editor(run):
    """Before anything is trained: does the editor's tokenizer load, and has its context room for its longest prompt about one episode?
    The length is an estimate. Raises BadInput."""
    config, env = run.config, run.envs[0]
    if config.editor == "count" or config.mode == "policy-only":
        return
    try:
        name = config.editor_model
        chat = carrying_chat(AutoTokenizer.from_pretrained(name), config.thinking, None, config.started) if name else run.chat
        room = context_of(AutoConfig.from_pretrained(name) if name else run.load().config)
    except CANNOT_LOAD as error:
        raise BadInput(f"cannot load the editor {name!r}: {str(error).strip().splitlines()[0]}") from error
    fixed = [reflection_system("failure", config.edits_first), context(env, "", [])]
    tokens = len(chat.prompt(messages(*fixed)))
    tokens += round(tokens / sum(map(len, fixed)) * (config.state_limit + config.editor_characters)) + config.editor_tokens
    if tokens > room:
        raise BadInput(f"the editor's context of {room:,} tokens has no room for a state of --state-limit {config.state_limit:,} "
                       f"characters, an episode of --editor-characters {config.editor_characters:,} and --editor-tokens "
                       f"{config.editor_tokens:,}, some {tokens:,} tokens in all: lower these, or take another --editor-model")


# Prompts

REFLECT = {
    "failure": """You improve the notes that an agent reads before it acts.
You are shown the notes, and episodes in which the agent failed.
1. Read all of them. Find where each one went wrong, and why.
2. Sort the failures into kinds, and count each kind.
3. For the kinds that several episodes share, write edits of the notes that would have prevented them. Most common kind first.""",
    "success": """You improve the notes that an agent reads before it acts.
You are shown the notes, and episodes in which the agent succeeded.
1. Read all of them. Find what led to success in each one.
2. Sort what you found into kinds, and count each kind.
3. For the kinds that several episodes share and that the notes do not hold yet, write edits of the notes. Most common kind first."""}
RULES = """Rules for edits:
- An edit must help in many other tasks. No names, answers or values of a single task, and nothing that one episode alone shows.
- Say in which situation what is to be done, as you would say it to the agent.
- The agent sees its instructions, the notes and its task. It never sees right answers or scores: do not build on them.
- Do not write what the notes or the instructions say already. If a line of the notes is wrong or vague, replace or delete it.
- No two edits may touch the same line of the notes.
- If the notes have a section that an edit belongs to, put it there with insert_after, in place of a new section at the end.
- The notes are Markdown, and stay as you write them: lists, numbered steps, tables and headings may be used.
- {limit}"""
FORM = """Answer with JSON alone, in this form:
{{"analysis": "{analysis}, in two or three sentences",
 {kinds}"edits": [
  {{"op": "append", "content": "- a new line at the end of the notes", "support": 3}},
  {{"op": "insert_after", "target": "a line of the notes, exactly", "content": "- a new line below it", "support": 2}},
  {{"op": "replace", "target": "a line of the notes, exactly", "content": "- what takes its place", "support": 2}},
  {{"op": "delete", "target": "a line of the notes, exactly", "support": 2}}]}}
"support" is the number of episodes that speak for the edit. If nothing should change, write "edits": []."""
KINDS = '"{name}": [{{"kind": "a few words", "count": 3}}],\n '
MERGE = """You improve the notes that an agent reads before it acts.
Several reviewers have proposed edits of the same notes. {whence}
Make one list out of theirs:
- Join edits that say the same, in the best of their words. The support of the new edit is the sum of theirs.
- Where edits contradict each other, {choice}.
- {keep} Its support stays as it is.
- No two edits may touch the same line of the notes.
- {order}
- Write at most {budget} edits."""
SHARED = "Edits of several reviewers come first. An edit of one reviewer alone that is about a single task is left out."
WHENCE = {
    "failure": {"whence": "They have read episodes in which the agent failed.", "choice": "keep the one with more support, or join both",
                "keep": "Keep every edit that corrects something of its own.", "order": SHARED},
    "success": {"whence": "They have read episodes in which the agent succeeded.", "choice": "keep the one with more support",
                "keep": "Keep an edit only if the notes do not say it already.", "order": SHARED},
    "both": {"whence": "List 1 corrects failures. List 2 holds on to what led to success.",
             "choice": "keep the one of list 1, unless far more episodes speak for the one of list 2",
             "keep": "Keep every other edit of list 1, and an edit of list 2 if list 1 says nothing about that.",
             "order": "Edits of list 1 come first."}}
RANK = """You improve the notes that an agent reads before it acts.
Rank the numbered edits of the notes. These criteria count, the first one most:
1. impact: it prevents a failure that is common in many tasks;
2. support: many episodes speak for it;
3. novelty: the notes do not say it already;
4. generality: it is about a kind of situation, not about one task, and says clearly what to do there.
Answer with JSON alone, in this form, with the numbers of the {budget} best edits, best first:
{{"analysis": "one or two sentences", "order": [2, 0]}}"""


def reflection_system(kind, budget):
    limit = f"Write at most {budget} edits. Fewer are fine." if budget < ANY else "Write as many edits as are needed."
    name = {"failure": "failures", "success": "successes"}[kind]
    form = FORM.format(analysis="what happened, and why", kinds=KINDS.format(name=name))
    return "\n\n".join([REFLECT[kind], RULES.format(limit=limit), form])


def merge_system(kind, budget):
    return f"{MERGE.format(budget=budget, **WHENCE[kind])}\n\n" + FORM.format(analysis="what you joined and left out, and why", kinds="")


def context(env, state, rejected):
    """What every prompt of the editor begins with: what the agent was told, what is to be known of its episodes, the state, and what
    was rejected."""
    parts = [f"## The agent's instructions\n\n{env.system_prompt.strip() or '(none)'}"]
    if env.analyst_note:
        parts.append(f"## About its episodes\n\n{env.analyst_note}")
    parts.append(headed(state) or f"{HEADING}\n\n(There are none yet.)")
    lines = [f"{as_json(shortened(edit))}  (validation score {worth(row['before'])} without it and the other edits of its round, "
             f"{worth(row['after'])} with them)" for row in rejected for edit in row["edits"]][-10:]
    if lines:
        parts.append("\n".join(["## Edits that were tried and rejected: do not propose them again", "", *lines]))
    return "\n\n".join(parts)


def worth(score):
    return "unknown" if score is None else f"{score:.3f}"


def as_json(value):
    return json.dumps(value, ensure_ascii=False)


ENDS = {"turn_limit": "no turn was left", "context_full": "its context was full"}


def shown(env, trajectory, most):
    """An episode as the editor reads it: how it ended, and the environment's account of it, its middle left out if it is long."""
    score = trajectory.info.get("score")
    head = ["success" if trajectory.success else "failure", *([f"score {score:.2f}"] if isinstance(score, (int, float)) else []),
            f"{len(trajectory.turns)} turns", *filter(None, [ENDS.get(trajectory.end)])]
    return f"({', '.join(head)})\n{cut(env.reflection(trajectory), most)}"


def cut(text, most):
    if len(text) <= most:
        return text
    tail = most // 2
    return f"{text[:most - tail]}\n(... {len(text) - most:,} characters are left out here ...)\n{text[len(text) - tail:]}"


def reflection_user(about, episodes):
    return "\n\n".join([about, "## Episodes", *(f"### Episode {n} of {len(episodes)} {text}" for n, text in enumerate(episodes, 1))])


def merge_user(about, lists):
    return "\n\n".join([about, "## Proposed edits", *(f"### List {n}\n" + "\n".join(map(as_json, edits))
                                                      for n, edits in enumerate(lists, 1))])


# The language model as editor

def model_edits(ask, env, trajectories, state, budget, rejected=(), *, most, fits=lambda system, user: True, together=TOGETHER, lite=False):
    """Edits by a language model -> (edits, dropped ones with their reasons).

    ask(list of (system, user) prompts) -> their answers. env: says what the agent was told and how an episode reads. most: characters
    of an episode that are shown. fits(system, user): is the prompt short enough?
    """
    about, merged, dropped = context(env, state, rejected), {}, []
    for kind in ("failure", "success"):
        # Reflect
        system = reflection_system(kind, budget)
        episodes = [shown(env, t, most) for t in trajectories if t.turns and t.success == (kind == "success")]
        episodes = [shortest(text, lambda part: fits(system, reflection_user(about, [part]))) for text in episodes]
        groups = packed(episodes, lambda part: fits(system, reflection_user(about, part)), together)
        lists, bad = ask_for_edits(ask, [(system, reflection_user(about, group)) for group in groups], budget)
        dropped += bad
        # Merge those of one kind
        merged[kind], bad = (lists, []) if lite else merge(ask, kind, about, lists, budget, fits)
        dropped += bad
    if lite:
        edits = distinct(merged["failure"] + merged["success"])
    else:
        lists, bad = merge(ask, "both", about, [distinct(lists) for lists in merged.values()], budget, fits)
        dropped += bad
        edits = distinct(lists)
    edits, bad = one_a_line(edits)
    dropped += bad
    # Rank
    if len(edits) > budget:
        numbered = "\n".join(f"{n}: {as_json(edit)}" for n, edit in enumerate(edits))
        order = parse_numbers(ask([(RANK.format(budget=budget), f"{about}\n\n## Numbered edits\n\n{numbered}")])[0], len(edits))
        edits = [edits[n] for n in order] + [edit for n, edit in enumerate(edits) if n not in order]
        dropped += [{**shortened(edit), "reason": f"over the budget of {budget} edits"} for edit in edits[budget:]]
    return edits[:budget], dropped


def shortest(text, fits):
    """The text, or what fits of it: the middle is left out."""
    whole, most = text, len(text)
    while not fits(text) and most > 200:
        most = most // 2
        text = cut(whole, most)
    return text


def packed(pieces, fits, most):
    """Groups of neighbours, of as many as fit and at most `most`; a piece that does not fit stands alone."""
    groups = []
    for piece in pieces:
        if groups and len(groups[-1]) < most and fits([*groups[-1], piece]):
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


def merge(ask, kind, about, lists, budget, fits):
    """([one list], dropped edits): a tree of merges of up to eight lists. Where an answer cannot be read, or nothing fits, its lists
    are joined in code."""
    system, dropped, lists = merge_system(kind, 2 * budget), [], [edits for edits in lists if edits]
    while len(lists) > 1:
        groups = packed(lists, lambda part: fits(system, merge_user(about, part)), TOGETHER)
        several = [group for group in groups if len(group) > 1]
        if not several:
            return [distinct(lists)], dropped
        answers, bad = ask_for_edits(ask, [(system, merge_user(about, group)) for group in several], 2 * budget)
        dropped += bad
        found = iter(answers)
        lists = [(next(found) or distinct(group)) if len(group) > 1 else group[0] for group in groups]
    return lists, dropped


def ask_for_edits(ask, prompts, most):
    """([at most `most` edits of each prompt's answer], [dropped ones]). An answer without any is asked for once more, with its fault."""
    def read(answer, system):
        edits, dropped = parse_edits(answer, most)
        copied = [edit for edit in edits if "content" in edit and as_json(edit["content"]) in system]
        return ([edit for edit in edits if edit not in copied],
                dropped + [{**shortened(edit), "reason": "it is the example of the prompt"} for edit in copied])

    found = [read(answer, system) for answer, (system, _) in zip(ask(prompts) if prompts else [], prompts)]
    again = [n for n, (edits, dropped) in enumerate(found) if dropped and not edits]
    if again:
        answers = ask([(prompts[n][0], f"{prompts[n][1]}\n\n## Your last answer could not be used\n\n{found[n][1][0]['reason']}: "
                                       f"{as_json(found[n][1][0])}\nAnswer once more, with JSON alone.") for n in again])
        for n, answer in zip(again, answers):
            edits, dropped = read(answer, prompts[n][0])
            found[n] = edits, found[n][1] + dropped
    return [edits for edits, _ in found], [row for _, dropped in found for row in dropped]


def distinct(lists):
    """The edits of the lists, each once with the support of all, the ones proposed more often first, else in their order."""
    held, times = {}, {}
    for edit in (edit for edits in lists for edit in edits):
        key = as_json({name: text for name, text in edit.items() if name != "support"})
        support = held.get(key, {}).get("support", 0) + edit.get("support", 0)
        held[key] = {**edit, **({"support": support} if support else {})}
        times[key] = times.get(key, 0) + 1
    return [held[key] for key in sorted(held, key=lambda key: -times[key])]  # equal counts keep their order


def one_a_line(edits):
    """(edits, dropped ones): of several that touch one line of the state the first. Lines may be inserted after a line many times."""
    kept, dropped, changed, touched = [], [], set(), set()
    for edit in edits:
        lines = {bare(line) for line in edit.get("target", "").splitlines() if bare(line)}
        inserts = edit["op"] == "insert_after"
        if lines & (changed if inserts else touched):
            dropped.append({**shortened(edit), "reason": "another edit touches the same line"})
            continue
        touched |= lines
        changed |= set() if inserts else lines
        kept.append(edit)
    return kept, dropped
