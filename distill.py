"""Experience Funnel: experience goes into a text, the state, and from the text into the weights. arXiv 2609.08919.

    python distill.py --study --quick   # arms of the loop against each other (study.py)
    python distill.py                   # the whole loop on the built-in game and model, no network, minutes on a laptop
    from distill import transitions, selection_weights, state_response_weights, distill_loss    # needs torch alone

    (S_k, pi_k)  ->  S_k+1  ->  pi_k+1  ->  S_k+2  ->  ...      S a task-specific text, pi the policy's weights

Phase I, state: episodes of the pair are frozen; an editor proposes edits of S_k for what recurs in them (state.py); the
candidate is accepted only if success on validation tasks rises, under the current policy.
Phase II, policy: each training instance is played without a state, with S_k and with S_k+1.

    r0 = R(pi_k, x), r- = R(pi_k, x, S_k), r+ = R(pi_k, x, S_k+1)                                          (Eq. 2)
    b- = 1[r- > r0], b+ = 1[r+ > r0]: "01" newly useful, "11" persistently, "10" regressive, "00" inactive (Eq. 3)
    a  = 1 for 01, alpha for 11, else 0                                                                    (Eq. 4)
    p+ = pi_k(.| x, S_k+1, y<t), p0 = pi_k(.| x, y<t): the same tokens, with and without the state          (Eq. 5)
    d  = JSD(p+ || p0), w = d / (mean of d over the trajectory + eps)                                     (Eqs. 6, 7)
    L_distill = sum a w KL(pi_theta(.| x, y<t) || p+) / sum a w                                            (Eq. 8)
    L  = L_RL(state-free) + lambda L_distill                                                               (Eq. 9)

In the code `loop` (rounds.py) plays, loads and logs; k is the round, `number` the last round whose policy was committed, so
pi_k is the adapter of policies/<number>/.

pi_theta starts at pi_k, sees no state, and is committed only if its state-free success on validation tasks does not fall.
Test tasks are played once, for the report at the end.

What the paper leaves open, and what is ours (docs/distill.md has the whole list):
1. While S_k is empty, playing with it is playing without: r- is r0, and no label of Eq. 3 is 11 or 10.
2. The teacher is Eq. 5's, the frozen policy itself with S_k+1. `--teacher` takes another; w is the policy's own always.
3. y are the episodes played with S_k+1; with `--on-policy`, fresh state-free ones, drawn once a round from pi_k.
4. R is the mean return of `--outcomes-per-condition` episodes.
5. Rejected edits leave S_k and pi_k as they are; a rejected policy leaves S_k+1 with pi_k.
6. The optimizer starts anew in each round. Nothing is trained in a round whose state was rejected.
7. Residual state: entries that the final policy does without on validation tasks, at no loss, are retired.
"""
import math
import random
import sys

import torch

from envs import BadInput


# The equations

def transitions(r0_N, r_prev_N, r_new_N) -> list[str]:
    """Eq. 3 for N instances: [N] outcomes without a state, with S_k and with S_k+1 -> [N] labels "b- b+".

    "01" newly useful, "11" persistently useful, "10" regressive, "00" inactive. A NaN (no episode that did not break)
    is above nothing, and nothing is above it.
    """
    r0_N, r_prev_N, r_new_N = (torch.as_tensor(r_N, dtype=torch.float64) for r_N in (r0_N, r_prev_N, r_new_N))
    b_minus_N, b_plus_N = r_prev_N > r0_N, r_new_N > r0_N  # Eq. 3
    return [f"{int(b_minus)}{int(b_plus)}" for b_minus, b_plus in zip(b_minus_N, b_plus_N)]


def selection_weights(labels_N, alpha=1.0):
    """Eq. 4: labels -> [N] weights a of the instances: 1 for "01", alpha for "11", else 0."""
    return torch.tensor([{"01": 1.0, "11": float(alpha), "10": 0.0, "00": 0.0}[label] for label in labels_N])  # Eq. 4


def state_response(logits_state_TV, logits_free_TV):
    """Eq. 6: [T, V] logits of the frozen policy with and without the state, after the same tokens -> [T] divergences d,
    JSD(p+ || p0) in nats, from 0 to log 2."""
    log_p_TV, log_q_TV = log_softmax(logits_state_TV), log_softmax(logits_free_TV)
    log_m_TV = torch.logaddexp(log_p_TV, log_q_TV) - math.log(2)
    d_TV = (log_p_TV.exp() * (log_p_TV - log_m_TV) + log_q_TV.exp() * (log_q_TV - log_m_TV)) / 2  # Eq. 6
    return d_TV.sum(-1).clamp(min=0)


def over_mean(d_T, eps=1e-6):
    """Eq. 7: [T] divergences of one trajectory, all its sampled tokens -> [T] weights of mean 1 (or below, where d is
    of eps's size)."""
    return d_T / (d_T.mean() + eps)  # Eq. 7


def state_response_weights(logits_state_TV, logits_free_TV, eps=1e-6):
    """Eqs. 6 and 7: token weights w of one trajectory, [T, V] logits of both branches -> [T]."""
    return over_mean(state_response(logits_state_TV, logits_free_TV), eps)


def distill_loss(student_logits_BTV, teacher_logits_BTV, weights_BT, mask_BT):
    """Eq. 8's numerator and denominator: (sum of a w KL(student || teacher), sum of a w) over this micro-batch.

    The loss is the sum of all numerators over the sum of all denominators. student_logits_BTV: of the policy that is
    trained, which sees no state; teacher_logits_BTV: of the frozen, state-conditioned one, after the same tokens; log-probs
    of coarser buckets do as well (see teacher.py). weights_BT: a_i w_it; mask_BT: 1 where a token was sampled. KL in nats.
    What stands where the mask is 0 changes nothing, NaN included.
    """
    mask_BT = mask_BT.bool()
    log_p_BTV = log_softmax(torch.where(mask_BT[..., None], student_logits_BTV, 0.0))  # before: NaN * 0 is NaN
    log_q_BTV = log_softmax(torch.where(mask_BT[..., None], teacher_logits_BTV.detach(), 0.0))
    kl_BT = (log_p_BTV.exp() * (log_p_BTV - log_q_BTV)).sum(-1)  # the reverse KL of Eq. 8
    weights_BT = torch.where(mask_BT, weights_BT, 0.0)
    return (weights_BT * kl_BT).sum(), weights_BT.sum()  # Eq. 8


def select(labels_N, arm, alpha, rng):
    """[N] weights a of an arm. "both" is Eq. 4; "new" or "persistent" is one half of it, "all" no selection; "random" is
    ours: Eq. 4's weights dealt to instances at random, so as many as "both" selects."""
    a_N = selection_weights(labels_N, alpha)
    if arm == "random":
        return a_N[rng.sample(range(len(a_N)), len(a_N))]
    if arm == "all":
        return torch.ones_like(a_N)
    return a_N * torch.tensor([arm == "both" or label == {"new": "01", "persistent": "11"}[arm] for label in labels_N])


def log_softmax(logits):
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


# Phase I

def evolve_state(loop, k, number, state):
    """Reflect on a frozen batch of the pair's episodes, edit, gate. Writes states/k, returns what is logged."""
    from state import apply_edits, edit_budget

    config = loop.config
    tasks = loop.draw(f"reflection {k}", config.reflection_batch)
    batch = loop.play(k, number, "reflection", tasks, state)
    written = [*loop.results("start"), *loop.results("state")]
    rejected = [edit for row in written[1:] for edit in row["rejected_edits"]]
    edits, dropped = loop.edit(number, [t for t in batch if t.end != "env_error"], state,
                               edit_budget(k, config.rounds, config.edits_first, config.edits_last), rejected)
    candidate, applied, refused = apply_edits(state, edits, config.state_limit)
    before = loop.success("valid", number, state)["success"]
    after, reason = None, "no edit was left"
    if applied:
        try:
            after = loop.success("valid", number, candidate)["success"]
            reason = "" if after > before else f"validation success is {after:.3f}, with the state so far {before:.3f}"
        except BadInput as error:  # it was playable without these edits: a prompt that does not fit any more
            reason = str(error)
    accepted = not reason  # strictly better, or the pair stays
    loop.write_state(k, candidate if accepted else state)
    return {"state_accepted": accepted, "reason": reason, "success_before": before, "success_after": after,
            "edits": applied if accepted else [], "rejected_edits": [] if accepted else applied,
            "dropped_edits": dropped + refused, "edited_by_hand": state != written[-1]["state"],
            "state": candidate if accepted else state}


# Phase II

def choose_and_teach(loop, k, number, previous, state):
    """Three conditions, labels, weights, the teacher's log-probs onto the disk. Returns what is logged."""
    from evaluate import fixed_tasks
    from runs import log_tokens, record
    from teacher import consult, mark, save, weigh

    config, n = loop.config, loop.config.outcomes_per_condition
    tasks = loop.draw(f"instances {k}", config.instances)
    free = loop.play(k, number, "free", tasks, "", n)  # Eq. 2
    before = loop.play(k, number, "previous", tasks, previous, n) if previous else free
    new = loop.play(k, number, "updated", tasks, state, n)

    def outcomes(episodes):  # R of each instance; fsum, so that equal outcomes are equal in any order
        known = [[float(t.success) if config.label == "success" else t.reward for t in episodes[i:i + n]
                  if t.end != "env_error"] for i in range(0, len(episodes), n)]
        return [math.fsum(values) / len(values) if values else math.nan for values in known]

    r0_N = outcomes(free)
    baseline_N = [0.5] * len(tasks) if config.label == "success" else r0_N  # "success": b = 1[most episodes succeed]
    labels_N = transitions(baseline_N, outcomes(before), outcomes(new))
    a_N = select(labels_N, config.select, config.alpha, random.Random(f"random arm {config.seed} {k}"))
    chosen = [i for i in range(len(tasks)) if a_N[i] > 0]
    episodes = [t for i in chosen for t in new[i * n:(i + 1) * n]]
    if config.on_policy and chosen:
        episodes = loop.play(k, number, "student", [tasks[i] for i in chosen], "", n)
    owners = [i for i in chosen for _ in range(n)]
    weights = [0.0 if t.end == "env_error" else a_N[i].item() for t, i in zip(episodes, owners)]
    how = {"temperature": config.temperature, "micro_batch_tokens": config.micro_batch_tokens}
    items = weigh(loop.policy(number), episodes, weights, loop.chat, state, place=config.state_place, history=config.history,
                  token_weights=config.token_weights, **how)
    if items:
        mark(loop.policy(number), items, loop.chat, config.top_k, **how)
        how |= {"sees_state": config.teacher_state, "top_k": config.top_k, "width": loop.vocabulary}
        if config.teacher == "self":
            consult(loop.policy(number), items, loop.chat.pad_id, **how)
        else:
            loop.instead(config.teacher, lambda teacher, _: consult(teacher, items, loop.chat.pad_id, **how))
    save(items, loop.stored(k))
    if config.log_tokens:
        pairs = list(zip((t for t, a in zip(episodes, weights) if a > 0 and t.turns), items))  # items are of these, in order
        for t, item in fixed_tasks(pairs, config.log_tokens):
            what = {"phase": loop.now, "episodes": "student" if config.on_policy else "updated", **record(k, t)}
            log_tokens(loop.folder / "tokens.jsonl", loop.chat, what, item["rows"], weight=item["weights"])
    return {"labels": {label: labels_N.count(label) for label in ("00", "01", "10", "11")}, "selected": len(chosen),
            "success_in_training": [sum(t.success for t in part) / len(part) for part in (free, before, new)],
            "trajectories": len(items), "tokens": sum(len(item["weights"]) for item in items)}


def train_policy(loop, k, number, taught):
    """Optimizer steps on Eq. 9 from pi_k on, and the state-free gate. Returns what is logged.

    taught: what `choose_and_teach` found, or nothing where the RL term stands alone.
    """
    from grpo import group_advantages
    from learner import update
    from model import make_optimizer
    from teacher import distill
    from tqdm import tqdm
    from train import diverged, group_requests

    config = loop.config
    if taught and not taught["trajectories"]:
        return {"policy_accepted": False, "reason": "no trajectory was selected", "optimizer_steps": 0}
    items = torch.load(loop.stored(k)) if taught else []
    before = loop.success("valid", number, "")["success"]
    model = loop.policy(number)
    loop.number = k  # its weights are another policy's from here on
    optimizer = make_optimizer(model, config.lr, config.optimizer)
    loss, clip, sequence_ratio, collect = rl_term(config)
    deck, rng = [], random.Random(f"distill {config.seed} {k}")
    budget, steps, skipped = config.micro_batch_tokens, 0, 0

    def distilled(_):  # lambda L_distill for one optimizer step; every item once before any comes again
        nonlocal budget
        size = min(config.distill_batch, len(items))
        while len(deck) < size:
            deck.extend(rng.sample(items, len(items)))
        hand = [deck.pop(0) for _ in range(size)]
        value, budget = distill(model, hand, loop.chat.pad_id, weight=config.distill_weight, temperature=config.temperature,
                                micro_batch_tokens=budget)
        return value

    for step in tqdm(range((k - 1) * config.steps + 1, k * config.steps + 1), desc=f"round {k}", disable=None, leave=False):
        requests_of, played = group_requests(config, step, loop.tasks["train"]), []

        def sample(num_groups):
            new = loop.episodes(requests_of(num_groups), "")
            played.extend(new)
            return [new[n:n + config.group] for n in range(0, len(new), config.group)]

        loop.seed(step)
        try:
            batch = [t for group in (collect(sample, config.tasks_per_step) if config.rl_weight else []) for t in group]
            rewards_N = torch.tensor([t.reward for t in batch], dtype=torch.float64)
            advantages_N = group_advantages(rewards_N, torch.tensor([t.group for t in batch]))
            stats = update(model, optimizer, batch, advantages_N, loss, pad_id=loop.chat.pad_id, clip=clip, seed=step,
                           temperature=config.temperature, minibatches=config.minibatches,
                           micro_batch_tokens=budget, sequence_ratio=sequence_ratio,
                           max_grad_norm=config.max_grad_norm, gradient_checkpointing=config.gradient_checkpointing,
                           importance_cap=config.importance_cap, more=distilled if items else None)  # Eq. 9
        except FloatingPointError as error:
            raise diverged(step, error) from error
        budget, steps = min(budget, stats["micro_batch_tokens"]), steps + stats["optimizer_steps"]
        skipped = skipped + 1 if stats["skipped_steps"] == config.minibatches else 0
        if skipped == 5:
            raise diverged(step, "the gradient was not finite in five steps in a row")
        loop.log(k, played, episodes="rl", optimizer_step=step, **stats)
    after = loop.success("valid", k, "")["success"]
    accepted = after > before if config.policy_gate == "rise" else after >= before
    if accepted:
        loop.save_policy(k)
    return {"policy_accepted": accepted, "optimizer_steps": steps,
            "reason": f"state-free validation success {after:.3f}, before {before:.3f}"}


def rl_term(config):
    """(rl_weight times the state-free loss, its clip, whether its ratio is a sequence's, how a batch is filled)."""
    from dapo import dapo_loss, fill_batch
    from grpo import grpo_loss
    from gspo import gspo_loss
    from train import everything

    def loss(batch):
        terms = batch.logp_BT, batch.old_logp_BT, batch.advantages_B, batch.mask_BT
        if config.rl_loss == "dapo":
            return config.rl_weight * dapo_loss(*terms, num_tokens=batch.num_tokens)
        chosen = gspo_loss if config.rl_loss == "gspo" else grpo_loss
        return config.rl_weight * chosen(*terms, num_trajectories=batch.num_trajectories, lengths_B=batch.lengths_B)

    if config.rl_loss == "dapo":
        return loss, (0.2, 0.28), False, lambda sample, num_groups: fill_batch(sample, num_groups, 3)
    return (loss, (3e-4, 4e-4), True, everything) if config.rl_loss == "gspo" else (loss, (0.2, 0.2), False, everything)


# The file as a program

ARMS = {"mode": ("full", "state-only", "policy-only"), "select": ("both", "new", "persistent", "all", "random"),
        "token_weights": ("jsd", "uniform"), "label": ("gain", "success"), "rl_loss": ("grpo", "dapo", "gspo"),
        "state_place": ("prompt", "observation"), "policy_gate": ("keep", "rise"), "editor": ("count", "model"),
        "teacher_bits": (0, 4, 16, 32),
        "enrich": ("none",), "tensorboard": (False,), "enrich_positive_only": (False,), "enrich_train_context": ("as-sampled",),
        "eval_every": (10,), "save_every": (10,)}  # the last six: of train.py alone


def check(config):
    """Refuse what cannot work, before anything is loaded or written."""
    for name, allowed in ARMS.items():
        if getattr(config, name) not in allowed:
            raise BadInput(f"--{name.replace('_', '-')} must be {', '.join(map(str, allowed))} in distill.py, got "
                           f"{getattr(config, name)}")
    for name in ("rounds", "outcomes_per_condition", "reflection_batch", "instances", "distill_batch", "state_limit",
                 "editor_tokens", "editor_characters", "edits_first", "edits_last"):
        if getattr(config, name) < 1:
            raise BadInput(f"--{name.replace('_', '-')} must be at least 1, got {getattr(config, name)}")
    for name in ("alpha", "distill_weight", "rl_weight", "top_k"):
        if not 0 <= getattr(config, name) < math.inf:
            raise BadInput(f"--{name.replace('_', '-')} must be 0 or above, got {getattr(config, name)}")
    if config.temperature == 0:
        raise BadInput("training needs --temperature above 0: greedy episodes of a group are all alike")
    if not config.rl_weight and (config.mode == "policy-only" or config.teacher == "none"):
        raise BadInput("nothing would be trained: --rl-weight 0 leaves the distillation alone, and there is none")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if "--study" in argv:
        from study import distillation
        return distillation([word for word in argv if word != "--study"])
    from dataclasses import dataclass

    from rounds import run
    from train import Config, option, parse

    @dataclass
    class DistillConfig(Config):
        # The loop
        mode: str = option("full", "full; state-only: never train; policy-only: no state, the RL term alone")
        rounds: int = option(4, "rounds of state and policy")
        steps: int = option(20, "batches per round of training (optimizer steps, times --minibatches)")
        # Phase I
        state: str = option("", "a file to start the state from (default: empty)")
        state_place: str = option("", "prompt: after the system prompt; observation, ours: an entry is quoted under the "
                                      "observation that it is about (default: prompt, with tiny: observation)")
        state_limit: int = option(4000, "characters of a state at most; an edit that goes over it is refused")
        reflection_batch: int = option(64, "training tasks played for reflection in a round")
        editor: str = option("count", "count: counts commands of the built-in game; model: a language model")
        editor_model: str = option("", "the model of --editor model (default: the policy's base model)")
        editor_tokens: int = option(512, "tokens of an answer of the editor at most")
        editor_characters: int = option(1500, "characters of an episode that the editor is shown")
        edits_first: int = option(4, "edits in the first round at most")
        edits_last: int = option(2, "edits in the last round at most (half a cosine between)")
        # Phase II
        instances: int = option(128, "training tasks played without a state, with S_k and with S_k+1 in a round")
        outcomes_per_condition: int = option(1, "episodes per task and condition, whose mean return is R")
        label: str = option("gain", "gain: b = 1[R > R without a state] (Eq. 3); success: b = 1[most episodes succeed]")
        select: str = option("both", "both (01 and 11), new (01), persistent (11), all; ours: random, as many as both")
        alpha: float = option(1.0, "weight of persistently useful instances (Eq. 4)")
        token_weights: str = option("jsd", "jsd (Eqs. 6 and 7) or uniform")
        on_policy: bool = option(False, "distill on fresh state-free episodes instead of those played with S_k+1")
        teacher: str = option("self", "self (Eq. 5), none (the RL term alone), or a model on the hub or a folder")
        teacher_state: bool = option(True, "the teacher sees S_k+1 (--no_teacher_state: it does not)")
        teacher_bits: int = option(0, "weights of another teacher or editor: 4, 16, 32 (0: as --bits)")
        top_k: int = option(0, "store K tokens, the policy's and teacher's likeliest, and one bucket of others (0: all)")
        distill_weight: float = option(1.0, "lambda of Eq. 9")
        distill_batch: int = option(32, "trajectories distilled per optimizer step")
        rl_loss: str = option("grpo", "the RL term: grpo, dapo or gspo")
        rl_weight: float = option(1.0, "weight of the RL term (0: distillation alone)")
        policy_gate: str = option("keep", "commit if state-free validation success does not fall (keep), or rises (rise)")
        tasks_per_step: int = option(8, "groups per step, one task each")

    config = parse(DistillConfig, argv, description="The Experience Funnel (arXiv 2609.08919).")
    if config.env == "keydoor" and not config.env_options:
        config.env_options = ["colours=4"]  # a rule worth writing down: plain RL learns it badly
    config.state_place = config.state_place or ("observation" if config.model == "tiny" else "prompt")
    check(config)
    config.out = config.out or f"runs/{config.env}__distill__{config.mode}__{config.seed}"
    run(config)


if __name__ == "__main__":
    from train import cli
    cli(main)
