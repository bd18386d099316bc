"""WebShop's files: products, nouns of their titles, prices, goals, and the search over them.

    python -m envs.webshop_data FOLDER      # once: the nouns that the reward needs, by spaCy, into FOLDER/nouns*.json

FOLDER is where the benchmark's `setup.sh -d small` (or `-d all`) puts its files: items_shuffle*.json (products),
items_ins_v2*.json (their attributes and made-up instructions) and items_human_ins.json (people's instructions). The nouns are those
of spaCy's en_core_web_sm, as in the released code. There is no stand-in for them: other noun lists give another reward in 2 to 9 %
of cases. A single JSON file (or .json.xz) of products that hold their nouns already is read as well.

A price that is given as a range is drawn uniformly, and the highest price of a goal is the larger of two of the four multiples of
10 above its product's price. Officially both are drawn anew at each start, without a seed; here the seed and the product's own id
decide, so other products, another order or another process change nothing.
"""
import functools
import itertools
import json
import lzma
import random
import re
import sys
from pathlib import Path

from envs import BadInput

SETUP = "./setup.sh -d small in a clone of github.com/princeton-nlp/WebShop downloads them"
NEEDED = {"title": str, "description": str, "features": list, "price": str, "pricing": list, "options": dict, "attributes": list,
          "query": str, "category": str, "product_category": str, "nouns": list}
# Lucene's English stop words
STOP = """a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to was
will with""".split()
# As Lucene cuts (Unicode's word breaks): letters and digits, with . ' : between two letters, and . , ; ' between two digits
WORD = re.compile(r"\w+(?:(?:(?<=[^\W\d_])[:.'’](?=[^\W\d_])|(?<=\d)[.,;'’](?=\d))\w+)*")
HITS = 50


# Files

def read_json(path: Path):
    """Raises BadInput where a file is not there, is a pointer of Git LFS, or is cut off."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadInput(f"webshop: {path} cannot be read: {error.strerror}; {SETUP}") from error
    if content.startswith(b"version https://git-lfs"):
        raise BadInput(f"webshop: {path} is a Git LFS pointer, not the file: git lfs pull, or {SETUP}")
    try:
        return json.loads(lzma.decompress(content) if path.suffix == ".xz" else content)
    except (ValueError, RecursionError, lzma.LZMAError) as error:
        raise BadInput(f"webshop: {path} is damaged or cut off ({str(error)[:80]}): get it again; {SETUP}") from error


def clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def products_file(data: Path) -> Path:
    """The one file of products in a folder; a file is itself."""
    if data.is_file():
        return data
    found = sorted(data.glob("items_shuffle*.json")) if data.is_dir() else []
    if len(found) > 1:
        raise BadInput(f"webshop: {data} holds {', '.join(path.name for path in found)}: give one of them, data={found[0]}")
    if not found:
        raise BadInput(f"webshop: no items_shuffle*.json in {data}; {SETUP}")
    return found[0]


def beside(path: Path, name: str) -> Path:
    """items_shuffle_1000.json -> name_1000.json"""
    return path.with_name(path.name.replace("items_shuffle", name, 1))


def official_product(raw, attributes, human) -> dict:
    """One record of items_shuffle*.json as the rest reads it, after the released `load_products`."""
    prices = [re.sub(r"[^\d.]", "", part) for part in (raw.get("pricing") or "").split("$")[1:]]
    prices = [float(price) for price in prices if price][:2] or [100.0]
    features = raw.get("small_description")
    options = {name.lower(): [value["value"].strip().replace("/", " | ").lower() for value in values]
               for name, values in (raw.get("customization_options") or {}).items() if values is not None}
    made = {key: attributes[key] for key in ("instruction", "instruction_attributes") if key in attributes}
    return {"asin": raw["asin"], "title": raw["name"], "description": raw.get("full_description") or "",
            "features": features if isinstance(features, list) else [features or ""], "options": options,
            "price": " to ".join(f"${price}" for price in prices), "pricing": prices, "query": raw["query"].lower().strip(),
            "attributes": attributes.get("attributes") or [], "category": raw["category"],
            "product_category": raw["product_category"], **made, **({"human": human} if human else {})}


def official_products(path: Path) -> list[dict]:
    """The products of a folder as it was downloaded. Raises BadInput where its files do not fit together."""
    raw, attributes = read_json(path), read_json(beside(path, "items_ins_v2"))
    human_file = path.with_name("items_human_ins.json")
    human = read_json(human_file) if human_file.exists() else {}
    try:
        found = {}
        for item in raw:
            if item["asin"] != "nan" and len(item["asin"]) <= 10:
                found.setdefault(item["asin"], item)        # of two with one id the first counts
        missing = len(found.keys() - attributes.keys())
        if missing:
            raise BadInput(f"webshop: {beside(path, 'items_ins_v2')} lacks {missing} of the {len(found)} products of {path.name}: the "
                           f"two are of different versions; {SETUP}")
        return [official_product(item, attributes[asin], human.get(asin)) for asin, item in found.items()]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BadInput(f"webshop: {path} or its items_ins_v2 is not of the form that the benchmark's have ({error!r}); {SETUP}") from error


def products_of(data: Path) -> dict[str, dict]:
    """{asin: product}, each with the `NEEDED` fields, in the file's order. Raises BadInput."""
    path = products_file(data)
    official = path.name.startswith("items_shuffle")
    products = official_products(path) if official else read_json(path)
    if official:
        nouns_file = beside(path, "nouns")
        if not nouns_file.exists():
            raise BadInput(f"webshop: the reward needs the nouns of the titles, and there is no {nouns_file}: "
                           f"python -m envs.webshop_data {path.parent} (spaCy and en_core_web_sm), once")
        nouns = read_json(nouns_file)
        if not isinstance(nouns, dict) or any(item["asin"] not in nouns for item in products):
            raise BadInput(f"webshop: {nouns_file} is of other products: python -m envs.webshop_data {path.parent}")
        products = [item | {"nouns": nouns[item["asin"]]} for item in products]
    for number, item in enumerate(products if isinstance(products, list) else [None]):
        wrong = wrong_fields(item)
        if wrong:
            raise BadInput(f"webshop: product {number} of {path} has no right {', '.join(wrong)}; envs/webshop_data.py says what is read")
    return {clean(item["asin"]).upper(): cleaned(item) for item in products}


def wrong_fields(item) -> list[str]:
    """The fields of `NEEDED` that a product lacks, or has in another form."""
    if not isinstance(item, dict) or not isinstance(item.get("asin"), str):
        return ["asin"]
    wrong = [key for key, kind in NEEDED.items() if not isinstance(item.get(key), kind)]
    if not wrong:
        lists = {key: item[key] for key in ("features", "attributes", "nouns")} | {"options": list(item["options"].values())}
        lists["options"] = [text for values in lists["options"] for text in (values if isinstance(values, list) else [None])]
        wrong = [key for key, texts in lists.items() if not all(isinstance(text, str) for text in texts)]
        wrong += [] if all(isinstance(price, (int, float)) for price in item["pricing"]) else ["pricing"]
    return wrong


def cleaned(value):
    """The same, every text in it one that any tokenizer can encode: no lone surrogates."""
    if isinstance(value, dict):
        return {cleaned(key): cleaned(part) for key, part in value.items()}
    return [cleaned(part) for part in value] if isinstance(value, list) else clean(value) if isinstance(value, str) else value


# Goals

def prices_of(products: dict, seed: int) -> dict[str, float]:
    return {asin: random.Random(f"webshop price {seed} {asin}").uniform(*item["pricing"][:2]) if len(item["pricing"]) > 1
            else (item["pricing"] or [100.0])[0] for asin, item in products.items()}


def bound_of(price: float, key: str) -> tuple[float, str]:
    """(the highest price of a goal, how its instruction says it)"""
    above = [10.0 * n for n in range(1, 100) if 10.0 * n > price][:4]
    bound = max(random.Random(f"webshop bound {key}").sample(above, 2)) if len(above) > 1 else 1_000_000.0
    return bound, f", and price lower than {bound:.2f} dollars" if len(above) > 1 else ""


def goals_of(products: dict, kind: str, prices: dict, seed: int) -> dict[str, dict]:
    """{task id: goal} in the released order: by product, then shuffled with seed 233."""
    goals = []
    for asin, product in products.items():
        found = []      # (instruction, attributes, options)
        if kind == "human":
            found = [(one["instruction"].strip("."), one["instruction_attributes"], list(one["instruction_options"]))
                     for one in product.get("human", [])]
        elif product.get("instruction"):
            names = sorted(product["options"])
            for values in itertools.product(*(product["options"][name] for name in names)):
                chosen = list(zip(names, values))
                text = ", and ".join(f"{name}: {value}" for name, value in chosen)
                found.append((product["instruction"] + (f" with {text}" if text else ""),
                              product.get("instruction_attributes"), chosen))
        for number, (instruction, attributes, options) in enumerate(found):
            bound, text = bound_of(prices[asin], f"{seed} {asin} {number if kind == 'human' else ''}")
            if attributes:
                goals.append({"asin": asin, "product": product, "instruction": instruction + text, "attributes": attributes,
                              "options": options, "bound": bound})
    random.Random(233).shuffle(goals)
    return {f"{re.sub(r'[^a-z]+', '-', goal['product']['category'].lower())}/{number:05d}": {**goal, "number": number}
            for number, goal in enumerate(goals)}


# Search

def words_of(text: str, stem) -> list[str]:
    """The terms of a text as Lucene's English analyzer cuts and stems them; stem: PyStemmer's of Porter, which Lucene's leaves in two
    endings and for words of two letters."""
    words = [re.sub(r"['’]s$", "", word) for word in WORD.findall(text.lower())]
    words = [word for word in words if word not in STOP]
    return [word if len(word) < 3 else re.sub("bli$", "bl", re.sub("logi$", "log", root)) for word, root in zip(words, stem(words))]


def search_over(products: dict):
    """search(query) -> the asins of the 50 best products, best first: BM25 as Lucene has it, k1 0.9, b 0.4, Porter's stemmer,
    over title, description, first feature and options. Equal scores: in the file's order."""
    try:
        import bm25s
        import Stemmer
    except ModuleNotFoundError as error:
        raise BadInput(f"environment 'webshop' lacks the package {error.name!r}: pip install -r envs/webshop-requirements.txt") from error

    def text_of(item):
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in item["options"].items())
        return " ".join([item["title"], item["description"], *item["features"][:1], options])

    stem, asins, made = Stemmer.Stemmer("porter").stemWords, list(products), bm25s.BM25(method="lucene", k1=0.9, b=0.4)
    made.index([words_of(text_of(item), stem) for item in products.values()], show_progress=False)

    @functools.lru_cache(4096)
    def search(query: str) -> list[str]:
        words = words_of(query, stem)
        scores = made.get_scores(words) if words else []      # words of no product count nothing
        return [asins[n] for n in (-scores).argsort(kind="stable")[:HITS] if scores[n] > 0] if len(scores) else []

    return search


@functools.lru_cache(4)
def load(data: str, seed: int):
    """(products, prices, search) of a folder or file: read once in a process, never changed."""
    products = products_of(Path(data).expanduser())
    return products, prices_of(products, seed), search_over(products)


@functools.lru_cache(8)
def load_goals(data: str, seed: int, kind: str) -> dict[str, dict]:
    """Raises BadInput where the goals are not of the form that the benchmark's have."""
    products, prices, _ = load(data, seed)
    try:
        return goals_of(products, kind, prices, seed)
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"webshop: the {kind} goals of {data} are not of the benchmark's form ({error!r}); {SETUP}") from error


# The set-up command

def main(argv=None):
    """Tags every title with spaCy and writes the nouns beside the products: {asin: list of lower-case nouns}."""
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 1 or argv[0].startswith("-"):
        raise BadInput("python -m envs.webshop_data FOLDER: the folder (or the items_shuffle*.json in it) of the benchmark's files")
    path = products_file(Path(argv[0]).expanduser())
    try:
        import spacy
        tagger = spacy.load("en_core_web_sm", exclude=["parser", "ner", "lemmatizer"])
    except (ImportError, OSError) as error:
        raise BadInput("webshop: the nouns of titles are tagged by spaCy: pip install spacy && python -m spacy download en_core_web_sm "
                       f"({type(error).__name__})") from error
    products = official_products(path)
    tagged = tagger.pipe(item["title"] for item in products)
    nouns = {item["asin"]: [word.text.lower() for word in title if word.pos_ in ("NOUN", "PROPN")]
             for item, title in zip(products, tagged)}
    beside(path, "nouns").write_text(json.dumps(nouns), encoding="utf-8")
    print(f"{beside(path, 'nouns')}: the nouns of {len(nouns)} titles")


if __name__ == "__main__":
    from rl.runs import cli
    cli(main)
