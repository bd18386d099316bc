"""rl/trial.py: a model that is computed otherwise than this code computes it loses its cache or is refused."""
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Gemma3Config

from rl import cache
from rl.chat import Chat
from rl.model import add_lora
from rl.policy import tried_chat
from rl.tiny import word_tokenizer
from rl.trial import try_model

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
         "head_dim": 16, "max_position_embeddings": 256, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None,
         "initializer_range": 0.3}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "head_dim": 8,
          "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2,
          "moe_intermediate_size": 16}


@pytest.fixture(scope="module")
def names():
    return word_tokenizer([" ".join(f"w{n}" for n in range(180))])


def make(kind, names, leave_out=(), **more):
    """A small random model with more rows in its vocabulary than its tokenizer has tokens."""
    shape = {key: value for key, value in SHAPE.items() if key not in leave_out} | {"vocab_size": len(names) + 16} | more
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape)).eval().requires_grad_(False)


RIGHT = {"qwen3": {}, "llama": {}, "gemma2": {"final_logit_softcapping": None, "sliding_window": 8},
         "gemma3_text": {"sliding_window": 8}, "mistral": {"sliding_window": 8}, "deepseek_v3": LATENT, "gpt_neox": {},
         "mixtral": {"num_local_experts": 4},
         "qwen3_5_text": {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
                          "linear_value_head_dim": 8, "num_hidden_layers": 4}}


@pytest.mark.parametrize("kind", RIGHT)
def test_these_are_computed_right(names, kind):  # docs/faults.md, 28
    model = make(kind, names, **RIGHT[kind])
    assert try_model(model, Chat(names), 64)
    assert try_model(add_lora(model, rank=2), Chat(names), 64)


@pytest.mark.parametrize("kind, more, said", [
    ("gemma2", {"final_logit_softcapping": 2.0}, "output layer"), ("cohere", {"logit_scale": 0.1}, "output layer"),
    ("granite", {"logits_scaling": 8.0}, "output layer"), ("minicpm3", {}, "output layer"),
    ("mpt", {"d_model": 32, "n_heads": 2, "n_layers": 2}, "left padding"), ("rwkv", {}, "left padding")])
def test_what_is_computed_otherwise_is_refused(names, kind, more, said):  # docs/faults.md, 28
    """Soft caps and scales of the logits under three names, a scaled output, ALiBi that counts pads, a state that reads pads."""
    with pytest.raises(ValueError, match=f"{said}.* nats a token"):
        try_model(make(kind, names, **more), Chat(names), 64)


def test_a_model_that_is_its_own_base_model_is_refused_in_one_line(names):  # docs/faults.md, 28
    model = make("qwen3", names)
    type(model).base_model_prefix, before = "nothing", type(model).base_model_prefix  # so that `base_model` is the LM itself
    try:
        with pytest.raises(ValueError, match="cannot be run here") as caught:
            try_model(model, Chat(names), 64)
        assert "\n" not in str(caught.value)
    finally:
        type(model).base_model_prefix = before


def composite(names, **text):
    """The language part stands inside of the configuration, its sliding window with it."""
    torch.manual_seed(0)
    config = Gemma3Config(vocab_size=len(names) + 16, text_config={**SHAPE, "vocab_size": len(names) + 16, **text}, vision_config={
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8})
    return AutoModelForImageTextToText.from_config(config).eval().requires_grad_(False)


def test_a_composite_models_sliding_window_costs_it_its_cache(names, monkeypatch, capsys):  # docs/faults.md, 28
    model = composite(names, sliding_window=8)
    model.generation_config.eos_token_id = 2
    chat = tried_chat(model, names, False, 64)
    said = capsys.readouterr().err
    assert not chat.keep_cache and "every prompt is encoded anew" in said


def test_the_adapter_of_a_composite_model_is_on_its_language_part(names):  # docs/faults.md, 28
    trained = [name for name, p in add_lora(composite(names), rank=2).named_parameters() if p.requires_grad]
    assert trained and all("language_model" in name for name in trained), trained


def test_a_cache_that_is_wrong_is_not_kept(names, monkeypatch, capsys):  # docs/faults.md, 28
    """As in releases whose pack moved keys and not values."""
    model, plain = make("llama", names), cache.pack

    def pack(kept, real_NP):
        for layer in kept.layers:
            layer.values = layer.values.roll(1, dims=2)
        return plain(kept, real_NP)

    monkeypatch.setattr(cache, "pack", pack)
    assert not try_model(model, Chat(names), 64)
    model.generation_config.eos_token_id = 2
    assert not tried_chat(model, names, False, 64).keep_cache
    assert "every prompt is encoded anew" in capsys.readouterr().err


def test_the_trial_leaves_the_random_stream_and_the_mode_alone(names):
    model = make("qwen3", names).train()
    torch.manual_seed(3)
    want = torch.rand(3)
    torch.manual_seed(3)
    try_model(model, Chat(names), 64)
    assert torch.equal(torch.rand(3), want) and model.training
