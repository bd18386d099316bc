"""Prompts as token ids, through a tokenizer's chat template, which text from outside cannot forge.

    chat = Chat(tokenizer)
    chat.prompt([("system", "Play."), ("user", "You see a door."), ("assistant", sampled_ids), ("user", "It opens.")])

A content is ids that the policy sampled, put in as they are, or text from outside: stripped, escaped where the template quotes it as
JSON, and encoded with the template's own, so that the ids are the template's; apart, where a special token would come out of it.
"""
import json
import re
from functools import lru_cache

from jinja2 import TemplateError

from envs import BadInput, after_thinking

END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "</s>")


class Chat:
    def __init__(self, tokenizer, thinking: bool = False, end_ids=None, keep_cache: bool = True):
        self.tokenizer, self.thinking, self.keep_cache = tokenizer, thinking, keep_cache  # keep_cache: what trial.py says of its model
        unknown = tokenizer("\ue000", add_special_tokens=False)["input_ids"]  # a word tokenizer's <unk> may appear
        self.added = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()
                      if len(token.content) > 1 and i not in unknown}
        self.special_ids = frozenset(self.added.values())
        self.special = re.compile("|".join(map(re.escape, self.added)) or "(?!)")
        ends = [end_ids] if isinstance(end_ids, int) else end_ids or []
        self.end_ids = frozenset({*ends, tokenizer.eos_token_id, *(self.added.get(token) for token in END_TOKENS)} - {None})
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(self.end_ids)
        self.think_begin, self.think_end = self.added.get("<think>"), self.added.get("</think>")
        seen = self.render((("user", "\ue000"), ("assistant", "\ue001</think>\ue002"), ("user", "\ue003")))
        self.strips_thinking, self.no_space = self.think_end is not None and "\ue001" not in seen, not seen.endswith(" ")
        self.opened = "<think>" if after_thinking(seen.rpartition("\ue003")[2]) is None else ""  # by the template, before an answer
        self.text_ids, self.template_ids, self.specials = (
            lru_cache(maxsize=4096)(work) for work in (self._text_ids, self._template_ids, lambda text: [
                i for i in self.tokenizer(text, add_special_tokens=False)["input_ids"] if i in self.special_ids]))

    def render(self, messages, tools=None):
        try:
            return self.tokenizer.apply_chat_template(
                [{"role": role, "content": content} for role, content in messages], tools=tools, tokenize=False,
                add_generation_prompt=True, enable_thinking=self.thinking)
        except (TemplateError, TypeError) as error:
            roles = ", ".join(role for role, _ in messages)
            raise BadInput(f"this model's chat template refuses a conversation of {roles}: {error}") from error

    def _text_ids(self, text: str) -> tuple[int, ...]:
        """Outside text -> ids, none of them an added token: such a token's text is cut after its first character."""
        text = text.encode("utf-8", "replace").decode("utf-8")
        cut = "|".join(f"(?<={re.escape(token[0])})(?={re.escape(token[1:])})" for token in self.added)
        for cut in ("(?!)", cut, "(?s:(?<=.)(?=.))"):  # nowhere; so; everywhere, as a normaliser made one out of other characters
            ids = [i for piece in re.split(cut, text) for i in self.tokenizer(piece, add_special_tokens=False)["input_ids"]]
            if self.special_ids.isdisjoint(ids):
                break
        return tuple(i for i in ids if i not in self.special_ids)

    def history_ids(self, action_ids) -> tuple[int, ...]:
        """What stays of a sampled action in later prompts: no end token, and no thinking, ended or not, if the template strips it."""
        ids = list(action_ids)
        if ids and ids[-1] in self.end_ids:
            ids.pop()
        if self.strips_thinking:
            begin = len(ids) - ids[::-1].index(self.think_end) if self.think_end in ids else len(ids) * bool(self.opened)
            ids = ids[begin:ids.index(self.think_begin, begin) if self.think_begin in ids[begin:] else None]
            while begin and ids and not self.tokenizer.decode(ids[:1]).strip():
                ids.pop(0)
        return tuple(ids)

    def prompt(self, messages, tools=None) -> list[int]:
        """[(role, text or sampled ids), ...] -> ids up to where the next action starts. `tools`, the schemas of an
        environment's functions, become part of the template's own text, so no special token may stand in them."""
        placeholders = [(role, f'\ue000{n}a"\n\ue001') for n, (role, _) in enumerate(messages)]
        rendered = self.render(placeholders, tools)
        if tools and rendered == self.render(placeholders):
            raise BadInput("this model's chat template has no place for tools: let the environment's prompt list them")
        if tools and any(token in json.dumps(tools, ensure_ascii=False) for token in self.added):
            raise BadInput("a special token of this model stands in the environment's tools")
        if tools and len(messages) < 3:  # said in an episode's first prompt, not when it has the first results
            self.prompt([(role, ".") for role in ("user", "assistant", "tool", "tool")])
        pieces = re.split('\ue000(\\d+)a(?:"\n|(\\\\"\\\\n))\ue001', rendered)  # as they are, or quoted as JSON
        quoted = any(role == "assistant" and quotes for (role, _), quotes in zip(messages, pieces[2::3]))
        if quoted or [int(n) for n in pieces[1::3]] != list(range(len(messages))):
            raise BadInput("this model's chat template drops, reorders or rewrites messages; it cannot carry an episode")
        ids, text, sampled = [], pieces[0], False  # text: still to be encoded, as one piece; sampled: it comes after sampled ids
        for (_, content), quoted, scaffold in zip(messages, pieces[2::3], pieces[3::3]):
            if not isinstance(content, str):
                text = text.rstrip(" ") if self.no_space else text  # a space before an answer was sampled with it
                ids, text, sampled = [*ids, *self.template_ids(text, sampled), *content], scaffold, True
                continue
            content = content.encode("utf-8", "replace").decode("utf-8").strip()  # halves of surrogate pairs become "?"
            content = json.dumps(content, ensure_ascii=False)[1:-1] if quoted else content
            if self.specials(content + scaffold) == self.specials(scaffold):
                text += content + scaffold
                continue
            words = self.special.split(scaffold, maxsplit=1)[0]  # a content that could forge a turn is encoded apart
            ids = [*ids, *self.template_ids(text, sampled), *self.text_ids(content + words)]
            text, sampled = scaffold[len(words):], False
        return [*ids, *self.template_ids(text, sampled)]

    def _template_ids(self, text: str, sampled: bool = False) -> tuple[int, ...]:
        """Text whose special tokens are the template's -> ids. Behind sampled ids it goes on: no tokenizer's own space begins it."""
        if not sampled or not text or self.special.match(text):
            return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return self._template_ids("a" + text)[len(self._template_ids("a")):]

    def action_text(self, action_ids) -> str:
        """What the policy wrote, with the <think> that the template has opened for it."""
        return self.opened + self.tokenizer.decode([i for i in action_ids if i not in self.end_ids])
