"""The formats whose calls are JSON: Hermes, Llama 3 and Mistral. What they share, and what each has of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from data.tool_formats.base import CallError, ParsedTurn
from data.tool_formats.detect import tool_format
from data.types import FinishReason
from envs.types import ToolCall, ToolSpec
from tests.contracts.tool_formats import as_pairs

FORMS: dict[str, tuple[str, Callable[[str], str]]] = {
    "hermes": ("hermes", lambda body: f"<tool_call>\n{body}\n</tool_call>"),
    "llama3_json": ("llama3_json", lambda body: f"<|python_tag|>{body.replace('arguments', 'parameters')}"),
    "mistral": ("mistral", lambda body: f"[TOOL_CALLS] [{body}]"),
}


def parse(
    name: str, text: str, *, finish_reason: FinishReason = "stop", tools: tuple[ToolSpec, ...] = ()
) -> ParsedTurn:
    return tool_format(name).parse(text, call_id_prefix="c", finish_reason=finish_reason, tools=tools)


@pytest.fixture(params=FORMS)
def read(request: pytest.FixtureRequest) -> Callable[[str], ToolCall | CallError]:
    """The one call that a format reads out of a body of JSON."""
    name, write = FORMS[request.param]

    def one(body: str) -> ToolCall | CallError:
        (call,) = parse(name, write(body)).calls
        return call

    return one


Read = Callable[[str], ToolCall | CallError]


def error(read: Read, body: str) -> str:
    call = read(body)
    assert isinstance(call, CallError), call
    return call.text


def arguments(read: Read, body: str) -> dict[str, Any]:
    call = read(body)
    assert isinstance(call, ToolCall), call
    return dict(call.arguments)


def test_arguments_written_as_a_string_are_refused_b02(read: Read) -> None:
    body = '{"name": "ls", "arguments": "{\\"path\\": \\"/srv\\"}"}'
    assert "' must be an object, not a string" in error(read, body)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"name": null, "arguments": {}}', "'name' must be a string"),
        ('{"arguments": {}}', "'name' must be a string"),
        ('{"name": 3, "arguments": {}}', "'name' must be a string"),
        ('{"name": "f", "arguments": [1]}', "must be an object, not a list"),
        ('{"name": "f", "arguments": null}', "must be an object, not null"),
        ('{"name": "f", "arguments": 1}', "must be an object, not a number"),
        ('["f", {}]', "a call is a JSON object, not a list"),
        ('"f"', "a call is a JSON object, not a string"),
        ("f(x=1)", "Expecting value"),
        ("{'name': 'f'}", "Expecting property name"),
        ('{"name": "f", "arguments": {"x": 1}', "Expecting ',' delimiter"),
        ('{"name": "f", "arguments": {"x": "a\nb"}}', "Invalid control character at '\\nb\""),
        ('{"name": "f", "arguments": {"x": NaN}}', "a number is not finite"),
        ('{"name": "f", "arguments": {"x": -Infinity}}', "a number is not finite"),
        ('{"name": "f", "arguments": {"x": 1e999}}', "a number is not finite"),
        ('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", "a number is too long"),
        ('{"name": "f", "arguments": {"x": ' + "[" * 70 + "]" * 70 + "}}", "nested too deeply"),
        ('{"name": "f", "arguments": {"x": ' + "[" * 10_000 + "]" * 10_000 + "}}", "nested too deeply"),
        ('{"name": "f", "arguments": {"x": 1, "x": 2}}', "the key 'x' stands twice"),
        ('{"name": "f", "arguments": {"\\ud83c": 1, "\\ud83d": 2}}', "stands twice"),
        ('{"name": "f", "name": "g", "arguments": {}}', "the key 'name' stands twice"),
        ('{"name": "f", "arguments": {"x": 1, "x": 2}\n', "Expecting ',' delimiter"),
        ('{"name": "f", "arguments": {"x": 1, "x": ' + "[" * 100_000, "nested too deeply"),
        ('{"name": "f", "arguments": {"x": 1, "x": 2}, "n": ' + "9" * 5_000 + "}", "a number is too long"),
        ('{"name": "f", "arguments": {}, "path": "/srv"}', "unknown key 'path'"),
        ('{"name": "f", "args": {"path": "/srv"}}', "unknown key 'args'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_malformed_call_says_what_is_wrong_b16(read: Read, body: str, reason: str) -> None:
    assert reason in error(read, body)


def test_what_the_form_allows_b16(read: Read) -> None:
    assert read('{"name": "f"}') == ToolCall(call_id="c_0", name="f", arguments={})
    assert read('{"type": "function", "id": "7", "name": " F ", "arguments": {}}') == ToolCall(
        call_id="c_0", name=" F ", arguments={}
    )
    assert arguments(read, '{"name": "f", "arguments": {"x": ' + "[" * 60 + "]" * 60 + "}}")


def test_an_emoji_in_two_escapes_is_one_character_b15(read: Read) -> None:
    body = '{"name":"say","arguments":{"text":"\\ud83c\\udf78 and \\ud83c"}}'
    assert arguments(read, body) == {"text": "\U0001f378 and \N{REPLACEMENT CHARACTER}"}


# Hermes


def test_a_block_that_is_not_closed_leaves_the_next_one_whole() -> None:
    good = '<tool_call>{"name": "b"}</tool_call>'
    for first in ('{"name": "a"}', "{oops", '{"name": "a"} and more', '{"name": "a", "arguments": {"x": "'):
        failed, call = parse("hermes", f"<tool_call>\n{first}\n{good}").calls
        assert isinstance(failed, CallError)
        assert call == ToolCall(call_id="c_1", name="b", arguments={})


@pytest.mark.parametrize(
    "text", ["<tool_call>", '<tool_call>{"name": ', '<tool_call>{"name": "f"}', "<tool_call>{}</tool_"]
)
def test_a_block_at_the_end_that_is_not_closed_is_an_error_unless_the_turn_was_cut(text: str) -> None:
    assert isinstance(parse("hermes", f"So.\n{text}").calls[0], CallError)
    assert parse("hermes", f"So.\n{text}", finish_reason="length") == ParsedTurn(content="So.", calls=())


def test_a_marker_in_a_string_before_the_fault_does_not_end_the_block() -> None:
    turn = parse("hermes", '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>", }}</tool_call> So.')
    assert turn.content == "So."
    assert [type(call) for call in turn.calls] == [CallError]


def test_parameters_are_not_run_as_a_call_without_arguments() -> None:
    (call,) = parse("hermes", '<tool_call>{"name": "ls", "parameters": {"path": "/srv"}}</tool_call>').calls
    assert isinstance(call, CallError)
    assert "unknown key 'parameters'" in call.text
    assert call.text.endswith('write <tool_call>{"name": "TOOL", "arguments": {...}}</tool_call>')


# Llama 3


def test_calls_in_a_row_with_any_separator_and_braces_behind_b03() -> None:
    text = (
        '{"name":"a","parameters":{"x":1}};{"name":"b","parameters":{}}\n{"name":"c","parameters":{"q":"}"}} '
        "I used {searchTool} for this"
    )
    turn = parse("llama3_json", text)
    assert as_pairs(turn.calls) == [("a", {"x": 1}), ("b", {}), ("c", {"q": "}"})]
    assert turn.content == "I used {searchTool} for this"


def test_calls_before_and_behind_a_broken_one_are_kept_b03() -> None:
    first, broken, last = (
        '{"name":"a","parameters":{}}',
        '{"name":"b","parameters":{"x":1}',
        '{"name":"c","parameters":{}}',
    )
    for between in (";", "\n", " and "):
        before, failed, behind = parse("llama3_json", between.join((first, broken, last))).calls
        assert (before, behind) == (
            ToolCall(call_id="c_0", name="a", arguments={}),
            ToolCall(call_id="c_2", name="c", arguments={}),
        )
        assert isinstance(failed, CallError)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "age": 3}',
        '{"name": "Bob", age: 3}',
        '{"answer": {"name": "f", "parameters": {}}}',
        '{"text": "{\\"name\\": \\"f\\", \\"parameters\\": {}}"}',
        "{{ x }} {a} {",
    ],
)
def test_other_objects_are_prose(text: str) -> None:
    assert parse("llama3_json", text) == ParsedTurn(content=text, calls=())


def test_a_known_name_and_a_tag_make_a_call_of_what_would_be_prose() -> None:
    tool = ToolSpec(name="now", description="", parameters={})
    assert as_pairs(parse("llama3_json", '{"name": "now"}', tools=(tool,)).calls) == [("now", {})]
    assert as_pairs(parse("llama3_json", '<|python_tag|>{"name": "now"}').calls) == [("now", {})]
    (call,) = parse("llama3_json", '<|python_tag|>brave_search.call(query="x")').calls
    assert isinstance(call, CallError)


def test_arguments_is_understood_and_both_keys_are_not() -> None:
    assert as_pairs(parse("llama3_json", '{"name": "f", "arguments": {"x": 1}}').calls) == [("f", {"x": 1})]
    (call,) = parse("llama3_json", '{"name": "f", "arguments": {}, "parameters": {}}').calls
    assert isinstance(call, CallError)
    assert "not both" in call.text


# Mistral


def test_two_markers_with_a_list_each_b04() -> None:
    text = (
        '[TOOL_CALLS] [{"name":"a","arguments":{"v":[1,2]}}]\n\nand then '
        '[TOOL_CALLS] [{"name":"b","arguments":{"s":"]"}}] Done.'
    )
    turn = parse("mistral", text)
    assert as_pairs(turn.calls) == [("a", {"v": [1, 2]}), ("b", {"s": "]"})]
    assert turn.content.split() == ["and", "then", "Done."]


@pytest.mark.parametrize("between", ["[ARGS]", "[CALL_ID]a1b2c3d4e[ARGS]", "", " "])
def test_the_named_form_with_and_without_its_marks(between: str) -> None:
    text = f'So.[TOOL_CALLS]f{between}{{"x": "[TOOL_CALLS]"}}[TOOL_CALLS]g{between}{{}} Done.'
    turn = parse("mistral", text)
    assert as_pairs(turn.calls) == [("f", {"x": "[TOOL_CALLS]"}), ("g", {})]
    assert turn.content == "So. Done."


def test_calls_of_a_list_that_breaks_off_are_kept() -> None:
    text = '[TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": "b", "argu'
    assert as_pairs(parse("mistral", text, finish_reason="length").calls) == [("a", {})]
    kept, failed = parse("mistral", text).calls
    assert isinstance(kept, ToolCall)
    assert isinstance(failed, CallError)


def test_mistrals_own_thinking_marks() -> None:
    turn = parse("mistral", "[THINK]Hm. [TOOL_CALLS]f[ARGS]{}[/THINK]4")
    assert turn == ParsedTurn(content="4", calls=(), thinking="Hm. [TOOL_CALLS]f[ARGS]{}")


@pytest.mark.parametrize("write", ["{}", " {}\n", "```json\n{}\n```", "<think>Hm.</think>{}", "{};"])
def test_a_name_alone_that_is_the_whole_turn_is_a_call_b16(write: str) -> None:
    """Of Llama 3's, whose calls nothing marks: the environment answers that there is no such tool."""
    tools = (ToolSpec(name="f", description="", parameters={}),)
    for body in ('{"name": "nope"}', '{"type": "function", "id": "1", "name": "nope"}'):
        assert as_pairs(parse("llama3_json", write.format(body), tools=tools).calls) == [("nope", {})]
        assert parse("llama3_json", write.format(body)).calls == (), "without tools it is data"
        assert parse("llama3_json", f"It is {body}", tools=tools).calls == ()
    for answer in ('{"name": null}', '{"name": "Bob", "age": 3}', '[{"name": "Bob"}]', '{"type": "x"}'):
        assert parse("llama3_json", write.format(answer), tools=tools).calls == ()
    assert parse("hermes", write.format('{"name": "nope"}'), tools=tools).calls == (), "another form must name a tool"
