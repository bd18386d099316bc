"""The policy: one function for all log-probs, LoRA that leaves the reference alone, loading, saving, 4 bits.

"fault N" numbers a list of faults found in other implementations; each is named by its test.
"""
import importlib.util
import json

import pytest
import torch
from conftest import FakeEnv, make_rows, shake, tiny_qwen3, watched

import sampling
from learner import pad
from model import (ScoreTokens, adapter_base, add_lora, freeze_reference, load_adapter, load_model, make_optimizer, reference,
                   token_logps)
from rollout import Chat, Request, Row, rollout
from sampling import sampler

needs_bitsandbytes = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="no bitsandbytes")


def scores(model, temperature=1.0, seed=0, **how):
    """Log-probs [B, T] of ragged rows, with ids and mask."""
    ids, mask = pad(make_rows(model.config.vocab_size, seed=seed), 0, model.device)
    return token_logps(model, ids, mask, temperature, **how)[0], ids, mask


def full_pass(model, ids_T, temperature=1.0):
    """Log-softmax of every token given those before it: one row, no padding, all logits."""
    logits = model(input_ids=ids_T[None]).logits[0, :-1].double() / temperature
    return logits.log_softmax(-1)


def save(model, tokenizer, folder, **generation):
    model.generation_config.update(**generation)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def folder(words, tmp_path):
    """A folder that holds the same model as `base`."""
    return save(tiny_qwen3(len(words)), words, tmp_path / "base")


# Log-probs


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_log_probs_and_entropies_equal_a_full_pass(policy, temperature):  # faults 10, 14
    rows = make_rows(policy.config.vocab_size)
    ids, mask = pad(rows, 0, policy.device)
    logp, entropy = token_logps(policy, ids, mask, temperature)
    assert logp.dtype == entropy.dtype == torch.float32
    for b, row in enumerate(rows):
        full = full_pass(policy, torch.tensor(row.ids), temperature)
        for t in range(ids.shape[1]):
            if t < len(row.ids) and row.mask[t]:
                assert logp[b, t].item() == pytest.approx(full[t - 1, row.ids[t]].item(), abs=1e-5)
                assert entropy[b, t].item() == pytest.approx(-(full[t - 1].exp() * full[t - 1]).sum().item(), abs=1e-5)
            else:
                assert logp[b, t] == entropy[b, t] == 0


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probs_are_those_of_the_sampling(policy, word_chat, monkeypatch, temperature):  # faults 10, 11: ratio 1
    prompts, seen = [[5, 6, 7], [8] * 11, [9, 10, 11, 12]], watched(policy, monkeypatch)
    answers = sampler(policy, word_chat, temperature=temperature, max_new_tokens=10)(prompts)
    sampling = (torch.stack(seen[0].logits, 1) / temperature).log_softmax(-1)
    for b, (prompt, answer) in enumerate(zip(prompts, answers)):
        row = Row(prompt + answer, [0] * len(prompt) + [1] * len(answer))
        logp = token_logps(policy, *pad([row], 0, "cpu"), temperature)[0][0, len(prompt):].tolist()
        assert logp == pytest.approx([sampling[b, t, i].item() for t, i in enumerate(answer)], abs=1e-5)


@pytest.mark.parametrize("pad_id", [0, 2, 30])
def test_padding_on_the_right_changes_nothing(policy, pad_id):  # faults 19, 20: whatever id the padding has
    rows = make_rows(policy.config.vocab_size)
    together = token_logps(policy, *pad(rows, pad_id, policy.device))[0]
    for row, logp in zip(rows, together):
        alone = token_logps(policy, *pad([row], pad_id, policy.device))[0][0]
        torch.testing.assert_close(logp[:len(row.ids)], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("chunk", [1, 3, 7, 10_000])
def test_the_chunk_size_changes_nothing(policy, chunk):
    results = []
    for size in (chunk, 1024):
        policy.zero_grad()
        logp = scores(policy, chunk=size)[0]
        logp.sum().backward()
        results.append([logp, *(p.grad for p in policy.parameters() if p.requires_grad)])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_gradient_equals_that_of_all_logits(policy):
    ids, mask = scores(policy)[1:]
    token_logps(policy, ids, mask, 0.7)[0].sum().backward()
    got = {n: p.grad.clone() for n, p in policy.named_parameters() if p.requires_grad}
    policy.zero_grad()
    logp = (policy(input_ids=ids).logits[:, :-1] / 0.7).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    (logp * mask[:, 1:]).sum().backward()
    assert got
    for name, p in policy.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(got[name], p.grad, atol=1e-4, rtol=1e-4)


def test_nothing_sampled_is_zero(policy):  # fault 7
    ids = torch.tensor([[5, 6, 7]])
    logp, entropy = token_logps(policy, ids, torch.zeros_like(ids))
    assert not logp.any() and not entropy.any()


def test_only_what_stands_before_a_token_decides_it(policy):
    logp, ids, mask = scores(policy)
    changed = ids.clone()
    changed[:, 8:] = (ids[:, 8:] + 1) % policy.config.vocab_size
    torch.testing.assert_close(token_logps(policy, changed, mask)[0][:, :8], logp[:, :8], atol=1e-5, rtol=0)


@torch.no_grad()
def test_bf16_logits_are_normalised_in_fp32(base):  # fault 11
    base.to(torch.bfloat16)
    logp, ids, mask = scores(base)
    b, t = mask.nonzero()[0].tolist()
    logits = base.lm_head(base.model(input_ids=ids).last_hidden_state[b, t - 1]).float()
    assert logp.dtype == torch.float32
    assert logp[b, t].item() == pytest.approx(logits.log_softmax(-1)[ids[b, t]].item(), abs=1e-5)


def test_gradient_checkpointing_changes_no_gradient(policy):  # fault 13
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            policy.get_base_model().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        policy.train(checkpointing).zero_grad()
        scores(policy)[0].sum().backward()
        results.append([p.grad.clone() for p in policy.parameters() if p.requires_grad])
    for a, b in zip(*results):
        assert b.any()
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_logits_are_never_made_for_every_token(base, monkeypatch):
    seen, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *a, out: seen.append(out.shape) or mm(*a, out=out))
    mask = scores(base, chunk=10)[2]
    assert sum(len_ for len_, _ in seen) == mask.sum() and max(seen) <= (10, base.config.vocab_size)


def test_the_fused_head_against_autograd_in_float64():
    """Values and gradient, at a temperature, over chunks, with a weight for each token."""
    torch.manual_seed(0)
    hidden_ND, weight_VD = torch.randn(7, 5, dtype=torch.float64), torch.randn(11, 5, dtype=torch.float64)
    targets_N, weights_N = torch.randint(11, (7,)), torch.randn(7, dtype=torch.float64)
    one, two = hidden_ND.float().requires_grad_(), hidden_ND.clone().requires_grad_()
    logp_N, entropy_N = ScoreTokens.apply(one, weight_VD.float(), targets_N, 0.7, 3)
    (logp_N * weights_N.float()).sum().backward()
    wanted_NV = (two @ weight_VD.t() / 0.7).log_softmax(-1)
    (wanted_NV[range(7), targets_N] * weights_N).sum().backward()
    torch.testing.assert_close(logp_N.double(), wanted_NV[range(7), targets_N], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy_N.double(), -(wanted_NV.exp() * wanted_NV).sum(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(one.grad.double(), two.grad, atol=1e-5, rtol=1e-5)


def test_an_output_layer_that_cannot_be_scored_is_refused(base, words, tmp_path):
    from peft import LoraConfig, get_peft_model
    folder = save(base, words, tmp_path / "m")
    get_peft_model(base, LoraConfig(r=2, target_modules=["lm_head"])).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="output layer"):
        load_adapter(load_model(folder)[0], str(tmp_path / "adapter"))


# LoRA and the reference


def test_add_lora(base):  # faults 12, 24
    model = add_lora(base, rank=4)
    config = model.peft_config["default"]
    assert (config.lora_dropout, config.bias, config.lora_alpha) == (0.0, "none", 8)
    assert not any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in model.modules()) and not model.training
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained and all(".lora_" in n for n in trained) and not any("lm_head" in n or "embed" in n for n in trained)
    layers = {n.split(".lora_")[0].rsplit(".", 1)[1] for n in trained}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_scoring_is_the_same_in_training_mode(policy):  # fault 12
    assert torch.equal(scores(policy)[0], scores(policy.train())[0])


def test_the_adapter_follows_its_seed(words):
    a, b, c = (add_lora(tiny_qwen3(len(words)), rank=4, seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(a[k], b[k]) for k in a) and any(not torch.equal(a[k], c[k]) for k in a)


@torch.no_grad()
def test_without_adapter_it_is_the_base_model(words, base):  # fault 24
    want = scores(base)[0]
    model = add_lora(base, rank=4)
    assert torch.equal(scores(model)[0], want)  # B = 0: KL 0 at step 0
    shake(model)
    assert not torch.allclose(scores(model)[0], want, atol=1e-2)
    with reference(model):
        assert torch.equal(scores(model)[0], want)
    with model.disable_adapter():
        assert torch.equal(scores(model)[0], want)
    assert not torch.allclose(scores(model)[0], want, atol=1e-2)


def test_a_frozen_reference_is_the_adapter_at_that_time(policy):  # fault 24
    trainable = [n for n, p in policy.named_parameters() if p.requires_grad]
    start = scores(policy)[0].detach()
    freeze_reference(policy)
    assert [n for n, p in policy.named_parameters() if p.requires_grad] == trainable
    assert torch.equal(scores(policy)[0], start)
    optimizer = make_optimizer(policy, 1e-2)
    for _ in range(3):
        with torch.no_grad(), reference(policy):
            assert torch.equal(scores(policy)[0], start)
        optimizer.zero_grad()
        scores(policy)[0].sum().backward()
        assert all(p.grad is not None and p.grad.any() for p in policy.parameters() if p.requires_grad)
        optimizer.step()
    assert not torch.allclose(scores(policy)[0], start, atol=1e-2)
    assert [n for n, p in policy.named_parameters() if p.requires_grad] == trainable
    with pytest.raises(ZeroDivisionError), reference(policy):
        1 / 0
    assert not torch.allclose(scores(policy)[0], start, atol=1e-2)  # back after an error too


# Loading and saving


@torch.no_grad()
def test_an_adapter_survives_saving_and_loads_with_plain_peft(policy, words, folder, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    want = scores(policy)[0]
    freeze_reference(policy)
    policy.save_pretrained(tmp_path / "adapter", selected_adapters=["default"])
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir() if p.suffix != ".md") == [
        "adapter_config.json", "adapter_model.safetensors"]
    assert torch.equal(scores(load_adapter(load_model(folder, device="cpu")[0], str(tmp_path / "adapter")))[0], want)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tmp_path / "adapter")
    torch.testing.assert_close(scores(plain.eval())[0], want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("trainable", [True, False])
def test_a_loaded_adapter_is_trainable_or_not(policy, folder, tmp_path, trainable):
    policy.save_pretrained(tmp_path / "adapter")
    model = load_adapter(load_model(folder)[0], str(tmp_path / "adapter"), trainable=trainable)
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    assert bool(names) == trainable and all(".lora_" in n for n in names) and not model.training


def test_the_adapters_base(folder, tmp_path):
    add_lora(load_model(folder)[0], rank=2).save_pretrained(tmp_path / "adapter")
    assert adapter_base(str(tmp_path / "adapter")) == folder and adapter_base(folder) is None


@pytest.mark.parametrize("bits, dtype", [(0, torch.float32), (32, torch.float32), (16, torch.bfloat16)])
def test_loads_in_the_precision_asked_for(folder, bits, dtype):
    model, _ = load_model(folder, bits, device="cpu")
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert not model.training and not any(p.requires_grad for p in model.parameters())


@torch.no_grad()
def test_a_shipped_generation_config_does_not_leak(base, words, tmp_path, monkeypatch):  # fault 10
    folder = save(base, words, tmp_path / "m", do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=0.2,
                  typical_p=0.5, no_repeat_ngram_size=1, repetition_penalty=1.3, eos_token_id=[2, 0])
    model, tokenizer = load_model(folder)
    assert model.generation_config.eos_token_id == [2, 0]
    seen, drawn_from, draw = watched(model, monkeypatch), [], sampling.draw
    monkeypatch.setattr(sampling, "draw", lambda p_NV: drawn_from.append(p_NV / p_NV.sum(1, keepdim=True)) or draw(p_NV))
    sampler(model, Chat(tokenizer), temperature=0.7, max_new_tokens=4)([[5, 6, 7], [8, 9]])
    for got, logits in zip(drawn_from, seen[0].logits, strict=True):
        torch.testing.assert_close(got, (logits / 0.7).softmax(-1))


def test_the_adapter_computes_in_the_type_of_the_model(base, words, tmp_path):
    """With bf16 little is kept for the backward pass, and weights and gradients are fp32 all the same."""
    policy = add_lora(load_model(save(base, words, tmp_path / "m"), bits=16)[0], rank=8)
    shake(policy)
    freeze_reference(policy)
    ids = torch.arange(40).reshape(2, 20) % policy.config.vocab_size

    def hidden_and_bytes():
        kept = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.update({t.untyped_storage()._cdata: t}) or t, lambda t: t):
            hidden = policy.get_base_model().base_model(input_ids=ids).last_hidden_state
        parameters = {p.untyped_storage()._cdata for p in policy.parameters()}
        return hidden, sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in parameters)

    hidden, ours = hidden_and_bytes()
    hidden.float().sum().backward()
    trained = [p for p in policy.parameters() if p.requires_grad]
    assert hidden.dtype == torch.bfloat16 and all(p.dtype == p.grad.dtype == torch.float32 for p in trained)
    for layer in policy.modules():
        if hasattr(layer, "cast_input_dtype_enabled"):
            layer.cast_input_dtype_enabled = True
    theirs, peft = hidden_and_bytes()
    assert ours < 0.8 * peft
    torch.testing.assert_close(hidden, theirs, atol=0.1, rtol=0.05)
    with reference(policy):  # an adapter that was added later, too
        assert hidden_and_bytes()[0].dtype == torch.bfloat16


@pytest.mark.parametrize("field, value", [("final_logit_softcapping", 30.0), ("logit_scale", 0.5), ("logits_scaling", 8.0)])
def test_a_model_that_rescales_its_logits_is_refused(base, words, tmp_path, field, value):
    setattr(base.config, field, value)
    with pytest.raises(ValueError, match=field):
        load_model(save(base, words, tmp_path / "m"))


def test_what_cannot_be_loaded_says_so(base, words, folder, tmp_path):
    with pytest.raises(OSError, match="no model"):
        load_model(str(tmp_path))
    with pytest.raises(OSError, match="no adapter"):
        load_adapter(base, str(tmp_path))
    with pytest.raises(ValueError, match="bits"):
        load_model(folder, bits=8)
    config = tmp_path / "base" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": None}))
    (tmp_path / "base" / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        load_model(folder)
    with pytest.raises(ValueError, match="optimizer"):
        make_optimizer(base, 1e-3, "sgd")


def test_the_optimizer_holds_the_adapter_alone(policy):
    [group] = make_optimizer(policy, 1e-3).param_groups
    assert {id(p) for p in group["params"]} == {id(p) for p in policy.parameters() if p.requires_grad}
    assert group["weight_decay"] == 0 and group["lr"] == 1e-3


# 4 bits


@needs_bitsandbytes
def test_four_bits_train(words, tmp_path):  # fault 25
    base = tiny_qwen3(len(words), hidden_size=128, head_dim=32)
    model, _ = load_model(save(base, words, tmp_path / "m"), bits=4, device="cpu")
    kinds = {n: p.dtype for n, p in model.named_parameters()}
    assert kinds["model.embed_tokens.weight"] == kinds["model.norm.weight"] == torch.bfloat16
    assert set(kinds.values()) == {torch.bfloat16, torch.uint8} and not any(p.requires_grad for p in model.parameters())
    assert model.model.layers[0].mlp.up_proj.weight.quant_state.nested
    with torch.no_grad():
        near, exact = scores(model)[0], scores(base)[0]
    mask = exact != 0
    assert torch.corrcoef(torch.stack([near[mask], exact[mask]]))[0, 1] > 0.8
    lora = add_lora(model, rank=4)
    assert {n: p.dtype for n, p in model.named_parameters() if "lora" not in n} \
        == {n.replace("proj.", "proj.base_layer."): kind for n, kind in kinds.items()}
    optimizer = make_optimizer(lora, 1e-3, "paged_adamw_8bit")
    before = [p.detach().clone() for p in lora.parameters() if not p.requires_grad]
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = -scores(lora)[0].sum() / 30
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and all(p.dtype == torch.float32 for p in lora.parameters() if p.requires_grad)
    assert all(torch.equal(a, b) for a, b in zip(before, [p for p in lora.parameters() if not p.requires_grad]))


# The real vocabulary and a real model


@torch.no_grad()
def test_the_real_vocabulary(qwen3_model, qwen3):
    chat = Chat(qwen3)
    torch.manual_seed(0)
    [t] = rollout(sampler(qwen3_model, chat, max_new_tokens=5), chat, [FakeEnv()], [Request("wait win")], max_turns=3)
    ids, mask = pad(t.rows, chat.pad_id, "cpu")
    logp = token_logps(qwen3_model, ids, mask)[0]
    row = t.rows[0]
    full = full_pass(qwen3_model, torch.tensor(row.ids))
    got = [(logp[0, t].item(), full[t - 1, i].item()) for t, (i, m) in enumerate(zip(row.ids, row.mask)) if m]
    assert got and all(a == pytest.approx(b, abs=1e-4) for a, b in got)


@torch.no_grad()
def test_smollm2_log_probs(smollm2):
    model, tokenizer = load_model(smollm2, bits=32)
    chat = Chat(tokenizer)
    prompt, answer = chat.prompt([("user", "What is the capital of France?")]), tokenizer(" Paris.<|im_end|>")["input_ids"]
    ids, mask = torch.tensor([prompt + answer]), torch.tensor([[0] * len(prompt) + [1] * len(answer)])
    logp, _ = token_logps(model, ids, mask)
    full = full_pass(model, ids[0])
    want = [full[len(prompt) + t - 1, i].item() for t, i in enumerate(answer)]
    assert logp[0, len(prompt):].tolist() == pytest.approx(want, abs=1e-4)
