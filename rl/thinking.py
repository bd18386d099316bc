"""Thinking that ends: what a chat template writes between a thought and the answer, and `--thinking-budget`.

    budget = Budget(chat, tokens=800, max_new_tokens=1024)      # raises BadInput where it cannot work
    force = budget.start(len(prompts), device)                  # a logits processor for one call of `generate`; before any draw
    budget.mark(actions)                                        # gives each its `mask`, 0 where a token was forced

After so many tokens of thinking in an answer its end is written into the sample, for Qwen3 "\\n</think>\\n\\n", and the answer goes
on within --max-new-tokens. The policy did not choose these tokens: nothing is trained on them, and no length counts them. What comes
later is sampled, and scored, behind them.
"""
import torch

from envs import BadInput


def closing_ids(chat) -> list[int]:
    """What the template writes between a thought and the answer; "\\n</think>\\n\\n" where it shows no thought."""
    rendered = chat.render((("user", "."), ("assistant", "\ue001</think>\ue002")))
    text = rendered.partition("\ue001")[2].partition("\ue002")[0]
    return chat.tokenizer(text if text.count("</think>") == 1 else "\n</think>\n\n", add_special_tokens=False)["input_ids"]


class Budget:
    """tokens: of thinking in one answer, those of a second thought included. Raises BadInput where it leaves no room for an answer."""

    def __init__(self, chat, tokens: int, max_new_tokens: int):
        if chat.think_end is None:
            raise BadInput("this model's tokenizer has no </think>: leave out --thinking-budget")
        self.closing, self.tokens = closing_ids(chat), tokens
        self.begin, self.end, self.opened = chat.think_begin, chat.think_end, bool(chat.opened)
        if tokens + len(self.closing) >= max_new_tokens:
            raise BadInput(f"--thinking-budget {tokens} and the {len(self.closing)} tokens that end thinking leave no room for an "
                           f"answer in --max-new-tokens {max_new_tokens}")

    def start(self, rows: int, device):
        self.closing_K = torch.tensor(self.closing, device=device)
        self.thinking_N = torch.full((rows,), self.opened, device=device)
        self.spent_N = torch.zeros(rows, dtype=torch.long, device=device)  # tokens of thinking so far
        self.place_N = torch.full((rows,), -1, device=device)  # of the next token in the closing, or -1
        self.own = []  # [N] for each new token: did the policy choose it?
        return self.force

    def force(self, ids_NT, scores_NV):
        """Where the end of thinking is due, its next token becomes the only one. ids_NT: prompts and new tokens so far."""
        if self.own:
            last_N = ids_NT[:, -1]
            self.thinking_N &= last_N != self.end
            self.spent_N += self.thinking_N
            self.thinking_N |= last_N == (-1 if self.begin is None else self.begin)
            self.place_N += self.place_N >= 0
            self.place_N[self.place_N == len(self.closing)] = -1
        self.place_N[(self.place_N < 0) & self.thinking_N & (self.spent_N >= self.tokens)] = 0
        forced_N = self.place_N >= 0
        self.own.append(~forced_N)
        next_N1 = self.closing_K[self.place_N.clamp(min=0)][:, None]
        only_NV = scores_NV.masked_fill(forced_N[:, None], -1e9)
        return only_NV.scatter_(1, next_N1, only_NV.gather(1, next_N1).masked_fill(forced_N[:, None], 0.0))

    def mark(self, actions):
        for action, own_T in zip(actions, torch.stack(self.own, 1).long().tolist()):
            action.mask = own_T[:len(action)]
            if action.entropies:  # those of forced tokens are no choices
                action.entropies = [entropy for entropy, own in zip(action.entropies, action.mask) if own]
