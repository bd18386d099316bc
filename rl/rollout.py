"""Episodes of a policy in text environments: in each turn one batch of prompts, those of the unfinished episodes.

    act = sampler(model, chat, temperature=1.0, max_new_tokens=32)
    trajectories = rollout(act, chat, envs, [Request(task, group=0, seed=0), ...], max_turns=15)

What is trained on is what was sampled: a trajectory keeps the sampled ids and a mask made while sampling. Nothing is
decoded and encoded again, and no mask is guessed from ids. A row is one unbroken token sequence. If the next prompt
extends the tokens so far, the row goes on; if not (a windowed history, a template that strips earlier thinking), a
new row starts.
"""
import math
import re
import sys
from collections import deque
from dataclasses import dataclass, field

from envs import BadInput, DoesNotFit, guard, plain, without_list
from rl.chat import Chat

LEFT_OUT = "(left out)"  # what a windowed history has in place of an observation
HISTORY = "full|(window|recent):[1-9][0-9]*"


@dataclass
class Request:
    """An episode to play. Requests of one group share task and seed, so that only the sampling differs."""
    task: str
    group: int = 0
    seed: int = 0
    enriched: bool = False


@dataclass
class Turn:
    prompt_ids: list[int]
    action_ids: list[int]  # as sampled, the end token included
    action: str
    observation: str  # what the environment answered
    reward: float
    valid: bool
    stop: str  # "end": an end token was sampled; "length": the token limit came first
    hint: str | None = None  # what enrichment appended to the observation that this turn answers
    tool_results: list[str] | None = None  # what the called functions returned, where the observation begins with that
    listed: str | None = None  # what the observation that this turn answers lists as possible


@dataclass
class Row:
    ids: list[int]
    mask: list[int]  # 1 where the policy sampled the token
    old_logp: list[float] | None = None  # only where the policy sampled in another context than `ids`
    sampled_logp: list[float] = field(default_factory=list, compare=False)  # by the sampler, 0 where the mask is 0, or []
    token_advantages: list[float] | None = None  # added to the trajectory's, token by token, by a loss that knows it (baselines/opid.py)


@dataclass
class Trajectory:
    task: str
    group: int
    seed: int
    enriched: bool
    system_prompt: str = ""
    tools: list[dict] | None = None
    first_observation: str = ""
    turns: list[Turn] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    reward: float = 0.0  # sum over turns; NaN if the environment broke
    success: bool = False
    end: str = ""  # success, failure, turn_limit, context_full or env_error
    info: dict = field(default_factory=dict)  # the environment's last info
    error: str = ""

    @property
    def length(self) -> int:
        """Tokens the policy sampled in the whole episode, |o_i|."""
        return sum(sum(row.mask) for row in self.rows)


# The conversation so far, as messages and as rows of tokens

def messages_of(trajectory, chat, history, keep_hints=False):
    """The conversation that the next prompt is made of. An observation is a message of the user, or one of role "tool" for each
    result; a hint stands at the end of the last. Observations that are past are plain (FEE's h_t), or with `keep_hints` as shown."""
    turns, (kind, _, size) = trajectory.turns, history.partition(":")
    window = int(size) if size else math.inf
    gone = max(len(turns) - window, 0) if kind == "recent" else 0  # turns of which no trace is left but their number
    if kind == "recent" and trajectory.tools:
        raise BadInput("--history recent:N would drop what a user asks of a model with tools: use full or window:N")
    observations = [trajectory.first_observation, *(turn.observation for turn in turns)]
    if not keep_hints:  # no turn has answered the last one
        observations[:-1] = [o.removesuffix(f"\n{turn.hint}") if turn.hint else o for o, turn in zip(observations, turns)]
    if kind == "recent":
        observations[:-1] = [without_list(o, turn.listed) for o, turn in zip(observations, turns)]
    if gone:  # the last of the turns that are gone has brought what the first action that stays answers
        observations[0] += f"\n({gone} turn{'s' * (gone > 1)} left out)\n{observations[gone]}"
    messages = [("system", trajectory.system_prompt)] if trajectory.system_prompt else []
    messages.append(("user", observations[0]))
    for number, (turn, observation) in [*enumerate(zip(turns, observations[1:]), 1)][gone:]:
        messages.append(("assistant", chat.history_ids(turn.action_ids)))
        *others, last = turn.tool_results or [""]
        last += observation.removeprefix("\n".join(turn.tool_results or []))
        role = "tool" if turn.tool_results else "user"  # with tools, what the user says is a request, and stays
        shown = number >= len(turns) - window or (role == "user" and trajectory.tools)
        messages += [(role, text if shown else LEFT_OUT) for text in (*others, last)]
    return messages


def add_turn(rows: list[Row], prompt_ids: list[int], action_ids: list[int]):
    """Extend the last row if the prompt begins with it, token by token; else start a row."""
    if not rows or prompt_ids[:len(rows[-1].ids)] != rows[-1].ids:
        rows.append(Row([], []))
    new = prompt_ids[len(rows[-1].ids):]
    rows[-1].ids += new + action_ids
    rows[-1].mask += [0] * len(new) + (getattr(action_ids, "mask", None) or [1] * len(action_ids))
    rows[-1].sampled_logp += [0.0] * len(new) + (getattr(action_ids, "logps", None) or [])


def rollout(act, chat: Chat, envs: list, requests: list[Request], *, max_turns: int, max_new_tokens: int = 32,
            max_context: int = 2048, history: str = "full", keep_hints: bool = False, step_timeout: float = 0.0) -> list[Trajectory]:
    """Play every request, at most len(envs) at a time; results in the order of the requests.

    act: `act(prompts) -> sampled ids` for a batch of prompts (see sampling.py); `act([])` says that all have ended.
    max_turns: actions per episode. max_context: tokens of prompt and action together. history: "full" keeps the conversation;
    "window:2" leaves out what was observed between the first observation and the last 2 before the current one; "recent:2" leaves
    out the actions of that time too, and the lists (`info["listed"]`) of all past observations, so that prompts stop growing.
    keep_hints: past observations keep their hints. An environment that raises, answers out of its contract's types or takes longer
    than `step_timeout` seconds (0: no limit; in the main thread only) ends its episode alone: end "env_error", reward NaN.
    """
    if not re.fullmatch(HISTORY, history):
        raise BadInput(f"history must be full, window:N or recent:N, got {history!r}")
    if not envs:
        raise ValueError("rollout needs at least one environment")
    results = [Trajectory(r.task, r.group, r.seed, r.enriched) for r in requests]
    pending, active, idle, aside = deque(zip(requests, results)), [], list(envs), []
    while pending or active:
        # Free environments take the episodes that wait; a broken one is used again only when no other is left
        if not idle and not active:
            idle, aside = aside, []
        while pending and idle:
            env, (request, trajectory) = idle.pop(), pending.popleft()
            how = {"enriched": True} if request.enriched else {}  # an environment without hints never gets this argument
            try:
                trajectory.first_observation, trajectory.info = guard.reset(env, step_timeout, task=request.task,
                                                                            seed=request.seed, **how)
            except guard.EnvironmentBroke as error:
                broken(trajectory, error)
                aside.append(env)
                continue
            trajectory.system_prompt, trajectory.tools = env.system_prompt, env.tools
            active.append((env, trajectory))
        # The next prompt of every episode; one that does not fit ends its episode
        prompts = [chat.prompt(messages_of(t, chat, history, keep_hints), t.tools) for _, t in active]
        for (env, trajectory), prompt in zip(active, prompts):
            if len(prompt) + max_new_tokens > max_context:
                trajectory.end, trajectory.error = "context_full", f"a prompt of {len(prompt)} tokens"
        prompts = [prompt for (_, t), prompt in zip(active, prompts) if not t.end]
        playing = [(env, t) for env, t in active if not t.end]
        idle += [env for env, t in active if t.end]
        # One turn of all of them
        for (env, trajectory), prompt, action_ids in zip(playing, prompts, act(prompts)):
            play_turn(env, trajectory, chat, prompt, action_ids, max_turns, step_timeout)
        idle += [env for env, t in playing if t.end and t.end != "env_error"]
        aside += [env for env, t in playing if t.end == "env_error"]
        active = [(env, t) for env, t in playing if not t.end]
    act([])
    return results


def play_turn(env, trajectory, chat, prompt, action_ids, max_turns, step_timeout):
    """One action: what the environment says of it, the turn, its tokens, and whether the episode goes on."""
    action = chat.action_text(action_ids)
    try:
        observation, reward, terminated, truncated, info = guard.step(env, step_timeout, action)
    except guard.EnvironmentBroke as error:
        observation, reward, terminated, truncated, info = "", math.nan, False, False, {}
        broken(trajectory, error)
    trajectory.turns.append(Turn(prompt, action_ids, action, observation, reward, bool(info.get("valid", False)),
                                 "end" if action_ids and action_ids[-1] in chat.end_ids else "length",
                                 trajectory.info.get("hint"), info.get("tool_results"), trajectory.info.get("listed")))
    add_turn(trajectory.rows, prompt, action_ids)
    trajectory.reward += reward
    trajectory.success = bool(info.get("success", False))
    if trajectory.end:
        return
    trajectory.info = info  # its hint is of this observation alone
    if terminated:
        trajectory.end = "success" if trajectory.success else "failure"
    elif truncated or len(trajectory.turns) >= max_turns:
        trajectory.end = "turn_limit"


def broken(trajectory, error):
    """The environment broke: this episode has ended, and a line says why."""
    trajectory.end, trajectory.reward, trajectory.error = "env_error", math.nan, str(error)
    print(plain(f"{trajectory.task}: the environment broke, its episode ends here: {trajectory.error[:500]}"), file=sys.stderr)


def refuse_if_hopeless(played, max_context, when=""):
    """A context too short for every first prompt is the caller's mistake; an environment that always breaks is to be mended."""
    if played and all(t.end == "context_full" and not t.turns for t in played):
        raise DoesNotFit(f"no first prompt fits: {played[0].error} and the new ones are more than the context of "
                         f"{max_context}; raise --max-context or lower --max-new-tokens")
    if played and all(t.end == "env_error" for t in played):
        raise BadInput(f"{when}the environment broke in every episode, last with {played[-1].error}; mend it, then --resume if a "
                       f"checkpoint was saved before")
