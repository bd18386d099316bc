"""funnel/teacher.py: the same tokens after two prompts, weights, stored log-probs, the gradient they make."""
import resource

import pytest
import torch
from conftest import FakeEnv, FakePolicy, random_logits, shake, tiny_qwen3

from distill import distill_loss, state_response_weights
from envs import BadInput
from funnel import teacher
from funnel.state import StateEnv, situation, with_state
from rl.chat import Chat
from rl.learner import make_optimizer
from rl.model import add_lora, load_model
from rl.rollout import Request, Row, Trajectory, Turn, rollout
from rl.sampling import sampler

STATE = "- ash house, red door: take iron key.\n- Look first."
LIMITS = {"max_turns": 5}


@pytest.fixture
def episodes(word_chat):
    """Of four turns and five, each with its state in the prompt."""
    env = FakeEnv()
    return rollout(FakePolicy([7, 8, 2], [9, 2], [11, 12, 13, 2]), word_chat, [StateEnv(env, STATE)],
                   [Request("wait wait wait win"), Request("wait wait wait wait lose", 1)], **LIMITS)


def full_logits(model, row):
    with torch.no_grad():
        hidden = model.get_base_model().base_model(input_ids=torch.tensor([row.ids])).last_hidden_state[0]
        logits = model.get_base_model().lm_head(hidden)
    return logits[[t - 1 for t, own in enumerate(row.mask) if own]]


@pytest.mark.parametrize("history", ["full", "window:1"])
def test_both_branches_score_the_same_ids_under_different_prompts(episodes, word_chat, history):
    for trajectory in episodes:
        pairs = teacher.both_rows(trajectory, word_chat, history, STATE)
        assert len(pairs) == (1 if history == "full" else len(trajectory.turns) - 2)  # the 4th prompt leaves something out
        for with_, without in pairs:
            sampled = [[i for i, own in zip(row.ids, row.mask) if own] for row in (with_, without)]
            assert sampled[0] == sampled[1] and len(with_.ids) > len(without.ids)
        if history == "full":
            assert pairs[0][0].ids == trajectory.rows[0].ids  # the branch that was sampled is what was sampled


def test_both_branches_with_the_state_quoted_under_observations(word_chat):
    state = f"- {situation(FakeEnv().reset(task='wait win', seed=0)[0])}: go."
    noted, plain = (rollout(FakePolicy([7, 8, 2], [9, 2]), word_chat, [StateEnv(FakeEnv(), text, "observation")],
                            [Request("wait win")], keep_hints=True, **LIMITS)[0] for text in (state, ""))
    assert noted.turns[0].hint == "Hint: go." and plain.turns[0].hint is None
    for trajectory in (noted, plain):  # whichever branch was sampled
        (with_, without), = teacher.both_rows(trajectory, word_chat, "full", state, "observation")
        assert (with_.ids, without.ids) == (noted.rows[0].ids, plain.rows[0].ids) and len(with_.ids) > len(without.ids)


def test_other_ids_are_refused_at_run_time(episodes, word_chat, monkeypatch):
    plain = teacher.rebuild_rows

    def tampered(trajectory, chat, history):
        rows = plain(trajectory, chat, history)
        if STATE not in trajectory.system_prompt:
            rows[0].ids[rows[0].mask.index(1)] += 1
        return rows

    monkeypatch.setattr(teacher, "rebuild_rows", tampered)
    with pytest.raises(AssertionError, match="same token ids"):
        teacher.both_rows(episodes[0], word_chat, "full", STATE)


@pytest.mark.parametrize("history, budget", [("full", 8192), ("full", 1), ("window:1", 8192)])
def test_weights_are_those_of_the_equations_over_the_whole_trajectory(policy, episodes, word_chat, history, budget):
    items = teacher.weigh(policy, list(zip(episodes, (1.0, 0.5))), word_chat, STATE, history=history, micro_batch_tokens=budget)
    for item, trajectory, a in zip(items, episodes, (1.0, 0.5)):
        pairs = teacher.both_rows(trajectory, word_chat, history, STATE)
        logits = [torch.cat([full_logits(policy, row) for row in rows]) for rows in zip(*pairs)]
        assert item.weights.tolist() == pytest.approx((a * state_response_weights(*logits)).tolist(), rel=1e-3)
        assert len(item.weights) == trajectory.length
    assert [len(item.rows) for item in items] == ([1, 1] if history == "full" else [2, 3])


def test_uniform_weights_are_one_and_nothing_selected_is_nothing(policy, episodes, word_chat):
    items = teacher.weigh(policy, [(episodes[1], 1.0)], word_chat, STATE, token_weights="uniform")
    assert len(items) == 1 and items[0].weights.tolist() == [1.0] * episodes[1].length
    assert teacher.weigh(policy, [], word_chat, STATE) == []


def taught(policy, episodes, chat, **how):
    items = teacher.weigh(policy, list(zip(episodes, (1.0, 0.5))), chat, STATE)
    teacher.add_likely_tokens(policy, items, chat, how.get("top_k", 0))
    teacher.consult(policy, items, chat.pad_id, **how)
    return items


def test_what_is_distilled_is_eq_8(policy, episodes, word_chat, monkeypatch):
    items = taught(policy, episodes, word_chat)
    shake(policy, scale=0.05, seed=3)  # the student has moved away since
    top = bottom = 0.0
    for item, trajectory in zip(items, episodes):
        (_, row), = teacher.both_rows(trajectory, word_chat, "full", STATE)
        part = distill_loss(full_logits(policy, row)[None], item.logp[None], item.weights[None],
                            torch.ones(1, trajectory.length))
        top, bottom = top + part[0].item(), bottom + part[1].item()
    gradients = []
    for budget, chunk in ((8192, 256), (1, 256), (8192, 2)):
        monkeypatch.setattr(teacher, "CHUNK", chunk)
        policy.zero_grad()
        value, left = teacher.distillation_gradient(policy, items, word_chat.pad_id, weight=0.5, micro_batch_tokens=budget)
        assert left == budget and value == pytest.approx(top / bottom, rel=1e-4)
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.requires_grad]))
    assert gradients[0].abs().max() > 0
    assert all(torch.allclose(gradients[0], g, atol=1e-6 * gradients[0].abs().max().item() + 1e-7) for g in gradients[1:])
    policy.zero_grad()
    teacher.distillation_gradient(policy, items, word_chat.pad_id, weight=1.0)
    whole = torch.cat([p.grad.flatten() for p in policy.parameters() if p.requires_grad])
    assert torch.allclose(whole, 2 * gradients[0], rtol=1e-3, atol=1e-7)


def test_a_budget_that_was_too_much_is_not_tried_again(policy, episodes, word_chat, monkeypatch):
    items, real, sizes = taught(policy, episodes, word_chat), teacher.hidden_states, []

    def small_card(model, rows, pad_id):
        sizes.append(len(rows))
        if len(rows) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(model, rows, pad_id)

    value, _ = teacher.distillation_gradient(policy, items, word_chat.pad_id)
    monkeypatch.setattr(teacher, "hidden_states", small_card)
    halved, left = teacher.distillation_gradient(policy, items, word_chat.pad_id)
    assert max(sizes) > 1 and left < 1024 and halved == pytest.approx(value, rel=1e-5)
    sizes.clear()
    assert teacher.distillation_gradient(policy, items, word_chat.pad_id, micro_batch_tokens=left)[1] == left and max(sizes) == 1


def test_the_teacher_is_the_branch_with_the_state_and_without_it_teaches_nothing(policy, episodes, word_chat):
    assert teacher.distillation_gradient(policy, taught(policy, episodes, word_chat), word_chat.pad_id)[0] > 1e-3
    blind = taught(policy, episodes, word_chat, sees_state=False)
    assert teacher.distillation_gradient(policy, blind, word_chat.pad_id)[0] == pytest.approx(0, abs=1e-6)


def test_the_state_free_student_becomes_the_state_conditioned_teacher(policy, episodes, word_chat):
    items = taught(policy, episodes, word_chat)
    optimizer = make_optimizer(policy, 5e-3)
    values = []
    for _ in range(40):
        optimizer.zero_grad()
        values.append(teacher.distillation_gradient(policy, items, word_chat.pad_id)[0])
        optimizer.step()
    assert values[-1] < 0.1 * values[0]


def test_buckets_of_top_k_and_the_rest():
    logits = random_logits(4, 9)
    top = logits.topk(3).indices
    got = teacher.buckets(logits, top).softmax(1)
    p = logits.softmax(1)
    assert torch.allclose(got[:, :3], p.gather(1, top)) and torch.allclose(got[:, 3], 1 - p.gather(1, top).sum(1), atol=1e-6)
    assert teacher.buckets(logits, top[:, :0]) is logits


def test_top_k_below_the_whole_vocabulary_is_never_above_it(policy, episodes, word_chat):
    values = []
    for k in (1, 4, 16, 10_000, 0):
        items = taught(policy, episodes, word_chat, top_k=k)
        shake(policy, scale=0.05, seed=3)
        values.append(teacher.distillation_gradient(policy, items, word_chat.pad_id)[0])
        shake(policy, scale=-0.05, seed=3)
        assert items[0].logp.shape[1] == {1: 2, 4: 5, 16: 17}.get(k, len(word_chat.tokenizer))
    assert values[0] < values[1] < values[2] <= values[4] * (1 + 1e-5) and values[3] == pytest.approx(values[4], rel=1e-4)


def test_half_of_what_is_stored_are_the_students_tokens(policy, episodes, word_chat):
    item = taught(policy, episodes, word_chat, top_k=6)[0]
    (with_, without), = teacher.both_rows(episodes[0], word_chat, "full", STATE)
    for top, p, q in zip(item.top.tolist(), full_logits(policy, without), full_logits(policy, with_)):
        own = p.topk(3).indices.tolist()
        assert top == own + [i for i in q.argsort(descending=True).tolist() if i not in own][:3]


def test_a_teacher_with_a_wider_output_is_cut_to_the_students(policy, episodes, word_chat):
    wide = add_lora(tiny_qwen3(len(word_chat.tokenizer) + 7), rank=4)
    items = teacher.weigh(policy, [(t, 1.0) for t in episodes], word_chat, STATE)
    vocabulary = len(word_chat.tokenizer)
    teacher.consult(wide, items, word_chat.pad_id, width=vocabulary)
    assert items[0].logp.shape[1] == vocabulary and items[0].logp.exp().sum(1).allclose(torch.ones(episodes[0].length))
    assert teacher.distillation_gradient(policy, items, word_chat.pad_id)[0] > 0


@pytest.fixture(scope="module")
def real(smollm2):
    """SmolLM2's logits over 49,152 tokens with and without a state, after what it said with the state: [T, V] each."""
    model, tokenizer = load_model(smollm2)
    chat, state = Chat(tokenizer), "- Lead melts at 327 degrees.\n- The salt is in the kitchen."
    system, asked, found = with_state("Answer in short.", state), ["How do I melt lead?", "Where is the salt?"], []
    torch.manual_seed(0)
    said = sampler(model, chat, max_new_tokens=24)([chat.prompt([("system", system), ("user", user)]) for user in asked])
    for user, ids in zip(asked, said):
        trajectory = Trajectory("task", 0, 0, False, system_prompt=system, first_observation=user,
                                turns=[Turn([], ids, chat.action_text(ids), "", 0.0, True, "end")], rows=[Row([*ids], [1] * len(ids))])
        pairs = teacher.both_rows(trajectory, chat, "full", state)
        with torch.no_grad():
            found.append([teacher.logits(model, teacher.hidden_states(model, rows, chat.pad_id), 1.0) for rows in zip(*pairs)])
    return [torch.cat(parts) for parts in zip(*found)]


def share_kept(state, free, k, ours):
    """The KL over K + 1 buckets as a share of the full one; `ours` of the K tokens are the student's."""
    own = free.topk(ours).indices
    top = torch.cat([own, state.scatter(1, own, -torch.inf).topk(k - ours).indices], 1)
    ones = torch.ones(1, len(free))
    full = distill_loss(free[None], state[None], ones, ones)[0]
    return (distill_loss(teacher.buckets(free, top)[None], teacher.buckets(state, top)[None], ones, ones)[0] / full).item()


def test_top_k_and_tail_is_within_a_hundredth_of_the_full_kl_on_real_logits(real):
    shares = {k: share_kept(*real, k, k // 2) for k in (64, 256, 1024, 4096)}
    assert 0.7 < shares[64] < shares[256] < shares[1024] < shares[4096] <= 1 + 1e-5
    assert shares[4096] >= 0.99  # docs/distill.md has the figures: with fewer, more is lost
    assert all(share_kept(*real, k, 0) < shares[k] for k in (64, 256, 1024))  # the teacher's tokens alone keep less


def test_a_full_disk_is_one_line_and_leaves_the_old_file(policy, episodes, word_chat, tmp_path):
    path = tmp_path / "teacher.pt"
    teacher.save_items([], path)
    items = taught(policy, episodes, word_chat)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # a write beyond this fails, as on a full disk
    try:
        with pytest.raises(BadInput, match="teacher's log-probs.*cannot be stored.*--resume") as caught:
            teacher.save_items(items, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["teacher.pt"] and torch.load(path) == []


def test_a_teacher_with_another_tokenizer_is_refused_with_the_reason(words, tmp_path, qwen_folder):
    with pytest.raises(BadInput, match="has another tokenizer.*tokens against") as caught:
        teacher.check_tokenizer(str(qwen_folder / "qwen3_tokenizer"), words)
    assert "\n" not in str(caught.value)
    words.save_pretrained(tmp_path / "same")
    teacher.check_tokenizer(str(tmp_path / "same"), words)
    with pytest.raises(BadInput, match="cannot load the teacher"):
        teacher.check_tokenizer(str(tmp_path / "nothing"), words)
