"""SKILL0: GRPO with skills in the prompt that are withdrawn step by step. arXiv 2604.02268, code ZJU-REAL/SkillZero.

    python -m baselines.skill0                      # the built-in game and model, no network, minutes on a laptop
    from baselines.skill0 import budget, stage_of, helpfulness, select      # the rule; needs the standard library alone

Training has N_S = 3 stages. In stage s at most M(s) of the N skills stand in the prompt, and in the last stage none:

    M(s)    = ceil(N (N_S - s) / (N_S - 1)), s = 1 ... N_S: for N = 6 it is 6, 3, 0                            (`budget`)
    Delta_k = success with skills - success without, on the validation tasks of skill k, every d = 10 steps     (`helpfulness`)
    active  = the skills with Delta_k >= 0, those of the largest Delta_k first, the first M(s)                     (`select`)

              the released script (ALFWorld)        here
    group     G = 8, 16 tasks a batch               --group 8 --tasks-per-step 8 (as distill.py)
    KL        none                                  --beta 0
    clip      0.2                                   --eps 0.2
    penalty   0.1 for an invalid action, its step   --invalid-action-penalty 0, of the whole episode (docs/distill.md)
    optimizer lr 1e-6, all weights, 180 steps       --lr 1e-3 for tiny, LoRA
    stages    6, 3, 0; validation every 10 steps    3 stages of equal length; --skill-eval-every 10

The paper keeps Delta_k > 0, the released code Delta_k >= 0; here it is the code's, --keep positive is the paper's.
What differs, and is ours:
1. A validation plays two passes, with all N skills and with none (copies of the released code do so too), so a skill that was dropped
   can come back as long as the budget has room.
2. Copies of the released code keep a file of general skills first, in one of the M(s) places; here every skill is ranked.
3. A skill is a text for one task type, and its validation tasks are those of the type. With --editor count each entry of the built-in
   game is a skill, and its tasks are those in which it was quoted. A skill without a validation task is dropped.
4. Skills are written from episodes of the base policy before step 1; the released ones are files of a larger model's.
5. The reward for compressing a rendered context is not here: a prompt of text has nothing to compress.
6. Until the first validation all skills are active, as far as the budget goes. Equal Delta_k: in the order they were written.
"""
from dataclasses import dataclass

STAGES = 3


def budget(stage: int, number: int, stages=STAGES) -> int:
    """M(s) for `number` skills, s from 1 to `stages`."""
    return -(-number * (stages - stage) // (stages - 1))  # SKILL0: M(s) = ceil(N (N_S - s) / (N_S - 1))


def stage_of(step: int, steps: int, stages=STAGES) -> int:
    """The stage of a step (from 1), stages of equal length: 1 ... `stages`."""
    return 1 + (step - 1) * stages // steps


def helpfulness(success_with: dict, success_without: dict, tasks_of: dict) -> dict:
    """{skill: Delta}: the mean difference over its own tasks; success by task, tasks by skill. A skill without tasks has none."""
    return {skill: sum(success_with[task] - success_without[task] for task in tasks) / len(tasks)
            for skill, tasks in tasks_of.items() if tasks}  # SKILL0: Delta_k


def select(deltas: dict, most: int, positive=False) -> list:
    """The active skills: Delta >= 0 (the paper: > 0), largest first, at most `most`."""
    kept = [skill for skill, delta in deltas.items() if delta > 0 or delta == 0 and not positive]
    return sorted(kept, key=lambda skill: -deltas[skill])[:most]  # sorted keeps the order of equal ones


# The file as a program

def first_skills(run):
    """{name: {"type": task type, "skills": [...]}}: entries one by one, or a text for each type."""
    from baselines.skills import by_type, counted, text_of, written

    config, named = run.config, {}
    for kind, own in by_type(run.sample("first skills", config.reflection_batch)).items():
        if config.editor == "count":
            named |= {text_of([skill], "observation"): {"type": kind, "skills": [skill]} for skill in counted(own, 3 * config.skills)}
        elif skills := written(run, "type", own[:5], config.skills):
            named[kind] = {"type": kind, "skills": skills}
    return named


def tasks_of_skills(skills, episodes, quoted):
    """{skill: the tasks of these episodes, which had all skills, that are its own}: of its type; quoted: that showed it."""
    from baselines.skills import task_type, text_of
    from funnel.state import note_of

    def is_own(skill, t):
        if task_type(t.task) != skill["type"]:
            return False
        seen = [t.first_observation, *(turn.observation for turn in t.turns)]
        plain = [text.removesuffix(f"\n{turn.hint}") if turn.hint else text for text, turn in zip(seen, t.turns)]
        return not quoted or any(note_of(text_of(skill["skills"], "observation"), text) for text in plain)

    return {name: [t.task for t in episodes if is_own(skill, t)] for name, skill in skills.items()}


def main(argv=None):
    import grpo
    from baselines import loop
    from baselines.skills import SkillOptions, refuse_empty, task_type, text_of
    from envs import BadInput
    from rl.options import option, parse
    from rl.train import Algorithm

    @dataclass
    class Options(SkillOptions):
        skill_eval_every: int = option(10, "validate with and without skills every so many steps, d")
        keep: str = option("nonnegative", "skills of Delta >= 0 (nonnegative, the released code's) or > 0 (positive, the paper's)")

    config = loop.with_defaults(parse(Options, argv, "Train with SKILL0 (arXiv 2604.02268).", common=loop.Options), "skill0")
    if config.keep not in ("nonnegative", "positive"):
        raise BadInput(f"--keep must be nonnegative or positive, got {config.keep}")
    if config.skill_eval_every < 1:
        raise BadInput(f"--skill-eval-every must be at least 1, got {config.skill_eval_every}")

    def shown(skills, names):
        return lambda task: text_of([skill for name in names if skills[name]["type"] == task_type(task)
                                     for skill in skills[name]["skills"]], config.state_place)

    with loop.training(config, Algorithm(**grpo.algorithm(config) | {"name": "skill0"})) as run:
        if run.first_step == 1:
            skills = first_skills(run)
            refuse_empty(skills, "the base policy's episodes")
            run.keep(0, skills, deltas=None)
        for step in run.steps():
            # Skills in the prompt, as many as the stage has room for
            skills, deltas = (run.kept()[-1][name] for name in ("skills", "deltas"))
            most = budget(stage_of(step, config.steps), len(skills))
            active = list(skills)[:most] if deltas is None else select(deltas, most, config.keep == "positive")
            run.learn(step, run.play(step, shown(skills, active) if active else None), skills=len(active), budget=most)
            # How much does each help?
            if step % config.skill_eval_every == 0 and step < config.steps:
                having, without = (run.trial("valid", show) for show in (shown(skills, skills), None))
                run.evaluate(step, "valid", shown(skills, skills), played=having)
                broke = {t.task for t in having + without if t.end == "env_error"}
                own = tasks_of_skills(skills, [t for t in having if t.task not in broke], config.state_place == "observation")
                success = ({t.task: t.success for t in played} for played in (having, without))
                run.keep(step, skills, deltas=helpfulness(*success, own))
            run.close(step)
        run.report()
    return run.folder


if __name__ == "__main__":
    from rl.runs import cli
    cli(main)
