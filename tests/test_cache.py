"""rl/cache.py: a kept cache changes nothing but the work."""
import random
import weakref

import pytest
import torch
from conftest import GAME, Shouting, play_shouting, shake, tiny_gpt2, tiny_qwen3

from enrich import EnrichedEnv, Schedule
from rl import cache
from rl.cache import Kept, keeps_cache
from rl.chat import Chat
from rl.model import load_model
from rl.rollout import Request, rollout
from rl.sampling import sampler
from rl.tiny import SHIPPED


def llama(vocab):
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                                        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3)).eval()


def hybrid(vocab):
    """Three gated-delta-net layers to one of attention, as in Qwen3.5."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(
        vocab_size=vocab, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, initializer_range=0.3)).eval()


def sliding(vocab):
    from transformers import MistralConfig, MistralForCausalLM
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(vocab_size=vocab, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                                            num_attention_heads=4, num_key_value_heads=2, sliding_window=24,
                                            initializer_range=0.3)).eval()


MODELS = {"qwen3": tiny_qwen3, "gpt2": tiny_gpt2, "llama": llama, "hybrid": hybrid, "sliding": sliding}


@pytest.mark.parametrize("name, temperature, envs", [*((name, 1.0, 64) for name in MODELS), ("qwen3", 0, 64), ("llama", 0, 64),
                                                     ("hybrid", 0, 64), ("qwen3", 1.0, 3), ("gpt2", 1.0, 3)])
def test_the_same_tokens_with_and_without(words, word_chat, name, temperature, envs):
    model = MODELS[name](len(words))
    kept, anew = (play_shouting(model, word_chat, envs=envs, temperature=temperature, keep_cache=on) for on in (True, False))
    assert [t.rows for t in kept] == [t.rows for t in anew]
    assert len({len(t.turns) for t in kept}) > 2 and max(len(t.turns) for t in kept) > 3


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "llama"])
def test_the_same_logits_with_and_without(words, word_chat, monkeypatch, name):
    model, logits = MODELS[name](len(words)), []
    generate = model.generate

    def watched(generation_config, **how):
        out = generate(generation_config=generation_config, output_logits=True, return_dict_in_generate=True, **how)
        logits.append(torch.stack(out.logits))
        return out.sequences

    monkeypatch.setattr(model, "generate", watched)
    play_shouting(model, word_chat)
    half = len(logits)
    play_shouting(model, word_chat, keep_cache=False)
    assert len(logits) == 2 * half > 6
    for kept, anew in zip(logits, logits[half:]):
        torch.testing.assert_close(kept.log_softmax(-1), anew.log_softmax(-1), atol=1e-5, rtol=1e-5)


def encoded(model):
    """The shapes of the ids that go through the model's layers."""
    seen, embed = [], model.get_input_embeddings()
    embed.register_forward_hook(lambda module, inputs, output: seen.append(tuple(inputs[0].shape)))
    return seen


def test_a_turn_encodes_what_is_new_and_a_group_its_prompt_once():
    model, tokenizer = load_model(str(SHIPPED))
    seen, word_chat = encoded(model), Chat(tokenizer)
    played = play_shouting(model, word_chat)
    assert seen[0][0] == 5 and seen[1] == (20, 1)  # five groups of four; then the last token of each prompt
    kept, longest = sum(rows * width for rows, width in seen), max(len(t.rows[0].ids) for t in played)
    assert max(width for _, width in seen[2:]) < longest / 3
    seen.clear()
    play_shouting(model, word_chat, keep_cache=False)
    assert kept < 0.35 * sum(rows * width for rows, width in seen)


@pytest.mark.parametrize("name, keeps", [("qwen3", True), ("gpt2", True), ("llama", True), ("hybrid", False), ("sliding", False)])
def test_which_models_keep_their_cache(words, name, keeps):
    assert keeps_cache(MODELS[name](len(words))) == keeps


def test_with_an_adapter(policy, word_chat):
    shake(policy)
    kept, anew = (play_shouting(policy, word_chat, keep_cache=on) for on in (True, False))
    assert [t.rows for t in kept] == [t.rows for t in anew]


def play_hinted(model, chat, keep_cache, **how):
    envs = [EnrichedEnv(Shouting(**GAME), Schedule("both", early=(1, 1))) for _ in range(6)]
    requests = [Request(task, n, n, enriched=n < 2) for n, task in enumerate(Shouting.tasks("train", **GAME)[:3]) for _ in range(4)]
    torch.manual_seed(0)
    act = sampler(model, chat, max_new_tokens=8, keep_cache=keep_cache)
    return rollout(act, chat, envs, requests, max_turns=6, **how)


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "llama"])
@pytest.mark.parametrize("how", [{"history": "window:1"}, {"history": "recent:1"}, {}, {"keep_hints": True}],
                         ids=["window", "recent", "plain", "kept"])
def test_a_prompt_goes_on_from_what_it_has_in_common_with_a_row(words, word_chat, name, how):
    """A hint that has gone or an observation that was left out: what stands before it is not encoded again."""
    model = MODELS[name](len(words))
    seen = encoded(model)
    kept = play_hinted(model, word_chat, True, **how)
    work = sum(rows * width for rows, width in seen)
    seen.clear()
    anew = play_hinted(model, word_chat, False, **how)
    assert [t.rows for t in kept] == [t.rows for t in anew]
    assert max(len(t.rows) for t in kept) > 2 or how.get("keep_hints")
    share = 0.9 if how.get("history") == "recent:1" else 0.8  # the beginning alone is common there
    assert work < share * sum(rows * width for rows, width in seen)
    for one, other in zip((row for t in kept for row in t.rows), (row for t in anew for row in t.rows)):
        torch.testing.assert_close(torch.tensor(one.sampled_logp), torch.tensor(other.sampled_logp), atol=1e-5, rtol=1e-5)


def test_nothing_is_kept_from_one_rollout_to_the_next(policy, word_chat):
    act = sampler(policy, word_chat, temperature=0, max_new_tokens=4)
    prompt = word_chat.prompt([("user", "take the iron key")])
    [answer] = act([prompt])
    longer = [*prompt, *answer, *word_chat.text_ids("open the red door")]
    shake(policy, scale=0.5)
    act([])
    assert act([longer]) == sampler(policy, word_chat, temperature=0, max_new_tokens=4)([longer])


def test_a_cache_that_no_prompt_goes_on_from_is_let_go_first(base, word_chat, monkeypatch):
    caches, most, real = weakref.WeakSet(), [0], Kept.__init__

    def made(self, *of):
        real(self, *of)
        caches.add(self)
        most[0] = max(most[0], len(caches))

    monkeypatch.setattr(Kept, "__init__", made)
    act = sampler(base, word_chat, max_new_tokens=2)
    for word in ("red", "green", "blue"):
        act([word_chat.prompt([("user", f"open the {word} door")])])
    assert most == [1]


def test_holes_do_not_pile_up(monkeypatch):
    """With fewer environments than episodes the batch never empties."""
    model, tokenizer = load_model(str(SHIPPED))
    widths, generate = [], model.generate
    monkeypatch.setattr(model, "generate", lambda input_ids, **how: widths.append(input_ids.shape[1]) or
                        generate(input_ids=input_ids, **how))
    played = play_shouting(model, Chat(tokenizer), envs=2)
    longest = max(len(t.rows[0].ids) for t in played)
    assert len(widths) > 20 and max(widths) < 1.25 * longest + 60  # and one turn


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "llama"])
def test_groups_whose_prompts_differ_in_length(words, word_chat, name):
    model, prompts = MODELS[name](len(words)), [[5, 6, 7], [5, 6, 7], [*range(4, 24)], [*range(4, 24)], [9, 8]]
    kept, anew = (sampler(model, word_chat, temperature=0, max_new_tokens=12, keep_cache=on)(prompts) for on in (True, False))
    assert kept == anew and max(map(len, kept)) > 3


def test_a_row_is_found_by_its_ids_alone():
    kept = Kept(None, [[1, 2, 3], [1, 2], [4]], torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 1]]))
    assert kept.find([1, 2, 3, 9]) == (3, 0) and kept.find([4, 4]) == (1, 2) and kept.find([1, 2, 9])[0] == 2
    assert kept.find([1, 2])[0] == 1 and kept.find([9, 1, 2, 3])[0] == 0 and kept.find([1])[0] == 0
    rng = random.Random(0)
    for _ in range(300):
        rows = [rng.choices([1, 2, 3], k=rng.randrange(1, 7)) for _ in range(5)]
        prompt = rng.choices([1, 2, 3], k=rng.randrange(1, 8))
        same = [next((n for n in range(len(prompt) - 1) if row[n:n + 1] != prompt[n:n + 1]), len(prompt) - 1) for row in rows]
        many, row = Kept(None, rows, torch.zeros(5, 1)).find(prompt)
        assert many == max(same) == same[row]


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "llama"])
def test_packing_a_cache_changes_nothing_but_its_width(words, word_chat, monkeypatch, name):
    model, packed, real = MODELS[name](len(words)), [], cache.pack

    def counted(kept_cache, real_NP):
        packed.append((real_NP.shape[1], (kept := real(kept_cache, real_NP)).shape[1]))
        return kept

    monkeypatch.setattr(cache, "pack", counted)
    with_ = play_shouting(model, word_chat, envs=3)
    monkeypatch.setattr(cache, "pack", lambda _, real_NP: real_NP)
    without = play_shouting(model, word_chat, envs=3)
    assert [t.rows for t in with_] == [t.rows for t in without]
    assert any(after < before for before, after in packed)
    for a, b in zip(with_, without):
        for row, other in zip(a.rows, b.rows):
            torch.testing.assert_close(torch.tensor(row.sampled_logp), torch.tensor(other.sampled_logp), atol=1e-5, rtol=1e-5)
