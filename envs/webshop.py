"""WebShop: find, configure and buy the product that an instruction asks for, on the benchmark's real products.

Benchmark: Yao et al., "WebShop", arXiv 2207.01206, and its released text environment (web_agent_text_env.py, observation_mode
"text"). The Experience Funnel (arXiv 2609.08919) is tried on it. 15 turns, as published agents have.

    pip install -r envs/webshop-requirements.txt
    git clone https://github.com/princeton-nlp/WebShop && cd WebShop && ./setup.sh -d small     # downloads into data/
    python -m envs.webshop_data WebShop/data                                                    # once: nouns, by spaCy

A turn is `search[words]`, on every page, or `click[x]`, x being something that the page shows as a button, a product's id or the
value of an option: `buy now` ends the episode with the reward of envs/webshop_reward.py, in 0..1. Success is a reward of 1. An
invalid action shows the same page and costs a turn. Pages are what is visible, joined by " [SEP] ". Leaving a product's page
clears the chosen options, its Description, Features and Reviews keep them; `next >` never ends, and shows no product after page 5.

Task ids are `<category>/<number>`, the number being the goal's place in the released order (shuffled with seed 233). Splits are the
released ones: 0-499 test, 500-1499 valid, the rest train. Goals of one product, one for each choice of its options, lie in several
of them; `apart=true` keeps products apart. Of the 6,910 made-up goals of the 1,000 products, 458 give less than 1 for their own
product with exactly their options (envs/webshop_reward.py says why); `reachable=true` leaves them out, numbers stay as they are.

Deviations, all ours
 1. The letter case and the spaces of an action do not matter ("Click[ Buy Now ]"), nor what stands around it (`read_command`).
 2. BM25 of `bm25s` in place of Lucene: 99 % of Lucene's first ten products are among ours, the first one is the same in 98 % of 2,000
    searches (results/webshop/lucene.md); Lucene rounds the lengths of texts. A search is cut at 1,000 characters, and its hidden doors
    (`search[<r>]` for random products, `<a>`, `<c>`, `<q>`) are words like others.
 3. Prices and bounds are drawn once, by `price_seed` (envs/webshop_data.py). Officially: anew at each start.
 4. Rating and Reviews are empty, as in the downloaded set; the page Attributes, off by default, is not there; a page ends after
    6,000 characters. After the end an episode says what was bought.
 5. Hints and gold actions are ours: search by title, click, choose the options, buy. Guidance: the next of these. Enrichment: what is
    wanted, how much of it the page shows, what is chosen, which the pages do not say.
"""
import functools
import hashlib
import os
import re

from envs import BadInput, Env, reference_lines, refuse_unknown
from envs.action import invalid, parse_action
from envs.webshop_data import SETUP, clean, load, load_goals
from envs.webshop_reward import RULES, reward_of, token_set_ratio

SPLITS = {"test": range(0, 500), "valid": range(500, 1500), "train": range(1500, 10**9)}
PAGE, MAX_PAGE, MAX_QUERY = 10, 6000, 1000      # products a page, characters of a page and of a search
SUB_PAGES = ("Description", "Features", "Reviews")
SEP = " [SEP] "
BUTTONS = (*SUB_PAGES, "Instruction:", "Back to Search", "< Prev", "Next >", "Buy Now", "Rating: N.A.")

PROMPT = """You shop for what the instruction asks for: the product, with the right options, below the price. Each turn, answer \
with one action, alone on one line or inside <action></action>:
search[words]     to search the shop, on any page
click[x]          x is a button of this page, the id of a product, or the value of an option
click[buy now]    on the page of a product, once, when its options are chosen: it ends the episode"""
COMMAND = re.compile(r"(search|click)\s*\[(.+)\]", re.IGNORECASE)


def read_command(text: str) -> tuple[str, str] | None:
    """("search" or "click", its argument in lower case) of the policy's text, or None."""
    found = COMMAND.match(parse_action(text, COMMAND.match))
    return (found[1].lower(), found[2].lower().strip()) if found and found[2].strip() else None


def spaced(text: str) -> str:
    """Single spaces."""
    return " ".join(text.split())


@functools.lru_cache(16)
def split_of(split, data, goals, apart, reachable, rule, price_seed) -> dict[str, dict]:
    """{task: goal} of a split, in the released order."""
    refuse_unknown("split", split, SPLITS)
    found = load_goals(data, price_seed, goals)
    if apart:       # a tenth of the products with goals for test, a tenth for valid
        asins = sorted({goal["asin"] for goal in found.values()}, key=lambda asin: hashlib.sha256(asin.encode()).digest())
        tenth = -(-len(asins) // 10)
        part = set({"test": asins[:tenth], "valid": asins[tenth:2 * tenth], "train": asins[2 * tenth:]}[split])
        found = {task: goal for task, goal in found.items() if goal["asin"] in part}
    else:
        found = {task: goal for task, goal in found.items() if goal["number"] in SPLITS[split]}
    prices = load(data, price_seed)[1]
    return {task: goal for task, goal in found.items() if not reachable or reward_of(
        goal["product"], prices[goal["asin"]], dict(gold_options(goal)), goal, rule)[0] == 1}


def gold_options(goal) -> list[tuple[str, str]]:
    """(name, value) of the product's own options that a goal asks for; a person's goal gives values alone: the most alike ones."""
    chosen = []
    for option in goal["options"]:
        offered = [(name, value) for name, values in goal["product"]["options"].items() for value in values]
        if isinstance(option, str):
            like = max(offered, key=lambda pair: token_set_ratio(pair[1], option), default=None)
            option = like if like and token_set_ratio(like[1], option) > 85 else None
        chosen += [option] if option in offered else []
    return chosen


class WebShop(Env):
    """Options: data (folder, or file of products; else $WEBSHOP_DATA), goals "synthetic" or "human", apart and reachable (see above),
    rule "official" or "ours" (envs/webshop_reward.py), price_seed."""

    max_turns = 15
    system_prompt = PROMPT
    analyst_note = ("The reward falls with each attribute, option and price bound that is not met, and with another kind of product. "
                    "The agent sees the instruction and the pages, not what was wanted in detail; buttons are left out of the pages here.")

    def __init__(self, data=None, goals="synthetic", apart=False, reachable=False, rule="official", price_seed=0):
        self.options = checked_options(data, goals, apart, reachable, rule, price_seed)
        self.rule, self._done = rule, True
        self._products, self._prices, self._search = load(self.options[0], price_seed)
        self._goals = load_goals(self.options[0], price_seed, goals)

    @classmethod
    def tasks(cls, split, data=None, goals="synthetic", apart=False, reachable=False, rule="official", price_seed=0):
        """Ids in the released order. The small set of 1,000 products has 500 / 1000 / 5410 made-up goals and 13 of people."""
        return list(split_of(split, *checked_options(data, goals, apart, reachable, rule, price_seed)))

    def reset(self, *, task, seed):
        """Nothing is drawn at random: `seed` changes nothing."""
        if task not in self._goals:
            raise BadInput(f"webshop: unknown task {clean(task)[:80]!r}: ids look like {next(iter(self._goals), 'category/00000')}")
        self._goal, self._done = self._goals[task], False
        self._gold = gold_options(self._goal)
        self._query, self._results, self._leave = "", [], None
        self._open("start")
        return self._view(), self._info(valid=True)

    def _open(self, page, number=0, asin=None, chosen=()):
        """Show a page: "start", "results", "item", or the name of one of SUB_PAGES."""
        self._page, self._number, self._asin, self._chosen = page, number, asin, dict(chosen)
        self._clickable = {spaced(text): action for text, action in self._links()}

    def _links(self):
        """(what can be clicked, what it does) in the page's order, but buttons last: they win over an option of the same name."""
        if self._page == "start":
            return
        if self._page == "results":
            yield from ((asin.lower(), ("item", asin)) for asin in self._shown())
            yield "next >", ("results", self._number + 1)
            if self._number > 1:
                yield "< prev", ("results", self._number - 1)
        elif self._page == "item":
            for name, values in self._products[self._asin]["options"].items():
                yield from ((value, ("option", name, value)) for value in values if value.strip())
            yield "< prev", ("results", self._results_page)
            yield from ((name.lower(), ("sub", name)) for name in SUB_PAGES)
            yield "buy now", ("buy",)
        else:
            yield "< prev", ("back",)
        yield "back to search", ("start",)

    def _shown(self):
        return self._results[PAGE * (self._number - 1):PAGE * self._number]

    def step(self, action):
        """Raises RuntimeError after the end."""
        if self._done:
            raise RuntimeError("this episode is over: call reset()")
        command = read_command(action)
        if command and command[0] == "search":
            self._query = clean(command[1][:MAX_QUERY])
            self._results = self._search(self._query)
            self._open("results", 1)
            return self._view(), 0.0, False, False, self._info(valid=True)
        kind, *what = self._clicked(command[1]) if command else ("nothing",)
        if kind == "buy":
            self._done = True
            reward, parts = reward_of(self._products[self._asin], self._prices[self._asin], self._chosen, self._goal, self.rule)
            return f"Bought {self._bought()}.", reward, True, False, self._info(True, reward, parts)
        if kind == "start":
            self._open("start")
        elif kind == "results":
            self._open("results", what[0])
        elif kind == "item":
            self._results_page = self._number
            self._open("item", asin=what[0])
        elif kind == "option":
            self._open("item", asin=self._asin, chosen={**self._chosen, what[0]: what[1]})
        elif kind == "sub":
            self._open(what[0], asin=self._asin, chosen=self._chosen)
        elif kind == "back":
            self._open("item", asin=self._asin, chosen=self._chosen)
        return invalid(self._view(), action), 0.0, False, False, self._info(valid=kind != "nothing")

    def _clicked(self, text):
        """What a click does: the one so written, else the first that differs in spaces alone."""
        alike = (action for shown, action in self._clickable.items() if shown.replace(" ", "") == "".join(text.split()))
        return self._clickable.get(spaced(text)) or next(alike, ("nothing",))

    def _view(self):
        """The page's text."""
        return SEP.join(filter(None, (text.strip() for text in self._fields())))[:MAX_PAGE]

    def _fields(self):
        said = ["Instruction:", self._goal["instruction"]]
        product = self._products.get(self._asin)
        if self._page == "start":
            return ["WebShop", *said, "Search"]
        said.append("Back to Search")
        if self._page == "results":
            said += [f"Page {self._number} (Total results: {len(self._results)})", *["< Prev"] * (self._number > 1), "Next >"]
            shown = [self._products[asin] for asin in self._shown()]
            return said + [text for item in shown for text in (item["asin"], item["title"], item["price"])]
        said.append("< Prev")
        if self._page == "item":
            for name, values in product["options"].items():
                said += [name, *values]
            return said + [product["title"], f"Price: {product['price']}", "Rating: N.A.", *SUB_PAGES, "Buy Now"]
        return said + {"Description": [product["description"]], "Features": product["features"], "Reviews": []}[self._page]

    def admissible_actions(self):
        """The clicks that the page has; on the start page, where every search is valid, those that the released baseline draws from:
        the kind of product, with each wanted attribute, and the whole instruction."""
        if self._done:
            return None
        if self._page == "start":
            kind = self._goal["product"]["query"]
            words = [kind, *(f"{attribute} {kind}" for attribute in self._goal["attributes"]), self._goal["instruction"].lower()]
            return [f"search[{spaced(text)}]" for text in words]
        return [f"click[{text}]" for text in self._clickable]

    def gold_action(self):
        """Towards the goal's own product, wherever the episode is: search its title, click it, choose its options, buy. None where the
        search for its title does not find it."""
        if self._done:
            return None
        asin = self._goal["asin"]
        if self._asin == asin and self._page != "item":
            return "click[< prev]"
        if self._asin == asin:
            left = [spaced(value) for name, value in self._gold
                    if self._chosen.get(name) != value and self._clickable.get(spaced(value)) == ("option", name, value)]
            return f"click[{left[0]}]" if left else "click[buy now]"
        if self._page == "results" and asin in self._shown():
            return f"click[{asin.lower()}]"
        title = spaced(self._goal["product"]["title"].lower())[:MAX_QUERY].strip()
        if self._page == "results" and self._query == title:
            if asin not in self._results:
                return None
            return "click[next >]" if self._results.index(asin) >= PAGE * self._number else "click[< prev]"
        return f"search[{title}]"

    def action_guidance(self):
        action = self.gold_action()
        return self.phrase([action]) if action else None

    def observation_enrichment(self):
        if self._done:
            return None
        attributes, page = self._goal["attributes"], " ".join(self._fields()[3:]).lower()
        lines = [f"Wanted: {self._wanted()}."]
        if self._page != "start":
            shown = [attribute for attribute in attributes if attribute in page]
            lines.append(f"This page shows {len(shown)} of the {len(attributes)} attributes{': ' * bool(shown)}{', '.join(shown)}.")
        if self._asin:
            own = self._products[self._asin]["options"].items()
            offered = [named(pair) for pair in self._goal["options"] if any(
                pair in values if isinstance(pair, str) else pair[0] == name and pair[1] in values for name, values in own)]
            lines.append(f"Of the wanted options it offers: {', '.join(offered) or 'none'}. "
                         f"Chosen: {', '.join(map(named, self._chosen.items())) or 'nothing'}.")
        return " ".join(lines)

    def reflection(self, trajectory):
        """Each action, and what the page that it led to shows beside buttons: 60 characters of a field, 900 of a page, a page that was
        shown before by its turn alone. The choice of an option changes nothing that a page shows."""
        said, shown, pages = trajectory.first_observation.split(SEP), [trajectory.first_observation], {}
        for number, turn in enumerate(trajectory.turns, 1):
            command = read_command(turn.action)
            did = f"{command[0]}[{command[1][:200]}]" if command else f"(no action) {turn.action[-100:].strip()}"
            did += " (not possible here)" * (not turn.valid)
            page = " | ".join(text[:60] for text in turn.observation.split(SEP) if text not in {*said, *BUTTONS})[:900]
            page = page or "(the search page)"
            first = pages.setdefault(page, number)
            shown.append(f"> {did}\n{page if first == number else f'(the page of turn {first})'}")
        return "\n".join([*shown, *reference_lines(trajectory.info.get("reference"))])

    def _wanted(self):
        """What the goal asks for, in words."""
        parts = [", ".join(self._goal["attributes"]), "; ".join(map(named, self._goal["options"])),
                 f"at most {self._goal['bound']:.2f} dollars" if self._goal["bound"] < 1e6 else ""]
        return "; ".join(filter(None, parts))

    def _bought(self):
        chosen = "; ".join(map(named, self._chosen.items())) or "no option"
        return f"{self._asin} ({self._products[self._asin]['title'][:200]}) with {chosen} at {self._prices[self._asin]:.2f} dollars"

    def _info(self, valid, reward=0.0, parts=None):
        """`score`: 100 times the reward. `parts`, after a purchase: those of `reward_of`. `reference`, for reflection on the episode and
        never for the policy: what was wanted, what was bought, what each part gave."""
        product = self._goal["product"]
        reference = (f"Wanted: {product['query']}; {self._wanted()}; such as {self._goal['asin']} ({product['title'][:200]}). "
                     f"Bought: {self._bought() if parts else 'nothing'}. Reward: {reward:.2f}")
        if parts:
            options = "none wanted" if parts["options"] is None else f"{parts['options']:.2f}"
            reference += (f" (type {parts['type']:.1f}, share of attributes {parts['attributes']:.2f}, of options {options}, price "
                          f"{'within' if parts['price'] else 'above'} the bound)")
        info = {"success": reward == 1, "valid": valid, "score": 100 * reward, "reference": reference + "."}
        return info | ({"parts": parts} if parts else {})


def named(option) -> str:
    return option if isinstance(option, str) else f"{option[0]}: {option[1]}"


def checked_options(data, goals, apart, reachable, rule, price_seed):
    """The options as `split_of` takes them, hashable. Raises BadInput."""
    refuse_unknown("goals", goals, ("synthetic", "human"))
    refuse_unknown("rule", rule, RULES)
    for name, value in (("apart", apart), ("reachable", reachable)):
        refuse_unknown(name, str(value).lower(), ("true", "false"))
    if type(price_seed) is not int:
        raise BadInput(f"webshop: price_seed must be a whole number, got {price_seed!r}")
    data = data or os.environ.get("WEBSHOP_DATA")
    if not data:
        raise BadInput(f"webshop: no products: give --env-options data=FOLDER or set $WEBSHOP_DATA; {SETUP}")
    return (str(data), goals, *(str(value).lower() == "true" for value in (apart, reachable)), rule, price_seed)
