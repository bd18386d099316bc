"""The rounds of distill.py: episodes, policies in and out of memory, phases kept on disk, the report.

    runs/<env>__distill__<mode>__<seed>/
        states/000.md ...       the state after each round; a file edited by hand is what the next round starts from
        policies/000/ ...       each committed policy's adapter in PEFT's format; 000 is the one before round 1
        phases/001-state.json   what a finished phase found: --resume goes on after the last of them
        rounds.jsonl, evaluations.jsonl     made from these; metrics.jsonl: a line a batch, rollouts.jsonl: one an episode
        adapter/, curve.png     the last committed policy, the picture

A phase is deterministic given (config, what earlier phases left), and everything it leaves is renamed into place before
its JSON is. So a stop at any moment costs the phase it fell in, and the last pair is intact.
"""
import gc
import json
import random
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError

import distill
from envs import BadInput, make_env, parse_options
from evaluate import evaluate, fixed_tasks, table
from model import load_model
from rollout import Chat, Request, refuse_if_nothing_fits, rollout
from runs import append, cut, episode_metrics, read, record, replace, run_folder, same_options, write_config
from sampling import sampler
from state import StateEnv, count_edits, entries, model_edits, read_state
from teacher import check_tokenizer
from train import load_policy, tasks_of
from warmstart import warm_up

FREE = {"rounds", "out", "resume", "overwrite", "lr", "micro_batch_tokens", "gradient_checkpointing", "num_envs", "step_timeout",
        "preset", "log_tokens"}  # options a resumed run may change
PHASES = ("start", "state", "teacher", "policy", "round", "report")  # their order in a round


def resume(folder, config, algorithm) -> int:
    """Refuse another run's options; cut off what unfinished phases have logged. Returns the phases that are finished."""
    same_options(folder, config, algorithm, FREE)
    finished = {path.stem for path in (folder / "phases").glob("*.json")}
    for name in ("metrics.jsonl", "rollouts.jsonl", "tokens.jsonl"):
        cut(folder / name, lambda row: row["phase"] in finished)
    return len(finished)


class Loop:
    def __init__(self, config, folder):
        self.config, self.folder = config, Path(folder)
        self.options = parse_options(config.env_options)
        self.tasks = tasks_of(config, self.options)
        most = max(config.tasks_per_step * config.group, config.eval_episodes, config.reflection_batch,
                   config.instances * config.outcomes_per_condition)
        self.envs = [make_env(config.env, self.options) for _ in range(min(config.num_envs, most))]
        self.limits = {"max_turns": config.max_turns or self.envs[0].max_turns, "max_new_tokens": config.max_new_tokens,
                       "max_context": config.max_context, "history": config.history, "step_timeout": config.step_timeout}
        self.model, self.number, self.seen = None, None, {}
        for name in ("states", "policies", "phases"):
            (self.folder / name).mkdir(exist_ok=True)

    # Phases

    def phase(self, round_, name, work):
        """What `work()` found. It is kept: a phase that was finished before a stop is not done again."""
        self.now, path = f"{round_:03d}-{name}", self.folder / "phases" / f"{round_:03d}-{name}.json"
        if not path.exists():
            replace(path, json.dumps(work()))
            kept = [row for found in self.results() for row in found.get("evaluations", [])]
            replace(self.folder / "evaluations.jsonl", "".join(json.dumps(row) + "\n" for row in kept))
            kept = [found["line"] for found in self.results("round")]
            replace(self.folder / "rounds.jsonl", "".join(json.dumps(row) + "\n" for row in kept))
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
        append(self.folder / "metrics.jsonl", {"step": round_, "phase": self.now, **found, **more})
        for t in played:
            append(self.folder / "rollouts.jsonl", {"phase": self.now, "episodes": more["episodes"], **record(round_, t)})

    def stored(self, round_):
        """Where the teacher's log-probs of a round are until its policy is trained."""
        return self.folder / "phases" / f"{round_:03d}-teacher.pt"

    # States

    def state(self, round_):
        return read_state(self.folder / "states" / f"{round_:03d}.md", self.config.state_limit)

    def write_state(self, round_, text):
        replace(self.folder / "states" / f"{round_:03d}.md", text + "\n" if text else "")

    def edit(self, number, episodes, state, budget, rejected):
        """(edits, dropped ones) by --editor."""
        if self.config.editor == "count":
            return count_edits(episodes, state, budget, rejected), []

        def answers_of(model, chat):
            act = sampler(model, chat, temperature=0.0, max_new_tokens=self.config.editor_tokens)
            return lambda prompts: [chat.action_text(act([chat.prompt([("system", system), ("user", user)])])[0])
                                    for system, user in prompts]

        how = {"most": self.config.editor_characters}
        if self.config.editor_model:
            return self.instead(self.config.editor_model, lambda model, chat: model_edits(
                answers_of(model, chat), episodes, state, budget, rejected, **how))
        model = self.policy(number)
        with model.disable_adapter():
            return model_edits(answers_of(model, self.chat), episodes, state, budget, rejected, **how)

    # Policies

    def policy(self, number):
        """The model with policy `number`'s adapter; None: fresh, as the options say."""
        from peft import load_peft_weights, set_peft_model_state_dict

        if self.model is None:
            self.model, self.chat = load_policy(self.config, self.options)
            self.vocabulary = self.model.get_base_model().get_output_embeddings().weight.shape[0]
            self.number = None
        if number is not None and number != self.number:
            folder = self.folder / "policies" / f"{number:03d}"
            set_peft_model_state_dict(self.model, load_peft_weights(str(folder), device=str(self.model.device)))
            self.number = number
        return self.model

    def save_policy(self, number):
        folder = self.folder / "policies" / f"{number:03d}"
        beside = folder.with_name(folder.name + ".new")
        for leftover in (beside, folder):
            shutil.rmtree(leftover, ignore_errors=True)
        self.model.save_pretrained(beside, selected_adapters=["default"])
        beside.rename(folder)

    def instead(self, name, work):
        """work(model, its Chat) with another model, while the policy is out of memory. Nothing of it is left after."""
        self.model = None
        free()
        try:
            model, tokenizer = load_model(name, self.config.teacher_bits or self.config.bits)
        except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
            raise BadInput(f"cannot load the model {name!r}: {str(error).strip().splitlines()[0]}") from error
        found = work(model, Chat(tokenizer, self.config.thinking, model.generation_config.eos_token_id))
        del model
        free()
        return found

    # Episodes

    def draw(self, what, size):
        """Training tasks of one use, each once."""
        return random.Random(f"{what} {self.config.seed}").sample(self.tasks["train"], min(size, len(self.tasks["train"])))

    def seed(self, what):
        torch.manual_seed(random.Random(f"sampling {self.config.seed} {self.now} {what}").randrange(2 ** 31))

    def under(self, state):
        return [StateEnv(env, state, self.config.state_place) for env in self.envs]

    def episodes(self, requests, state):
        """Play with the model as it is now, sampled."""
        act = sampler(self.model, self.chat, temperature=self.config.temperature, max_new_tokens=self.config.max_new_tokens)
        played = rollout(act, self.chat, self.under(state), requests, **self.limits)
        refuse_if_nothing_fits(played, self.config.max_context)
        if all(t.end == "env_error" for t in played):
            raise BadInput(f"the environment broke in every episode, last with {played[-1].error}; mend it, then --resume")
        return played

    def play(self, round_, number, what, tasks, state, times=1):
        """Each task `times` times, one after the other. In a round, a task's seed is the same under every state."""
        self.policy(number)
        self.seed(what)
        seeds = [random.Random(f"episode {self.config.seed} {round_} {task}").randrange(2 ** 31) for task in tasks]
        played = self.episodes([Request(task, n, seed) for n, (task, seed) in enumerate(zip(tasks, seeds))
                                for _ in range(times)], state)
        self.log(round_, played, episodes=what)
        return played

    def success(self, split, number, state):
        """`evaluate` on the fixed tasks of a split; the answer is kept, as it is the same each time."""
        if (split, number, state) not in self.seen:
            model = self.policy(number)
            act = sampler(model, self.chat, temperature=self.config.eval_temperature,
                          max_new_tokens=self.config.max_new_tokens)
            torch.manual_seed(self.config.seed)
            tasks = fixed_tasks(self.tasks[split], self.config.eval_episodes)
            self.seen[split, number, state] = evaluate(act, self.chat, self.under(state), tasks, **self.limits)
        return self.seen[split, number, state]

    def evaluation(self, round_, split, number, state, policy="trained", **more):
        """A line of evaluations.jsonl."""
        return {"step": round_, "split": split, "policy": policy, "state": bool(state), **more,
                **self.success(split, number, state)}


def run(config):
    """All rounds; returns the run's folder."""
    with run_folder(config, "distill", resume) as (folder, _):
        write_config(folder, config, "distill")
        try:
            loop = Loop(config, folder)
            number = 0
            loop.phase(0, "start", lambda: start(loop))
            for k in range(1, config.rounds + 1):
                evolved, taught, trained, previous = {}, {}, {}, loop.state(k - 1)
                if config.mode == "policy-only":
                    loop.write_state(k, "")
                else:
                    evolved = loop.phase(k, "state", lambda: distill.evolve_state(loop, k, number, previous))
                state = loop.state(k)
                if config.mode == "full" and evolved["state_accepted"] and config.teacher != "none":
                    taught = loop.phase(k, "teacher", lambda: distill.choose_and_teach(loop, k, number, previous, state))
                if config.mode == "policy-only" or config.mode == "full" and evolved["state_accepted"]:
                    trained = loop.phase(k, "policy", lambda: distill.train_policy(loop, k, number, taught))
                    loop.stored(k).unlink(missing_ok=True)
                number = k if trained.get("policy_accepted") else number
                line = loop.phase(k, "round", lambda: close_round(loop, k, number, state, evolved, taught, trained))["line"]
                print(round_table([line]) if k == 1 else round_table([line]).splitlines()[1], flush=True)
            report = loop.phase(k, "report", lambda: final_report(loop, k, number, loop.state(k)))
        except Exception as error:
            if not any(words in str(error) for words in ("No space left", "Disk quota", "File too large")):
                raise
            raise BadInput(f"the disk is full ({str(error).splitlines()[0]}): make room, then --resume") from error
        draw_rounds(folder, folder / "curve.png")
    for env in loop.envs:
        env.close()
    names = [("before" if row["policy"] == "base" else "after") + (
        ", with the residual state" if row.get("residual") else ", with the state" if row["state"] else "")
        for row in report["evaluations"]]
    title = " ".join([config.env, *config.env_options])
    print(f"\n{round_table(read(folder / 'rounds.jsonl'))}\n"
          "tasks with a state against without: 01 newly better, 11 still better, 10 no longer, 00 not; before, after: the first and "
          f"last policy, with the last state\n\n{table(title, zip(names, report['evaluations']))}")
    print(f"{folder}/ holds states/, policies/, adapter/, rounds.jsonl, evaluations.jsonl, rollouts.jsonl, curve.png")
    return folder


def start(loop):
    """Policy 0 and state 0."""
    config, model = loop.config, loop.policy(None)
    if config.teacher not in ("self", "none"):
        check_tokenizer(config.teacher, loop.chat.tokenizer)
    if config.warm_start:
        warm_up(config, model, loop.chat, loop.options, loop.tasks["train"], loop.limits)
    loop.save_policy(0)
    loop.number = 0
    state = read_state(config.state, config.state_limit) if config.state and config.mode != "policy-only" else ""
    loop.write_state(0, state)
    loop.log(0, [], episodes="none")
    return {"state": state, "evaluations": [loop.evaluation(0, "valid", 0, text) for text in dict.fromkeys(("", state))]}


def close_round(loop, k, number, state, evolved, taught, trained):
    """The pair after the round on validation tasks, and the round as a line."""
    evaluations = [loop.evaluation(k, "valid", number, text) for text in dict.fromkeys(("", state))]
    line = {"step": k, **{name: evolved.get(name) for name in ("state_accepted", "success_before", "success_after",
                                                                "edited_by_hand")}, "state_reason": evolved.get("reason"),
            **{name: evolved.get(name, []) for name in ("edits", "rejected_edits", "dropped_edits")},
            "entries": len(entries(state)),
            **{name: taught.get(name) for name in ("labels", "selected", "trajectories", "tokens", "success_in_training")},
            "policy_accepted": trained.get("policy_accepted"), "policy_reason": trained.get("reason"),
            "optimizer_steps": trained.get("optimizer_steps", 0), "policy": number,
            "success_free": evaluations[0]["success"], "success_state": evaluations[1]["success"] if state else None}
    return {"line": line, "evaluations": evaluations}


def final_report(loop, k, number, state):
    """The only place where test tasks are played. Writes the residual state and adapter/."""
    residual = residual_state(loop, number, state) if number else state
    replace(loop.folder / "states" / "residual.md", residual + "\n" if residual else "")
    texts = list(dict.fromkeys(("", state)))
    rows = [loop.evaluation(k, "test", n, text, policy)
            for n, policy in ((0, "base"), (number, "trained")) for text in texts]
    if state:
        rows.append(loop.evaluation(k, "test", number, residual, residual=True))
    adapter, beside = loop.folder / "adapter", loop.folder / "adapter.new"
    shutil.rmtree(beside, ignore_errors=True)
    shutil.copytree(loop.folder / "policies" / f"{number:03d}", beside)
    shutil.rmtree(adapter, ignore_errors=True)
    beside.rename(adapter)
    return {"evaluations": rows, "entries": len(entries(state)), "residual_entries": len(entries(residual))}


def free():
    gc.collect()
    torch.cuda.empty_cache()  # nothing without a GPU


def residual_state(loop, number, state) -> str:
    """The state without the entries whose removal leaves the policy's validation success where it is with all of them.
    Groups are tried first, then their halves, so that a state that is not needed costs one evaluation."""
    full = loop.success("valid", number, state)["success"]

    def retire(kept, group):
        without = "\n".join(line for line in kept.splitlines() if line not in group).strip()
        if loop.success("valid", number, without)["success"] >= full:
            return without
        if len(group) < 2:
            return kept
        return retire(retire(kept, group[:len(group) // 2]), group[len(group) // 2:])

    return retire(state, entries(state)) if entries(state) else state


def round_table(lines) -> str:
    """rounds.jsonl for the terminal."""
    def share(value):
        return "-" if value is None else f"{value:.3f}"

    text = ["round  state      edits  entries  00/01/10/11    selected  state-free  with state  policy"]
    for row in lines:
        labels = "/".join(str(row["labels"][name]) for name in ("00", "01", "10", "11")) if row["labels"] else "-"
        state, policy = ("-" if row[name] is None else "accepted" if row[name] else "rejected"
                         for name in ("state_accepted", "policy_accepted"))
        text.append(f"{row['step']:>5}  {state:<9}  {len(row['edits']):>5}  {row['entries']:>7}  {labels:<13}  "
                    f"{'-' if row['selected'] is None else row['selected']:>8}  {share(row['success_free']):>10}  "
                    f"{share(row['success_state']):>10}  {policy}")
    return "\n".join(text)


def draw_rounds(folder, path):
    """Success on valid and test tasks over the rounds, with and without the state."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6))
    rows = [row for row in read(folder / "evaluations.jsonl") if row["policy"] == "trained" and not row.get("residual")]
    for colour, has_state, name in (("C0", False, "state-free"), ("C1", True, "with the state")):
        for split, marker in (("valid", "o-"), ("test", "s")):
            these = [row for row in rows if (row["split"], row["state"]) == (split, has_state)]
            if these:
                errors = [[abs(row["success"] - row["interval"][side]) for row in these] for side in (0, 1)]
                axes.errorbar([row["step"] + 0.06 * has_state for row in these], [row["success"] for row in these], errors,
                              fmt=marker, color=colour, markersize=4, capsize=2, label=f"{name}, {split} tasks (95 %)")
    for row in read(folder / "rounds.jsonl"):
        said = [word for word, name in (("state", "state_accepted"), ("policy", "policy_accepted")) if row[name]]
        axes.text(row["step"], 1.03, "\n".join(said), ha="center", va="bottom", fontsize=7, color="0.3")
    axes.set(xlabel="round (what was accepted above)", ylim=(-0.02, 1.02), ylabel="success")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
