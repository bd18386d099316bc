"""A trained adapter outside this project: loaded by plain PEFT, merged into its base model, saved, asked by `generate`.

    python grpo.py --steps 20 --out runs/first
    python -m examples.serve_adapter runs/first/adapter merged      # makes the folder, and asks it about a door
    from examples.serve_adapter import ask, merge                   # needs transformers and peft alone

An adapter of ours is in PEFT's own format. Merged in fp32 it gives our sampler's greedy answers (tests/test_examples.py).
Two things to know:
1. Training with `--bits 16` or `--bits 4` sees a rounded base model; the merge is made on the exact one, and saved in fp32
   unless you say `dtype`. Both round anew, so answers may then differ where two tokens are nearly equally likely.
2. A base model's generation_config.json is copied along, and may ask for top-k or top-p, which the policy was not trained
   under. So sample with temperature 1 and without them, or ask greedily, as here.

The merged folder, served (not run here: it needs a GPU); --generation-config vllm leaves the sampling of note 2 out:

    vllm serve merged --generation-config vllm
"""
import sys


def merge(adapter, folder, dtype="float32"):
    """Adapter folder -> folder of a plain model with its tokenizer."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    model = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype="float32")
    base = model.peft_config["default"].base_model_name_or_path
    model.merge_and_unload().to(getattr(__import__("torch"), dtype)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)


def ask(model, tokenizer, messages, max_new_tokens=32):
    """The greedy answer to a conversation [{"role": ..., "content": ...}, ...] as text."""
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    out_BT = model.generate(**inputs.to(model.device), do_sample=False, max_new_tokens=max_new_tokens)
    return tokenizer.decode(out_BT[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True)


def main(adapter, folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from envs.keydoor import KeyDoor

    merge(adapter, folder)
    model, tokenizer, env = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), KeyDoor()
    observation, _ = env.reset(task=KeyDoor.tasks("test")[0], seed=0)
    messages = [{"role": "system", "content": env.system_prompt}, {"role": "user", "content": observation}]
    print(f"{observation}\n> {ask(model, tokenizer, messages)}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m examples.serve_adapter ADAPTER FOLDER")
    main(*sys.argv[1:])
