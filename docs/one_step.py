"""docs/one-step.md: one group of two short episodes, from prompt to gradient, with the numbers of a real run.

    python -m docs.one_step        # from the repository's root: plays, learns, fills the page (seconds of one core)

The page's sentences are written by hand; its blocks, "```text NAME", are written by this file. Every number comes from the
functions that `python grpo.py` calls, on the built-in game and model, in fp32 on a CPU.
"""
import math
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import torch

from envs import make_env
from grpo import Options, algorithm
from rl.chat import Chat
from rl.learner import UpdateOptions, add_gradient, make_optimizer, row_logps, score, update
from rl.model import add_lora, load_model
from rl.rollout import Request, messages_of, rollout
from rl.sampling import sampler
from rl.tiny import tiny
from rl.train import Algorithm

PAGE = Path(__file__).with_name("one-step.md")
GAME = {"stages": 2, "commands": 3}
TASK, SEED = "ash/train-0002", 10  # chosen so that the first episode succeeds and the second fails
EPS = Options().eps
LR = 3e-3  # three times the default, so that the second step has ratios outside of the clip range


def run():
    """Play the group and take two optimizer steps on it; returns what the page shows. N = 2 trajectories of one row each."""
    base, tokenizer = load_model(tiny("keydoor"), bits=32, device="cpu")
    model, chat, grpo = add_lora(base), Chat(tokenizer), Algorithm(**algorithm(Options()))
    envs = [make_env("keydoor", GAME) for _ in range(2)]
    torch.manual_seed(SEED)
    batch = rollout(sampler(model, chat, max_new_tokens=8), chat, envs, [Request(TASK, group=0, seed=SEED) for _ in envs],
                    max_turns=envs[0].max_turns, max_new_tokens=8)
    if [t.reward for t in batch] != [1, 0] or any(len(t.rows) != 1 for t in batch):
        raise ValueError("the page needs a success, then a failure, of one row each: choose another TASK or SEED")
    advantages_N = grpo.advantages([t.reward for t in batch], [t.group for t in batch])
    rows, how, optimizer = [t.rows[0] for t in batch], UpdateOptions(chat.pad_id), make_optimizer(model, LR)
    old_logps, steps = row_logps(model, rows, chat.pad_id), []
    for _ in range(2):
        steps.append(look(model, batch, advantages_N, grpo, how))
        steps[-1].metrics = update(model, optimizer, batch, advantages_N, grpo, how)
        for row, logp_T in zip(rows, old_logps):
            row.old_logp = logp_T  # of the policy before the first step: the second step's ratios are to it
    return SimpleNamespace(chat=chat, batch=batch, rows=rows, advantages_N=advantages_N, old_logps=old_logps, steps=steps)


def look(model, batch, advantages_N, grpo, how):
    """What `update` is about to compute on this batch: all of it in one micro-batch, and in two of one row each."""
    items = [(t.rows[0], A, t.length, t.rows[0].old_logp, n) for n, (t, A) in enumerate(zip(batch, advantages_N))]
    of_batch = len(batch), sum(t.length for t in batch)
    trainable, norms = [p for p in model.parameters() if p.requires_grad], []
    for parts in ([items], [items[:1], items[1:]]):
        model.zero_grad()
        micro_batches = [score(model, part, grpo, how, of_batch) for part in parts]
        shares = [grpo.loss(micro_batch) for micro_batch in micro_batches]
        if len(parts) == 1:
            whole, loss = micro_batches[0], shares[0]
            grad_BT, = torch.autograd.grad(loss, whole.logp_BT, retain_graph=True)
        for share in shares:
            add_gradient(share, trainable)
        norms.append(torch.cat([p.grad.flatten() for p in trainable]).norm().item())
    return SimpleNamespace(logp_BT=whole.logp_BT.detach(), ratio_BT=(whole.logp_BT - whole.old_logp_BT).exp().detach(),
                           mask_BT=whole.mask_BT, grad_BT=grad_BT, loss=loss.item(), shares=[s.item() for s in shares],
                           norms=norms)


# The blocks of the page, as lists of lines

def number(x):
    """Four decimals in nine characters; what rounds to 0 has no sign."""
    return f"{round(float(x), 4) + 0.0:9.4f}"


def row_table(got):
    """The rows, token by token; a run of context is one entry, with its text unless it is the prompt of section 1."""
    decode, lines = got.chat.tokenizer.decode, ["episode  position   id  token        mask  sampler  learner"]
    for n, (row, old_logp_T) in enumerate(zip(got.rows, got.old_logps), 1):
        t = 0
        while t < len(row.ids):
            if row.mask[t]:
                logps = number(row.sampled_logp[t]) + number(old_logp_T[t])
                lines.append(f"{n:7}  {t:8} {row.ids[t]:4}  {decode([row.ids[t]]):12} 1 {logps}")
                t += 1
                continue
            end = row.mask.index(1, t)
            text = " ".join(decode([i]) for i in row.ids[t:end]) if t else f"the {end} tokens of the prompt in section 1"
            first, *more = textwrap.wrap(text, 80)
            lines += [f"{n:7}  {f'{t}-{end - 1}':>8}       mask 0: {first}", *(f"{'':32}{line}" for line in more)]
            t = end
    return lines


def loss_table(got):
    """The sampled tokens in both steps: log-probs, ratios, the objective, and the derivative of the loss by the log-prob."""
    one, two = got.steps
    heads = ["log-prob"], ["ratio", "gradient"], ["log-prob", "ratio", "ratio*A", "min", "gradient"]
    lines = [f"{'':28} | step 1{'':11} | step 2",
             "episode  token     " + " |".join("".join(f"{head:>9}" for head in part) for part in heads)]
    for n, (row, A) in enumerate(zip(got.rows, got.advantages_N.tolist())):
        for t in (t for t, own in enumerate(row.mask) if own):
            ratio, grad = two.ratio_BT[n, t].item(), two.grad_BT[n, t].item()
            least = min(ratio * A, min(max(ratio, 1 - EPS), 1 + EPS) * A)
            parts = ([one.logp_BT[n, t]], [one.ratio_BT[n, t], one.grad_BT[n, t]],
                     [two.logp_BT[n, t], ratio, ratio * A, least, grad])
            lines.append(f"{n + 1:7}  {got.chat.tokenizer.decode([row.ids[t]]):10}"
                         + " |".join("".join(map(number, part)) for part in parts) + ("  clipped" if grad == 0 else ""))
    return lines


def blocks(got):
    one, two = got.steps
    roles = [{"role": role, "content": content} for role, content in messages_of(got.batch[0], got.chat, "full")[:2]]
    text = got.chat.tokenizer.apply_chat_template(roles, tokenize=False, add_generation_prompt=True)
    std, context_BT = number(math.sqrt(0.5)).strip(), ~two.mask_BT
    return {
        "prompt": [*text.splitlines(), "", *textwrap.wrap(" ".join(map(str, got.batch[0].turns[0].prompt_ids)), 125)],
        "episodes": [line for n, t in enumerate(got.batch, 1) for line in (
            f"episode {n}: {t.end}, reward {t.reward}, {t.length} sampled tokens",
            *(f"    {line}" for turn in t.turns for line in (f"> {turn.action}", *turn.observation.splitlines())))],
        "rows": row_table(got),
        "advantages": [f"mean = (1 + 0) / 2 = 0.5      std = sqrt(((1 - 0.5)^2 + (0 - 0.5)^2) / (2 - 1)) = {std}", *(
            f"A_{n}  = ({t.reward:.0f} - 0.5) / ({std} + 0.000001) = {number(A).strip()}"
            for n, (t, A) in enumerate(zip(got.batch, got.advantages_N), 1))],
        "tokens": loss_table(got),
        "loss": ["step | mean of min: episode 1, 2 | share, -mean / N: episode 1, 2 | loss", *(
            f"{n:4} |         {number(-2 * a)}{number(-2 * b)} |             {number(a)}{number(b)} |{number(s.loss)}"
            for n, (s, (a, b)) in enumerate(((s, s.shares) for s in got.steps), 1))],
        "gradient": ["step     loss  grad_norm  ratio_max  clip_fraction | largest gradient: sampled  context", *(
            f"{n:4}{number(s.metrics['loss'])}  {number(s.metrics['grad_norm'])}  {number(s.metrics['ratio_max'])}      "
            f"{number(s.metrics['clip_fraction'])} |{number(s.grad_BT[~context_BT].abs().max()):>26}"
            f"{s.grad_BT[context_BT].abs().max().item():>9}" for n, s in enumerate(got.steps, 1))],
        "check": [f"loss of two micro-batches {number(two.shares[0])} +{number(two.shares[1])} ={number(sum(two.shares))}"
                  f"   of one{number(two.loss)}",
                  f"norm of the summed gradients{number(two.norms[1]):>31}   of one{number(two.norms[0])}"]}


def filled(page, blocks):
    """The page with its blocks written anew. Raises KeyError for a block that is not known."""
    return re.sub(r"```text (\S+)\n.*?```", lambda m: "\n".join(
        [f"```text {m[1]}", *(line.rstrip() for line in blocks[m[1]]), "```"]), page, flags=re.DOTALL)


def main():
    PAGE.write_text(filled(PAGE.read_text(), blocks(run())))


if __name__ == "__main__":
    from rl.runs import cli
    cli(main)
