"""WebShop's reward: what a purchase is worth to a goal. Standard library alone.

    reward = type * (attributes + options + [price within the bound]) / (|attributes| + |options| + 1)

Yao et al., "WebShop", arXiv 2207.01206, and its released code (`web_agent_site/engine/goal.py`), whose rules stand here as
they are, odd ones included:
    type         1 where the query is the same, two categories are shared, or more than 0.2 of the goal's nouns are found;
                 else 0.5; 0.1 below 0.1 of the nouns, 0 without any. Nouns are those of the titles, as spaCy tags them;
                 common ones over the length of the goal's *list*, so one that stands twice counts twice below the line.
    attributes   a wanted one counts if it is like one of the product's (above 85), or stands in title, features or description.
    options      a wanted one counts if it is like a chosen one (above 85), whatever both are options of. First a chosen value
                 becomes the first colour of COLOURS that it contains ("light blue" -> "blue"). A wanted (name, value) is
                 compared as Python prints the pair, unless its value is itself such a colour, which then stands for it.
                 So every blue is as good as another, and "redwood" ("red") is never like "color redwood".
"Like" is `token_set_ratio` of thefuzz 0.19, which the released code pins, without python-Levenshtein.

rule="ours": nouns are a set, and a wanted option counts if that very value is chosen for that option. No goal is then out of
reach of its own product. Rewards of the two rules are not comparable.
"""
import functools
import re
from difflib import SequenceMatcher

# In the released code's order, which decides: "rose gold" is gold.
COLOURS = """alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo
caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal dark denim
eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo ivory ivy khaki lavender
lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom mustard natural navy nude
olive orange peach pewter pink plum purple rainbow red rose royal rust sand sapphire seashell silver skull slate steel stone
stonewash sunflower tan taupe teal tiger turquoise violet walnut wheat white wine yellow""".split()
RULES = ("official", "ours")
LATIN_1 = dict.fromkeys(range(128, 256))    # characters that thefuzz 0.19 drops; it keeps those above


@functools.lru_cache(1 << 17)
def token_set_ratio(one: str, other: str) -> int:
    """How alike two texts are as sets of words, 0 to 100. Not symmetric, as difflib is not."""
    def ratio(a, b):
        return 100 if a == b else round(100 * SequenceMatcher(None, a, b).ratio()) if a and b else 0

    first, second = ({*re.sub(r"\W", " ", text.translate(LATIN_1)).lower().split()} for text in (one, other))
    if not first or not second:
        return 0
    common = " ".join(sorted(first & second))
    one, other = (f"{common} {' '.join(sorted(words))}".strip() for words in (first - second, second - first))
    return max(ratio(common, one), ratio(common, other), ratio(one, other))


def colour_of(option):
    """The first colour that a text contains, or that a (name, value) has as an element; else the option itself."""
    return next((colour for colour in COLOURS if colour in option), option)


def type_of(product, wanted, rule="official") -> dict:
    """{"type", "title_score", "query", "category"} of a product beside the wanted one."""
    nouns = sorted(set(wanted["nouns"])) if rule == "ours" else wanted["nouns"]
    title_score = len(set(product["nouns"]) & set(nouns)) / len(nouns) if nouns else 0.2
    categories = [{part.strip() for part in p["product_category"].split("›")} for p in (product, wanted)]
    query, category = product["query"] == wanted["query"], len(categories[0] & categories[1]) >= 2
    worth = 1.0 if query or category or title_score > 0.2 else 0.5
    worth = 0.0 if title_score == 0 else 0.1 if title_score < 0.1 else worth
    return {"type": worth, "title_score": title_score, "query": query, "category": category}


def has_attribute(product, attribute) -> bool:
    texts = (product["title"], " ".join(product["features"]), product["description"])
    return (any(token_set_ratio(own, attribute) > 85 for own in product["attributes"])
            or any(attribute in text.lower() for text in texts))


def has_option(wanted, chosen: dict, rule="official") -> bool:
    """wanted: a (name, value), or a value alone (a person's goal)."""
    if rule == "ours":
        return wanted in (chosen.items() if isinstance(wanted, tuple) else chosen.values())
    text = str(colour_of(wanted))
    return any(token_set_ratio(colour_of(value), text) > 85 for value in chosen.values())


def reward_of(product, price: float, chosen: dict, goal, rule="official") -> tuple[float, dict]:
    """(reward in 0..1, its parts): of `product` at `price` with the `chosen` {option name: value}, for a goal {"product":
    the wanted one, "attributes": list, "options": list, "bound": the highest price}.

    Parts: those of `type_of`; "attributes" and "options", the shares met (options None where none is wanted); "price", bool.
    """
    parts = type_of(product, goal["product"], rule)
    attributes = sum(has_attribute(product, attribute) for attribute in goal["attributes"])
    options = sum(has_option(option, chosen, rule) for option in goal["options"])
    within, wanted = price <= goal["bound"], len(goal["attributes"]) + len(goal["options"]) + 1
    parts |= {"attributes": attributes / len(goal["attributes"]),
              "options": options / len(goal["options"]) if goal["options"] else None, "price": within}
    return parts["type"] * ((attributes + options + within) / wanted), parts
