"""The small model of the WebShop slice: two layers and a word tokenizer (rl/tiny.py's shape), trained on gold play of `grocery`.

    python results/webshop/small_model.py DATA OUT [STEPS]      # DATA: as --env-options data=DATA
"""
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent.parent.parent)]
from envs import make_env, select_tasks
from rl.chat import Chat
from rl.tiny import SHAPE, texts_of, word_tokenizer
from rl.warmstart import play, supervise


def main(data, out, steps=200):
    from transformers import Qwen3Config, Qwen3ForCausalLM
    env, tasks = make_env("webshop", {"data": data}), select_tasks("webshop", "train", ["grocery"], {"data": data})
    tokenizer = word_tokenizer(texts_of(env, tasks, 0))
    chat = Chat(tokenizer)
    rows = [row for t in play(lambda: env, chat, tasks, "gold", seed=0, max_turns=6) for row in t.rows]
    print(f"{len(tasks)} tasks, {len(tokenizer)} words, {sum(len(row.ids) for row in rows) / len(rows):.0f} tokens a row", flush=True)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
                                         pad_token_id=tokenizer.pad_token_id, bos_token_id=None, **SHAPE))
    supervise(model, rows, chat.pad_id, steps=int(steps), batch=8, lr=3e-3, seed=0,
              progress=lambda step, loss: print(f"step {step} loss {loss:.3f}", flush=True) if step % 20 == 0 else None)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"{out}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    main(*sys.argv[1:])
