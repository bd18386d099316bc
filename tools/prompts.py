"""What `python distill.py --prompts` shows: the prompts of Phase I for an environment, made of real episodes: reflection on failures
and on successes, merging, ranking. No model is loaded. The episodes are played along the gold path and at random; what stands for the
editor's answers are made-up edits."""
import json
import random
from dataclasses import dataclass

from envs import BadInput, make_env, parse_options, plain, select_tasks
from funnel.editors import model_edits
from funnel.options import FunnelOptions, with_defaults
from funnel.state import read_state
from rl.options import option, parse
from rl.rollout import Trajectory, play_turn

REJECTED = [{"edits": [{"op": "append", "content": "- (a rejected edit)", "support": 2}], "before": 0.5, "after": 0.25}]


@dataclass
class PromptOptions(FunnelOptions):
    prompts: bool = option(True, "print the prompts of Phase I and stop")


class Letters:
    """In place of a chat: an action's ids are its letters."""
    end_ids, action_text = frozenset(), staticmethod("".join)


def play(env, task, max_turns, gold):
    """An episode along the gold path, or of commands at random that are possible where the environment lists them."""
    rng, trajectory = random.Random(task), Trajectory(task, 0, 0, False)
    trajectory.first_observation, trajectory.info = env.reset(task=task, seed=0)
    trajectory.system_prompt, trajectory.tools = env.system_prompt, env.tools
    while not trajectory.end:
        possible = env.admissible_actions() or trajectory.info.get("admissible") or ["I do not know."]
        action = env.gold_action() if gold else rng.choice(possible)
        play_turn(env, trajectory, Letters, [], list(action or "I do not know."), max_turns, 0.0)
    return trajectory


def main(argv=None):
    config = with_defaults(parse(PromptOptions, argv, "The prompts of Phase I (arXiv 2609.08919, SkillOpt).", common=PromptOptions))
    options = parse_options(config.env_options)
    tasks, env = select_tasks(config.env, "train", config.tasks, options), make_env(config.env, options)
    if not tasks:
        raise BadInput(f"{config.env} has no training tasks with these options: change --tasks or --env-options")
    state = read_state(config.state, config.state_limit) if config.state else ""
    rng = random.Random(config.seed)
    episodes = [play(env, task, config.max_turns or env.max_turns, gold) for gold in (False, True)
                for task in rng.sample(tasks, min(3, len(tasks)))]
    seen, budget = set(), config.edits_first

    def ask(prompts):
        for system, user in prompts:
            title = system.split("\n\n")[0]
            if title not in seen:
                print(plain(f"\n{'=' * 40} system\n{system}\n{'-' * 40} user\n{user}"))
            seen.add(title)
        return [json.dumps([{"op": "append", "content": f"- (edit {len(seen)}.{n}.{m})", "support": 2} for m in range(2 * budget)])
                for n, _ in enumerate(prompts)]

    model_edits(ask, env, episodes, state, budget, REJECTED, most=config.editor_characters, together=2)
    env.close()
    print(f"\n{len(episodes)} episodes of {config.env}, of which {sum(t.success for t in episodes)} succeeded, two in a prompt; in "
          f"training up to eight. The longest has {max(len(env.reflection(t)) for t in episodes):,} characters of --editor-characters "
          f"{config.editor_characters:,}")
