"""Harmony, as gpt-oss writes it: a turn of messages, each of which says in its header what it is and to whom.

    <|channel|>analysis<|message|>I need the area.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.lookup <|constrain|>json<|message|>{"key": "Paris"}<|call|>

    <|channel|>final<|message|>105 km²<|return|>

The prompt has written the first `<|start|>assistant`. What is addressed to a function is a call, whatever its channel;
the address stands behind the channel (as the models write it) or before it (as their chat template does). The last
`<|call|>` was the turn's stop token, so it may be missing. What is said on the way is thinking: the analysis, and the
commentary to nobody. What remains is prose, above all the final message.

There is no structural tag: a call ends with a stop token, which no text can hold.
"""

from __future__ import annotations

import re
from typing import Any

from data.tool_formats.json_calls import read_json, with_arguments
from data.tool_formats.turn import (
    Bad,
    Block,
    Grammar,
    Malformed,
    Reading,
    behind,
    rest_of_block,
    shown,
    skip_blank,
)

_START, _CHANNEL, _MESSAGE, _END, _CALL = "<|start|>assistant", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"
_FUNCTIONS = "functions."
_ON_THE_WAY = tuple(f"{_CHANNEL}{channel}{_MESSAGE}" for channel in ("analysis", "commentary"))
_WORD = r"(?:(?!<\|)\S)+"
_OPENER = re.compile(
    r"<\|(?:start|channel|constrain|message|end|return|call)\|>"
    # The address that the turn begins with; the prompt has written what stands before it.
    rf"|\A\s*(?=to=(?:functions\.|{_WORD}\s*<\|))"
)
_NEXT = re.compile(r"<\|(?:start|channel|end|return)\|>")
_NO_ADDRESS = f"a call goes to {_FUNCTIONS}TOOL"
_HEADER = re.compile(
    rf"(?:{re.escape(_START)})?\s*(?:to=(?P<before>{_WORD})\s*)?"
    rf"(?:{re.escape(_CHANNEL)}(?P<channel>\w*)\s*(?:to=(?P<behind>{_WORD})\s*)?)?"
    rf"(?P<kind>(?:<\|constrain\|>)?\w*)\s*{re.escape(_MESSAGE)}"
)
_ADDRESS = re.compile(
    rf"(?:{re.escape(_START)})?\s*(?:{re.escape(_CHANNEL)}\w*)?\s*to=(?:{_WORD}\s*{re.escape(_CHANNEL)})?"
)


def _read(reading: Reading, found: re.Match[str]) -> Block:
    text, start = reading.text, found.start()
    header = _HEADER.match(text, start)
    if header and (recipient := header["before"] or header["behind"]):
        return _read_call(reading, recipient, header.end())
    if header and header["kind"] and header["channel"] != "final":
        return _without_address(reading, header.end())
    if header:
        thought = header[0].endswith(_ON_THE_WAY) and not header[0].startswith(_CHANNEL)
        return Block((), text.index(_CHANNEL, start) if thought else header.end())
    if reading.was_cut and text.find(_MESSAGE, start) < 0:
        return Block((), len(text))
    if address := _ADDRESS.match(text, start):
        error = Malformed(f"{_MESSAGE} must stand between the header of a call and its arguments", address.end())
        return rest_of_block(reading, error, opener=_NEXT, end=behind(text, _CALL, error.place))
    if found[0] == _CALL:
        return Block((Bad(_NO_ADDRESS),), found.end())
    return Block((), found.end())


def _without_address(reading: Reading, start: int) -> Block:
    """A message that is of a kind, as calls are, and goes to nobody."""
    error = Malformed(_NO_ADDRESS, start)
    return rest_of_block(reading, error, opener=_NEXT, end=behind(reading.text, _CALL, start))


def _read_call(reading: Reading, recipient: str, start: int) -> Block:
    text = reading.text
    wrong = "" if recipient.startswith(_FUNCTIONS) else f"a call goes to functions.TOOL, not to {shown(recipient)}"
    try:
        arguments, end = _read_arguments(reading, skip_blank(text, start))
    except Malformed as error:
        told = Malformed(wrong or error.reason, error.place, at_end=error.at_end)
        return rest_of_block(reading, told, opener=_NEXT, end=behind(text, _CALL, error.place))
    call = Bad(wrong) if wrong else with_arguments(recipient.removeprefix(_FUNCTIONS), arguments, "arguments")
    return Block((call,), end)


def _read_arguments(reading: Reading, start: int) -> tuple[Any, int]:
    """The JSON value of a call, and the place behind the token that sends it."""
    text = reading.text
    arguments: Any = {}
    end = start
    if start < len(text) and not text.startswith(_CALL, start):
        arguments, end = read_json(text, start)
        end = skip_blank(text, end)
    if text.startswith(_CALL, end):
        return arguments, end + len(_CALL)
    if end < len(text) or reading.was_cut:
        raise Malformed(f"{_CALL} must follow the JSON object", end, at_end=end == len(text))
    return arguments, end


HARMONY = Grammar(
    name="harmony",
    how_to=f"{_CHANNEL}commentary to={_FUNCTIONS}TOOL <|constrain|>json{_MESSAGE}{{...}}{_CALL}",
    opener=_OPENER,
    read=_read,
    thinking=(*((opener, _END) for opener in _ON_THE_WAY), ("<think>", "</think>")),
)
