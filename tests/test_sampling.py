"""sampling.py: a kept cache changes nothing but the work. (What is sampled at all: tests/test_rollout.py.)"""
import weakref

import pytest
import torch
from conftest import shake, tiny_qwen3

import sampling
from envs.keydoor import KeyDoor
from learner import row_logps
from model import load_model
from rollout import Chat, Request, rollout
from sampling import Kept, draw, keeps_cache, sampler
from tiny import SHIPPED

GAME = {"stages": 6, "commands": 4, "practice": True}


def gpt2(vocab):
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocab, n_positions=1024, n_embd=64, n_layer=2, n_head=4, eos_token_id=2,
                                      initializer_range=0.3)).eval()


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


MODELS = {"qwen3": tiny_qwen3, "gpt2": gpt2, "llama": llama, "hybrid": hybrid, "sliding": sliding}


def play(model, chat, *, envs=20, temperature=1.0, keep_cache=True, history="full"):
    requests = [Request(task, n, n) for n, task in enumerate(KeyDoor.tasks("train", **GAME)[:5]) for _ in range(4)]
    act = sampler(model, chat, temperature=temperature, max_new_tokens=8, keep_cache=keep_cache)
    torch.manual_seed(0)
    return rollout(act, chat, [Shouting(**GAME) for _ in range(envs)], requests, max_turns=6, history=history)


class Shouting(KeyDoor):
    """Goes on whatever is said, some episodes longer than others, with answers of different lengths."""
    def step(self, action):
        self.stage = min(self.stage + 1, self.stages - 1)
        over = len(action) % 7 == 0
        return "Taken. " * (len(action) % 5) + self._view(), 0.0, over, False, self._info(valid=True)


@pytest.mark.parametrize("name, temperature, envs", [*((name, 1.0, 64) for name in MODELS), ("qwen3", 0, 64), ("llama", 0, 64),
                                                     ("hybrid", 0, 64), ("qwen3", 1.0, 3), ("gpt2", 1.0, 3)])
def test_the_same_tokens_with_and_without(words, word_chat, name, temperature, envs):
    model = MODELS[name](len(words))
    kept, anew = (play(model, word_chat, envs=envs, temperature=temperature, keep_cache=on) for on in (True, False))
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
    play(model, word_chat)
    half = len(logits)
    play(model, word_chat, keep_cache=False)
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
    played = play(model, word_chat)
    assert seen[0][0] == 5 and seen[1] == (20, 1)  # five groups of four; then the last token of each prompt
    kept, longest = sum(rows * width for rows, width in seen), max(len(t.rows[0].ids) for t in played)
    assert max(width for _, width in seen[2:]) < longest / 3
    seen.clear()
    play(model, word_chat, keep_cache=False)
    assert kept < 0.35 * sum(rows * width for rows, width in seen)


def test_the_head_is_given_a_tensor_of_its_own(base, word_chat):
    """Not a slice of the whole prompt's states, for which PyTorch copies the head once for each row."""
    model, strides = base, set()
    hook = model.get_output_embeddings().register_forward_hook(lambda head, args, out: strides.add(args[0].stride()))
    play(model, word_chat)
    hook.remove()
    width = model.config.hidden_size
    assert strides == {(width, width, 1)} and not model.get_output_embeddings()._forward_pre_hooks


@pytest.mark.parametrize("name, keeps", [("qwen3", True), ("gpt2", True), ("llama", True), ("hybrid", False), ("sliding", False)])
def test_which_models_keep_their_cache(words, name, keeps):
    assert keeps_cache(MODELS[name](len(words))) == keeps


def test_with_an_adapter(policy, word_chat):
    shake(policy)
    assert [t.rows for t in play(policy, word_chat)] == [t.rows for t in play(policy, word_chat, keep_cache=False)]


def test_a_windowed_history_is_encoded_anew(base, word_chat):
    kept, anew = (play(base, word_chat, history="window:1", keep_cache=on) for on in (True, False))
    assert [t.rows for t in kept] == [t.rows for t in anew] and max(len(t.rows) for t in kept) > 2


def test_nothing_is_kept_from_one_rollout_to_the_next(policy, word_chat):
    act = sampler(policy, word_chat, temperature=0, max_new_tokens=4)
    prompt = word_chat.prompt([("user", "take the iron key")])
    [answer] = act([prompt])
    longer = [*prompt, *answer, *word_chat.text_ids("open the red door")]
    shake(policy, scale=0.5)
    act([])
    assert act([longer]) == sampler(policy, word_chat, temperature=0, max_new_tokens=4)([longer])


def test_a_cache_that_no_prompt_goes_on_from_is_let_go_first(base, word_chat, monkeypatch):
    caches, most, real = weakref.WeakSet(), [0], sampling.Kept.__init__

    def made(self, cache, *rest):
        real(self, cache, *rest)
        caches.add(self)
        most[0] = max(most[0], len(caches))

    monkeypatch.setattr(sampling.Kept, "__init__", made)
    act = sampler(base, word_chat, max_new_tokens=2)
    for word in ("red", "green", "blue"):
        act([word_chat.prompt([("user", f"open the {word} door")])])
    assert most == [1]


def test_rollout_says_when_no_episode_goes_on(base, word_chat):
    inner, calls = sampler(base, word_chat, max_new_tokens=4), []
    act = lambda prompts: calls.append(len(prompts)) or inner(prompts)
    rollout(act, word_chat, [KeyDoor()], [Request(task) for task in KeyDoor.tasks("train")[:2]], max_turns=2)
    assert calls[-1] == 0 and 0 not in calls[:-1]


def test_holes_do_not_pile_up(monkeypatch):
    """With fewer environments than episodes the batch never empties."""
    model, tokenizer = load_model(str(SHIPPED))
    widths, generate = [], model.generate
    monkeypatch.setattr(model, "generate", lambda input_ids, **how: widths.append(input_ids.shape[1]) or
                        generate(input_ids=input_ids, **how))
    played = play(model, Chat(tokenizer), envs=2)
    longest = max(len(t.rows[0].ids) for t in played)
    assert len(widths) > 20 and max(widths) < 1.25 * longest + 60  # and one turn


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "llama"])
def test_groups_whose_prompts_differ_in_length(words, word_chat, name):
    model, prompts = MODELS[name](len(words)), [[5, 6, 7], [5, 6, 7], [*range(4, 24)], [*range(4, 24)], [9, 8]]
    kept, anew = (sampler(model, word_chat, temperature=0, max_new_tokens=12, keep_cache=on)(prompts) for on in (True, False))
    assert kept == anew and max(map(len, kept)) > 3


def test_a_row_is_found_by_its_ids_alone():
    kept = Kept(None, [[1, 2, 3], [1, 2], [4]], None)
    assert kept.find([1, 2, 3, 9]) == 0 and kept.find([1, 2, 9]) == 1 and kept.find([4, 4]) == 2
    assert kept.find([1, 2]) is None and kept.find([9, 1, 2, 3]) is None and kept.find([1]) is None


def test_tokens_are_drawn_with_their_probabilities():
    """Over several blocks of a vocabulary, from rows that do not add up to one; a token of probability 0 never comes."""
    torch.manual_seed(0)
    p_V = torch.rand(2500) ** 8
    p_V[torch.rand(2500) < 0.5] = 0.0
    p_V[[0, -1]] = 0.0
    drawn = torch.cat([draw(3 * p_V.expand(2000, -1), block=1000) for _ in range(100)])
    counts = torch.bincount(drawn, minlength=2500).double()
    assert len(counts) == 2500 and not counts[p_V == 0].any()
    expected = p_V.double() / p_V.double().sum() * len(drawn)
    often = expected > 5
    chi2 = ((counts - expected)[often] ** 2 / expected[often]).sum()
    assert abs(chi2 - often.sum()) < 5 * (2 * often.sum()) ** 0.5
    assert draw(torch.tensor([[0.0, 0.0, 1e-30, 0.0]])).item() == 2
    for u, index in ((0.0, 1), (1 - 2 ** -53, 2)):  # the ends of what torch.rand gives
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "rand", lambda *shape, u=u, **how: torch.full(shape, u, dtype=torch.float64))
            assert draw(torch.tensor([[0.0, 0.3, 0.7, 0.0]])).item() == index
            assert draw(torch.tensor([[0.0, 0.3, 0.7, 0.0]]), block=2).item() == index
    for bad in (torch.nan, torch.inf):
        with pytest.raises(FloatingPointError, match="not finite"):
            draw(torch.tensor([[0.5, bad]]))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_sampled_token_carries_its_log_prob(policy, word_chat, temperature):
    shake(policy)
    rows = [row for t in play(policy, word_chat, temperature=temperature) for row in t.rows]
    scored = row_logps(policy, rows, word_chat.pad_id, temperature=temperature)
    for row in rows:
        torch.testing.assert_close(torch.tensor(row.sampled_logp), torch.tensor(scored[id(row)]), atol=1e-4, rtol=1e-4)
    greedy = [row for t in play(policy, word_chat, temperature=0.0) for row in t.rows]
    assert all(len(row.sampled_logp) < len(row.ids) for row in greedy)


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "llama"])
def test_packing_a_cache_changes_nothing_but_its_width(words, word_chat, monkeypatch, name):
    model, packed, real = MODELS[name](len(words)), [], sampling.pack

    def counted(cache, real_NP):
        packed.append((real_NP.shape[1], (kept := real(cache, real_NP)).shape[1]))
        return kept

    monkeypatch.setattr(sampling, "pack", counted)
    with_ = play(model, word_chat, envs=3)
    monkeypatch.setattr(sampling, "pack", lambda cache, real_NP: real_NP)
    without = play(model, word_chat, envs=3)
    assert [t.rows for t in with_] == [t.rows for t in without]
    assert any(after < before for before, after in packed)
    for a, b in zip(with_, without):
        for row, other in zip(a.rows, b.rows):
            torch.testing.assert_close(torch.tensor(row.sampled_logp), torch.tensor(other.sampled_logp), atol=1e-5, rtol=1e-5)
