"""What README and docs say: commands parse, paths and tests exist, quoted lines of code are in the code, the piece runs."""
import ast
import contextlib
import importlib
import re
import shlex
from types import SimpleNamespace

import pytest
from conftest import ROOT

import bench
import evaluate
import plan
import study
from baselines import loop
from funnel import rounds
from rl import options, train
from tools import prompts, show

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "results").glob("*.md"))]
ROOMS = ("", "envs", "rl", "funnel", "baselines", "tools", "examples", "docs")
CODE = [path for room in ROOMS for path in sorted((ROOT / room).glob("*.py"))]
NOTHING_TO_DO = SimpleNamespace(first_step=2, steps=lambda: [], kept=lambda: [{"skills": {}}], report=lambda show=None: None, folder=None)
TESTS = {path.name: path.read_text() for path in sorted((ROOT / "tests").glob("test_*.py"))}


def by_page(pages):
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


def said(page):
    """The text of a page, or the docstring of a file."""
    return page.read_text() if page.suffix == ".md" else ast.get_docstring(ast.parse(page.read_text())) or ""


def commands(text):
    """[file, options] of each command."""
    text = text.replace("\\\n", " ")
    found = re.findall(r"python (?:-m )?((?:[\w/]+\.py|(?:rl|funnel|baselines|tools|examples|docs)\.\w+)\b[^\n`|&;]*)", text)
    lines = [[word for word in shlex.split(line.partition("  #")[0]) if word != "..."] for line in found]
    return [[file if file.endswith(".py") else file.replace(".", "/") + ".py", *argv] for file, *argv in lines]


@by_page([*PAGES, *CODE])
def test_commands_parse(page, monkeypatch):
    seen = []
    monkeypatch.setattr(train, "train", lambda config, algorithm: seen.append(config))
    monkeypatch.setattr(evaluate, "evaluate_run", lambda config, run: seen.append(config))
    monkeypatch.setattr(evaluate, "words_of_run", lambda run: [])
    monkeypatch.setattr(rounds, "rounds", lambda config: seen.append(config))
    monkeypatch.setattr(loop, "training", lambda config, algorithm: seen.append(config) or contextlib.nullcontext(NOTHING_TO_DO))
    monkeypatch.setattr(study, "study", lambda args, *rest: seen.append(args))
    monkeypatch.setattr(plan, "fit", lambda name, gpu, **how: seen.append(name))
    monkeypatch.setattr(plan, "memory_table", str)
    for file, *argv in commands(said(page)):
        source = (ROOT / file).read_text()
        assert '__name__ == "__main__"' in source, file
        if "--help" in argv or "--preset" in argv and "Qwen/Qwen3-4B" not in " ".join(argv):
            continue
        if "--study" in argv:
            {"enrich.py": show, "distill.py": rounds}[file].main(argv)
        elif file in ("grpo.py", "dapo.py", "gspo.py", "evaluate.py", "plan.py"):
            importlib.import_module(file[:-3]).main(argv)
        elif file == "distill.py" and "--prompts" in argv:
            options.parse(prompts.PromptOptions, argv, common=prompts.PromptOptions)
        elif file == "distill.py":
            rounds.main(argv)
        elif file.startswith("baselines/"):
            importlib.import_module(file[:-3].replace("/", ".")).main(argv)
        elif file == "enrich.py":
            options.parse(show.ShowOptions, argv, common=show.ShowOptions)
        elif file == "bench.py":
            bench.parse(" ".join(argv).replace("--model DIR", "").split())
        else:
            assert all(f'"{word}"' in source for word in argv if word.startswith("--")), [file, *argv]
    assert seen or page.name not in ("grpo.md", "dapo.md", "gspo.md")


@by_page([*PAGES, *CODE])
def test_links_and_paths_exist(page):
    text = said(page)
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"pip install [^\n]*?-r (\S+)", text):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`((?:envs|rl|funnel|baselines|tools|examples|tests|docs|results)/[\w./-]+|\w+\.py)`", text):
        assert (ROOT / path).exists() or (page.parent / path).exists(), path


def names_in(file):
    return {node.name for node in ast.parse(TESTS[file]).body if isinstance(node, ast.FunctionDef)}


@by_page([page for page in PAGES if page.parent.name == "docs"])
def test_every_test_that_the_docs_name_exists(page):
    text = said(page)
    named = re.findall(r"tests/(test_\w+\.py)::(\w+)", text)
    named += [(file, name) for name, file in re.findall(r"`(test_\w+)` in `tests/(test_\w+\.py)`", text)]
    assert [f"{file}::{name}" for file, name in named if name not in names_in(file)] == []
    everywhere = set().union(*map(names_in, TESTS))
    assert set(re.findall(r"`(test_\w+)`", text)) <= everywhere


def test_every_fault_names_the_tests_that_bear_its_number():
    rows = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", (ROOT / "docs" / "faults.md").read_text(), re.MULTILINE)
    assert [int(n) for n, _ in rows] == list(range(1, len(rows) + 1)) and len(rows) >= 31
    bearing = {n: set() for n, _ in rows}
    for file, text in TESTS.items():
        for line in text.splitlines():
            for n in re.findall(r"\d+", "".join(re.findall(r"# docs/faults\.md, (\d+(?:, \d+)*)", line))):
                name = re.search(r"def (test_\w+)", line)[1]
                bearing[n].add(f"tests/{file}::{name}")
    for n, named in rows:
        assert set(re.findall(r"`([^`]+)`", named)) == bearing[n] != set(), n


def quoted(page, start):
    """What stands in backticks in the table under the heading `start`, but for the names of tests."""
    table = (ROOT / "docs" / page).read_text().partition(start)[2].partition("\n## ")[0]
    return [part for part in re.findall(r"`([^`]+)`", table) if not part.startswith("tests/")]


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo"])
def test_quoted_lines_are_in_the_code(name):
    code = (ROOT / f"{name}.py").read_text()
    lines = [part for part in quoted(f"{name}.md", "## Equation") if "=" in part or "return" in part]
    assert len(lines) >= 2 and [part for part in lines if part not in code] == []
    table = (ROOT / "docs" / f"{name}.md").read_text().partition("## Equation")[2].partition("\n## ")[0]
    assert set(re.findall(r"Eqs?\. (\d+)", table)) <= set(re.findall(r"\d+", code))


def test_quoted_lines_of_enrichment_are_in_the_code():
    code = "".join(path.read_text() for path in (ROOT / "enrich.py", *(ROOT / "rl").glob("*.py")))
    lines = quoted("enrich.md", "## Paper ↔ line")
    assert len(lines) > 12 and [line for line in lines if line not in code and not (ROOT / line).exists()] == []


def test_quoted_lines_of_the_funnel_are_in_the_code():
    code = "".join(path.read_text() for path in (ROOT / "distill.py", *(ROOT / "funnel").glob("*.py")))
    lines = [part for part in quoted("distill.md", "## Paper ↔ line") if len(part) > 20]  # longer than a name
    assert len(lines) >= 10 and [line for line in lines if line not in code] == []
    assert {str(n) for n in range(2, 10)} <= set(re.findall(r"Eq\. (\d)", code))


def test_the_oldest_versions_are_those_that_the_bounds_allow():
    bounds = dict(re.findall(r"^(\w+)>=([\d.]+),<", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    pins = dict(re.findall(r"(\w+)==([\d.]+)", next(line for line in (ROOT / ".ci" / "run").read_text().splitlines()
                                                    if "-r requirements.txt torch==" in line)))
    assert len(pins) == 5 and {name: bounds[name] for name in pins} == {
        name: pin.removesuffix(".0") for name, pin in pins.items()}


def test_the_newest_versions_run_tests_that_are_there():
    named = ",".join(re.findall(r"tests/test_\{([\w,]+)\}\.py", (ROOT / ".ci" / "run").read_text())).split(",")
    assert len(named) > 10 and [name for name in named if f"test_{name}.py" not in TESTS] == []


def test_the_lines_of_the_file_table():
    rows = re.findall(r"^\| `(\w+\.py)` \|.*\| (\d+) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) >= 5
    for file, lines in rows:
        assert len((ROOT / file).read_text().splitlines()) == pytest.approx(int(lines), rel=0.1), file


def test_the_piece_of_the_readme_runs():
    text = (ROOT / "README.md").read_text().partition("## A piece in your own project")[2]
    code = "\n".join(line[4:] for line in text.split("\n\nYour own environment")[0].strip("\n").splitlines())
    names = {}
    exec(code, names)
    names["loss"].backward()
    assert names["loss"].shape == () and names["logp_BT"].grad.abs().sum() > 0
