"""Thinking: where it ends, what of it stays in later prompts, and --thinking-budget, whose forced tokens are nobody's choice."""
import copy

import pytest
import torch
from conftest import SMALL, WORDS, FakeEnv, FakePolicy, play, shake, tiny_qwen3

import grpo
from envs import BadInput
from envs.action import UNFINISHED, parse_action
from envs.keydoor import KeyDoor
from funnel.teacher import both_rows
from rl.chat import Chat
from rl.learner import pad, row_logps, token_logps
from rl.model import add_lora
from rl.rollout import Request, rollout
from rl.sampling import sampler
from rl.stripped import rebuild_rows, without_hints
from rl.thinking import Budget, closing_ids
from rl.tiny import CHAT_TEMPLATE, word_tokenizer
from rl.warmstart import play as scripted_play

STRIPS = CHAT_TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] }}")
OPENS = STRIPS.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")


def thinking_chat(template, words=WORDS):
    """A toy: the word tokenizer with the two tokens of thinking, under a template that strips thoughts, and opens one or not."""
    tokenizer = word_tokenizer(words)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = template
    return Chat(tokenizer, thinking=True)


@pytest.fixture(scope="module")
def opens():
    return thinking_chat(OPENS)


@pytest.fixture(scope="module")
def strips():
    return thinking_chat(STRIPS)


def model_for(chat):
    model = add_lora(tiny_qwen3(len(chat.tokenizer), chat.tokenizer.eos_token_id, chat.pad_id), rank=4)
    shake(model)
    return model


# Where thinking is open

@pytest.mark.parametrize("tokenizer, thinking, opened", [("qwen3", True, ""), ("qwen3", False, ""), ("qwen3_5", True, "<think>"),
                                                         ("qwen3_5", False, ""), ("words", True, "")], indirect=["tokenizer"])
def test_a_chat_knows_whether_its_template_opens_thinking(tokenizer, thinking, opened):  # docs/faults.md, 40
    chat = Chat(tokenizer, thinking)
    assert chat.opened == opened and chat.action_text(chat.text_ids("go")) == f"{opened}go"
    assert parse_action(chat.action_text(chat.text_ids("go"))) == ("" if opened else "go")
    if chat.think_end is not None:
        assert tokenizer.decode(closing_ids(chat)) == "\n</think>\n\n"
        assert parse_action(chat.action_text([*chat.text_ids("no"), *closing_ids(chat), *chat.text_ids("go")])) == "go"


class Door(FakeEnv):
    """A toy that wins by "go" alone."""

    def step(self, action):
        right = parse_action(action) == "go"
        return ("Right." if right else "What?"), float(right), right, False, {"success": right, "valid": right}


@pytest.mark.parametrize("history", ["full", "window:2", "recent:2"])
@pytest.mark.parametrize("tokenizer", ["qwen3", "qwen3_5"], indirect=True)
def test_an_unended_thought_is_paid_nothing_and_stays_out_of_later_prompts(tokenizer, history):  # docs/faults.md, 40
    chat = Chat(tokenizer, thinking=True)
    by_prompt = tokenizer.decode(chat.prompt([("user", "x")])).endswith("<think>\n")
    open_ = [] if by_prompt else [chat.think_begin]
    unended = [*open_, *chat.text_ids("zebra\n<action>go</action>\ngo"), tokenizer.eos_token_id]
    late = [*([chat.think_end] if by_prompt else []), *chat.text_ids("wait"), chat.think_begin, *chat.text_ids("zebra")]
    ended = [*open_, *chat.text_ids("zebra"), *closing_ids(chat), *chat.text_ids("go"), tokenizer.eos_token_id]
    [t] = play(chat, FakePolicy(unended, late, ended), "wait wait win", env=Door, history=history)
    assert [turn.valid for turn in t.turns] == [False, False, True] and t.reward == 1 and t.end == "success"
    prompts = [tokenizer.decode(turn.prompt_ids) for turn in t.turns]
    assert not any("zebra" in prompt for prompt in prompts) and "What?" in prompts[2]
    if history == "full":
        assert "<|im_start|>assistant\n<|im_end|>" in prompts[1] and "<|im_start|>assistant\nwait<|im_end|>" in prompts[2]
    assert [i for row in t.rows for i, own in zip(row.ids, row.mask) if own] == unended + late + ended
    assert rebuild_rows(without_hints(t), chat, history) == t.rows


def test_scripted_play_closes_the_thinking_that_the_template_opens(opens, qwen3_5):
    for chat in (opens, Chat(qwen3_5, thinking=True)):
        for kind in ("gold", "random"):
            played = scripted_play(lambda: KeyDoor(practice=kind == "random"), chat, KeyDoor.tasks("train")[:3], kind, seed=0, max_turns=3)
            assert all(turn.valid for t in played for turn in t.turns)


# --thinking-budget

def driven(chat, scripts, tokens, most=16):
    """What comes out of greedy decoding where row n wants `scripts[n]`, token by token, under a budget of `tokens`."""
    budget = Budget(chat, tokens, most)
    force, ids, wanted = budget.start(len(scripts), "cpu"), [[5] for _ in scripts], [list(script) for script in scripts]
    for _ in range(most):
        scores = torch.zeros(len(scripts), len(chat.tokenizer))
        for n, script in enumerate(wanted):
            scores[n, script[0] if script else 4] = 9.0
        best = force(torch.tensor(ids), scores).argmax(1).tolist()
        for n, i in enumerate(best):
            ids[n].append(i)
            if budget.own[-1][n]:
                wanted[n] = wanted[n][1:]
    actions = [type("Made", (list,), {"entropies": None})(row[1:]) for row in ids]
    budget.mark(actions)
    return [(list(action), action.mask) for action in actions]


def test_the_end_of_thinking_is_forced_at_its_place(opens, strips):
    K, end, begin = closing_ids(opens), opens.think_end, opens.think_begin
    assert K == closing_ids(strips) == [end]  # the word tokenizer has no line breaks
    thought, act = [10, 11, 12, 13, 14], [20, 21]

    def one(chat, script, tokens, most=16):
        [(ids, mask)] = driven(chat, [script], tokens, most)
        return ids[:8], mask[:8]

    assert one(opens, thought, 3) == ([10, 11, 12, end, 13, 14, 4, 4], [1, 1, 1, 0, 1, 1, 1, 1])
    assert one(opens, [10, end, *act], 3)[1] == [1] * 8  # closed by the policy itself
    assert one(opens, [10, 11, 12, end, *act], 3) == ([10, 11, 12, end, end, *act, 4], [1, 1, 1, 0, 1, 1, 1, 1])
    assert one(strips, thought, 3)[1] == [1] * 8  # no thinking
    assert one(strips, [20, begin, *thought], 3) == ([20, begin, 10, 11, 12, end, 13, 14], [1, 1, 1, 1, 1, 0, 1, 1])
    # A second thought spends what is left, and a third is closed as soon as it is opened
    assert one(strips, [begin, 10, end, begin, 11, 12, 13], 2) == ([begin, 10, end, begin, 11, end, 12, 13], [1, 1, 1, 1, 1, 0, 1, 1])
    assert one(strips, [begin, 10, begin, 11, 12, 13], 2) == ([begin, 10, begin, end, 11, 12, 13, 4], [1, 1, 1, 0, 1, 1, 1, 1])


def test_a_batch_is_forced_as_each_row_alone(opens, strips, qwen3_5):
    scripts = [[10, 11, 12, 13, 14, 15], [10], [10, 11, 12], []]
    for chat in (opens, strips, Chat(qwen3_5, thinking=True)):
        mixed = [*scripts, [10, chat.think_end, 20], [chat.think_begin, 10, 11, 12, 13], [chat.think_end, chat.think_begin, 10, 11, 12, 13]]
        assert driven(chat, mixed, 3) == [driven(chat, [script], 3)[0] for script in mixed]


@pytest.mark.parametrize("tokenizer", ["qwen3", "qwen3_5"], indirect=True)
def test_the_whole_end_is_forced_with_a_real_tokenizer(tokenizer):
    chat = Chat(tokenizer, thinking=True)
    opening = [] if chat.opened else [chat.think_begin]
    (ids, mask), = driven(chat, [[*opening, *range(100, 110)]], 4)
    n = len(opening) + 4
    assert ids[n:n + 3] == closing_ids(chat) and tokenizer.decode(ids[n:n + 3]) == "\n</think>\n\n" and ids[n + 3:n + 6] == [104, 105, 106]
    assert mask == [1] * n + [0, 0, 0] + [1] * (16 - n - 3)
    (ids, mask), = driven(chat, [[20] * 14 + [chat.think_begin, *range(100, 110)]] if opening else [list(range(100, 120))], 4)
    assert len(ids) == len(mask) == 16


PROMPTS = [[5, 6, 7], [8] * 11, [9, 10, 11, 12, 13, 14], [20]] * 3


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_sampler_forces_and_says_what_it_forced(opens, temperature):  # docs/faults.md, 41
    model = model_for(opens)
    act = sampler(model, opens, temperature=temperature, max_new_tokens=9, thinking_budget=4)
    torch.manual_seed(0)
    answers = act(PROMPTS)
    plain = sampler(model, opens, temperature=temperature, max_new_tokens=9)
    torch.manual_seed(0)
    for answer, free in zip(answers, plain(PROMPTS)):
        assert len(answer) <= 9 and len(answer.mask) == len(answer) and free.mask is None
        if opens.think_end in free[:4] or len(free) <= 4:
            continue
        assert answer[:4] == free[:4] and answer[4] == opens.think_end and answer.mask[:5] == [1, 1, 1, 1, 0]
        for n in range(5, len(answer)):  # a second thought is closed at once
            assert answer.mask[n] == (answer[n - 1] != opens.think_begin) or answer[n] == opens.think_end
        assert temperature == 0 or answer.logps[4] == 0.0 and min(answer.logps) < 0
    assert sum(answer.mask[4:5] == [0] for answer in answers) > 6
    if temperature == 0:
        assert answers == [act([prompt])[0] for prompt in PROMPTS]


class Chatty(KeyDoor):
    """Goes on whatever is said."""

    def step(self, action):
        self.stage = min(self.stage + 1, self.stages - 1)
        return self._view(), float(len(action) % 2), False, False, self._info(valid=True)


@pytest.fixture(scope="module", params=[OPENS, OPENS.replace(".split('</think>')[-1]", "")], ids=["thoughts stripped", "thoughts kept"])
def played(request):
    chat = thinking_chat(request.param)
    model, found = model_for(chat), []
    for keep in (True, False):
        act = sampler(model, chat, max_new_tokens=9, thinking_budget=4, keep_cache=keep)
        torch.manual_seed(0)
        requests = [Request(task, n, n) for n, task in enumerate(KeyDoor.tasks("train")[:4])]
        found.append(rollout(act, chat, [Chatty() for _ in requests], requests, max_turns=3, max_new_tokens=9))
    return chat, model, *found


def test_a_kept_cache_samples_the_same_under_a_budget(played):
    _, _, kept, anew = played
    assert kept == anew and any(0 in turn.action_ids.mask for t in kept for turn in t.turns)


def test_forced_tokens_are_in_the_context_and_not_in_the_loss(played):  # docs/faults.md, 41
    chat, model, batch, _ = played
    rows = [row for t in batch for row in t.rows]
    forced = [sum(len(turn.action_ids) - sum(turn.action_ids.mask) for turn in t.turns) for t in batch]
    assert sum(forced) > 4
    for t, number in zip(batch, forced):
        assert t.length == sum(len(turn.action_ids) for turn in t.turns) - number
        ids = [i for turn in t.turns for i in turn.action_ids]
        assert [i for row in rebuild_rows(t, chat, "full") for i, own in zip(row.ids, row.mask) if own] == \
            [i for i, own in zip(ids, [own for turn in t.turns for own in turn.action_ids.mask]) if own]
        assert rebuild_rows(t, chat, "full") == t.rows and both_rows(t, chat, "full", "- a door: open")
    # The sampler's log-probs are the learner's, behind what was forced too, and 0 where it was
    for row, logp_T in zip(rows, row_logps(model, rows, chat.pad_id), strict=True):
        torch.testing.assert_close(torch.tensor(row.sampled_logp), torch.tensor(logp_T), atol=1e-4, rtol=1e-4)
    # The gradient is that of the chosen tokens alone
    weights = [p for p in model.parameters() if p.requires_grad]
    ids_BT, mask_BT = pad(rows, chat.pad_id, "cpu")
    ours = torch.autograd.grad(token_logps(model, ids_BT, mask_BT)[0].sum(), weights)
    chosen = 0.0
    for row in rows:
        logp_TV = model(input_ids=torch.tensor([row.ids])).logits[0].float().log_softmax(-1)
        chosen = chosen + sum(logp_TV[n - 1, i] for n, i in enumerate(row.ids) if row.mask[n])
    for one, two in zip(ours, torch.autograd.grad(chosen, weights)):
        torch.testing.assert_close(one, two, atol=1e-3, rtol=1e-3)


def test_a_budget_that_cannot_work_is_one_line(opens, word_chat):
    for chat, tokens, most, match in ((word_chat, 3, 16, "no </think>"), (opens, 15, 16, "no room"), (opens, 40, 16, "no room")):
        with pytest.raises(BadInput, match=match) as caught:
            Budget(chat, tokens, most)
        assert "\n" not in str(caught.value)
    Budget(opens, 14, 16)


@pytest.mark.parametrize("argv, match", [
    (["--thinking-budget", "8"], "needs --thinking"), (["--thinking", "--thinking-budget", "32"], "no room"),
    (["--thinking", "--thinking-budget", "-1"], "at least 0"), (["--thinking", "--thinking-budget", "8"], "no </think>")])
def test_bad_budgets_leave_nothing(argv, match, tmp_path):
    with pytest.raises(BadInput, match=match) as caught:
        grpo.main([*SMALL, "--out", str(tmp_path / "run"), *argv])
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()
