"""rl/model.py: LoRA that leaves the reference alone, loading, saving, 4 bits."""
import importlib.util
import json

import pytest
import torch
from conftest import scores, shake, tiny_qwen3, watched

from rl import sampling
from rl.chat import Chat
from rl.learner import make_optimizer
from rl.model import adapter_base, add_lora, freeze_reference, load_adapter, load_model, reference
from rl.sampling import sampler

needs_bitsandbytes = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="no bitsandbytes")


def save(model, tokenizer, folder, **generation):
    model.generation_config.update(**generation)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def folder(words, tmp_path):
    """A folder that holds the same model as `base`."""
    return save(tiny_qwen3(len(words)), words, tmp_path / "base")


# LoRA and the reference

def test_add_lora(base):  # docs/faults.md, 12, 24
    model = add_lora(base, rank=4)
    config = model.peft_config["default"]
    assert (config.lora_dropout, config.bias, config.lora_alpha) == (0.0, "none", 8)
    assert not any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in model.modules()) and not model.training
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained and all(".lora_" in n for n in trained) and not any("lm_head" in n or "embed" in n for n in trained)
    layers = {n.split(".lora_")[0].rsplit(".", 1)[1] for n in trained}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_scoring_is_the_same_in_training_mode(policy):  # docs/faults.md, 12
    assert torch.equal(scores(policy)[0], scores(policy.train())[0])


def test_the_adapter_follows_its_seed(words):
    a, b, c = (add_lora(tiny_qwen3(len(words)), rank=4, seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(a[k], b[k]) for k in a) and any(not torch.equal(a[k], c[k]) for k in a)


@torch.no_grad()
def test_without_adapter_it_is_the_base_model(words, base):  # docs/faults.md, 24
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


def test_a_frozen_reference_is_the_adapter_at_that_time(policy):  # docs/faults.md, 24
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
def test_a_shipped_generation_config_does_not_leak(base, words, tmp_path, monkeypatch):  # docs/faults.md, 10
    folder = save(base, words, tmp_path / "m", do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=0.2,
                  typical_p=0.5, no_repeat_ngram_size=1, repetition_penalty=1.3, eos_token_id=[2, 0])
    model, tokenizer = load_model(folder)
    assert model.generation_config.eos_token_id == [2, 0]
    seen, drawn_from, draw = watched(model, monkeypatch), [], sampling.draw_tokens
    monkeypatch.setattr(sampling, "draw_tokens",
                        lambda p_NV: drawn_from.append(p_NV / p_NV.sum(1, keepdim=True)) or draw(p_NV))
    sampler(model, Chat(tokenizer), temperature=0.7, max_new_tokens=4)([[5, 6, 7], [8, 9]])
    for got, logits in zip(drawn_from, seen[0].logits, strict=True):
        torch.testing.assert_close(got, (logits / 0.7).softmax(-1))


def test_an_output_layer_that_cannot_be_scored_is_refused(base, words, tmp_path):
    from peft import LoraConfig, get_peft_model
    folder = save(base, words, tmp_path / "m")
    get_peft_model(base, LoraConfig(r=2, target_modules=["lm_head"])).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="output layer"):
        load_adapter(load_model(folder)[0], str(tmp_path / "adapter"))


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


# 4 bits

@needs_bitsandbytes
def test_four_bits_train(words, tmp_path):  # docs/faults.md, 25
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


def tiny_qwen2(vocab):
    """A random Qwen2: its linear layers have biases."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(
            vocab_size=vocab, eos_token_id=2, pad_token_id=0, bos_token_id=None, hidden_size=128, intermediate_size=256,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2))
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.data.normal_(0, 0.2)
    return model.eval().requires_grad_(False)


@needs_bitsandbytes
@pytest.mark.parametrize("make", [tiny_qwen2, lambda vocab: tiny_qwen3(vocab, hidden_size=128, head_dim=32)], ids=["qwen2", "qwen3"])
def test_four_bits_have_a_right_gradient_before_and_after_a_rollout(words, word_chat, tmp_path, make):  # docs/faults.md, 27
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    base = make(len(words))
    model, _ = load_model(save(base, words, tmp_path / "m"), bits=4, device="cpu")
    for name, module in model.named_modules():
        if isinstance(module, Linear4bit):
            base.get_submodule(name).weight.data = dequantize_4bit(module.weight.data, module.weight.quant_state).float()

    def gradient(policy):
        policy.zero_grad()
        scores(policy)[0].sum().backward()
        return torch.cat([p.grad.flatten().float() for p in policy.parameters() if p.requires_grad])

    policies = [add_lora(own, rank=4) for own in (model, base)]
    for policy in policies:
        shake(policy)
    before, exact = map(gradient, policies)
    sampler(policies[0], word_chat, max_new_tokens=4)([word_chat.prompt([("user", "open the door")])] * 2)
    assert torch.equal(gradient(policies[0]), before)
    assert torch.cosine_similarity(before, exact, dim=0) > 0.99


# What a model brings along

def tiny_gpt2(vocab):
    from transformers import GPT2Config, GPT2LMHeadModel
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(vocab_size=vocab, n_embd=32, n_layer=2, n_head=2, n_positions=256, eos_token_id=2,
                                          pad_token_id=0, bos_token_id=None)).eval().requires_grad_(False)


def tiny_llama_with_dropout(vocab):
    """Its attention dropout is a number, not a module."""
    from transformers import LlamaConfig, LlamaForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(
            vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, eos_token_id=2,
            pad_token_id=0, bos_token_id=None, attention_dropout=0.3)).eval().requires_grad_(False)


def tiny_mixtral_with_jitter(vocab):
    """Its router adds noise in training mode."""
    from transformers import MixtralConfig, MixtralForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MixtralForCausalLM(MixtralConfig(
            vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            num_local_experts=4, eos_token_id=2, pad_token_id=0, bos_token_id=None, router_jitter_noise=0.3,
            sliding_window=None)).eval().requires_grad_(False)


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama_with_dropout, tiny_mixtral_with_jitter])
def test_nothing_is_random_in_training_mode(words, tmp_path, make):  # docs/faults.md, 29
    plain = make(len(words))
    assert not torch.equal(scores(plain.train())[0], scores(plain)[0]), "the model has no noise to switch off"
    model, _ = load_model(save(plain.eval(), words, tmp_path / "m"), bits=32, device="cpu")
    policy = add_lora(model, rank=4)
    shake(policy)
    want = scores(policy)[0]
    assert torch.equal(scores(policy.train())[0], want)
    freeze_reference(policy)
    assert torch.equal(scores(policy.train())[0], want)
    with reference(policy):
        assert torch.equal(scores(policy)[0], want)


@pytest.mark.parametrize("change, said", [
    ({"lora_dropout": 0.5}, None), ({"init_lora_weights": "gaussian"}, None), ({"lora_bias": True}, None),
    ({"init_lora_weights": "pissa"}, "changes the base model"), ({"init_lora_weights": "olora"}, "changes the base model"),
    ({"bias": "all"}, "trains biases"), ({"bias": "lora_only"}, "trains biases"), ({"use_dora": True}, "no plain LoRA")])
def test_an_adapter_from_elsewhere_is_right_or_refused(words, tmp_path, change, said):  # docs/faults.md, 30
    from peft import LoraConfig, PeftModel, get_peft_model

    base = tiny_qwen2(len(words))
    folder = save(base, words, tmp_path / "base")
    other = get_peft_model(base, LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | change))
    shake(other)
    for name, p in other.named_parameters():
        if "lora" in name and name.endswith("bias"):
            p.data.normal_(0, 0.2)
    other.save_pretrained(tmp_path / "adapter")
    model, _ = load_model(folder, bits=32, device="cpu")
    plain = scores(model)[0]
    if said:
        with pytest.raises(ValueError, match=said):
            load_adapter(model, str(tmp_path / "adapter"))
        return
    want = scores(PeftModel.from_pretrained(load_model(folder, bits=32, device="cpu")[0], tmp_path / "adapter").eval())[0]
    policy = load_adapter(model, str(tmp_path / "adapter"))
    freeze_reference(policy)
    assert torch.allclose(scores(policy.train())[0], want, atol=1e-5) and not torch.allclose(want, plain, atol=1e-2)
    with reference(policy):
        assert torch.allclose(scores(policy)[0], want, atol=1e-5)
    with policy.disable_adapter():
        assert torch.equal(scores(policy)[0], plain)


def test_biases_of_an_adapter_count_in_every_type(words, tmp_path):  # docs/faults.md, 30
    from peft import LoraConfig, PeftModel, get_peft_model

    base = tiny_qwen2(len(words))
    folder = save(base, words, tmp_path / "base")
    other = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_bias=True))
    for name, p in other.named_parameters():
        if "lora_B" in name and name.endswith("bias"):
            p.data.normal_(0, 0.5)
    other.save_pretrained(tmp_path / "adapter")
    plain, theirs, ours = (load_model(folder, bits=16, device="cpu")[0] for _ in range(3))
    want = scores(PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval())[0]
    assert (want - scores(plain)[0]).abs().max() > 1
    assert torch.allclose(scores(load_adapter(ours, str(tmp_path / "adapter")))[0], want, atol=0.2)


@pytest.mark.parametrize("harm, said", [
    (lambda tensors: tensors.pop(next(iter(tensors))), "1 of its 27 tensors"),
    (lambda tensors: tensors.update({"base_model.model.more.weight": torch.zeros(1)}), "1 of its 29 tensors"),
    (lambda tensors: next(iter(tensors.values())).fill_(torch.nan), "not finite")])
def test_an_adapter_that_does_not_fit_is_refused(policy, folder, tmp_path, harm, said):  # docs/faults.md, 30
    from safetensors.torch import load_file, save_file

    policy.save_pretrained(tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    harm(tensors)
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=said):
        load_adapter(load_model(folder)[0], str(tmp_path / "adapter"))
