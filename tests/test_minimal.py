"""examples/minimal.py: one page that takes nothing from rl/ but the model's folder, and has its rows, loss and gradient.

The loop runs as it stands, two small steps, and what it did is written down. Then the machinery plays the same actions.
"""
import ast
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoTokenizer

import grpo
from conftest import FakeEnv
from envs import parse_action
from envs.keydoor import KeyDoor
from examples import minimal
from rl.chat import Chat
from rl.learner import UpdateOptions, update
from rl.rollout import Request, rollout
from rl.tiny import tiny
from rl.train import Algorithm

FILE = Path(minimal.__file__)
GROUP = 4
MAY_IMPORT = {"grpo": {"group_advantages", "grpo_loss"}, "envs.keydoor": {"KeyDoor"}, "rl.tiny": {"tiny"}}


class Graded(KeyDoor):
    """The game with up to three turns for everyone: each listed command goes on, and each right one gives a reward."""

    def __init__(self):
        super().__init__(practice=True)

    def step(self, action):
        right = parse_action(action).lower() == self.gold_action()
        observation, _, *rest = super().step(action)
        return observation, float(right), *rest


@pytest.fixture(scope="module", params=[16, 3], ids=["actions that end", "actions that are cut"])
def run(request):
    """The loop's second step, with an adapter that is not zero any more: states, prompts, actions, loss, gradient.

    With 3 tokens an action of three words has no room for its end token, so the chat template must write it.
    """
    seen = SimpleNamespace(max_new_tokens=request.param, adapters=[], plays=[], turns=[], losses=[], gradients=[])

    def with_adapter(base, lora):
        seen.model = model = get_peft_model(base, lora)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.1)
        plain = model.generate

        def generate(**inputs):
            out = plain(**inputs | {"max_new_tokens": request.param, "output_scores": True, "return_dict_in_generate": True})
            seen.turns.append((inputs["input_ids"], inputs["attention_mask"], out))
            return out.sequences

        model.generate = generate
        return model

    def play(model, tokenizer, tasks, seeds, **how):
        seen.turns.clear()
        episodes = plain_play(model, tokenizer, tasks, seeds, **how)
        if not how:  # not greedy: a step of training
            seen.adapters.append(adapter_of(model))
            seen.plays.append((tasks, seeds, episodes, list(seen.turns)))
        return episodes

    def loss(*args, **kwargs):
        value = grpo.grpo_loss(*args, **kwargs)
        seen.losses.append(value.item())
        return value

    class Watched(torch.optim.AdamW):
        def step(self):
            seen.gradients.append(gradient_of(seen.model))
            super().step()

    plain_play = minimal.play
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"get_peft_model": with_adapter, "play": play, "grpo_loss": loss, "KeyDoor": Graded}.items():
            patch.setattr(minimal, name, value)
        patch.setattr(torch.optim, "AdamW", Watched)
        minimal.main(steps=2, seed=0, tasks_per_step=4, group=GROUP, num_tests=4)
    seen.adapters.append(adapter_of(seen.model))
    seen.tasks, seen.seeds, seen.episodes, seen.turns = seen.plays[-1]
    seen.chat = Chat(AutoTokenizer.from_pretrained(tiny()))
    set_peft_model_state_dict(seen.model, seen.adapters[1])
    return seen


def adapter_of(model):
    return {name: value.clone() for name, value in get_peft_model_state_dict(model).items()}


def gradient_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def sampled(run, turn):
    """[(prompt, action up to its first end token, log-probs of the whole vocabulary that each token was drawn from), ...]"""
    ids_NT, seen_NT, out = turn
    for n, (ids, attended) in enumerate(zip(ids_NT, seen_NT.bool())):
        action = out.sequences[n, len(ids):].tolist()
        size = next((i + 1 for i, token in enumerate(action) if token in run.chat.end_ids), len(action))
        logps_TV = torch.stack([scores_NV[n] for scores_NV in out.scores[:size]]).float().log_softmax(-1)
        yield ids[attended].tolist(), action[:size], logps_TV


def machinery(run):
    """The same actions once more, through rl/: its own prompts, rows and masks."""
    turns = iter(run.turns)

    def act(prompts):
        if not prompts:
            return []
        ours, actions, _ = zip(*sampled(run, next(turns)))
        assert prompts == list(ours)
        return [list(action) for action in actions]

    requests = [Request(task, n // GROUP, seed) for n, (task, seed) in enumerate(zip(run.tasks, run.seeds))]
    return rollout(act, run.chat, [Graded() for _ in requests], requests, max_turns=Graded().max_turns)


# The page

def test_it_is_one_page():
    lines = FILE.read_text().splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 125


def test_it_imports_nothing_of_the_machinery_but_loading():
    for node in ast.walk(ast.parse(FILE.read_text())):
        if isinstance(node, ast.Import):
            names = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [(node.module, alias.name) for alias in node.names]
        else:
            assert not (isinstance(node, ast.Name) and node.id in ("__import__", "importlib", "exec", "eval"))
            continue
        for module, name in names:
            top = module.partition(".")[0]
            assert top in sys.stdlib_module_names | {"torch", "transformers", "peft"} or name in MAY_IMPORT.get(module, ())


# What it does

def test_it_trains(run):
    assert len(run.losses) == 2 and all(map(math.isfinite, run.losses))
    for before, now in zip(run.adapters, run.adapters[1:]):
        assert all((now[name] - before[name]).abs().max() > 1e-5 for name in before)
    assert not any(p.requires_grad for name, p in run.model.named_parameters() if "lora" not in name)


def test_a_group_has_one_task_and_one_seed(run):
    for n in range(0, len(run.tasks), GROUP):
        assert len({*zip(run.tasks[n:n + GROUP], run.seeds[n:n + GROUP])}) == 1
    assert len(set(run.tasks)) == len(run.tasks) // GROUP


def test_its_rows_are_those_of_the_machinery(run):
    played = machinery(run)
    assert [[(row.ids, row.mask) for row in t.rows] for t in played] == [[(e.ids, e.mask)] for e in run.episodes]
    assert [t.reward for t in played] == [e.reward for e in run.episodes]
    # The batch has what could go wrong: three turns, rows of several lengths, rewards that differ in a group, cut actions
    assert max(len(t.turns) for t in played) == 3 and len({len(e.ids) for e in run.episodes}) > 1
    assert any(len({t.reward for t in played[n:n + GROUP]}) > 1 for n in range(0, len(played), GROUP))
    assert {turn.stop for t in played for turn in t.turns} == ({"end"} if run.max_new_tokens > 3 else {"end", "length"})


def test_what_was_sampled_is_not_decoded_and_encoded_again(toy, monkeypatch):
    """This tokenizer encodes "ab" as one id, and the policy samples two; its second action has no end token."""
    a, b, end = *toy.convert_tokens_to_ids(["a", "b"]), toy.eos_token_id
    actions, tasks = [[a, b, end], [b, a, b], [a, b, end]], ["wait wait win", "wait lose"]
    ours, theirs = iter(actions), iter(actions)
    model = SimpleNamespace(device="cpu", generate=lambda input_ids, **_: torch.cat(
        [input_ids, torch.tensor([next(ours)] * len(input_ids))], 1))
    monkeypatch.setattr(minimal, "KeyDoor", FakeEnv)
    episodes = minimal.play(model, toy, tasks, [0, 0])
    played = rollout(lambda prompts: prompts and [list(action) for action in [next(theirs)] for _ in prompts], Chat(toy),
                     [FakeEnv(), FakeEnv()], [Request(task) for task in tasks], max_turns=3)
    assert [[(row.ids, row.mask) for row in t.rows] for t in played] == [[(e.ids, e.mask)] for e in episodes]
    assert [sum(e.mask) for e in episodes] == [9, 6]


def test_its_log_probs_are_those_that_the_tokens_were_drawn_from(run):
    """So the padding on the left changes nothing, and the whole distribution was sampled."""
    logps_of = {n: [] for n in range(len(run.episodes))}
    for turn in run.turns:
        going = [n for n in logps_of if len(logps_of[n]) < sum(run.episodes[n].mask)]
        for n, (_, action, logps_TV) in zip(going, sampled(run, turn), strict=True):
            logps_of[n] += logps_TV[range(len(action)), action].tolist()
    for episode, logps in zip(run.episodes, logps_of.values()):
        with torch.no_grad():
            logp_T = minimal.token_logprobs(run.model, torch.tensor([episode.ids]))[0]
        own = torch.tensor(episode.mask, dtype=torch.bool)
        torch.testing.assert_close(logp_T[own], torch.tensor(logps), atol=1e-5, rtol=1e-4)


def test_its_loss_and_gradient_are_those_of_the_machinery(run):
    batch, algorithm, found = machinery(run), Algorithm(**grpo.algorithm(grpo.Options())), []
    optimizer = SimpleNamespace(zero_grad=lambda set_to_none: run.model.zero_grad(),
                                step=lambda: found.append(gradient_of(run.model)))
    advantages_N = grpo.group_advantages(torch.tensor([t.reward for t in batch]), torch.tensor([t.group for t in batch]))
    how = UpdateOptions(run.chat.pad_id, micro_batch_tokens=600)  # several micro-batches
    stats = update(run.model, optimizer, batch, advantages_N, algorithm, how)
    assert stats["loss"] == pytest.approx(run.losses[-1], abs=1e-6)
    for name, gradient in run.gradients[-1].items():
        assert (gradient - found[0][name]).norm() < 1e-5 * gradient.norm(), name
