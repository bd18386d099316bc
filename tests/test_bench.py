"""The benchmark measures the work that it says, on both sides; no test here times anything."""
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, metrics, tiny_qwen3
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3Config

import bench
import grpo
from envs import BadInput
from rl.model import add_lora
from tools import bench_ours, bench_rehearse, bench_side

SMALL = ["--rows", "2", "--group", "2", "--episodes", "2", "--tokens", "40", "--prompt-tokens", "20", "--new-tokens", "3",
         "--observation-tokens", "12", "--pairs", "1", "--growth-turns", "5", "--growth-episodes", "1"]


@pytest.fixture
def folder(words, tmp_path):
    """A toy model on disk."""
    path = tmp_path / "model"
    tiny_qwen3(len(words), words.eos_token_id, words.pad_token_id).save_pretrained(path)
    words.save_pretrained(path)
    return str(path)


@pytest.fixture
def here(monkeypatch):
    """Measure in this process, on a small square and block and a small vocabulary of `tiny`."""
    monkeypatch.setattr(bench_ours, "SQUARE", 32)
    monkeypatch.setattr(bench_ours, "COPY_BYTES", 4096)
    monkeypatch.setattr(bench_ours, "VOCABULARY", 300)
    monkeypatch.setattr(bench, "measured", lambda args, task, side="ours", tuned=True, **more: bench_side.measure(
        SimpleNamespace(**(vars(args) | {"task": task, "side": side, "gradient": ""} | more))))


@pytest.mark.parametrize(("what", "keys"), [
    ("limit", ["learner_flops_share", "decode_bandwidth_share", "decode_batch_bound_share", "product_flops_per_second"]),
    ("growth", ["full.late_over_early", "window.late_over_early", "over_cache", "learner_peak_ratio"])])
def test_growth_and_limit_do_without_the_peer(what, keys, folder, here, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)  # an import of it fails
    file = tmp_path / "speed.json"
    bench.main([what, "--model", folder, *SMALL, "--json", str(file)])
    figures = json.loads(file.read_text())
    assert all(isinstance(figures[f"{what}.{key}"], float) for key in keys) and len(figures[f"{what}.runs"]) == 1
    assert figures["settings"]["rows"] == 2
    if what == "growth":
        assert figures["growth.full.late_prompt_tokens"] == 20 + 3 * (3 + 12)


def test_our_rollout_plays_the_lengths_it_was_asked_for(folder):
    how = SimpleNamespace(**vars(bench.parse(["rollout", "--model", folder, *SMALL, "--turns", "4"])))
    starts, played = [], []
    done = bench_ours.rollout_work(how, *bench_ours.policy(how, add_lora), "full", starts, played)()
    assert done == {"sampled": 2 * 4 * 3, "positions": 2 * (20 + 3 * (3 + 12) + 3)}
    assert len(starts) == 4 + 1 and {len(t.rows) for t in played} == {1}
    assert sorted(t.reward for t in played) == [0, 4]  # spread in the group: the learner has something to do


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_rows_hold_the_share_of_sampled_tokens(share, folder):
    how = SimpleNamespace(**vars(bench.parse(["learner", "--model", folder, *SMALL, "--sampled", str(share)])))
    for trajectory in bench_ours.make_rows(how, SimpleNamespace(config=SimpleNamespace(vocab_size=99))):
        assert len(trajectory.rows[0].ids) == 40 and trajectory.rows[0].mask[0] == 0
        assert trajectory.length == (10 if share == 0.25 else 39)


def test_the_flops_are_those_that_torch_counts(folder):
    """Torch counts attention over the whole square, which has twice the products of the causal half."""
    from torch.utils.flop_counter import FlopCounterMode

    how = SimpleNamespace(**vars(bench.parse(["learner", "--model", folder, *SMALL])))
    model, tokenizer = bench_ours.policy(how, add_lora)
    model.get_base_model().set_attn_implementation("eager")
    work = bench_ours.learner_work(how, model, tokenizer)
    with FlopCounterMode(display=False) as counter:
        work()
    needed, again = bench_ours.learner_flops(model, 2, 40, 2 * 10)
    config = model.config
    attention = 2 * 2 * 40 ** 2 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    entropy = 2 * 2 * 10 * config.vocab_size  # a metric: no part of what is needed
    assert counter.get_total_flops() == needed + again + 3 * attention + entropy


@pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="TRL is not installed (bench-requirements.txt)")
@pytest.mark.parametrize("more", [[], ["--peer-rows", "2", "--sampled", "1"], ["--checkpointing"]])
def test_both_sides_have_one_gradient(more, here, tmp_path):
    gradients = []
    for side in ("ours", "trl"):
        args = bench.parse(["learner", *SMALL, "--rows", "4", *more])
        bench.measured(args, "learner", side, gradient=str(tmp_path / side))
        gradients.append(torch.load(tmp_path / side))
    assert torch.linalg.vector_norm(gradients[0]) > 0
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6 * gradients[0].abs().max().item())


@pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="TRL is not installed (bench-requirements.txt)")
@pytest.mark.parametrize("what", ["rollout", "step"])
def test_both_sides_play_the_same_lengths(what, here):
    args = bench.parse([what, *SMALL, "--turns", "3"])
    ours, trl = (bench.measured(args, what, side) for side in ("ours", "trl"))
    assert (ours["sampled"], ours["positions"]) == (trl["sampled"], trl["positions"]) == (2 * 3 * 3, 2 * (20 + 2 * 15 + 3))


def pretend(calls, gradients=((1.0, 2.0), (1.0, 2.0)), **wrong):
    """A measured() of made-up figures: ours takes 1, 2, 6 s, TRL 2, 4, 8 s."""
    times = {"ours": iter([1, 2, 6, 3]), "trl": iter([2, 4, 8, 30])}

    def measured(args, task, side="ours", tuned=True, gradient="", **_):
        calls.append((side, tuned))
        if gradient:
            torch.save(torch.tensor(gradients[side == "trl"]), gradient)
        figures = {"seconds": next(times[side]), "cpu_seconds": 1, "peak_bytes": 10 if side == "ours" else 40, "sampled": 5}
        return figures | (wrong if side == "trl" else {})

    return measured


def test_ratios_are_medians_over_pairs_that_take_turns(monkeypatch):
    calls = []
    monkeypatch.setattr(bench, "measured", pretend(calls))
    figures = bench.compare(bench.parse(["learner", "--pairs", "3"]), "learner")
    assert figures["learner.time_ratio"] == 0.5 and figures["learner.memory_ratio"] == 0.25
    assert figures["learner.stock_time_ratio"] == 0.1 and len(figures["learner.pairs"]) == 3
    assert calls == [("ours", True), ("trl", True)] * 3 + [("ours", False), ("trl", False)]


@pytest.mark.parametrize("fault", [{"gradients": ((1.0, 2.0), (1.0, 2.1))}, {"gradients": ((1.0, 2.0), (1.0, float("nan")))},
                                   {"sampled": 6}])
def test_no_ratio_where_the_sides_differ(fault, monkeypatch):
    monkeypatch.setattr(bench, "measured", pretend([], **fault))
    with pytest.raises(RuntimeError, match="differ"):
        bench.compare(bench.parse(["learner", "--pairs", "1"]), "learner")


def test_the_measuring_process_gets_allocator_and_threads(monkeypatch):
    seen = []
    monkeypatch.setenv("MALLOC_TOP_PAD_", "1")
    monkeypatch.setattr(bench.subprocess, "run", lambda command, env, **_: seen.append(env) or SimpleNamespace(
        returncode=0, stdout='noise\n{"seconds": 1}\n', stderr=""))
    args = bench.parse(["rollout", "--threads", "3"])
    assert bench.measured(args, "rollout") == bench.measured(args, "rollout", tuned=False) == {"seconds": 1}
    assert bench.TUNED.items() <= seen[0].items() and not [key for key in seen[1] if key.startswith("MALLOC_")]
    assert [env["OMP_NUM_THREADS"] for env in seen] == ["3", "3"]


@pytest.mark.slow
def test_a_measuring_process_of_its_own(folder):
    done = bench.measured(bench.parse(["learner", "--model", folder, *SMALL]), "learner")
    assert done["seconds"] > 0 and done["peak_bytes"] > 0
    with pytest.raises(BadInput, match="rollout, ours: the measuring process ended with 2: this tokenizer makes no text"):
        bench.measured(bench.parse(["rollout", "--model", folder, *SMALL, "--prompt-tokens", "4"]), "rollout")


@pytest.mark.parametrize("version", [None, "1.17.0"])
def test_without_the_peer_a_line_says_what_to_install(version, monkeypatch):
    real = importlib.metadata.version

    def installed(name):
        if name == "trl" and version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version if name == "trl" else real(name)

    monkeypatch.setattr(bench.metadata, "version", installed)
    line = f"needs TRL 1.16, found {version or 'none'}: pip install -r bench-requirements.txt"
    for what in ("learner", "rollout", "step", "all"):
        with pytest.raises(BadInput, match=line):
            bench.main([what])


@pytest.mark.parametrize(("options", "line"), [
    (["--model", "nowhere"], "no config.json"), (["--pairs", "0"], "--pairs must be at least 1"),
    (["--rows", "3"], "whole groups of 8"), (["--sampled", "0"], "a share in 0.1..1"), (["--turns", "x"], "invalid int"),
    (["--peer-rows", "5"], "multiples of --peer-rows 5"), (["--json", "nowhere/x.json"], "choose another"),
    (["--json", __file__], "choose another")])
def test_bad_input_is_one_line(options, line):
    with pytest.raises(BadInput, match=line) as error:
        bench.main(["limit", *options])
    assert "\n" not in str(error.value)


# In full size

SHAPE = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16}
RECURRENT = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}


@pytest.mark.parametrize("config", [Qwen3Config(**SHAPE, tie_word_embeddings=True), Qwen3Config(**SHAPE, tie_word_embeddings=False),
                                    Qwen3_5TextConfig(**SHAPE, **RECURRENT, tie_word_embeddings=True)])
def test_a_random_model_is_written_in_pieces(config, words, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_rehearse, "config_of", lambda name: config)
    monkeypatch.setattr(bench_rehearse, "tokenizer_of", lambda *_: words)
    monkeypatch.setattr(bench_rehearse, "SHARD", 50_000)
    bench_rehearse.make(SimpleNamespace(model="any", folder=str(tmp_path)))
    model, found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(found.values()) and len(list(tmp_path.glob("*.safetensors"))) > 2
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert type(model) is type(made) and SHAPE.items() <= model.config.to_dict().items()
    for (name, p), (other, q) in zip(model.named_parameters(), made.named_parameters(), strict=True):
        assert name == other and (p == q).all() if "norm" in name else p.isfinite().all(), name
        if p.numel() >= 500:
            assert p.float().mean().item() == pytest.approx(q.float().mean().item(), abs=0.01), name
            assert p.float().std().item() == pytest.approx(q.float().std().item(), rel=0.2), name


def rehearsal(*options):
    args = bench.parse(["rehearse", "--model", "tiny", *options])
    return args, bench.words_for_grpo(args, str(ROOT / "tiny-keydoor"))


@pytest.mark.parametrize("options", [[], ["--checkpointing", "--episodes", "6", "--turns", "2"]])
def test_what_is_rehearsed_is_the_step_of_grpo(options, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_ours, "SQUARE", 32)
    monkeypatch.setattr(bench_ours, "COPY_BYTES", 4096)
    args, argv = rehearsal(*options)
    figures = bench_rehearse.rehearse(SimpleNamespace(argv=argv, name="tiny", filled=False))
    grpo.main([*argv, "--steps", "1", "--eval-every", "0", "--eval-episodes", "1", "--out", str(tmp_path / "run")])
    [row] = metrics(tmp_path / "run")
    same = ["learn_tokens", "sampler_gap", "sampler_gap_max", "grad_norm", "entropy_learner"]
    assert {name: figures[name] for name in same} == {name: row[name] for name in same} and row["grad_norm"] > 0
    assert len(figures["row_tokens"]) == args.episodes and figures["decode.steps"] <= args.turns * 8
    for whole, *parts in (("rollout", "prefill", "decode"), ("learn", "learn")):
        assert 0 < sum(figures[f"{part}.seconds"] for part in parts) <= figures[f"{whole}.seconds"]
    assert figures["optimizer.seconds"] > 0 and figures["learn_with_recompute.share"] >= figures["learn.share"] > 0
    assert figures["learn.peak_bytes"] >= figures["process_bytes"] > 0 and figures["plan.learn_bytes"] > 0


def test_episodes_are_filled_up_to_the_context():
    args, argv = rehearsal("--context", "300", "--preset", "24gb", "--episodes", "8", "--micro-batch-tokens", "600")
    figures = bench_rehearse.rehearse(SimpleNamespace(argv=argv, name="tiny", filled=True))
    assert len(figures["row_tokens"]) == 8 and 300 - 32 < max(figures["row_tokens"]) <= 300
    assert figures["micro_batch_tokens"] == 600


@pytest.mark.slow
def test_a_killed_run_is_resumed_to_the_same_step(tmp_path):
    file = tmp_path / "resume.json"
    bench.main(["resume", "--model", "tiny", "--json", str(file)])
    figures = json.loads(file.read_text())
    assert figures["resume.saved_step"] == 1 and len(figures["resume.rows"]) == 2
    assert figures["resume.rows"] == figures["resume.rows_again"] and figures["resume.rows"][1]["grad_norm"] > 0


@pytest.mark.parametrize("after", [{"step": 2, "loss": 0.2}, None])
def test_a_resumed_run_that_differs_is_told(after, monkeypatch):
    rows = iter([[{"step": 1}, {"step": 2, "loss": 0.1}], [{"step": 1}, *[after] * bool(after)]])

    def ran(command, **_):
        run = bench.Path(command[command.index("--out") + 1])
        (run / "checkpoint").mkdir(parents=True, exist_ok=True)
        (run / "checkpoint" / "step.json").write_text('{"step": 1}')
        return SimpleNamespace(returncode=0 if "--resume" in command else -9, stderr="")

    monkeypatch.setattr(bench.subprocess, "run", ran)
    monkeypatch.setattr(bench, "read", lambda path: next(rows))
    monkeypatch.setattr(bench, "commit", str)
    with pytest.raises(RuntimeError, match="after resuming"):
        bench.main(["resume", "--model", "tiny"])


@pytest.mark.slow
def test_the_script_for_a_gpu_runs_dry(tmp_path):
    def run(*argv):
        return subprocess.run(["bash", str(ROOT / "bench_gpu.sh"), *argv], cwd=tmp_path, capture_output=True, text=True, check=False)

    done = run("out", "--dry-run")
    parts = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert set(parts) == {"step", "preset-24", "limit", "trl"}, done.stdout
    if not importlib.util.find_spec("trl"):
        assert "needs TRL" in parts.pop("trl")["not_measured"] and done.returncode == 1
    else:
        assert done.returncode == 0
    assert not any("not_measured" in part for part in parts.values()), done.stdout
    assert max(parts["preset-24"]["rehearse.row_tokens"]) <= 80 and parts["step"]["rehearse.grad_norm"] > 0
    for again in (run("out", "--dry-run"), run()):
        assert again.returncode == 2 and again.stderr == "error: pass a new folder: bash bench_gpu.sh OUT\n"


@pytest.mark.parametrize(("options", "line"), [
    (["--model", "Qwen/Qwen9-4B"], "or one of Qwen/Qwen3-4B"), (["--model", "Qwen/Qwen3-4B", "--folder", str(ROOT)], "is not empty"),
    (["--preset", "12gb"], "24gb, 48gb, 80gb"), (["--bits", "8"], "--bits must be"), (["--context", "-1"], "--context"),
    (["--turns", "-1"], "--turns must be at least 1"), (["--episodes", "3"], "whole groups of 2")])
def test_bad_input_of_a_rehearsal_is_one_line(options, line):
    for what in ("rehearse", "resume"):
        with pytest.raises(BadInput, match=line) as error:
            bench.main([what, *options])
        assert "\n" not in str(error.value)


def test_what_a_rehearsal_lacks_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("SCAFFOLD_FUNNEL_DATA", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(BadInput, match="no tokenizer of Qwen/Qwen3-4B"):
        bench_rehearse.make(SimpleNamespace(model="Qwen/Qwen3-4B", folder=str(tmp_path)))
    monkeypatch.setattr(bench_rehearse.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10 ** 9))
    with pytest.raises(BadInput, match="takes 8.0 GB of disk"):
        bench_rehearse.make(SimpleNamespace(model="Qwen/Qwen3-4B", folder=str(tmp_path)))
    monkeypatch.setattr(bench_rehearse, "weight_bytes", lambda model, bits: (10 ** 15, 0))
    _, argv = rehearsal()
    with pytest.raises(BadInput, match="takes at least 1100000.0 GB"):
        bench_rehearse.rehearse(SimpleNamespace(argv=argv, name="tiny", filled=False))
