"""`tiny`: a Qwen3-architecture model of under a million parameters with a word tokenizer.

It is warm-started on random admissible play of training tasks, so that it knows the format and not the way, and
follows a command that a hint names. For keydoor it is shipped (tiny-keydoor/, 1.7 MB, made by the command below). For
another environment it is made on first use and cached in ~/.cache/scaffold-funnel (or $SCAFFOLD_FUNNEL_CACHE), under a
name that depends on everything it is made from; the same seed gives the same model.

    python -m rl.tiny --env keydoor --out made-anew --seed 0
    python -m rl.tiny --env sciworld --env-options admissible=none --tasks lifespan-longest-lived --max-turns 8 --out DIR

Where play is slow and its actions are easy to foresee (ScienceWorld: 65 ms to list the admissible ones), a model
remembers sooner than it copies. There it first learns to copy random words, which nothing else foretells (`LESSONS`).
"""
import hashlib
import inspect
import json
import os
import random
import re
import shutil
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from envs import BadInput, env_class, make_env, parse_options, select_tasks
from rl import learner, warmstart
from rl.chat import Chat
from rl.model import load_model
from rl.rollout import Request, add_turn, rollout
from rl.runs import Parser, cli
from rl.sampling import sampler
from rl.warmstart import play, supervise, turn_end

CHAT_TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
                 "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
# Two layers, not four: copying a listed command, all that the warm start teaches, came sooner (docs/log.md).
SHAPE = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 6,
         "num_key_value_heads": 3, "head_dim": 32, "max_position_embeddings": 4096, "tie_word_embeddings": True}
RECIPE = {"episodes": 10_000, "steps": 1800, "batch": 12, "lr": 3e-3}
# The game's play: short and long, few and many commands, every house; wrong commands do not end it.
KEYDOOR = [{"stages": stages, "commands": commands, "families": 8, "colours": 8, "practice": True}
           for stages, commands in ((6, 3), (6, 4), (6, 5), (4, 6), (4, 8))]
SLOW = {"episodes": 160, "texts": 40}  # where `info` does not list the admissible actions
# Rows of random words (`copy_row`): plain repetition, then the first action of a hint, then the same in longer rows, then
# these mixed half and half with play.
LESSONS = [{"hints": 0, "noise": 0, "steps": 220, "batch": 32, "lr": 3e-3},
           {"hints": 2, "noise": 25, "steps": 120, "batch": 16, "lr": 2e-3},
           {"hints": 4, "noise": 80, "steps": 70, "batch": 8, "lr": 2e-3},
           {"hints": 4, "noise": 80, "steps": 160, "batch": 8, "lr": 1e-3}]
SHIPPED = Path(__file__).parent.parent / "tiny-keydoor"


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


class OneOfEachVerb:
    """An environment that lists one admissible action for each verb: on ScienceWorld most of hundreds are "move X to Y"."""

    def __init__(self, env, seed):
        self.env, self.rng = env, random.Random(f"verbs {seed}")

    def __getattr__(self, name):
        return getattr(self.env, name)

    def admissible_actions(self):
        actions = self.env.admissible_actions()
        return list({action.split()[0]: action for action in self.rng.sample(actions, len(actions))}.values())


def copy_row(env, chat, words, rng, hints, noise):
    """A row whose answers are random words, so that only copying foretells them.

    hints=0: the user says 8-14 different words and the assistant repeats them: many tokens learn from a short row, and
    copying comes within 200 steps. Else that many turns of 0 to `noise` words and a hint that names 1-3 actions of 2-6
    words; the assistant answers the first. A row draws from 6 words, 20 or all: actions repeat words (baby baby mouse).
    """
    def some(least, most):
        return " ".join(rng.choices(pool, k=rng.randint(least, most)))

    pool, rows = rng.sample(words, min(len(words), rng.choice((6, 20, len(words))))), []
    messages = [("system", env.system_prompt)] if hints and env.system_prompt else []
    for _ in range(max(hints, 1)):
        named = [some(2, 6) for _ in range(rng.randint(1, 3))] if hints else [" ".join(rng.sample(words, rng.randint(8, 14)))]
        messages.append(("user", f"{some(0, noise)}\n{env.phrase(named)}" if hints else named[0]))
        action_ids = chat.text_ids(named[0])
        add_turn(rows, chat.prompt(messages), [*action_ids, turn_end(chat)])
        messages.append(("assistant", action_ids))
    return rows[0]


def tiny(env_name="keydoor", options=None, only=(), seed=0):
    """The folder of the model for an environment: shipped, cached or made now. `only`: as --tasks."""
    if env_name == "keydoor":
        return str(SHIPPED)
    code = [inspect.getsource(part) for part in (warmstart, learner, Chat, env_class(env_name), OneOfEachVerb, copy_row)]
    made_of = json.dumps([env_name, options or {}, sorted(only), seed, RECIPE, SLOW, LESSONS, SHAPE, CHAT_TEMPLATE,
                          torch.__version__, code])
    cache = Path(os.environ.get("SCAFFOLD_FUNNEL_CACHE", Path.home() / ".cache" / "scaffold-funnel"))
    name = re.sub(r"\W+", "-", env_name)
    folder = cache / f"tiny-{name}-{seed}-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"
    if not (folder / "config.json").exists():
        print(f"making a small model for {env_name}, minutes of one core, kept in {cache}; an edit of the environment's code makes "
              "another", file=sys.stderr, flush=True)
        build(folder, env_name, [options or {}], list(only), seed)
    return str(folder)


def build(folder, env_name, plays, only=(), seed=0, max_turns=0):
    """Make the model from play under each set of environment options in `plays`, and save it. max_turns: of an episode
    of play (0: the environment's own limit)."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    rng = random.Random(f"tiny {seed}")
    envs = [make_env(env_name, options) for options in plays]
    tasks_of = [select_tasks(env_name, "train", only, options) for options in plays]
    slow = "admissible" not in envs[0].reset(task=tasks_of[0][0], seed=0)[1]
    if slow and not envs[0].admissible_actions():
        raise BadInput(f"--model tiny learns the format of {env_name} from admissible play: let info['admissible'] or "
                       "admissible_actions() list the commands that are valid now, or pass another --model")
    episodes, texts = (SLOW["episodes"], SLOW["texts"]) if slow else (RECIPE["episodes"], 300)
    drawn = [rng.choices(tasks, k=episodes // len(plays)) for tasks in tasks_of]
    tokenizer = word_tokenizer([text for env, tasks in zip(envs, drawn) for text in texts_of(env, tasks[:texts], seed)])
    chat = Chat(tokenizer)
    envs = [OneOfEachVerb(env, seed) for env in envs] if slow else envs
    rows = [row for n, (env, tasks) in enumerate(zip(envs, drawn))
            for trajectory in play(lambda: env, chat, tasks, "random", seed=10_000 * seed + n,
                                   max_turns=max_turns or env.max_turns)
            for row in trajectory.rows]
    stages = [(RECIPE, rows)]
    if slow:
        words = sorted(word for word in tokenizer.get_vocab() if re.fullmatch(r"[\w'-]+", word))
        *lessons, (last, copying) = [(lesson, [copy_row(envs[0], chat, words, rng, lesson["hints"], lesson["noise"])
                                               for _ in range(lesson["steps"] * lesson["batch"])]) for lesson in LESSONS]
        stages = [*lessons, (last, rows + copying[:len(rows)])]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
                                             pad_token_id=tokenizer.pad_token_id, bos_token_id=None, **SHAPE))
    with tqdm(total=sum(lesson["steps"] for lesson, _ in stages), desc=f"warm start of tiny for {env_name}, once",
              disable=None, leave=False) as bar:
        for lesson, rows in stages:
            supervise(model, rows, chat.pad_id, steps=lesson["steps"], batch=lesson["batch"], lr=lesson["lr"], seed=seed,
                      progress=lambda step, loss: (bar.update(), bar.set_postfix(loss=f"{loss:.2f}")))
    beside = Path(f"{folder}.{os.getpid()}")
    model.half().save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    try:
        os.rename(beside, folder)
    except OSError:  # another process was first; its model is the same
        shutil.rmtree(beside)


def main(argv=None):
    parser = Parser(description="Build the built-in model of an environment.")
    parser.add_argument("--env", default="keydoor")
    parser.add_argument("--env-options", nargs="*", default=[])
    parser.add_argument("--tasks", nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-turns", type=int, default=0, help="turns per episode (0: the environment's own limit)")
    parser.add_argument("--out", default="", help="make it anew, into this folder")
    args = parser.parse_args(argv)
    options = parse_options(args.env_options)
    tasks = select_tasks(args.env, "train", args.tasks, options)
    if args.out and os.path.exists(args.out):
        raise BadInput(f"{args.out} exists: move it away, or choose another --out")
    if args.out:
        plays = KEYDOOR if args.env == "keydoor" and not options else [options]
        build(args.out, args.env, plays, args.tasks, args.seed, args.max_turns)
    folder = args.out or tiny(args.env, options, args.tasks, args.seed)
    model, tokenizer = load_model(folder)
    chat, players = Chat(tokenizer), [make_env(args.env, options) for _ in range(32)]
    torch.manual_seed(args.seed)
    played = rollout(sampler(model, chat), chat, players, [Request(task) for task in tasks[:256]],
                     max_turns=args.max_turns or players[0].max_turns)
    turns = [turn for trajectory in played for turn in trajectory.turns]
    print(f"{folder}\n{model.num_parameters():,} parameters, {len(tokenizer)} words, "
          f"{sum(turn.valid for turn in turns) / len(turns):.0%} of its actions are valid, "
          f"{sum(t.success for t in played) / len(played):.1%} of its episodes succeed")


if __name__ == "__main__":
    cli(main)
