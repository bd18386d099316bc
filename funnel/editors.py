"""The editors of Phase I: who proposes edits of the state, from episodes that were played with it.

    frozen batch  ->  reflect: failures and successes apart, 8 at a time  ->  merge, failures first  ->  cut to the budget

What differs from SkillOpt (arXiv 2605.23904): equal edits are merged in code before the model merges the rest, and where its
merging or ranking cannot be read, the order stands: most often proposed first, then failures first. The counting editor is ours.
"""
import json
from collections import Counter, defaultdict

from envs import parse_action
from funnel.edits import parse_edits, parse_numbers
from funnel.state import bare, entries, shortened, situation
from rl.sampling import sampler
from rl.stripped import without_hints


def propose_edits(run, policy, episodes, state, budget, rejected):
    """(edits, dropped ones) by --editor: counted, or written by a language model, the policy's base model if no other is named."""
    config = run.config
    if config.editor == "count":
        return count_edits(episodes, state, budget, rejected), []

    def edits_by(model, chat):
        act = sampler(model, chat, temperature=0.0, max_new_tokens=config.editor_tokens)

        def ask(prompts):
            return [chat.action_text(act([chat.prompt([("system", system), ("user", user)])])[0]) for system, user in prompts]

        return model_edits(ask, episodes, state, budget, rejected, most=config.editor_characters)

    if config.editor_model:
        return run.with_another(config.editor_model, edits_by)
    model = run.load(policy)
    with model.disable_adapter():
        return edits_by(model, run.chat)


# The counting editor, for the built-in game

def count_edits(trajectories, state, budget, rejected=(), support=2):
    """Edits by counting, no language model. In a situation (the first and last line of an observation), after which action
    did an episode go on or succeed (good), after which did it end without success (bad)? An action that is good in at least
    `support` episodes, and in a larger share than rivals that failed as often, becomes an entry; an entry that does
    worse than a rival is replaced, one that only fails is deleted.

    It reads observations, actions and outcomes of episodes, and knows no rule. It suits a game in which a wrong action ends
    the episode. Mended entries come first, then what came up in most episodes; what was rejected before comes last. An
    entry: "- You are in the ash house. The door here is red: take iron key."
    """
    tally = defaultdict(lambda: defaultdict(Counter))  # situation -> action -> good, bad
    for trajectory in map(without_hints, trajectories):
        shown = [trajectory.first_observation, *(turn.observation for turn in trajectory.turns)]
        seen = set()  # an episode counts once, however often it does the same
        for number, (turn, observation) in enumerate(zip(trajectory.turns, shown), 1):
            action = parse_action(turn.action).lower()
            if action and turn.valid:
                good = number < len(trajectory.turns) or trajectory.success
                seen.add((situation(observation), action, "good" if good else "bad"))
        for about, action, outcome in seen:
            tally[about][action][outcome] += 1

    def share(about, action):
        count = tally[about][action]
        return count["good"] / max(count["good"] + count["bad"], 1)

    def best(about):
        """The action that stands out among its rivals, or None."""
        first = max(sorted(tally[about]), key=lambda action: (share(about, action), tally[about][action]["good"]))
        failed = sum(count["bad"] for action, count in tally[about].items() if share(about, action) < share(about, first))
        return first if tally[about][first]["good"] >= support and failed >= support else None

    ranked, known = [], set()
    for line in entries(state):
        about, colon, action = bare(line).removesuffix(".").rpartition(": ")
        if not colon:
            continue  # not an entry of this editor's
        known.add(about)
        if about not in tally or tally[about][action]["bad"] < support:
            continue
        rival = best(about)
        if rival and share(about, rival) > share(about, action):
            edit = {"op": "replace", "target": line, "content": f"- {about}: {rival}."}
        elif not tally[about][action]["good"]:
            edit = {"op": "delete", "target": line}
        else:
            continue
        ranked.append((edit in rejected, 0, -tally[about][action]["bad"], line, edit))
    for about in list(tally):
        rival = best(about) if about not in known else None
        if rival:
            edit = {"op": "append", "content": f"- {about}: {rival}."}
            often = sum(sum(count.values()) for count in tally[about].values())
            ranked.append((edit in rejected, 1, -often, edit["content"], edit))
    return [edit for *_, edit in sorted(ranked, key=lambda item: item[:4])][:budget]


# The language model as editor

FORM = """Answer with JSON alone, a list of at most {budget} edits, most useful first:
[{{"op": "append", "content": "one sentence to add"}},
 {{"op": "replace", "target": "a line of the notes, exactly", "content": "the sentence that takes its place"}},
 {{"op": "delete", "target": "a line of the notes, exactly"}}]
"op" is one of append, insert_after, replace, delete. An empty list, [], means that nothing should change."""
REFLECT = {
    "failure": "An agent failed in the episodes below. Find mistakes that several of them share, and correct the notes "
               "that the agent reads before it acts, so that it avoids them.",
    "success": "An agent succeeded in the episodes below. Find what several of them did alike, and write it into the "
               "notes that the agent reads before it acts, unless they say it already."}
RULES = ("Only patterns across episodes count: nothing that is true of one episode alone, no answers to single tasks. "
         "Each sentence says in which situation what should be done.")
MERGE = ("Several reviewers proposed the edits below for the same notes, the first list from failures. Merge them: join "
         "edits that say the same, settle contradictions, and keep what corrects failures where you must choose.")
RANK = ("Rank the numbered edits below by how many future episodes they will help and how general they are. Answer with "
        "JSON alone: the list of the {budget} best numbers, such as [2, 0].")


def model_edits(ask, trajectories, state, budget, rejected=(), *, batch=8, most=1500):
    """Edits by a language model -> (edits, dropped ones with their reasons).

    ask(list of (system, user) prompts) -> their answers. `most`: characters of an episode that are shown.
    """
    notes = f"The notes now:\n{state or '(empty)'}"
    if rejected:
        notes += "\nThese edits were tried before and did not help:\n" + "\n".join(
            json.dumps(shortened(edit), ensure_ascii=False) for edit in rejected[-10:])
    prompts = []
    for kind in ("failure", "success"):
        shown = [transcript(t, most) for t in trajectories if t.success == (kind == "success") and t.turns]
        prompts += [(f"{REFLECT[kind]} {RULES}\n{FORM.format(budget=budget)}",
                     "\n\n".join([notes, *shown[n:n + batch]])) for n in range(0, len(shown), batch)]
    lists, dropped = ask_for_edits(ask, prompts, budget)
    lists = list(filter(None, lists))
    merged = distinct(edit for edits in lists for edit in edits)
    if len(merged) > budget and len(lists) > 1:
        while len(lists) > 1:  # a tree: two by two, failures first
            pairs = [lists[n:n + 2] for n in range(0, len(lists), 2)]
            answers, bad = ask_for_edits(ask, [(f"{MERGE} {RULES}\n{FORM.format(budget=2 * budget)}", notes + "".join(
                f"\n\nList {n}:\n{json.dumps(edits, ensure_ascii=False)}" for n, edits in enumerate(pair, 1)))
                for pair in pairs if len(pair) == 2], 2 * budget)
            dropped += bad
            lists = [edits or distinct(edit for part in pair for edit in part) for pair, edits in zip(pairs, [*answers, pairs[-1][0]])]
        merged = distinct(lists[0])
    if len(merged) > budget:
        numbered = "\n".join(f"{n}: {json.dumps(edit, ensure_ascii=False)}" for n, edit in enumerate(merged))
        order = parse_numbers(ask([(RANK.format(budget=budget), f"{notes}\n\n{numbered}")])[0], len(merged))
        merged = [merged[n] for n in order] + [edit for n, edit in enumerate(merged) if n not in order]
        dropped += [{**shortened(edit), "reason": f"over the budget of {budget} edits"} for edit in merged[budget:]]
    return merged[:budget], dropped


def ask_for_edits(ask, prompts, most):
    """([at most `most` edits of each prompt's answer], [dropped ones]). An answer without any is asked for once more, with its fault."""
    read = [parse_edits(answer, most) for answer in (ask(prompts) if prompts else [])]
    again = [n for n, (edits, dropped) in enumerate(read) if dropped and not edits]
    if again:
        answers = ask([(prompts[n][0], f"{prompts[n][1]}\n\nYour last answer could not be used, because {read[n][1][0]['reason']}. It began "
                                       f"or ended so:\n{read[n][1][0]['answer']}\nAnswer once more, with JSON alone.") for n in again])
        for n, answer in zip(again, answers):
            edits, dropped = parse_edits(answer, most)
            read[n] = edits, read[n][1] + dropped
    return [edits for edits, _ in read], [row for _, dropped in read for row in dropped]


def transcript(trajectory, most):
    """An episode as text, its middle cut out if it is long."""
    text = "\n".join([trajectory.first_observation, *(f"> {turn.action.strip()}\n{turn.observation}"
                                                      for turn in trajectory.turns)])
    if len(text) > most:
        text = f"{text[:most // 2]}\n(...)\n{text[-most // 2:]}"
    return f"Episode ({'success' if trajectory.success else 'failure'}):\n{text}"


def distinct(edits):
    """Each edit once, the ones proposed more often first, else in their order."""
    edits = list(edits)
    counted = Counter(json.dumps(edit, sort_keys=True) for edit in edits)
    return [json.loads(key) for key, _ in counted.most_common()]  # equal counts keep their order
