"""What the tests share: real tokenizers, random models small enough for a CPU, toy environments and policies.

No test needs weights from the network but those with `smollm2`, which skip without it.
"""
import copy
import importlib.util
import os
import random
import shutil
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)

from envs import BadInput, Env  # noqa: E402
from envs.keydoor import COLOURS, HOUSES, METALS, KeyDoor  # noqa: E402
from rl.chat import Chat  # noqa: E402
from rl.learner import pad, token_logps  # noqa: E402
from rl.logs import read  # noqa: E402
from rl.model import add_lora  # noqa: E402
from rl.rollout import Request, Row, Trajectory, rollout  # noqa: E402
from rl.sampling import sampler  # noqa: E402
from rl.tiny import CHAT_TEMPLATE, word_tokenizer  # noqa: E402
from rl.train import Algorithm, Step  # noqa: E402

WORDS = ["you see a door . key go wait win lose stop play : action 1 2 3 4 5 6 7 8 9 alpha beta gamma delta epsilon",
         KeyDoor.system_prompt, "take the key", "unlock", "open door", "say impossible", "commands : |", "hint , then",
         "taken unlocked opened right the alarm rings that is not a command you are in the house",
         *METALS, *COLOURS, *HOUSES]
TOKENIZERS = ["words", "toy", "qwen3", "qwen3_5", "smollm2_tokenizer"]
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS, indirect=True)
needs_simulator = pytest.mark.skipif(
    shutil.which("java") is None or importlib.util.find_spec("scienceworld") is None, reason="needs Java and scienceworld")
needs_bfcl = pytest.mark.skipif(importlib.util.find_spec("bfcl_eval") is None, reason="needs envs/bfcl-requirements.txt")


# Models and tokenizers

def tiny_qwen3(vocab, end=2, pad=0, seed=0, **more):
    """A random Qwen3 of two layers in fp32, its weights wide enough for log-probs that differ."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "initializer_range": 0.2,
                 "tie_word_embeddings": True}
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=vocab, eos_token_id=end, pad_token_id=pad, bos_token_id=None,
                                             **shape | more))
    return model.eval().requires_grad_(False)


def toy_bpe():
    """A toy BPE: "ab" is always encoded as one id, but a policy can sample "a" and "b", so decode-encode changes ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {token: i for i, token in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(letters),
                                                      "ab", "abab"])}
    bpe = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("ab", "ab")]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=CHAT_TEMPLATE, eos_token="<|im_end|>",
                                   pad_token="<|endoftext|>", additional_special_tokens=["<|im_start|>"])


def tiny_gpt2(vocab):
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocab, n_positions=1024, n_embd=64, n_layer=2, n_head=4, eos_token_id=2,
                                      initializer_range=0.3)).eval()


# Episodes

class FakeEnv(Env):
    """A toy that ignores the actions and plays its task, a script of words: "wait wait win"."""

    system_prompt = "Play."

    def __init__(self, long_text=""):
        self.long_text = long_text

    def reset(self, *, task, seed):
        if task == "bad-reset":
            raise BadInput("no such task")
        if task == "break-reset":
            raise OSError("the server is gone")
        self.script, self.turn = task.split(), 0
        return self.long_text if task.startswith("long") else f"You see a door {seed}.", {"success": False, "valid": True}

    def step(self, action):
        word, self.turn = self.script[self.turn], self.turn + 1
        if word == "break":
            raise ZeroDivisionError("the door is gone")
        if word == "bad":
            raise BadInput("start the server first")
        reward = {"win": 1.0, "nan": float("nan"), "half": 0.5}.get(word, 0.0)
        info = {"success": word == "win", "valid": word != "invalid"}
        return f"obs{self.turn} {word}", reward, word in ("win", "lose"), word == "stop", info


class FakePolicy:
    """A toy `act`: its k-th answer to an episode is the k-th of `answers` (lists of ids), the last one forever."""

    def __init__(self, *answers):
        self.answers, self.prompts, self.batches = answers, [], []

    def __call__(self, prompts):
        self.batches.append(len(prompts))
        self.prompts += prompts
        return [list(self.answers[min(len(self.prompts), len(self.answers)) - 1]) for _ in prompts]


def ended(chat, text="go"):
    return [*chat.text_ids(text), chat.tokenizer.eos_token_id]


def play(chat, act, *tasks, env=FakeEnv, envs=8, **limits):
    requests = [Request(task, group=n, seed=n) for n, task in enumerate(tasks)]
    return rollout(act, chat, [env() for _ in range(envs)], requests, **{"max_turns": 4, "max_new_tokens": 8, **limits})


def sampled(row):
    return [i for i, m in zip(row.ids, row.mask) if m]


GAME = {"stages": 6, "commands": 4, "practice": True}


class Shouting(KeyDoor):
    """Goes on whatever is said, some episodes longer than others, with answers of different lengths."""
    def step(self, action):
        self.stage = min(self.stage + 1, self.stages - 1)
        over = len(action) % 7 == 0
        return "Taken. " * (len(action) % 5) + self._view(), 0.0, over, False, self._info(valid=True)


def play_shouting(model, chat, *, envs=20, temperature=1.0, keep_cache=True, history="full"):
    requests = [Request(task, n, n) for n, task in enumerate(KeyDoor.tasks("train", **GAME)[:5]) for _ in range(4)]
    act = sampler(model, chat, temperature=temperature, max_new_tokens=8, keep_cache=keep_cache)
    torch.manual_seed(0)
    return rollout(act, chat, [Shouting(**GAME) for _ in range(envs)], requests, max_turns=6, history=history)


def drawn_requests(config, step, tasks, *groups, enriched=None):
    """What training plays in this step where it asks for so many groups at a time."""
    requests = []

    def episodes(new):
        requests.extend(new)
        return [Trajectory(r.task, r.group, r.seed, r.enriched, end="failure") for r in new]

    algorithm = Algorithm("none", None, None, (0, 0), fill=lambda sample, _: [group for n in groups for group in sample(n)])
    Step(config, algorithm, None, None, None).play(step, tasks, episodes, enriched)
    return requests


# Rows

def make_rows(vocab, lengths=(9, 14, 5, 11, 7, 12), seed=0):
    """Ragged rows: a prompt of 3, then two actions with an observation of 2 between; pad and end ids among all."""
    rng = random.Random(seed)
    rows = []
    for length in lengths:
        mask = [0] * 3 + [1] * (length - 3)
        if length > 8:
            mask[5:7] = [0, 0]
        rows.append(Row([rng.randrange(vocab) for _ in range(length)], mask))
    return rows


def batch_of(rows):
    """Trajectories as the learner sees them; a list of rows is a trajectory cut in pieces."""
    rows = [row if isinstance(row, list) else [row] for row in rows]
    return [SimpleNamespace(rows=part, length=sum(sum(row.mask) for row in part)) for part in rows]


def scores(model, temperature=1.0, seed=0, **how):
    """Log-probs [B, T] of ragged rows, with ids and mask."""
    ids, mask = pad(make_rows(model.config.vocab_size, seed=seed), 0, model.device)
    return token_logps(model, ids, mask, temperature, **how)[0], ids, mask


def random_logits(*shape, seed=0, scale=3.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def watched(model, monkeypatch):
    """From now on, record what `model.generate` returns: the scores it samples from and the raw logits."""
    seen, plain = [], model.generate

    def generate(generation_config, **inputs):
        config = copy.deepcopy(generation_config)
        config.update(output_scores=True, output_logits=True, return_dict_in_generate=True)
        out = plain(generation_config=config, **inputs)
        seen.append(out)
        return out.sequences

    monkeypatch.setattr(model, "generate", generate)
    return seen


# Runs of the programs

SMALL = ["--steps", "2", "--tasks-per-step", "3", "--group", "4", "--eval-episodes", "12", "--eval-every", "2",
         "--env-options", "stages=2", "commands=4"]
CLOCK = {"rollout_seconds", "learn_seconds", "rollout_tokens_per_second", "learn_tokens_per_second", "peak_memory_bytes"}


def metrics(folder):
    return [{key: value for key, value in row.items() if key not in CLOCK} for row in read(folder / "metrics.jsonl")]


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """The folder of a run of two steps. No test changes it."""
    import grpo
    folder = tmp_path_factory.mktemp("runs") / "run"
    grpo.main([*SMALL, "--out", str(folder)])
    return folder


def edit(op, target=None, content=None):
    """An edit of the Experience Funnel's state."""
    return {"op": op, **({"target": target} if target else {}), **({"content": content} if content else {})}


# Fixtures: models and tokenizers

@pytest.fixture(scope="session")
def words():
    """The word tokenizer of rl/tiny.py."""
    return word_tokenizer(WORDS)


@pytest.fixture(scope="session")
def word_chat(words):
    return Chat(words)


@pytest.fixture
def base(words):
    """A fresh random model over the word tokenizer; the same one each time."""
    return tiny_qwen3(len(words), words.eos_token_id, words.pad_token_id)


@pytest.fixture
def policy(base):
    """That model with a LoRA adapter whose B is not zero, so that the adapter matters."""
    model = add_lora(base, rank=4)
    shake(model)
    return model


def shake(model, adapter="default", scale=0.1, seed=0):
    """Random B matrices, as after some training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if f"lora_B.{adapter}" in name:
                p.add_(scale * torch.randn(p.shape, generator=generator))


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory):
    """The real Qwen3 and Qwen3.5 tokenizers and templates, unpacked."""
    data = Path(os.environ.get("SCAFFOLD_FUNNEL_DATA", ROOT.parent / "shared" / "data"))
    archive = data / "qwen_tokenizers.tar.xz"
    if not archive.exists():
        pytest.skip("no qwen_tokenizers.tar.xz in ../shared/data or $SCAFFOLD_FUNNEL_DATA")
    folder = tmp_path_factory.mktemp("qwen")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="session")
def qwen3(qwen_folder):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(qwen_folder / "qwen3_tokenizer")


@pytest.fixture(scope="session")
def qwen3_5(qwen_folder):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(qwen_folder / "qwen3_5_tokenizer")


@pytest.fixture(scope="session")
def qwen3_model(qwen3):
    """A random model at Qwen3's real vocabulary, which is larger than its tokenizer."""
    return tiny_qwen3(151_936, qwen3.eos_token_id, qwen3.pad_token_id)


@pytest.fixture(scope="session")
def smollm2():
    """The folder of a real instruct model (see smollm2.py)."""
    from smollm2 import smollm2 as fetch
    try:
        return fetch()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="session")
def toy():
    return toy_bpe()


@pytest.fixture
def tokenizer(request):
    """By name, for parametrized tests."""
    return request.getfixturevalue(request.param)
