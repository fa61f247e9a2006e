"""One call as the package `renderers` found it, in our terms: a `ToolCall`, or a line that tells the model how to write
one.

The package gives plain text its JSON reading, takes the last of two equal keys, and leaves out what it does not
understand. Here the text is read again, by the rules that all our formats keep (`data/tool_formats/base.py`): the
schema types it (`values.typed`), no key stands twice, nothing of a call is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from data.families import Writing
from data.jsonl import plain_json
from data.tool_formats.base import CallError
from data.tool_formats.json_calls import as_call, read_json
from data.tool_formats.turn import Bad, Malformed, shown, skip_blank
from data.tool_formats.values import NotGiven, typed, whole_numbers
from envs.types import ToolCall, ToolSpec

if TYPE_CHECKING:
    from renderers import ParsedToolCall

_REASONS = {
    "invalid_json": "its arguments are no valid JSON",
    "unclosed_block": "it has no end",
    "missing_name": "it names no tool",
    "malformed_structure": "it is not of the right form",
}


@dataclass(frozen=True, slots=True)
class _Tags:
    """How a call is written with tags: what stands before its arguments, what tag no value can hold, and a pattern of
    all of an argument."""

    head: re.Pattern[str]
    tag: re.Pattern[str]
    pair: re.Pattern[str]


_TAGS: Mapping[Writing, _Tags] = {
    "arg_key": _Tags(
        re.compile(r"[^<]*(?:<tool_sep[^<>]*>)?"),
        re.compile(r"</?arg_(?:key|value)"),
        re.compile(
            r"<arg_key[^<>]*>(?P<key>[^<]*)</arg_key[^<>]*>\s*<arg_value[^<>]*>(?P<text>.*?)</arg_value[^<>]*>", re.S
        ),
    ),
    "parameter": _Tags(
        re.compile(r'<invoke name="[^"]+">'),
        re.compile(r"<parameter name="),
        re.compile(r'<parameter name="(?P<key>[^"]+)">(?P<text>.*?)</parameter>', re.S),
    ),
    "dsml": _Tags(
        re.compile(r'<｜DSML｜invoke name="[^"]+">'),
        re.compile(r"<｜DSML｜parameter name="),
        re.compile(
            r'<｜DSML｜parameter name="(?P<key>.*?)" string="(?P<string>true|false)">(?P<text>.*?)</｜DSML｜parameter>',
            re.S,
        ),
    ),
}
# Tags and JSON in the place of a name are calls of other formats.
_NO_NAME = re.compile(r"[<{\n]")
_ENDS = ("", "</invoke>", "</｜DSML｜invoke>")
# What DeepSeek and Kimi write before the JSON object, around the tool's name.
_JSON_HEAD = r"\s*(?:\w+<[|｜][^<>]*[|｜]>\s*|\w+\.)?{0}(?::\d+)?\s*(?:<[|｜][^<>]*[|｜]>|```(?:json)?)?\s*"
_INVOKE = re.compile(r'<invoke name="[^"]+">.*?</invoke>', re.S)


def bodies(attempts: Sequence[ParsedToolCall], writing: Writing) -> tuple[list[str], list[str]]:
    """The text of each attempt, and what the package left out of the blocks that hold several calls."""
    texts: list[str] = []
    left: list[str] = []
    for index, attempt in enumerate(attempts):
        if writing != "parameter" or attempt.name is None:
            texts.append(attempt.raw)
            continue
        same = [one.token_span for one in attempts[:index]].count(attempt.token_span)
        texts.append(_INVOKE.findall(attempt.raw)[same])
        if same == 0 and _INVOKE.sub("", attempt.raw).strip():
            left.append("it is not of the right form")
    return texts, left


def read_call(
    attempt: ParsedToolCall,
    body: str,
    *,
    writing: Writing,
    tools: Sequence[ToolSpec],
    call_id: str,
    example: str,
) -> ToolCall | CallError:
    """The call of an attempt whose text is `body`; it never raises for what a model wrote."""
    reason = _REASONS.get(attempt.status.value)
    if isinstance(attempt.arguments, Mapping) and attempt.status.value == "invalid_json":
        reason = None  # a value that is no JSON of its type, kept as text
    if reason is None and not attempt.name:
        reason = _REASONS["missing_name"]
    if reason is None and not isinstance(attempt.arguments, Mapping):
        reason = "its arguments are no JSON object"
    if reason is not None:
        return call_error(call_id, reason, example)
    assert attempt.name is not None
    assert isinstance(attempt.arguments, Mapping)
    if _NO_NAME.search(attempt.name):
        return call_error(call_id, f"the tool's name must come first, not {shown(attempt.name)}", example)
    tool = next((tool for tool in tools if tool.name == attempt.name), None)
    try:
        if writing in _TAGS:
            arguments = _tagged(body, _TAGS[writing], tool)
        else:
            _check_json(body, attempt.name, writing)
            arguments = whole_numbers(attempt.arguments, tool)
        return ToolCall(call_id=call_id, name=plain_json(attempt.name), arguments=plain_json(arguments))
    except Malformed as error:
        return call_error(call_id, error.reason, example)
    except ValueError as error:
        return call_error(call_id, str(error), example)


def call_error(call_id: str, reason: str, example: str) -> CallError:
    return CallError(
        call_id=call_id, text=f"This tool call was not run: {reason}. A call is written like this: {example}"
    )


def _tagged(body: str, tags: _Tags, tool: ToolSpec | None) -> dict[str, Any]:
    """The arguments between tags: each of them whole, and nothing else beside the name."""
    head = tags.head.match(body)
    place = skip_blank(body, head.end() if head else 0)
    arguments: dict[str, Any] = {}
    while found := tags.pair.match(body, place):
        key, text = found["key"].strip(), found["text"]
        if key in arguments:
            raise Malformed(f"the argument {shown(key)} stands twice", place)
        if inner := tags.tag.search(text):
            # Where it ends cannot be told: an end that is missing, or a text that quotes a call.
            raise Malformed(f"the value of {shown(key)} holds {inner[0]}; end it before, or use other words", place)
        arguments[key] = _value(text, found.groupdict().get("string"), tool, key)
        place = skip_blank(body, found.end())
    if body[place:].strip() not in _ENDS:
        raise Malformed(f"no argument begins at {shown(body[place:])}", place)
    return {key: value for key, value in arguments.items() if value is not NotGiven}


def _value(text: str, string: str | None, tool: ToolSpec | None, key: str) -> Any:
    """The value of a text, whose own tag may say whether it is one."""
    if string == "true":
        return text
    if string == "false":
        try:
            value, end = read_json(text, 0)
        except Malformed:
            return typed(text, tool, key)
        if not text[end:].strip():
            return whole_numbers({key: value}, tool)[key]
    return typed(text, tool, key)


def _check_json(body: str, name: str, writing: Writing) -> None:
    """Raise `Malformed` for a call that our own reader refuses: it takes no key twice, and leaves nothing out that
    stands beside the name and the arguments."""
    if writing == "envelope":
        call = as_call(read_json(body, 0)[0], ("args",))
        if isinstance(call, Bad):
            raise Malformed(call.reason, 0)
        return
    start = body.find("{")
    start = start if start >= 0 else len(body)
    end = read_json(body, start)[1] if start < len(body) else start
    if not re.fullmatch(_JSON_HEAD.format(re.escape(name)), body[:start]) or body[end:].strip() not in ("", "```"):
        raise Malformed("something else stands beside its name and its arguments", end)
