"""What bench.py measures: the model, the rows, the environment, our learner and rollout on them, their growth and limits.

Each `*_work` returns the work: a function that does it once and returns how many tokens were sampled and played, where
that is to be compared. bench_trl.py holds TRL's side of the same, on the same model, texts and rows.

growth: seconds of late turns against early ones. With full history the turns attend to a longer cache; what that costs
is measured by itself, as bare forward passes over caches of the two lengths (`cache_seconds` is the difference). A
windowed history keeps all past actions, so its prompts still grow by an action a turn.

limit: shares of a matrix product (2048 x 2048 x 2048, the model's dtype) and of a memory copy, measured in the same
process. The learner's flops are those that the gradient needs: products of the linear layers forward, their input
gradients (frozen weights have no other; the first layer's q, k and v not even these), the adapter's weight gradients,
causal attention at half of the square, forward once and backward twice, and the head at sampled positions, forward and
backward. Logits recomputed in the backward pass are work, not progress: left out, and told apart as `with_recompute`.
Decoding one sequence must read every weight and the cache once a token: that over the copy's bytes (read + written) per
second is the bound. For a batch the bound is the larger of that and of its products' time.
"""
import random
import re
import statistics
import time
from itertools import pairwise

import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from envs import BadInput, Env
from grpo import Options, algorithm, group_advantages
from rl.chat import Chat
from rl.learner import UpdateOptions, make_optimizer, update
from rl.model import default_device, load_model
from rl.rollout import Request, Row, Trajectory, rollout
from rl.sampling import sampler
from rl.tiny import word_tokenizer
from rl.train import Algorithm

VOCABULARY, SQUARE, COPY_BYTES = 151_936, 2048, 2 ** 28
WORDS = ["go", "look", "take", "door", "key", "red", "blue", "open", "the", "room", "left", "right", "up", "down", "green",
         "light"]
# Both sides' template: ChatML, with the parts that TRL asks of one (tool calls, tool answers).
TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
            "{{ c['function']['name'] }} {{ c['function']['arguments'] | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def text_of(length_of, target, seed=0):
    """Words such that length_of(text) == target tokens."""
    words = random.Random(f"text {seed}").choices(WORDS, k=target)
    found = next((" ".join(words[:n]) for n in range(target, 0, -1) if length_of(" ".join(words[:n])) == target), None)
    if found is None:
        raise BadInput(f"this tokenizer makes no text of {target} tokens out of the chat template and words: ask for more")
    return found


class FixedEnv(Env):
    """Says `observation` whatever is done; never ends. The reward of every other instance is 1 a turn."""

    def __init__(self, number, observation):
        self.reward, self.observation = float(number % 2), observation

    def reset(self, *, task, seed):
        return task, {"success": False, "valid": True}

    def step(self, action):
        return self.observation, self.reward, False, False, {"success": False, "valid": True}


def policy(how, add_lora):
    """(model with a shaken adapter, tokenizer with TEMPLATE): the same in every process; each side has its `add_lora`."""
    if how.model == "tiny":
        named = [*WORDS, *(f"w{n}" for n in range(VOCABULARY - 7 - len(WORDS)))]  # 7: the special ones and the roles
        tokenizer = word_tokenizer([" ".join(named)])
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)).to(default_device()).eval()
        model.requires_grad_(False)
    else:
        model, tokenizer = load_model(how.model, 16)
    tokenizer.chat_template = TEMPLATE
    if how.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = add_lora(model, 16)
    with torch.no_grad():  # B is 0 at the start, and A's gradient with it
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.02)
    return model, tokenizer


def make_rows(how, model):
    """`how.rows` trajectories of `how.tokens` tokens; of each tenth the last `how.sampled` is sampled, never column 0."""
    rng, turn = random.Random(0), max(how.tokens // 10, 1)
    mask = [int(n % turn >= turn - round(turn * how.sampled) and n > 0) for n in range(how.tokens)]
    ids = [[rng.randrange(5, model.config.vocab_size) for _ in mask] for _ in range(how.rows)]
    return [Trajectory("", n // how.group, 0, False, rows=[Row(row, list(mask))]) for n, row in enumerate(ids)]


class EndlessChat(Chat):
    """Its only end token is an id that no model samples."""

    def __init__(self, tokenizer, vocabulary):
        super().__init__(tokenizer)
        self.end_ids = frozenset([vocabulary])


def optimizer_step(how, model, tokenizer):
    """learn(batch, advantages_N): one optimizer step of GRPO."""
    optimizer, grpo = make_optimizer(model, 1e-6), Algorithm(**algorithm(Options()))
    settings = UpdateOptions(tokenizer.pad_token_id, max_grad_norm=1e9, micro_batch_tokens=how.micro_batch_tokens,
                             gradient_checkpointing=how.checkpointing)
    return lambda batch, advantages_N: update(model, optimizer, batch, advantages_N, grpo, settings)


def signs(number):
    """Advantages 1, -1, 1, ..."""
    return torch.tensor([1.0 - 2 * (n % 2) for n in range(number)])


def learner_work(how, model, tokenizer):
    rows, learn = make_rows(how, model), optimizer_step(how, model, tokenizer)
    return lambda: learn(rows, signs(how.rows))


def rollout_work(how, model, tokenizer, history="full", starts=None, played=None):
    """starts: a list that gets the time at which each turn begins, and at last the end; played: gets the trajectories."""
    chat = EndlessChat(tokenizer, model.config.vocab_size)
    act = sampler(model, chat, temperature=1.0, max_new_tokens=how.new_tokens)
    firsts = [text_of(lambda text: len(chat.prompt([("user", text)])), how.prompt_tokens, group)
              for group in range(how.episodes // how.group)]

    def length(observation):
        messages = [("user", firsts[0]), ("assistant", (5,) * how.new_tokens), ("user", observation)]
        return len(chat.prompt(messages)) - how.prompt_tokens - how.new_tokens

    observation = text_of(length, how.observation_tokens)
    requests = [Request(first, group) for group, first in enumerate(firsts) for _ in range(how.group)]

    def timed(prompts):
        if starts is not None:
            starts.append(time.perf_counter())
        return act(prompts)

    def work():
        envs = [FixedEnv(n, observation) for n in range(how.episodes)]
        batch = rollout(timed, chat, envs, requests, max_turns=how.turns, max_new_tokens=how.new_tokens,
                        max_context=10 ** 6, history=history)
        if played is not None:
            played[:] = batch
        return {"sampled": sum(t.length for t in batch), "positions": sum(len(row.ids) for t in batch for row in t.rows)}

    return work


def step_work(how, model, tokenizer):
    played, learn = [], optimizer_step(how, model, tokenizer)
    play = rollout_work(how, model, tokenizer, played=played)

    def work():
        done = play()
        learn(played, group_advantages([t.reward for t in played], torch.tensor([t.group for t in played])))
        return done

    return work


def clock(work):
    """Seconds of work()."""
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def growth(how, model, tokenizer):
    """One pass each of rollouts with full and windowed history: seconds of an early turn and of a late one."""
    early, late = max(how.turns // 8, 2), how.turns - 1  # each with its two neighbours
    figures = {}
    for history in ("full", "full", "window:2"):  # the first pass warms up, the second one takes its place
        starts, played = [], []
        rollout_work(how, model, tokenizer, history, starts, played)()
        seconds = [end - start for start, end in pairwise(starts)]
        tokens = [len(turn.prompt_ids) for turn in played[0].turns]
        for name, turn in (("early", early), ("late", late)):
            figures |= {f"{history[:6]}.{name}_seconds": statistics.mean(seconds[turn - 2:turn + 1]),
                        f"{history[:6]}.{name}_prompt_tokens": tokens[turn - 1]}
    causal, turn_tokens = model.get_base_model(), how.new_tokens + how.observation_tokens
    ids = torch.randint(5, model.config.vocab_size, (how.episodes, how.prompt_tokens + (late - 1) * turn_tokens),
                        device=model.device)

    @torch.no_grad()
    def on_cache(turn):
        cache = DynamicCache(config=causal.config)
        causal.base_model(input_ids=ids[:, :how.prompt_tokens + (turn - 1) * turn_tokens], use_cache=True, cache=cache)

        def work():
            for width in [how.observation_tokens + 1] + [1] * (how.new_tokens - 1):
                causal(input_ids=ids[:, :width], use_cache=True, cache=cache, logits_to_keep=1)

        return min(clock(work) for _ in range(3))

    return figures | {"cache_seconds": on_cache(late) - on_cache(early)}


def learner_flops(model, rows, tokens, sampled):
    """(flops that the gradient needs, flops of the logits computed again), for `sampled` tokens in all."""
    config, all_tokens, weights, adapter, unneeded = model.config, rows * tokens, 0, 0, 0
    for name, p in model.named_parameters():
        if p.dim() != 2 or "embed" in name or "lm_head" in name:
            continue
        adapter, weights = adapter + ("lora_" in name) * p.numel(), weights + ("lora_" not in name) * p.numel()
        if re.search(r"layers\.0\.self_attn\.[qkv]_proj", name) and "lora_B" not in name:
            unneeded += p.numel()
    heads = config.num_attention_heads * getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    attention = 2 * rows * tokens ** 2 * heads * config.num_hidden_layers
    head = 2 * sampled * config.vocab_size * config.hidden_size
    return 2 * all_tokens * (2 * (weights + adapter) + adapter - unneeded) + 3 * attention + 2 * head, head


def rates(dtype, device, clock=clock):
    """What the machine does: matrix products of `dtype` and memory copies, as `clock` tells the seconds of a work."""
    a, b = torch.randn(2, SQUARE, SQUARE, device=device).to(dtype)
    rate = 2 * SQUARE ** 3 / min(clock(lambda: a @ b) for _ in range(6))
    source, target = torch.ones(2, COPY_BYTES, dtype=torch.uint8, device=device)
    return {"product_flops_per_second": rate,
            "copy_bytes_per_second": 2 * COPY_BYTES / min(clock(lambda: target.copy_(source)) for _ in range(6))}


def limit(how, model, tokenizer):
    """Shares of the measured matrix-product rate and copy bandwidth that the learner and decoding reach."""
    dtype, figures = model.dtype, rates(model.dtype, model.device)
    rate, bandwidth = figures["product_flops_per_second"], figures["copy_bytes_per_second"]
    work = learner_work(how, model, tokenizer)
    work()
    seconds = clock(work)
    needed, again = learner_flops(model, how.rows, how.tokens, sum(t.length for t in make_rows(how, model)))
    figures |= {"learner_seconds": seconds, "learner_flops_share": needed / seconds / rate,
                "learner_flops_share_with_recompute": (needed + again) / seconds / rate}

    base = model.get_base_model()
    parts = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]  # the head too, tied or not
    numbers = sum(w.numel() for w in parts)
    chat, config = EndlessChat(tokenizer, base.config.vocab_size), base.config
    short, long = how.new_tokens, 3 * how.new_tokens
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * dtype.itemsize
    for name, share, batch in (("decode", "bandwidth_share", 1), ("decode_batch", "bound_share", how.episodes)):
        prompts = torch.randint(5, config.vocab_size, (batch, how.prompt_tokens)).tolist()

        def play(new_tokens, prompts=prompts):
            act = sampler(model, chat, temperature=1.0, max_new_tokens=new_tokens)
            act(prompts)
            return min(clock(lambda: (act([]), act(prompts))) for _ in range(2))

        step = (play(long) - play(short)) / (long - short)
        read = sum(w.numel() * w.element_size() for w in parts) + batch * per_token * (how.prompt_tokens + 2 * short)
        bound = read / bandwidth if name == "decode" else max(read / bandwidth, 2 * batch * numbers / rate)
        figures |= {f"{name}_step_seconds": step, f"{name}_{share}": bound / step}
    return figures
