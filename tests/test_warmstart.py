"""rl/warmstart.py: scripted play, and supervised steps on it."""
import random

import pytest
import torch
from conftest import SMALL, make_rows
from test_chat import GEMMA, of_family, spaced_bpe

import evaluate
import grpo
from envs import BadInput
from envs.keydoor import KeyDoor
from rl import warmstart
from rl.chat import Chat
from rl.learner import pad, token_logps
from rl.logs import read
from rl.model import add_lora
from rl.policy import carrying_chat


@pytest.fixture(scope="module")
def played_randomly(word_chat):
    return warmstart.play(KeyDoor, word_chat, KeyDoor.tasks("train")[:60], "random", seed=3, max_turns=5)


def test_random_play_is_admissible_and_names_half(played_randomly):
    for t in played_randomly:
        hints = []
        for turn, observation in zip(t.turns, [t.first_observation] + [turn.observation for turn in t.turns]):
            assert turn.valid and turn.stop == "end" and turn.action in observation
            hints.append("Hint: " in observation)
            if hints[-1]:
                assert observation.endswith(f"Hint: {turn.action}.")
        assert len(set(hints)) == 1  # an episode names all of its actions or none
    named = sum("Hint: " in t.first_observation for t in played_randomly)
    assert 18 <= named <= 42 and not all(t.success for t in played_randomly)


@pytest.mark.parametrize("stops", [True, False])
def test_a_scripted_action_ends_as_the_template_ends_a_turn(stops):  # docs/faults.md, 33
    """Gemma's template ends a turn with <end_of_turn>, and its tokenizer's end token is another."""
    tokenizer = spaced_bpe(GEMMA, "<end_of_turn>")
    end_of_turn = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    chat = Chat(tokenizer, end_ids=[end_of_turn] if stops else None)
    [episode] = warmstart.play(KeyDoor, chat, KeyDoor.tasks("train")[:1], "gold", seed=0, max_turns=5)
    assert len(episode.turns) > 1 and all(turn.stop == "end" for turn in episode.turns)
    assert {turn.action_ids[-1] for turn in episode.turns} == {end_of_turn if stops else tokenizer.eos_token_id}
    assert len(episode.rows) == (1 if stops else len(episode.turns))


@pytest.mark.parametrize("name, end", [("llama3", "<|eot_id|>"), ("phi", "<|end|>"), ("qwen2.5", "<|im_end|>"), ("mistral-bytes", "</s>")])
def test_the_end_of_a_turn_is_that_of_the_family(name, end):  # docs/faults.md, 33
    """These tokenizers' own end token is </s>. A model's generation_config says where sampling stops."""
    tokenizer, *_ = of_family(name)
    chat = carrying_chat(tokenizer, False, tokenizer.convert_tokens_to_ids(["</s>", end]))
    [episode] = warmstart.play(KeyDoor, chat, KeyDoor.tasks("train")[:1], "gold", seed=0, max_turns=5)
    assert {turn.action_ids[-1] for turn in episode.turns} == {tokenizer.convert_tokens_to_ids(end)} and len(episode.turns) > 1
    assert len(episode.rows) == 1


@pytest.mark.parametrize("share, count", [(0.0, 0), (1.0, 8)])
def test_the_named_share(word_chat, share, count):
    played = warmstart.play(KeyDoor, word_chat, KeyDoor.tasks("train")[:8], "random", seed=0, max_turns=5, named_share=share)
    assert sum("Hint: " in t.first_observation for t in played) == count


def test_play_depends_on_its_seed_alone(word_chat, played_randomly):
    how = {"make_env": KeyDoor, "chat": word_chat, "tasks": KeyDoor.tasks("train")[:60], "kind": "random", "max_turns": 5}
    assert warmstart.play(**how, seed=3) == played_randomly != warmstart.play(**how, seed=4)


@pytest.mark.parametrize("tokenizer", ["words", "qwen3", "smollm2_tokenizer"], indirect=True)
def test_gold_play_succeeds_and_is_trained_on_to_the_end_token(tokenizer):
    chat = Chat(tokenizer)
    tasks = KeyDoor.tasks("train")[:12]
    env, doable = KeyDoor(), []
    for task in tasks:
        doable.append(env.reset(task=task, seed=0)[1]["doable"])
    played = warmstart.play(KeyDoor, chat, tasks, "gold", seed=0, max_turns=5)
    assert any(doable) and [t.success for t in played if t.info["doable"]] == [True] * sum(doable)
    for t in played:
        assert [i for row in t.rows for i, m in zip(row.ids, row.mask) if m] == [
            i for turn in t.turns for i in [*chat.text_ids(turn.action), tokenizer.eos_token_id]]


def test_play_refuses_what_it_cannot_play(word_chat):
    class Silent(KeyDoor):
        def gold_action(self):
            return None

        def _info(self, valid, success=False):
            return {"success": success, "valid": valid}

    for kind, message in (("gold", "no gold"), ("random", "no admissible"), ("expert", "random or gold")):
        with pytest.raises(BadInput, match=message):
            warmstart.play(Silent, word_chat, KeyDoor.tasks("train")[:2], kind, seed=0, max_turns=5)


class Short(KeyDoor):
    """Its known solution ends before the game does, as some of ScienceWorld's do."""
    def reset(self, **how):
        self.played = 0
        return super().reset(**how)

    def step(self, action):
        done = super().step(action)
        self.played += 1
        return done

    def gold_action(self):
        return None if self.played else super().gold_action()


def test_a_known_solution_that_ends_early_ends_its_episode(word_chat):
    tasks = Short.tasks("train", stages=2)[:3]
    played = warmstart.play(lambda: Short(stages=2), word_chat, tasks, "gold", seed=0, max_turns=5)
    assert [len(t.turns) for t in played] == [1] * 3 and all(t.end != "env_error" for t in played)


@pytest.fixture
def rows(policy):
    return make_rows(policy.config.vocab_size)


def test_supervise_lowers_the_loss_and_moves_the_adapter_alone(policy, played_randomly):
    rows = [row for t in played_randomly for row in t.rows]
    before, losses = {n: p.detach().clone() for n, p in policy.named_parameters()}, []
    last = warmstart.supervise(policy, rows, 0, steps=30, batch=8, lr=1e-2, seed=0, micro_batch_tokens=400,
                               progress=lambda step, loss: losses.append(loss))
    assert len(losses) == 30 and losses[-1] == last < 0.7 * losses[0]
    moved = {n for n, p in policy.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n, p in policy.named_parameters() if p.requires_grad}


def test_supervise_weighs_every_token_alike_however_packed(base, rows):  # docs/faults.md, 6
    results = []
    for budget in (1, 30, 10_000):
        losses = []
        policy = add_lora(base, rank=4)
        warmstart.supervise(policy, rows, 0, steps=2, batch=5, lr=1e-2, seed=0, micro_batch_tokens=budget,
                            progress=lambda step, loss: losses.append(loss))
        base = policy.unload()
        results.append(losses)
    assert results[0] == pytest.approx(results[1], abs=1e-4) and results[1] == pytest.approx(results[2], abs=1e-4)
    base_logp = token_logps(base, *pad(random.Random("supervise 0").sample(rows, 5), 0, "cpu"))[0]
    drawn_tokens = (base_logp != 0).sum()
    assert results[0][0] == pytest.approx(-(base_logp.sum() / drawn_tokens).item(), abs=1e-4)


# As a program does it

@pytest.mark.slow
def test_warm_start_on_gold_paths_teaches_the_way(tmp_path):
    grpo.main([*SMALL, "--out", str(tmp_path / "run"), "--steps", "1", "--warm-start", "gold", "--warm-start-steps", "60",
               "--warm-start-lr", "2e-3"])
    assert read(tmp_path / "run" / "evaluations.jsonl")[0]["success"] >= 0.5  # step 0 on valid tasks


def test_no_steps_is_the_warm_start_alone(tmp_path):
    grpo.main([*SMALL, "--steps", "0", "--warm-start", "gold", "--warm-start-steps", "2", "--out", str(tmp_path / "run")])
    rows = read(tmp_path / "run" / "evaluations.jsonl")
    assert [(row["split"], row["policy"]) for row in rows] == [("valid", "trained"), ("test", "base"), ("test", "trained")]
    assert read(tmp_path / "run" / "metrics.jsonl") == [] and (tmp_path / "run" / "adapter" / "adapter_config.json").exists()
    evaluate.main([str(tmp_path / "run"), "--eval-episodes", "4"])
