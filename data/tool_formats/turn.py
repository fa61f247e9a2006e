"""How any format reads a turn: thinking and prose here, calls by the format's own grammar, ids and errors here again.

A format is a `Grammar`: what opens a call, and a function that reads the block behind that. `TextFormat` makes a
`ToolFormat` of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from data.jsonl import plain_json
from data.tool_formats.base import CallError, ParsedTurn
from data.tool_formats.fences import without_code
from data.tool_formats.other_forms import called_in_other_forms
from data.tool_formats.parts import Bad as Bad
from data.tool_formats.parts import Call as Call
from data.tool_formats.parts import Malformed as Malformed
from data.tool_formats.parts import is_over as is_over
from data.tool_formats.parts import shown as shown
from data.tool_formats.parts import skip_blank as skip_blank
from data.tool_formats.values import whole_numbers
from data.types import FinishReason
from envs.types import ToolCall, ToolSpec

_MAX_BAD = 16
"""Calls of one turn that are answered with an error each: a model that repeats itself fills no context with them."""


class Reading(NamedTuple):
    """A turn's text, the tools that it may call, and whether it was cut."""

    text: str
    tools: Sequence[ToolSpec]
    was_cut: bool


class Block(NamedTuple):
    """What stands at an opener, and the place behind it. Prose: it was no call after all."""

    calls: tuple[Call | Bad, ...]
    end: int
    is_prose: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """One family's way of writing calls.

    how_to: the form, as an error tells it.
    opener: what may begin a call.
    read: the block behind a match of `opener`.
    inner: what stands inside calls alone; outside of any it shows a call whose opener is missing. Its group `close`
        ends calls, and behind one it only does so twice.
    tags: xgrammar's format of free text with calls in it; None where there is none.
    is_bare_json: its calls have no marker; they are found by what they say.
    thinking: pairs of markers.
    """

    name: str
    how_to: str
    opener: re.Pattern[str]
    read: Callable[[Reading, re.Match[str]], Block]
    inner: re.Pattern[str] | None = None
    tags: Callable[[Sequence[ToolSpec]], dict[str, Any]] | None = None
    is_bare_json: bool = False
    thinking: tuple[tuple[str, str], ...] = (("<think>", "</think>"),)


class TextFormat:
    """The `ToolFormat` of a grammar.

    Args:
        others: the grammars in which a model may write a call by mistake.
    """

    def __init__(self, grammar: Grammar, others: Sequence[Grammar]) -> None:
        self.name = grammar.name
        self._grammar = grammar
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
        draft = read_turn(reading, self._grammar, in_thinking=in_thinking)
        if not reading.was_cut and not draft.calls and not draft.thinking_open:
            draft.calls += calls_elsewhere(draft.content, self._others, tools)
        return draft.finished(call_id_prefix, self._grammar.how_to, tools)

    def structural_tag(self, tools: Sequence[ToolSpec]) -> str | None:
        if not tools or self._grammar.tags is None:
            return None
        return json.dumps({"type": "structural_tag", "format": self._grammar.tags(tools)}, ensure_ascii=False)


@dataclass(slots=True, kw_only=True)
class Draft:
    """A turn that is being read."""

    prose: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[Call | Bad] = field(default_factory=list)
    bad: int = 0
    thinking_open: bool = False

    @property
    def content(self) -> str:
        return "".join(self.prose).strip()

    def add(self, calls: Sequence[Call | Bad]) -> bool:
        """Take calls; False when too many could not be read, and the rest of the turn is to be left."""
        for call in calls:
            self.calls.append(call)
            self.bad += isinstance(call, Bad)
            if self.bad == _MAX_BAD:
                self.calls.append(Bad("too many calls cannot be read; the rest of the turn is left out"))
                return False
        return True

    def think(self, text: str, start: int, closer: str) -> str:
        """Take the thinking that begins at `start`; the text behind it, which begins a line."""
        thought, closed, rest = text[start:].partition(closer)
        self.thinking_open = not closed
        self.thoughts += [thought.strip()] if thought.strip() else []
        self.prose += [] if rest.startswith("\n") else ["\n"]
        return rest

    def finished(self, call_id_prefix: str, how_to: str, tools: Sequence[ToolSpec]) -> ParsedTurn:
        """The turn, its calls with their ids, its whole numbers as the tools' schemas want them."""
        known = {tool.name: tool for tool in tools}
        calls = []
        for number, call in enumerate(self.calls):
            call_id = f"{call_id_prefix}_{number}"
            if isinstance(call, Call):
                arguments = whole_numbers(call.arguments, known.get(call.name))
                calls.append(ToolCall(call_id=call_id, name=call.name, arguments=arguments))
            else:
                line = f"error: malformed tool call: {call.reason}; write {how_to}"
                calls.append(CallError(call_id=call_id, text=line))
        return ParsedTurn(
            content=self.content,
            calls=tuple(calls),
            thinking="\n".join(self.thoughts),
            thinking_open=self.thinking_open,
        )


def read_turn(reading: Reading, grammar: Grammar, *, in_thinking: bool = False) -> Draft:
    """A turn in one format, whatever stands in it."""
    draft = Draft()
    if in_thinking:
        reading = begin_thinking(draft, reading, grammar.thinking)
    closers = dict(grammar.thinking)
    openers = "|".join(map(re.escape, closers))
    marker = re.compile(f"(?P<think>{openers})|{grammar.opener.pattern}", grammar.opener.flags)
    place = 0
    said = 0  # the first piece of prose behind the last call
    while found := marker.search(reading.text, place):
        draft.prose.append(reading.text[place : found.start()])
        if found["think"]:
            rest, place = draft.think(reading.text, found.end(), closers[found["think"]]), 0
            reading = reading._replace(text=rest)
            continue
        block = grammar.read(reading, found)
        assert block.end > found.start()
        place = block.end
        if block.is_prose:
            draft.prose.append(reading.text[found.start() : place])
        elif not draft.add((*_stray(draft, said, grammar), *block.calls)):
            return draft
        else:
            said = len(draft.prose)
    draft.prose.append(reading.text[place:])
    if not reading.was_cut:
        draft.add(_stray(draft, said, grammar))
    return draft


def _stray(draft: Draft, said: int, grammar: Grammar) -> list[Bad]:
    """The call that prose holds without its opener. Behind one that could not be read it may be a part of that."""
    if grammar.inner is None or (draft.calls and isinstance(draft.calls[-1], Bad)):
        return []
    prose = without_code("".join(draft.prose[said:]))
    for found in grammar.inner.finditer(prose):
        doubled = draft.calls and found.groupdict().get("close") and not prose[: found.start()].strip()
        if not doubled:
            return [Bad(f"{found[0].strip()} stands outside of a call")]
    return []


def begin_thinking(draft: Draft, reading: Reading, markers: Sequence[tuple[str, str]]) -> Reading:
    """Take the thinking that the prompt opened, with whichever marker; what is to be read behind it."""
    text = reading.text
    opener, closer = min(markers, key=lambda pair: len(text.partition(pair[1])[0]))
    start = skip_blank(text, 0)
    rest = draft.think(text, start + len(opener) if text.startswith(opener, start) else 0, closer)
    return reading._replace(text=rest)


THINKING_OPENERS = ("<think>", "[THINK]", "<|channel>thought")


def opens_thinking(prompt: str) -> bool:
    """Whether a prompt ends inside thinking: its last words are the opening marker.

    >>> opens_thinking("<|im_start|>assistant\\n<think>\\n"), opens_thinking("<think>\\n\\n</think>\\n\\n")
    (True, False)
    """
    return prompt.rstrip().endswith(THINKING_OPENERS)


def calls_elsewhere(content: str, grammars: Sequence[Grammar], tools: Sequence[ToolSpec]) -> list[Call | Bad]:
    """One `Bad` for each call that `content` writes in another format."""
    names = {tool.name for tool in tools}
    found: list[Call | Bad] = []
    for grammar in grammars:
        for call in read_turn(Reading(content, tools, was_cut=False), grammar).calls:
            if isinstance(call, Call) and (call.name in names or (grammar.is_bare_json and not names)):
                found.append(_elsewhere(call.name))
            elif isinstance(call, Bad) and grammar.is_bare_json:
                found.append(call)
        if found:
            break
    draft = Draft()
    draft.add(found or [_elsewhere(name) for name in called_in_other_forms(content, tools)])
    return draft.calls


def _elsewhere(name: str) -> Bad:
    return Bad(f"the call of {shown(name)} is not in the form that is read here")


def rest_of_block(
    reading: Reading,
    error: Malformed,
    *,
    before: Sequence[Call | Bad] = (),
    opener: re.Pattern[str],
    end: Callable[[int], int | None],
) -> Block:
    """The rest of a block that cannot be read: up to where its own marker or bracket closes it, but not beyond the next
    opener, which begins a call of its own. Openers before `error.place` are parts of strings.

    Args:
        before: the calls of the block that could be read.
        end: the place where the block closes, if it does before the given one.
    """
    text = reading.text
    following = opener.search(text, error.place)
    limit = following.start() if following else len(text)
    closed = end(limit)
    if reading.was_cut and (error.at_end or (closed is None and not following)):
        return Block(tuple(before), len(text))
    return Block((*before, Bad(error.reason)), limit if closed is None else closed)


def beyond_values(text: str, error: Malformed, outside: re.Pattern[str]) -> Malformed:
    """For `rest_of_block`, where values stand between tags: the error at the first marker outside of all values behind
    it, for a call that a value quotes must not run.

    Args:
        outside: finds markers, and whole values as its group `value`.
    """
    places = (marker.start() for marker in outside.finditer(text, error.place) if not marker["value"])
    return Malformed(error.reason, next(places, len(text)), at_end=error.at_end)


def behind(text: str, closer: str, start: int) -> Callable[[int], int | None]:
    """For `rest_of_block`: behind the first `closer` from `start` on."""

    def end(limit: int) -> int | None:
        place = text.find(closer, start, limit)
        return None if place < 0 else place + len(closer)

    return end


def end_of_line(text: str, error: Malformed) -> Callable[[int], int | None]:
    """For `rest_of_block`, where nothing marks a block's end: at the end of the line, unless more text was needed."""

    def end(limit: int) -> int | None:
        place = text.find("\n", error.place, limit)
        return None if error.at_end or place < 0 else place

    return end


def tool_tags(trigger: str, tags: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """xgrammar's free text in which `trigger` must begin one of `tags`."""
    return {"type": "triggered_tags", "triggers": [trigger], "tags": list(tags)}


def schema_tag(begin: str, tool: ToolSpec, end: str, style: str = "json") -> dict[str, Any]:
    """xgrammar's tag of one tool's arguments between two texts."""
    content = {"type": "json_schema", "json_schema": dict(tool.parameters), "style": style}
    return {"type": "tag", "begin": begin, "content": content, "end": end}
