"""OPID: GRPO with token advantages from hindsight skills. arXiv 2606.26790, code jinyangwu/OPID.

    python -m baselines.opid                        # the built-in game and model, no network, minutes on a laptop
    from baselines.opid import skill_at, skill_term, opid_loss      # the rule; needs torch and grpo.py alone

An analyzer reads each finished episode and writes one skill of the episode (a workflow if it succeeded, what to avoid if it
failed) and at most 5 skills of single steps. The policy that sampled an episode then scores the same tokens once more, after
prompts h~ which hold the step's skill, or else the episode's:

    h~_t      = h_t + the skill of this step, else of the episode                           (`skill_at`)
    A_skill,t = log pi_old(y_t | h~_t) - log pi_old(y_t | h_t), without gradient            (`skill_term`)
    A_i,t     = A_group,i + 0.001 A_skill,i,t                                               (`opid_loss`)

and GRPO's clipped objective with the KL term takes A_i,t in place of A_i. The policy plays without skills, always.

              the released script (ALFWorld)        here
    group     G = 8, 16 tasks a batch               --group 8 --tasks-per-step 8 (as distill.py)
    KL        0.01, k3, to the base model           --beta 0.01, the same
    clip      0.2                                   --eps 0.2
    penalty   0.1 for an invalid action, its step   --invalid-action-penalty 0, of the whole episode (docs/distill.md)
    optimizer lr 1e-6, all weights, 160 batches     --lr 1e-3 for tiny, LoRA
    episodes  30 turns, 5 past ones in the prompt   the environment's limit, --history
    analyzer  a hosted model, 4096 tokens           --editor count, or --editor model: the base model, --editor-tokens 512

Rules as in the released code: an episode without an analysis (an answer that cannot be read twice) has A_skill 0; a skill of a step
takes the place of the episode's there ("step_priority"; its other mode adds both terms); no normalising of A_skill, no clip.
What differs, and is ours:
1. The group's baseline is over episodes (grpo.py); theirs counts every step of an episode as a sample, unless told otherwise.
2. The objective is grpo.py's: a mean over each episode's tokens, then over episodes.
3. h~_t holds its skill under the current observation, as a hint, and no skill of an earlier step. Theirs stands behind the task.
4. --editor count, for the built-in game, counts over all episodes of the batch; an episode's skill is then the entries that came
   out, and of an entry the policy sees what is about its observation. Steps that did otherwise come first among the five.
5. The analyzer's words are ours.
"""
from dataclasses import dataclass, field, replace

import torch

from grpo import group_advantages, grpo_loss
from grpo import Options as GrpoOptions

STEP_SKILLS = 5


def skill_at(step: int, analysis: dict | None) -> str:
    """The skill in the hindsight prompt of a step (from 0): its own, else the episode's, else ""."""
    return (analysis["steps"].get(step) or analysis["episode"]) if analysis else ""


def skill_term(skill_logp_BT, old_logp_BT, mask_BT, weight=0.001):
    """0.001 A_skill: [B, T] log-probs of the sampled tokens after h~ and after h, in nats -> [B, T], 0 where the mask is 0."""
    return torch.where(mask_BT.bool(), weight * (skill_logp_BT - old_logp_BT).detach(), 0.0)  # OPID, A_skill


def opid_loss(logp_BT, old_logp_BT, group_B, term_BT, mask_BT, *, num_trajectories, lengths_B, eps=0.2, beta=0.01, ref_logp_BT=None):
    """GRPO's loss with an advantage for each token: this micro-batch's share, as `grpo_loss` has it. group_B: A_group of each row;
    term_BT: `skill_term`. Each token is handed over as a row of its own, which keeps its trajectory's length."""
    def alone(x_BT):
        return None if x_BT is None else x_BT.reshape(-1, 1)

    advantages_BT = group_B[:, None] + term_BT  # OPID: A = A_group + 0.001 A_skill
    return grpo_loss(alone(logp_BT), alone(old_logp_BT), advantages_BT.reshape(-1), alone(mask_BT), num_trajectories=num_trajectories,
                     lengths_B=lengths_B.repeat_interleave(logp_BT.shape[1]), eps=eps, beta=beta, ref_logp_BT=alone(ref_logp_BT))


def parse_analysis(values, turns: int) -> dict | None:
    """The last JSON object with an episode skill -> {"episode": text, "steps": {step: text}}, at most 5 steps that exist; else None."""
    whole = [v for v in values if isinstance(v, dict) and isinstance(v.get("episode_skill"), str) and v["episode_skill"].strip()]
    if not whole:
        return None
    value = whole[-1]
    steps = value.get("step_skills") if isinstance(value.get("step_skills"), dict) else {}
    known = {int(step): text.strip() for step, text in steps.items()
             if step.isdecimal() and int(step) < turns and isinstance(text, str) and text.strip()}
    return {"episode": value["episode_skill"].strip(), "steps": dict(list(known.items())[:STEP_SKILLS])}


# The file as a program

ANALYSE = """You read a finished episode of an agent. Write down what would help the same agent in such an episode:
"episode_skill": {what}
"step_skills": for at most {most} decisive steps, by number, one short order to the agent at this step.
Answer with JSON alone: {{"episode_skill": "...", "step_skills": {{"0": "...", "3": "..."}}}}"""
WHAT = {True: "the workflow that made it succeed: what to do in which order.",
        False: "what to avoid: the mistake that made it fail, and how to see it coming."}


@dataclass
class Options(GrpoOptions):
    beta: float = field(default=0.01, metadata={"help": "weight of the KL to the base model"})
    skill_weight: float = field(default=0.001, metadata={"help": "weight of A_skill"})

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.skill_weight < float("inf"):
            raise ValueError(f"--skill-weight must be at least 0, got {self.skill_weight}")


def algorithm(config) -> dict:
    """The fields of `Algorithm` in rl/train.py."""
    return {"name": "opid", "advantages": group_advantages, "clip": (config.eps, config.eps), "use_reference": config.beta > 0,
            "use_entropy": True,  # rows of groups with equal rewards have A_skill
            "loss": lambda batch: opid_loss(batch.logp_BT, batch.old_logp_BT, batch.advantages_B, batch.token_advantages_BT,
                                            batch.mask_BT, num_trajectories=batch.num_trajectories, lengths_B=batch.lengths_B,
                                            eps=config.eps, beta=config.beta, ref_logp_BT=batch.ref_logp_BT)}


def count_analyses(episodes):
    """Analyses by counting over these episodes: one for each, or None where nothing stood out."""
    from baselines.skills import counted, text_of
    from envs import parse_action
    from funnel.state import note_of

    entries, found = text_of(counted(episodes, 10 ** 6), "observation"), []
    for t in episodes:
        shown = [t.first_observation, *(turn.observation for turn in t.turns)]
        notes = {n: note for n, observation in enumerate(shown[:len(t.turns)]) if (note := note_of(entries, observation))}
        order = sorted(notes, key=lambda n: (parse_action(t.turns[n].action).lower() in notes[n].lower(), n))
        found.append({"episode": entries, "steps": {n: notes[n] for n in order[:STEP_SKILLS]}} if entries else None)
    return found


def model_analyses(run, episodes):
    """Analyses by a language model, each asked for twice at most."""
    from baselines.skills import json_values, transcript

    prompts = [(ANALYSE.format(what=WHAT[t.success], most=STEP_SKILLS), transcript(run, t)) for t in episodes]
    found = [parse_analysis(json_values(answer), len(t.turns)) for t, answer in zip(episodes, run.ask(prompts))]
    again = [n for n, analysis in enumerate(found) if analysis is None]
    answers = run.ask([(prompts[n][0], f"{prompts[n][1]}\n\nYour last answer was not such a JSON object.") for n in again]) if again else []
    for n, answer in zip(again, answers):
        found[n] = parse_analysis(json_values(answer), len(episodes[n].turns))
    return found


def hindsight_rows(trajectory, analysis, chat, history, quoted=False):
    """The trajectory's rows after the prompts h~: the skill of each step under the observation that the step answers. quoted: an
    episode's skill is a list of entries, of which the one about the observation is shown."""
    from funnel.state import note_of
    from rl.stripped import rebuild_rows

    shown = [trajectory.first_observation, *(turn.observation for turn in trajectory.turns)]
    skills = [skill_at(n, analysis) for n in range(len(trajectory.turns))]
    if quoted:
        skills = [note_of(skill, text) or "" if skill == analysis["episode"] else skill for skill, text in zip(skills, shown)]
    texts = [f"{text}\n{skill}" if skill else text for text, skill in zip(shown, [*skills, ""])]
    turns = [replace(turn, observation=text, hint=skill or None) for turn, text, skill in zip(trajectory.turns, texts[1:], skills)]
    return rebuild_rows(replace(trajectory, first_observation=texts[0], turns=turns), chat, history)


def add_skill_terms(run, batch, analyses):
    """Put 0.001 A_skill into the rows of the batch, by the policy as it is; returns its mean size over tokens with an analysis."""
    from rl.learner import row_logps

    config, sizes = run.config, []
    how = {"temperature": config.temperature, "micro_batch_tokens": config.micro_batch_tokens}
    known = [(t, analysis) for t, analysis in zip(batch, analyses) if analysis and t.turns]
    hindsight = [hindsight_rows(t, analysis, run.chat, config.history, config.editor == "count") for t, analysis in known]
    plain = iter(row_logps(run.model, [row for t, _ in known for row in t.rows], run.chat.pad_id, **how))
    informed = iter(row_logps(run.model, [row for rows in hindsight for row in rows], run.chat.pad_id, **how))
    for (t, _), rows in zip(known, hindsight):
        sampled = [(i, logp) for row in rows for i, own, logp in zip(row.ids, row.mask, next(informed)) if own]  # cut in other rows
        if [i for i, _ in sampled] != [i for row in t.rows for i, own in zip(row.ids, row.mask) if own]:
            raise AssertionError("the hindsight prompts do not score the token ids that were sampled")
        logps = iter(sampled)
        for row in t.rows:
            skill_T = torch.tensor([next(logps)[1] if own else 0.0 for own in row.mask])
            term_T = skill_term(skill_T, torch.tensor(next(plain)), torch.tensor(row.mask), config.skill_weight)
            row.token_advantages = term_T.tolist()
            sizes += term_T[torch.tensor(row.mask).bool()].abs().tolist()
    return sum(sizes) / max(len(sizes), 1)


def main(argv=None):
    from baselines import loop
    from rl.options import parse
    from rl.train import Algorithm

    config = loop.with_defaults(parse(Options, argv, "Train with OPID (arXiv 2606.26790).", common=loop.Options), "opid")
    with loop.training(config, Algorithm(**algorithm(config))) as run:
        for step in run.steps():
            batch = run.play(step)
            whole = [t for t in batch if t.end != "env_error"]
            analyses = count_analyses(whole) if config.editor == "count" else model_analyses(run, whole)
            size = add_skill_terms(run, whole, analyses)
            run.learn(step, batch, analysed=sum(map(bool, analyses)) / max(len(batch), 1), skill_term=size)
            run.close(step)
        run.report()
    return run.folder


if __name__ == "__main__":
    from rl.runs import cli
    cli(main)
