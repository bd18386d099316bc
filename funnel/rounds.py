"""The rounds of the Experience Funnel (arXiv 2609.08919): how the equations of distill.py are used. The pair is a state and a policy.

    for k = 1, 2, ...
        Phase I     S_k: reflect on episodes of the pair, edit, accept if validation success rises          `evolve_state`
        Phase II    play each instance without a state, with S_k-1 and with S_k; select; ask the teacher    `choose_and_teach`
                    pi_k: minimise L_RL + lambda L_distill, commit if validation success does not fall      `train_policy`
        report      the pair on validation tasks                                                            `close_round`

(The paper counts from S_k to S_k+1; here round k writes S_k and pi_k, from S_k-1 and the last committed policy, `policy`.)
"""
import math
import random
import shutil
import sys

from tqdm import tqdm

import dapo
import grpo
import gspo
from distill import select, transitions
from envs import DoesNotFit
from funnel.editors import check_editor, propose_edits
from funnel.results import draw_rounds, round_table
from funnel.run import Run, finished_phases
from funnel.state import apply_edits, edit_budget, entries, read_state, without_entries
from funnel.teacher import add_likely_tokens, check_tokenizer, consult, distillation_gradient, load_items, save_items, weigh
from rl.evaluation import fixed_tasks, success_table
from rl.logs import read, record
from rl.learner import make_optimizer
from rl.runs import run_folder, write_config
from rl.tokens import log_tokens
from rl.train import Algorithm, Step
from rl.warmstart import warm_up


def rounds(config):
    """All rounds; returns the run's folder. config: funnel.options.FunnelOptions."""
    with run_folder(config, "distill", finished_phases) as (folder, _):
        write_config(folder, config, "distill")
        run, policy = Run.open(config, folder), 0
        run.once(0, "start", lambda: start(run))
        for k in range(1, config.rounds + 1):
            evolved, taught, trained, previous = {}, {}, {}, run.state(k - 1)
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
                trained = run.once(k, "policy", lambda: train_policy(run, k, policy, taught))
                run.stored(k).unlink(missing_ok=True)
            # The next pair
            policy = k if trained.get("policy_accepted") else policy
            line = run.once(k, "round", lambda: close_round(run, k, policy, state, evolved, taught, trained))["line"]
            print(round_table([line]) if k == 1 else round_table([line]).splitlines()[1], flush=True)
        report = run.once(k, "report", lambda: final_report(run, k, policy, run.state(k)))
        draw_rounds(folder, folder / "curve.png")
    for env in run.envs:
        env.close()
    names = [("before" if row["policy"] == "base" else "after") + (
        ", with the residual state" if row.get("residual") else ", with the state" if row["state"] else "")
        for row in report["evaluations"]]
    title = " ".join([config.env, *config.env_options])
    print(f"\n{round_table(read(folder / 'rounds.jsonl'))}\n"
          "tasks with a state against without: 01 newly better, 11 still better, 10 no longer, 00 not; before, after: the first and "
          f"last policy, with the last state\n\n{success_table(title, zip(names, report['evaluations']))}")
    print(f"{folder}/ holds states/, policies/, adapter/, rounds.jsonl, evaluations.jsonl, rollouts.jsonl, curve.png")
    return folder


def start(run):
    """Policy 0 and state 0."""
    config, model = run.config, run.load()
    if config.teacher not in ("self", "none"):
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
    written = [*run.results("start"), *run.results("state")]
    rejected = [{"edits": row["rejected_edits"], "before": row["success_before"], "after": row["success_after"]}
                for row in written[1:] if row["rejected_edits"]]
    edits, dropped = propose_edits(run, policy, [t for t in batch if t.end != "env_error"], state,
                                   edit_budget(k, config.rounds, config.edits_first, config.edits_last), rejected)
    candidate, applied, refused = apply_edits(state, edits, config.state_limit)
    # The gate: validation success strictly rises, or the pair stays
    before = run.success("valid", policy, state)["success"]
    after, reason = None, "no edit was left"
    if applied:
        try:
            after = run.success("valid", policy, candidate)["success"]
            reason = "" if after > before else f"validation success is {after:.3f}, with the state so far {before:.3f}"
        except DoesNotFit as error:  # it was playable without these edits
            reason = str(error)
    accepted = not reason
    run.write_state(f"{k:03d}", candidate if accepted else state)
    return {"state_accepted": accepted, "reason": reason, "success_before": before, "success_after": after,
            "edits": applied if accepted else [], "rejected_edits": [] if accepted else applied,
            "dropped_edits": dropped + refused, "edited_by_hand": state != written[-1]["state"],
            "state": candidate if accepted else state}


# Phase II

def choose_and_teach(run, k, policy, previous, state):
    """Three conditions, labels, weights, the teacher's log-probs onto the disk. Returns what is logged."""
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
    baseline_N = [0.5] * len(tasks) if config.label == "success" else r0_N  # "success": b = 1[most episodes succeed]
    labels_N = transitions(baseline_N, outcomes(before), outcomes(new))
    a_N = select(labels_N, config.select, config.alpha, random.Random(f"random arm {config.seed} {k}"))
    chosen = [i for i in range(len(tasks)) if a_N[i] > 0]
    episodes = [t for i in chosen for t in new[i * times:(i + 1) * times]]
    if config.on_policy and chosen:
        episodes = run.play(k, policy, "student", [tasks[i] for i in chosen], "", times)
    weights = [a_N[i].item() for i in chosen for _ in range(times)]
    weighed = [(t, a) for t, a in zip(episodes, weights) if t.turns and t.end != "env_error"]
    if config.teacher != "self":  # ids without a token, of a padded vocabulary, can be sampled, and another teacher may lack them
        known = len(run.chat.tokenizer)
        weighed = [(t, a) for t, a in weighed if all(i < known for turn in t.turns for i in turn.action_ids)]
    # Token weights (Eqs. 6 and 7), and what the teacher thinks of the same tokens (Eq. 5)
    how = {"temperature": config.temperature, "micro_batch_tokens": config.micro_batch_tokens}
    items = weigh(run.load(policy), weighed, run.chat, state, place=config.state_place, history=config.history,
                  token_weights=config.token_weights, **how)
    if items:
        model = run.load(policy)
        add_likely_tokens(model, items, run.chat, config.top_k, **how)
        how |= {"sees_state": config.teacher_state, "top_k": config.top_k, "width": len(model.get_output_embeddings().weight)}
        if config.teacher == "self":
            consult(model, items, run.chat.pad_id, **how)
        else:
            del model  # it leaves the memory
            run.with_another(config.teacher, lambda teacher, _: consult(teacher, items, run.chat.pad_id, **how))
    save_items(items, run.stored(k))
    for (t, _), item in fixed_tasks(list(zip(weighed, items)), config.log_tokens) if config.log_tokens else []:
        what = {"phase": run.phase, "episodes": "student" if config.on_policy else "updated", **record(k, t)}
        log_tokens(run.folder / "tokens.jsonl", run.chat, what, item.rows, weight=item.weights)
    return {"labels": {label: labels_N.count(label) for label in ("00", "01", "10", "11")}, "selected": len(chosen),
            "success_in_training": [sum(t.success for t in part) / len(part) for part in (free, before, new)],
            "trajectories": len(items), "tokens": sum(len(item.weights) for item in items)}


def rl_term(name, weight) -> Algorithm:
    """The state-free RL loss of Eq. 9, times its weight, with its paper's clip ranges. The run's --minibatches holds for all three (so
    GSPO's own default of 4 does not), and DAPO samples a batch three times at most."""
    term = RL_TERMS[name]()
    return Algorithm(**term | {"loss": lambda batch: weight * term["loss"](batch)})


RL_TERMS = {"grpo": lambda: grpo.algorithm(grpo.Options()),
            "dapo": lambda: dapo.algorithm(dapo.Options(max_rounds=3), grpo.group_advantages),
            "gspo": lambda: gspo.algorithm(gspo.Options(), grpo.group_advantages)}


def train_policy(run, k, policy, taught):
    """Optimizer steps on Eq. 9 from the last policy on, and the state-free gate. Returns what is logged.

    taught: what `choose_and_teach` found, or nothing where the RL term stands alone.
    """
    config = run.config
    if taught and not taught["trajectories"]:
        return {"policy_accepted": False, "reason": "no trajectory was selected", "optimizer_steps": 0}
    items = load_items(run.stored(k)) if taught else []
    before = run.success("valid", policy, "")["success"]
    deck, rng, optimizer_steps = [], random.Random(f"distill {config.seed} {k}"), 0

    def distilled(_, budget):  # lambda L_distill for one optimizer step; every item once before any comes again
        size = min(config.distill_batch, len(items))
        while len(deck) < size:
            deck.extend(rng.sample(items, len(items)))
        hand = [deck.pop(0) for _ in range(size)]
        return distillation_gradient(model, hand, run.chat.pad_id, weight=config.distill_weight, temperature=config.temperature,
                                     micro_batch_tokens=budget)

    with run.training(k, start=policy) as model:
        optimizer = make_optimizer(model, config.lr, config.optimizer)
        trainer = Step(config, rl_term(config.rl_loss, config.rl_weight), model, optimizer, run.chat)
        for step in tqdm(range((k - 1) * config.steps + 1, k * config.steps + 1), desc=f"round {k}", disable=None, leave=False):
            # Play without a state, for the RL term
            groups, played = [], []
            if config.rl_weight:
                groups, played = trainer.play(step, run.tasks["train"], lambda requests: run.episodes(requests, ""),
                                         stream=f"{run.phase} ")
            batch = [trajectory for group in groups for trajectory in group]
            # Update: Eq. 9
            stats = trainer.learn(step, batch, trainer.advantages(batch), more=distilled if items else None)
            trainer.refuse_to_go_on(step)
            # Log
            optimizer_steps += stats["optimizer_steps"]
            run.log(k, played, episodes="rl", optimizer_step=step, **stats)
    # The gate: state-free validation success does not fall, or the last policy stays
    after = run.success("valid", k, "")["success"]
    accepted = after > before if config.policy_gate == "rise" else after >= before
    if accepted:
        run.save(k)
    return {"policy_accepted": accepted, "optimizer_steps": optimizer_steps,
            "reason": f"state-free validation success {after:.3f}, before {before:.3f}"}


# Reports

def close_round(run, k, policy, state, evolved, taught, trained):
    """The pair after the round on validation tasks, and the round as a line."""
    evaluations = [run.evaluation(k, "valid", policy, text) for text in dict.fromkeys(("", state))]
    line = {"step": k, **{name: evolved.get(name) for name in ("state_accepted", "success_before", "success_after",
                                                                "edited_by_hand")}, "state_reason": evolved.get("reason"),
            **{name: evolved.get(name, []) for name in ("edits", "rejected_edits", "dropped_edits")},
            "entries": len(entries(state)),
            **{name: taught.get(name) for name in ("labels", "selected", "trajectories", "tokens", "success_in_training")},
            "policy_accepted": trained.get("policy_accepted"), "policy_reason": trained.get("reason"),
            "optimizer_steps": trained.get("optimizer_steps", 0), "policy": policy,
            "success_free": evaluations[0]["success"], "success_state": evaluations[1]["success"] if state else None}
    return {"line": line, "evaluations": evaluations}


def final_report(run, k, policy, state):
    """The only place where test tasks are played. Writes the residual state and adapter/."""
    residual = residual_state(run, policy, state) if policy else state
    run.write_state("residual", residual)
    rows = [run.evaluation(k, "test", own, text, who)
            for own, who in ((0, "base"), (policy, "trained")) for text in dict.fromkeys(("", state))]
    if state:
        rows.append(run.evaluation(k, "test", policy, residual, residual=True))
    adapter, beside = run.folder / "adapter", run.folder / "adapter.new"
    shutil.rmtree(beside, ignore_errors=True)
    shutil.copytree(run.folder / "policies" / f"{policy:03d}", beside)
    shutil.rmtree(adapter, ignore_errors=True)
    beside.rename(adapter)
    return {"evaluations": rows, "entries": len(entries(state)), "residual_entries": len(entries(residual))}


def residual_state(run, policy, state) -> str:
    """The state without the entries whose removal leaves the policy's validation success where it is with all of them.
    Groups are tried first, then their halves, so that a state that is not needed costs one evaluation."""
    full = run.success("valid", policy, state)["success"]

    def retire(kept, group):
        without = without_entries(kept, group)
        if run.success("valid", policy, without)["success"] >= full:
            return without
        if len(group) < 2:
            return kept
        return retire(retire(kept, group[:len(group) // 2]), group[len(group) // 2:])

    return retire(state, entries(state)) if entries(state) else state


DESCRIPTION = "The Experience Funnel (arXiv 2609.08919). On keydoor, and without --env-options, the game has colours=4."


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if "--study" in argv:
        from study import distillation
        return distillation([word for word in argv if word != "--study"])
    from funnel.options import FunnelOptions, with_defaults
    from rl.options import parse

    return rounds(with_defaults(parse(FunnelOptions, argv, DESCRIPTION, common=FunnelOptions)))
