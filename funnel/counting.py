"""The counting editor: edits of a state by counting, no language model. Ours, for the built-in game.

    edits = count_edits(trajectories, state, budget)
"""
from collections import Counter, defaultdict

from envs import parse_action
from funnel.state import bare, entries, situation
from rl.stripped import without_hints


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
