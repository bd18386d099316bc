"""Retirement: what a policy has absorbed leaves the state. Section 2.1 of arXiv 2609.08919 says that it does, not how; by use is ours.

    retire(run, policy, state) -> {"before", "state", "retired"}: a phase of funnel/rounds.py, after a committed policy

An entry is retired where the policy with the other entries does on validation tasks, by --gate-metric, as well as with all of them.
"""
from distill import ROUNDING
from funnel.state import entries, without_entries


def retire(run, policy, state) -> dict:
    """The state with all entries, what is left of it, and the entries that go. Writes nothing: the state's file stays until the round
    is closed, so a stop in this phase costs this phase alone."""
    left = residual_state(run, policy, state)
    return {"before": state, "state": left, "retired": [line for line in entries(state) if line not in entries(left)]}


def residual_state(run, policy, state) -> str:
    """The state without the entries whose removal leaves the policy on validation tasks where it is with all of them.
    Groups are tried first, then their halves, so that a state that is not needed costs one evaluation."""
    if not entries(state):
        return state

    def worth(text):
        return run.success("valid", policy, text)[run.config.gate_metric]

    full = worth(state)

    def without(kept, group):
        less = without_entries(kept, group)
        if worth(less) >= full - ROUNDING:
            return less
        if len(group) < 2:
            return kept
        return without(without(kept, group[:len(group) // 2]), group[len(group) // 2:])

    return without(state, entries(state))
