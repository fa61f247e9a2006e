"""Gemma 4's calls: an object whose keys are bare and whose texts stand between tokens of their own.

    <|tool_call>call:post{count:2,where:{zip:<|"|>02134<|"|>},tags:[true,null]}<tool_call|>

Nothing in a text is escaped, so it ends at the next `<|"|>` and cannot hold one; a key cannot hold what follows keys,
nor a name what follows names. The first templates write `None` for `null`. There is no structural tag: xgrammar knows
no schema style with these quotes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from data.tool_formats.json_calls import read_json
from data.tool_formats.turn import Block, Call, Grammar, Malformed, Reading, behind, rest_of_block, shown, skip_blank
from data.tool_formats.values import typed
from envs.types import ToolSpec

_OPEN, _CLOSE, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_CHANNEL, _CHANNEL_END = "<|channel>", "<channel|>"
_MAX_DEPTH = 64
_OPENER = re.compile(re.escape(_OPEN))
_HEAD = re.compile(r"\s*call:\s*([^<{\n]*[^<{\s])\s*(?=\{)")
_KEY = re.compile(r"""([^\s:,{}\[\]<"'`](?:[^:,{}\[\]<\n]*[^\s:,{}\[\]<])?)\s*:""")
_WORD = re.compile(r"[\w.+-]+")
_WORDS = {"true": True, "false": False, "null": None, "None": None}
# What stands outside texts; a text is one when the object goes on behind it.
_OUTSIDE = re.compile(
    rf"(?P<text>{re.escape(_QUOTE)}(?:(?!{re.escape(_QUOTE)}).)*{re.escape(_QUOTE)}(?=\s*[,}}\]]))"
    rf"|{re.escape(_OPEN)}|{re.escape(_CLOSE)}",
    re.DOTALL,
)


def _read(reading: Reading, found: re.Match[str]) -> Block:
    text = reading.text
    try:
        call, end = _read_call(reading, found.end())
    except Malformed as error:
        # Beyond the error there may be texts, and calls in them that must not run.
        outside = (marker.start() for marker in _OUTSIDE.finditer(text, error.place) if not marker["text"])
        place = next(outside, len(text))
        error = Malformed(error.reason, place, at_end=error.at_end)
        return rest_of_block(reading, error, opener=_OPENER, end=behind(text, _CLOSE, place))
    return Block((call,), end)


def _read_call(reading: Reading, start: int) -> tuple[Call, int]:
    text = reading.text
    head = _HEAD.match(text, start)
    if not head:
        raise Malformed(f"call:TOOL{{ must come first, not {shown(text[start : start + 99])}", start)
    tool = next((tool for tool in reading.tools if tool.name == head[1]), None)
    arguments, end = _read_object(text, head.end(), 0, tool)
    close = skip_blank(text, end)
    if not text.startswith(_CLOSE, close):
        raise Malformed(f"{_CLOSE} must follow the arguments", end, at_end=close == len(text))
    return Call(head[1], arguments), close + len(_CLOSE)


def _read_value(text: str, start: int, depth: int) -> tuple[Any, int]:
    if depth > _MAX_DEPTH:
        raise Malformed("nested too deeply", start)
    if text.startswith(_QUOTE, start):
        return _read_text(text, start + len(_QUOTE))
    if text.startswith("{", start):
        return _read_object(text, start, depth)
    if text.startswith("[", start):
        return _read_list(text, start, depth)
    word = _WORD.match(text, start)
    if word and word[0] in _WORDS:
        return _WORDS[word[0]], word.end()
    if word and word[0][0] in "-0123456789":
        value, end = read_json(text, start)
        if end == word.end():
            return value, end
    reason = f"a value must stand where {shown(text[start : start + 99])} does; texts stand between {_QUOTE}"
    raise Malformed(reason, start, at_end=start == len(text))


def _read_text(text: str, start: int) -> tuple[str, int]:
    end = text.find(_QUOTE, start)
    following = skip_blank(text, end + len(_QUOTE))
    if end >= 0 and text[following : following + 1] in ("", ",", "}", "]"):
        return text[start:end], end + len(_QUOTE)
    # It was not closed, and a later call's quote was taken for its own; or it quotes a call.
    limit = len(text) if end < 0 else end
    opener, close = text.find(_OPEN, start, limit), text.find(_CLOSE, start, limit)
    if opener >= 0 and (close < 0 or opener < close):
        # Where it ends cannot be told, and nothing that it quotes may run.
        place = max(opener + len(_OPEN), text.rfind(_CLOSE))
        raise Malformed("a text holds a tool call; write it in other words", place, at_end=end < 0)
    if end < 0 or close >= 0:
        raise Malformed(f"{_QUOTE} must follow a text", start, at_end=end < 0)
    raise Malformed(f"',' or a bracket must follow a text, not {shown(text[following : following + 99])}", following)


def _read_object(text: str, start: int, depth: int, tool: ToolSpec | None = None) -> tuple[dict[str, Any], int]:
    """The object at `start`; `tool`: it holds that tool's arguments."""
    fields: dict[str, Any] = {}

    def read_field(place: int) -> int:
        named = _KEY.match(text, place)
        if not named:
            reason = f"NAME:VALUE must stand where {shown(text[place : place + 99])} does"
            raise Malformed(reason, place, at_end=place == len(text))
        begin = skip_blank(text, named.end())
        value, end = _read_value(text, begin, depth + 1)
        if named[1] in fields:
            raise Malformed(f"the key {shown(named[1])} stands twice", end)
        if isinstance(value, float):
            whole = typed(text[begin:end], tool, named[1])
            value = whole if isinstance(whole, int) else value
        fields[named[1]] = value
        return end

    return fields, _read_items(text, start, "}", read_field)


def _read_list(text: str, start: int, depth: int) -> tuple[list[Any], int]:
    values: list[Any] = []

    def read_item(place: int) -> int:
        value, end = _read_value(text, place, depth + 1)
        values.append(value)
        return end

    return values, _read_items(text, start, "]", read_item)


def _read_items(text: str, start: int, close: str, read_item: Callable[[int], int]) -> int:
    """The place behind the brackets that open at `start`, with what `read_item` reads between commas."""
    place = skip_blank(text, start + 1)
    if text.startswith(close, place):
        return place + 1
    while True:
        end = read_item(place)
        place = skip_blank(text, end)
        if text.startswith(close, place):
            return place + 1
        if not text.startswith(",", place):
            raise Malformed(f"',' or '{close}' must follow a value", place, at_end=place == len(text))
        place = skip_blank(text, place + 1)


GEMMA = Grammar(
    name="gemma",
    how_to=f"{_OPEN}call:TOOL{{NAME:{_QUOTE}TEXT{_QUOTE},NAME:NUMBER}}{_CLOSE}",
    opener=_OPENER,
    read=_read,
    inner=re.compile(rf"(?P<close>{re.escape(_CLOSE)})|{re.escape(_QUOTE)}|^[ \t]*call:[\w.-]+[ \t]*\{{", re.MULTILINE),
    thinking=((f"{_CHANNEL}thought", _CHANNEL_END), (_CHANNEL, _CHANNEL_END), ("<think>", "</think>")),
)
