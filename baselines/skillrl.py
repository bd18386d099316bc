"""SkillRL: GRPO with a growing bank of skills in the prompt. arXiv 2602.08234, code aiming-lab/SkillRL.

    python -m baselines.skillrl                     # the built-in game and model, no network, minutes on a laptop
    from baselines.skillrl import retrieve, low_types, failures_shown, grow     # the rule; standard library alone

    bank        general skills, skills by task type, mistakes; each (title, principle, when to apply), from the base policy's episodes
    retrieval   by template: at most 6 general ones, all of the task's type, at most 5 mistakes, in the prompt          (`retrieve`)
    cold start  supervised training on episodes with skills in the prompt; its policy is the reference of the KL      (`cold_start`)
    RL          GRPO, skills in the prompt
    growth      at each validation: of the task types with success below 0.4, at most 10 failures are collected, the first 5 are
                shown to the editor, the last 5 steps of each; at most 3 new general skills, and none is ever removed (`grow`)

              the released scripts (ALFWorld)       here
    group     G = 8, 16 tasks a batch               --group 8 --tasks-per-step 8 (as distill.py)
    KL        0.01, k3, to the cold-started policy  --beta 0.01, the same
    clip      0.2                                   --eps 0.2
    penalty   0.1 for an invalid action, its step   --invalid-action-penalty 0, of the whole episode (docs/distill.md)
    optimizer lr 1e-6, all weights, 150 epochs      --lr 1e-3 for tiny, LoRA
    growth    each 5 steps, threshold 0.4           --eval-every 5, 0.4
    skills    a hosted model writes them            --editor count, or --editor model: the base model

Rules as in the released code: new skills are for training alone, validation keeps the first bank, so that it stays a fair measure;
test tasks are played without skills and with the grown bank.
What differs, and is ours:
1. Cold start: the released data are a larger model's episodes with skills. --cold-start own takes the policy's own successful ones;
   gold the environment's known solutions; none leaves it out.
2. The newest general skills come first, six in all: cut after the first six, a full bank would never show a new one. Copies of the
   released code show all new ones, and fill up to six with old ones.
3. Failures are those of the types below 0.4; copies of the released code take any, once one type is below it.
4. --editor count reads all validation episodes of these types, as it needs what went well too; its first bank is by task type alone,
   and general skills are what it adds.
5. A task's type is the part of its id before "/"; the released code finds it by key words.
6. A skill with the title and situation of another is not added twice. The words of all prompts are ours.
"""
import random
from dataclasses import dataclass

GENERAL, MISTAKES = 6, 5  # in a prompt at most
COLLECTED, SHOWN, LAST, NEW = 10, 5, 5, 3  # failures collected, shown, steps of each; new skills at most
THRESHOLD = 0.4


def retrieve(bank: dict, kind: str) -> list[dict]:
    """The skills for a task of this type: {"general": [], "types": {type: []}, "mistakes": []} -> [skill, ...]."""
    newest = bank["general"][::-1]
    return newest[:GENERAL] + bank["types"].get(kind, []) + bank["mistakes"][:MISTAKES]


def low_types(success: dict[str, float], threshold=THRESHOLD) -> list[str]:
    """The types whose validation success is below the threshold, strictly."""
    return [kind for kind, share in success.items() if share < threshold]


def failures_shown(episodes, low) -> list:
    """The first 5 of at most 10 failures of these types."""
    failures = [t for t in episodes if not t.success and t.task.partition("/")[0] in low][:COLLECTED]
    return failures[:SHOWN]


def grow(bank: dict, new: list[dict]) -> dict:
    """The bank with at most 3 new general skills; it only grows."""
    known = {(skill["title"], skill["when"]) for skill in every_skill(bank)}
    fresh = [skill for skill in new if (skill["title"], skill["when"]) not in known]
    return {**bank, "general": bank["general"] + fresh[:NEW]}


def every_skill(bank):
    return bank["general"] + [skill for skills in bank["types"].values() for skill in skills] + bank["mistakes"]


# The file as a program

def first_bank(run):
    """Skills from episodes of the base policy on training tasks."""
    from baselines.skills import by_type, counted, written

    config = run.config
    episodes = run.sample("first skills", config.reflection_batch)
    if config.editor == "count":
        types = {kind: counted(own, 3 * config.skills) for kind, own in by_type(episodes).items()}
        return {"general": [], "types": types, "mistakes": []}
    return {"general": written(run, "general", episodes[:SHOWN], config.skills),
            "types": {kind: written(run, "type", own[:SHOWN], config.skills) for kind, own in by_type(episodes).items()},
            "mistakes": written(run, "mistakes", [t for t in episodes if not t.success][:SHOWN], config.skills)}


def cold_start(run, show):
    """Supervised steps on episodes with skills in the prompt; the policy that comes out is the reference."""
    from baselines.loop import SkillEnv
    from envs import make_env
    from rl.model import freeze_reference
    from rl.warmstart import play, supervise

    config = run.config
    needed = config.warm_start_steps * config.warm_start_batch
    if config.cold_start == "gold":
        env = SkillEnv(make_env(config.env, run.options), show, config.state_place)
        tasks = random.Random(f"cold start {config.seed}").choices(run.tasks["train"], k=needed)
        episodes = play(lambda: env, run.chat, tasks, "gold", seed=config.seed, **run.limits)
        env.close()
    else:
        episodes = [t for t in run.sample("cold start", needed, show) if t.success]
    rows = [row for t in episodes for row in t.rows]
    if rows:
        supervise(run.model, rows, run.chat.pad_id, steps=config.warm_start_steps, batch=config.warm_start_batch,
                  lr=config.warm_start_lr, seed=config.seed, micro_batch_tokens=config.micro_batch_tokens,
                  gradient_checkpointing=config.gradient_checkpointing)
    else:
        print(f"no cold start: none of {needed} episodes with skills succeeded")
    freeze_reference(run.model)
    return len(episodes)


def new_skills(run, bank, episodes, low):
    """What the editor adds to the bank after a validation."""
    from baselines.skills import counted, task_type, written

    if run.config.editor == "count":
        return counted([t for t in episodes if task_type(t.task) in low], 10 ** 6, every_skill(bank))
    return written(run, "failures", failures_shown(episodes, low), NEW, every_skill(bank), last=LAST)


def main(argv=None):
    import grpo
    from baselines import loop
    from baselines.skills import SkillOptions, by_type, refuse_empty, task_type, text_of
    from envs import BadInput
    from rl.options import option, parse
    from rl.train import Algorithm

    @dataclass
    class Options(SkillOptions):
        beta: float = option(0.01, "weight of the KL to the cold-started policy")
        cold_start: str = option("own", "own: the policy's successful episodes with skills; gold: known solutions with skills; none")

    config = loop.with_defaults(parse(Options, argv, "Train with SkillRL (arXiv 2602.08234).", common=loop.Options), "skillrl")
    if config.cold_start not in ("own", "gold", "none"):
        raise BadInput(f"--cold-start must be own, gold or none, got {config.cold_start}")
    if config.warm_start:
        raise BadInput("skillrl.py has --cold-start in place of --warm-start")

    def shown(bank):
        return lambda task: text_of(retrieve(bank, task_type(task)), config.state_place)

    with loop.training(config, Algorithm(**grpo.algorithm(config) | {"name": "skillrl"})) as run:
        if run.first_step == 1:
            bank = first_bank(run)
            refuse_empty(every_skill(bank), "the base policy's episodes")
            started_on = cold_start(run, shown(bank)) if config.cold_start != "none" else 0
            run.keep(0, bank, cold_start_episodes=started_on)
        for step in run.steps():
            first, bank = run.kept()[0]["skills"], run.kept()[-1]["skills"]
            run.learn(step, run.play(step, shown(bank)), skills=len(every_skill(bank)))
            if config.eval_every and step % config.eval_every == 0:
                episodes = run.trial("valid", shown(first))
                run.evaluate(step, "valid", shown(first), played=episodes)
                whole = [t for t in episodes if t.end != "env_error"]
                low = low_types({kind: sum(t.success for t in own) / len(own) for kind, own in by_type(whole).items()})
                if low:
                    run.keep(step, grow(bank, new_skills(run, bank, whole, low)), low=low)
            run.close(step)
        run.report(shown(run.kept()[-1]["skills"]))
    return run.folder


if __name__ == "__main__":
    from rl.runs import cli
    cli(main)
