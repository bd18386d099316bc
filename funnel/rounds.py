"""The rounds of the Experience Funnel (arXiv 2609.08919): how the equations of distill.py are used. The pair is a state and a policy.

    for k = 1, 2, ...
        Phase I     S_k: reflect on episodes of the pair, edit, accept if validation success rises          `evolve_state`
        Phase II    play each instance without a state, with S_k-1 and with S_k; select; ask the teacher    `choose_and_teach`
                    pi_k: minimise L_RL + lambda L_distill, commit if validation success does not fall      `train_policy`
        retire      entries that pi_k does without leave S_k                                                `retire`
        report      the pair on validation tasks                                                            `close_round`

(The paper counts from S_k to S_k+1; here round k writes S_k and pi_k, from S_k-1 and the last committed policy, `policy`.)
"""
import math
import random
import sys
from dataclasses import replace

from tqdm import tqdm

import dapo
import grpo
import gspo
from distill import ROUNDING, select, transitions
from envs import DoesNotFit
from funnel.editors import check_editor, propose_edits
from funnel.results import draw_rounds, final_report, report_table, round_table
from funnel.retire import retire
from funnel.run import Run, finished_phases
from funnel.state import apply_edits, edit_budget, entries, read_state
from funnel.teacher import OWN, check_tokenizer, distillation_gradient, load_items, save_items, teach, usable
from rl.evaluation import fixed_tasks
from rl.logs import read, record
from rl.learner import make_optimizer
from rl.runs import run_folder, write_config
from rl.tokens import log_tokens
from rl.train import Algorithm, Step
from rl.warmstart import warm_up

METRICS = ("success", "reward")  # of validation tasks; the gates compare the one that --gate-metric names


def rounds(config):
    """All rounds; returns the run's folder. config: funnel.options.FunnelOptions."""
    with run_folder(config, "distill", finished_phases) as (folder, _):
        write_config(folder, config, "distill")
        run, policy = Run.open(config, folder), 0
        run.once(0, "start", lambda: start(run))
        for k in range(1, config.rounds + 1):
            evolved, taught, trained, retired, previous = {}, {}, {}, {}, run.state(k - 1)
            # Phase I: the state
            if config.mode == "policy-only":
                run.write_state(f"{k:03d}", "")
            else:
                evolved = run.once(k, "state", lambda: evolve_state(run, k, policy, previous))
            state = run.state(k)
            # Phase II: what the new state makes possible goes into the policy
            if config.mode == "full" and evolved["state_accepted"] and config.teacher != "none":
                taught = run.once(k, "teacher", lambda: choose_and_teach(run, k, policy, previous, state))
            if config.mode == "policy-only" or config.mode == "full" and evolved["state_accepted"]:
                trained = run.once(k, "policy", lambda: train_policy(run, k, policy, taught, state))
                run.stored(k).unlink(missing_ok=True)
            # The next pair
            policy = k if trained.get("policy_accepted") else policy
            if config.mode == "full" and config.retire and trained.get("policy_accepted"):
                retired = run.once(k, "retire", lambda: retire(run, policy, state))
            line = run.once(k, "round", lambda: close_round(run, k, policy, evolved, taught, trained, retired))["line"]
            print(round_table([line]) if k == 1 else round_table([line]).splitlines()[1], flush=True)
        left = run.state(k)
        full = retired["before"] if retired and left == retired["state"] else left  # what the last policy was taught from
        report = run.once(k, "report", lambda: final_report(run, k, policy, full))
        draw_rounds(folder, folder / "curve.png")
    for env in run.envs:
        env.close()
    print(f"\n{round_table(read(folder / 'rounds.jsonl'))}\n"
          "tasks with a state against without: 01 newly better, 11 still better, 10 no longer, 00 not, ? unknown\n\n"
          f"{report_table(config, report['evaluations'], policy)}")
    print(f"{folder}/ holds states/, policies/, adapter/, rounds.jsonl, evaluations.jsonl, rollouts.jsonl, curve.png")
    return folder


def start(run):
    """Policy 0 and state 0."""
    config, model = run.config, run.load()
    if config.teacher not in (*OWN, "none"):
        check_tokenizer(config.teacher, run.chat.tokenizer)
    check_editor(run)
    if config.warm_start:
        warm_up(config, model, run.chat, run.options, run.tasks["train"], run.limits)
    run.save(0)
    state = read_state(config.state, config.state_limit) if config.state and config.mode != "policy-only" else ""
    run.write_state("000", state)
    run.log(0, [], episodes="none")  # from here on `run_folder` keeps the folder: it has a metrics.jsonl
    return {"state": state, "evaluations": [run.evaluation(0, "valid", 0, text) for text in dict.fromkeys(("", state))]}


# Phase I

def evolve_state(run, k, policy, state):
    """Reflect on a frozen batch of the pair's episodes, edit, gate. Writes states/k, returns what is logged."""
    config = run.config
    # Reflect on episodes of the pair, and on what was rejected in earlier rounds
    tasks = run.sample_tasks(f"reflection {k}", config.reflection_batch)
    batch = run.play(k, policy, "reflection", tasks, state)
    rejected = [{"edits": row["rejected_edits"], "before": row[f"{config.gate_metric}_before"], "after": row[f"{config.gate_metric}_after"]}
                for row in run.results("state") if row["rejected_edits"]]
    edits, dropped = propose_edits(run, policy, [t for t in batch if t.end != "env_error"], state,
                                   edit_budget(k, config.rounds, config.edits_first, config.edits_last), rejected)
    candidate, applied, refused = apply_edits(state, edits, config.state_limit)
    # The gate: on validation tasks, success (or the mean reward) strictly rises, or the pair stays
    metric, before = config.gate_metric, run.success("valid", policy, state)
    after, reason = {}, "no edit was left"
    if applied:
        try:
            after = run.success("valid", policy, candidate)
            reason = "" if after[metric] > before[metric] + ROUNDING else (
                f"validation {metric} is {after[metric]:.3f}, with the state so far {before[metric]:.3f}")
        except DoesNotFit as error:  # it was playable without these edits
            reason = str(error)
    accepted = not reason
    run.write_state(f"{k:03d}", candidate if accepted else state)
    return {"state_accepted": accepted, "reason": reason,
            **{f"{name}_before": before[name] for name in METRICS}, **{f"{name}_after": after.get(name) for name in METRICS},
            "edits": applied if accepted else [], "rejected_edits": [] if accepted else applied,
            "dropped_edits": dropped + refused,
            "edited_by_hand": state != [found for found in run.results() if "state" in found][-1]["state"],
            "state": candidate if accepted else state}


# Phase II

def choose_and_teach(run, k, policy, previous, state):
    """Three conditions, labels, weights; the teacher's log-probs onto the disk, but for --on-policy step. Returns what is logged."""
    config, times = run.config, run.config.outcomes_per_condition
    # Each instance without a state, with the previous one and with the new one (Eq. 2)
    tasks = run.sample_tasks(f"instances {k}", config.instances)
    free = run.play(k, policy, "free", tasks, "", times)
    before = run.play(k, policy, "previous", tasks, previous, times) if previous else free
    new = run.play(k, policy, "updated", tasks, state, times)

    def outcomes(episodes):  # R of each instance; fsum, so that equal outcomes are equal in any order
        known = [[float(t.success) if config.label == "success" else t.reward for t in episodes[i:i + times]
                  if t.end != "env_error"] for i in range(0, len(episodes), times)]
        return [math.fsum(values) / len(values) if values else math.nan for values in known]

    # What the state newly or persistently makes possible (Eqs. 3 and 4)
    r0_N = outcomes(free)
    baseline_N = r0_N
    if config.label == "success":  # b = 1[most episodes succeed]
        baseline_N = [math.nan if math.isnan(r0) else 0.5 for r0 in r0_N]
    labels_N = transitions(baseline_N, outcomes(before), outcomes(new))
    a_N = select(labels_N, config.select, config.alpha, random.Random(f"random arm {config.seed} {k}"))
    chosen = [i for i in range(len(tasks)) if a_N[i] > 0]
    found = {"labels": {label: labels_N.count(label) for label in ("00", "01", "10", "11", "?")}, "selected": len(chosen),
             "chosen": {tasks[i]: a_N[i].item() for i in chosen},
             "success_in_training": [sum(t.success for t in part) / len(part) for part in (free, before, new)]}
    if config.on_policy == "step":  # episodes and teacher come with each batch of `train_policy`
        return found
    episodes = [t for i in chosen for t in new[i * times:(i + 1) * times]]
    if config.on_policy == "round" and chosen:
        episodes = run.play(k, policy, "student", [tasks[i] for i in chosen], "", times)
    weighed = usable(run, zip(episodes, [a_N[i].item() for i in chosen for _ in range(times)]))
    run.load(policy)
    items = teach(run, weighed, state, config.micro_batch_tokens)
    save_items(items, run.stored(k))
    log_items(run, k, weighed, items, "student" if config.on_policy else "updated")
    return found | {"trajectories": len(items), "tokens": sum(len(item.weights) for item in items)}


def log_items(run, k, weighed, items, episodes):
    """--log-tokens: some of what is distilled, with the weights of its tokens."""
    for (t, _), item in fixed_tasks(list(zip(weighed, items)), run.config.log_tokens) if run.config.log_tokens else []:
        what = {"phase": run.phase, "episodes": episodes, **record(k, t)}
        log_tokens(run.folder / "tokens.jsonl", run.chat, what, item.rows, weight=item.weights)


def rl_term(name, weight) -> Algorithm:
    """The state-free RL loss of Eq. 9, times its weight, with its paper's clip ranges. The run's --minibatches holds for all three (so
    GSPO's own default of 4 does not), and DAPO samples a batch three times at most."""
    term = RL_TERMS[name]()
    return Algorithm(**term | {"loss": lambda batch: weight * term["loss"](batch)})


RL_TERMS = {"grpo": lambda: grpo.algorithm(grpo.Options()),
            "dapo": lambda: dapo.algorithm(dapo.Options(max_rounds=3), grpo.group_advantages),
            "gspo": lambda: gspo.algorithm(gspo.Options(), grpo.group_advantages)}


def train_policy(run, k, policy, taught, state):
    """Optimizer steps on Eq. 9 from the last policy on, and the state-free gate. Returns what is logged.

    taught: what `choose_and_teach` found, or nothing where the RL term stands alone.
    """
    config = run.config
    if taught and not taught.get("trajectories", taught["selected"]):
        return {"policy_accepted": False, "reason": "no trajectory was selected", "optimizer_steps": 0}
    a_of = taught.get("chosen") if config.on_policy == "step" else None  # the selected tasks, which are played at each batch
    items = load_items(run.stored(k)) if taught and not a_of else []
    beside = run.another(config.teacher)[0] if a_of and config.teacher not in OWN else None
    before = run.success("valid", policy, "")
    deck, rng, optimizer_steps, counts = [], random.Random(f"distill {config.seed} {k}"), 0, {}

    def distilled(_, budget):  # lambda L_distill for one optimizer step; every item once before any comes again
        size = min(config.distill_batch, len(items))
        while len(deck) < size:
            deck.extend(rng.sample(items, len(items)))
        hand = [deck.pop(0) for _ in range(size)]
        return distillation_gradient(model, hand, run.chat.pad_id, weight=config.distill_weight, temperature=config.temperature,
                                     micro_batch_tokens=budget)

    def play(requests):  # without a state; a selected task has the seed that it was labelled with
        return run.episodes([replace(r, seed=run.seed(k, r.task)) for r in requests] if a_of else requests, "")

    with run.training(k, start=policy) as model:
        optimizer = make_optimizer(model, config.lr, config.optimizer)
        trainer = Step(config, rl_term(config.rl_loss, config.rl_weight), model, optimizer, run.chat)
        for step in tqdm(range((k - 1) * config.steps + 1, k * config.steps + 1), desc=f"round {k}", disable=None, leave=False):
            # Play without a state, for the RL term and, with --on-policy step, for the teacher
            groups, played = [], []
            if config.rl_weight or a_of:
                groups, played = trainer.play(step, list(a_of or run.tasks["train"]), play, stream=f"{run.phase} ")
            batch = [trajectory for group in groups for trajectory in group] if config.rl_weight else []
            if a_of:
                weighed = usable(run, [(t, a_of[t.task]) for t in played])
                weighed = rng.sample(weighed, min(len(weighed), config.distill_batch * config.minibatches))
                with run.weights_of(policy):  # pi_k, which stays what it is
                    items = teach(run, weighed, state, trainer.micro_batch_tokens, beside)
                deck.clear()
                counts = {"trajectories": counts.get("trajectories", 0) + len(items),
                          "tokens": counts.get("tokens", 0) + sum(len(item.weights) for item in items)}
                log_items(run, k, weighed, items, "student")
            # Update: Eq. 9
            stats = trainer.learn(step, batch, trainer.advantages(batch), more=distilled if items else None)
            trainer.refuse_to_go_on(step)
            # Log
            optimizer_steps += stats["optimizer_steps"]
            run.log(k, played, episodes="rl" if config.rl_weight else "student", optimizer_step=step, **stats)
    # The gate: state-free success (or mean reward) on validation tasks does not fall, or the last policy stays
    metric, after = config.gate_metric, run.success("valid", k, "")
    rise = after[metric] - before[metric]
    accepted = rise > ROUNDING if config.policy_gate == "rise" else rise >= -ROUNDING
    if accepted:
        run.save(k)
    return {"policy_accepted": accepted, "optimizer_steps": optimizer_steps, **counts,
            "reason": f"state-free validation {metric} {after[metric]:.3f}, before {before[metric]:.3f}"}


# Reports

def close_round(run, k, policy, evolved, taught, trained, retired):
    """The pair after the round on validation tasks, and the round as a line. Retired entries leave the state's file."""
    state = run.state(k)
    if retired and state == retired["before"]:  # nobody has edited it since
        state = retired["state"]
        run.write_state(f"{k:03d}", state)
    evaluations = [run.evaluation(k, "valid", policy, text) for text in dict.fromkeys(("", state))]
    gate = [f"{metric}_{when}" for metric in METRICS for when in ("before", "after")]
    line = {"step": k, **{name: evolved.get(name) for name in ("state_accepted", *gate, "edited_by_hand")},
            "state_reason": evolved.get("reason"),
            **{name: evolved.get(name, []) for name in ("edits", "rejected_edits", "dropped_edits")},
            "entries": len(entries(state)), "retired": [line for line in retired.get("retired", []) if line not in entries(state)],
            **{name: (taught | trained).get(name) for name in ("labels", "selected", "trajectories", "tokens", "success_in_training")},
            "policy_accepted": trained.get("policy_accepted"), "policy_reason": trained.get("reason"),
            "optimizer_steps": trained.get("optimizer_steps", 0), "policy": policy,
            "success_free": evaluations[0]["success"], "success_state": evaluations[1]["success"] if state else None}
    return {"line": line, "evaluations": evaluations}


DESCRIPTION = "The Experience Funnel (arXiv 2609.08919). On keydoor, and without --env-options, the game has colours=4."


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if "--study" in argv:
        from study import distillation
        return distillation([word for word in argv if word != "--study"])
    from funnel.options import FunnelOptions, with_defaults
    from rl.options import parse

    return rounds(with_defaults(parse(FunnelOptions, argv, DESCRIPTION, common=FunnelOptions)))
