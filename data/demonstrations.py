"""Warm-start conversations: reading them, and turning them into SFT rows in which only the demonstration's own
assistant turns are trained.

A file is JSONL; each line has `messages` (chat-completions form; an assistant message with `"train": false` is
context only), `tools` (chat-completions form) and optionally `task_id`. A field that is null is read as absent: tables
fill up with nulls.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from data.chat import Renderer
from data.jsonl import plain_json
from data.rows import SampleBuilder
from data.types import Segment, Source, TrainingSample
from envs.types import Message, ToolCall, ToolSpec

T = TypeVar("T")
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

    def line(self) -> str:
        dropped = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items()) or "none"
        tokens = ", ".join(f"{count} {source.value}" for source, count in self.tokens.items())
        forged = f"; {self.forged} control tokens in contents, kept as text" if self.forged else ""
        return f"{self.kept} rows kept, dropped: {dropped}; tokens: {tokens}; {self.trained_tokens} trained{forged}"


def to_sample(demonstration: Demonstration, renderer: Renderer) -> TrainingSample:
    """The SFT row of a conversation; ids and boundaries are those that a rollout of it would have.

    Raises:
        ValueError: the conversation has no assistant turn, or one that the chat template cannot write.
    """
    messages = demonstration.messages
    assistant = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not assistant:
        raise ValueError("it has no assistant turn")
    builder = SampleBuilder(demonstration.task_id)
    stream: list[int] = []
    for segment in renderer.opening(messages[: assistant[0]], demonstration.tools):
        builder.add_context(segment)
        stream += segment.token_ids
    for index, following in zip(assistant, [*assistant[1:], len(messages)], strict=True):
        turn = Segment(source=Source.TARGET, token_ids=renderer.turn_ids(messages[index]))
        stream += turn.token_ids
        if messages[index].train:
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


def why_dropped(demonstration: Demonstration, renderer: Renderer) -> str | None:
    """Why a conversation is not trained on, whatever its length; None: it is."""
    turns = [message for message in demonstration.messages if message.role == "assistant"]
    if not any(turn.train for turn in turns):
        return "without a trained turn"
    if any(turn.train and not turn.content and not turn.tool_calls for turn in turns):
        return "with an empty trained turn"
    if not renderer.several_calls and any(len(turn.tool_calls) > 1 for turn in turns):
        return "with several calls in a turn, which the chat template cannot write"
    # The model would learn to spell `<tool_call>` letter by letter, which calls nothing.
    if any(turn.train and renderer.count_forged(turn.content) for turn in turns):
        return "with a control token as text in a trained turn (calls belong in tool_calls)"
    return None


def to_samples(
    demonstrations: Iterable[Demonstration], renderer: Renderer, *, max_length: int
) -> tuple[list[TrainingSample], DemonstrationReport]:
    """SFT rows of at most `max_length` tokens. Rows are dropped and counted, never cut: a cut conversation
    teaches to stop where its author did not.

    Raises:
        ValueError: no row is left.
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
            raise ValueError(f"conversation {demonstration.task_id}: {error}") from error
        if len(sample) > max_length:
            report.dropped[f"longer than {max_length} tokens"] += 1
        else:
            samples.append(sample)
            report.kept += 1
            report.tokens.update(sample.source)
            report.trained_tokens += sum(sample.loss_mask)
            report.forged += sum(renderer.count_forged(message.content) for message in demonstration.messages)
    if not samples:
        raise ValueError(f"no demonstration is left to train on ({report.line()})")
    return samples, report


def write_demonstrations(path: Path, demonstrations: Iterable[Demonstration]) -> int:
    """Write a file in one move; returns how many rows it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    count = 0
    with temporary.open("w", encoding="utf-8") as file:
        for demonstration in demonstrations:
            count += 1
            rows = [_message_row(message) for message in demonstration.messages]
            tools = [tool.as_openai() for tool in demonstration.tools]
            row = {"task_id": demonstration.task_id, "messages": rows, "tools": tools}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    temporary.replace(path)
    return count


def read_demonstrations(path: Path) -> Iterator[Demonstration]:
    """The conversations of a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line cannot be read; the message names file, line, field and what is wrong.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield _demonstration(plain_json(json.loads(line)), f"{path.stem}-{number}")
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number}: not a conversation: {error}") from error


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
    train = _field(row, "train", bool, True, where=where)
    tool_calls = tuple(_call(call, f"{where}.tool_calls[{index}]", index) for index, call in enumerate(calls))
    call_id = _text_id(row, "tool_call_id", "") if role == "tool" else None
    try:
        return Message(role=role, content=content, tool_calls=tool_calls, call_id=call_id, train=train)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _call(row: Any, where: str, index: int) -> ToolCall:
    function = _field(row, "function", dict, where=where)
    name = _field(function, "name", str, where=f"{where}.function")
    arguments = function.get("arguments")
    # The wire format holds the arguments as a JSON string, templates want the object: both are accepted. A call of a
    # tool that takes none may have an empty string, or nothing.
    if isinstance(arguments, str):
        try:
            function = {"arguments": plain_json(json.loads(arguments or "{}"))}
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}.function.arguments: {error}") from error
    arguments = _field(function, "arguments", dict, {}, where=f"{where}.function")
    return ToolCall(call_id=_text_id(row, "id", f"call_{index}"), name=name, arguments=arguments)


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
