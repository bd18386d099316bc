"""The cache of keys and values, kept from one turn to the next. sampling.py samples the same without it.

An episode's next prompt mostly extends its last prompt and action, or begins as they do up to a hint that has gone or an observation
that was left out, so only what is new has to be encoded; and the episodes of a group begin with one prompt, which is encoded once.
Three things make that exact:

1. A kept cache is a batch of columns with holes: pads of earlier turns, and tokens that a prompt does not go on from. The attention
   mask covers them, and `generate` counts positions along the mask, so a token's position is its place in its own episode. Where the columns are a
   quarter more than the longest episode, they are packed anew (`pack`).
2. Rows are chosen by their ids: a prompt takes the tokens that it begins with, token by token, from the row that has most of them.
3. That works where every layer attends to all earlier tokens. A recurrent or sliding-window layer would see the holes,
   so for such a model every prompt is encoded anew (`keeps_cache`).

`generate` never feeds the last sampled token of an action to the model: it comes with the next prompt.
"""
from bisect import bisect

import torch
from transformers import DynamicCache


def keeps_cache(model) -> bool:
    """Does every layer of the model attend to all earlier tokens?"""
    kinds = getattr(model.config, "layer_types", None)
    full = all(kind == "full_attention" for kind in kinds) if kinds else not getattr(model.config, "sliding_window", None)
    return full and not getattr(model, "_is_stateful", False)  # stateful: with recurrent layers


def left_pad(rows, pad_id, device):
    """Rows of ids -> ids_NT, mask_NT, padded on the left."""
    width = max(map(len, rows))
    return (torch.tensor([[pad_id] * (width - len(row)) + list(row) for row in rows], device=device),
            torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device))


class Kept:
    """Of the rows that were played last: the cache, the ids of each row, and `real_NP`, 1 where a column holds a token of the row.

    rows: prompts, and with `actions` what `generate` has sampled after them: all of its `sampled` columns but the last are there.
    """

    def __init__(self, cache, rows, mask_NT, actions=None, sampled=1):
        actions = actions or [[]] * len(rows)
        own_NT = [[int(n < len(action)) for n in range(sampled - 1)] for action in actions]
        own_NT = torch.tensor(own_NT, device=mask_NT.device).long().reshape(len(rows), sampled - 1)
        self.cache, self.real_NP = cache, torch.cat([mask_NT, own_NT], 1)
        self.rows = sorted((row + action, n) for n, (row, action) in enumerate(zip(rows, actions)))

    def find(self, prompt):
        """(how many, row): so many first tokens of the prompt, all but the last at most, begin that row; no row has more of them."""
        at = bisect(self.rows, (prompt,))  # in this order, the longest common beginning is that of a neighbour
        return max((next((n for n, (a, b) in enumerate(zip(prompt[:-1], ids)) if a != b), min(len(prompt) - 1, len(ids))), row)
                   for ids, row in self.rows[max(at - 1, 0):at + 1])


def begin(causal, kept, prompts, pad_id):
    """(ids_NT, mask_NT, cache) for `generate`. Columns that are in the cache already are filled with pads in ids_NT: only their number
    matters. kept: None, or a cache that some of the prompts go on from."""
    kept = kept or encode_once(causal, prompts, pad_id)
    if kept:
        cache, (same_N, index) = kept.cache, torch.tensor([kept.find(prompt) for prompt in prompts], device=causal.device).T
        cache.batch_select_indices(index)
        real_NP = kept.real_NP[index]
        real_NP = pack(cache, real_NP * (real_NP.cumsum(1) <= same_N[:, None]))
    else:
        cache, real_NP = DynamicCache(config=causal.config), torch.zeros(len(prompts), 0, dtype=torch.long, device=causal.device)
    new_NT, new_mask_NT = left_pad([p[start:] for p, start in zip(prompts, real_NP.sum(1).tolist())], pad_id, causal.device)
    return torch.cat([torch.full_like(real_NP, pad_id), new_NT], 1), torch.cat([real_NP, new_mask_NT], 1), cache


def encode_once(causal, prompts, pad_id):
    """Kept of the different prompts among `prompts`, each without its last token, or None where all differ."""
    different = [list(p[:-1]) for p in dict.fromkeys(map(tuple, prompts))]
    if len(different) == len(prompts) or not all(different):
        return None
    ids_NP, real_NP = left_pad(different, pad_id, causal.device)
    cache = DynamicCache(config=causal.config)
    causal.base_model(input_ids=ids_NP, attention_mask=real_NP, position_ids=(real_NP.cumsum(1) - 1).clamp(min=0),
                      use_cache=True, cache=cache)
    return Kept(cache, different, real_NP)


def pack(cache, real_NP):
    """Move the tokens of each row to the right, so that holes go; returns the mask that is left. Keys carry their positions."""
    width = int(real_NP.sum(1).max())
    if real_NP.shape[1] <= 1.25 * width:
        return real_NP
    order_NP = real_NP.argsort(dim=1, stable=True)[:, -width:]  # holes first, then tokens in their order
    for layer in cache.layers:
        layer.keys, layer.values = (x.gather(2, order_NP[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
                                    for x in (layer.keys, layer.values))
    return real_NP.gather(1, order_NP)
