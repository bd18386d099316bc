"""The options of distill.py, beside those of every training run."""
import math
from dataclasses import dataclass

from envs import BadInput
from rl.options import Learning, option

CHOICES = {"mode": ("full", "state-only", "policy-only"), "select": ("both", "new", "persistent", "all", "random"),
           "token_weights": ("jsd", "uniform"), "label": ("gain", "success"), "rl_loss": ("grpo", "dapo", "gspo"),
           "state_place": ("", "prompt", "observation"), "policy_gate": ("keep", "rise"), "editor": ("", "count", "model"),
           "teacher_bits": (0, 4, 16, 32), "gate_metric": ("success", "reward"), "on_policy": ("", "round", "step")}


@dataclass
class FunnelOptions(Learning):
    # The loop
    mode: str = option("full", "full; state-only: never train; policy-only: no state, the RL term alone")
    rounds: int = option(4, "rounds of state and policy")
    steps: int = option(20, "batches per round of training; a batch takes --minibatches optimizer steps")
    # Phase I
    state: str = option("", "a file to start the state from (nothing: an empty state)")
    state_place: str = option("", "prompt: after the system prompt; observation, ours: an entry is quoted under the "
                                  "observation that it is about (default: prompt, with tiny: observation)")
    state_limit: int = option(16_000, "characters of a state at most; an edit that goes over it is refused")
    reflection_batch: int = option(64, "training tasks played for reflection in a round")
    editor: str = option("", "model: a language model; count: counts commands of the built-in game, and the default there")
    editor_model: str = option("", "the model of --editor model (default: the policy's base model)")
    editor_tokens: int = option(2048, "tokens of an answer of the editor at most: an analysis, then edits")
    editor_characters: int = option(15_000, "characters of an episode that the editor is shown; the middle of a longer one is left out")
    lite: bool = option(False, "SkillOpt-Lite: no edit budget, no merge, no ranking, rejected edits are not shown")
    edits_first: int = option(4, "edits in the first round at most")
    edits_last: int = option(2, "edits in the last round at most (in between the number falls along half a cosine)")
    gate_metric: str = option("success", "what both gates and the retirement compare on validation tasks: success, or reward, the "
                                         "mean return (for graded rewards)")
    # Phase II
    instances: int = option(128, "training tasks played without a state, with S_k and with S_k+1 in a round")
    outcomes_per_condition: int = option(1, "episodes per task and condition, whose mean return is R")
    label: str = option("gain", "gain: b = 1[R > R without a state] (Eq. 3); success: b = 1[most episodes succeed]")
    select: str = option("both", "both (01 and 11), new (01), persistent (11), all; ours: random, as many tasks as both, chosen at "
                                 "random")
    alpha: float = option(1.0, "weight of persistently useful instances (Eq. 4)")
    token_weights: str = option("jsd", "jsd (Eqs. 6 and 7) or uniform")
    on_policy: str = option("", "round: distill on fresh state-free episodes of pi_k, drawn once a round, instead of those played with "
                                "S_k+1; step: on those of the student itself, drawn at each batch, which serve the RL term too")
    teacher: str = option("self", "self (Eq. 5; the paper's Table 4 most likely has it at 57.57, below its base's 58.14), base (the base "
                                  "model without the adapter), none (the RL term alone), or a model on the hub or a folder")
    teacher_state: bool = option(True, "the teacher sees S_k+1; the other form of the option takes that away")
    teacher_bits: int = option(0, "weights of another teacher or editor: 4, 16, 32 (0: as --bits)")
    top_k: int = option(0, "store K tokens, the policy's and teacher's likeliest, and one bucket of others (0: all)")
    distill_weight: float = option(1.0, "lambda of Eq. 9")
    distill_batch: int = option(32, "trajectories distilled per optimizer step")
    rl_loss: str = option("grpo", "the RL term: grpo, dapo or gspo")
    rl_weight: float = option(1.0, "weight of the RL term (0: distillation alone)")
    policy_gate: str = option("keep", "commit if the state-free --gate-metric on validation tasks does not fall (keep), or rises (rise)")
    retire: bool = option(True, "after a committed policy, entries without which it loses nothing on validation tasks leave the state; "
                                "the other form of the option keeps them until the end")
    tasks_per_step: int = option(8, "groups per step, one task each")


def with_defaults(config):
    """Fill in what depends on other options, and refuse what cannot work, before anything is loaded or written."""
    for name, allowed in CHOICES.items():
        if getattr(config, name) not in allowed:
            raise BadInput(f"--{name.replace('_', '-')} must be {', '.join(filter(None, map(str, allowed)))} in distill.py, got "
                           f"{getattr(config, name)}")
    for name in ("rounds", "outcomes_per_condition", "reflection_batch", "instances", "distill_batch", "state_limit",
                 "editor_tokens", "editor_characters", "edits_first", "edits_last"):
        if getattr(config, name) < 1:
            raise BadInput(f"--{name.replace('_', '-')} must be at least 1, got {getattr(config, name)}")
    for name in ("alpha", "distill_weight", "rl_weight", "top_k"):
        if not 0 <= getattr(config, name) < math.inf:
            raise BadInput(f"--{name.replace('_', '-')} must be 0 or above, got {getattr(config, name)}")
    if not config.rl_weight and (config.mode == "policy-only" or config.teacher == "none"):
        raise BadInput("nothing would be trained: --rl-weight 0 leaves the distillation alone, and there is none")
    if config.env == "keydoor" and not config.env_options:
        config.env_options = ["colours=4"]  # a rule worth writing down: plain RL learns it badly
    config.editor = config.editor or ("count" if config.env == "keydoor" else "model")
    if config.editor == "count" and config.env != "keydoor" and config.mode != "policy-only":
        raise BadInput(f"--editor count can only count commands of the built-in game, keydoor, not of {config.env}: pass --editor model")
    config.state_place = config.state_place or ("observation" if config.model == "tiny" else "prompt")
    config.out = config.out or f"runs/{config.env}__distill__{config.mode}__{config.seed}"
    return config
