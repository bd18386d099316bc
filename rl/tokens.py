"""tokens.jsonl: with --log-tokens N, N episodes of each step, token by token."""
from rl.evaluation import fixed_tasks
from rl.learner import row_logps
from rl.logs import append, record


def log_ratios(model, trajectories, pad_id, **how):
    """To be called before `update`; what it returns is called after, and gives for each trajectory the log-probs of its
    sampled tokens now less those when they were sampled, in nats. In `update` itself that ratio is 1 until a second step."""
    rows = [row for t in trajectories for row in t.rows]
    before = [row.old_logp or logp_T for row, logp_T in zip(rows, row_logps(model, rows, pad_id, **how))]

    def after():
        ratios = [[new - old for own, new, old in zip(row.mask, *both) if own]
                  for row, both in zip(rows, zip(row_logps(model, rows, pad_id, **how), before))]
        parts = iter(ratios)
        return [[ratio for _ in t.rows for ratio in next(parts)] for t in trajectories]

    return after


def log_tokens(path, chat, recorded, rows, **numbers):
    """A line of tokens.jsonl: an episode's line of rollouts.jsonl and the rows that were trained on, token by token: its
    text, 1 where the policy sampled it, and, for the sampled ones, each of `numbers` ([T], row after row)."""
    flat = {name: iter(values) for name, values in numbers.items()}
    append(path, {**recorded, "rows": [
        {"tokens": [chat.tokenizer.decode([i]) for i in ids], "mask": mask,
         **{name: [round(float(next(values)), 4) for own in mask if own] for name, values in flat.items()}}
        for ids, mask in rows]})


def watch(config, model, batch, chat, micro_batch_tokens):
    """Before an update: which --log-tokens episodes are logged, evenly spread, and what `log_ratios` returns for them."""
    shown = fixed_tasks(range(len(batch)), config.log_tokens)
    return shown, log_ratios(model, [batch[n] for n in shown], chat.pad_id, temperature=config.temperature,
                             micro_batch_tokens=micro_batch_tokens)


def log_step_tokens(path, chat, step, batch, advantages_N, watched):
    """After it: their tokens, with the advantage and how far the update moved each log-prob."""
    shown, ratios = watched
    for n, ratios_T in zip(shown, ratios()):
        log_tokens(path, chat, {**record(step, batch[n]), "advantage": advantages_N[n].item()},
                   [(row.ids, row.mask) for row in batch[n].rows], log_ratio=ratios_T)
