"""Helpers of funnel/rounds.py: episodes, policies in and out of memory, phases kept on disk.

    runs/<env>__distill__<mode>__<seed>/
        states/000.md ...       the state after each round; a file edited by hand is what the next round starts from
        policies/000/ ...       each committed policy's adapter in PEFT's format; 000 is the one before round 1
        phases/001-state.json   what a finished phase found: --resume goes on after the last of them
        rounds.jsonl, evaluations.jsonl     made from these; metrics.jsonl: a line a batch, rollouts.jsonl: one an episode
        adapter/, curve.png     the last committed policy, the picture

A phase is deterministic given (config, what earlier phases left), and everything it leaves is renamed into place before
its JSON is. So a stop at any moment costs the phase it fell in, and the last pair is intact.
"""
import contextlib
import gc
import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import torch

from envs import BadInput, make_env, parse_options, split_tasks
from funnel.options import FunnelOptions
from funnel.state import StateEnv, read_state
from rl.chat import Chat
from rl.evaluation import evaluate, fixed_tasks
from rl.logs import append, episode_metrics, keep_rows, record, replace_file, save_adapter
from rl.model import other_adapter
from rl.options import limits_of
from rl.policy import load_frozen, load_policy
from rl.rollout import Request, refuse_if_hopeless, rollout
from rl.runs import about, same_options
from rl.sampling import sampler

FREE = {"rounds", "out", "resume", "overwrite", "lr", "micro_batch_tokens", "gradient_checkpointing", "num_envs", "step_timeout",
        "preset", "log_tokens"}  # options a resumed run may change
PHASES = ("start", "state", "teacher", "policy", "retire", "round", "report")  # their order in a round


def finished_phases(folder, config, algorithm) -> int:
    """Refuse another run's options; cut off what unfinished phases have logged. Returns the number of phases that are finished."""
    was = about(folder)
    if was.get("algorithm") == algorithm and "lite" not in was and was.get("mode") != "policy-only" and (
            was.get("state_place") == "prompt" or was.get("editor") == "model"):
        raise BadInput(f"the run in {folder} was started when the state had no heading or its editor other prompts: start another run")
    same_options(folder, config, algorithm, FREE)
    finished = {path.stem for path in (folder / "phases").glob("*.json")}
    for name in ("metrics.jsonl", "rollouts.jsonl", "tokens.jsonl"):
        keep_rows(folder / name, lambda row: row["phase"] in finished)
    return len(finished)


@dataclass
class Run:
    """A policy is called by the round that committed it: 0 is the one before round 1."""
    config: FunnelOptions
    folder: Path
    options: dict  # of the environment
    tasks: dict  # split -> task ids
    envs: list
    limits: dict  # of an episode, as `rollout` takes them
    phase: str = ""  # the one under way, such as 001-state; it names the random stream of its episodes too
    model: torch.nn.Module | None = None  # the policy's; None while another model has the memory
    chat: Chat | None = None
    loaded: int | None = None  # the policy whose weights the model has; None: they are being trained, or fresh
    successes: dict = field(default_factory=dict)  # (split, policy, state) -> what `evaluate` found

    @classmethod
    def open(cls, config, folder):
        options = parse_options(config.env_options)
        tasks = split_tasks(config.env, config.tasks, options)
        most = max(config.tasks_per_step * config.group, config.eval_episodes, config.reflection_batch,
                   config.instances * config.outcomes_per_condition)
        envs = [make_env(config.env, options) for _ in range(min(config.num_envs, most))]
        for name in ("states", "policies", "phases"):
            (folder / name).mkdir(exist_ok=True)
        return cls(config, folder, options, tasks, envs, limits_of(config, envs[0]))

    # Phases

    def once(self, round_, name, work):
        """What the phase `work()` found. It is kept: a phase that was finished before a stop is not done again."""
        self.phase = f"{round_:03d}-{name}"
        path = self.folder / "phases" / f"{self.phase}.json"
        if not path.exists():
            replace_file(path, json.dumps(work()))
        # Made anew each time: a run that was killed between the phase and these files lacks its rows
        kept = [row for found in self.results() for row in found.get("evaluations", [])]
        replace_file(self.folder / "evaluations.jsonl", "".join(json.dumps(row) + "\n" for row in kept))
        kept = [found["line"] for found in self.results("round")]
        replace_file(self.folder / "rounds.jsonl", "".join(json.dumps(row) + "\n" for row in kept))
        return json.loads(path.read_text())

    def results(self, name="*"):
        """What the finished phases of this name found, in order."""
        paths = (self.folder / "phases").glob(f"*-{name}.json")
        return [json.loads(path.read_text()) for path in sorted(paths, key=lambda path: (
            int(path.stem.split("-")[0]), PHASES.index(path.stem.split("-")[1])))]

    def log(self, round_, played, **more):
        """A line of metrics.jsonl, and the episodes into rollouts.jsonl."""
        found = episode_metrics(played, self.config.group) if played else {}
        if more["episodes"] != "rl":  # no groups there
            found = {name: value for name, value in found.items() if name not in ("dead_group_fraction", "groups_sampled")}
        append(self.folder / "metrics.jsonl", {"step": round_, "phase": self.phase, **found, **more})
        for t in played:
            append(self.folder / "rollouts.jsonl", {"phase": self.phase, "episodes": more["episodes"], **record(round_, t)})

    def stored(self, round_):
        """Where the teacher's log-probs of a round are until its policy is trained."""
        return self.folder / "phases" / f"{round_:03d}-teacher.pt"

    # States

    def state(self, round_):
        return read_state(self.folder / "states" / f"{round_:03d}.md", self.config.state_limit)

    def write_state(self, name, text):
        replace_file(self.folder / "states" / f"{name}.md", text + "\n" if text else "")

    # Policies

    def load(self, policy=None):
        """The model with the weights of a committed policy; None: as it is, or fresh as the options say."""
        from peft import load_peft_weights, set_peft_model_state_dict

        if self.model is None:
            self.model, self.chat = load_policy(self.config, self.options)
        if policy is not None and policy != self.loaded:
            weights = load_peft_weights(str(self.folder / "policies" / f"{policy:03d}"), device=str(self.model.device))
            self.loaded = None  # until all of them are there
            set_peft_model_state_dict(self.model, weights)
            self.loaded = policy
        return self.model

    def save(self, policy):
        """Commit the weights of the model as policy `policy`."""
        save_adapter(self.model, self.folder / "policies" / f"{policy:03d}")
        self.loaded = policy

    def weights_of(self, policy):
        """While a policy is trained: inside, the model has the weights of a committed one."""
        return other_adapter(self.model, self.folder / "policies" / f"{policy:03d}")

    @contextlib.contextmanager
    def training(self, policy, start):
        """The model with the weights of policy `start`. What it is trained to inside is policy `policy`, committed or not."""
        model = self.load(start)
        self.loaded = None
        yield model
        self.loaded = policy

    def another(self, name):
        """(model, its Chat): another model, into memory."""
        return load_frozen(name, self.config.teacher_bits or self.config.bits, self.config.thinking, self.config.max_context,
                           self.config.started)

    def with_another(self, name, work):
        """work(model, its Chat) with another model, while the policy is out of memory. Nothing of it is left after."""
        self.model = self.loaded = None
        free_memory()
        model, chat = self.another(name)
        found = work(model, chat)
        del model
        free_memory()
        return found

    # Episodes

    def sample_tasks(self, what, size):
        """Training tasks of one use, each once."""
        tasks = self.tasks["train"]
        return random.Random(f"{what} {self.config.seed}").sample(tasks, min(size, len(tasks)))

    def envs_with(self, state):
        return [StateEnv(env, state, self.config.state_place) for env in self.envs]

    def episodes(self, requests, state):
        """Play with the model as it is now, sampled."""
        act = sampler(self.model, self.chat, temperature=self.config.temperature, max_new_tokens=self.config.max_new_tokens,
                      thinking_budget=self.config.thinking_budget)
        return rollout(act, self.chat, self.envs_with(state), requests, **self.limits)

    def seed(self, round_, task) -> int:
        return random.Random(f"episode {self.config.seed} {round_} {task}").randrange(2 ** 31)

    def play(self, round_, policy, what, tasks, state, times=1):
        """Each task `times` times, one after the other. In a round, a task's seed is the same under every state."""
        self.load(policy)
        torch.manual_seed(random.Random(f"sampling {self.config.seed} {self.phase} {what}").randrange(2 ** 31))
        played = self.episodes([Request(task, n, self.seed(round_, task)) for n, task in enumerate(tasks) for _ in range(times)], state)
        refuse_if_hopeless(played, self.config.max_context)
        self.log(round_, played, episodes=what)
        return played

    def success(self, split, policy, state):
        """`evaluate` on the fixed tasks of a split; the answer is kept, as it is the same each time."""
        if (split, policy, state) not in self.successes:
            act = sampler(self.load(policy), self.chat, temperature=self.config.eval_temperature,
                          max_new_tokens=self.config.max_new_tokens, thinking_budget=self.config.thinking_budget)
            torch.manual_seed(self.config.seed)
            tasks = fixed_tasks(self.tasks[split], self.config.eval_episodes)
            self.successes[split, policy, state] = evaluate(act, self.chat, self.envs_with(state), tasks, **self.limits)
        return self.successes[split, policy, state]

    def evaluation(self, round_, split, policy, state, who="trained", **more):
        """A line of evaluations.jsonl."""
        return {"step": round_, "split": split, "policy": who, "state": bool(state), **more,
                **self.success(split, policy, state)}


def free_memory():
    gc.collect()
    torch.cuda.empty_cache()  # nothing without a GPU
