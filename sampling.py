"""The policy's next action for each of a batch of prompts: plain Hugging Face `generate`, with the cache kept.

    act = sampler(model, chat, temperature=1.0, max_new_tokens=32)
    act([prompt_ids, ...]) -> [action_ids, ...];  act([]) when no episode goes on: the cache is let go

An episode's next prompt mostly extends its last prompt and action, so only what is new has to be encoded; and the
episodes of a group begin with one prompt, which is encoded once. Three things make that exact:

1. A kept cache is a batch of columns with holes: pads of earlier turns, and tokens after an end. The attention mask
   covers them, and `generate` counts positions along the mask, so a token's position is its place in its own episode.
   Where the columns are a quarter more than the longest episode, they are packed anew (`pack`).
2. Rows are chosen by their ids: a prompt takes the cache of a row that it begins with, token by token, or none.
3. That works where every layer attends to all earlier tokens. A recurrent or sliding-window layer would see the holes,
   so for such a model every prompt is encoded anew (`keeps_cache`).

The last sampled token of an action is never fed to the model by `generate`: it comes with the next prompt.

`generate` is asked for the likeliest token, of scores in which a processor of ours has drawn one (`Draw`): exact samples,
in a tenth of the time of its own `torch.multinomial` at a vocabulary of 151,936 on a CPU, and with their log-probs.
"""
import torch


class Action(list):
    """Sampled ids; `logps`: a log-prob for each, in nats, as the sampler saw it, or None where it was greedy."""
    logps = None


def draw(p_NV, block=1024):
    """[N, V] probabilities (or any multiples of them) -> [N] indices, drawn by the inverse of the cumulative sum: first a
    block of the vocabulary, then a token in it. Raises FloatingPointError where a row does not add up to a finite number."""
    p_NKB = torch.nn.functional.pad(p_NV, (0, -p_NV.shape[1] % block)).unflatten(1, (-1, block))

    def one_of(p_NM):
        cdf_NM = p_NM.cumsum(1, dtype=torch.float64)
        if not cdf_NM[:, -1].isfinite().all():
            raise FloatingPointError("the policy's probabilities are not finite")
        u_N1 = torch.rand(len(p_NM), 1, dtype=torch.float64, device=p_NM.device)  # at most 1 - 2**-53: u * total stays below it
        return torch.searchsorted(cdf_NM, u_N1 * cdf_NM[:, -1:], right=True)[:, 0]  # never one of probability 0

    block_N = one_of(p_NKB.sum(2))
    return block * block_N + one_of(p_NKB[torch.arange(len(p_NV), device=p_NV.device), block_N])


def keeps_cache(model) -> bool:
    """Does every layer of the model attend to all earlier tokens?"""
    kinds = getattr(model.config, "layer_types", None)
    full = all(kind == "full_attention" for kind in kinds) if kinds else not getattr(model.config, "sliding_window", None)
    return full and not getattr(model, "_is_stateful", False)  # stateful: with recurrent layers


class Kept:
    """The cache of N rows: `ids` of each row, and `real_NP`, 1 where a column of the cache holds a token of the row."""

    def __init__(self, cache, ids, real_NP):
        self.cache, self.real_NP = cache, real_NP
        self.row_of = {tuple(row): n for n, row in enumerate(ids)}
        self.lengths = sorted({len(row) for row in ids}, reverse=True)

    def find(self, prompt):
        """The row whose ids the prompt extends by at least one token, or None."""
        for length in self.lengths:
            if length < len(prompt) and (row := self.row_of.get(tuple(prompt[:length]))) is not None:
                return row
        return None


def by_themselves(head, args):
    """The last position's states as a tensor of their own: for a slice of a prompt's, PyTorch copies the head for each row."""
    return (args[0].clone(memory_format=torch.contiguous_format),)


def pack(cache, real_NP):
    """Move the tokens of each row to the right, so that holes go; returns the mask that is left. Keys carry their positions."""
    width = int(real_NP.sum(1).max())
    if real_NP.shape[1] <= 1.25 * width:
        return real_NP
    order_NP = real_NP.argsort(dim=1, stable=True)[:, -width:]  # holes first, then tokens in their order
    for layer in cache.layers:
        index = order_NP[:, None, :, None].expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3])
        layer.keys, layer.values = layer.keys.gather(2, index), layer.values.gather(2, index)
    return real_NP.gather(1, order_NP)


def sampler(model, chat, *, temperature: float = 1.0, max_new_tokens: int = 32, keep_cache: bool = True):
    """`act(prompts) -> action ids`; temperature 0 is greedy. The whole distribution is sampled: `model` comes from
    `load_model`, which leaves no generation config that could cut it.

    The weights may change between episodes, not within one: a kept cache is of the weights that made it.
    """
    from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList

    class Draw(LogitsProcessor):
        """Makes the token that is drawn the likeliest one."""

        def __init__(self):
            self.logps = []

        def __call__(self, input_ids, scores_NV):
            p_NV = scores_NV.float().sub(scores_NV.amax(1, keepdim=True)).div_(temperature).exp_()  # times a number
            drawn_N1 = draw(p_NV)[:, None]
            self.logps.append((p_NV.gather(1, drawn_N1)[:, 0] / p_NV.sum(1)).log())
            return p_NV.scatter_(1, drawn_N1, torch.inf)

    config = GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=sorted(chat.end_ids),
                              pad_token_id=chat.pad_id, repetition_penalty=1.0, num_beams=1)
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    keep_cache, kept = keep_cache and keeps_cache(causal), None

    def tensor(rows):
        return torch.tensor(rows, device=model.device)

    def encode_once(prompts):
        """Kept of the different prompts among `prompts`, each without its last token, or None where all differ."""
        different = [list(p[:-1]) for p in dict.fromkeys(map(tuple, prompts))]
        if len(different) == len(prompts) or not all(different):
            return None
        ids_NP, real_NP = left_pad(different)
        cache = DynamicCache(config=causal.config)
        causal.base_model(input_ids=ids_NP, attention_mask=real_NP, position_ids=(real_NP.cumsum(1) - 1).clamp(min=0),
                          use_cache=True, cache=cache)
        return Kept(cache, different, real_NP)

    def left_pad(rows):
        width = max(map(len, rows))
        return (tensor([[chat.pad_id] * (width - len(row)) + list(row) for row in rows]),
                tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]))

    def generate(prompts):
        """Action ids, and Kept for the next turn."""
        nonlocal kept
        past, found = kept, [kept.find(p) for p in prompts] if kept else []
        if not any(row is not None for row in found):
            kept = None  # of no use any more, and as large as the one to come
            past = encode_once(prompts) if keep_cache else None
            found = [past.find(p) for p in prompts] if past else [None] * len(prompts)
        cache, real_NP = DynamicCache(config=causal.config), tensor([[]] * len(prompts)).long()
        starts = [0] * len(prompts)
        if past:
            cache, index = past.cache, tensor([row or 0 for row in found])
            cache.batch_select_indices(index)
            real_NP = pack(cache, past.real_NP[index] * tensor([[row is not None] for row in found]))
            starts = real_NP.sum(1).tolist()
        new_NT, new_mask_NT = left_pad([p[start:] for p, start in zip(prompts, starts)])
        mask_NT = torch.cat([real_NP, new_mask_NT], 1)
        ids_NT = torch.cat([torch.full_like(real_NP, chat.pad_id), new_NT], 1)  # of cached columns only the width counts
        width = ids_NT.shape[1]
        drawing, hook = Draw(), causal.get_output_embeddings().register_forward_pre_hook(by_themselves)
        try:
            out_NT = model.generate(input_ids=ids_NT, attention_mask=mask_NT, generation_config=config, cache=cache,
                                    logits_processor=LogitsProcessorList([drawing] if temperature else []))[:, width:]
        finally:
            hook.remove()
        sampled = out_NT.tolist()
        ends = [next((n + 1 for n, i in enumerate(row) if i in chat.end_ids), len(row)) for row in sampled]
        actions = [Action(row[:end]) for row, end in zip(sampled, ends)]
        if temperature:
            for action, logps in zip(actions, torch.stack(drawing.logps, 1).tolist()):
                action.logps = logps[:len(action)]
        if not keep_cache:
            return actions, None
        fed = out_NT.shape[1] - 1  # the last one is not in the cache
        own_NT = tensor([[int(n < end) for n in range(fed)] for end in ends]).long().reshape(len(prompts), fed)
        return actions, Kept(cache, [p + a for p, a in zip(prompts, actions)], torch.cat([mask_NT, own_NT], 1))

    @torch.no_grad()
    def act(prompts: list[list[int]]) -> list[list[int]]:
        nonlocal kept
        if not prompts:
            kept = None
            return []
        training = model.training
        model.eval()  # in training mode with activation checkpointing, generate would drop its cache
        try:
            actions, kept = generate(prompts)
        except BaseException:
            kept = None
            raise
        finally:
            model.train(training)
        return actions

    return act
