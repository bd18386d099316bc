"""The policy's next action for each of a batch of prompts: plain Hugging Face `generate`, and a draw of our own.

    act = sampler(model, chat, temperature=1.0, max_new_tokens=32)
    act([prompt_ids, ...]) -> [action_ids, ...];  act([]) when all episodes have ended

We call greedy `generate`, and a logits processor of ours draws a token and makes it the likeliest one. The samples are exact, come with
their log-probs, and cost a tenth of the time of `torch.multinomial` at a vocabulary of 151,936 on a CPU.
What an earlier turn has encoded is kept for the next one where that is exact (cache.py). An adapter is added to the weights for as
long (`merge`): its many small products take more time than the base model's large ones.
"""
import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList

from rl.cache import Kept, begin, keeps_cache, left_pad
from rl.thinking import Budget


class Action(list):
    """Sampled ids; for each its log-prob and the entropy of what it was drawn from, in nats, as the sampler saw them, or None where it
    was greedy; `mask`: 0 for those that the policy did not choose (thinking.py), or None where it chose all."""
    logps = entropies = mask = None


def sampler(model, chat, *, temperature: float = 1.0, max_new_tokens: int = 32, keep_cache: bool = True, thinking_budget: int = 0):
    """`act(prompts) -> action ids`; temperature 0 is greedy. The whole distribution is sampled: `model` comes from
    `load_model`, which leaves no generation config that could cut it.

    The weights may change between episodes, not within one: what is kept is of the weights that made it, and goes with them.
    """
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=sorted(chat.end_ids),
                              pad_token_id=chat.pad_id, repetition_penalty=1.0, num_beams=1)
    budget = Budget(chat, thinking_budget, max_new_tokens) if thinking_budget else None
    keep_cache, kept, merged, weights = keep_cache and chat.keep_cache and keeps_cache(causal), None, [], None

    @torch.no_grad()
    def act(prompts: list[list[int]]) -> list[list[int]]:
        nonlocal kept, merged, weights
        now = torch.stack([p.sum() for p in model.parameters() if p.requires_grad] or [torch.zeros(())]).tolist()
        if now != weights or kept and all(2 * kept.find(prompt)[0] < len(prompt) for prompt in prompts):
            kept = None  # of other weights; or of little use, and as large as the one to come
        past, kept, weights = kept, None, now  # where this turn fails, nothing is kept
        merged = merged if past else []  # the weights that made the cache
        if not prompts:
            return []
        merged = merged or merge(model)
        logps, above_mean, force = [], [], [budget.start(len(prompts), model.device)] if budget else []

        def draw(_, scores_NV):
            """Makes the token that is drawn the likeliest one."""
            p_NV = scores_NV.float().sub(scores_NV.amax(1, keepdim=True)).div_(temperature).exp_()  # times a number for each row
            drawn_N1, norm_N1 = draw_tokens(p_NV)[:, None], p_NV.sum(1, keepdim=True)
            logps.append(p_NV.gather(1, drawn_N1).div_(norm_N1))
            # A few rows at a time, in a small buffer: on a CPU this takes half the time of bmm
            sums = [torch.linalg.vecdot(*some) for some in zip(p_NV.split(16), scores_NV.split(16))]
            above_mean.append(scores_NV.gather(1, drawn_N1) - torch.cat(sums)[:, None].div_(norm_N1))
            return p_NV.scatter_(1, drawn_N1, torch.inf)

        training = model.training
        model.eval()  # in training mode with activation checkpointing, generate would drop its cache
        # The head gets the last position's states as a tensor of their own: for a slice, PyTorch copies the head for each row
        hook = causal.get_output_embeddings().register_forward_pre_hook(
            lambda head, args: (args[0].clone(memory_format=torch.contiguous_format),))
        own = [(layer, layer.base_layer.weight) for layer, _ in merged]
        try:
            for layer, weight in merged:  # merged_adapters is PEFT's sign that there is nothing to add
                layer.base_layer.weight, layer.merged_adapters = weight, layer.active_adapters
            # What the model reads: the prompts, padded on the left, or what is new in them behind a kept cache
            if keep_cache:
                ids_NT, mask_NT, cache = begin(causal, past, prompts, chat.pad_id)
            else:
                ids_NT, mask_NT, cache = *left_pad(prompts, chat.pad_id, model.device), DynamicCache(config=causal.config)
            # Tokens until every row has ended
            out_NT = model.generate(input_ids=ids_NT, attention_mask=mask_NT, generation_config=config, cache=cache,
                                    logits_processor=LogitsProcessorList(force + ([draw] if temperature else [])))
        finally:
            for layer, weight in own:  # put back as it was, not computed back
                layer.base_layer.weight, layer.merged_adapters = weight, []
            hook.remove()
            model.train(training)
        sampled = out_NT[:, ids_NT.shape[1]:].tolist()
        # An action goes up to its first end token, that one included
        ends = [next((n + 1 for n, i in enumerate(row) if i in chat.end_ids), len(row)) for row in sampled]
        actions = [Action(row[:end]) for row, end in zip(sampled, ends)]
        if temperature:
            logps_NT = torch.cat(logps, 1).log()
            entropies_NT = torch.cat(above_mean, 1) / temperature - logps_NT  # log p is score / temperature less a constant
            for action, *of_tokens in zip(actions, logps_NT.tolist(), entropies_NT.tolist()):
                action.logps, action.entropies = (values[:len(action)] for values in of_tokens)
        if budget:
            budget.mark(actions)
        if keep_cache:
            kept = Kept(cache, prompts, mask_NT, actions, len(sampled[0]))
        return actions

    return act


@torch.no_grad()
def merge(model, most=2 ** 30):
    """[(LoRA layer, its W + s B A)]; [] where the adapter is off, or where this copy of the weights takes over `most` bytes.

    Left out are layers of 4 bits and adapters with more than s B A (biases): they go on as they are. In bf16 an entry is rounded up
    or down by chance, so that its mean is right, by the same draws each time: the nearest number is mostly W itself (docs/speed.md).
    """
    from peft.tuners.lora import Linear

    layers = [layer for layer in model.modules() if isinstance(layer, Linear) and not layer.disable_adapters and not any(
        layer.lora_bias.get(name) or name in layer.lora_variant for name in layer.active_adapters)]
    if not 0 < sum(layer.weight.nbytes for layer in layers) <= most:
        return []
    merged, shape = [], (max(layer.weight.numel() for layer in layers),)
    draws = torch.randint(2 ** 16, shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32).to(model.device)
    for layer in layers:
        names = [name for name in layer.active_adapters if name in layer.lora_A]
        weight = sum(map(layer.get_delta_weight, names), layer.weight.float())
        if layer.weight.dtype == torch.bfloat16:  # the upper half of an fp32 number
            bits = weight.view(torch.int32).flatten()
            weight = (bits + draws[:len(bits)]).bitwise_and_(-2 ** 16).view(torch.float32).view_as(weight)
        merged.append((layer, torch.nn.Parameter(weight.to(layer.weight.dtype), requires_grad=False)))
    return merged


def draw_tokens(p_NV, block=1024):
    """[N, V] probabilities (or any multiples of them) -> [N] indices, drawn by the inverse of the cumulative sum: first a
    block of the vocabulary, then a token in it. Raises FloatingPointError where a row does not add up to a finite number."""
    p_NKB = torch.nn.functional.pad(p_NV, (0, -p_NV.shape[1] % block)).unflatten(1, (-1, block))
    p_NM, drawn = p_NKB.sum(2), []
    for _ in ("block", "token"):
        cdf_NM = p_NM.cumsum(1, dtype=torch.float64)
        if not cdf_NM[:, -1].isfinite().all():
            raise FloatingPointError("the policy's probabilities are not finite")
        u_N1 = torch.rand(len(p_NM), 1, dtype=torch.float64, device=p_NM.device)  # at most 1 - 2**-53: u * total stays below it
        drawn.append(torch.searchsorted(cdf_NM, u_N1 * cdf_NM[:, -1:], right=True)[:, 0])  # never one of probability 0
        p_NM = p_NKB[torch.arange(len(p_NV), device=p_NV.device), drawn[0]]
    return block * drawn[0] + drawn[1]
