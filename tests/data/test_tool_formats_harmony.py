"""Harmony, message by message: what is a call, what is thinking, what is the answer."""

from __future__ import annotations

import pytest

from data.tool_formats.base import CallError, ParsedTurn
from data.tool_formats.detect import tool_format
from data.types import FinishReason
from envs.types import ToolCall, ToolSpec

F = ToolSpec(name="f", description="", parameters={"type": "object", "properties": {"x": {"type": "string"}}})
CALL = ToolCall(call_id="c_0", name="f", arguments={"x": "a"})
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


def parse(text: str, finish_reason: FinishReason = "stop") -> ParsedTurn:
    return tool_format("harmony").parse(text, call_id_prefix="c", finish_reason=finish_reason, tools=[F])


@pytest.mark.parametrize(
    "header",
    [
        " to=functions.f<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.f<|message|>",
        "<|channel|>analysis to=functions.f code<|message|>",
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
    ],
)
@pytest.mark.parametrize("stop", ["", "<|call|>"])
def test_what_is_addressed_to_a_function_is_a_call(header: str, stop: str) -> None:
    """Its stop token may be taken off; and the prompt may have written the beginning of the header."""
    assert parse(f'{header}{{"x": "a"}}{stop}') == ParsedTurn(content="", calls=(CALL,))


def test_thinking_is_the_analysis_and_what_is_said_on_the_way() -> None:
    said = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    turn = parse(f'{THOUGHT}{said} to=functions.f<|channel|>commentary json<|message|>{{"x": "a"}}')
    assert turn == ParsedTurn(content="", calls=(CALL,), thinking="Hm.\nI look.")


@pytest.mark.parametrize("header", ["<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>"])
def test_the_final_message_is_the_content(header: str) -> None:
    assert parse(f"{THOUGHT}{header}It is 12.") == ParsedTurn(content="It is 12.", calls=(), thinking="Hm.")
    assert parse(f"{header}It is 12.") == parse("It is 12.") == ParsedTurn(content="It is 12.", calls=())


def test_a_call_that_is_only_considered_is_none() -> None:
    turn = parse("<|channel|>analysis<|message|>to=functions.f<|channel|>commentary json<|message|>{}<|call|>")
    assert turn.calls == ()
    assert turn.thinking_open


def test_a_call_without_arguments_is_one_b02() -> None:
    (call,) = parse("<|channel|>commentary to=functions.f<|message|><|call|>").calls
    assert call == ToolCall(call_id="c_0", name="f", arguments={})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<|channel|>commentary to=f<|message|>{"x": "<|start|>assistant to=functions.f"}', "not to 'f'"),
        ("<|channel|>commentary to=python<|message|>print(1)", "not to 'python'"),
        (' to=functions.f{"x": "a"}', "<|message|> must stand between"),
        ('<|channel|>commentary to=functions.f<|message|>{"x": 1}{"x": 2}', "<|call|> must follow"),
        ('<|channel|>commentary to=functions.f<|message|>"{}"', "must be an object, not a string"),
        ('<|channel|>commentary to=functions.f<|message|>{"x": 1, "x": 2}', "stands twice"),
    ],
)
def test_what_cannot_be_read_is_answered_b03(text: str, reason: str) -> None:
    (error,) = parse(text).calls
    assert isinstance(error, CallError)
    assert reason in error.text


@pytest.mark.parametrize(
    "text",
    [
        "<|channel|>commentary to=functions.f",
        " to=functions.f",
        ' to=functions.f<|channel|>commentary json<|message|>{"x": "a',
        ' to=functions.f<|channel|>commentary json<|message|>{"x": "a"}',
    ],
)
def test_a_call_that_was_cut_is_left_out(text: str) -> None:
    """Until `<|call|>` it was not sent."""
    assert parse(f"{THOUGHT}{text}", "length") == ParsedTurn(content="", calls=(), thinking="Hm.")
