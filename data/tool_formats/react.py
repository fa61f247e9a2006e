"""The textbooks' ReAct text: what the model thinks, what it does, and at the end its answer, each behind a label.

    Thought: I need the weather first.
    Action: get_weather({"location": "Paris"})

    Thought: I have all that I need.
    Final answer: 18 °C and sunny.

An action's arguments may be an object, named (`f(x="a")`), in the order of the tool's schema (`multiply[17.5, 4]`,
`search("a")`), plain text where the tool has one argument (`get_weather[Paris]`), or stand behind `Action Input:`.
Labels may be numbered, and `Answer:` is a final answer too; it goes on to the end of the turn.

Thoughts are `ParsedTurn.thinking`. The content is the final answer, if there is one. A turn without any label is an
answer as it is; one with labels but neither action nor answer is a `CallError`.

`Observation:` is the environment's word. A model often goes on and writes one itself: the turn ends there, whatever it
says behind it is dropped, and the calls before it count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from data.jsonl import plain_json
from data.tool_formats.base import ParsedTurn
from data.tool_formats.json_calls import kind, read_json
from data.tool_formats.python_calls import KEYWORD, bracket_end, pieces, read_arguments
from data.tool_formats.turn import (
    Bad,
    Block,
    Call,
    Draft,
    Grammar,
    Malformed,
    Reading,
    begin_thinking,
    calls_elsewhere,
    end_of_line,
    is_over,
    rest_of_block,
    skip_blank,
)
from data.tool_formats.values import NotGiven, typed
from data.types import FinishReason
from envs.types import ToolSpec

HOW_TO = 'Action: TOOL({"NAME": VALUE})'
_THINKING = (("<think>", "</think>"),)
LABEL = re.compile(
    r"^[ \t]*(?:\*\*)?(?P<label>thought|action input|action|observation|final answer|answer)"
    r"[ \t]*+\d*+(?:\*\*)?[ \t]*+:(?:\*\*)?[ \t]*",
    re.IGNORECASE | re.MULTILINE,
)
_MARKER = re.compile(f"(?P<think><think>)|{LABEL.pattern}", LABEL.flags)
_ACTION = re.compile(r"`?(?P<name>[^\s()\[\]{}:`]+)`?[ \t]*(?P<bracket>[(\[])?")
_INPUT = re.compile(r"\s*(?:\*\*)?action input[ \t]*+\d*+(?:\*\*)?[ \t]*+:(?:\*\*)?[ \t]*", re.IGNORECASE)
_OBJECT = re.compile(r"""\s*\{\s*(?:["'].*)?\}\s*""", re.DOTALL)
_SQUARE = re.compile(r"[\[\]]")


class ReactFormat:
    """The `ToolFormat` of ReAct text.

    Args:
        others: the grammars in which a model may write a call by mistake.
    """

    name = "react"

    def __init__(self, others: Sequence[Grammar]) -> None:
        self._others = others

    def parse(
        self,
        text: str,
        *,
        call_id_prefix: str,
        finish_reason: FinishReason,
        tools: Sequence[ToolSpec] = (),
        in_thinking: bool = False,
    ) -> ParsedTurn:
        reading = Reading(plain_json(text), tools, was_cut=finish_reason == "length")
        draft = Draft()
        labels = _read_turn(begin_thinking(draft, reading, _THINKING) if in_thinking else reading, draft)
        if not reading.was_cut and not draft.calls and not draft.thinking_open:
            if not labels:
                draft.calls += calls_elsewhere(draft.content, self._others, tools)
            elif not labels & {"final answer", "answer"}:
                draft.calls.append(Bad("no line begins with Action or Final answer"))
        return draft.finished(call_id_prefix, HOW_TO, tools)

    def structural_tag(self, tools: Sequence[ToolSpec]) -> None:
        """None: its calls have no opener that prose cannot hold."""


def _read_turn(reading: Reading, draft: Draft) -> set[str]:
    """Read the turn into `draft`; the labels that stood in it."""
    place, labels, label = 0, set[str](), ""
    while found := _MARKER.search(reading.text, place):
        _add(draft, label, reading.text[place : found.start()])
        place = found.end()
        if found["think"]:
            reading, place = reading._replace(text=draft.think(reading.text, place, "</think>")), 0
            continue
        label = found["label"].lower()
        labels.add(label)
        if label == "observation":
            return labels
        if label in ("final answer", "answer"):
            # What stood before it was said on the way.
            draft.thoughts += [draft.content] if draft.content else []
            draft.prose = [reading.text[place:]]
            return labels
        if label.startswith("action"):
            block = _read_action(reading, place, label)
            if not draft.add(block.calls):
                return labels
            place, label = block.end, ""
    _add(draft, label, reading.text[place:])
    return labels


def _add(draft: Draft, label: str, text: str) -> None:
    if label == "thought":
        draft.thoughts += [text.strip()] if text.strip() else []
    else:
        draft.prose.append(text)


def _read_action(reading: Reading, start: int, label: str) -> Block:
    """The call behind `Action:`."""
    text = reading.text
    opening = _ACTION.match(text, start)
    try:
        if label != "action" or not opening:
            raise Malformed("an Action is a tool and its arguments", start, at_end=is_over(text, start))
        name = opening["name"]
        tool = next((tool for tool in reading.tools if tool.name == name), None)
        if opening["bracket"] == "(":
            arguments, end = _in_parentheses(text, opening.end() - 1, tool)
        elif opening["bracket"]:
            arguments, end = _in_square_brackets(text, opening.end() - 1, tool)
        else:
            arguments, end = _behind_name(reading, opening.end(), tool)
    except Malformed as error:
        return rest_of_block(reading, error, opener=LABEL, end=end_of_line(text, error))
    return Block((Call(name, arguments),), end)


def _in_parentheses(text: str, start: int, tool: ToolSpec | None) -> tuple[dict[str, Any], int]:
    if arguments := _object_until(text, start + 1, ")"):
        return arguments
    end = bracket_end(text, start)
    try:
        positional, named = read_arguments(text[start + 1 : end - 1])
    except ValueError as error:
        raise Malformed(str(error), end) from error
    if len(positional) == 1 and not named and isinstance(positional[0], dict):
        return positional[0], end
    if len(positional) == 1 and not named and isinstance(positional[0], str):
        _refuse_object(positional[0], end)
    return _by_position(positional, named, tool, end), end


def _in_square_brackets(text: str, start: int, tool: ToolSpec | None) -> tuple[dict[str, Any], int]:
    if arguments := _object_until(text, start + 1, "]"):
        return arguments
    following = LABEL.search(text, start)
    limit = following.start() if following else len(text)
    depth = 0
    for found in _SQUARE.finditer(text, start, limit):
        depth += 1 if found[0] == "[" else -1
        if depth == 0:
            return _words(text[start + 1 : found.start()], tool, found.end()), found.end()
    raise Malformed("']' is missing", start, at_end=not following)


def _behind_name(reading: Reading, start: int, tool: ToolSpec | None) -> tuple[dict[str, Any], int]:
    """Arguments behind `Action Input:`, or none."""
    text = reading.text
    opening = _INPUT.match(text, start)
    following = LABEL.search(text, opening.end() if opening else start)
    if reading.was_cut and not following:
        # The text went on, perhaps with arguments.
        raise Malformed("no end of the action", start, at_end=True)
    end = following.start() if following else len(text)
    if not opening:
        rest, _, _ = text[start:end].partition("\n")
        if rest.strip():
            raise Malformed("an Action is a tool and its arguments", start)
        return {}, start
    if not text.startswith("{", skip_blank(text, opening.end())):
        return _words(text[opening.end() : end], tool, end), end
    value, end = read_json(text, opening.end())
    return _mapping(value, end), end


def _object_until(text: str, start: int, bracket: str) -> tuple[dict[str, Any], int] | None:
    """The JSON object that stands alone before a closing bracket."""
    try:
        value, end = read_json(text, start)
    except Malformed:
        return None
    end = skip_blank(text, end)
    return (value, end + 1) if isinstance(value, dict) and text.startswith(bracket, end) else None


def _mapping(value: Any, place: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Malformed(f"the arguments must be an object, not {kind(value)}", place)
    return value


def _words(body: str, tool: ToolSpec | None, place: int) -> dict[str, Any]:
    """Arguments in plain text, in the order of the tool's schema, typed by it."""
    names = _names(tool)
    body = body.strip()
    if not body:
        return {}
    _refuse_object(body if (quoted := _unquoted(body)) is None else quoted, place)
    if tool is None:
        return {"input": body}  # which argument it is nobody knows; the environment knows no such tool
    arguments: dict[str, Any] = {}
    for position, piece in enumerate([body] if len(names) == 1 else pieces(body)):
        keyword = KEYWORD.match(piece)
        if keyword and keyword[1] in names:
            name, piece = keyword[1], piece[keyword.end() :]
        elif position < len(names):
            name = names[position]
        else:
            raise Malformed(f"{tool.name} takes {len(names)} arguments", place)
        if name in arguments:
            raise Malformed(f"the argument {name!r} stands twice", place)
        arguments[name] = _word(piece.strip(), tool, name)
    return {name: value for name, value in arguments.items() if value is not NotGiven}


def _refuse_object(text: str, place: int) -> None:
    """All arguments of a call as a text that looks like an object: it is no JSON, or it stands in quotes. The tool's
    first argument would take it for its value."""
    if _OBJECT.fullmatch(text):
        raise Malformed("the arguments must be a JSON object, not a string that looks like one", place)


def _word(text: str, tool: ToolSpec, name: str) -> Any:
    """One argument: what stands in quotes is that text."""
    return typed(text, tool, name) if (quoted := _unquoted(text)) is None else quoted


def _unquoted(text: str) -> str | None:
    """The text that stands in quotes; None where none does."""
    if text[:1] not in ("'", '"'):
        return None
    try:
        positional, named = read_arguments(text)
    except ValueError:
        return None
    return positional[0] if len(positional) == 1 and not named and isinstance(positional[0], str) else None


def _by_position(
    positional: Sequence[Any], named: Mapping[str, Any], tool: ToolSpec | None, end: int
) -> dict[str, Any]:
    """Arguments without a name take those of the schema, in its order."""
    names = _names(tool)
    if tool is None and positional:
        return {"input": list(positional), **named}
    if len(positional) > len(names):
        raise Malformed(f"{len(positional)} arguments without a name; there are {len(names)}", end)
    arguments = dict(zip(names, positional, strict=False))
    if twice := arguments.keys() & named.keys():
        raise Malformed(f"the argument {min(twice)!r} stands twice", end)
    return arguments | dict(named)


def _names(tool: ToolSpec | None) -> list[str]:
    properties = tool.parameters.get("properties", {}) if tool else {}
    return list(properties)
