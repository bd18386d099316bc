"""examples/: our losses equal TRL's and verl's own, episodes with hints play in TRL's loop, an adapter of ours is a PEFT
adapter, an environment of one's own trains.

Tests that need TRL or verl (examples/requirements.txt) skip without it.
"""
import importlib
import os
import re
import subprocess
import sys

import pytest
import torch

import grpo
from conftest import ROOT, shake
from envs import Env
from envs.keydoor import KeyDoor
from rl import tiny
from rl.chat import Chat
from rl.logs import read
from rl.model import add_lora, load_model
from rl.rollout import Request, rollout
from rl.sampling import sampler
from rl.tiny import SHIPPED

FILES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name != "minimal.py")  # test_minimal.py
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


def needs(package, module):
    """The example, or a skip that says what is missing."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        pytest.skip(f"{package} needs the package {error.name!r} (examples/requirements.txt)")
    return importlib.import_module(f"examples.{package}_loss")


@pytest.fixture(scope="module")
def trl_loss():
    return needs("trl", "trl")


@pytest.fixture(scope="module")
def verl_loss():
    """Also imports ray, as verl does: that import alone is what it takes, ray is never started."""
    return needs("verl", "verl.trainer.ppo.core_algos")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_example_is_short_and_says_how_to_run_it(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 90 and max(map(len, text.splitlines())) <= 125
    assert re.search(rf"^    .*python .*examples\.{path.stem}\b|^    VERL.*examples\.{path.stem}", text, re.MULTILINE)


def gradient(loss, leaf):
    leaf.grad = None
    loss.backward()
    return loss.item(), leaf.grad.clone()


# TRL

TRL_KINDS = {"grpo": {"loss_type": "grpo", "epsilon_high": 0.2}, "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
             "grpo+kl": {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False},
             "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}}


def trl_trainer(cls, tmp_path, **options):
    from datasets import Dataset
    from trl import GRPOConfig

    how = {"loss": options.pop("loss")} if "loss" in options else {}
    config = {"output_dir": str(tmp_path), "num_generations": 2, "per_device_train_batch_size": 4, "report_to": "none",
              "gradient_accumulation_steps": 3, "bf16": False, "activation_checkpointing": False}
    made = cls(model=str(SHIPPED), reward_funcs=lambda completions, **_: [0.0] * len(completions),
               args=GRPOConfig(**config | options), train_dataset=Dataset.from_list([{"prompt": "a"}]), **how)
    made.model.train()
    return made


def trl_micro_batches(trainer, tool_mask, micro_batches=3, B=4, P=5, T=9):
    """Ragged rows with tool results inside, one all of tool results; old log-probs inside and outside of the clips."""
    g = torch.Generator().manual_seed(0)
    made = []
    for _ in range(micro_batches):
        lengths = torch.randint(3, T + 1, (B, 1), generator=g)
        inputs = {"prompt_ids": torch.randint(4, 60, (B, P), generator=g), "prompt_mask": torch.ones(B, P).long(),
                  "completion_ids": torch.randint(4, 60, (B, T), generator=g),
                  "completion_mask": (torch.arange(T) < lengths).long(), "advantages": torch.randn(B, generator=g)}
        inputs["prompt_mask"][0, :2] = 0
        if tool_mask:
            inputs["tool_mask"] = (torch.rand(B, T, generator=g) < 0.6).long()
            inputs["tool_mask"][1] = 0
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with torch.no_grad():
            logp = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attention, T)[0]
        scale = torch.tensor([0.4, 0.4, 0.2, 1e-4])[:, None]
        inputs["old_per_token_logps"] = logp + scale * torch.randn(B, T, generator=g)
        inputs["ref_per_token_logps"] = logp + 0.3 * torch.randn(B, T, generator=g)
        made.append(inputs)
    total = sum((m["completion_mask"] * m.get("tool_mask", 1)).sum() for m in made)
    return [{**m, "num_items_in_batch": total} for m in made]


def trl_sum(trainer, micro_batches):
    """The loss and the gradient of one optimizer step, as accelerate adds them up."""
    trainer.current_gradient_accumulation_steps = len(micro_batches)
    trainer.model.zero_grad()
    value = 0.0
    for inputs in micro_batches:
        share = trainer._compute_loss(trainer.model, inputs)
        share.backward()
        value += share.item()
    return value, torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("tool_mask", [False, True], ids=["plain", "tool_mask"])
@pytest.mark.parametrize("kind", TRL_KINDS)
def test_trl_loss_equals_trls_own(trl_loss, tmp_path, kind, tool_mask):
    from trl import GRPOTrainer

    theirs = trl_trainer(GRPOTrainer, tmp_path, **TRL_KINDS[kind])
    ours = trl_trainer(trl_loss.LossTrainer, tmp_path, **TRL_KINDS[kind], loss=kind.partition("+")[0])
    batch = trl_micro_batches(theirs, tool_mask)
    their_value, their_gradient = trl_sum(theirs, batch)
    our_value, our_gradient = trl_sum(ours, batch)
    apart = (our_gradient - their_gradient).abs().max().item()
    print(f"TRL {kind} tool_mask={tool_mask}: value {their_value:.6f}, apart {abs(our_value - their_value):.1e}; "
          f"gradient up to {their_gradient.abs().max():.3f}, apart {apart:.1e}")
    assert abs(our_value - their_value) < 1e-6 and abs(their_value) > 1e-3
    assert apart < 1e-5 * their_gradient.abs().max()


def test_trl_dapo_shares_out_the_tokens_of_a_generation(trl_loss, tmp_path):
    """Note 2 of trl_loss.py: with two optimizer steps per generation, both steps get half of its tokens as normaliser."""
    from trl import GRPOTrainer

    options = {"loss_type": "dapo", "epsilon_high": 0.28, "steps_per_generation": 6}
    theirs = trl_trainer(GRPOTrainer, tmp_path, **options)
    ours = trl_trainer(trl_loss.LossTrainer, tmp_path, **options, loss="dapo")
    batch = trl_micro_batches(theirs, tool_mask=True, micro_batches=6)
    for part in (batch[:3], batch[3:]):
        their_value, our_value = trl_sum(theirs, part)[0], trl_sum(ours, part)[0]
        own = sum((m["completion_mask"] * m["tool_mask"]).sum() for m in part)
        assert our_value == pytest.approx(their_value, abs=1e-6)
        assert own != part[0]["num_items_in_batch"] / 2  # so the paper's normaliser would be another one


@pytest.mark.parametrize("options, says", [
    ({"loss": "ppo"}, "must be grpo, dapo or gspo"), ({"loss": "dapo", "beta": 0.1}, "only grpo has a KL term"),
    ({"loss": "grpo", "epsilon_high": 0.28}, "one clip range"), ({"loss": "grpo", "delta": 1.5}, "switch off .*delta"),
    ({"loss": "gspo", "entropy_coef": 0.1}, "entropy_coef"), ({"loss": "grpo", "beta": 0.1}, "use_bias_correction_kl")])
def test_trl_loss_refuses_what_it_would_leave_out(trl_loss, tmp_path, options, says):
    with pytest.raises(ValueError, match=says):
        trl_trainer(trl_loss.LossTrainer, tmp_path, **options)


def test_trl_trains_two_steps_as_with_its_own_loss(trl_loss, tmp_path):
    from trl import GRPOTrainer

    theirs = trl_loss.main(GRPOTrainer, loss_type="grpo", output_dir=str(tmp_path / "theirs"))
    ours = trl_loss.main(output_dir=str(tmp_path / "ours"))
    start = load_model(str(SHIPPED))[0].state_dict()
    moved, apart = 0.0, 0.0
    for (name, a), b in zip(ours.model.state_dict().items(), theirs.model.state_dict().values()):
        moved, apart = max(moved, (a - start[name]).abs().max().item()), max(apart, (a - b).abs().max().item())
    print(f"weights after two steps: moved by up to {moved:.1e}, apart {apart:.1e}")
    assert ours.state.global_step == 2 and moved > 1e-4 and apart < 1e-2 * moved


# TRL with hints

@pytest.fixture(scope="module")
def enriched(trl_loss, tmp_path_factory):
    """A training of two steps in TRL, and of each (step, schedule, [trajectory, ...], what TRL got)."""
    from enrich import Schedule
    from examples import trl_enriched

    seen, used, plain, wrap = [], [], trl_enriched.enriched_rollouts, Schedule.wrap

    def recorded(*args, **how):
        play = plain(*args, **how)

        def record(tasks, trainer):
            out = play(tasks, trainer)
            seen.append((trainer.state.global_step + 1, used[-1], play.played, out))
            return out
        return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl_enriched, "enriched_rollouts", recorded)
        patch.setattr(Schedule, "wrap", lambda self, envs: (used.append(self), wrap(self, envs))[1])
        trainer = trl_enriched.main(Schedule("hybrid", early=(1, 1), late=(2, 3)), output_dir=str(tmp_path_factory.mktemp("trl")))
    return trainer, seen


def test_the_schedule_follows_trls_steps(enriched):
    trainer, seen = enriched
    assert [(step, own.step) for step, own, *_ in seen] == [(1, 1), (2, 2)] and trainer.state.global_step == 2
    assert all(own.total_steps == 2 for _, own, *_ in seen)
    assert max(p.abs().max() for name, p in trainer.model.named_parameters() if "lora_B" in name) > 0  # it has learned


def test_hints_appear_when_the_schedule_says_so(enriched):
    _, seen = enriched
    words = {1: "Hint: ", 2: "stages are done"}
    shown = {1: 0, 2: 0}
    for step, schedule, played, out in seen:
        for trajectory in played:
            assert trajectory.enriched == schedule.enriched(trajectory.task, 0)
            for number, turn in enumerate(trajectory.turns, 1):
                due = trajectory.enriched and schedule.kind(number) is not None
                assert (turn.hint is not None) == due
                assert not due or words[step] in turn.hint
                shown[step] += due
        assert {t.enriched for t in played} == {True, False}, "another seed: the coin fell on one side only"
    assert shown[1] > 0 and shown[2] > 0


def test_trl_trains_on_sampled_tokens_alone(enriched):
    _, seen = enriched
    for _, _, played, out in seen:
        for trajectory, prompt, completion, mask, logps in zip(
                played, out["prompt_ids"], out["completion_ids"], out["env_mask"], out["logprobs"]):
            sampled = [i for turn in trajectory.turns for i in turn.action_ids]
            assert [i for i, own in zip(completion, mask) if own] == sampled
            assert prompt == trajectory.turns[0].prompt_ids and prompt + completion == trajectory.rows[0].ids
            assert all((logp < 0) <= own for logp, own in zip(logps, mask))
        assert out["outcome"] == [t.reward for t in played]


def test_a_broken_episode_has_no_reward_in_trl(trl_loss, words):
    from types import SimpleNamespace

    from accelerate import Accelerator
    from conftest import FakeEnv, tiny_qwen3
    from enrich import Schedule
    from examples.trl_enriched import enriched_rollouts

    model = tiny_qwen3(len(words), words.eos_token_id, words.pad_token_id)
    trainer = SimpleNamespace(state=SimpleNamespace(global_step=0, max_steps=1), model=model, model_wrapped=model,
                              accelerator=Accelerator(cpu=True), temperature=1.0)
    play = enriched_rollouts(FakeEnv, Schedule(), Chat(words), max_new_tokens=3, num_envs=4)
    out = play(["wait win", "break", "break-reset", "lose"], trainer)
    assert out["outcome"] == [1.0, None, None, 0.0]
    assert sum(out["env_mask"][2]) == 0 and all(map(len, out["completion_ids"])) and all(map(len, out["prompt_ids"]))


# verl

def verl_batch(B=12, T=9, wide=0.3):
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(B, T, generator=g) < 0.7
    mask[:, 1], mask[::3, 5:] = True, False
    logp = (-3 * torch.rand(B, T, generator=g, dtype=torch.float64)).requires_grad_()
    scale = torch.tensor([wide, wide, wide / 2, 1e-4], dtype=torch.float64).repeat(B // 4)[:, None]
    old = logp.detach() + scale * torch.randn(B, T, generator=g, dtype=torch.float64)
    advantages = torch.randn(B, 1, generator=g, dtype=torch.float64) * mask  # as verl's "grpo" makes them
    return {"old_log_prob": old, "log_prob": logp, "advantages": advantages, "response_mask": mask}


def verl_config(**more):
    from verl.workers.config import ActorConfig
    return ActorConfig(strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=4, **more)


VERL_KINDS = {"scaffold_grpo": ("vanilla", "seq-mean-token-mean", {}), "scaffold_dapo": ("vanilla", "token-mean",
              {"clip_ratio_high": 0.28}), "scaffold_gspo": ("gspo", "seq-mean-token-mean",
              {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4})}


@pytest.mark.parametrize("whole", [False, True], ids=["one batch", "three micro-batches of two processes"])
@pytest.mark.parametrize("name", VERL_KINDS)
def test_verl_loss_equals_verls_own(verl_loss, name, whole):
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    own, aggregation, options = VERL_KINDS[name]
    batch, config = verl_batch(), verl_config(**options)
    parts = [slice(0, 12)]
    if whole:
        config.global_batch_info.update(dp_size=2, batch_num_tokens=97, global_batch_size=30, loss_scale_factor=None)
        parts = [slice(0, 3), slice(3, 8), slice(8, 12)]

    def total(kind):
        function = get_policy_loss_fn(kind)
        return gradient(sum(function(**{key: value[part] for key, value in batch.items()}, loss_agg_mode=aggregation,
                                     config=config)[0] for part in parts), batch["log_prob"])

    (their_value, their_gradient), (our_value, our_gradient) = total(own), total(name)
    apart = (our_gradient - their_gradient).abs().max().item()
    print(f"verl {name} {'whole' if whole else 'alone'}: value {their_value:.6f}, apart {abs(our_value - their_value):.1e}; "
          f"gradient up to {their_gradient.abs().max():.3f}, apart {apart:.1e}")
    assert abs(our_value - their_value) < 1e-7 and apart < 1e-7 and their_gradient.abs().max() > 1e-3


@pytest.mark.parametrize("name", VERL_KINDS)
def test_verls_rollout_weights_weigh_the_gradient(verl_loss, name):
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    own, aggregation, options = VERL_KINDS[name]
    batch, config = verl_batch(), verl_config(**options)
    weights = torch.rand(12, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2
    ours, theirs = (gradient(get_policy_loss_fn(kind)(**batch, loss_agg_mode=aggregation, config=config,
                                                      rollout_is_weights=weights)[0], batch["log_prob"])[1]
                    for kind in (name, own))
    assert (ours - theirs).abs().max() < 1e-7


def test_verls_second_clip_is_the_difference(verl_loss):
    """Note 1 of verl_loss.py: an advantage below 0 at a ratio above 3."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    batch = {"old_log_prob": torch.tensor([[-4.0, -4.0]]), "log_prob": torch.tensor([[-2.0, -4.0]], requires_grad=True),
             "advantages": torch.tensor([[-1.0, -1.0]]), "response_mask": torch.tensor([[True, True]])}

    def total(kind, **options):
        return gradient(get_policy_loss_fn(kind)(**batch, loss_agg_mode="token-mean", config=verl_config(**options))[0],
                        batch["log_prob"])

    theirs, ours, without = total("vanilla"), total("scaffold_dapo"), total("vanilla", clip_ratio_c=1e9)
    assert theirs[1][0, 0] == 0 and ours[1][0, 0] > 1
    assert ours[0] == pytest.approx(without[0], abs=1e-6) and torch.allclose(ours[1], without[1])


def test_verl_loss_refuses_what_it_would_get_wrong(verl_loss):
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    batch = verl_batch()
    with pytest.raises(ValueError, match="loss_agg_mode=seq-mean-token-mean"):
        get_policy_loss_fn("scaffold_grpo")(**batch, loss_agg_mode="token-mean", config=verl_config())
    with pytest.raises(ValueError, match="one clip range"):
        get_policy_loss_fn("scaffold_grpo")(**batch, config=verl_config(clip_ratio_high=0.28))
    batch["advantages"] = torch.randn(12, 9)
    with pytest.raises(ValueError, match="adv_estimator=grpo"):
        get_policy_loss_fn("scaffold_dapo")(**batch, config=verl_config())


def test_verl_finds_the_losses_by_its_variable(verl_loss):
    code = "from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as r; print(*r)"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True,
                         env={**os.environ, "VERL_USE_EXTERNAL_MODULES": "examples.verl_loss"}).stdout
    assert set(VERL_KINDS) <= set(out.split())


# An adapter elsewhere

def test_a_merged_adapter_gives_our_greedy_answers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from examples.serve_adapter import ask, merge
    base, tokenizer = load_model(str(SHIPPED))
    model, chat = add_lora(base), Chat(tokenizer)
    shake(model)
    model.save_pretrained(tmp_path / "adapter")
    tasks = KeyDoor.tasks("test", stages=6)[:12]
    requests = [Request(task, n, n) for n, task in enumerate(tasks)]

    def play():
        envs = [KeyDoor(stages=6, practice=True) for _ in tasks]
        return rollout(sampler(model, chat, temperature=0), chat, envs, requests, max_turns=envs[0].max_turns)

    played = play()
    with model.disable_adapter():
        without = play()
    said, plainly = ([turn.action for t in some for turn in t.turns] for some in (played, without))
    assert said != plainly  # the adapter matters

    merge(tmp_path / "adapter", tmp_path / "merged")
    merged, their_tokenizer = (cls.from_pretrained(tmp_path / "merged") for cls in (AutoModelForCausalLM, AutoTokenizer))
    assert not any("lora" in name for name, _ in merged.named_parameters())
    asked = 0
    for trajectory in played:
        messages = [{"role": "system", "content": trajectory.system_prompt},
                    {"role": "user", "content": trajectory.first_observation}]
        for turn in trajectory.turns:
            assert ask(merged, their_tokenizer, messages) == turn.action
            messages += [{"role": "assistant", "content": turn.action}, {"role": "user", "content": turn.observation}]
            asked += 1
    assert asked > 2 * len(tasks)


def test_serve_adapter_runs(tmp_path, capsys):
    from examples.serve_adapter import main
    model = add_lora(load_model(str(SHIPPED))[0])
    model.save_pretrained(tmp_path / "adapter")
    main(str(tmp_path / "adapter"), str(tmp_path / "merged"))
    assert re.search(r"Commands: .*\n.*\n> \w+", capsys.readouterr().out)


# An environment of one's own

def test_my_env_keeps_the_contract():
    from examples.my_env import WORDS, MyEnv
    splits = [MyEnv.tasks(split) for split in ("train", "valid", "test")]
    assert len({task for split in splits for task in split}) == sum(map(len, splits)) == 56
    own = {name for name in vars(MyEnv) if not name.startswith("_")}
    assert own - {"system_prompt", "max_turns"} <= {name for name in vars(Env)}
    env = MyEnv()
    for task in sum(splits, []):
        first, info = env.reset(task=task, seed=3)
        assert (first, info["admissible"]) == (env.reset(task=task, seed=3)[0], env.shown) and env.gold_action() in WORDS
        assert env.gold_action() in env.action_guidance() and env.observation_enrichment() == "3 words are left."
        for _ in range(3):
            _, reward, terminated, truncated, info = env.step(env.gold_action())
        assert (reward, terminated, truncated, info["success"], info["valid"]) == (1.0, True, False, True, True)
        assert env.gold_action() is env.action_guidance() is env.observation_enrichment() is None
        env.reset(task=task, seed=0)
        assert env.step(max(env.left))[1:4] == (0.0, True, False)
        env.reset(task=task, seed=0)
        assert env.step("honeycomb")[4] == {"success": False, "valid": False, "admissible": env.shown}
    assert len({env.reset(task=splits[0][0], seed=seed)[0] for seed in range(20)}) > 1


def test_my_env_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("SCAFFOLD_FUNNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tiny, "RECIPE", {"episodes": 200, "steps": 60, "batch": 8, "lr": 3e-3})
    grpo.main(["--env", "examples.my_env:MyEnv", "--steps", "2", "--tasks-per-step", "4", "--group", "4", "--eval-every",
               "1", "--enrich", "ag-early", "--max-new-tokens", "4", "--eval-episodes", "8",
               "--out", str(tmp_path / "run")])
    rows = read(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 2 and max(row["valid_action_fraction"] for row in rows) > 0
    assert {row["split"] for row in read(tmp_path / "run" / "evaluations.jsonl")} == {"valid", "test"}


def test_enrich_shows_my_env(tmp_path):
    picture = tmp_path / "schedule.png"
    command = [sys.executable, "enrich.py", "--env", "examples.my_env:MyEnv", "--picture", str(picture)]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.search(r"Words: .*\| Words: ", out) and "Hint: " in out and "3 words are left." in out and picture.exists()
