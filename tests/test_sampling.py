"""rl/sampling.py: the whole distribution is sampled, with its log-probs, and an action ends where it should."""
import gc
import weakref

import pytest
import torch
from conftest import play_shouting, shake, tiny_gpt2, tiny_qwen3, watched

from rl import sampling
from rl.chat import Chat
from rl.learner import row_logps
from rl.model import add_lora, freeze_reference, load_model
from rl.sampling import draw_tokens, merge, sampler

PROMPTS = [[5, 6, 7], [8] * 11, [9, 10, 11, 12, 13, 14], [20]]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_the_whole_distribution_is_sampled(base, word_chat, monkeypatch, temperature):  # docs/faults.md, 10
    base.generation_config.update(do_sample=True, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.3)  # as Qwen's
    seen, drawn_from, draw = watched(base, monkeypatch), [], sampling.draw_tokens
    monkeypatch.setattr(sampling, "draw_tokens",
                        lambda p_NV: drawn_from.append(p_NV / p_NV.sum(1, keepdim=True)) or draw(p_NV))
    answers = sampler(base, word_chat, temperature=temperature, max_new_tokens=4)(PROMPTS)
    assert len(drawn_from) == len(seen[0].logits) > 1
    for n, (p_NV, logits) in enumerate(zip(drawn_from, seen[0].logits)):
        assert p_NV.shape == (len(PROMPTS), len(word_chat.tokenizer))
        torch.testing.assert_close(p_NV, (logits / temperature).softmax(-1))
        for row, answer in enumerate(answers):
            if n < len(answer):
                assert answer.logps[n] == pytest.approx(p_NV[row, answer[n]].log().item())


def test_the_whole_distribution_at_the_real_vocabulary(qwen3_model, qwen3, monkeypatch):  # docs/faults.md, 10
    drawn_from, draw = [], sampling.draw_tokens
    monkeypatch.setattr(sampling, "draw_tokens",
                        lambda p_NV: drawn_from.append(p_NV / p_NV.sum(1, keepdim=True)) or draw(p_NV))
    sampler(qwen3_model, Chat(qwen3), temperature=0.7, max_new_tokens=2)([[1, 2, 3]])
    assert (drawn_from[0] > 0).sum() == 151_936


def test_tokens_are_drawn_with_their_probabilities():
    """Over several blocks of a vocabulary, from rows that do not add up to one; a token of probability 0 never comes."""
    torch.manual_seed(0)
    p_V = torch.rand(2500) ** 8
    p_V[torch.rand(2500) < 0.5] = 0.0
    p_V[[0, -1]] = 0.0
    drawn = torch.cat([draw_tokens(3 * p_V.expand(2000, -1), block=1000) for _ in range(100)])
    counts = torch.bincount(drawn, minlength=2500).double()
    assert len(counts) == 2500 and not counts[p_V == 0].any()
    expected = p_V.double() / p_V.double().sum() * len(drawn)
    often = expected > 5
    chi2 = ((counts - expected)[often] ** 2 / expected[often]).sum()
    assert abs(chi2 - often.sum()) < 5 * (2 * often.sum()) ** 0.5
    assert draw_tokens(torch.tensor([[0.0, 0.0, 1e-30, 0.0]])).item() == 2
    for u, index in ((0.0, 1), (1 - 2 ** -53, 2)):  # the ends of what torch.rand gives
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "rand", lambda *shape, u=u, **how: torch.full(shape, u, dtype=torch.float64))
            assert draw_tokens(torch.tensor([[0.0, 0.3, 0.7, 0.0]])).item() == index
            assert draw_tokens(torch.tensor([[0.0, 0.3, 0.7, 0.0]]), block=2).item() == index
    for bad in (torch.nan, torch.inf):
        with pytest.raises(FloatingPointError, match="not finite"):
            draw_tokens(torch.tensor([[0.5, bad]]))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_sampled_token_carries_its_log_prob(policy, word_chat, temperature):
    shake(policy)
    rows = [row for t in play_shouting(policy, word_chat, temperature=temperature) for row in t.rows]
    scored = row_logps(policy, rows, word_chat.pad_id, temperature=temperature)
    for row, logp_T in zip(rows, scored, strict=True):
        torch.testing.assert_close(torch.tensor(row.sampled_logp), torch.tensor(logp_T), atol=1e-4, rtol=1e-4)
    greedy = [row for t in play_shouting(policy, word_chat, temperature=0.0) for row in t.rows]
    assert all(len(row.sampled_logp) < len(row.ids) for row in greedy)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.5])
def test_a_sampled_token_carries_the_entropy_of_what_it_was_drawn_from(base, word_chat, monkeypatch, temperature):
    seen = watched(base, monkeypatch)
    answers = sampler(base, word_chat, temperature=temperature, max_new_tokens=6)(PROMPTS)
    for n, logits in enumerate(seen[0].logits):
        wanted = torch.distributions.Categorical(logits=logits.double() / temperature).entropy()
        for row, answer in enumerate(answers):
            if n < len(answer):
                assert answer.entropies[n] == pytest.approx(wanted[row].item(), abs=1e-5)
    assert all(len(answer.entropies) == len(answer) for answer in answers)
    assert all(answer.entropies is None for answer in sampler(base, word_chat, temperature=0, max_new_tokens=2)(PROMPTS))


def test_entropies_at_the_real_vocabulary_and_of_distributions_that_are_sure(qwen3_model, qwen3, monkeypatch):
    head, logits = qwen3_model.get_output_embeddings(), []

    def shifted(head, args, out):  # far from 0, as a model of billions of parameters may have its logits
        logits.append((100 + 40 * out).double()[:, -1])
        return logits[-1].float()[:, None]

    hook = head.register_forward_hook(shifted)
    [answer] = sampler(qwen3_model, Chat(qwen3), temperature=0.7, max_new_tokens=5)([[1, 2, 3]])
    hook.remove()
    wanted = [torch.distributions.Categorical(logits=z / 0.7).entropy().item() for z in logits]
    assert answer.entropies == pytest.approx(wanted[:len(answer)], abs=1e-3) and min(answer.entropies) > -1e-4


def test_temperature_zero_is_greedy(base, word_chat):
    torch.manual_seed(0)
    once = sampler(base, word_chat, temperature=0, max_new_tokens=6)(PROMPTS)
    assert once == sampler(base, word_chat, temperature=0, max_new_tokens=6)(PROMPTS)
    for prompt, answer in zip(PROMPTS, once):
        ids = prompt + answer
        best = base(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        assert best[len(prompt) - 1:-1] == answer


def test_sampling_follows_the_seed(base, word_chat):
    act, draws = sampler(base, word_chat, max_new_tokens=6), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(act(PROMPTS))
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize("make", [tiny_qwen3, tiny_gpt2])
def test_left_padded_is_as_alone(words, word_chat, make):  # docs/faults.md, 20
    act = sampler(make(len(words)), word_chat, temperature=0, max_new_tokens=12)
    assert act(PROMPTS) == [act([prompt])[0] for prompt in PROMPTS]


@pytest.mark.parametrize("n", [1, 3, 7])
def test_max_new_tokens(base, word_chat, n):
    act = sampler(base, Chat(word_chat.tokenizer), max_new_tokens=n)
    answers = [answer for _ in range(10) for answer in act(PROMPTS)]
    assert max(map(len, answers)) == n and all(answers)


def test_an_answer_stops_behind_its_first_end_token(base, words, monkeypatch):  # docs/faults.md, 17, 18, 19
    words_pad_is_end = Chat(words)
    words_pad_is_end.pad_id = words.eos_token_id
    tail = torch.tensor([[7, 2, 2, 2], [7, 8, 2, 2], [2, 2, 2, 2], [7, 8, 9, 10], [7, 0, 2, 2]])
    monkeypatch.setattr(base, "generate", lambda input_ids, **_: torch.cat([input_ids, tail], 1))
    assert sampler(base, words_pad_is_end, temperature=0)([[5]] * 5) == [[7, 2], [7, 8, 2], [2], [7, 8, 9, 10], [7, 0]]


@pytest.mark.parametrize("training", [False, True])
def test_gradient_checkpointing_does_not_change_what_is_sampled(policy, word_chat, monkeypatch, training):  # docs/faults.md, 13
    act, modes, generate = sampler(policy, word_chat, temperature=0, max_new_tokens=12), [], policy.generate
    monkeypatch.setattr(policy, "generate", lambda **how: modes.append(policy.training) or generate(**how))
    plain = act(PROMPTS)
    policy.get_base_model().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy.train(training)
    assert act(PROMPTS) == plain and policy.training == training and modes == [False, False]
    assert all(module.training == training for module in policy.modules())


def test_training_mode_comes_back_after_an_error(policy, word_chat, monkeypatch):  # docs/faults.md, 13
    monkeypatch.setattr(policy, "generate", lambda **_: 1 / 0)
    policy.train()
    with pytest.raises(ZeroDivisionError):
        sampler(policy, word_chat)(PROMPTS)
    assert policy.training


def test_the_head_is_given_a_tensor_of_its_own(base, word_chat):
    """Not a slice of the whole prompt's states, for which PyTorch copies the head once for each row."""
    strides = set()
    hook = base.get_output_embeddings().register_forward_hook(lambda head, args, out: strides.add(args[0].stride()))
    play_shouting(base, word_chat)
    hook.remove()
    width = base.config.hidden_size
    assert strides == {(width, width, 1)} and not base.get_output_embeddings()._forward_pre_hooks


# The adapter in the weights

def gap(model, chat, **how):
    """The largest difference of the sampler's log-probs and the learner's."""
    rows = [row for t in play_shouting(model, chat, **how) for row in t.rows]
    scored = row_logps(model, rows, chat.pad_id)
    return max(abs(a - b) for row, logp_T in zip(rows, scored) for a, b in zip(row.sampled_logp, logp_T))


def tensors(model):
    return {name: (p, p.detach().clone()) for name, p in model.named_parameters()}


def assert_untouched(model, before):
    """The same parameters, bit by bit, and the adapter adds to their output again."""
    for name, p in model.named_parameters():
        assert p is before[name][0] and torch.equal(p, before[name][1]), name
    assert not any(getattr(layer, "merged", False) for layer in model.modules())


@pytest.mark.parametrize("make", [tiny_qwen3, tiny_gpt2])
@pytest.mark.parametrize("keep_cache", [True, False])
def test_the_adapter_is_in_the_weights_while_it_samples(words, word_chat, monkeypatch, make, keep_cache):
    policy = add_lora(make(len(words)), rank=4)
    shake(policy)
    freeze_reference(policy)
    before, seen, generate = tensors(policy), [], policy.generate
    loras = [layer for layer in policy.modules() if hasattr(layer, "merged_adapters")]

    def watched_generate(**how):
        seen.append(all(layer.merged for layer in loras) and not any(
            layer.base_layer.weight is p for layer in loras for p, _ in before.values()))
        return generate(**how)

    monkeypatch.setattr(policy, "generate", watched_generate)
    assert gap(policy, word_chat, keep_cache=keep_cache) < 1e-4 and len(seen) > 3 and all(seen)
    assert_untouched(policy, before)


@pytest.mark.parametrize("change, left_out", [
    ({}, 0), ({"use_rslora": True}, 0), ({"rank_pattern": {"q_proj": 1}, "alpha_pattern": {"v_proj": 3}}, 0), ({"lora_bias": True}, 4),
    ({"target_modules": ["q_proj", "embed_tokens"]}, 0)])
def test_every_kind_of_adapter_samples_what_it_scores(base, word_chat, change, left_out):
    """With biases the layers are left out, an embedding always: the adapter goes on adding to their output."""
    from peft import LoraConfig, get_peft_model

    policy = get_peft_model(base, LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | change)).eval()
    shake(policy)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if "lora_embedding" in name or (".lora_B." in name and name.endswith("bias")):
                p.normal_(0, 0.2)
    linear = sum(hasattr(layer, "merged_adapters") and isinstance(layer.base_layer, torch.nn.Linear) for layer in policy.modules())
    before = tensors(policy)
    assert len(merge(policy)) == linear - left_out and gap(policy, word_chat) < 1e-4
    assert_untouched(policy, before)


def test_without_its_adapter_the_base_model_samples(policy, word_chat, words):
    shake(policy, scale=0.5)
    with policy.disable_adapter():
        assert merge(policy) == []
        rows = [t.rows for t in play_shouting(policy, word_chat)]
    assert rows == [t.rows for t in play_shouting(tiny_qwen3(len(words)), word_chat)]
    assert rows != [t.rows for t in play_shouting(policy, word_chat)]


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_the_weights_come_back_after_an_error(policy, word_chat, monkeypatch, error):
    before = tensors(policy)
    calls = []

    def fails(module, args):
        calls.append(module)
        if len(calls) == 3:
            raise error("in the middle")

    hook = policy.get_base_model().model.layers[1].register_forward_pre_hook(fails)
    with pytest.raises(error):
        sampler(policy, word_chat, max_new_tokens=8)(PROMPTS)
    hook.remove()
    assert_untouched(policy, before)
    assert gap(policy, word_chat) < 1e-4


@pytest.mark.parametrize("keep_cache", [True, False])
def test_the_next_rollout_has_the_new_weights(policy, word_chat, monkeypatch, keep_cache):
    """Merged once a rollout with a kept cache, else in each turn; nothing of it stays when all episodes have ended."""
    act, merges, plain = sampler(policy, word_chat, temperature=0, max_new_tokens=4, keep_cache=keep_cache), [], sampling.merge
    monkeypatch.setattr(sampling, "merge", lambda model: merges.append(plain(model)) or merges[-1])
    prompt = word_chat.prompt([("user", "take the iron key")])
    [answer] = act([prompt])
    act([[*prompt, *answer, 7]])
    assert len(merges) == (1 if keep_cache else 2)
    act([])
    weights = [weakref.ref(weight) for merged in merges for _, weight in merged]
    merges.clear()
    gc.collect()
    assert weights and not any(weight() is not None for weight in weights)
    shake(policy, scale=0.5)
    assert act([prompt]) == sampler(policy, word_chat, temperature=0, max_new_tokens=4)([prompt]) != [answer]


@pytest.mark.parametrize("keep_cache", [True, False])
def test_weights_that_change_between_two_calls_are_the_ones_that_sample(policy, word_chat, keep_cache):
    """Also where nobody said with act([]) that the episodes have ended; and the adapter switched off is another policy."""
    act = sampler(policy, word_chat, temperature=0, max_new_tokens=4, keep_cache=keep_cache)
    prompt = word_chat.prompt([("user", "take the iron key")])
    before = act([prompt])
    shake(policy, scale=0.5)
    after = act([prompt])
    assert after == sampler(policy, word_chat, temperature=0, max_new_tokens=4)([prompt]) != before
    with policy.disable_adapter():
        assert act([prompt]) == sampler(policy, word_chat, temperature=0, max_new_tokens=4)([prompt]) != after


def test_rounding_to_bf16_keeps_the_mean_of_a_small_adapter(words):
    """An adapter as after a few steps, whose entries are far below the spacing of bf16: the nearest numbers leave most of it out."""
    policy = add_lora(tiny_qwen3(len(words), hidden_size=256, intermediate_size=512).bfloat16(), rank=8)
    shake(policy, scale=5e-4)
    torch.manual_seed(0)
    stream = torch.get_rng_state()
    merged, again = merge(policy), merge(policy)
    assert torch.equal(torch.get_rng_state(), stream)
    kept, nearest, all_of_it = 0.0, 0.0, 0.0
    for (layer, weight), (_, other) in zip(merged, again):
        own, delta = layer.weight.float(), layer.get_delta_weight("default").detach()
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, other)
        ulp = 2 ** (own + delta).abs().log2().floor().sub(7)
        assert ((weight.float() - own - delta).abs() <= ulp).all()  # one of the two neighbours
        kept += ((weight.float() - own) * delta).sum()
        nearest += (((own + delta).bfloat16().float() - own) * delta).sum()
        all_of_it += delta.square().sum()
    assert kept / all_of_it == pytest.approx(1, abs=0.1) and nearest / all_of_it < 0.5


def test_a_model_whose_copy_is_too_large_samples_with_its_adapter_beside(policy, word_chat, monkeypatch):
    linear = sum(layer.weight.nbytes for layer in policy.modules() if hasattr(layer, "merged_adapters"))
    assert merge(policy, most=linear) and merge(policy, most=linear - 1) == []
    monkeypatch.setattr(sampling, "merge", lambda model, plain=merge: plain(model, most=linear - 1))
    assert gap(policy, word_chat) < 1e-4


def test_smollm2_answers_in_english(smollm2):
    model, tokenizer = load_model(smollm2)
    chat = Chat(tokenizer)
    prompt = chat.prompt([("user", "What is the capital of France?")])
    [answer] = sampler(model, chat, temperature=0, max_new_tokens=12)([prompt])
    assert chat.action_text(answer) == "The capital of France is Paris." and answer[-1] == tokenizer.eos_token_id
