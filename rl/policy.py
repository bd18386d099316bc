"""The policy of a run: its base model with the adapter, and the Chat of its tokenizer, from the run's options."""
import copy
import json
import os
import pickle
import string
import sys
from datetime import datetime

import torch
from jinja2 import TemplateError
from safetensors import SafetensorError

from envs import BadInput, env_class, toolcalls
from rl.chat import Chat
from rl.learner import make_optimizer
from rl.model import add_lora, adapter_base, freeze_reference, load_adapter, load_model, load_reference
from rl.runs import write_config
from rl.thinking import Budget
from rl.tiny import tiny
from rl.trial import try_model
from rl.warmstart import warm_up

CANNOT_LOAD = (OSError, ValueError, ImportError, RuntimeError, SafetensorError, pickle.UnpicklingError)
# What is put before a chat template, in its own language (a line break behind a tag is no part of the text). A date that does not
# move stands in for the function that asks the clock; a system message becomes the beginning of the first user message.
TODAY = ("{% macro strftime_now(format) %}{% set text = namespace(of=format) %}{% for code, word in WORDS.items() %}"
         "{% set text.of = text.of.replace(code, word) %}{% endfor %}{{ text.of }}{% endmacro %}\n")
FOLD = ("{% if messages[0].role == 'system' %}{% set messages = [{'role': 'user', 'content': messages[0].content + '\\n\\n' + "
        "messages[1].content}] + messages[2:] %}{% endif %}\n")


def load_policy(config, options, checkpoint=None):
    """(model with its adapter, Chat). config: `rl.options.Playing`; options: of the environment. Raises BadInput with one line."""
    name, folder = config.model, checkpoint or config.adapter
    trained_on = adapter_base(folder) if folder else None
    if name == "tiny":
        name = trained_on if os.path.isdir(trained_on or "") else tiny(config.env, options, config.tasks)
    if trained_on and os.path.basename(trained_on.rstrip("/")) != os.path.basename(name.rstrip("/")):
        raise BadInput(f"the adapter in {folder} was trained on {trained_on}, not on {name}: pass that as --model")
    try:
        base, tokenizer = load_model(name, config.bits)
        model = load_adapter(base, folder) if folder else add_lora(base, getattr(config, "lora_rank", 16), seed=config.seed)
        if checkpoint:
            load_reference(model, checkpoint)
        chat = tried_chat(model, tokenizer, config.thinking, config.max_context, config.started)
    except CANNOT_LOAD as error:
        raise BadInput(f"cannot load the model {config.model!r}: {str(error).strip().splitlines()[0]}") from error
    env_class(config.env).tool_call_form = tool_call_form(tokenizer)
    if config.thinking_budget:
        Budget(chat, config.thinking_budget, config.max_new_tokens)  # raises BadInput where it cannot work
    if getattr(config, "gradient_checkpointing", False):
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, chat


def load_frozen(name, bits, thinking, max_context, started=""):
    """(model without an adapter, Chat): a teacher or an editor."""
    try:
        model, tokenizer = load_model(name, bits)
        return model, tried_chat(model, tokenizer, thinking, max_context, started)
    except CANNOT_LOAD as error:
        raise BadInput(f"cannot load the model {name!r}: {str(error).strip().splitlines()[0]}") from error


def tried_chat(model, tokenizer, thinking, max_context, started="") -> Chat:
    """The Chat of a model that is computed right. Raises ValueError. A cache that would change its samples is not kept, says a line."""
    chat = carrying_chat(tokenizer, thinking, model.generation_config.eos_token_id, started)
    chat.keep_cache = try_model(model, chat, max_context)
    if not chat.keep_cache:
        print("a kept cache would change this model's log-probs: every prompt is encoded anew", file=sys.stderr)
    return chat


def carrying_chat(tokenizer, thinking, end_ids, started="") -> Chat:
    """A Chat whose template can carry an episode. Raises BadInput.

    A template that has no place for a system message, or moves it to the last user message, gets it as the beginning of the first user
    message, before a blank line. One that prints today's date prints that of `started` (ISO 8601; "": now) forever, so that prompts
    change neither at midnight nor with --resume.
    """
    tokenizer = copy.copy(tokenizer)
    if "strftime_now" in str(tokenizer.chat_template):
        now = datetime.fromisoformat(started) if started else datetime.now()
        words = {code: now.strftime(code) for letter in string.ascii_letters for code in (f"%{letter}", f"%-{letter}")}
        begin_template(tokenizer, TODAY.replace("WORDS", json.dumps(words)))
    episode = [("system", "."), ("user", "."), ("assistant", "."), ("user", ".")]
    chat = Chat(tokenizer, thinking, end_ids)
    try:
        chat.prompt(episode)
    except BadInput:
        begin_template(tokenizer, FOLD)
        chat = Chat(tokenizer, thinking, end_ids)
        chat.prompt(episode)
        print("this model's chat template has no place for a system message: it begins the first user message", file=sys.stderr)
    return chat


def begin_template(tokenizer, words):
    """Put words before its chat template, or before each where it has several by name."""
    template = tokenizer.chat_template
    tokenizer.chat_template = ({name: words + text for name, text in template.items()} if isinstance(template, dict)
                               else words + template)


def tool_call_form(tokenizer) -> str | None:
    """The form in which the chat template writes a function call, found by asking it; None where it is not known (envs/toolcalls.py)."""
    function = {"name": toolcalls.PROBE.name, "arguments": toolcalls.PROBE.kwargs}
    calls = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    try:
        return toolcalls.form_of(tokenizer.apply_chat_template([{"role": "user", "content": "."}, calls], tokenize=False))
    except (TemplateError, ValueError, TypeError, KeyError):     # it has no place for calls
        return None


def first_policy(config, algorithm, options, folder, first_step, tasks, limits):
    """(model, Chat, optimizer) at the start of the run, or as the checkpoint in its folder has them."""
    fresh = first_step == 1
    model, chat = load_policy(config, options, None if fresh else str(folder / "checkpoint"))
    write_config(folder, config, algorithm.name)
    if fresh and config.warm_start:
        warm_up(config, model, chat, options, tasks, limits)
    if fresh and algorithm.use_reference and (config.warm_start or config.adapter):
        freeze_reference(model)
    optimizer = make_optimizer(model, config.lr, config.optimizer)
    if not fresh:
        optimizer.load_state_dict(torch.load(folder / "checkpoint" / "optimizer.pt", weights_only=True,
                                             map_location="cpu"))  # where AdamW keeps its count of steps
        for group in optimizer.param_groups:  # the saved state holds the old one
            group["lr"] = config.lr
    return model, chat, optimizer
