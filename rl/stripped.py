"""The same episode under other prompts: what was sampled, after observations without hints.

    rebuild_rows(without_hints(trajectory), chat, "full")       # also how the Funnel's teacher reads an episode

`train_context` is not in the papers: sample with hints, and train on the same actions after prompts without them
(`--enrich-train-context`).
"""
from dataclasses import replace

from rl.learner import row_logps
from rl.rollout import Row, Trajectory, add_turn, messages_of


def without_hints(trajectory) -> Trajectory:
    """The trajectory as if no observation had carried a hint."""
    def cut(text, hint):
        return text.removesuffix(f"\n{hint}") if hint else text

    hints = [turn.hint for turn in trajectory.turns]  # of the observation that a turn answers
    turns = [replace(turn, observation=cut(turn.observation, following), hint=None)
             for turn, following in zip(trajectory.turns, [*hints[1:], None])]  # no prompt holds the last observation
    return replace(trajectory, first_observation=cut(trajectory.first_observation, hints[0] if hints else None), turns=turns)


def rebuild_rows(trajectory, chat, history) -> list[Row]:
    """Its rows, rebuilt from the sampled ids and the observations that it holds now."""
    rows = []
    for number, turn in enumerate(trajectory.turns):
        so_far = replace(trajectory, turns=trajectory.turns[:number])
        add_turn(rows, chat.prompt(messages_of(so_far, chat, history), so_far.tools), turn.action_ids)
    for row in rows:
        row.sampled_logp = []  # it is of the prompts that were sampled with
    return rows


def train_context(config, batch, chat, model):
    """The batch with its hinted trajectories in other rows, by --enrich-train-context (with as-sampled, the paper's way, `train` does
    not call this):

    stripped         the old log-probs are taken in the stripped context too, so the ratio starts at 1. This is biased:
                     the stripped policy did not sample these actions. Imitation of hinted success, weighed by advantage.
    stripped-ratio   the old log-probs are those of the hinted context, which sampled: an importance ratio, under
                     the algorithm's own clip. Off-policy, so most ratios of a hinted action are far below 1.

    A negative advantage pushes down an action that the stripped policy might never have taken; `--enrich-positive-only`
    leaves these out, for hinted and plain episodes alike.
    """
    def is_hinted(trajectory):
        return any(turn.hint for turn in trajectory.turns)

    hinted_rows = [row for t in batch if is_hinted(t) for row in t.rows]
    sampled_logps = iter([])
    if config.enrich_train_context == "stripped-ratio":
        sampled_logps = iter(row_logps(model, hinted_rows, chat.pad_id, temperature=config.temperature,
                                       micro_batch_tokens=config.micro_batch_tokens))

    def stripped(trajectory):
        rows = rebuild_rows(without_hints(trajectory), chat, config.history)
        if config.enrich_train_context == "stripped-ratio":
            # The sampled tokens come in the same order, cut into rows in another way perhaps
            logps = iter([logp for row, logp_T in zip(trajectory.rows, sampled_logps)
                          for logp, own in zip(logp_T, row.mask) if own])
            for row in rows:
                row.old_logp = [next(logps) if own else 0.0 for own in row.mask]
        return replace(trajectory, rows=rows)

    return [stripped(t) if is_hinted(t) else t for t in batch]
