"""WebShop: the reward by hand, pages beside a second model of them, real data, files in every form, hostile texts, hints.

    python tests/test_webshop.py [DATA]      # gold and random play of 200 test goals, and the speed
"""
import importlib.util
import json
import lzma
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]
from enrich import EnrichedEnv, Schedule, walk
from envs import BadInput, env_class, make_env, select_tasks, webshop_data
from envs.action import UNFINISHED, invalid
from envs.webshop import WebShop, read_command
from envs.webshop_reward import COLOURS, colour_of, reward_of, token_set_ratio
from rl.rollout import Trajectory, Turn

REAL = Path(os.environ.get("SCAFFOLD_FUNNEL_DATA", ROOT.parent / "shared" / "data")) / "webshop_1000.json.xz"
missing = [name for name in ("bm25s", "Stemmer") if importlib.util.find_spec(name) is None]
needs_search = pytest.mark.skipif(bool(missing), reason=f"needs {missing} (pip install -r envs/webshop-requirements.txt)")


def needs_real(test):
    return needs_search(pytest.mark.skipif(
        not REAL.exists(), reason="no webshop_1000.json.xz in ../shared/data or $SCAFFOLD_FUNNEL_DATA")(test))


def one_line(match, call):
    with pytest.raises(BadInput, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


# --- the reward, by hand -----------------------------------------------------------------------------------------

RUG = {"title": "Acme Wool Rug", "description": "Made in Bay.", "features": ["Soft.", "Non slip back"], "query": "rugs",
       "product_category": "Home › Rugs › Area Rugs", "nouns": ["acme", "wool", "rug"], "attributes": ["hand made", "wool rug"]}


def bought(chosen=(), options=(), price=20.0, bound=30.0, attributes=("hand made", "wool rug"), rule="official", product=None, **wanted):
    goal = {"product": {**RUG, **wanted}, "attributes": list(attributes), "options": list(options), "bound": bound}
    return reward_of({**RUG, **(product or {})}, price, dict(chosen), goal, rule)


SIZE_AND_COLOUR = [("size", "4 ft"), ("color", "teal")]


@pytest.mark.parametrize("chosen, official, ours", [    # two attributes and the price are met: (2 + options + 1) / 5
    ({"size": "4 ft", "color": "teal"}, 2, 2), ({}, 0, 0), ({"size": "4 ft"}, 1, 1), ({"color": "teal"}, 1, 1),
    ({"size": "2 ft", "color": "teal"}, 1, 1), ({"size": "4 ft", "color": "white"}, 1, 1),
    ({"shape": "4 ft", "tone": "teal"}, 2, 0),                      # whatever they are options of
    ({"size": "ft 4", "color": "teal"}, 2, 1), ({"size": "4 ft", "color": "teal", "style": "plain"}, 2, 2),
    ({"size": "size", "color": "teal"}, 2, 1)])                     # a word of the pair as Python prints it
def test_options_by_hand(chosen, official, ours):
    for rule, met in (("official", official), ("ours", ours)):
        reward, parts = bought(chosen, SIZE_AND_COLOUR, rule=rule)
        assert reward == (2 + met + 1) / 5 and parts["options"] == met / 2 and (reward == 1) == (met == 2)


@pytest.mark.parametrize("price, bound, within", [
    (20, 30, True), (30, 30, True), (30.01, 30, False), (29.99, 30, True), (100, 120, True), (120.5, 120, False), (0, 10, True),
    (984.9, 990, True), (4299.99, 1_000_000, True), (1_000_001, 1_000_000, False)])
def test_price_by_hand(price, bound, within):
    reward, parts = bought(price=price, bound=bound)
    assert reward == (1.0 if within else 2 / 3) and parts["price"] is within and parts["options"] is None


@pytest.mark.parametrize("wanted, chosen, official", [
    ("teal", "teal", 1), ("light blue", "light blue", 1), ("light blue", "navy blue", 1),   # any blue
    ("light blue", "light pink", 1),                                # "light" is a colour of the list
    ("redwood", "redwood", 0), ("green2", "green2", 0),             # out of reach of the very value: "red" and "green" are compared
    ("red", "redwood", 1), ("green", "green2", 1), ("rose gold", "gold", 1), ("zebra", "zebra", 1), ("zebra", "tiger", 0)])
def test_colours_by_hand(wanted, chosen, official):
    for rule, met in (("official", official), ("ours", wanted == chosen)):
        reward, parts = bought({"color": chosen}, [("color", wanted)], rule=rule)
        assert reward == (2 + met + 1) / 4 and parts["options"] == met


@pytest.mark.parametrize("nouns, own, same_query, category, worth", [
    ([], ["rug"], True, "X", 1.0), ([], ["rug"], False, "Home › Rugs", 1.0), ([], ["rug"], False, "Home › Lamps", 0.5),
    (["rug"], [], True, "Home › Rugs", 0.0), (list("abcdefghij"), ["a"], True, "X", 1.0),
    (list("abcdefghijk"), ["a"], True, "Home › Rugs", 0.1), (["pillow", "pillow", "grey"], ["pillow", "grey"], False, "X", 1.0),
    (list("abcde"), ["a"], False, "X", 0.5), (list("abcd"), ["a", "z"], False, "X", 1.0), (["rug"] * 10, ["rug"], False, "X", 0.5),
    (list("abcde"), ["a"], False, "Home › Home › Home", 0.5), (list("abcde"), ["a"], False, " Area Rugs›  Home ", 1.0)])
def test_types_by_hand(nouns, own, same_query, category, worth):
    product = {"nouns": own, "query": "rugs" if same_query else "lamps", "product_category": category}
    reward, parts = bought(product=product, nouns=nouns)
    assert reward == worth == parts["type"]
    if nouns == ["rug"] * 10:
        assert parts["title_score"] == 0.1 and bought(product=product, nouns=nouns, rule="ours")[1]["title_score"] == 1


@pytest.mark.parametrize("attributes, met", [
    (["hand made"], 1), (["made hand"], 1), (["essential oils"], 0), (["non slip"], 1), (["made in bay"], 1), (["acme"], 1),
    (["Acme"], 0), (["soft. non"], 1), (["silk", "wool rug"], 1), (["wool rugs"], 1), (["hand-made!"], 1)])
def test_attributes_by_hand(attributes, met):
    reward, parts = bought(attributes=attributes)
    assert parts["attributes"] == met / len(attributes) and reward == (met + 1) / (len(attributes) + 1)


@pytest.mark.parametrize("one, other, score", [
    ("", "", 0), ("a", "", 0), ("!?", "!?", 0), ("Wool Rug", "rug,wool", 100), ("essential oils", "essential oil", 96),
    ("red", "color red", 100), ("red", "redwood", 60), ("é", "é", 0), ("ю", "Ю", 100), ("green", "green2", 91), ("a b", "a c", 67)])
def test_token_set_ratio_by_hand(one, other, score):
    assert token_set_ratio(one, other) == score


def test_the_first_colour_of_the_list_counts():
    assert len(COLOURS) == 102 == len(set(COLOURS)) and COLOURS == sorted(COLOURS)
    assert [colour_of(text) for text in ("black forest", "violet lavender", "123alabaster", "webshop", "")] == [
        "black", "lavender", "alabaster", "webshop", ""]
    assert colour_of(("color", "red")) == "red" and colour_of(("color", "dark red")) == ("color", "dark red")


def options_and_attributes():
    """Texts of the real products that the reward compares."""
    products = webshop_data.products_of(REAL).values()
    values = [value for item in products for values in item["options"].values() for value in values]
    return values, [text for item in products for text in item["attributes"]]


@pytest.mark.filterwarnings("ignore:Using slow")
@needs_real
def test_likeness_is_that_of_the_library_which_the_released_code_pins():
    fuzz = pytest.importorskip("thefuzz.fuzz", reason="needs thefuzz 0.19 (pip install thefuzz==0.19.0)")
    if importlib.util.find_spec("Levenshtein"):
        pytest.skip("python-Levenshtein is installed: thefuzz then computes another ratio")
    rng, (values, attributes) = random.Random(0), options_and_attributes()
    for texts in (values, attributes):
        for one, other in [(rng.choice(texts), rng.choice(texts)) for _ in range(1500)]:
            assert token_set_ratio(one, other) == fuzz.token_set_ratio(one, other), (one, other)
            pair = str(("color", other))
            assert token_set_ratio(colour_of(one), pair) == fuzz.token_set_ratio(colour_of(one), pair), (one, pair)


# --- a shop made by hand, in the benchmark's own files -------------------------------------------------------------

def raw(asin, name, pricing="$20.00", options=None, query="Rugs ", category="garden", kind="Home › Rugs", bullets="Soft", about="A thing"):
    return {"asin": asin, "name": name, "pricing": pricing, "query": query, "category": category, "product_category": kind,
            "small_description": bullets, "full_description": about, "images": [""],
            "customization_options": {key: [{"value": value} for value in values] for key, values in (options or {}).items()}}


PRODUCTS = [
    raw("RUG0000001", "Acme Wool Rug", options={"Size": ["2/3 ft", "4 ft"], "Color": ["Red", "Redwood", " Light Blue "]}),
    raw("RUG0000002", "Acme Cotton Rug", "$30.00$1,050.50", bullets=["Thin", "Washable cotton"]),
    raw("LAMP000001", "Bright Desk Lamp", None, query="lamps", kind="Home › Lights", about="Needs no bulb"),
    raw("TEA0000001", "Green Tea", "$4,299.99", {"flavor name": ["mint", "Buy Now"]}, "teas", "grocery", "Food › Tea", ""),
    raw("nan", "No product"), raw("TOOLONG00001", "No product"), raw("LAMP000001", "A second one of this id"),
    *[raw(f"FILL{n:06d}", f"Plain carpet number{n}", query="carpets") for n in range(60)]]
INS = {item["asin"]: {"attributes": ["washable"]} for item in PRODUCTS} | {
    "RUG0000001": {"attributes": ["hand made", "wool rug"], "instruction": "Find me hand made rugs with wool rug",
                   "instruction_attributes": ["hand made", "wool rug"]},
    "RUG0000002": {"attributes": ["cotton"], "instruction": "Find me rugs with cotton", "instruction_attributes": ["cotton"]},
    "TEA0000001": {"attributes": ["green tea"], "instruction": "Find me teas with green tea", "instruction_attributes": ["green tea"]}}
HUMAN = {"RUG0000001": [{"instruction": "i want a hand made rug, four feet wide.", "instruction_attributes": ["hand made"],
                         "instruction_options": ["four feet", "red"]},
                        {"instruction": "nothing is asked", "instruction_attributes": [], "instruction_options": []}]}
NOUNS = {item["asin"]: item["name"].lower().split() for item in PRODUCTS}


def write(folder, products=PRODUCTS, ins=INS, human=HUMAN, nouns=NOUNS, suffix="_1000"):
    for name, content in ((f"items_shuffle{suffix}", products), (f"items_ins_v2{suffix}", ins), ("items_human_ins", human),
                          (f"nouns{suffix}", nouns)):
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return str(folder)


@pytest.fixture
def shop(tmp_path):
    return write(tmp_path)


def goal_task(data, text, **options):
    """The task whose instruction holds `text`."""
    return next(task for task, goal in webshop_data.load_goals(data, 0, options.get("goals", "synthetic")).items()
                if text in goal["instruction"])


def start(data, text, **options):
    env = make_env("webshop", {"data": data, **options})
    return env, *env.reset(task=goal_task(data, text, **options), seed=0)


def test_the_benchmarks_own_files_are_read(shop):
    products = webshop_data.products_of(Path(shop))
    assert len(products) == 64 and list(products)[:4] == ["RUG0000001", "RUG0000002", "LAMP000001", "TEA0000001"]
    assert products["RUG0000001"]["options"] == {"size": ["2 | 3 ft", "4 ft"], "color": ["red", "redwood", "light blue"]}
    assert [products[asin]["price"] for asin in list(products)[:4]] == ["$20.0", "$30.0 to $1050.5", "$100.0", "$4299.99"]
    assert products["RUG0000002"]["pricing"] == [30.0, 1050.5] and products["LAMP000001"]["title"] == "Bright Desk Lamp"
    assert products["RUG0000001"]["query"] == "rugs" and products["TEA0000001"]["features"] == [""]
    assert products["RUG0000002"]["features"] == ["Thin", "Washable cotton"] and products["LAMP000001"]["nouns"] == ["a", "second", "one", "of", "this", "id"]
    assert webshop_data.products_of(Path(shop) / "items_shuffle_1000.json") == products     # the file will do


@needs_search
def test_goals_are_every_choice_of_the_options_in_the_released_order(shop):
    goals = webshop_data.load_goals(shop, 0, "synthetic")
    in_order = [(asin, options) for asin, options in (
        *[("RUG0000001", [("color", color), ("size", size)]) for color in ("red", "redwood", "light blue") for size in ("2 | 3 ft", "4 ft")],
        ("RUG0000002", []), ("TEA0000001", [("flavor name", "mint")]), ("TEA0000001", [("flavor name", "buy now")]))]
    random.seed(233)
    random.shuffle(in_order)
    assert [(goal["asin"], goal["options"]) for goal in goals.values()] == in_order
    assert [task.split("/")[1] for task in goals] == [f"{n:05d}" for n in range(9)]
    assert {task.split("/")[0] for task in goals} == {"garden", "grocery"}
    text = next(goal["instruction"] for goal in goals.values() if goal["options"] == [("color", "redwood"), ("size", "4 ft")])
    assert re.fullmatch(r"Find me hand made rugs with wool rug with color: redwood, and size: 4 ft, "
                        r"and price lower than [456]0\.00 dollars", text)
    tea = [goal for goal in goals.values() if goal["asin"] == "TEA0000001"]
    assert all(goal["bound"] == 1_000_000 and "dollars" not in goal["instruction"] for goal in tea)     # no multiple of 10 above it
    human, = webshop_data.load_goals(shop, 0, "human").values()
    assert human["options"] == ["four feet", "red"] and human["instruction"].startswith("i want a hand made rug, four feet wide, and price")


@needs_search
def test_prices_and_bounds_are_drawn_once_by_their_seed(shop, tmp_path_factory):
    def drawn(data, seed):
        webshop_data.load.cache_clear(), webshop_data.load_goals.cache_clear()
        return (webshop_data.load(data, seed)[1],
                {goal["asin"]: goal["bound"] for goal in webshop_data.load_goals(data, seed, "synthetic").values()})

    prices, bounds = drawn(shop, 0)
    assert prices["RUG0000001"] == 20 and prices["LAMP000001"] == 100 and 30 <= prices["RUG0000002"] <= 1050.5
    assert prices["RUG0000002"] == pytest.approx(568.3, abs=600) and drawn(shop, 0) == (prices, bounds) != drawn(shop, 1)
    fewer = write(tmp_path_factory.mktemp("fewer"), PRODUCTS[1:4][::-1])
    assert drawn(fewer, 0)[0]["RUG0000002"] == prices["RUG0000002"]      # its own draw, whatever else is there
    found = {webshop_data.bound_of(20.0, f"{n}")[0] for n in range(50)}
    assert found == {40, 50, 60} and webshop_data.bound_of(975.0, "x") == (990, ", and price lower than 990.00 dollars")
    assert webshop_data.bound_of(985.0, "x") == (1_000_000, "")


@needs_search
def test_an_episode_by_hand(shop):
    env, page, info = start(shop, "color: light blue, and size: 4 ft")
    instruction = env._goal["instruction"]
    assert page == f"WebShop [SEP] Instruction: [SEP] {instruction} [SEP] Search" and env.max_turns == 15
    assert info["success"] is False and info["valid"] is True and info["score"] == 0 and "parts" not in info
    page, reward, terminated, truncated, info = env.step("Thought: a rug.\n<action>search[acme wool rug]</action>")
    assert page == (f"Instruction: [SEP] {instruction} [SEP] Back to Search [SEP] Page 1 (Total results: 2) [SEP] Next > [SEP] RUG0000001 "
                    "[SEP] Acme Wool Rug [SEP] $20.0 [SEP] RUG0000002 [SEP] Acme Cotton Rug [SEP] $30.0 to $1050.5")
    assert (reward, terminated, truncated, info["valid"]) == (0.0, False, False, True)
    page = env.step("click[RUG0000001]")[0]
    item = (f"Instruction: [SEP] {instruction} [SEP] Back to Search [SEP] < Prev [SEP] size [SEP] 2 | 3 ft [SEP] 4 ft [SEP] color [SEP] red "
            "[SEP] redwood [SEP] light blue [SEP] Acme Wool Rug [SEP] Price: $20.0 [SEP] Rating: N.A. [SEP] Description [SEP] Features "
            "[SEP] Reviews [SEP] Buy Now")
    assert page == item and env.step("click[4 ft]")[0] == item and env._chosen == {"size": "4 ft"}
    assert env.step("click[Description]")[0] == f"Instruction: [SEP] {instruction} [SEP] Back to Search [SEP] < Prev [SEP] A thing"
    assert env.step("click[buy now]")[4]["valid"] is False      # not on this page
    assert env.step("click[< prev]")[0] == item and env._chosen == {"size": "4 ft"}     # kept
    assert env.step("click[features]")[0].endswith("< Prev [SEP] Soft") and env.step("click[< Prev]")[0] == item
    assert env.step("click[reviews]")[0].endswith("[SEP] < Prev")
    env.step("click[< prev]"), env.step("click[< prev]")
    assert env._page == "results" and env._chosen == {}         # left
    env.step("click[rug0000001]"), env.step("click[4 ft]"), env.step("click[red]")
    page, reward, terminated, truncated, info = env.step("click[buy now]")
    assert (reward, terminated, truncated, info["success"]) == (4 / 5, True, False, False) and info["score"] == 80
    assert info["parts"] == {"type": 1.0, "title_score": 1.0, "query": True, "category": True, "attributes": 1.0, "options": 0.5,
                             "price": True}
    assert page == "Bought RUG0000001 (Acme Wool Rug) with size: 4 ft; color: red at 20.00 dollars."
    assert "Wanted: rugs; hand made, wool rug; color: light blue; size: 4 ft; at most" in info["reference"]
    assert info["reference"].endswith("Reward: 0.80 (type 1.0, share of attributes 1.00, of options 0.50, price within the bound).")
    with pytest.raises(RuntimeError, match="reset"):
        env.step("click[buy now]")
    assert env.gold_action() is env.action_guidance() is env.observation_enrichment() is env.admissible_actions() is None


@needs_search
def test_result_pages_never_end_and_the_sixth_is_empty(shop):
    env, *_ = start(shop, "teas")
    page = env.step("search[plain carpet]")[0]
    assert "Page 1 (Total results: 50)" in page and page.count("Plain carpet") == 10 and "< Prev" not in page
    assert env.step("click[< prev]")[4]["valid"] is False
    for number in range(2, 9):
        page, *_, info = env.step("click[next >]")
        assert f"Page {number} (" in page and "< Prev" in page and page.count("Plain carpet") == (10 if number < 6 else 0) and info["valid"]
    env.step("click[< prev]"), env.step("click[< prev]"), env.step("click[< prev]")
    env.step(env.admissible_actions()[0])           # a product of page 5
    assert env._page == "item" and "Page 5 (" in env.step("click[< prev]")[0]
    page = env.step("click[back to search]")[0]
    assert page.startswith("WebShop") and env.step("click[next >]")[4]["valid"] is False
    assert "Total results: 0)" in env.step("search[zzz]")[0]


@pytest.mark.parametrize("text, command", [
    ("search[red rug]", ("search", "red rug")), ("Click[ Buy Now ]", ("click", "buy now")), ("click [ < Prev ]", ("click", "< prev")),
    ("<think>search[a]</think>\nclick[b]", ("click", "b")), ("<action>search[a]</action><action>click[b]</action>", ("click", "b")),
    ("Action: click[b [2]]", ("click", "b [2]")), ("I need a rug.\n**search[rug]**", ("search", "rug")), ("<think>click[b]", None), ("buy now", None), ("click[]", None), ("click[ ]", None),
    ("search", None), ("", None), ("click[a", None), ("research[a]", None), ("search[a] now", ("search", "a"))])
def test_the_action_in_a_text(text, command):
    assert read_command(text) == command


@needs_search
def test_invalid_actions_show_the_same_page_and_change_nothing(shop):
    env, page, _ = start(shop, "redwood, and size: 4 ft")
    env.step("search[acme]"), env.step("click[rug0000001]")
    page = env.step("click[4 ft]")[0]
    for text in ("", "dance", "click[5 ft]", "click[search]", "click[next >]", "click[rug0000001]", "click[attributes]", "click[" * 10_000,
                 "x" * 300_000, "\x00", "\ud800", "<think>click[buy now]", "__import__('os')", "search[]"):
        after, reward, terminated, truncated, info = env.step(text)
        shown = invalid(page, text)  # the same, and where thinking did not end, that
        assert (after, reward, terminated, truncated, info["valid"], env._chosen) == (shown, 0.0, False, False, False, {"size": "4 ft"})
    assert UNFINISHED in env.step("<think>click[buy now]")[0]


@needs_search
def test_a_button_wins_over_an_option_of_its_name_and_spaces_do_not_matter(shop):
    env, *_ = start(shop, "flavor name: buy now")
    env.step("search[green tea]"), env.step("click[tea0000001]"), env.step("click[ M i n t ]")
    env._clickable["m int"] = ("option", "flavor name", "m int")        # what is so written wins
    assert env.step("click[m int]")[4]["valid"] and env._chosen == {"flavor name": "m int"}
    env.step("click[MINT]")
    assert env._chosen == {"flavor name": "mint"} and env.gold_action() == "click[buy now]"     # its own option cannot be clicked
    assert env.step("click[buynow]")[2] is True


@needs_search
def test_ours_and_reachable(shop):
    every = WebShop.tasks("test", data=shop)
    left = WebShop.tasks("test", data=shop, reachable=True)
    gone = [webshop_data.load_goals(shop, 0, "synthetic")[task]["options"] for task in every if task not in left]
    assert len(every) == 9 and left == [task for task in every if task in left] and len(gone) == 2
    assert all(("color", "redwood") in options for options in gone)
    assert WebShop.tasks("test", data=shop, reachable=True, rule="ours") == every
    env, *_ = start(shop, "redwood, and size: 4 ft", rule="ours")
    assert [env.step(action)[1] for action in ("search[acme]", "click[rug0000001]", "click[redwood]", "click[4 ft]", "click[buy now]")][-1] == 1


@needs_search
def test_gold_finds_back_from_anywhere(shop):
    env, *_ = start(shop, "color: light blue, and size: 4 ft")
    for detour in (["search[plain]", "click[next >]"], ["search[acme]", "click[rug0000002]", "click[features]"], ["click[back to search]"],
                   ["search[acme]", "click[rug0000001]", "click[red]", "click[reviews]"]):
        for action in detour:
            assert env.step(action)[4]["valid"] or action == "click[back to search]"
        assert env.gold_action()
    followed = []
    while (action := env.gold_action()) is not None:
        assert env.action_guidance() == f"Hint: {action}."
        followed.append(action)
        *_, info = env.step(action)
    assert followed == ["click[< prev]", "click[light blue]", "click[4 ft]", "click[buy now]"] and info["success"]


@needs_search
def test_gold_turns_the_pages_and_gives_up_where_the_search_does_not_find_it(shop, monkeypatch):
    env, *_ = start(shop, "with cotton")
    others = [asin for asin in env._products if asin.startswith("FILL")]
    monkeypatch.setattr(env, "_search", lambda query: [*others[:15], "RUG0000002"])
    followed = []
    while (action := env.gold_action()) is not None:
        followed.append(action)
        env.step(action)
    assert followed == ["search[acme cotton rug]", "click[next >]", "click[rug0000002]", "click[buy now]"]
    env.reset(task=goal_task(shop, "with cotton"), seed=0)
    env.step(env.gold_action()), env.step("click[next >]"), env.step("click[next >]")
    assert env.gold_action() == "click[< prev]"
    monkeypatch.setattr(env, "_search", lambda query: others)
    env.step("search[acme cotton rug]")
    assert env.gold_action() is None and env.action_guidance() is None


@needs_search
def test_enrichment_tells_what_is_wanted_shown_and_chosen(shop):
    env, *_ = start(shop, "color: light blue, and size: 4 ft")
    bound = f"at most {env._goal['bound']:.2f} dollars"
    wanted = f"Wanted: hand made, wool rug; color: light blue; size: 4 ft; {bound}."
    assert env.observation_enrichment() == wanted
    env.step("search[acme]")
    assert env.observation_enrichment() == f"{wanted} This page shows 1 of the 2 attributes: wool rug."
    env.step("click[rug0000001]"), env.step("click[4 ft]")
    assert env.observation_enrichment().endswith("Of the wanted options it offers: color: light blue, size: 4 ft. Chosen: size: 4 ft.")
    env.step("click[< prev]"), env.step("click[rug0000002]")
    assert env.observation_enrichment() == (f"{wanted} This page shows 0 of the 2 attributes. Of the wanted options it offers: none. "
                                            "Chosen: nothing.")


@needs_search
def test_a_persons_goal_names_values_alone(shop):
    env, *_ = start(shop, "i want", goals="human")
    assert WebShop.tasks("test", data=shop, goals="human") == ["garden/00000"] and WebShop.tasks("train", data=shop, goals="human") == []
    assert env._gold == [("color", "red")]      # "four feet" is like no value
    while (action := env.gold_action()) is not None:
        _, reward, *_, info = env.step(action)
    assert reward == 3 / 4 and info["parts"]["options"] == 0.5


@needs_search
@pytest.mark.parametrize("text, words", [
    ("Women's shoes, the 2nd", ["women", "shoe", "2nd"]), ("2.4GHz Wi-Fi", ["2.4ghz", "wi", "fi"]), ("1,000 pcs", ["1,000", "pc"]),
    ("1.if U.S.A", ["1", "u.s.a"]), ("material:spandex size 5:6", ["material:spandex", "size", "5", "6"]), ("us technology", ["us", "technolog"]),
    ("assembly possibly", ["assembl", "possibl"]), ("it is for the", []), ("☃ 60\" x 80\"", ["60", "x", "80"])])
def test_words_are_cut_and_stemmed_as_lucene_does(text, words):
    import Stemmer
    assert webshop_data.words_of(text, Stemmer.Stemmer("porter").stemWords) == words


# --- properties that every environment has --------------------------------------------------------------------------

ACTIONS = ["search[acme]", "hm", "click[rug0000001]", "click[red]", "click[description]", "click[< prev]", "click[4 ft]", "click[buy now]"]


@needs_search
def test_same_task_same_episode_and_instances_do_not_disturb_each_other(shop):
    env, *first = start(shop, "redwood, and size: 4 ft")
    alone = [env.step(action) for action in ACTIONS]
    other, *_ = start(shop, "with cotton")
    again, *second = start(shop, "redwood, and size: 4 ft")
    assert first == second == list(env.reset(task=goal_task(shop, "redwood, and size: 4 ft"), seed=7))
    for action, expected in zip(ACTIONS, alone):
        other.step("search[plain]")
        assert again.step(action) == expected == env.step(action)


@needs_search
def test_another_process_and_another_hash_seed_give_the_same_episode(shop):
    code = ("import sys; sys.path[:0] = sys.argv[1:3]\nfrom test_webshop import *\nenv, *first = start(sys.argv[3], 'with cotton')\n"
            "print(repr([first, *[env.step(a) for a in ['search[acme plain rug 7]', 'click[rug0000002]', 'click[buy now]']]]))")
    told = {subprocess.run([sys.executable, "-c", code, str(ROOT), str(ROOT / "tests"), shop], text=True, capture_output=True, check=True,
                           env=os.environ | {"PYTHONHASHSEED": hashes}).stdout for hashes in ("1", "2")}
    assert len(told) == 1 and "Bought RUG0000002" in told.pop()


@needs_search
@pytest.mark.parametrize("text", ["color: light blue, and size: 4 ft", "with cotton"])
def test_hints_change_nothing(shop, text):
    task, schedule = goal_task(shop, text), Schedule("both")
    plain = make_env("webshop", {"data": shop})
    assert schedule.why_no_hints(plain, [task], 15) == ""
    hinted = EnrichedEnv(make_env("webshop", {"data": shop}), schedule)
    for play in ([action for *_, action in walk(plain, task) if action], ACTIONS, ["nonsense"] * 15):
        one, two = plain.reset(task=task, seed=0), hinted.reset(task=task, seed=0, enriched=True)
        assert two[0] == f"{one[0]}\n{two[1]['hint']}"
        for action in play:
            one, two = plain.step(action), hinted.step(action)
            assert two[1:4] == one[1:4] and {key: value for key, value in two[4].items() if key != "hint"} == one[4]
            assert two[0] == (f"{one[0]}\n{two[4]['hint']}" if "hint" in two[4] else one[0])
            if one[2]:
                break


@needs_search
def test_neither_hints_nor_pages_nor_the_prompt_hold_the_reference(shop):
    env, page, info = start(shop, "color: light blue, and size: 4 ft")
    seen = [env.system_prompt, page]
    while (action := env.gold_action()) is not None:
        seen += [env.action_guidance(), env.observation_enrichment()]
        page, *_, info = env.step(action)
        seen.append(page)
    assert "such as RUG0000001" in info["reference"] and not any("such as" in text or "Reward" in text for text in seen)


@needs_search
def test_reflection_has_every_action_what_it_changed_and_the_reference(shop):
    env, page, info = start(shop, "color: light blue, and size: 4 ft")
    t = Trajectory("a", 0, 0, False, first_observation=page)
    for action in ("search[rug]", "So:\n<action>click[RUG0000001]</action>", "click[red]", "click[teapot]", "hm", "click[description]",
                   "click[< prev]", "click[buy now]"):
        page, reward, _, _, info = env.step(action)
        t.turns.append(Turn([], [], action, page, reward, info["valid"], "end"))
    t.info = info
    lines = env.reflection(t).splitlines()
    assert lines[0] == t.first_observation and lines[-1] == info["reference"]
    assert [line for line in lines if line.startswith("> ")] == [
        "> search[rug]", "> click[rug0000001]", "> click[red]", "> click[teapot] (not possible here)", "> (no action) hm (not possible here)",
        "> click[description]", "> click[< prev]", "> click[buy now]"]
    assert lines[2].startswith("Page 1 (Total results: ") and "RUG0000001" in lines[2] and "light blue" in lines[4]
    assert lines[6] == lines[8] == lines[10] == lines[14] == "(the page of turn 2)" and lines[16].startswith("Bought RUG0000001")
    assert not any(button in text for text in lines[1:-1] for button in ("Back to Search", "Buy Now", "Instruction:", "Next >"))


@needs_search
def test_reflection_says_which_page_it_is_where_a_page_holds_nothing_but_buttons(shop):
    env, page, _ = start(shop, "color: light blue, and size: 4 ft")
    t = Trajectory("a", 0, 0, False, first_observation=page)
    for action in ("search[rug]", "click[back to search]", "search[rug]", "click[back to search]"):
        page, reward, _, _, info = env.step(action)
        t.turns.append(Turn([], [], action, page, reward, info["valid"], "end"))
    assert env.reflection(t).splitlines()[4:9:2] == ["(the search page)", "(the page of turn 1)", "(the page of turn 2)"]


@needs_real
@needs_search
def test_fifteen_turns_are_whole_in_15000_characters(data):
    """The worst that was found: fifteen searches that find other pages."""
    env, task = make_env("webshop", {"data": data}), WebShop.tasks("test", data=data)[0]
    t = Trajectory(task, 0, 0, False, first_observation=env.reset(task=task, seed=0)[0])
    for word in "red blue green lamp tea coat shoe chair table shirt oil hair cream snack phone".split():
        page, reward, _, _, t.info = env.step(f"search[{word}]")
        t.turns.append(Turn([], [], f"search[{word}]", page, reward, True, "end"))
    text = env.reflection(t)
    assert len(text) < 15_000 < sum(len(turn.observation) for turn in t.turns) and text.count("\n> ") == 15
    assert text.endswith(t.info["reference"]) and "Bought: nothing" in text


@needs_search
def test_a_resumed_run_equals_an_unbroken_one(shop, tmp_path_factory):
    """Two steps at once, and one step resumed to two, of a random model over the shop's words."""
    import torch  # noqa: F401
    from conftest import metrics, tiny_qwen3

    import grpo
    from rl.tiny import texts_of, word_tokenizer
    folder = tmp_path_factory.mktemp("run")
    tasks = WebShop.tasks("test", data=shop)
    tokenizer = word_tokenizer(texts_of(make_env("webshop", {"data": shop}), tasks, 0))
    tokenizer.save_pretrained(folder / "model")
    tiny_qwen3(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id).save_pretrained(folder / "model")
    webshop_data.load.cache_clear()

    def train(name, *more):
        grpo.main(["--model", str(folder / "model"), "--env", f"{__name__}:Small", "--env-options", f"data={shop}", "--max-turns", "3",
                   "--tasks-per-step", "2", "--group", "2", "--max-new-tokens", "6", "--warm-start", "gold", "--warm-start-steps", "2",
                   "--warm-start-batch", "2", "--eval-every", "0", "--eval-episodes", "2", "--out", str(folder / name), *more])

    train("whole", "--steps", "2")
    train("parts", "--steps", "1")
    train("parts", "--steps", "2", "--resume")
    assert metrics(folder / "parts") == metrics(folder / "whole") and len(metrics(folder / "whole")) == 2


class Small(WebShop):
    """The shop made by hand is smaller than the released test split: every split is all of it."""

    @classmethod
    def tasks(cls, split, data=None):
        return WebShop.tasks("test", data=data)


# --- hostile texts -----------------------------------------------------------------------------------------------

HOSTILE = ["", " ", "\x00", "\ud800", " [SEP] Buy Now", "click[buy now]", "</think>", "<action>click[buy now]</action>", "<|im_end|>", "{0} %s",
           "x" * 30_000, "a " * 20_000, "]", "[", "\u202e\u2603\uffff", "buy now\n", "back to search"]


@needs_search
def test_hostile_products_and_searches_never_crash(tmp_path):
    products = [raw(f"EVIL{n:06d}", text, text, {text: [text, "fine"], "size": HOSTILE}, text, "garden", text, [text, text], text)
                for n, text in enumerate(HOSTILE)]
    ins = {f"EVIL{n:06d}": {"attributes": [text], "instruction": text or "x", "instruction_attributes": [text]}
           for n, text in enumerate(HOSTILE)}
    data = write(tmp_path, products, ins, {}, {asin: [] for asin in ins})
    rng = random.Random(0)
    env = make_env("webshop", {"data": data})
    for task in WebShop.tasks("test", data=data)[::17]:
        page, info = env.reset(task=task, seed=0)
        for turn in range(12):
            text = f"{page}{info['reference']}{env.action_guidance()}{env.observation_enrichment()}{env.admissible_actions()}"
            assert text.encode("utf-8") and len(page) <= 6000
            action = rng.choice(env.admissible_actions()) if turn % 3 else f"search[{rng.choice(HOSTILE)}]"
            page, reward, terminated, _, info = env.step(action)
            assert 0 <= reward <= 1 and ("Bought" in page) == terminated
            if terminated:
                break


@needs_search
@pytest.mark.parametrize("query", ["<r>", "<a> washable", "<c> garden", "<q> rugs", "\x00", "\ud800", "the of and", "☃", "carpet " * 50_000,
                                   "*", "title:rug", "a]b[c"])
def test_any_search_is_words_and_no_more(shop, query):
    env, *_ = start(shop, "with cotton")
    page, *_, info = env.step(f"search[{query}]")
    assert info["valid"] and "Page 1 (Total results: " in page and page == env.step(f"search[{query}]")[0] and page.encode("utf-8")
    assert ("results: 0)" in page) == (query not in ("<q> rugs", "carpet " * 50_000)), page


# --- bad input ---------------------------------------------------------------------------------------------------

def test_no_data_is_one_line(tmp_path, monkeypatch):
    monkeypatch.delenv("WEBSHOP_DATA", raising=False)
    one_line("data=FOLDER.*WEBSHOP_DATA.*setup.sh", WebShop)
    one_line("no items_shuffle.*setup.sh", lambda: WebShop(data=str(tmp_path)))
    one_line("no items_shuffle", lambda: WebShop(data=str(tmp_path / "nowhere")))
    monkeypatch.setenv("WEBSHOP_DATA", str(tmp_path / "there"))
    one_line("there", lambda: select_tasks("webshop", "train"))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4\n"


@pytest.mark.parametrize("name", ["items_shuffle_1000.json", "items_ins_v2_1000.json", "items_human_ins.json", "nouns_1000.json"])
def test_a_pointer_or_a_cut_file_is_one_line(shop, name):
    path = Path(shop) / name
    whole = path.read_bytes()
    path.write_bytes(POINTER)
    one_line(f"{name} is a Git LFS pointer", lambda: webshop_data.products_of(Path(shop)))
    for content in (whole[:len(whole) // 2], b"", b"\xff\xfe", b"[" * 100_000):
        path.write_bytes(content)
        one_line(f"{name} is damaged or cut off", lambda: webshop_data.products_of(Path(shop)))


def test_a_cut_archive_is_one_line(tmp_path):
    whole = lzma.compress(json.dumps([{"asin": f"{n}"} for n in range(1000)]).encode())
    for content in (whole[:-20], whole[:40], b"words", POINTER):
        (tmp_path / "shop.json.xz").write_bytes(content)
        one_line("is damaged or cut off|is a Git LFS pointer", lambda: webshop_data.products_of(tmp_path / "shop.json.xz"))


def test_files_that_do_not_fit_together_are_one_line(tmp_path):
    def read(match, **files):
        for path in tmp_path.glob("*.json"):
            path.unlink()
        one_line(match, lambda: webshop_data.products_of(Path(write(tmp_path, **files))))

    read("items_ins_v2_1000.json cannot be read", ins=None)
    read("lacks 1 of the 64 products of items_shuffle_1000.json.*versions", ins={key: INS[key] for key in INS if key != "TEA0000001"})
    read("no .*nouns_1000.json.*python -m envs.webshop_data", nouns=None)
    read("nouns_1000.json is of other products", nouns={key: NOUNS[key] for key in NOUNS if key != "TEA0000001"})
    read("not of the form", products=[{"asin": "A"}])
    read("not of the form", products=[PRODUCTS[0] | {"customization_options": {"size": [3]}}])
    read("not of the form", products=[PRODUCTS[0] | {"pricing": "$1.2.3"}])
    read("product 0 .* category", products=[PRODUCTS[0] | {"category": 3}])
    read("product 0 .* nouns", nouns=NOUNS | {"RUG0000001": [None]})
    write(tmp_path, suffix="")
    one_line("items_shuffle.json, items_shuffle_1000.json: give one", lambda: webshop_data.products_of(tmp_path))


@pytest.mark.parametrize("content", [3, {}, [3], [{}], [{"asin": "A"}], [{"asin": 3}], [None]])
def test_a_file_that_is_no_list_of_products_is_one_line(tmp_path, content):
    (tmp_path / "shop.json").write_text(json.dumps(content))
    one_line("product 0 of .* has no right (asin|title)", lambda: webshop_data.products_of(tmp_path / "shop.json"))


@needs_search
def test_goals_in_another_form_are_one_line(tmp_path):
    data = write(tmp_path, human={"RUG0000001": [{"instruction": "x"}]})
    one_line("the human goals of .* form", lambda: WebShop(data=data, goals="human"))


@needs_search
@pytest.mark.parametrize("options, word", [
    ({"goals": "all"}, "goals"), ({"apart": "maybe"}, "apart"), ({"reachable": 2}, "reachable"), ({"rule": "mine"}, "rule"),
    ({"price_seed": "x"}, "price_seed"), ({"colour": 1}, "colour")])
def test_bad_options_are_one_line(shop, options, word):
    one_line(word, lambda: make_env("webshop", {"data": shop, **options}))


@needs_search
def test_unknown_tasks_and_splits_are_one_line(shop):
    env = WebShop(data=shop)
    for task in ("garden/99999", "", "x" * 10_000, "\ud800"):
        one_line("unknown task", lambda: env.reset(task=task, seed=0))
    one_line("unknown split", lambda: WebShop.tasks("dev", data=shop))
    assert env_class("webshop") is WebShop
    one_line("exactly one", lambda: env_class("webshop_data"))


@pytest.mark.parametrize("name", ["bm25s", "Stemmer"])
def test_a_missing_package_says_what_to_install(shop, monkeypatch, name):
    webshop_data.load.cache_clear()
    monkeypatch.setitem(sys.modules, name, None)
    one_line("pip install -r envs/webshop-requirements.txt", lambda: WebShop(data=shop))


# --- the set-up command ------------------------------------------------------------------------------------------

class FakeSpacy:
    """A toy tagger: words that begin with a capital letter are nouns. `spacy.load` gives it."""

    def load(self, name, exclude=()):
        assert name == "en_core_web_sm"
        return self

    def pipe(self, texts):
        return [[SimpleNamespace(text=word, pos_="PROPN" if word[0].isupper() else "ADJ") for word in text.split()] for text in texts]


@needs_search
def test_the_set_up_command_writes_the_nouns_once(shop, monkeypatch, capsys):
    (Path(shop) / "nouns_1000.json").unlink()
    one_line("python -m envs.webshop_data", lambda: WebShop(data=shop))
    monkeypatch.setitem(sys.modules, "spacy", FakeSpacy())
    webshop_data.main([shop])
    assert "the nouns of 64 titles" in capsys.readouterr().out
    assert webshop_data.products_of(Path(shop))["FILL000003"]["nouns"] == ["plain"]
    start(shop, "with cotton")


def test_without_spacy_the_set_up_command_says_what_to_install(shop, monkeypatch):
    monkeypatch.setitem(sys.modules, "spacy", None)
    one_line("pip install spacy && python -m spacy download en_core_web_sm", lambda: webshop_data.main([shop]))
    monkeypatch.setitem(sys.modules, "spacy", SimpleNamespace(load=lambda *_, **__: open("/nowhere/en_core_web_sm")))
    one_line("spacy download en_core_web_sm.*FileNotFoundError", lambda: webshop_data.main([shop]))
    for argv in ([], ["a", "b"], ["--help"]):
        one_line("python -m envs.webshop_data FOLDER", lambda: webshop_data.main(argv))
    done = subprocess.run([sys.executable, "-m", "envs.webshop_data", "/nowhere"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: webshop: no items_shuffle") and done.stderr.count("\n") == 1


# --- the real products -------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def data():
    return str(REAL)


@needs_real
def test_the_real_sets_splits(data):
    splits = {split: WebShop.tasks(split, data=data) for split in ("test", "valid", "train")}
    assert {split: len(tasks) for split, tasks in splits.items()} == {"test": 500, "valid": 1000, "train": 5410}
    assert len(set().union(*splits.values())) == 6910 and splits["test"][0] == "garden/00000" and splits["valid"][0].endswith("/00500")
    assert len(WebShop.tasks("test", data=data, goals="human")) == 13
    apart = {split: WebShop.tasks(split, data=data, apart="true") for split in splits}
    goals = webshop_data.load_goals(data, 0, "synthetic")
    products = {split: {goals[task]["asin"] for task in tasks} for split, tasks in apart.items()}
    assert {split: len(found) for split, found in products.items()} == {"test": 42, "valid": 42, "train": 331}
    assert not products["test"] & products["valid"] and not products["train"] & (products["test"] | products["valid"])
    assert sum(map(len, apart.values())) == 6910 and len({goals[task]["asin"] for task in splits["test"]} & {
        goals[task]["asin"] for task in splits["train"]}) > 50      # as released they are not


@needs_real
def test_458_goals_are_out_of_reach_of_their_own_product_and_none_by_our_rule(data):
    reachable = [task for split in ("test", "valid", "train") for task in WebShop.tasks(split, data=data, reachable=True)]
    assert 6910 - len(reachable) == 458
    _, prices, _ = webshop_data.load(data, 0)
    assert all(reward_of(goal["product"], prices[goal["asin"]], dict(goal["options"]), goal, "ours")[0] == 1
               for goal in webshop_data.load_goals(data, 0, "synthetic").values())


def gold(env, task, seed=0):
    """(reward, turns) of the episode along `gold_action`."""
    env.reset(task=task, seed=seed)
    reward, turns = 0.0, 0
    while (action := env.gold_action()) is not None:
        _, reward, *_, info = env.step(action)
        turns += 1
        assert info["valid"] and turns <= 15, action
    return reward, turns


@needs_real
def test_gold_play_reaches_1_in_at_least_nine_of_ten_and_the_official_value_in_all(data):
    env, tasks = WebShop(data=data), WebShop.tasks("test", data=data)[:200]
    rewards = []
    for task in tasks:
        reward, _ = gold(env, task)
        goal = env._goal
        assert reward == second_reward(goal["product"], env._prices[goal["asin"]], dict(goal["options"]), goal)
        rewards.append(reward)
    assert sum(reward == 1 for reward in rewards) >= 180 and min(rewards) > 0.6


def second_reward(product, price, chosen, goal):
    """The official formula once more, from its description and with thefuzz where it is installed."""
    try:
        from thefuzz.fuzz import token_set_ratio as likeness
    except ImportError:
        likeness = token_set_ratio
    wanted = goal["product"]
    nouns = wanted["nouns"]
    found = sum(1 for noun in set(nouns) if noun in product["nouns"])
    share = found / len(nouns) if nouns else 0.2
    left, right = ([name.strip() for name in item["product_category"].split("›")] for item in (product, wanted))
    kind = 0.5
    if product["query"] == wanted["query"] or len(set(left).intersection(right)) > 1 or share > 0.2:
        kind = 1.0
    if share < 0.1:
        kind = 0.1
    if share == 0:
        kind = 0.0
    text = [product["title"].lower(), " ".join(product["features"]).lower(), product["description"].lower()]
    points = 0
    for attribute in goal["attributes"]:
        if max([likeness(own, attribute) for own in product["attributes"]] or [0]) > 85 or any(attribute in part for part in text):
            points += 1
    for pair in goal["options"]:
        pair = next((colour for colour in COLOURS if colour in pair), pair)
        values = [next((colour for colour in COLOURS if colour in value), value) for value in chosen.values()]
        points += any(likeness(value, str(pair)) > 85 for value in values)
    return kind * ((points + (price <= goal["bound"])) / (len(goal["attributes"]) + len(goal["options"]) + 1))


class Pages:
    """A second model of the pages, written from the description of the text environment: what can be clicked, and what comes of it."""

    def __init__(self, products, find):
        self.products, self.find, self.where, self.options = products, find, ("start",), {}

    def clickables(self):
        if self.where[0] == "start":
            return set()
        if self.where[0] == "list":
            _, hits, page = self.where
            return {"back to search", "next >", *(["< prev"] if page > 1 else []), *map(str.lower, hits[10 * page - 10:10 * page])}
        if self.where[0] == "sub":
            return {"back to search", "< prev"}
        values = [value for part in self.products[self.where[3]]["options"].values() for value in part]
        return {"back to search", "< prev", "description", "features", "reviews", "buy now", *(" ".join(v.split()) for v in values)}

    def click(self, text):
        """The product that is bought, or None."""
        kind, *rest = self.where
        if text == "back to search":
            self.where, self.options = ("start",), {}
        elif kind == "list":
            hits, page = rest
            turn = {"next >": 1, "< prev": -1}.get(text)
            self.where = ("list", hits, page + turn) if turn else ("item", hits, page, text.upper())
        elif text == "< prev":
            self.where = ("item", *rest) if kind == "sub" else ("list", *rest[:2])
            self.options = self.options if kind == "sub" else {}
        elif text in ("description", "features", "reviews"):
            self.where = ("sub", *rest)
        elif text == "buy now":
            return rest[2]
        else:
            for name, values in self.products[rest[2]]["options"].items():
                if text in [" ".join(value.split()) for value in values]:
                    chosen = name, next(value for value in values if " ".join(value.split()) == text)
            self.options[chosen[0]] = chosen[1]
        return None

    def search(self, words):
        self.where, self.options = ("list", self.find(words), 1), {}


@needs_real
def test_200_random_episodes_go_as_the_second_model_says(data):
    products, prices, find = webshop_data.load(data, 0)
    env, rng = WebShop(data=data), random.Random(0)
    tasks, ended, pages = WebShop.tasks("train", data=data), 0, 0
    for task in rng.sample(tasks, 200):
        env.reset(task=task, seed=0)
        goal, model = env._goal, Pages(products, find)
        for turn in range(15):
            clickable = model.clickables()
            if model.where[0] != "start":
                assert {action[6:-1] for action in env.admissible_actions()} == clickable
            draw = rng.random()
            if draw < 0.15 or not clickable:
                words = rng.choice([goal["product"]["query"], goal["product"]["title"].lower(), goal["instruction"].lower(), "gold ring"])
                action, what = f"search[{words}]", None
                model.search(" ".join(words.split())[:1000] if words == goal["instruction"].lower() else words.strip())
            elif draw < 0.25:
                action = rng.choice(["click[nothing like this]", "buy now", "click[search]", "hm"])
                page, reward, terminated, _, info = env.step(action)
                assert (reward, terminated, info["valid"]) == (0.0, False, False)
                continue
            else:
                # towards the end of an episode rather a product and a purchase than anything
                sharp = [text for text in sorted(clickable) if text == "buy now" or text.upper() in products]
                what = rng.choice(sharp if sharp and rng.random() < 0.3 else sorted(clickable))
                action = f"click[{what}]"
            sold = model.click(what) if what else None
            page, reward, terminated, truncated, info = env.step(action)
            pages += 1
            assert info["valid"] and not truncated and terminated == (sold is not None)
            assert reward == (second_reward(products[sold], prices[sold], model.options, goal) if sold else 0.0)
            if sold:
                ended += 1
                break
    assert ended > 60 and pages > 1000


@needs_real
def test_speed_and_memory(data):
    """In processor time of a fresh process: 1,000 products in 5 s and 500 MB, then at least 300 steps a second."""
    done = subprocess.run([sys.executable, __file__, data], capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    seconds, megabytes = map(float, re.search(r"loaded in ([\d.]+) s of processor time, ([\d.]+) MB", done.stdout).groups())
    assert seconds < 5 and megabytes < 500, done.stdout
    assert all(float(rate) > 300 for rate in re.findall(r"([\d.]+) steps/s", done.stdout)) and done.stdout.count("steps/s") == 2, done.stdout


def main(data=str(REAL)):
    """Gold and random play of the first 200 test goals."""
    began = time.process_time()
    env, tasks = WebShop(data=data), WebShop.tasks("test", data=data)[:200]
    peak = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024
    print(f"loaded in {time.process_time() - began:.1f} s of processor time, {peak:.0f} MB")
    rng = random.Random(0)
    for name in ("gold", "random"):
        rewards, turns, began = [], 0, time.process_time()
        for task in tasks:
            env.reset(task=task, seed=0)
            for turn in range(env.max_turns):
                action = env.gold_action() if name == "gold" else rng.choice(env.admissible_actions())
                _, reward, terminated, *_ = env.step(action)
                turns += 1
                if terminated:
                    break
            rewards.append(reward)
        print(f"{name} play of {len(tasks)} test goals: success {sum(r == 1 for r in rewards) / len(tasks):.3f}, "
              f"score {100 * sum(rewards) / len(tasks):.1f}, {turns / len(tasks):.1f} turns, {turns / (time.process_time() - began):.0f} steps/s")


if __name__ == "__main__":
    main(*sys.argv[1:])
