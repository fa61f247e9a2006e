"""Tool calls in text: what is written is read back, and what cannot be read tells the model how to write it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.tool_calls import CLOSE, OPEN, format_calls, parse_turn
from data.tool_formats.base import CallError
from data.types import TokenStream
from envs.types import Message, ToolCall
from rollouts.record import read_trajectories, write_trajectories
from rollouts.types import StopReason, Trajectory, Turn
from tests.data.test_types import no_clock

HOW_TO = 'write {"name": "TOOL", "arguments": {...}}'
# Strings that look like the markup around them.
texts = st.text(max_size=8) | st.sampled_from([CLOSE, OPEN, f'"{CLOSE}"', "\\", '"}}', "\n", "\ud7ff\U0001f378"])
numbers = st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
calls = st.builds(ToolCall, call_id=st.just(""), name=texts, arguments=st.dictionaries(texts, values, max_size=3))


def block(body: str) -> str:
    return f"{OPEN}\n{body}\n{CLOSE}"


def only_call(text: str) -> ToolCall | CallError:
    (call,) = parse_turn(text, call_id_prefix="c").calls
    return call


def error_text(body: str) -> str:
    """The observation for a block that cannot be read."""
    error = only_call(block(body))
    assert isinstance(error, CallError)
    assert error.call_id == "c_0"
    assert error.text.startswith("error: malformed tool call: ")
    assert error.text.endswith(HOW_TO)
    assert "\n" not in error.text
    return error.text


def recorded(call: ToolCall) -> Trajectory:
    turn = Turn(
        index=0, message=Message(role="assistant", tool_calls=(call,)), tool_results=(), generate_s=0.0, env_s=0.0
    )
    return Trajectory(
        trajectory_id="g/0",
        task_id="t",
        group_id="g",
        sibling_index=0,
        streams=(TokenStream(),),
        turns=(turn,),
        stop_reason=StopReason.FINAL_ANSWER,
        reward=0.0,
    )


@settings(no_clock, max_examples=60)
@given(written=st.lists(calls, max_size=3))
def test_what_is_written_is_read_back(written: list[ToolCall]) -> None:
    turn = parse_turn("".join(["So. ", *format_calls(written)]), call_id_prefix="c")
    assert turn.content == "So."
    assert [call.call_id for call in turn.calls] == [f"c_{index}" for index in range(len(written))]
    for read, call in zip(turn.calls, written, strict=True):
        assert isinstance(read, ToolCall)
        assert (read.name, read.arguments) == (call.name, call.arguments)


@no_clock
@given(text=st.lists(texts | st.sampled_from(["{", "}", '{"name": "f", "arguments": {}}', "null"])).map("".join))
def test_any_text_is_read_without_an_exception(text: str) -> None:
    turn = parse_turn(text, call_id_prefix="c")
    assert len(turn.calls) <= text.count(OPEN)
    assert bool(turn.calls) == (OPEN in text), "a block that cannot be read is never dropped"


def test_two_blocks_with_prose_between_b04() -> None:
    first = '{"name": "a", "arguments": {"v": [1, 2]}}'
    second = '{"name": "b", "arguments": {"s": "]}"}}'
    turn = parse_turn(f"First:\n{block(first)}\nand then\n{block(second)}\nDone.", call_id_prefix="c")
    assert turn.calls == (
        ToolCall(call_id="c_0", name="a", arguments={"v": [1, 2]}),
        ToolCall(call_id="c_1", name="b", arguments={"s": "]}"}),
    )
    assert turn.content.split() == ["First:", "and", "then", "Done."]


def test_a_marker_inside_a_string_does_not_end_the_block() -> None:
    call = only_call(block(json.dumps({"name": "f", "arguments": {"x": f"a {CLOSE} b"}})))
    assert isinstance(call, ToolCall)
    assert call.arguments == {"x": f"a {CLOSE} b"}


def test_arguments_in_quotes_are_a_format_error_b02() -> None:
    assert "'arguments' must be an object" in error_text('{"name": "ls", "arguments": "{\\"path\\": \\"/srv\\"}"}')


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"name": null, "arguments": {}}', "'name' must be a string"),
        ('{"arguments": {}}', "'name' must be a string"),
        ('{"name": 3, "arguments": {}}', "'name' must be a string"),
        ('{"name": "f", "arguments": [1]}', "'arguments' must be an object"),
        ('{"name": "f", "arguments": null}', "'arguments' must be an object"),
        ('["f", {}]', "'name' must be a string"),
        ("", "Expecting value"),
        ("f(x=1)", "Expecting value"),
        ("{'name': 'f'}", "Expecting property name"),
        ('{"name": "f", "arguments": {"x": 1}', "Expecting ',' delimiter"),
        ('{"name": "f", "arguments": {}} and more', f"{CLOSE} must follow the JSON object"),
        ('{"name": "f", "arguments": {"x": NaN}}', "a number is not finite"),
        ('{"name": "f", "arguments": {"x": 1e999}}', "a number is not finite"),
        ('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", "a number is too long"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_malformed_call_is_an_observation_b16(body: str, reason: str) -> None:
    assert reason in error_text(body)


def test_missing_arguments_are_none() -> None:
    assert only_call(block('{"name": "f"}')) == ToolCall(call_id="c_0", name="f", arguments={})


@pytest.mark.parametrize("text", [f'{OPEN}{{"name": "f", "arguments": {{}}}}', f"{OPEN}", f'{OPEN}{{"name": '])
def test_a_block_that_is_not_closed_is_an_error(text: str) -> None:
    assert isinstance(only_call(text), CallError)


def test_an_unreadable_block_does_not_take_the_next_one_with_it() -> None:
    turn = parse_turn(block("{oops") + block('{"name": "f", "arguments": {}}'), call_id_prefix="c")
    assert isinstance(turn.calls[0], CallError)
    assert turn.calls[1] == ToolCall(call_id="c_1", name="f", arguments={})


@pytest.mark.parametrize("bare", ['{"name": "f", "arguments": {}}', f"{CLOSE}", "<TOOL_CALL>{}</TOOL_CALL>"])
def test_text_without_a_marker_is_prose_b05(bare: str) -> None:
    turn = parse_turn(bare, call_id_prefix="c")
    assert turn.calls == ()
    assert turn.content == bare


def test_half_a_surrogate_pair_never_stops_a_writer_b15(tmp_path: Path) -> None:
    call = only_call(block('{"name":"say","arguments":{"text":"\\ud83c\\udf78 and \\ud83c","\\udf78":["\\ud83c"]}}'))
    assert isinstance(call, ToolCall)
    assert call.arguments == {"text": "\U0001f378 and \N{REPLACEMENT CHARACTER}", "\ufffd": ["\ufffd"]}
    write_trajectories(tmp_path / "t.jsonl", [recorded(call)])
    assert list(read_trajectories(tmp_path / "t.jsonl")) == [recorded(call)]


@pytest.mark.parametrize("depth", [10, 60, 70, 300, 900, 10_000])
@pytest.mark.parametrize(("start", "end"), ["[]", ('{"x":', "}")])
def test_deep_nesting_is_recorded_or_refused(tmp_path: Path, depth: int, start: str, end: str) -> None:
    """The JSON reader goes deeper than the writers do: what the writers could not write must never become a call."""
    call = only_call(block('{"name": "f", "arguments": {"x": ' + start * depth + "1" + end * depth + "}}"))
    if depth > 64:
        assert isinstance(call, CallError)
        assert "nested too deeply" in call.text
    else:
        assert isinstance(call, ToolCall)
        write_trajectories(tmp_path / "t.jsonl", [recorded(call)])
        assert list(read_trajectories(tmp_path / "t.jsonl")) == [recorded(call)]


def arguments_of(body: str) -> Any:
    call = only_call(block(body))
    assert isinstance(call, ToolCall)
    return call.arguments


@settings(no_clock, max_examples=50)
@given(arguments=st.dictionaries(texts, values, max_size=3))
def test_every_call_that_is_read_can_be_recorded(tmp_path: Path, arguments: dict[str, Any]) -> None:
    read = arguments_of(json.dumps({"name": "f", "arguments": arguments}))
    trajectory = recorded(ToolCall(call_id="c", name="f", arguments=read))
    write_trajectories(tmp_path / "t.jsonl", [trajectory])
    assert list(read_trajectories(tmp_path / "t.jsonl")) == [trajectory]


GOOD = '{"name": "b", "arguments": {}}'


@pytest.mark.parametrize("first", ['{"name": "a", "arguments": {}}', "{oops", '{"name": "a"} and more'])
def test_a_block_that_is_not_closed_leaves_the_next_one_whole(first: str) -> None:
    error, call = parse_turn(f"{OPEN}\n{first}\n{block(GOOD)}", call_id_prefix="c").calls
    assert isinstance(error, CallError)
    assert call == ToolCall(call_id="c_1", name="b", arguments={})


def test_arguments_under_another_key_are_not_run_without_them() -> None:
    assert "unknown key 'parameters'" in error_text('{"name": "ls", "parameters": {"path": "/srv"}}')
    assert only_call(block('{"name": "ls"}')) == ToolCall(call_id="c_0", name="ls", arguments={})
    assert isinstance(only_call(block('{"id": "7", "name": "ls", "arguments": {}}')), ToolCall)
