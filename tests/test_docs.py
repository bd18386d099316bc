"""What README and docs say: commands parse, paths exist, quoted lines of code are in the code."""
import importlib
import re
import shlex
from pathlib import Path

import pytest

import bench
import evaluate
import plan
import rounds
import study
import train

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "results").glob("*.md"))]
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def commands(text):
    text = text.replace("\\\n", " ")
    return [shlex.split(line.partition("   #")[0]) for line in re.findall(r"(?:python) (\w+\.py[^\n`|&;]*)", text)]


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
    for file, *argv in commands(page.read_text()):
        assert (ROOT / file).exists(), file
        module = importlib.import_module("plan" if file == "model.py" else file[:-3])
        if "--help" in argv or "--preset" in argv and "Qwen/Qwen3-4B" not in " ".join(argv):
            continue
        if file in ("grpo.py", "dapo.py", "gspo.py", "evaluate.py", "distill.py", "model.py") or "--study" in argv:
            module.main(argv)
        elif file == "bench.py":
            bench.parse([word for word in argv if word not in ("--model", "DIR")])
    assert seen or page.name not in ("grpo.md", "dapo.md", "gspo.md")


@by_page
def test_links_and_paths_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (page.parent / target).exists(), target
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
