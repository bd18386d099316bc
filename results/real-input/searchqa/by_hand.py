"""distill.py with an editor's answers from files, answer-1.md for round 1 and so on: a stronger editor than the policy's own model.

    python results/real-input/searchqa/by_hand.py distill.py's options

What an answer holds goes through the same reading, gate and log as a model's. A round without a file has no edits.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from funnel import rounds  # noqa: E402
from funnel.edits import parse_edits  # noqa: E402
from rl.runs import cli  # noqa: E402


def propose_edits(run, policy, episodes, state, budget, rejected):
    answer = Path(__file__).with_name(f"answer-{int(run.phase.partition('-')[0])}.md")
    return parse_edits(answer.read_text(), budget) if answer.exists() else ([], [])


if __name__ == "__main__":
    rounds.propose_edits, rounds.check_editor = propose_edits, lambda run: None
    cli(rounds.main)
