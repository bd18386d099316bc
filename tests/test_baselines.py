"""baselines/: each rule against a loop, and short runs on the built-in game."""
import inspect
import json
import math
import random
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from conftest import FakePolicy, ended, make_rows, metrics, play, sampled
from peft import load_peft_weights
from test_study import FAKE_PROGRAM

import study
from baselines import loop, opid, skill0, skillrl
from baselines.skills import counted, json_values, parse_skills, text_of, transcript, written
from envs import BadInput, Env
from envs.keydoor import lock_metal
from grpo import grpo_loss
from rl.learner import UpdateOptions, pad, token_logps, update
from rl.logs import append, read
from rl.options import parse
from rl.rollout import Trajectory, Turn, messages_of
from rl.train import Algorithm


def skill(when, action="act"):
    return {"title": action, "principle": action, "when": when}


def episode(task, success, *turns, first="start"):
    """turns: (action, what the environment answered)."""
    return Trajectory(task, 0, 0, False, first_observation=first, success=success, turns=[
        Turn([], [], action, observation, 0.0, True, "end") for action, observation in turns])


def asking(ask, **config):
    """A run whose editor answers as `ask` says."""
    return SimpleNamespace(ask=ask, envs=[Env()], config=SimpleNamespace(editor="model", **{"editor_characters": 10_000} | config))


# OPID

def random_batch(B=4, T=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logp, old, ref, informed = (-torch.rand(4, B, T, generator=generator, dtype=torch.float64) * 2).unbind()
    mask = torch.rand(B, T, generator=generator) > 0.4
    mask[:, -1] = True
    return logp, old, ref, informed, mask, torch.randn(B, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("weight", [0.001, 0.5])
def test_the_skill_term_against_a_loop(weight):
    _, old, _, informed, mask, _ = random_batch()
    informed = torch.where(mask, informed, math.nan).requires_grad_()
    term = opid.skill_term(informed, old.requires_grad_(), mask, weight)
    assert not term.requires_grad  # it is a number for the loss, not a path of the gradient
    for b in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            expected = weight * (informed[b, t].item() - old[b, t].item()) if mask[b, t] else 0.0
            assert term[b, t].item() == pytest.approx(expected)


def test_a_token_that_the_skill_makes_likelier_has_a_higher_advantage():
    one = torch.ones(1, 2)
    torch.testing.assert_close(opid.skill_term(one, 0 * one, one), torch.full((1, 2), 0.001))
    torch.testing.assert_close(opid.skill_term(0 * one, 2 * one, one, weight=0.25), torch.full((1, 2), -0.5))
    assert inspect.signature(opid.skill_term).parameters["weight"].default == 0.001 == opid.Options().skill_weight


@pytest.mark.parametrize("beta", [0.0, 0.01])
def test_opid_is_grpo_with_an_advantage_for_each_token(beta):
    logp, old, ref, informed, mask, group = random_batch()
    term, lengths, N = opid.skill_term(informed, old, mask, 0.5), torch.tensor([9, 4, 7, 5]), 5
    how = {"num_trajectories": N, "lengths_B": lengths, "eps": 0.2, "beta": beta, "ref_logp_BT": ref}
    total = 0.0
    for b in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if mask[b, t]:
                A, ratio = (group[b] + term[b, t]).item(), math.exp(logp[b, t] - old[b, t])
                gap = (ref[b, t] - logp[b, t]).item()
                objective = min(ratio * A, min(max(ratio, 0.8), 1.2) * A) - beta * (math.exp(gap) - gap - 1)
                total -= objective / lengths[b].item() / N
    assert opid.opid_loss(logp, old, group, term, mask, **how).item() == pytest.approx(total)
    assert opid.opid_loss(logp, old, group, 0 * term, mask, **how).item() == pytest.approx(
        grpo_loss(logp, old, group, mask, **how).item())


def test_a_step_has_its_own_skill_or_that_of_the_episode():
    analysis = {"episode": "all", "steps": {1: "one"}}
    assert [opid.skill_at(n, analysis) for n in range(3)] == ["all", "one", "all"] and opid.skill_at(0, None) == ""


@pytest.mark.parametrize("answer, expected", [
    ('```json\n{"episode_skill": " go on ", "step_skills": {"0": "open", "9": "late", "x": "no", "1": ""}}\n```', ("go on", {0: "open"})),
    ('<think>{"episode_skill": "no"}</think>Well: {"a": 1} {"episode_skill": "yes"}', ("yes", {})),
    ('As in {"episode_skill": "..."}:\n{"episode_skill": "yes",}', ("yes", {})), ('<think>{"episode_skill": "no"}', None),
    (json.dumps({"episode_skill": "s", "step_skills": {str(n): f"t{n}" for n in range(8)}}), ("s", {n: f"t{n}" for n in range(5)})),
    ('{"episode_skill": "", "step_skills": {"0": "open"}}', None), ("no JSON", None), ('{"episode_skill": "cut', None)])
def test_an_analysis_as_models_write_it(answer, expected):
    got = opid.parse_analysis(json_values(answer), turns=8 if "t7" in answer else 3)
    assert got == (expected and {"episode": expected[0], "steps": expected[1]})


def test_an_episode_is_analysed_twice_at_most():
    asked = []

    def ask(prompts):
        asked.append(prompts)
        return [("nothing" if t == "b" or len(asked) == 1 else '{"episode_skill": "yes"}') if t != "a" else '{"episode_skill": "at once"}'
                for _, user in prompts for t in "abc" if f"of {t} " in user]

    episodes = [episode(task, task == "a", ("go", "end")) for task in "abc"]
    got = opid.model_analyses(asking(ask), episodes)
    assert [analysis and analysis["episode"] for analysis in got] == ["at once", None, "yes"]
    assert list(map(len, asked)) == [3, 2] and opid.WHAT[True] in asked[0][0][0] and opid.WHAT[False] in asked[0][1][0]


@pytest.mark.parametrize("history", ["full", "window:1"])
def test_hindsight_prompts_hold_the_skill_of_their_step_alone(word_chat, history):
    chat = word_chat
    answers = [ended(chat, text) for text in ("go", "wait", "go key", "stop")]
    trajectory = play(chat, FakePolicy(*answers), "wait wait wait win", history=history)[0]
    analysis = {"episode": "hint : win", "steps": {1: "hint : key", 3: "hint : door"}}
    rows = opid.hindsight_rows(trajectory, analysis, chat, history)
    assert sum(map(sampled, rows), []) == sum(map(sampled, trajectory.rows), [])
    prompts = [chat.tokenizer.decode(row.ids[:row.mask.index(1)]) for row in rows]
    assert len(prompts) == 4  # each its own: the skill of a step is not in the prompt of the next
    for n, (prompt, wanted) in enumerate(zip(prompts, ("win", "key", "win", "door"))):
        assert prompt.count("hint") == 1 and f"hint : {wanted}" in prompt, n


@pytest.mark.parametrize("history", ["full", "window:1"])
def test_skill_terms_of_a_batch_against_single_passes(policy, word_chat, history):
    """The same sampled tokens after h~ and after h, token by token, however they are cut into rows."""
    chat, weight = word_chat, 0.5
    answers = [ended(chat, text) for text in ("go", "wait key", "go", "stop")]
    batch = [play(chat, FakePolicy(*answers), task, history=history)[0] for task in ("wait wait wait win", "wait lose", "lose")]
    analyses = [{"episode": "win", "steps": {2: "key door"}}, None, {"episode": "go", "steps": {}}]
    run = SimpleNamespace(model=policy, chat=chat, config=SimpleNamespace(
        temperature=0.7, micro_batch_tokens=200, history=history, editor="model", skill_weight=weight))
    size, sizes = opid.add_skill_terms(run, batch, analyses), []
    assert all(row.token_advantages is None for row in batch[1].rows)
    for trajectory, analysis in zip(batch, analyses):
        if not analysis:
            continue
        expected = []
        for n, turn in enumerate(trajectory.turns):
            *past, (role, text) = messages_of(replace(trajectory, turns=trajectory.turns[:n]), chat, history)
            informed, own = chat.prompt([*past, (role, f"{text}\n{opid.skill_at(n, analysis)}")]), len(turn.action_ids)
            logps = [token_logps(policy, torch.tensor([i + turn.action_ids]), torch.tensor([[0] * len(i) + [1] * own]), 0.7)[0][0, -own:]
                     for i in (informed, turn.prompt_ids)]
            expected += (weight * (logps[0] - logps[1])).tolist()
        got = [a for row in trajectory.rows for a, own in zip(row.token_advantages, row.mask) if own]
        assert got == pytest.approx(expected, abs=1e-5) and any(abs(a) > 1e-3 for a in got)
        assert all(a == 0 for row in trajectory.rows for a, own in zip(row.token_advantages, row.mask) if not own)
        sizes += map(abs, got)
    assert size == pytest.approx(sum(sizes) / len(sizes), abs=1e-6)


def test_token_advantages_reach_the_loss_however_rows_are_packed(policy):
    """Also those of groups whose rewards are all alike."""
    rows, rng = make_rows(policy.config.vocab_size), random.Random(0)
    for row in rows[1:]:
        row.token_advantages = [rng.uniform(-1, 1) * own for own in row.mask]
    batch = [SimpleNamespace(rows=rows[:2], length=sum(map(sum, (row.mask for row in rows[:2]))))] + [
        SimpleNamespace(rows=[row], length=sum(row.mask)) for row in rows[2:]]
    advantages_N = torch.tensor([0.5, 0.0, 0.0, -1.0, 0.0])
    algorithm = Algorithm(**opid.algorithm(opid.Options(beta=0.0)))

    def gradient(budget):
        optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.0)
        stats = update(policy, optimizer, batch, advantages_N, algorithm, UpdateOptions(0, micro_batch_tokens=budget, max_grad_norm=1e9))
        return torch.cat([p.grad.flatten() for p in policy.parameters() if p.requires_grad]), stats

    packed, stats = gradient(10_000)
    assert stats["learn_tokens"] == sum(sum(row.mask) for row in rows)
    torch.testing.assert_close(gradient(1)[0], packed, atol=1e-6, rtol=1e-4)
    logp = token_logps(policy, *pad(rows, 0, "cpu"))[0]
    objective = 0.0
    for n, t in enumerate(batch):
        for row in t.rows:
            at = next(i for i, one in enumerate(rows) if one is row)
            A_T = torch.tensor([advantages_N[n].item() + a for a in row.token_advantages or [0.0] * len(row.ids)])
            objective = objective + (logp[at, :len(row.ids)] * A_T * torch.tensor(row.mask)).sum() / t.length / len(batch)
    grads = torch.autograd.grad(-objective, [p for p in policy.parameters() if p.requires_grad])
    torch.testing.assert_close(packed, torch.cat([g.flatten() for g in grads]), atol=1e-6, rtol=1e-4)


def test_counted_analyses_begin_with_what_was_done_otherwise():
    places = [f"room {n}" for n in range(7)]
    good = [episode("t", True, *((f"go {n}", place) for n, place in enumerate([*places[1:], "end"])), first=places[0]) for _ in "ab"]
    bad = [episode("t", False, *((f"go {m}", places[m + 1]) for m in range(n)), ("stop", "alarm"), first=places[0])
           for n in range(7) for _ in "ab"]
    found = opid.count_analyses(good + bad)
    assert found[0]["steps"] == {n: f"Hint: go {n}." for n in range(5)}  # five of seven
    assert list(found[-1]["steps"]) == [6, 0, 1, 2, 3]
    assert opid.count_analyses(good[:1]) == [None]


# SkillRL

def bank(general=0, kinds=None, mistakes=0):
    return {"general": [skill(f"g{n}") for n in range(general)], "mistakes": [skill(f"m{n}") for n in range(mistakes)],
            "types": {kind: [skill(f"{kind}{n}") for n in range(size)] for kind, size in (kinds or {}).items()}}


def test_what_is_retrieved():
    def names(*args):
        return [one["when"] for one in skillrl.retrieve(*args)]

    full = bank(9, {"heat": 8, "cool": 2}, 7)
    assert names(full, "heat") == [f"g{n}" for n in (8, 7, 6, 5, 4, 3)] + [f"heat{n}" for n in range(8)] + [f"m{n}" for n in range(5)]
    assert names(bank(2, {"heat": 1}, 1), "cool") == ["g1", "g0", "m0"]
    assert skillrl.retrieve(skillrl.grow(full, [skill("new")]), "heat")[0] == skill("new")  # a full bank shows what it learns


def test_types_below_the_threshold():
    assert skillrl.low_types({"a": 0.39, "b": 0.4, "c": 0.41, "d": 0.0}) == ["a", "d"]


def test_of_ten_failures_five_are_shown():
    episodes = [episode(f"{kind}/{n}", n % 3 == 0) for n in range(40) for kind in ("heat", "cool")]
    expected = []
    for t in episodes:
        if t.task.startswith("heat/") and not t.success:
            expected.append(t)
    assert skillrl.failures_shown(episodes, ["heat"]) == expected[:10][:5] and skillrl.failures_shown(episodes, []) == []


def test_the_bank_only_grows():
    before = bank(2, {"heat": 1}, 1)
    kept = json.loads(json.dumps(before))
    after = skillrl.grow(before, [skill("g1"), skill("heat0"), *map(skill, "abcd")])
    assert [one["when"] for one in after["general"]] == ["g0", "g1", "a", "b", "c"] and before == kept
    assert all(after[part] == before[part] for part in ("types", "mistakes"))
    assert skillrl.grow(before, []) == before


def test_the_editor_sees_the_last_five_steps_of_the_first_five_failures():
    seen = []
    run = asking(lambda prompts: seen.extend(prompts) or [json.dumps([skill(c) for c in "abcdef"])])
    episodes = [episode(f"heat/{n}", False, *((f"act{n}-{k}", f"seen{n}-{k}") for k in range(8))) for n in range(12)]
    new = skillrl.new_skills(run, bank(1), episodes, ["heat"])
    assert [one["when"] for one in new] == ["a", "b", "c"] and len(seen) == 1
    shown = [(n, k) for n in range(12) for k in range(8) if f"act{n}-{k}\n" in seen[0][1]]
    assert shown == [(n, k) for n in range(5) for k in range(3, 8)] and "- act\n" in seen[0][1]
    assert seen[0][1].count("start") == 5  # what the task was


# SKILL0

def test_the_budget_of_each_stage():
    assert [skill0.budget(s, 6) for s in (1, 2, 3)] == [6, 3, 0] and [skill0.budget(s, 5) for s in (1, 2, 3)] == [5, 3, 0]
    for stages in (2, 3, 4, 7):
        for number in range(20):
            assert [skill0.budget(s, number, stages) for s in range(1, stages + 1)] == [
                math.ceil(Fraction(number * (stages - s), stages - 1)) for s in range(1, stages + 1)]


@pytest.mark.parametrize("steps", [3, 40, 180])
def test_stages_are_of_equal_length(steps):
    stages = [skill0.stage_of(step, steps) for step in range(1, steps + 1)]
    assert stages == sorted(stages) and (stages[0], stages[-1]) == (1, 3)
    assert max(map(stages.count, (1, 2, 3))) - min(map(stages.count, (1, 2, 3))) <= 1
    if steps == 180:
        assert [stages[n - 1] for n in (60, 61, 120, 121)] == [1, 2, 2, 3]


def test_helpfulness_against_a_loop():
    rng = random.Random(0)
    tasks = [f"t{n}" for n in range(30)]
    having, without = ({task: rng.random() < 0.5 for task in tasks} for _ in "ab")
    own = {"a": tasks[:10], "b": tasks[5:25], "none": [], "one": tasks[:1]}
    got = skill0.helpfulness(having, without, own)
    assert set(got) == {"a", "b", "one"}
    for name, delta in got.items():
        difference = 0
        for task in own[name]:
            difference += int(having[task]) - int(without[task])
        assert delta == pytest.approx(difference / len(own[name]))
    assert skill0.helpfulness({"t": True}, {"t": False}, {"a": ["t"]}) == {"a": 1.0}


def test_which_skills_stay():
    deltas = {"a": 0.1, "b": -0.1, "c": 0.3, "d": 0.0, "e": 0.1}
    assert skill0.select(deltas, 9) == ["c", "a", "e", "d"] and skill0.select(deltas, 2) == ["c", "a"]
    assert skill0.select(deltas, 9, positive=True) == ["c", "a", "e"] and skill0.select(deltas, 0) == []


def test_the_tasks_of_a_skill():
    episodes = [episode("ash/1", True, ("go", "end"), first="Here."), episode("ash/2", True, ("go", "There."), ("on", "end"), first="x"),
                episode("elm/1", True, ("go", "end"), first="Here.")]
    skills = {"here": {"type": "ash", "skills": [skill("Here")]}, "there": {"type": "ash", "skills": [skill("There")]},
              "end": {"type": "ash", "skills": [skill("end")]}}
    assert skill0.tasks_of_skills(skills, episodes, quoted=True) == {"here": ["ash/1"], "there": ["ash/2"], "end": []}
    assert skill0.tasks_of_skills(skills, episodes, quoted=False) == dict.fromkeys(skills, ["ash/1", "ash/2"])


# Skills as text

def test_counted_skills_are_new_and_in_order():
    def episodes(*known):
        played = [episode("ash/1", True, ("take iron key", "Taken."), ("go", "end"), first="Red.")] * 2 + [
            episode("ash/1", False, ("take tin key", "alarm"), first="Red.")] * 2
        return played

    assert counted(episodes(), 9) == [skill("Red", "take iron key")]
    assert counted(episodes(), 9, [skill("Red", "take iron key")]) == [] == counted(episodes(), 0)
    assert counted(episodes(), 9, [skill("Red", "take tin key")]) == []  # a new skill, not the correction of an old one
    assert text_of([skill("Red", "go")], "observation") == "- Red: go."
    assert text_of([skill("Red", "go")], "prompt") == "- go: go (When: Red)"


@pytest.mark.parametrize("answer", [
    json.dumps([skill("a"), skill("b")]), f"Sure:\n```json\n{json.dumps([skill('a'), skill('b')])}\n```\nDone.",
    f"[] is wrong, {json.dumps([skill('x')])} is a draft, so: {json.dumps([skill('a'), {'title': 'half'}, skill('b')])}",
    f"<think>{json.dumps([skill('x')])}</think>{json.dumps({'analysis': 'two', 'skills': [skill('a'), skill('b')]})}",
    json.dumps([skill("a"), skill("b")]).replace('"}', '",}'), json.dumps([skill("a"), skill("b"), skill("c")])[:-20]])
def test_skills_as_models_write_them(answer):
    assert parse_skills(answer) == [skill("a"), skill("b")]


def test_an_answer_without_skills_and_no_episode_to_ask_about():
    assert parse_skills("I cannot help.") == [] == parse_skills('[{"title": "half"}]') == parse_skills("[" * 5000)
    assert parse_skills(f"<think>{json.dumps([skill('x')])}") == []  # a thought that did not end
    assert written(None, "general", [], 3) == []


def test_an_episode_is_shown_as_the_editor_of_the_loop_reads_it():
    t = replace(episode("heat/1", False, ("a" * 100, "b" * 100)), info={"reference": {"right answer": "42"}})
    text = transcript(asking(None), t)
    assert text.startswith("Episode of heat (failure, 1 turns)\nstart\n> aaa") and "right answer: 42" in text
    assert "characters are left out" in transcript(asking(None, editor_characters=40), t)


# Runs

QUICK = ["--rounds", "2", "--steps", "2", "--tasks-per-step", "3", "--group", "4", "--eval-episodes", "12", "--eval-every", "2",
         "--save-every", "1"]
MORE = {"opid": [], "skillrl": ["--cold-start", "gold", "--warm-start-steps", "3", "--warm-start-batch", "4", "--reflection-batch", "32"],
        "skill0": ["--skill-eval-every", "1"]}
MAINS = {"opid": opid.main, "skillrl": skillrl.main, "skill0": skill0.main}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of a run of four steps of each."""
    folder = tmp_path_factory.mktemp("baselines")
    for name, main in MAINS.items():
        main([*QUICK, *MORE[name], "--out", str(folder / name)])
    return folder


@pytest.mark.parametrize("name", MAINS)
def test_a_run_is_a_run_like_others(runs, name):
    config = json.loads((runs / name / "config.json").read_text())
    assert (config["algorithm"], config["steps"], config["env_options"]) == (name, 4, ["colours=4"])
    assert [row["step"] for row in metrics(runs / name)] == [1, 2, 3, 4] and (runs / name / "adapter").is_dir()
    assert all(row["optimizer_steps"] == 1 for row in metrics(runs / name)) or name != "opid"
    assert len(read(runs / name / "rollouts.jsonl")) == 4 * 12
    figures = study.read_run(runs / name)
    assert [step for step, _ in figures["curve"]] == [0, 2, 4] and 0 <= figures["final"] <= 1
    assert ("final_with_state" in figures) == (name == "skillrl")
    tests = [(row["policy"], row["state"]) for row in read(runs / name / "evaluations.jsonl") if row["split"] == "test"]
    assert tests == [("base", False), ("trained", False), *([("trained", True)] if name == "skillrl" else [])]


def test_a_run_of_opid_has_skill_terms(runs):
    rows = metrics(runs / "opid")
    assert all((row["analysed"] == 1) == (0 < row["skill_term"] < 0.02) and row["learn_tokens"] for row in rows)
    assert sum(row["analysed"] for row in rows) >= 2  # of twelve episodes nothing may stand out
    weights = load_peft_weights(str(runs / "opid" / "adapter"), device="cpu")
    assert any(value.abs().sum() > 0 for name, value in weights.items() if "lora_B" in name)


def test_a_run_of_skillrl(runs):
    kept = read(runs / "skillrl" / "skills.jsonl")
    for before, after in zip(kept, kept[1:]):
        assert after["skills"]["types"] == before["skills"]["types"]
        had, has = before["skills"]["general"], after["skills"]["general"]
        assert has[:len(had)] == had and len(has) - len(had) <= 3
    assert kept[0]["cold_start_episodes"] == 12 and len(kept) > 1
    for known in kept[0]["skills"]["types"]["ash"]:  # what was counted is the game's rule
        colour = known["when"].split()[-1]
        assert known["principle"] in (f"take {lock_metal('ash', colour)} key", f"unlock {colour} door", f"open {colour} door")
    rows = metrics(runs / "skillrl")
    assert rows[0]["kl_reference"] == 0 and rows[-1]["kl_reference"] > 0  # the reference is the cold-started policy
    assert any("hint" in turn for row in read(runs / "skillrl" / "rollouts.jsonl") for turn in row["turns"])


def test_a_run_of_skill0_ends_without_skills(runs):
    rows, kept = metrics(runs / "skill0"), read(runs / "skill0" / "skills.jsonl")
    number = len(kept[0]["skills"])
    assert [row["budget"] for row in rows] == [skill0.budget(s, number) for s in (1, 1, 2, 3)] and number > 1
    assert rows[0]["skills"] == number and rows[-1]["skills"] == 0 and all(row["skills"] <= row["budget"] for row in rows)
    hinted = {row["step"] for row in read(runs / "skill0" / "rollouts.jsonl") for turn in row["turns"] if "hint" in turn}
    assert 1 in hinted and 4 not in hinted and [row["step"] for row in kept] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", MAINS)
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(runs, name, tmp_path, monkeypatch):
    close = loop.Run.close

    def stopped(run, step):
        close(run, step)
        if step == 2:
            raise KeyboardInterrupt

    argv = [*QUICK, *MORE[name], "--out", str(tmp_path / name)]
    monkeypatch.setattr(loop.Run, "close", stopped)
    with pytest.raises(KeyboardInterrupt):
        MAINS[name](argv)
    monkeypatch.setattr(loop.Run, "close", close)
    if name != "opid":  # skills of a step whose checkpoint was not saved any more
        append(tmp_path / name / "skills.jsonl", {"step": 3, "skills": {}, "deltas": {}})
    MAINS[name]([*argv, "--resume"])
    assert metrics(tmp_path / name) == metrics(runs / name)
    for file in ("skills.jsonl", "evaluations.jsonl", "rollouts.jsonl"):
        assert read(tmp_path / name / file) == read(runs / name / file)


@pytest.mark.parametrize("name", MAINS)
@pytest.mark.parametrize("argv, says", [
    (["--env", "searchqa"], "--editor count knows the built-in game alone"), (["--rounds", "0"], "--rounds"),
    (["--editor", "none"], "--editor must be count or model"), (["--eps", "0"], "--eps"), (["--editor-tokens", "0"], "--editor-tokens"),
    (["--teacher", "none"], "unknown option")])
def test_bad_input_is_one_line(name, argv, says, tmp_path):
    with pytest.raises(BadInput, match=says) as error:
        MAINS[name]([*argv, "--out", str(tmp_path / "run")])
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize("main, argv, says", [
    (skillrl.main, ["--cold-start", "teacher"], "own, gold or none"), (skillrl.main, ["--warm-start", "gold"], "in place of --warm-start"),
    (skill0.main, ["--keep", "all"], "nonnegative or positive"), (skill0.main, ["--skill-eval-every", "0"], "--skill-eval-every"),
    (skill0.main, ["--state-place", "top"], "--state-place"), (opid.main, ["--skill-weight", "-1"], "--skill-weight"),
    (skillrl.main, [*QUICK, "--reflection-batch", "1"], "no skill was written")])
def test_bad_input_to_one_of_them(main, argv, says, tmp_path):
    with pytest.raises(BadInput, match=says):
        main([*argv, "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_they_are_arms_of_the_study(tmp_path, monkeypatch):
    (tmp_path / "code" / "baselines").mkdir(parents=True)
    for file in ("distill.py", "baselines/opid.py", "baselines/skill0.py"):
        (tmp_path / "code" / file).write_text(FAKE_PROGRAM + f"print({file!r})\n")
    monkeypatch.setattr(study, "HERE", tmp_path / "code")
    monkeypatch.chdir(tmp_path)
    study.distillation(["--arms", "full", "opid", "skill0", "--seeds", "1", "--rounds", "4", "--steps", "10", "--name", "x"])
    said = {arm: (tmp_path / "runs" / "x" / f"{arm}__0.log").read_text().strip() for arm in ("full", "opid", "skill0")}
    assert said == {"full": "distill.py", "opid": "baselines/opid.py", "skill0": "baselines/skill0.py"}
    assert set(study.OTHER_PROGRAMS) == set(MAINS) <= set(study.DISTILL_ARMS)
    facts = json.loads((tmp_path / "results" / "x" / "study.json").read_text())
    assert (facts["program"], facts["other_programs"]) == ("distill.py", {arm: f"baselines.{arm}" for arm in ("opid", "skill0")})


def test_a_baseline_takes_as_many_batches_as_the_loop():
    config = loop.with_defaults(parse(opid.Options, ["--env-options", "stages=6", "colours=4", "--rounds", "4", "--steps", "10"],
                                      common=loop.Options), "opid")
    assert config.steps == 40 and config.out == "runs/keydoor__opid__0" and config.beta == 0.01 and config.group == 8
    again = loop.with_defaults(parse(opid.Options, ["--rounds", "1", "--steps", "40"], common=loop.Options), "opid")
    assert again.steps == 40 and again.env_options == ["colours=4"]


def test_validation_keeps_the_first_bank_and_training_does_not(tmp_path, monkeypatch):
    """New skills come from validation tasks, so they are not for these."""
    trial, play_, seen = loop.Run.trial, loop.Run.play, {"valid": [], "train": []}
    monkeypatch.setattr(skillrl, "new_skills", lambda run, bank, episodes, low: [skill(f"new {len(bank['general'])}")])
    monkeypatch.setattr(skillrl, "low_types", lambda success: list(success))
    monkeypatch.setattr(loop.Run, "trial", lambda run, split, show=None: (
        seen["valid"].append(show("ash/x")) if show and split == "valid" else None, trial(run, split, show))[1])
    monkeypatch.setattr(loop.Run, "play", lambda run, step, show=None: (seen["train"].append(show("ash/x")), play_(run, step, show))[1])
    skillrl.main([*QUICK, "--eval-every", "1", "--cold-start", "none", "--out", str(tmp_path / "run")])
    assert len(set(seen["valid"])) == 1 and "new" not in seen["valid"][0] and len(seen["valid"]) == 4
    assert [text.count("- new") for text in seen["train"]] == [0, 1, 2, 3]


@pytest.mark.parametrize("main", [skillrl.main, skill0.main])
def test_a_language_model_as_editor_and_skills_in_the_prompt(main, tmp_path, monkeypatch):
    plain, prompts = loop.rollout, []
    monkeypatch.setattr(loop.Run, "ask", lambda run, asked: [json.dumps([skill("Red", "open")])] * len(asked))
    monkeypatch.setattr(loop, "rollout", lambda *args, **limits: (
        found := plain(*args, **limits), prompts.extend(t.system_prompt for t in found))[0])
    argv = ["--editor", "model", "--state-place", "prompt", "--reflection-batch", "4", "--steps", "3", "--rounds", "1", "--out",
            str(tmp_path / "run"), *(["--warm-start-steps", "1"] if main is skillrl.main else [])]
    main([*QUICK[4:], *argv])
    shown = [prompt.count("- open: open (When: Red)") for prompt in prompts]
    assert set(shown) == ({0, 3} if main is skillrl.main else {0, 1})  # three parts of the bank, or one file
    assert shown[:16] == [0] * 16 and shown[-12:] == ([3] * 12 if main is skillrl.main else [0] * 12)
