"""Every tool-call format beside a writer of its own: what the contract suite tries them with."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from envs.types import ToolCall, ToolSpec

Call = tuple[str, dict[str, Any]]


class Family(NamedTuple):
    """A format by name, and how a model of it writes calls.

    broken: calls that cannot be read, each of which must give one error.
    """

    format: str
    write: Callable[[Sequence[Call]], str]
    broken: tuple[str, ...]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes(calls: Sequence[Call]) -> str:
    blocks = (_json({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)


def _qwen3_coder(calls: Sequence[Call]) -> str:
    """As the family's chat template writes them: text as it is, lists and mappings as JSON, the rest as Python does."""

    def value(one: Any) -> str:
        return one if isinstance(one, str) else _json(one) if isinstance(one, list | dict) else str(one)

    def block(name: str, arguments: dict[str, Any]) -> str:
        lines = [f"<parameter={key}>\n{value(one)}\n</parameter>" for key, one in arguments.items()]
        return "\n".join(["<tool_call>", f"<function={name}>", *lines, "</function>", "</tool_call>"])

    return "\n".join(block(name, arguments) for name, arguments in calls)


def _glm(calls: Sequence[Call]) -> str:
    """As the family's chat templates write them: text as it is, the rest as JSON."""

    def block(name: str, arguments: dict[str, Any]) -> str:
        pairs = ((key, one if isinstance(one, str) else _json(one)) for key, one in arguments.items())
        lines = [f"<arg_key>{key}</arg_key>\n<arg_value>{one}</arg_value>" for key, one in pairs]
        return "\n".join([f"<tool_call>{name}", *lines, "</tool_call>"])

    return "\n".join(block(name, arguments) for name, arguments in calls)


def _gemma(calls: Sequence[Call]) -> str:
    def value(one: Any) -> str:
        if isinstance(one, str):
            return f'<|"|>{one}<|"|>'
        if isinstance(one, list):
            return f"[{','.join(map(value, one))}]"
        return fields(one) if isinstance(one, dict) else _json(one)

    def fields(one: dict[str, Any]) -> str:
        return f"{{{','.join(f'{key}:{value(item)}' for key, item in one.items())}}}"

    return "".join(f"<|tool_call>call:{name}{fields(arguments)}<tool_call|>" for name, arguments in calls)


def _harmony(calls: Sequence[Call]) -> str:
    """As the family's chat template writes them."""
    head = "<|start|>assistant to=functions."
    return "".join(
        f"{head}{name}<|channel|>commentary json<|message|>{_json(arguments)}<|call|>" for name, arguments in calls
    )


def _harmony_sampled(calls: Sequence[Call]) -> str:
    """As the models write them."""
    head = "<|start|>assistant<|channel|>commentary to=functions."
    return "".join(f"{head}{name} <|constrain|>json<|message|>{_json(arguments)}<|call|>" for name, arguments in calls)


def _llama3_json(calls: Sequence[Call]) -> str:
    return "; ".join(_json({"name": name, "parameters": arguments}) for name, arguments in calls)


def _pythonic(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    return f"[{', '.join(one(name, arguments) for name, arguments in calls)}]"


def _mistral_list(calls: Sequence[Call]) -> str:
    return "[TOOL_CALLS] " + _json([{"name": name, "arguments": arguments} for name, arguments in calls])


def _mistral_named(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def _react(calls: Sequence[Call]) -> str:
    return "\n".join(f"Action: {name}({_json(arguments)})" for name, arguments in calls)


FAMILIES = (
    Family(
        "hermes", _hermes, ('<tool_call>\n{"name": "f", "arguments": {,}}\n</tool_call>', "<tool_call></tool_call>")
    ),
    Family(
        "qwen3_coder",
        _qwen3_coder,
        (
            "<tool_call>\n<function=f>\n<parameter=x>1</parameter>\n</tool_call>",
            '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        ),
    ),
    Family(
        "glm",
        _glm,
        (
            "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1\n</tool_call>",
            "<tool_call>f\n<arg_value>1</arg_value>\n</tool_call>",
            '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        ),
    ),
    Family(
        "gemma",
        _gemma,
        (
            "<|tool_call>call:f{x:1,x:2}<tool_call|>",
            '<|tool_call>call:f{x:<|"|>1}<tool_call|>',
            '<|tool_call>call:f{"x":"1"}<tool_call|>',
        ),
    ),
    Family(
        "harmony",
        _harmony,
        (
            "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{,}<|call|>",
            '<|start|>assistant to=f<|channel|>commentary json<|message|>{"x": "a"}<|call|>',
            '<|start|>assistant to=functions.f<|channel|>commentary json{"x": "a"}<|call|>',
        ),
    ),
    Family(
        "harmony",
        _harmony_sampled,
        (
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>[1]<|call|>",
            '<|channel|>commentary to=python <|constrain|>json<|message|>print("a")<|call|>',
        ),
    ),
    Family("llama3_json", _llama3_json, ('{"name": "f", "parameters": {,}}', '{"name": "f", "parameters": [1]}')),
    Family("pythonic", _pythonic, ("[f(x=1, x=2)]", "[f(x=g(1))]", "[f(1)]")),
    Family("mistral", _mistral_list, ('[TOOL_CALLS] [{"name": "f"; "arguments": {}}]', "[TOOL_CALLS] []")),
    Family("mistral", _mistral_named, ("[TOOL_CALLS]f[ARGS]{,}", '[TOOL_CALLS]{"name": 1}')),
    Family("react", _react, ("Action: f(x=)", "Action: call f", "Action: f(x=y)")),
)

HEADLESS = (
    ("hermes", '{"name": "f", "arguments": {"x": "a"}}\n</tool_call>'),
    ("hermes", "f(a)</tool_call>"),
    ("qwen3_coder", "<parameter=x>\na\n</parameter>\n</function>\n</tool_call>"),
    ("qwen3_coder", "f\n<parameter=x>\na\n</parameter>"),
    ("glm", "f\n<arg_key>x</arg_key>\n<arg_value>a</arg_value>\n</tool_call>"),
    ("glm", "<arg_key>x</arg_key><arg_value>a</arg_value>"),
    ("glm", "f</tool_call>"),
    ("gemma", 'call:f{x:<|"|>a<|"|>}<tool_call|>'),
    ("gemma", "call:f{}<tool_call|>"),
    ("gemma", "call:f{x:1}"),
    ("mistral", 'f[ARGS]{"x": "a"}'),
    ("mistral", '[ARGS] {"x": "a"}'),
    ("mistral", "f[CALL_ID]a1b2c3d4e[ARGS]{}"),
    ("pythonic", 'f(x="a")<|tool_call_end|>'),
    ("harmony", '<|channel|>commentary <|constrain|>json<|message|>{"x": "a"}<|call|>'),
    ("harmony", '<|channel|>commentary json<|message|>{"x": "a"}'),
    ("harmony", '<|channel|>commentary f<|message|>{"x": "a"}<|call|>'),
    ("harmony", '<|start|>assistant<|channel|>analysis f<|message|>{"x": "a"}<|call|>'),
    ("harmony", '<|channel|>final<|message|>{"x": "a"}<|call|>'),
)
"""Calls whose opening marker is missing, with their format: each must give one error."""

# What stands in values: words, and what any format could take for its own structure.
MARKS = (
    "</tool_call>", "<tool_call>", "</parameter>", "</function>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>",
    "<|python_tag|>", '"}}', ")]", "]", "{", "\\", "'", '"', "```json\n{", "# no comment", "\n", "; ", "Action: f()",
    "</arg_value>", "<arg_key>", "<|tool_call>", "<tool_call|>", "<|call|>", "<|channel|>", "<|end|>",
    "\nObservation: 5", "\nFinal answer: 1", "02134", "True", "null", "\U0001f378", " ",
)  # fmt: skip
texts = st.lists(st.sampled_from(MARKS) | st.text(max_size=6), max_size=4).map("".join)
numbers = st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
BY_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "string": texts,
    "integer": st.integers(-(10**20), 10**20),
    "number": numbers,
    "boolean": st.booleans(),
    "array": st.lists(values, max_size=3),
    "object": st.dictionaries(texts, values, max_size=3),
}
names = st.from_regex(r"[a-z_]{1,6}(\.[a-z]{1,4})?", fullmatch=True)
parameters = st.from_regex(r"[a-z]{1,5}", fullmatch=True) | st.sampled_from(["from", "class", "name", "arguments"])


@st.composite
def tools(draw: st.DrawFn) -> list[ToolSpec]:
    """One to three tools, each parameter of a type of its own."""

    def tool(name: str) -> ToolSpec:
        properties = {
            one: {"type": draw(st.sampled_from(sorted(BY_TYPE)))} for one in draw(st.sets(parameters, max_size=4))
        }
        return ToolSpec(name=name, description="", parameters={"type": "object", "properties": properties})

    return [tool(name) for name in sorted(draw(st.sets(names, min_size=1, max_size=3)))]


@st.composite
def conversations(draw: st.DrawFn, max_calls: int = 3) -> tuple[list[ToolSpec], list[Call]]:
    """Tools, and calls of them with some of their arguments."""
    known = draw(tools())

    def call(tool: ToolSpec) -> Call:
        given = [one for one in tool.parameters["properties"] if draw(st.booleans())]
        return tool.name, {one: draw(BY_TYPE[tool.parameters["properties"][one]["type"]]) for one in given}

    return known, [call(draw(st.sampled_from(known))) for _ in range(draw(st.integers(1, max_calls)))]


_XML = re.compile(
    r"</parameter>\s*\n\s*<|</parameter>\s*(<parameter=|</function>|</tool_call>)|(^|\n)\s*<parameter=|</function>\s*</tool_call>"
)
_GLM = re.compile(r"</arg_value>\s*(<arg_key>|</tool_call>)|</?arg_key\b|<arg_value\b")
_GEMMA_KEY = re.compile(r"[\w.\\-]([\w.\\ -]*[\w.\\-])?")


def can_hold(family: Family, calls: Sequence[Call]) -> bool:
    """Whether the format can hold these values at all: XML without escapes cannot hold its own structure."""
    strings = [value for _, arguments in calls for value in arguments.values() if isinstance(value, str)]
    if family.format == "gemma":
        return all(_GEMMA_KEY.fullmatch(key) for _, arguments in calls for key in _keys(arguments))
    if family.format == "glm":
        return not any(_GLM.search(value) for value in strings)
    return family.format != "qwen3_coder" or not any(_XML.search(f"{value}</parameter") for value in strings)


def _keys(value: Any) -> list[str]:
    """All keys in a value, at any depth."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [*(value if isinstance(value, dict) else ()), *(key for one in inner for key in _keys(one))]


def as_pairs(calls: Sequence[object]) -> list[Call]:
    """The calls as pairs; an error is none, and fails."""
    for call in calls:
        assert isinstance(call, ToolCall), call
    return [(call.name, dict(call.arguments)) for call in calls if isinstance(call, ToolCall)]
