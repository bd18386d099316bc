"""The probe of arXiv 2609.08404, section 5.3 and appendix C: has the policy taken in what enrichment showed?

    python grpo.py --env bfcl --enrich hybrid --keep-every 10 --model MODEL       # keeps an adapter every 10 steps
    python -m tools.probe RUN                                                     # writes RUN/probe.jsonl and RUN/probe.png

Eight operations on BFCL's file system, each a question with two options: what the tool returns in the standard environment, and the
same with what enrichment adds to it, the current absolute path among it. Both are made by the benchmark's own back end and
envs/bfcl.py. Measured is the policy's probability of each option, for every adapter that the run kept and for the base model
(step 0). No hint stands in the prompt but in that option.

What differs from the paper:
1. The words of the questions are ours; the paper's own stand in a picture.
2. Each question is asked in both orders of its options, and a figure is the mean over both: a model that prefers a letter shows nothing.
"""
import json
import math
import statistics
import sys
from pathlib import Path

from envs import BadInput, parse_options, plain
from envs.bfcl import DESCRIBED, load_data, public_methods, run_call
from envs.toolcalls import Call
from evaluate import EvaluateOptions, words_of_run
from rl.learner import row_logps
from rl.logs import picture, replace_file
from rl.model import other_adapter
from rl.options import parse
from rl.policy import load_policy
from rl.rollout import Row
from rl.runs import Parser, about, cli

FILES = {"root": {"workspace": {"type": "directory", "contents": {
    "reports": {"type": "directory", "contents": {"may.txt": {"type": "file", "content": "sales rose"}}},
    "empty": {"type": "directory", "contents": {}},
    "notes.txt": {"type": "file", "content": "call Ada"}}}}}
OPERATIONS = {"cd": {"folder": "reports"}, "mkdir": {"dir_name": "drafts"}, "touch": {"file_name": "todo.txt"},
              "rm": {"file_name": "notes.txt"}, "rmdir": {"dir_name": "empty"}, "mv": {"source": "notes.txt", "destination": "reports"},
              "cp": {"source": "notes.txt", "destination": "reports"}, "echo": {"content": "buy milk", "file_name": "notes.txt"}}
QUESTION = """You work in a file system through function calls. The current directory is "workspace"; it holds the directories reports \
and empty and the file notes.txt.

This call is made: {call}

Which of these two does the tool return?

A:
{a}

B:
{b}

Answer with one letter, A or B."""


def outputs() -> dict[str, tuple[str, str, str]]:
    """{operation: (the call, the plain output, the enriched one)}"""
    found = {}
    for name, arguments in OPERATIONS.items():
        files = load_data()[2]["GorillaFileSystem"]()
        files._load_scenario(json.loads(json.dumps(FILES)))
        result = run_call(Call(name, [], arguments), public_methods({"GorillaFileSystem": files}))
        written = f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        found[name] = written, result, "\n".join([result, *DESCRIBED["GorillaFileSystem"](files, name, result)])
    return found


def probe(model, chat) -> dict[str, tuple[float, float]]:
    """{operation: (probability of the plain output, of the enriched one)}, each the mean over both orders of the options."""
    letters = [chat.tokenizer(letter, add_special_tokens=False)["input_ids"] for letter in "AB"]
    if any(len(ids) != 1 or chat.tokenizer.decode(ids).strip() != letter for ids, letter in zip(letters, "AB")):
        raise BadInput("this model's tokenizer has no token for A and another for B: the probe cannot be asked")
    rows = []
    for call, usual, enriched in outputs().values():
        for a, b in ((usual, enriched), (enriched, usual)):
            prompt = chat.prompt([("user", QUESTION.format(call=call, a=a, b=b))])
            rows += [Row(prompt + ids, [0] * len(prompt) + [1]) for ids in letters]
    p = [math.exp(logp_T[-1]) for logp_T in row_logps(model, rows, chat.pad_id)]
    return {name: ((p[n] + p[n + 3]) / 2, (p[n + 1] + p[n + 2]) / 2) for n, name in zip(range(0, len(p), 4), OPERATIONS)}


def main(argv=None):
    parser = Parser(allow_abbrev=False, description="The paper's probe of internalisation, for every adapter that a run kept.")
    parser.add_argument("run", metavar="RUN", help="the folder of a finished run, made with --keep-every")
    run = Path(parser.parse_args(sys.argv[1:] if argv is None else argv).run)
    config = parse(EvaluateOptions, words_of_run(run), common=EvaluateOptions)
    kept = sorted(path for path in (run / "adapters").glob("[0-9]*") if path.name.isdecimal())
    if not kept:
        raise BadInput(f"{run} kept no adapters on its way: train with --keep-every 10")
    config.adapter = str(run / "adapter")
    model, chat = load_policy(config, parse_options(config.env_options))
    with model.disable_adapter():
        steps = {0: probe(model, chat)}
    for folder in kept:
        with other_adapter(model, folder):
            steps[int(folder.name)] = probe(model, chat)
    steps[about(run)["steps"]] = probe(model, chat)
    rows = [{"step": step, "operation": name, "p_plain": p, "p_enriched": q}
            for step, found in sorted(steps.items()) for name, (p, q) in found.items()]
    replace_file(run / "probe.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    margins = {step: {name: q - p for name, (p, q) in found.items()} for step, found in sorted(steps.items())}
    with picture(run / "probe.png", figsize=(6.4, 3.6)) as (_, axes):
        for name in OPERATIONS:
            axes.plot(list(margins), [found[name] for found in margins.values()], alpha=0.5, label=name)
        axes.plot(list(margins), [statistics.fmean(found.values()) for found in margins.values()], color="black", label="mean")
        axes.set(xlabel="training step", ylabel="P(enriched) − P(plain)")
        axes.legend(fontsize=7, ncols=3)
    print("P(enriched) - P(plain) after each question, mean over both orders of the options\n"
          f"{'step':>6} " + " ".join(f"{name:>7}" for name in (*OPERATIONS, "mean")))
    for step, found in margins.items():
        print(f"{step:>6} " + " ".join(f"{value:>+7.3f}" for value in (*found.values(), statistics.fmean(found.values()))))
    print(plain(f"{run}/ holds probe.jsonl and probe.png"))


if __name__ == "__main__":
    cli(main)
