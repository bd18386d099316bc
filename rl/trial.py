"""Is a loaded model computed right? A trial on a few tokens, in place of a list of the models that are known.

    keeps = try_model(model, chat, max_context=2048)     # raises ValueError where it is not

Compared are, in nats a token: the log-probs of learner.py with the model's own logits, a padded row with the row alone, and what the
sampler says of the tokens that it drew with what the learner says of them: over three turns, with rows of different lengths, one of
which ends early, so that a kept cache gets holes and is packed; and above the sliding window, where a run's context can exceed it.
"""
import random

import torch

from rl.learner import row_logps
from rl.model import configs
from rl.rollout import Row, add_turn
from rl.sampling import sampler

TOLERANCE = {torch.float32: 0.005}  # mean difference in nats
COARSE = 0.2  # in other types, whose log-probs depend on the shape of the batch


@torch.no_grad()
def try_model(model, chat, max_context: int) -> bool:
    """May a kept cache be used? Raises ValueError where the log-probs are wrong without one, or the model cannot be run here."""
    windows = [window for config in configs(model.config) if (window := getattr(config, "sliding_window", None))]
    window = min([window for window in windows if window < max_context], default=0)
    rng, allowed = random.Random(0), [i for i in range(len(chat.tokenizer)) if i not in chat.special_ids | chat.end_ids]

    def some(length):
        return rng.choices(allowed, k=length)

    tolerance = TOLERANCE.get(model.dtype, COARSE)
    firsts, news = [some(window + 33), some(12)], [[some(5), some(3)] for _ in range(2)]
    try:
        rows = [Row(ids, [0] + [1] * (len(ids) - 1)) for ids in firsts]
        own = [own_logps(model, row.ids) for row in rows]
        gap = difference(own, [logp_T[1:] for logp_T in row_logps(model, rows, chat.pad_id)])
        if not gap < tolerance:
            raise ValueError(f"its log-probs, computed from the last hidden states and the output layer, differ from its own by "
                             f"{gap:.3g} nats a token")
        gaps = {}
        for keep in (True, False):
            with torch.random.fork_rng():
                torch.manual_seed(0)
                gaps[keep] = sampler_gap(model, chat, firsts, news, keep)
            if gaps[keep] < tolerance:
                return keep
    except (AttributeError, IndexError, KeyError, NotImplementedError, TypeError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(f"it cannot be run here ({type(error).__name__}: {str(error).strip().splitlines()[0]})") from error
    raise ValueError(f"what it samples with left padding differs from what it says of the same tokens by {gaps[False]:.3g} nats "
                     f"a token")


def own_logps(model, ids):
    """The model's own log-probs of the tokens from the second on."""
    logp_TV = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return logp_TV.gather(1, torch.tensor(ids[1:], device=model.device)[:, None])[:, 0].tolist()


def sampler_gap(model, chat, firsts, news, keep) -> float:
    """Two episodes of two turns, and a third turn of the shorter one: mean difference of the sampler's log-probs and the learner's."""
    act = sampler(model, chat, max_new_tokens=4, keep_cache=keep)
    prompts, rows = list(firsts), [[], []]
    try:
        for turn in range(3):
            playing = (0, 1) if turn < 2 else (1,)
            for n, action in zip(playing, act([prompts[n] for n in playing])):
                add_turn(rows[n], prompts[n], action)
                prompts[n] = prompts[n] + action + (news[n][turn] if turn < 2 else [])
    except (AttributeError, IndexError, RuntimeError, TypeError) as error:
        if keep and not isinstance(error, torch.OutOfMemoryError):  # a cache that cannot be packed, say: then without one
            return float("inf")
        raise
    rows = [row for part in rows for row in part]
    return difference([row.sampled_logp for row in rows], row_logps(model, rows, chat.pad_id), [row.mask for row in rows])


def difference(one, other, masks=None) -> float:
    """The mean absolute difference over all tokens, or those where the mask is 1."""
    masks = masks or [[1] * len(logp_T) for logp_T in one]
    differences = [abs(a - b) for row in zip(one, other, masks) for a, b, own in zip(*row) if own]
    return sum(differences) / len(differences)
