"""What `python enrich.py` shows: an episode, standard feedback beside enriched, and the schedule as a picture."""
import itertools
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
    show_episode(env, tasks[0], schedule)
    env.close()
    draw_schedule(schedule, config.picture)
    print(f"\nschedule: {config.picture}")
