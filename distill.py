"""Experience Funnel: experience goes into a text, the state, and from the text into the weights. arXiv 2609.08919.

    python distill.py                   # the whole loop on the built-in game and model, no network, minutes on a laptop
    python distill.py --study --quick   # arms of the loop against each other (study.py)
    python distill.py --prompts         # what an editor is asked, of episodes of --env
    from distill import transitions, selection_weights, state_response_weights, distill_loss    # needs torch alone

    (S_k, pi_k)  ->  S_k+1  ->  pi_k+1  ->  S_k+2  ->  ...      S a task-specific text, pi the policy's weights

The pair (S_k, pi_k) is a state and a policy. Phase I, state: episodes are played with the pair; an editor proposes edits of S_k
for what recurs in them (funnel/editors.py); the candidate is accepted only if success on validation tasks rises, under pi_k
(or their mean reward: `--gate-metric reward`).
Phase II, policy: each training instance is played without a state, with S_k and with S_k+1.

    r0 = R(pi_k, x), r- = R(pi_k, x, S_k), r+ = R(pi_k, x, S_k+1)                                          (Eq. 2)
    b- = 1[r- > r0], b+ = 1[r+ > r0]: "01" newly useful, "11" persistently, "10" regressive, "00" inactive (Eq. 3)
    a  = 1 for 01, alpha for 11, else 0                                                                    (Eq. 4)
    p+ = pi_k(.| x, S_k+1, y<t), p0 = pi_k(.| x, y<t): the same tokens, with and without the state          (Eq. 5)
    d  = JSD(p+ || p0), w = d / (mean of d over the trajectory + eps)                                     (Eqs. 6, 7)
    L_distill = sum a w KL(pi_theta(.| x, y<t) || p+) / sum a w                                            (Eq. 8)
    L  = L_RL(state-free) + lambda L_distill                                                               (Eq. 9)

pi_theta starts at pi_k, sees no state, and is committed only if its state-free success on validation tasks does not fall.
Test tasks are played once, for the report at the end. These rounds are funnel/rounds.py; here are the equations.

What the paper leaves open, and what is ours (docs/distill.md has the whole list):
1. While S_k is empty, playing with it is playing without: r- is r0, and (with `--label gain`) no label of Eq. 3 is 11 or 10.
2. The teacher is Eq. 5's, the frozen policy itself with S_k+1. `--teacher` takes another; w is the policy's own always.
3. y are the episodes played with S_k+1; with `--on-policy round`, fresh state-free ones, drawn once a round from pi_k; with
   `--on-policy step`, state-free ones of pi_theta itself, drawn at each batch.
4. R is the mean return of `--outcomes-per-condition` episodes.
5. Rejected edits leave S_k and pi_k as they are; a rejected policy leaves S_k+1 with pi_k.
6. The optimizer starts anew in each round. Nothing is trained in a round whose state was rejected.
7. Entries that a committed policy does without on validation tasks, at no loss, are retired from the state (`--no-retire`: at the
   end alone, for the residual state).
8. Outcomes are compared up to rounding; an instance with an unknown outcome is "?" and never selected.
"""
import math

import torch

ROUNDING = 1e-9  # outcomes that differ by no more are equal: the same rewards, added up in another order, differ by less


def transitions(r0_N, r_prev_N, r_new_N) -> list[str]:
    """Eq. 3 for N instances: [N] outcomes without a state, with S_k and with S_k+1 -> [N] labels "b- b+".

    "01" newly useful, "11" persistently useful, "10" regressive, "00" inactive; "?" where an outcome is not known (NaN: every
    episode broke). Outcomes equal up to rounding are equal.
    """
    r0_N, r_prev_N, r_new_N = (torch.as_tensor(r_N, dtype=torch.float64) for r_N in (r0_N, r_prev_N, r_new_N))
    b_minus_N, b_plus_N = r_prev_N - r0_N > ROUNDING, r_new_N - r0_N > ROUNDING  # Eq. 3
    known_N = ~torch.stack([r0_N, r_prev_N, r_new_N]).isnan().any(0)
    return [f"{int(b_minus)}{int(b_plus)}" if known else "?" for known, b_minus, b_plus in zip(known_N, b_minus_N, b_plus_N)]


def selection_weights(labels_N, alpha=1.0):
    """Eq. 4: labels -> [N] weights a of the instances: 1 for "01", alpha for "11", else 0."""
    return torch.tensor([{"01": 1.0, "11": float(alpha), "10": 0.0, "00": 0.0, "?": 0.0}[label] for label in labels_N])  # Eq. 4


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
    of coarser buckets do as well (see funnel/teacher.py). weights_BT: a_i w_it; mask_BT: 1 where a token was sampled. KL in nats.
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
    ours: Eq. 4's weights dealt to instances at random, so as many as "both" selects. No arm selects a "?"."""
    a_N = selection_weights(labels_N, alpha)
    known = [i for i, label in enumerate(labels_N) if label != "?"]
    if arm == "random":
        a_N[known] = a_N[rng.sample(known, len(known))]
        return a_N
    if arm == "all":
        return torch.tensor([float(label != "?") for label in labels_N])
    return a_N * torch.tensor([arm == "both" or label == {"new": "01", "persistent": "11"}[arm] for label in labels_N])


def log_softmax(logits):
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


if __name__ == "__main__":
    import sys

    from rl.runs import cli
    if "--prompts" in sys.argv:
        from tools.prompts import main
    else:
        from funnel.rounds import main
    cli(main)
