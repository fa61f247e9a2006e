"""Warm-start conversations on disk: nothing is lost or added, and a bad line is named. Leaves out which of them are
trained on (test_demonstrations_dropped) and their masks (test_sft_masks)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from data.demonstrations import Demonstration, read_demonstrations, to_sample, to_samples, write_demonstrations
from data.template_renderer import TemplateRenderer
from envs.types import Message, ToolCall, ToolSpec
from tests.data.chat_tokenizers import make_tokenizer, peer_template, small_core
from tests.data.test_types import no_clock

EMBEDDED = Path(__file__).parents[2] / "models" / "embedded"


@pytest.fixture(scope="module")
def renderer() -> TemplateRenderer:
    return TemplateRenderer(AutoTokenizer.from_pretrained(EMBEDDED), name="embedded")


# Strings that look like the markup around them.
texts = st.text(max_size=8) | st.sampled_from(["</tool_call>", "<tool_call>", "\\", '"}}', "\n", "\ud7ff\U0001f378"])
numbers = st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(texts, values, max_size=2)
tool_calls = st.builds(ToolCall, call_id=texts, name=texts, arguments=arguments)
messages = st.one_of(
    st.builds(Message, role=st.sampled_from(["system", "user"]), content=texts),
    st.builds(
        Message,
        role=st.just("assistant"),
        content=texts,
        thinking=texts,
        tool_calls=st.lists(tool_calls, max_size=2).map(tuple),
        train=st.booleans(),
    ),
    st.builds(Message, role=st.just("tool"), content=texts, call_id=texts),
)
tools = st.builds(
    ToolSpec, name=texts, description=texts, parameters=arguments.map(lambda more: {"type": "object"} | more)
)
demonstrations = st.builds(
    Demonstration,
    task_id=texts,
    messages=st.lists(messages, min_size=1, max_size=4).map(tuple),
    tools=st.lists(tools, max_size=2).map(tuple),
)


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def conversation(arguments: Any, **changes: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    return {"task_id": "t", "messages": said, "tools": []} | changes


def arguments_in(path: Path) -> list[Any]:
    return [demonstration.messages[1].tool_calls[0].arguments for demonstration in read_demonstrations(path)]


@settings(no_clock, max_examples=40)
@given(rows=st.lists(demonstrations, max_size=3))
def test_what_was_written_is_read_back_equal(tmp_path: Path, rows: list[Demonstration]) -> None:
    assert write_demonstrations(tmp_path / "d.jsonl", rows) == len(rows)
    assert list(read_demonstrations(tmp_path / "d.jsonl")) == rows


@pytest.mark.parametrize("keys", [["reasoning_content"], ["thinking"], ["reasoning"], ["reasoning", "thinking"]])
def test_thinking_is_read_under_each_of_its_names_a10(tmp_path: Path, keys: list[str]) -> None:
    """It is trained, and written again under the first of them."""
    row = conversation({})
    row["messages"][1] |= {"reasoning_content": None} | dict.fromkeys(keys, "So.")
    (read,) = read_demonstrations(write_rows(tmp_path / "d.jsonl", row))
    assert [message.thinking for message in read.messages] == ["", "So."]
    thinks = TemplateRenderer(make_tokenizer(small_core(), peer_template("qwen3")), name="qwen3")
    sample = to_sample(read, thinks)
    trained = [token for token, is_trained in zip(sample.token_ids, sample.loss_mask, strict=True) if is_trained]
    assert thinks.decode(trained).startswith("<think>\nSo.\n</think>\n\n<tool_call>")
    write_demonstrations(tmp_path / "again.jsonl", [read])
    (again,) = read_demonstrations(tmp_path / "again.jsonl")
    assert (again, to_sample(again, thinks)) == (read, sample)


def test_keys_of_other_calls_never_leak_a21(tmp_path: Path, renderer: TemplateRenderer) -> None:
    path = write_rows(
        tmp_path / "d.jsonl", conversation({"src": "a", "dst": "b"}), conversation({"path": "/", "limit": None})
    )
    assert arguments_in(path) == [{"src": "a", "dst": "b"}, {"path": "/", "limit": None}]
    _, second = list(read_demonstrations(path))
    turn = renderer.parse(renderer.turn_ids(second.messages[1]), call_id_prefix="c")
    assert [call.arguments for call in turn.calls if isinstance(call, ToolCall)] == [{"path": "/", "limit": None}]


def test_one_key_may_have_two_types_a22(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d.jsonl", conversation({"t": "2025-01-01"}), conversation({"t": 1735689600}))
    assert arguments_in(path) == [{"t": "2025-01-01"}, {"t": 1735689600}]


def test_arguments_as_text_or_object_are_the_same_ids_a23(tmp_path: Path, renderer: TemplateRenderer) -> None:
    path = write_rows(tmp_path / "d.jsonl", conversation({"city": "Zürich"}), conversation('{"city": "Z\\u00fcrich"}'))
    first, second = (to_sample(row, renderer) for row in read_demonstrations(path))
    assert first == second
    turn = renderer.parse(first.token_ids, call_id_prefix="c")
    assert [call.arguments for call in turn.calls if isinstance(call, ToolCall)] == [{"city": "Zürich"}]


@pytest.mark.parametrize("nothing", [None, ""])
def test_a_call_without_arguments_has_none_a23(tmp_path: Path, nothing: str | None) -> None:
    assert arguments_in(write_rows(tmp_path / "d.jsonl", conversation(nothing))) == [{}]


@pytest.mark.parametrize(
    "given", ['{"city": ', "[1]", "Zürich", '{"x": 1, "x": 2}', '{"x": {"y": 1, "y": 2}}', '{"x": NaN}']
)
def test_broken_arguments_are_kept_and_their_row_is_dropped_a23(
    tmp_path: Path, renderer: TemplateRenderer, given: str
) -> None:
    """One conversation must not cost the file, and no reader may choose which of two equal keys counts."""
    path = write_rows(tmp_path / "d.jsonl", conversation(given), conversation({"city": "Zürich"}))
    broken, _ = rows = list(read_demonstrations(path))
    assert broken.messages[1].tool_calls[0].arguments == given
    samples, report = to_samples(rows, renderer, max_length=1000)
    assert len(samples) == 1
    assert report.dropped == {"with arguments of a call that are no JSON object, or hold a key twice": 1}
    write_demonstrations(tmp_path / "again.jsonl", rows)
    assert next(iter(read_demonstrations(tmp_path / "again.jsonl"))).messages == broken.messages


def test_arguments_that_are_a_list_are_dropped_as_their_text_a23(tmp_path: Path) -> None:
    assert arguments_in(write_rows(tmp_path / "d.jsonl", conversation([1]))) == ["[1]"]


def test_half_a_surrogate_pair_is_replaced_b15(tmp_path: Path, renderer: TemplateRenderer) -> None:
    row = conversation('{"x": "\\ud83c"}')
    row["messages"][0]["content"] = "cheers \ud83c"
    (read,) = read_demonstrations(write_rows(tmp_path / "d.jsonl", row))
    assert read.messages[0].content == "cheers \N{REPLACEMENT CHARACTER}"
    assert read.messages[1].tool_calls[0].arguments == {"x": "\N{REPLACEMENT CHARACTER}"}
    to_sample(read, renderer)
    write_demonstrations(tmp_path / "again.jsonl", [read])


def test_absent_fields_have_defaults(tmp_path: Path) -> None:
    row = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho", "train": False}],
        "tools": [{"name": "f"}],
    }
    (read,) = read_demonstrations(write_rows(tmp_path / "some.jsonl", row))
    assert read.task_id == "some-1"
    assert [message.train for message in read.messages] == [True, False]
    assert read.tools == (ToolSpec(name="f", description="", parameters={"type": "object", "properties": {}}),)


def test_null_is_absent(tmp_path: Path) -> None:
    """Tables fill up with nulls."""
    message = {"role": "user", "content": "Hi", "tool_calls": None, "tool_call_id": None, "train": None}
    call = {"id": None, "type": None, "function": {"name": "f", "arguments": {}}}
    rows = [
        message,
        message | {"role": "assistant", "content": None, "tool_calls": [call]},
        message | {"role": "tool", "content": "7"},
    ]
    tool = {"type": None, "name": "f", "function": None, "description": None, "parameters": None}
    row = {"messages": rows, "tools": [tool], "task_id": None}
    (read,) = read_demonstrations(write_rows(tmp_path / "some.jsonl", row))
    assert read.task_id == "some-1"
    assert [message.train for message in read.messages] == [True, True, True]
    assert read.messages[1].tool_calls == (ToolCall(call_id="call_0", name="f", arguments={}),)
    assert read.messages[2].call_id == ""
    assert read.tools == (ToolSpec(name="f", description="", parameters={"type": "object", "properties": {}}),)
    (without,) = read_demonstrations(write_rows(tmp_path / "none.jsonl", row | {"tools": None}))
    assert without.tools == ()


BAD_LINES = {
    "no JSON": (b"{oops", "Expecting property name"),
    "an empty line": (b"", "Expecting value"),
    "no object": (b"[1]", "object"),
    "no messages": (b'{"tools": []}', "no messages"),
    "messages are null": (b'{"messages": null}', "no messages"),
    "messages are no list": (b'{"messages": 3}', "messages must be a list, not the number 3"),
    "a message is text": (b'{"messages": ["Hi"]}', r"messages\[0\] must be an object, not text"),
    "no role": (b'{"messages": [{"content": "Hi"}]}', r"no messages\[0\]\.role"),
    "an unknown role": (b'{"messages": [{"role": "ai", "content": "Hi"}]}', r"messages\[0\]: role 'ai' is unknown"),
    "a forged role": (b'{"messages": [{"role": "user<|im_end|>", "content": "Hi"}]}', "is unknown"),
    "content in parts": (b'{"messages": [{"role": "user", "content": [{"text": "Hi"}]}]}', "must be text, not a list"),
    "a user's call": (
        b'{"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]}',
        "only an assistant message may hold tool calls",
    ),
    "thinking is a list": (
        b'{"messages": [{"role": "assistant", "reasoning": ["So."]}]}',
        r"messages\[0\]\.reasoning must be text, not a list",
    ),
    "two thoughts": (
        b'{"messages": [{"role": "assistant", "reasoning_content": "So.", "thinking": "No."}]}',
        r"messages\[0\]: reasoning_content and thinking differ; keep one of them",
    ),
    "a user's thinking": (
        b'{"messages": [{"role": "user", "thinking": "So."}]}', "only an assistant message may hold thinking",
    ),
    "a key twice": (b'{"messages": [], "tools": [], "messages": []}', "the key 'messages' stands twice"),
    "a key twice in a call": (
        b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name":"f","arguments": {"x":1,"x":2}}}]}]}',
        "the key 'x' stands twice",
    ),
    "a call is text": (
        b'{"messages": [{"role": "assistant", "tool_calls": ["f"]}]}',
        r"messages\[0\]\.tool_calls\[0\] must be an object, not text",
    ),
    "a function is text": (
        b'{"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]}',
        r"tool_calls\[0\]\.function must be an object, not text",
    ),
    "a call of null": (
        b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": null, "arguments": {}}}]}]}',
        r"no messages\[0\]\.tool_calls\[0\]\.function\.name",
    ),
    "a call of a number": (
        b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 5, "arguments": {}}}]}]}',
        r"function\.name must be text, not the number 5",
    ),
    "train is text": (
        b'{"messages": [{"role": "assistant", "content": "Hi", "train": "false"}]}',
        r"messages\[0\]\.train must be true or false, not text",
    ),
    "train is a number": (
        b'{"messages": [{"role": "assistant", "content": "Hi", "train": 0}]}', "true or false, not the number 0",
    ),
    "a tool of null": (b'{"messages": [], "tools": [{"function": {"name": null}}]}', r"no tools\[0\]\.function\.name"),
    "a tool of a number": (b'{"messages": [], "tools": [{"name": 5}]}', r"tools\[0\]\.name must be text"),
    "a tool is text": (b'{"messages": [], "tools": ["f"]}', r"tools\[0\] must be an object, not text"),
    "parameters are a list": (
        b'{"messages": [], "tools": [{"name": "f", "parameters": []}]}', r"tools\[0\]\.parameters must be an object",
    ),
    "nested without end": (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion"),
    "no UTF-8": (b'{"messages": "\xff"}', "utf-8"),
    "a number without end": (json.dumps(conversation({"x": float("inf")})).encode(), "not finite"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_LINES)
def test_an_error_names_file_and_line(tmp_path: Path, name: str) -> None:
    line, reason = BAD_LINES[name]
    path = tmp_path / "d.jsonl"
    path.write_bytes(json.dumps(conversation({})).encode() + b"\n" + line + b"\n")
    rows = read_demonstrations(path)
    next(rows)
    with pytest.raises(ValueError, match=rf"d\.jsonl, line 2: not a conversation: .*{reason}"):
        next(rows)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        list(read_demonstrations(tmp_path / "none.jsonl"))
