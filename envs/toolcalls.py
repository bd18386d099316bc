"""Function calls in a model's text: read, never executed, and written in the form of a chat template.

    calls = parse_tool_calls(text, schemas)             # <tool_call> blocks, JSON or XML inside
    calls = parse_calls('[cd(folder="a"), ls()]')       # Python calls as text

Two forms of <tool_call> are known, and a block may have either:
  json  {"name": "cd", "arguments": {"folder": "a"}}                       Hermes, Qwen2.5, Qwen3
  xml   <function=cd> <parameter=folder> a </parameter> </function>        Qwen3-Coder, Qwen3.5; each value on lines of its own
The values of the second are typed by the function's JSON schema, as Qwen's own parser (qwen3coder_tool_parser.py) does it:
null is None; what the schema calls a string, and what it does not name, is left as it stands; the rest is read as JSON, else
as a Python literal, else it is a string. Unlike there, 5.0 stays 5.0, and a block that is not closed is invalid.
"""
import ast
import json
import re
import warnings
from collections import namedtuple

Call = namedtuple("Call", "name args kwargs")     # positional arguments as a tuple, the others as a dict
FORMS = ("json", "xml")
PROBE = Call("a_function", (), {"a_parameter": "a value"})      # what a template is asked to write


class InvalidAction(Exception):
    """The model tried to call a function, but what it wrote is no call."""


def write_tool_call(name: str, arguments: dict, form: str) -> str:
    """One call as a chat template of this form writes it in a past answer."""
    if form == "json":
        return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"
    texts = {key: json.dumps(value) if isinstance(value, (dict, list, tuple)) else str(value) for key, value in arguments.items()}
    lines = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


def form_of(rendered: str) -> str | None:
    """The form in which a chat template has written PROBE; None: one that is not known here."""
    return next((form for form in FORMS if write_tool_call(PROBE.name, PROBE.kwargs, form) in rendered), None)


def parse_tool_calls(text: str, schemas: dict | None = None) -> list[Call]:
    """The calls in all `<tool_call>...</tool_call>` of the text; [] means: no call. Raises InvalidAction.
    schemas: function name -> its JSON schema's "properties", for the values in XML."""
    blocks = re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)
    if len(blocks) != text.count("<tool_call>"):
        raise InvalidAction("a <tool_call> is not closed")
    return [_xml_call(block.strip(), schemas or {}) if block.lstrip().startswith("<function=") else _json_call(block)
            for block in blocks]


def _json_call(block: str) -> Call:
    try:
        call = json.loads(block)
        arguments = call["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        return Call(call["name"] + "", (), {**arguments})
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidAction('a tool call must be {"name": "...", "arguments": {...}}') from error


def _xml_call(block: str, schemas: dict) -> Call:
    function = re.fullmatch(r"<function=([^<>\n]+)>(.*)</function>", block, re.DOTALL)
    *pieces, rest = re.split(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", function[2] if function else "?", flags=re.DOTALL)
    names = pieces[1::3]
    if "".join(pieces[::3] + [rest]).strip() or len(set(names)) < len(names):
        raise InvalidAction("a tool call must be <function=NAME>, then <parameter=NAME>VALUE</parameter> once for each, then </function>")
    schema = schemas.get(function[1], {})
    return Call(function[1], (), {name: _typed(value, schema.get(name, {}).get("type", "string"))
                                  for name, value in zip(names, pieces[2::3])})


def _typed(value: str, kind: str):
    if value.lower() == "null":
        return None
    if kind != "string":     # Python's warnings about the model's text are not for the terminal
        for read in (json.loads, ast.literal_eval):
            try:
                with warnings.catch_warnings(action="ignore"):
                    return read(value.lower() if kind == "boolean" else value)
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                pass
    return value


def parse_calls(text: str) -> list[Call]:
    """`[f(a=1), g("x")]` as calls; a missing outer bracket is forgiven. As the benchmark's own decoder takes them, a bare name as
    an argument is a string, and `Thing.f()` is a call of the function "Thing.f". [] means: no call, the turn is over.
    Raises InvalidAction for what starts like a call and is none."""
    text = text.strip("` \t\r\n")
    looks_like_calls = re.match(r"\[|[^\W\d][\w.]*\(", text)
    text = ("" if text.startswith("[") else "[") + text + ("" if text.endswith("]") else "]")
    try:
        with warnings.catch_warnings(action="ignore"):
            nodes = ast.parse(text, mode="eval").body
        if not isinstance(nodes, ast.List):
            raise InvalidAction("expected one list of calls")
        return [_literal_call(node) for node in nodes.elts]
    except (InvalidAction, SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        if not looks_like_calls:
            return []
        reason = error if isinstance(error, InvalidAction) else "it does not parse, or an argument is no literal value"
        raise InvalidAction(reason) from error


class _BareNames(ast.NodeTransformer):
    def visit_Name(self, node):
        return ast.Constant(node.id)


def _literal_call(node: ast.AST) -> Call:
    parts, function = [], getattr(node, "func", None)
    while isinstance(function, ast.Attribute):
        parts, function = [function.attr, *parts], function.value
    if not isinstance(node, ast.Call) or not isinstance(function, ast.Name):
        raise InvalidAction("every item of the list must be a call of a function by its name")
    name, keys = ".".join([function.id, *parts]), [keyword.arg for keyword in node.keywords]
    if None in keys or len(set(keys)) < len(keys):
        raise InvalidAction(f"an argument of {name} is given twice, or with stars")
    literal = lambda value: ast.literal_eval(_BareNames().visit(value))
    return Call(name, tuple(map(literal, node.args)), {keyword.arg: literal(keyword.value) for keyword in node.keywords})
