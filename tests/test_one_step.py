"""docs/one-step.md: its blocks are what the program writes, and its numbers satisfy the equations."""
import importlib
import math
import re

import pytest

from rl.options import Config
from docs import one_step

PAGE = one_step.PAGE.read_text()
BLOCKS = {name: text.splitlines() for name, text in re.findall(r"```text (\S+)\n(.*?)\n```", PAGE, re.DOTALL)}
PROSE = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
DECIMAL = r" *-?\d+\.\d{4}\b"
ROUNDING = 1.5e-4  # one unit of the last digit, and what is left of a sum of such


@pytest.fixture(scope="module")
def got():
    return one_step.run()


def numbers(line):
    return [float(x) for x in re.findall(DECIMAL, line)]


def test_the_page_is_what_the_program_writes(got):
    """Words, ids and positions exactly. A decimal may differ by one in its last digit: another version of torch or another
    processor rounds another way."""
    blocks = one_step.blocks(got)
    made = one_step.filled(PAGE, blocks)
    assert set(blocks) == set(BLOCKS)
    assert re.sub(DECIMAL, " #", made) == re.sub(DECIMAL, " #", PAGE)
    assert numbers(made) == pytest.approx(numbers(PAGE), abs=ROUNDING)


def test_what_is_exact_and_what_is_rounding(got):
    one, two = got.steps
    context_BT = ~one.mask_BT
    assert (one.ratio_BT == 1).all() and (two.ratio_BT != 1).any()
    assert not one.grad_BT[context_BT].any() and not two.grad_BT[context_BT].any() and one.grad_BT[one.mask_BT].all()
    for step in got.steps:
        assert [sum(step.shares), step.metrics["loss"]] == pytest.approx([step.loss] * 2, abs=1e-6)
        assert [step.norms[1], step.metrics["grad_norm"]] == pytest.approx([step.norms[0]] * 2, rel=1e-4)
    assert abs(one.loss) < 1e-6 < 0.1 < one.norms[0]
    for row, old_logp_T in zip(got.rows, got.old_logps):
        assert row.sampled_logp == pytest.approx(old_logp_T, abs=1e-4)


def test_the_numbers_shown_satisfy_the_equations():
    """From the log-probs and rewards on the page alone: advantages, ratios, clip, gradients, shares and losses."""
    rewards = [float(x) for x in re.findall(r"reward ([\d.]+)", "\n".join(BLOCKS["episodes"]))]
    mean = sum(rewards) / 2
    std = math.sqrt(sum((R - mean) ** 2 for R in rewards))  # over G - 1 = 1
    advantages = [(R - mean) / (std + 1e-6) for R in rewards]
    assert [numbers(line)[-1] for line in BLOCKS["advantages"][1:]] == pytest.approx(advantages, abs=ROUNDING)
    rows = [(int(line.split()[0]), numbers(line), line.endswith("clipped")) for line in BLOCKS["tokens"][2:]]
    lengths = [sum(n == episode for n, *_ in rows) for episode in (1, 2)]
    shares, clipped = {1: [0, 0], 2: [0, 0]}, 0
    for n, (old, ratio_1, grad_1, new, ratio_2, objective, least, grad_2), says_clipped in rows:
        A, weight = advantages[n - 1], 1 / (2 * lengths[n - 1])
        ratio = math.exp(new - old)
        is_clipped = (A > 0 and ratio > 1.2) or (A < 0 and ratio < 0.8)
        clipped += is_clipped
        assert ratio_1 == 1 and grad_1 == pytest.approx(-A * weight, abs=ROUNDING) and is_clipped == says_clipped
        assert (ratio_2, objective) == pytest.approx((ratio, ratio * A), abs=3e-4)  # of two rounded log-probs
        assert least == pytest.approx(min(ratio_2 * A, min(max(ratio_2, 0.8), 1.2) * A), abs=ROUNDING)
        assert grad_2 == pytest.approx(0 if is_clipped else -A * ratio_2 * weight, abs=ROUNDING)
        for step, value in ((1, A), (2, least)):
            shares[step][n - 1] -= value * weight
    assert clipped >= 2 and lengths == [8, 4]
    for step, line in enumerate(BLOCKS["loss"][1:], 1):
        assert numbers(line) == pytest.approx([-2 * shares[step][0], -2 * shares[step][1], *shares[step], sum(shares[step])],
                                              abs=2 * ROUNDING)
    for step, (ratio, gradient), line in ((1, (1, 2), BLOCKS["gradient"][1]), (2, (4, 7), BLOCKS["gradient"][2])):
        loss, _, ratio_max, clip_fraction, largest = numbers(line)
        assert loss == pytest.approx(sum(shares[step]), abs=2 * ROUNDING)
        assert ratio_max == pytest.approx(max(shown[ratio] for _, shown, _ in rows), abs=ROUNDING)
        assert largest == pytest.approx(max(abs(shown[gradient]) for _, shown, _ in rows), abs=ROUNDING)
        assert clip_fraction == pytest.approx(clipped / len(rows) if step == 2 else 0, abs=ROUNDING)
    first, second, added, whole = numbers(BLOCKS["check"][0])
    assert [added, whole] == pytest.approx([first + second] * 2, abs=ROUNDING)


def test_the_sentences_name_what_the_blocks_hold(got):
    long, short = got.batch
    assert f"|o_1| = {long.length} and |o_2| = {short.length} sampled tokens, eps = {one_step.EPS}" in PROSE
    assert f"exactly the {len(long.turns[0].prompt_ids) + len(long.turns[0].action_ids)} ids so far" in PROSE
    assert f"a learning rate of {one_step.LR}" in PROSE and one_step.LR == 3 * Config.lr
    assert len(numbers(PROSE)) == 2 and set(map(abs, numbers(PROSE))) <= set(numbers("\n".join(BLOCKS["advantages"])))
    for word, i in re.findall(r"(\d+)\sis\s`([^`]+)`", PROSE):
        assert got.chat.tokenizer.convert_tokens_to_ids(i) == int(word)


def test_the_functions_are_in_the_files_that_the_page_names():
    lines = re.findall(r"^\| [\d, ]+ \| .* \| (.*) \| `(.*)\.py` \|$", PROSE, re.MULTILINE)
    assert len(lines) == 6
    for functions, file in lines:
        for name in re.findall(r"`([\w.]+)`", functions):
            found = importlib.import_module(file.replace("/", "."))
            for part in name.split("."):
                found = getattr(found, part)
            assert found.__module__ == file.replace("/", "."), name
