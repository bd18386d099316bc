"""What README and docs say: commands parse, paths exist, quoted lines of code are in the code."""
import ast
import dataclasses
import importlib
import re
import shlex
from pathlib import Path

import pytest

import bench
import evaluate
import options
import plan
import rounds
import study
import train

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "results").glob("*.md"))]
CODE = [path for folder in (ROOT, ROOT / "envs", ROOT / "examples") for path in sorted(folder.glob("*.py"))]
by_page = pytest.mark.parametrize("page", [*PAGES, *CODE], ids=lambda page: page.name)


def said(page):
    """The text of a page, or the docstring of a file."""
    return page.read_text() if page.suffix == ".md" else ast.get_docstring(ast.parse(page.read_text())) or ""


def commands(text):
    """[file or module, options] of each command."""
    text = text.replace("\\\n", " ")
    found = re.findall(r"python (?:-m )?((?:\w+\.py|examples\.\w+)\b[^\n`|&;]*)", text)
    return [[word for word in shlex.split(line.partition("  #")[0]) if word != "..."] for line in found]


@by_page
def test_commands_parse(page, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(train, "train", lambda config, *args, **how: seen.append(config))
    monkeypatch.setattr(evaluate, "evaluate_config", lambda config, run: seen.append(config))
    monkeypatch.setattr(evaluate, "options_of", lambda run, names: [])
    monkeypatch.setattr(rounds, "run", lambda config: seen.append(config))
    monkeypatch.setattr(study, "study", lambda args, *rest: seen.append(args))
    monkeypatch.setattr(plan, "plan", lambda name, gpu, **how: seen.append(name))
    monkeypatch.setattr(plan, "table", str)
    for file, *argv in commands(said(page)):
        file = file if file.endswith(".py") else file.replace(".", "/") + ".py"
        assert (ROOT / file).exists(), file
        if file.startswith("examples"):
            assert '__name__ == "__main__"' in (ROOT / file).read_text()
            continue
        module = importlib.import_module("plan" if file == "model.py" else file[:-3])
        if "--help" in argv or "--preset" in argv and "Qwen/Qwen3-4B" not in " ".join(argv):
            continue
        if file in ("grpo.py", "dapo.py", "gspo.py", "evaluate.py", "distill.py", "model.py") or "--study" in argv:
            module.main(argv)
        elif file == "bench.py":
            bench.parse([word for word in argv if word not in ("--model", "DIR")])
        else:
            known = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(options.Config)}
            source = (ROOT / file).read_text()
            known |= {"--" + name.replace("_", "-") for name in re.findall(r"(\w+): \w+ = option\(", source)}
            assert all(word in known or f'"{word}"' in source for word in argv if word.startswith("--")), argv
    assert seen or page.name not in ("grpo.md", "dapo.md", "gspo.md")


@by_page
def test_links_and_paths_exist(page):
    text = said(page)
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"pip install [^\n]*?-r (\S+)", text):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`((?:envs|tests|docs|results)/[\w./-]+|\w+\.py)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo"])
def test_quoted_lines_are_in_the_code(name):
    code = (ROOT / f"{name}.py").read_text()
    table = (ROOT / "docs" / f"{name}.md").read_text().partition("## Equation")[2].partition("\n## ")[0]
    quoted = [part for part in re.findall(r"`([^`]+)`", table) if "=" in part or "return" in part]
    assert len(quoted) >= 2 and all(part in code for part in quoted), [part for part in quoted if part not in code]
    numbers = set(re.findall(r"Eqs?\. (\d+)", table))
    assert numbers <= set(re.findall(r"\d+", code))


def test_the_oldest_versions_are_those_that_the_bounds_allow():
    bounds = dict(re.findall(r"^(\w+)>=([\d.]+),<", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    pins = dict(re.findall(r"(\w+)==([\d.]+)", next(line for line in (ROOT / ".ci" / "run").read_text().splitlines()
                                                  if "-r requirements.txt torch==" in line)))
    assert len(pins) == 5 and {name: bounds[name] for name in pins} == {
        name: pin.removesuffix(".0") for name, pin in pins.items()}


def test_the_lines_of_the_file_table():
    rows = re.findall(r"^\| `(\w+\.py)` \|.*\| (\d+) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) >= 7
    for file, lines in rows:
        assert len((ROOT / file).read_text().splitlines()) == pytest.approx(int(lines), rel=0.1), file


def test_the_piece_of_the_readme_runs():
    text = (ROOT / "README.md").read_text().partition("## A piece in your own project")[2]
    code = "\n".join(line[4:] for line in text.split("\n\nYour own environment")[0].strip("\n").splitlines())
    names = {}
    exec(code, names)
    names["loss"].backward()
    assert names["loss"].shape == () and names["logp_BT"].grad.abs().sum() > 0
