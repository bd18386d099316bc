"""What `python enrich.py` shows: an episode, standard feedback beside enriched, and the schedule as a picture; with --prompts the
episode as a model reads it."""
import itertools
import os
import re
import sys
import textwrap
from dataclasses import dataclass, replace

from enrich import STRATEGIES, EnrichedEnv, walk
from envs import BadInput, make_env, parse_options, plain, select_tasks
from rl.logs import picture
from rl.options import Environment, Hints, option, parse, schedule_of


@dataclass
class ShowOptions(Environment, Hints):
    steps: int = option(60, "training steps of the schedule")
    task: str = option("", "the training task to show, by name or by full id (default: the first)")
    enrich: str = option("both", f"the strategy of the episode shown: {', '.join(STRATEGIES)}")
    step: int = option(1, "the training step of the episode shown, of --steps")
    picture: str = option("schedule.png", "where the picture of the schedule goes")
    prompts: bool = option(False, "print the episode's prompts instead, as the policy of --model reads them, and its rows")
    model: str = option("tiny", "for --prompts: a folder with a tokenizer (no weights are read), a model on the hub, or tiny")
    history: str = option("full", "for --prompts: full, window:N or recent:N, as in training")
    thinking: bool = option(False, "for --prompts: of a model that thinks")


def show_episode(env, task, schedule):
    """Print an episode along the gold path: standard feedback on the left, enriched on the right."""
    def column(text):
        return [piece for line in plain(text).splitlines() for piece in textwrap.wrap(line, 57) or [""]]

    for turn, (observation, info, action) in enumerate(walk(EnrichedEnv(env, schedule), task, enriched=True), 1):
        standard = observation.removesuffix("\n" + info["hint"]) if "hint" in info else observation
        print(f"\n{f'turn {turn}, standard':<58} | enriched")
        for left, right in itertools.zip_longest(column(standard), column(observation), fillvalue=""):
            print(f"{left:<58} | {right}")
        print(plain(f"> {action}") if action else "(the end)")


def show_prompts(env, task, schedule, chat, **how):
    """Print an enriched episode along the gold path as rows of tokens: of a turn's prompt what its row does not hold yet. Every
    hint that stands in a prompt is marked, wherever it stands. how: of `rollout`."""
    from rl.rollout import Request, rollout
    from rl.warmstart import turn_end

    decode, end_id, rows = chat.tokenizer.decode, turn_end(chat), 0
    actions = [action for _, _, action in walk(EnrichedEnv(env, schedule), task, enriched=True) if action]
    script = iter(actions)
    [played] = rollout(lambda prompts: [[*chat.text_ids(next(script)), end_id] for _ in prompts], chat, [EnrichedEnv(env, schedule)],
                       [Request(task, enriched=True)], max_turns=len(actions), max_context=sys.maxsize, **how)
    hints = sorted({decode(chat.text_ids(turn.hint)) for turn in played.turns if turn.hint}, key=len, reverse=True)
    row = []
    for number, turn in enumerate(played.turns, 1):
        goes_on = bool(row) and turn.prompt_ids[:len(row)] == row
        rows += not goes_on
        print(f"\n----- turn {number}: row {rows} {f'goes on after {len(row)} tokens' if goes_on else 'begins'}; the prompt has "
              f"{len(turn.prompt_ids)} tokens, {'a hint' if turn.hint else 'no hint'} in the current observation")
        text = decode(turn.prompt_ids[len(row) if goes_on else 0:])
        text = re.sub("|".join(map(re.escape, hints)), r"[[\g<0>]]", text) if hints else text
        row = turn.prompt_ids + turn.action_ids
        print(plain(f"{text}{{{{{decode(turn.action_ids)}}}}}"))
    print(f"\n{len(played.turns)} turns, {len(played.rows)} rows of {sum(len(row.ids) for row in played.rows)} tokens, of which "
          f"{played.length} are trained on")


def chat_of(name, thinking):
    """The Chat of a model, by its tokenizer alone. Raises BadInput."""
    from transformers import AutoTokenizer

    from rl.policy import carrying_chat

    if name.startswith((".", "/", "~")) and not os.path.isdir(name):
        raise BadInput(f"there is no folder {name}: pass --model a folder with a tokenizer, a model on the hub, or tiny")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise BadInput(f"cannot load a tokenizer from {name} ({str(error).strip().splitlines()[0]}): pass --model a folder with "
                       f"one, a model on the hub, or tiny") from error
    if tokenizer.chat_template is None:
        raise BadInput(f"the tokenizer of {name} has no chat template: use an instruct model")
    return carrying_chat(tokenizer, thinking, None)


def draw_schedule(schedule, path):
    """Every strategy under this schedule's windows and switch, training step by turn, as one picture."""
    from matplotlib import colors, patches

    legend = {None: ("standard feedback", "#eeeeee"), "guidance": ("action guidance", "#4c78a8"), "enrichment":
              ("observation enrichment", "#f58518"), "both": ("both", "#54a24b"), "wrong": ("wrong guidance", "#e45756")}
    steps, turns = range(1, schedule.total_steps + 1), range(1, schedule.late[1] + 3)
    with picture(path, 2, 5, rect=(0, 0, 1, 0.94), figsize=(11, 4.4), sharex=True, sharey=True) as (figure, grid):
        for axes, name in zip(grid.flat, [name for name in STRATEGIES if name != "none"]):
            kinds = [[replace(schedule, strategy=name, step=step).kind(turn) for step in steps] for turn in turns]
            codes = [[list(legend).index("wrong" if kind and name == "wrong-hint" else kind) for kind in row] for row in kinds]
            axes.imshow(codes, colors.ListedColormap([colour for _, colour in legend.values()]), vmin=0, vmax=len(legend) - 1,
                        origin="lower", aspect="auto", interpolation="nearest",
                        extent=(0.5, len(steps) + 0.5, 0.5, len(turns) + 0.5))
            axes.set_title(name)
        figure.supxlabel("training step")
        figure.supylabel("turn of an episode")
        figure.legend(handles=[patches.Patch(color=colour, label=label) for label, colour in legend.values()],
                      loc="upper center", ncols=5, frameon=False)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if "--study" in argv:
        from study import enrichment
        return enrichment([word for word in argv if word != "--study"])
    config = parse(ShowOptions, argv, "Feedback enrichment (arXiv 2609.08404), shown.", common=ShowOptions)
    schedule = schedule_of(config, config.steps).at(config.step)
    options = parse_options(config.env_options)
    tasks = select_tasks(config.env, "train", [config.task] if config.task else config.tasks, options)
    env = make_env(config.env, options)
    if why := schedule.why_no_hints(env, tasks, config.max_turns or env.max_turns):
        raise BadInput(why)
    print(f"{config.env} {tasks[0]}, --enrich {config.enrich}, training step {config.step} of {config.steps}")
    if config.prompts:
        from rl.policy import tool_call_form
        from rl.tiny import tiny

        chat = chat_of(tiny(config.env, options, config.tasks) if config.model == "tiny" else config.model, config.thinking)
        env.tool_call_form = tool_call_form(chat.tokenizer)  # as load_policy does
        print(f"--history {config.history}, --enrich-history {config.enrich_history}, the tokenizer of {config.model}; [[...]] is a hint, "
              f"{{{{...}}}} what a policy on the gold path would have sampled")
        show_prompts(env, tasks[0], schedule, chat, history=config.history, keep_hints=config.enrich_history == "kept")
        env.close()
        return
    show_episode(env, tasks[0], schedule)
    env.close()
    draw_schedule(schedule, config.picture)
    print(f"\nschedule: {config.picture}")
