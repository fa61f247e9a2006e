"""Calls written as JSON: one value at a place in a text, the envelope of name and arguments, where broken JSON ends.

    {"name": "lookup", "arguments": {"key": "area of Paris"}}

Leaves out where in a turn such a value stands; that is each format's own.
"""

from __future__ import annotations

import json
import re
from typing import Any

from data.jsonl import plain_json
from data.tool_formats.parts import Bad, Call, Malformed, is_over, shown, skip_blank

_BESIDES = {"name", "id", "call_id", "type"}
"""Keys of an envelope that say nothing about what is asked for, and the name."""
_OPENING = re.compile(r'(?:[\[{:,\s]|"[^"\\]*")*')
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"|(?P<open>[\[{])|(?P<close>[\]}])|(?P<unclosed>")', re.DOTALL)


class _TwiceError(ValueError):
    """A key stands twice in one object; readers of JSON differ in which one counts."""


def no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `object_pairs_hook`: the object, unless a key stands twice in it."""
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if (key := plain_json(key)) in seen:
            raise _TwiceError(f"the key {shown(key)} stands twice")
        seen[key] = value
    return seen


_STRICT = json.JSONDecoder(object_pairs_hook=no_key_twice)
_PLAIN = json.JSONDecoder()


def read_json(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at `start`, after blanks, and the place behind it.

    Raises:
        Malformed: it cannot be read; `place` is as far as it could.

    >>> read_json('x = {"a": [1]}, y', 4)
    ({'a': [1]}, 14)
    """
    start = skip_blank(text, start)
    try:
        value, end = _decode(_STRICT, text, start)
    except _TwiceError as error:
        # What stands behind may be broken besides; then that is said, with its place.
        raise Malformed(str(error), _decode(_PLAIN, text, start)[1]) from error
    try:
        return plain_json(value), end
    except ValueError as error:
        raise Malformed(str(error), end) from error


def _decode(decoder: json.JSONDecoder, text: str, start: int) -> tuple[Any, int]:
    try:
        return decoder.raw_decode(text, start)
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")
        at_end = error.msg.startswith("Unterminated") or is_over(text, error.pos)
        where = f"at {shown(text[error.pos : error.pos + 99])}" if error.pos < len(text) else "at the end"
        raise Malformed(f"{reason} {where}", error.pos, at_end=at_end) from error
    except _TwiceError:
        raise
    except RecursionError as error:
        opening = _OPENING.match(text, start)
        raise Malformed("nested too deeply", opening.end() if opening else start) from error
    except ValueError as error:
        # Python's own words about a number of thousands of digits name a setting of the host.
        raise Malformed("a number is too long", start) from error


def value_end(text: str, start: int) -> int:
    """The place behind a value that is a list or an object: tags in its strings are none. `start`, if it is neither."""
    try:
        return read_json(text, start)[1]
    except Malformed as error:
        if error.at_end:
            raise
        return start


def json_end(text: str, start: int, limit: int) -> int | None:
    """The place behind the brackets that open at `start`, whether or not what is between them can be read; None where
    none opens there, or they stay open until `limit`."""
    if text[start : start + 1] not in ("{", "["):
        return None
    depth = 0
    for found in _STRUCTURE.finditer(text, start, limit):
        if found["unclosed"]:
            return None
        depth += bool(found["open"]) - bool(found["close"])
        if depth <= 0:
            return found.end()
    return None


def as_call(value: Any, keys: tuple[str, ...] = ("arguments",)) -> Call | Bad:
    """The call that an envelope asks for; `keys` are the ones that may hold the arguments.

    >>> as_call({"name": "ls", "arguments": {"path": "/"}})
    Call(name='ls', arguments={'path': '/'})
    """
    if not isinstance(value, dict):
        return Bad(f"a call is a JSON object, not {kind(value)}")
    if not isinstance(value.get("name"), str):
        return Bad("'name' must be a string")
    # What stands under another key may be the arguments; a call without them would be another call.
    others = value.keys() - _BESIDES - {*keys}
    if others:
        return Bad(f"unknown key {shown(min(others))}")
    given = [key for key in keys if key in value]
    if len(given) > 1:
        return Bad(f"write {' or '.join(map(repr, keys))}, not both")
    return with_arguments(value["name"], value[given[0]] if given else {}, given[0] if given else "")


def with_arguments(name: str, arguments: Any, key: str) -> Call | Bad:
    """The call, when `arguments` is an object."""
    if not isinstance(arguments, dict):
        return Bad(f"'{key}' must be an object, not {kind(arguments)}")
    return Call(name, arguments)


def kind(value: Any) -> str:
    """What JSON calls a value.

    >>> kind("a"), kind(None), kind([1])
    ('a string', 'null', 'a list')
    """
    if value is None:
        return "null"
    names = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names[type(value)]
