"""The training run that the baselines share: steps of rl/train.py, with or without skills in what the policy sees.

    with training(config, Algorithm(...)) as run:
        for step in run.steps():
            played = run.play(step, show)           # groups of episodes; show: a task id -> the skills that the policy sees
            run.learn(step, played)                 # one training step, its lines in metrics.jsonl and rollouts.jsonl
            run.close(step)                         # evaluate without skills, save
        run.report()                                # the only place where test tasks are played

A run's folder is that of the other programs (rl/runs.py), and `skills.jsonl`: the skills from each step on that changed them.
A run that is resumed goes on from its last checkpoint and the skills of that step.
"""
import contextlib
import random
import time
from dataclasses import dataclass

import torch
from tqdm import tqdm

from envs import BadInput, make_env, parse_options, split_tasks
from funnel.state import StateEnv
from rl.evaluation import figures, fixed_tasks, success_table
from rl.logs import append, episode_metrics, keep_rows, read, record, save_adapter, speed
from rl.options import Learning, limits_of, option
from rl.policy import first_policy, load_frozen
from rl.rollout import Request, refuse_if_hopeless, rollout
from rl.runs import interrupts, run_folder, save_checkpoint
from rl.sampling import sampler
from rl.tokens import log_step_tokens, watch
from rl.train import Step


@dataclass
class Options(Learning):
    rounds: int = option(4, "as in distill.py: --rounds times --steps batches in all")
    steps: int = option(20, "batches per round; a batch takes --minibatches optimizer steps")
    tasks_per_step: int = option(8, "groups per step, one task each")
    editor: str = option("count", "who writes skills: count (counts commands of the built-in game) or model (a language model)")
    editor_model: str = option("", "the model of --editor model, which stays beside the policy (default: the policy's base model)")
    editor_tokens: int = option(512, "tokens of an answer of the editor at most")
    editor_characters: int = option(15_000, "characters of an episode that the editor is shown, as in distill.py")
    eval_every: int = option(5, "evaluate on validation tasks every so many steps (0: never)")
    save_every: int = option(10, "checkpoint every so many steps; the last step always")


def with_defaults(config, name):
    """Fill in what depends on other options, and refuse what cannot work, before anything is loaded or written."""
    if config.rounds < 1:
        raise BadInput(f"--rounds must be at least 1, got {config.rounds}")
    config.steps, config.rounds = config.rounds * config.steps, 1
    if config.env == "keydoor" and not config.env_options:
        config.env_options = ["colours=4"]  # as distill.py has it
    if hasattr(config, "state_place"):
        config.state_place = config.state_place or ("observation" if config.model == "tiny" else "prompt")
    for option_name, allowed in (("state_place", ("prompt", "observation")), ("editor", ("count", "model"))):
        if getattr(config, option_name, allowed[0]) not in allowed:
            raise BadInput(f"--{option_name.replace('_', '-')} must be {' or '.join(allowed)}, got {getattr(config, option_name)}")
    if config.editor == "count" and config.env != "keydoor":
        raise BadInput(f"--editor count knows the built-in game alone: pass --editor model with --env {config.env}")
    for option_name in ("editor_tokens", "editor_characters", "reflection_batch", "skills"):
        if getattr(config, option_name, 1) < 1:
            raise BadInput(f"--{option_name.replace('_', '-')} must be at least 1, got {getattr(config, option_name)}")
    config.out = config.out or f"runs/{config.env}__{name}__{config.seed}"
    return config


class SkillEnv(StateEnv):
    """Any environment with the skills for the task in what the policy sees: show(task id) -> their text, "" for none."""

    def __init__(self, env, show, place):
        super().__init__(env, "", place)
        self.show = show

    def reset(self, *, task, **how):
        self.state = self.show(task)
        return super().reset(task=task, **how)


class Run:
    def __init__(self, config, algorithm, folder, first_step, stopping):
        self.config, self.folder, self.first_step, self.stopping = config, folder, first_step, stopping
        self.options = parse_options(config.env_options)
        self.tasks = split_tasks(config.env, config.tasks, self.options)
        most = max(config.tasks_per_step * config.group, config.eval_episodes)
        self.envs = [make_env(config.env, self.options) for _ in range(min(config.num_envs, most))]
        self.limits = limits_of(config, self.envs[0])
        self.model, self.chat, self.optimizer = first_policy(config, algorithm, self.options, folder, first_step, self.tasks["train"],
                                                             self.limits)
        self.trainer, self.editor, self.last = Step(config, algorithm, self.model, self.optimizer, self.chat), None, "-"
        keep_rows(folder / "skills.jsonl", lambda row: row["step"] < first_step and first_step > 1)
        if first_step == 1 and config.eval_every:
            self.evaluate(0, "valid")

    # Skills

    def kept(self):
        """The lines of skills.jsonl: the first skills, and what came of them."""
        return read(self.folder / "skills.jsonl")

    def keep(self, step, skills, **why):
        """From the step after this one on."""
        append(self.folder / "skills.jsonl", {"step": step, **why, "skills": skills})

    def ask(self, prompts):
        """[(system, user), ...] -> answers of --editor-model, else of the policy's base model; greedy, eight at a time."""
        config, answers = self.config, []
        if config.editor_model and not self.editor:
            self.editor = load_frozen(config.editor_model, config.bits, config.thinking, config.max_context, config.started)
        model, chat = self.editor or (self.model, self.chat)
        with contextlib.nullcontext() if self.editor else model.disable_adapter():
            act = sampler(model, chat, temperature=0.0, max_new_tokens=config.editor_tokens)
            for n in range(0, len(prompts), 8):
                ids = act([chat.prompt([("system", system), ("user", user)]) for system, user in prompts[n:n + 8]])
                answers += map(chat.action_text, ids)
                act([])
        return answers

    # Episodes

    def episodes(self, requests, show, temperature):
        """Play with the policy as it is now."""
        act = sampler(self.model, self.chat, temperature=temperature, max_new_tokens=self.config.max_new_tokens,
                      thinking_budget=self.config.thinking_budget)
        envs = [SkillEnv(env, show, self.config.state_place) for env in self.envs] if show else self.envs
        return rollout(act, self.chat, envs, requests, **self.limits)

    def sample(self, what, size, show=None):
        """Episodes of the policy on training tasks, each once before one comes again."""
        rng = random.Random(f"{what} {self.config.seed}")
        tasks = [task for _ in range(0, size, len(self.tasks["train"])) for task in rng.sample(self.tasks["train"],
                                                                                               len(self.tasks["train"]))][:size]
        torch.manual_seed(rng.randrange(2 ** 31))
        played = self.episodes([Request(task, n, rng.randrange(2 ** 31)) for n, task in enumerate(tasks)], show,
                               self.config.temperature)
        refuse_if_hopeless(played, self.config.max_context)
        return [t for t in played if t.end != "env_error"]

    def trial(self, split, show=None):
        """Episodes on the fixed tasks of a split, the same ones each time."""
        torch.manual_seed(self.config.seed)
        tasks = fixed_tasks(self.tasks[split], self.config.eval_episodes)
        played = self.episodes([Request(task, n, n) for n, task in enumerate(tasks)], show, self.config.eval_temperature)
        refuse_if_hopeless(played, self.config.max_context)
        return played

    def evaluate(self, step, split, show=None, who="trained", final=False, played=None):
        """A line of evaluations.jsonl, with skills where `show` says so."""
        played = self.trial(split, show) if played is None else played
        row = {"step": step, "split": split, "policy": who, "state": bool(show), "final": final,
               **figures(played, [t.task for t in played])}
        append(self.folder / "evaluations.jsonl", row)
        if not show and split == "valid":
            self.last = f"{row['success']:.3f}"
        return row

    # A step

    def steps(self):
        with tqdm(range(self.first_step, self.config.steps + 1), initial=self.first_step - 1, total=self.config.steps,
                  disable=None) as bar:
            for step in bar:
                yield step
                bar.set_postfix(success=self.last)

    def play(self, step, show=None):
        """A batch: groups of episodes of one task and seed each, flat."""
        self.started = time.perf_counter()
        groups, _ = self.trainer.play(step, self.tasks["train"], lambda requests: self.episodes(
            requests, show, self.config.temperature))
        return [trajectory for group in groups for trajectory in group]

    def learn(self, step, batch, **more):
        """The optimizer steps of one training step, and its lines; more: further metrics."""
        config, played_at = self.config, time.perf_counter()
        advantages_N = self.trainer.advantages(batch)
        watched = watch(config, self.model, batch, self.chat, self.trainer.micro_batch_tokens) if config.log_tokens else None
        stats = self.trainer.learn(step, batch, advantages_N)
        self.trainer.refuse_to_go_on(step, lambda last: save_checkpoint(self.folder, self.model, self.optimizer, last))
        append(self.folder / "metrics.jsonl", {"step": step, **episode_metrics(batch, config.group), **more, **stats, **speed(
            batch, stats["learn_tokens"], played_at - self.started, time.perf_counter() - played_at)})
        for trajectory in batch:
            append(self.folder / "rollouts.jsonl", record(step, trajectory))
        if watched:
            log_step_tokens(self.folder / "tokens.jsonl", self.chat, step, batch, advantages_N, watched)

    def close(self, step):
        """Evaluate without skills, and save; Ctrl-C ends the run here."""
        config, stop = self.config, self.stopping()
        if config.eval_every and step % config.eval_every == 0:
            self.evaluate(step, "valid")
        if step % config.save_every == 0 or step == config.steps or stop:
            save_checkpoint(self.folder, self.model, self.optimizer, step)
        if stop:
            raise KeyboardInterrupt(f"stopped after step {step}, which is saved: the same command with --resume goes on")

    def report(self, show=None):
        """Test tasks by the base model and by the trained policy, without skills and, where `show` is given, with them."""
        save_adapter(self.model, self.folder / "adapter")
        base = next((row for row in read(self.folder / "evaluations.jsonl") if row["policy"] == "base"), None)
        if base is None:
            with self.model.disable_adapter():
                base = self.evaluate(0, "test", who="base", final=True)
        name, settings = f"after {self.config.steps} steps", [None, show] if show else [None]
        played = [self.trial("test", own) for own in settings]  # all of them, before a line says that the run has ended
        rows = [("base model", base)] + [(f"{name}, with skills" if own else name, self.evaluate(
            self.config.steps, "test", own, final=True, played=episodes)) for own, episodes in zip(settings, played)]
        print(f"\n{success_table(' '.join([self.config.env, *self.config.env_options]), rows)}\n"
              f"{self.folder}/ holds {', '.join(sorted(path.name for path in self.folder.iterdir()))}")


@contextlib.contextmanager
def training(config, algorithm):
    """The `Run` in its folder; config: `Options`, with the method's own. Raises BadInput with one line."""
    with run_folder(config, algorithm.name) as (folder, first_step), interrupts() as stopping:
        run = Run(config, algorithm, folder, first_step, stopping)
        yield run
        for env in run.envs:
            env.close()
