"""Warm-start conversations: reading them, and turning them into SFT rows in which only the demonstration's own
assistant turns are trained.

A file is JSONL; each line has `messages` (chat-completions form; an assistant message with `"train": false` is
context only), `tools` (chat-completions form) and optionally `task_id`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.chat import Renderer
from data.jsonl import plain_json
from data.rows import SampleBuilder
from data.types import Segment, Source, TrainingSample
from envs.types import Message, ToolCall, ToolSpec


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

    def line(self) -> str:
        dropped = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items()) or "none"
        tokens = ", ".join(f"{count} {source.value}" for source, count in self.tokens.items())
        return f"{self.kept} rows kept, dropped: {dropped}; tokens: {tokens}; {self.trained_tokens} trained"


def to_sample(demonstration: Demonstration, renderer: Renderer) -> TrainingSample:
    """The SFT row of a conversation; ids and boundaries are those that a rollout of it would have.

    Raises:
        ValueError: the conversation has no assistant turn.
    """
    messages = demonstration.messages
    assistant = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not assistant:
        raise ValueError(f"{demonstration.task_id}: the conversation has no assistant turn")
    builder = SampleBuilder(demonstration.task_id)
    for segment in renderer.opening(messages[: assistant[0]], demonstration.tools):
        builder.add_context(segment)
    for index, following in zip(assistant, [*assistant[1:], len(messages)], strict=True):
        turn = Segment(source=Source.TARGET, token_ids=renderer.turn_ids(messages[index]))
        if messages[index].train:
            builder.add_target(turn)
        else:
            builder.add_context(turn)
        # What follows the last assistant turn would train nothing.
        if following < len(messages):
            for segment in renderer.bridge(messages[index + 1 : following], "stop"):
                builder.add_context(segment)
    return builder.build()


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
        sample = to_sample(demonstration, renderer)
        if len(sample) > max_length:
            report.dropped[f"longer than {max_length} tokens"] += 1
        elif not any(sample.loss_mask):
            report.dropped["without a trained turn"] += 1
        else:
            samples.append(sample)
            report.kept += 1
            report.tokens.update(sample.source)
            report.trained_tokens += sum(sample.loss_mask)
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
        ValueError: a line cannot be read; the message names file, line and what is wrong.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = plain_json(json.loads(line))
                yield Demonstration(
                    task_id=str(row.get("task_id", f"{path.stem}-{number}")),
                    messages=tuple(_message(message) for message in row["messages"]),
                    tools=tuple(_tool(tool) for tool in row.get("tools") or ()),
                )
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                reason = f"no {error}" if isinstance(error, KeyError) else str(error)
                raise ValueError(f"{path}, line {number}: not a conversation: {reason}") from error


def _message_row(message: Message) -> dict[str, Any]:
    return message.as_openai() | ({} if message.train else {"train": False})


def _message(row: Mapping[str, Any]) -> Message:
    content, calls = row.get("content") or "", row.get("tool_calls") or ()
    if not isinstance(content, str):
        raise ValueError(f"content must be text, not {type(content).__name__}")
    return Message(
        role=row["role"],
        content=content,
        tool_calls=tuple(_call(call, index) for index, call in enumerate(calls)),
        call_id=str(row.get("tool_call_id", "")) if row["role"] == "tool" else None,
        train=bool(row.get("train", True)),
    )


def _call(row: Mapping[str, Any], index: int) -> ToolCall:
    function = row["function"]
    arguments = function["arguments"]
    # The wire format holds the arguments as a JSON string, templates want the object: both are accepted.
    if isinstance(arguments, str):
        arguments = plain_json(json.loads(arguments))
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments of call {function['name']!r} are not an object")
    return ToolCall(call_id=str(row.get("id", f"call_{index}")), name=function["name"], arguments=arguments)


def _tool(row: Mapping[str, Any]) -> ToolSpec:
    function = row.get("function", row)
    return ToolSpec(
        name=function["name"],
        description=function.get("description", ""),
        parameters=function.get("parameters") or {"type": "object", "properties": {}},
    )
