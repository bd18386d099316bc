"""Success on a fixed list of tasks of the standard environment: not enriched, the same tasks each time.

    evaluate(act, chat, envs, fixed_tasks(tasks, 64), max_turns=15)

With several samples a task, pass@k is the unbiased estimate of arXiv 2107.03374, Eq. 1.
"""
import math

from rl.rollout import Request, refuse_if_hopeless, rollout


def wilson(successes: int, episodes: int, z: float = 1.959964) -> list[float]:
    """95 % interval of a share (Wilson's score interval): [low, high]."""
    if episodes == 0:
        return [0.0, 1.0]
    share, z2 = successes / episodes, z * z
    centre = (share + z2 / (2 * episodes)) / (1 + z2 / episodes)
    half = z / (1 + z2 / episodes) * math.sqrt(share * (1 - share) / episodes + z2 / (4 * episodes ** 2))
    return [max(0.0, centre - half), min(1.0, centre + half)]


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased chance that one of k samples is correct, from `correct` of `samples`: 1 - C(n-c, k) / C(n, k)."""
    if not 1 <= k <= samples:
        raise ValueError(f"k must lie in 1..{samples}, got {k}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def fixed_tasks(tasks: list[str], number: int) -> list[str]:
    """`number` tasks spread evenly over the list (all of them if there are fewer): the same ones each time."""
    return tasks if number >= len(tasks) else [tasks[n * len(tasks) // number] for n in range(number)]


def evaluate(act, chat, envs, tasks, *, samples: int = 1, enriched: bool = False, **limits) -> dict:
    """Play each task `samples` times; episode n of the list has seed n, whatever was played before. enriched: `envs` are
    EnrichedEnv, and every episode is one with hints, so this is not the standard environment.

    An episode whose environment broke counts as no success; where all broke, BadInput is raised, as a 0 would say something
    else. The interval treats episodes as independent: with samples > 1 they are not quite, and it is too narrow. Returns
    success, interval, episodes, clean_success (success without an invalid action before it), reward (mean return; a broken episode's
    is 0 here, as it is no success), score (mean of the benchmark's own score, 0 to 100 on ScienceWorld, else of the return, broken
    episodes left out), valid_action_fraction, turns, env_errors; outcomes, each task's own
    success; abstain_turns and abstained, summed, where the benchmark asks what cannot be done; success_released_rule, the success
    that FEE's released code would count, where the environment tells it; success_by_name where the tasks have several names; and
    pass@k for samples > 1.
    """
    requests = [Request(task, group=n, seed=n, enriched=enriched) for n, task in enumerate(tasks) for _ in range(samples)]
    played = rollout(act, chat, envs, requests, **limits)
    refuse_if_hopeless(played, limits.get("max_context"))
    return figures(played, tasks, samples)


def figures(played, tasks, samples: int = 1) -> dict:
    """What `evaluate` returns, of its episodes."""
    successes = sum(t.success for t in played)
    turns = [turn for t in played for turn in t.turns]
    scores = [t.reward if t.info.get("score") is None else t.info["score"] for t in played if t.end != "env_error"]
    clean = sum(t.success and all(turn.valid for turn in t.turns) for t in played)
    result = {"success": successes / len(played), "interval": wilson(successes, len(played)), "episodes": len(played),
              "clean_success": clean / len(played),
              "reward": math.fsum(t.reward for t in played if t.end != "env_error") / len(played),
              "score": sum(scores) / max(len(scores), 1),
              "valid_action_fraction": sum(turn.valid for turn in turns) / max(len(turns), 1),
              "turns": len(turns) / len(played),
              "env_errors": sum(t.end == "env_error" for t in played)}
    if any("abstain_turns" in t.info for t in played):
        result |= {key: sum(t.info.get(key, 0) for t in played) for key in ("abstain_turns", "abstained")}
    if any("success_released_rule" in t.info for t in played):
        result["success_released_rule"] = sum(t.info.get("success_released_rule", False) for t in played) / len(played)
    names = [t.task.split("/")[0] for t in played]
    if len(set(names)) > 1:
        result["success_by_name"] = {name: sum(t.success for t, own in zip(played, names) if own == name) / names.count(name)
                                     for name in sorted(set(names))}
    correct = [sum(t.success for t in played[n:n + samples]) for n in range(0, len(played), samples)]
    result["outcomes"] = {task: c / samples for task, c in zip(tasks, correct)}
    if samples > 1:
        result["pass@k"] = {k: sum(pass_at_k(samples, c, k) for c in correct) / len(correct)
                            for k in (2 ** n for n in range(samples.bit_length())) if k <= samples}
    return result


def success_table(env_name: str, rows, split: str = "test") -> str:
    """Text for the terminal: [(name, result of evaluate), ...]. Valid acts is the share of actions that were valid."""
    rows, title = list(rows), f"{split} tasks, standard {env_name}"
    width = max(36, len(title), *(len(name) for name, _ in rows))
    lines = [f"{title:<{width}}  success  95 % interval    score  valid acts  episodes"]
    for name, r in rows:
        low, high = r["interval"]
        lines.append(f"{name:<{width}}  {r['success']:>7.3f}  [{low:.3f}, {high:.3f}]  {r['score']:>7.3f}  "
                     f"{r['valid_action_fraction']:>10.3f}  {r['episodes']:>8}")
        if "success_released_rule" in r:
            lines.append(f"    success by the rule of the released code {r['success_released_rule']:.3f}")
        if "pass@k" in r:
            lines.append("    " + "  ".join(f"pass@{k} {share:.3f}" for k, share in r["pass@k"].items()))
    return "\n".join(lines)
