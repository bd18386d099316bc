"""GRPO for a text agent on one page: the built-in game, plain Hugging Face `generate`, LoRA, one loop.

    python -m examples.minimal 60 0        # from the repository's root: 60 steps, seed 0; about two minutes of one core

An episode is one growing list of token ids: first prompt, action, observation, action, ... The policy is trained on its
actions alone, so a mask beside the list says which ids it sampled. What rl/ adds to this page stands at its end.
"""
import random
import sys
from types import SimpleNamespace

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, set_seed

from envs.keydoor import KeyDoor
from grpo import group_advantages, grpo_loss
from rl.tiny import tiny


def pad(lists, value, side):
    return pad_sequence([torch.tensor(own) for own in lists], batch_first=True, padding_value=value, padding_side=side)


@torch.no_grad()
def play(model, tokenizer, tasks, seeds, greedy=False):
    """An episode for each task and seed. They are played side by side: one turn of all, then the next turn of all."""
    end_id, pad_id, episodes, turn = tokenizer.eos_token_id, tokenizer.pad_token_id, [], 0
    # The whole distribution is sampled. With top-k or top-p, the log-probs below would not be those of the sampling.
    how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    for task, seed in zip(tasks, seeds):
        env = KeyDoor()
        observation, _ = env.reset(task=task, seed=seed)
        messages = [{"role": "system", "content": env.system_prompt}, {"role": "user", "content": observation}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        # The mask is made while sampling: 1 for each id that the policy sampled, 0 for context.
        episodes.append(SimpleNamespace(env=env, ids=ids, mask=[0] * len(ids), reward=0.0, over=False))
    while active := [e for e in episodes if not e.over]:
        turn += 1
        # Pad on the left: every prompt must end in the last column, where `generate` goes on. The attention mask hides the
        # pads, and `generate` makes the position ids from it: a prompt's first token has position 0 wherever it stands.
        ids_NT = pad([e.ids for e in active], pad_id, "left").to(model.device)
        seen_NT = pad([[1] * len(e.ids) for e in active], 0, "left").to(model.device)
        out_NT = model.generate(input_ids=ids_NT, attention_mask=seen_NT, max_new_tokens=16, eos_token_id=end_id,
                                pad_token_id=pad_id, **how)
        for e, sampled in zip(active, out_NT[:, ids_NT.shape[1]:].tolist()):
            # An action goes up to its first end token. The policy sampled that one too: it is trained on. Then come pads.
            ended = end_id in sampled
            action = sampled[:sampled.index(end_id) + 1] if ended else sampled
            e.ids += action  # the sampled ids themselves: text that is decoded and encoded again can give other ids
            e.mask += [1] * len(action)
            observation, reward, terminated, truncated, _ = e.env.step(tokenizer.decode(action[:-1] if ended else action))
            e.reward += reward
            e.over = terminated or truncated or turn == e.env.max_turns
            if not e.over:
                # Context: what the template writes up to the next action. Its end token comes first, unless it was sampled.
                messages = [{"role": "user", "content": ""}, {"role": "assistant", "content": "ACTION"},
                            {"role": "user", "content": observation}]
                text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
                context = tokenizer(text.partition("ACTION")[2], add_special_tokens=False)["input_ids"][1 if ended else 0:]
                e.ids += context
                e.mask += [0] * len(context)
    return episodes


def token_logprobs(model, ids_BT):
    """Log-prob of each token given those before it, [B, T] in fp32. Column 0 is 0: nothing comes before it."""
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]  # those in column t foretell the token in t + 1
    logp_BT = logits_BTV.float().log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(logp_BT, (1, 0))


def main(steps=60, seed=0, tasks_per_step=16, group=8, num_tests=64):
    # The policy: a frozen model with a LoRA adapter to train. `tiny()` is a folder; the name of an instruct model works too.
    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(tiny())
    base = AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32)
    base.generation_config = GenerationConfig()  # a model may bring one that changes what is sampled
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora).to("cuda" if torch.cuda.is_available() else "cpu").eval()  # eval: no dropout
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0)
    train, test = KeyDoor.tasks("train"), KeyDoor.tasks("test")[::2][:num_tests]
    won = sum(e.reward for e in play(model, tokenizer, test, range(len(test)), greedy=True))  # reward 1: success
    print(f"test success before {won / len(test):.3f}", flush=True)
    for step in range(1, steps + 1):
        # 1. Play. The episodes of a group have the same task and the same seed, so only the sampling differs.
        tasks = [task for task in random.sample(train, tasks_per_step) for _ in range(group)]
        episodes = play(model, tokenizer, tasks, [step] * len(tasks))
        # 2. Advantages: how far does each episode stand out in its group?
        rewards_B = torch.tensor([e.reward for e in episodes])
        advantages_B = group_advantages(rewards_B, torch.arange(len(episodes)) // group).to(model.device)
        # 3. Loss. Pad on the right: no token sees the pads behind it, as attention is causal, and their mask is 0.
        ids_BT = pad([e.ids for e in episodes], tokenizer.pad_token_id, "right").to(model.device)
        mask_BT = pad([e.mask for e in episodes], 0, "right").to(model.device)
        logp_BT = token_logprobs(model, ids_BT)
        old_logp_BT = logp_BT.detach()  # one update per batch: the policy that is trained is the one that sampled
        loss = grpo_loss(logp_BT, old_logp_BT, advantages_B, mask_BT, num_trajectories=len(episodes))
        # 4. Update
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step}/{steps} reward {rewards_B.mean():.3f}", flush=True)
    won = sum(e.reward for e in play(model, tokenizer, test, range(len(test)), greedy=True))
    print(f"test success after {won / len(test):.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

# What rl/ adds to this page, and why:
# 1. Prompts that text cannot forge (chat.py): here an observation that contains "<|im_end|>" would end its turn.
# 2. A kept cache (cache.py): a turn encodes what is new in it. Here it encodes the whole conversation again.
# 3. Rows (rollout.py): a prompt need not extend the one before it (thinking stripped, history cut). Then a new row begins.
# 4. Log-probs only where a token was sampled, in chunks (learner.py): here logits_BTV fills a GPU at a real vocabulary.
# 5. Micro-batches (learner.py): their shares add up to the loss of the batch, and they shrink where memory runs out.
# 6. Several optimizer steps per batch, a KL to a reference (learner.py, model.py): here r = 1, and nothing is clipped.
# 7. Broken environments (envs/guard.py): one that raises or hangs ends its own episode alone. Here it ends the run.
# 8. Runs (runs.py, evaluation.py): logs, success with intervals, and a killed run goes on as if nothing had happened.
