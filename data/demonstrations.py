"""Warm-start conversations: reading them, and turning them into SFT rows in which only the demonstration's own
assistant turns are trained.

A file is JSONL; each line has `messages` (chat-completions form; an assistant message with `"train": false` is
context only), `tools` (chat-completions form) and optionally `task_id`. What an assistant thought before it spoke is in
`reasoning_content`, `thinking` or `reasoning`, as servers and chat templates name it; `reasoning_content` is what is
written. A field that is null is read as absent: tables fill up with nulls. Arguments that are no JSON object, or hold a
key twice, stay the text that they are; such a conversation is not trained on.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from data.chat import Renderer
from data.demonstrated_turns import check_turn, leaves_out
from data.files import in_one_move, open_regular
from data.jsonl import plain_json
from data.rows import SampleBuilder
from data.tool_formats.json_calls import no_key_twice
from data.types import Segment, Source, TrainingSample
from envs.types import Message, ToolCall, ToolSpec

T = TypeVar("T")
_THINKING_KEYS = ("reasoning_content", "thinking", "reasoning")
_REASONS_SHOWN = 3
_KIND_WORDS = {str: "text", bool: "true or false", list: "a list", dict: "an object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One conversation to learn from."""

    task_id: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]


@dataclass(slots=True)
class DemonstrationReport:
    """What became of a file: rows kept and dropped (by reason), and tokens by source."""

    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    tokens: Counter[Source] = field(default_factory=Counter)
    trained_tokens: int = 0
    forged: int = 0
    """Control tokens that contents spell; they stay text."""
    unthought: int = 0
    """Turns whose thinking the renderer does not write; they are trained without it."""
    unsaid: int = 0
    """Turns whose prose the renderer does not write."""
    refusals: dict[str, list[str]] = field(default_factory=dict)
    """Why rows could not be written, and the ids of those rows."""

    def line(self) -> str:
        dropped = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items()) or "none"
        tokens = ", ".join(f"{count} {source.value}" for source, count in self.tokens.items())
        forged = f"; {self.forged} control tokens in contents, kept as text" if self.forged else ""
        unthought = f"; {self.unthought} turns without their thinking, which is not written" if self.unthought else ""
        unsaid = f"; {self.unsaid} turns without their prose, which is not written" if self.unsaid else ""
        return (
            f"{self.kept} rows kept, dropped: {dropped}; tokens: {tokens}; {self.trained_tokens} trained{forged}"
            f"{unthought}{unsaid}{self._refusals()}"
        )

    def _refusals(self) -> str:
        """The commonest reasons, each with the first row that it befell."""
        reasons = sorted(self.refusals.items(), key=lambda item: -len(item[1]))[:_REASONS_SHOWN]
        return "".join(f"; {len(ids)} such as {ids[0]}: {reason}" for reason, ids in reasons)


def to_sample(demonstration: Demonstration, renderer: Renderer) -> TrainingSample:
    """The SFT row of a conversation; ids and boundaries are those that a rollout of it would have.

    Raises:
        ValueError: the conversation has no assistant turn, or one that the chat template cannot write, or writes so
            that it is not read as it was meant.
    """
    messages = with_host_ids(demonstration.messages)
    assistant = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not assistant:
        raise ValueError("it has no assistant turn")
    builder = SampleBuilder(demonstration.task_id)
    stream: list[int] = []
    for segment in renderer.opening(messages[: assistant[0]], demonstration.tools):
        builder.add_context(segment)
        stream += segment.token_ids
    for index, following in zip(assistant, [*assistant[1:], len(messages)], strict=True):
        message = messages[index]
        turn = Segment(source=Source.TARGET, token_ids=renderer.turn_ids(message))
        if message.train:
            check_turn(message, renderer, turn_ids=turn.token_ids, prompt_ids=stream, tools=demonstration.tools)
        stream += turn.token_ids
        if message.train:
            builder.add_target(turn)
        else:
            builder.add_context(turn)
        # What follows the last assistant turn would train nothing.
        if following < len(messages):
            bridge = renderer.bridge(
                messages[index + 1 : following],
                prompt_ids=stream[: -len(turn.token_ids)],
                sampled_ids=turn.token_ids,
                tools=demonstration.tools,
            )
            if bridge is None:
                raise ValueError("the chat template rewrites earlier turns, so it is not one row; split it by turn")
            for segment in bridge:
                builder.add_context(segment)
                stream += segment.token_ids
    return builder.build()


def with_host_ids(messages: Sequence[Message]) -> list[Message]:
    """The conversation with the call ids that a rollout would give: a renderer reads calls out of a turn's tokens, and
    finds that of a result by them, in whatever order results come.

    >>> call = ToolCall(call_id="x", name="f", arguments={})
    >>> said, told = Message(role="assistant", tool_calls=(call,)), Message(role="tool", content="7", call_id="x")
    >>> [(one.tool_calls[0].call_id, other.call_id) for one, other in [with_host_ids([said, told])]]
    [('call_0_0', 'call_0_0')]
    """
    renamed: list[Message] = []
    turns = 0
    waiting: dict[str | None, deque[str]] = {}
    for message in messages:
        if message.role == "assistant":
            calls = [replace(call, call_id=f"call_{turns}_{n}") for n, call in enumerate(message.tool_calls)]
            waiting = {call.call_id: deque() for call in message.tool_calls}
            for old, new in zip(message.tool_calls, calls, strict=True):
                waiting[old.call_id].append(new.call_id)
            renamed.append(replace(message, tool_calls=tuple(calls)))
            turns += 1
        else:
            answered = waiting.get(message.call_id)
            renamed.append(replace(message, call_id=answered.popleft()) if answered else message)
    return renamed


def why_dropped(demonstration: Demonstration, renderer: Renderer) -> str | None:
    """Why a conversation is not trained on, whatever its length; None: it is."""
    turns = [message for message in demonstration.messages if message.role == "assistant"]
    if not any(turn.train for turn in turns):
        return "without a trained turn"
    if any(turn.train and not turn.content and not turn.tool_calls for turn in turns):
        return "with an empty trained turn"
    if any(not isinstance(call.arguments, Mapping) for turn in turns for call in turn.tool_calls):
        return "with arguments of a call that are no JSON object, or hold a key twice"
    if not renderer.several_calls and any(len(turn.tool_calls) > 1 for turn in turns):
        return "with several calls in a turn, which the chat template cannot write"
    # The model would learn to spell `<tool_call>` letter by letter, which calls nothing.
    if any(turn.train and _forged(turn, renderer) for turn in turns):
        return "with a control token as text in a trained turn (calls belong in tool_calls)"
    return None


def to_samples(
    demonstrations: Iterable[Demonstration], renderer: Renderer, *, max_length: int
) -> tuple[list[TrainingSample], DemonstrationReport]:
    """SFT rows of at most `max_length` tokens. Rows are dropped and counted, never cut: a cut conversation
    teaches to stop where its author did not. A row that the renderer cannot write is dropped too, and the report says
    why: one conversation of another shape must not cost the file.

    Raises:
        ValueError: no row is left; the message says why not.
    """
    samples: list[TrainingSample] = []
    report = DemonstrationReport()
    for demonstration in demonstrations:
        reason = why_dropped(demonstration, renderer)
        if reason is not None:
            report.dropped[reason] += 1
            continue
        try:
            sample = to_sample(demonstration, renderer)
        except ValueError as error:
            report.dropped["that the renderer cannot write"] += 1
            report.refusals.setdefault(str(error), []).append(demonstration.task_id)
            continue
        if len(sample) > max_length:
            report.dropped[f"longer than {max_length} tokens"] += 1
        else:
            samples.append(sample)
            report.kept += 1
            report.tokens.update(sample.source)
            report.trained_tokens += sum(sample.loss_mask)
            report.forged += sum(_forged(message, renderer) for message in demonstration.messages)
            turns = [message for message in demonstration.messages if message.role == "assistant"]
            report.unthought += sum(leaves_out(turn, renderer, "thinking") for turn in turns)
            report.unsaid += sum(leaves_out(turn, renderer, "content") for turn in turns)
    if not samples:
        raise ValueError(f"no demonstration is left to train on ({report.line()})")
    return samples, report


def _forged(message: Message, renderer: Renderer) -> int:
    return renderer.count_forged(message.content) + renderer.count_forged(message.thinking)


def write_demonstrations(path: Path, demonstrations: Iterable[Demonstration]) -> int:
    """Write a file in one move; returns how many rows it has."""
    count = 0
    with in_one_move(path) as file:
        for demonstration in demonstrations:
            count += 1
            rows = [_message_row(message) for message in demonstration.messages]
            tools = [tool.as_openai() for tool in demonstration.tools]
            row = {"task_id": demonstration.task_id, "messages": rows, "tools": tools}
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    return count


def read_demonstrations(path: Path) -> Iterator[Demonstration]:
    """The conversations of a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line cannot be read; the message names file, line, field and what is wrong.
    """
    with open_regular(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                yield _demonstration(_decoded(line), f"{path.stem}-{number}")
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: not a conversation: {error}") from error


def _decoded(text: str | bytes) -> Any:
    """Strict JSON: readers differ in which of two equal keys counts."""
    return plain_json(json.loads(text, object_pairs_hook=no_key_twice))


def _message_row(message: Message) -> dict[str, Any]:
    return message.as_openai() | ({} if message.train else {"train": False})


def _demonstration(row: Any, default_id: str) -> Demonstration:
    messages = _field(row, "messages", list)
    tools = _field(row, "tools", list, [])
    return Demonstration(
        task_id=_text_id(row, "task_id", default_id),
        messages=tuple(_message(message, f"messages[{index}]") for index, message in enumerate(messages)),
        tools=tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)),
    )


def _message(row: Any, where: str) -> Message:
    role: Any = _field(row, "role", str, where=where)
    calls = _field(row, "tool_calls", list, [], where=where)
    content = _field(row, "content", str, "", where=where)
    thinking = _thinking(row, where)
    train = _field(row, "train", bool, True, where=where)
    tool_calls = tuple(_call(call, f"{where}.tool_calls[{index}]", index) for index, call in enumerate(calls))
    call_id = _text_id(row, "tool_call_id", "") if role == "tool" else None
    try:
        return Message(
            role=role, content=content, thinking=thinking, tool_calls=tool_calls, call_id=call_id, train=train
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _thinking(row: Any, where: str) -> str:
    """What was thought, under whichever of its names; some files have it under two.

    >>> _thinking({"reasoning_content": None, "thinking": "So.", "reasoning": "So."}, "messages[0]")
    'So.'
    """
    said = {key: text for key in _THINKING_KEYS if (text := _field(row, key, str, "", where=where))}
    if len(set(said.values())) > 1:
        raise ValueError(f"{where}: {' and '.join(said)} differ; keep one of them")
    return next(iter(said.values()), "")


def _call(row: Any, where: str, index: int) -> ToolCall:
    function = _field(row, "function", dict, where=where)
    name = _field(function, "name", str, where=f"{where}.function")
    return ToolCall(call_id=_text_id(row, "id", f"call_{index}"), name=name, arguments=_arguments(function))


def _arguments(function: dict[str, Any]) -> Any:
    """The wire format holds the arguments as a JSON string, templates want the object: both are read. A call of a tool
    that takes none may have an empty string, or nothing. What is no object stays the text that it is.

    >>> _arguments({"arguments": '{"x": 1}'}), _arguments({"arguments": '{"x": 1, "x": 2}'})
    ({'x': 1}, '{"x": 1, "x": 2}')
    """
    given = function.get("arguments")
    given = {} if given is None or given == "" else given
    if isinstance(given, str):
        with suppress(ValueError, RecursionError):
            decoded = _decoded(given)
            return decoded if isinstance(decoded, dict) else given
    return given if isinstance(given, dict | str) else json.dumps(given, ensure_ascii=False)


def _tool(row: Any, where: str) -> ToolSpec:
    function = _field(row, "function", dict, row, where=where)
    where = where if function is row else f"{where}.function"
    return ToolSpec(
        name=_field(function, "name", str, where=where),
        description=_field(function, "description", str, "", where=where),
        parameters=_field(function, "parameters", dict, {}, where=where) or {"type": "object", "properties": {}},
    )


def _field(row: Any, key: str, kind: type[T], default: T | None = None, *, where: str = "") -> T:
    """A field of a decoded object; without a default it must be there.

    >>> _field({"train": None}, "train", bool, True)
    True
    """
    if not isinstance(row, dict):
        raise ValueError(f"{where or 'the row'} must be an object, not {_word(row)}")
    name = f"{where}.{key}" if where else key
    value = row.get(key)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"no {name}")
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be {_KIND_WORDS[kind]}, not {_word(value)}")
    return value


def _text_id(row: dict[str, Any], key: str, default: str) -> str:
    """An id as text; many files number their rows."""
    value = row.get(key)
    return default if value is None else str(value)


def _word(value: Any) -> str:
    return _KIND_WORDS.get(type(value), "null" if value is None else f"the number {value}")
