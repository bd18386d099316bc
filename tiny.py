"""`tiny`: a Qwen3-architecture model of under a million parameters with a word tokenizer.

It is warm-started on random admissible play of training tasks, so that it knows the format and not the way, and
follows a command that a hint names. For keydoor it is shipped (tiny-keydoor/, 1.7 MB, made by the command below). For
another environment it is made on first use and cached in ~/.cache/scaffold-funnel (or $SCAFFOLD_FUNNEL_CACHE), under a
name that depends on everything it is made from; the same seed gives the same model.

    python tiny.py --env keydoor --out made-anew --seed 0
    python tiny.py --env sciworld --env-options admissible=none --tasks find-animal --history window:2 --out DIR

Where listing the admissible actions is what costs (ScienceWorld: 50-100 ms), a few hundred episodes are played, and each
of their turns serves for many rows: with other actions drawn from its list, named by a hint or not (`drill`).
"""
import hashlib
import inspect
import json
import os
import random
import re
import shutil
from pathlib import Path

CHAT_TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
                 "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
# Two layers, not four: copying a listed command, all that the warm start teaches, came sooner (docs/log.md).
SHAPE = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 6,
         "num_key_value_heads": 3, "head_dim": 32, "max_position_embeddings": 4096, "tie_word_embeddings": True}
RECIPE = {"episodes": 10_000, "steps": 1800, "batch": 12, "lr": 3e-3}
# The game's play: short and long, few and many commands, every house; wrong commands do not end it.
KEYDOOR = [{"stages": stages, "commands": commands, "families": 8, "colours": 8, "practice": True}
           for stages, commands in ((6, 3), (6, 4), (6, 5), (4, 6), (4, 8))]
# Where the environment does not list the admissible actions by itself: `copies` named actions a turn, and first 1200 steps
# on the last 72 ids of the rows, which hold the hint: copying comes at a tenth of the cost it has on whole prompts.
DRILL = {"episodes": 280, "copies": 4, "lr": 2e-3, "stages": [{"steps": 1200, "batch": 16, "last": 72},
                                                              {"steps": 400, "batch": 8, "last": 0}]}
SHIPPED = Path(__file__).parent / "tiny-keydoor"


def word_tokenizer(texts):
    """A fast tokenizer with one id per lower-case word or mark of `texts`; spaces and line breaks are not tokens."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
    cut = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(
        Regex(r"[\p{L}\p{N}_]+(?:[-'][\p{L}\p{N}_]+)*|[^\s]"), behavior="removed", invert=True)])
    words = {word for text in texts for word, _ in cut.pre_tokenize_str(text.lower())}
    vocabulary = {word: i for i, word in enumerate([*special, *sorted(words | {"system", "user", "assistant"})])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), cut
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, eos_token="<|im_end|>",
                                   pad_token="<|endoftext|>", unk_token="<unk>",
                                   additional_special_tokens=["<|im_start|>"])


def texts_of(env, tasks, seed):
    """What an environment says in one episode a task, along the gold path or at random."""
    texts, rng = [], random.Random(f"texts {seed}")
    for number, task in enumerate(tasks):
        observation, info = env.reset(task=task, seed=seed + number)
        for _ in range(env.max_turns):
            admissible = info.get("admissible") or env.admissible_actions() or []
            hints = [env.action_guidance(), env.observation_enrichment(), env.phrase(["this", "that"])]
            texts += [env.system_prompt, observation, *admissible, *filter(None, hints)]
            action = env.gold_action() or (rng.choice(admissible) if admissible else "")
            observation, _, terminated, truncated, info = env.step(action)
            texts.append(observation)
            if terminated or truncated:
                break
    return texts


def plays_of(env_name, options):
    """The sets of options to play under: keydoor's own, on ScienceWorld both wordings of guidance, else those given."""
    if env_name == "keydoor" and not options:
        return KEYDOOR
    return [{**options, "guidance": way} for way in ("next", "first-three")] if env_name == "sciworld" else [options]


def random_episode(env, task, seed, max_turns):
    """(trajectory without rows, for each turn the admissible actions) of random admissible play."""
    from rollout import Trajectory, Turn

    rng, listings = random.Random(f"play {task} {seed}"), []
    observation, _ = env.reset(task=task, seed=seed)
    trajectory = Trajectory(task, 0, seed, False, env.system_prompt, env.tools, observation)
    for _ in range(max_turns):
        listings.append(env.admissible_actions())
        action = rng.choice(listings[-1])
        observation, reward, terminated, truncated, info = env.step(action)
        trajectory.turns.append(Turn([], [], action, observation, reward, info["valid"], "end"))
        if terminated or truncated:
            break
    return trajectory, listings


def drill(env, chat, trajectory, listings, copies, history):
    """Rows: at every turn, actions drawn from its list, each after hints that name it, and the played one after none.

    The hints are those of an episode that has the played actions, then the drawn one and two more as its known path."""
    from dataclasses import replace

    from rollout import Row, messages_of

    rng, rows, actions = random.Random(f"drill {trajectory.task} {trajectory.seed}"), [], []
    end_id = chat.tokenizer.eos_token_id

    def row(named, action):
        def said(text, turn):
            return f"{text}\n{env.phrase(named[turn])}" if turn < len(named) and named[turn] else text

        so_far = replace(trajectory, first_observation=said(trajectory.first_observation, 0), turns=[
            replace(turn, action_ids=[*chat.text_ids(turn.action), end_id], observation=said(turn.observation, number))
            for number, turn in enumerate(trajectory.turns[:len(actions)], 1)])
        prompt, ids = chat.prompt(messages_of(so_far, chat, history), so_far.tools), [*chat.text_ids(action), end_id]
        return Row(prompt + ids, [0] * len(prompt) + [1] * len(ids))

    for turn, listed in zip(trajectory.turns, listings):
        rows.append(row([], turn.action))
        for _ in range(copies):
            path = [*actions, *rng.choices(listed, k=3)]
            drawn, named = path[len(actions)], [env.named(path, done) for done in range(len(actions) + 1)]
            if drawn in named[-1]:
                rows.append(row(named, drawn))
        actions.append(turn.action)
    return rows


def tiny(env_name="keydoor", options=None, only=(), seed=0):
    """The folder of the model for an environment: shipped, cached or made now. `only`: as --tasks."""
    if env_name == "keydoor":
        return str(SHIPPED)
    import torch

    import envs
    import learner
    import rollout
    import warmstart
    code = [inspect.getsource(part) for part in (warmstart, learner, rollout.Chat, envs.env_class(env_name), drill)]
    made_of = json.dumps([env_name, options or {}, sorted(only), seed, RECIPE, DRILL, SHAPE, CHAT_TEMPLATE,
                          torch.__version__, code])
    cache = Path(os.environ.get("SCAFFOLD_FUNNEL_CACHE", Path.home() / ".cache" / "scaffold-funnel"))
    name = re.sub(r"\W+", "-", env_name)
    folder = cache / f"tiny-{name}-{seed}-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"
    if not (folder / "config.json").exists():
        build(folder, env_name, plays_of(env_name, options or {}), list(only), seed)
    return str(folder)


def build(folder, env_name, plays, only=(), seed=0, history="full", max_turns=0):
    """Make the model from play under each set of environment options in `plays`, and save it."""
    import torch
    from tqdm import tqdm
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from envs import make_env, select_tasks
    from rollout import Chat, Row
    from warmstart import play, supervise

    rng = random.Random(f"tiny {seed}")
    envs = [make_env(env_name, options) for options in plays]
    tasks_of = [select_tasks(env_name, "train", only, options) for options in plays]
    slow = "admissible" not in envs[0].reset(task=tasks_of[0][0], seed=0)[1] and envs[0].admissible_actions()
    recipe = DRILL if slow else RECIPE
    drawn = [rng.choices(tasks, k=recipe["episodes"] // len(plays)) for tasks in tasks_of]
    if slow:
        played = [random_episode(env, task, 10_000 * seed + n, max_turns or env.max_turns)
                  for env, tasks in zip(envs, drawn) for n, task in enumerate(tqdm(tasks, desc="play", disable=None))]
        tokenizer = word_tokenizer([text for env, tasks in zip(envs, drawn) for text in texts_of(env, tasks[:8], seed)] +
                                   [text for trajectory, listings in played for text in (
                                       trajectory.first_observation, *(turn.observation for turn in trajectory.turns),
                                       *(action for listed in listings for action in listed))])
        chat = Chat(tokenizer)
        rows = [row for n, (trajectory, listings) in enumerate(played)
                for row in drill(envs[n // len(drawn[0])], chat, trajectory, listings, recipe["copies"], history)]
    else:
        tokenizer = word_tokenizer([text for env, tasks in zip(envs, drawn) for text in texts_of(env, tasks[:300], seed)])
        chat = Chat(tokenizer)
        rows = [row for n, (env, tasks) in enumerate(zip(envs, drawn))
                for trajectory in play(lambda: env, chat, tasks, "random", seed=10_000 * seed + n,
                                       max_turns=max_turns or env.max_turns, history=history)
                for row in trajectory.rows]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
                                             pad_token_id=tokenizer.pad_token_id, bos_token_id=None, **SHAPE))
    stages = recipe.get("stages") or [{"steps": recipe["steps"], "batch": recipe["batch"], "last": 0}]
    with tqdm(total=sum(stage["steps"] for stage in stages), desc=f"warm start of tiny for {env_name}, once", disable=None,
              leave=False) as bar:
        for stage in stages:
            cut = [Row(row.ids[-stage["last"]:], row.mask[-stage["last"]:]) for row in rows]  # [-0:] is all of it
            supervise(model, cut, chat.pad_id, steps=stage["steps"], batch=stage["batch"], lr=recipe["lr"], seed=seed,
                      progress=lambda step, loss: (bar.update(), bar.set_postfix(loss=f"{loss:.2f}")))
    beside = Path(f"{folder}.{os.getpid()}")
    model.half().save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    try:
        os.rename(beside, folder)
    except OSError:  # another process was first; its model is the same
        shutil.rmtree(beside)


def main(argv=None):
    import argparse

    import torch

    import envs
    from envs import make_env, parse_options, select_tasks
    from model import load_model
    from rollout import Chat, Request, rollout
    from sampling import sampler

    parser = argparse.ArgumentParser(description="Build the built-in model of an environment.")
    parser.add_argument("--env", default="keydoor")
    parser.add_argument("--env-options", nargs="*", default=[])
    parser.add_argument("--tasks", nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--history", default="full", help="the form of the prompts, as in training")
    parser.add_argument("--max-turns", type=int, default=0, help="turns per episode (0: the environment's own limit)")
    parser.add_argument("--out", default="", help="make it anew, into this folder")
    args = parser.parse_args(argv)
    options = parse_options(args.env_options)
    tasks = select_tasks(args.env, "train", args.tasks, options)
    if args.out and os.path.exists(args.out):
        raise envs.BadInput(f"{args.out} exists: move it away, or choose another --out")
    if not args.out and (args.history != "full" or args.max_turns):
        raise envs.BadInput("--history and --max-turns need --out DIR: pass that folder to --model")
    shape = {"history": args.history, "max_turns": args.max_turns}
    if args.out:
        build(args.out, args.env, plays_of(args.env, options), args.tasks, args.seed, **shape)
    folder = args.out or tiny(args.env, options, args.tasks, args.seed)
    model, tokenizer = load_model(folder)
    chat, players = Chat(tokenizer), [make_env(args.env, options) for _ in range(32)]
    torch.manual_seed(args.seed)
    played = rollout(sampler(model, chat), chat, players, [Request(task) for task in tasks[:256]],
                     max_turns=args.max_turns or players[0].max_turns, history=args.history)
    turns = [turn for trajectory in played for turn in trajectory.turns]
    print(f"{folder}\n{model.num_parameters():,} parameters, {len(tokenizer)} words, "
          f"{sum(turn.valid for turn in turns) / len(turns):.0%} of its actions are valid, "
          f"{sum(t.success for t in played) / len(played):.1%} of its episodes succeed")


if __name__ == "__main__":
    from train import cli
    cli(main)
