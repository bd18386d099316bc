"""Episodes of a policy in text environments: one batch of prompts a turn, for the episodes that go on.

    act = sampler(model, chat, temperature=1.0, max_new_tokens=32)
    trajectories = rollout(act, chat, envs, [Request(task, group=0, seed=0), ...], max_turns=15)

What is trained on is what was sampled: a trajectory keeps the sampled ids and a mask made while sampling. Nothing is
decoded and encoded again, and no mask is guessed from ids. A row is one unbroken token sequence. If the next prompt
extends the tokens so far, the row goes on; if not (a windowed history, a template that strips earlier thinking), a
new row starts. Text from the environment is encoded so that it can never produce a special token.
"""
import contextlib
import json
import math
import re
import signal
import sys
import threading
from collections import deque
from dataclasses import dataclass, field, replace
from functools import lru_cache

from envs import BadInput, plain

ENDS = ("success", "failure", "turn_limit", "context_full", "env_error")
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "</s>")


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


@dataclass
class Row:
    ids: list[int]
    mask: list[int]  # 1 where the policy sampled the token
    old_logp: list[float] | None = None  # only where the policy sampled in another context than `ids`
    sampled_logp: list[float] = field(default_factory=list, compare=False)  # by the sampler, 0 where the mask is 0; empty: not known


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
    end: str = ""  # one of ENDS
    info: dict = field(default_factory=dict)  # the environment's last info
    error: str = ""

    @property
    def length(self) -> int:
        """Tokens the policy sampled in the whole episode, |o_i|."""
        return sum(sum(row.mask) for row in self.rows)


class Chat:
    """Prompts as token ids through a tokenizer's chat template, with contents that cannot forge a turn.

    The template is rendered around placeholders. Only its own text is encoded with special tokens; a content is text
    from outside, encoded without, or a list of ids that the policy sampled, put in as it is.
    """

    def __init__(self, tokenizer, thinking: bool = False, end_ids=None):
        self.tokenizer, self.thinking = tokenizer, thinking
        unknown = tokenizer("\ue000", add_special_tokens=False)["input_ids"]  # a word tokenizer's <unk> may appear
        self.added = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()
                      if len(token.content) > 1 and i not in unknown}
        self.special_ids = frozenset(self.added.values())
        self.special = re.compile("|".join(map(re.escape, self.added)) or "(?!)")
        ends = [end_ids] if isinstance(end_ids, int) else list(end_ids or [])
        ends += [self.added[token] for token in END_TOKENS if token in self.added]
        self.end_ids = frozenset(i for i in [*ends, tokenizer.eos_token_id] if i is not None)
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(self.end_ids)
        self.think_end = self.added.get("</think>")
        seen = self._render((("user", "\ue000"), ("assistant", "\ue001</think>\ue002"), ("user", "\ue003")))
        self.strips_thinking = self.think_end is not None and "\ue001" not in seen
        self.text_ids = lru_cache(maxsize=4096)(self._text_ids)
        self.template_ids = lru_cache(maxsize=4096)(
            lambda text: tuple(tokenizer(text, add_special_tokens=False)["input_ids"]))

    def _render(self, messages, tools=None):
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                [{"role": role, "content": content} for role, content in messages], tools=tools, tokenize=False,
                add_generation_prompt=True, enable_thinking=self.thinking)
        except TemplateError as error:
            raise BadInput(f"this model's chat template refuses the conversation: {error}") from error

    def _text_ids(self, text: str) -> tuple[int, ...]:
        """Outside text -> ids, none of them an added token: such a token's text is cut after its first character. Halves of
        surrogate pairs, which no tokenizer takes, become "?"."""
        text = text.encode("utf-8", "replace").decode("utf-8")
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if self.special_ids.isdisjoint(ids):
            return tuple(ids)
        found = re.split("|".join(f"(?<={re.escape(token[0])})(?={re.escape(token[1:])})" for token in self.added), text)
        ids = [i for piece in found for i in self.tokenizer(piece, add_special_tokens=False)["input_ids"]]
        if self.special_ids.isdisjoint(ids):
            return tuple(ids)  # else a normaliser made one out of other characters: encode each by itself
        ids = [i for character in text for i in self.tokenizer(character, add_special_tokens=False)["input_ids"]]
        return tuple(i for i in ids if i not in self.special_ids)

    def history_ids(self, action_ids) -> tuple[int, ...]:
        """What stays of a sampled action in later prompts: no end token, and no thinking if the template strips it."""
        ids = list(action_ids)
        if ids and ids[-1] in self.end_ids:
            ids.pop()
        if self.strips_thinking and self.think_end in ids:
            ids = ids[len(ids) - ids[::-1].index(self.think_end):]
            while ids and not self.tokenizer.decode(ids[:1]).strip():
                ids.pop(0)
        return tuple(ids)

    def prompt(self, messages, tools=None) -> list[int]:
        """[(role, text or sampled ids), ...] -> ids up to where the next action starts. `tools`, the schemas of an
        environment's functions, become part of the template's own text, so no special token may stand in them."""
        placeholders = [(role, f"\ue000{n}\ue001") for n, (role, _) in enumerate(messages)]
        rendered = self._render(placeholders, tools)
        if tools and rendered == self._render(placeholders):
            raise BadInput("this model's chat template has no place for tools: let the environment's prompt list them")
        if tools and any(token in json.dumps(tools, ensure_ascii=False) for token in self.added):
            raise BadInput("a special token of this model stands in the environment's tools")
        pieces = re.split("\ue000(\\d+)\ue001", rendered)
        if [int(n) for n in pieces[1::2]] != list(range(len(messages))):
            raise BadInput("this model's chat template drops or reorders messages; it cannot carry an episode")
        ids = list(self.template_ids(pieces[0]))
        for (_, content), scaffold in zip(messages, pieces[2::2]):
            if isinstance(content, str):  # with the template's words after it, up to its next special token
                words = self.special.split(scaffold, maxsplit=1)[0]
                ids += self.text_ids(content.strip() + words)
                scaffold = scaffold[len(words):]
            else:
                ids += content
            ids += self.template_ids(scaffold)
        return ids

    def action_text(self, action_ids) -> str:
        return self.tokenizer.decode([i for i in action_ids if i not in self.end_ids])


def messages_of(trajectory, chat, history):
    """The conversation that the next prompt is made of."""
    turns = trajectory.turns
    messages = [("system", trajectory.system_prompt)] if trajectory.system_prompt else []
    if history == "full":
        messages.append(("user", trajectory.first_observation))
        for turn in turns:
            messages += [("assistant", chat.history_ids(turn.action_ids)), *answers_of(turn)]
        return messages
    window = int(history.partition(":")[2])
    text = [trajectory.first_observation]
    for number, turn in enumerate(turns, 1):
        text.append(f"Action {number}: {turn.action.rpartition('</think>')[2].strip()}")
        if number > len(turns) - window:
            text.append(turn.observation)
    return [*messages, ("user", "\n".join(text))]


def answers_of(turn):
    """The observation as messages: the user's, or of role "tool", one a result; a hint stands at the end of the last."""
    if not turn.tool_results:
        return [("user", turn.observation)]
    *others, last = turn.tool_results
    return [*(("tool", result) for result in others),
            ("tool", last + turn.observation.removeprefix("\n".join(turn.tool_results)))]


def add_turn(rows: list[Row], prompt_ids: list[int], action_ids: list[int]):
    """Extend the last row if the prompt begins with it, token by token; else start a row."""
    if not rows or prompt_ids[:len(rows[-1].ids)] != rows[-1].ids:
        rows.append(Row([], []))
    new = prompt_ids[len(rows[-1].ids):]
    rows[-1].ids += new + action_ids
    rows[-1].mask += [0] * len(new) + [1] * len(action_ids)
    rows[-1].sampled_logp += [0.0] * len(new) + (getattr(action_ids, "logps", None) or [])


def without_hints(trajectory) -> Trajectory:
    """The trajectory as if no observation had carried a hint."""
    def cut(text, hint):
        return text.removesuffix(f"\n{hint}") if hint else text

    hints = [turn.hint for turn in trajectory.turns]  # of the observation that a turn answers
    turns = [replace(turn, observation=cut(turn.observation, following), hint=None)
             for turn, following in zip(trajectory.turns, [*hints[1:], None])]  # no prompt holds the last observation
    return replace(trajectory, first_observation=cut(trajectory.first_observation, hints[0] if hints else None), turns=turns)


def rows_of(trajectory, chat, history) -> list[Row]:
    """The rows that a rollout records which shows these observations and samples these ids."""
    rows = []
    for number, turn in enumerate(trajectory.turns):
        so_far = replace(trajectory, turns=trajectory.turns[:number])
        add_turn(rows, chat.prompt(messages_of(so_far, chat, history), so_far.tools), list(turn.action_ids))
    return rows


def rollout(act, chat: Chat, envs: list, requests: list[Request], *, max_turns: int, max_new_tokens: int = 32,
            max_context: int = 2048, history: str = "full", step_timeout: float = 0.0) -> list[Trajectory]:
    """Play every request, at most len(envs) at a time; results in the order of the requests.

    act: `act(prompts) -> sampled ids` for a batch of prompts (see sampling.py); `act([])` says that no episode goes on.
    max_turns: actions per episode.
    max_context: tokens of prompt and action together. history: "full" keeps the conversation, "window:2" rebuilds each
    prompt from the first observation, all past actions and the last 2 observations. An exception inside an environment,
    or an answer that is not of the contract's types, ends that episode alone: end "env_error", reward NaN. So does a
    reset or step that takes longer than `step_timeout` seconds (0: no limit; in the main thread only).
    """
    if history != "full" and not re.fullmatch(r"window:[1-9]\d*", history):
        raise BadInput(f"history must be full or window:N, got {history!r}")
    if not envs:
        raise ValueError("rollout needs at least one environment")
    results = [Trajectory(r.task, r.group, r.seed, r.enriched) for r in requests]
    pending, active, idle, aside = deque(zip(requests, results)), [], list(envs), []
    while pending or active:
        if not idle and not active:
            idle, aside = aside, []
        while pending and idle:
            env, (request, trajectory) = idle.pop(), pending.popleft()
            how = {"enriched": True} if request.enriched else {}  # an environment without hints never sees the word
            answer = guarded(trajectory, lambda: env.reset(task=request.task, seed=request.seed, **how), (str, dict),
                             step_timeout)
            if answer is None:  # used again only when no other is left: a dead one would break every waiting episode
                aside.append(env)
                continue
            trajectory.first_observation, trajectory.info = answer
            trajectory.system_prompt, trajectory.tools = env.system_prompt, env.tools
            active.append((env, trajectory))
        prompts = [chat.prompt(messages_of(t, chat, history), t.tools) for _, t in active]
        for (env, trajectory), prompt in zip(active, prompts):
            if len(prompt) + max_new_tokens > max_context:
                trajectory.end, trajectory.error = "context_full", f"a prompt of {len(prompt)} tokens"
        prompts = [prompt for (_, t), prompt in zip(active, prompts) if not t.end]
        playing = [(env, t) for env, t in active if not t.end]
        idle += [env for env, t in active if t.end]
        for (env, trajectory), prompt, action_ids in zip(playing, prompts, act(prompts)):
            play_turn(env, trajectory, chat, prompt, action_ids, max_turns, step_timeout)
        idle += [env for env, t in playing if t.end]
        active = [(env, t) for env, t in playing if not t.end]
    act([])
    return results


def refuse_if_nothing_fits(played, max_context):
    """At the start of a run: a context too short for every first prompt is the caller's mistake."""
    if played and all(t.end == "context_full" and not t.turns for t in played):
        raise BadInput(f"no first prompt fits: {played[0].error} and the new ones are more than the context of "
                       f"{max_context}; raise --max-context or lower --max-new-tokens")


def play_turn(env, trajectory, chat, prompt, action_ids, max_turns, step_timeout):
    action = chat.action_text(action_ids)
    answer = guarded(trajectory, lambda: env.step(action), (str, float, bool, bool, dict), step_timeout)
    observation, reward, terminated, truncated, info = answer or ("", math.nan, False, False, {})
    trajectory.turns.append(Turn(prompt, action_ids, action, observation, reward, bool(info.get("valid", False)),
                                 "end" if action_ids and action_ids[-1] in chat.end_ids else "length",
                                 trajectory.info.get("hint"), info.get("tool_results")))
    add_turn(trajectory.rows, prompt, action_ids)
    trajectory.reward += reward
    trajectory.info = info or trajectory.info
    trajectory.success = bool(info.get("success", False))
    if answer is None:
        return
    if terminated:
        trajectory.end = "success" if trajectory.success else "failure"
    elif truncated or len(trajectory.turns) >= max_turns:
        trajectory.end = "turn_limit"


class TookTooLong(BaseException):
    """Not an Exception, so that an environment that catches everything does not catch this."""


@contextlib.contextmanager
def time_limit(seconds):
    """Raise TookTooLong in the block after so many seconds, whatever it waits for in Python or in a system call."""
    def late(*_):
        raise TookTooLong

    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # and again each second, if it is swallowed
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def guarded(trajectory, call, types, seconds=0.0):
    """The environment's answer as these types, or None if it broke: then the episode has ended, and a line says why."""
    try:
        with time_limit(seconds):
            answer = call()
        if len(answer) != len(types) or not isinstance(answer[0], str):
            raise TypeError(f"expected {len(types)} values, text first, got {type(answer[0]).__name__} of {len(answer)}")
        return tuple(kind(value) for kind, value in zip(types, answer))
    except BadInput:
        raise
    except (Exception, TookTooLong) as error:  # anything: a broken environment must not end a run of days
        why = f"no answer in {seconds:g} s" if isinstance(error, TookTooLong) else f"{type(error).__name__}: {error}"
        trajectory.end, trajectory.reward, trajectory.error = "env_error", math.nan, why
        print(plain(f"{trajectory.task}: the environment broke, its episode ends here: {why[:500]}"), file=sys.stderr)
        return None
