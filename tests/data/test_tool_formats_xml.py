"""Qwen3-Coder's XML, and plain text typed by the tool's schema."""

from __future__ import annotations

from typing import Any

import pytest

from data.tool_formats.base import CallError, ParsedTurn
from data.tool_formats.detect import tool_format
from data.types import FinishReason
from envs.tools import call_error
from envs.types import ToolCall, ToolSpec
from tests.contracts.tool_formats import as_pairs


def spec(**properties: Any) -> ToolSpec:
    place = {"type": "object", "properties": {"zip": {"type": "string"}}}
    return ToolSpec(
        name="f",
        description="",
        parameters={"type": "object", "properties": properties, "$defs": {"Place": place, "Id": {"type": "integer"}}},
    )


def parse(text: str, *tools: ToolSpec, finish_reason: FinishReason = "stop") -> ParsedTurn:
    return tool_format("qwen3_coder").parse(text, call_id_prefix="c", finish_reason=finish_reason, tools=tools)


def only(text: str, *tools: ToolSpec) -> ToolCall:
    (call,) = parse(text, *tools).calls
    assert isinstance(call, ToolCall), call
    return call


def test_a_text_that_looks_like_a_number_stays_a_text_b08() -> None:
    text = (
        "<tool_call>\n<function=f>\n<parameter=zip>\n02134\n</parameter>\n<parameter=tag>true</parameter>\n"
        "<parameter=n>5.0</parameter>\n</function>\n</tool_call>"
    )
    tool = spec(zip={"type": "string"}, tag={"type": "string"}, n={"type": "integer"})
    call = only(text, tool)
    assert call.arguments == {"zip": "02134", "tag": "true", "n": 5}
    assert type(call.arguments["n"]) is int


def test_an_integer_that_is_none_stays_for_the_schema_check_b09() -> None:
    tool = spec(n={"type": "integer"})
    call = only("<tool_call><function=f><parameter=n>2026-01-15</parameter></function></tool_call>", tool)
    assert call.arguments == {"n": "2026-01-15"}
    assert "'2026-01-15' is not of type 'integer' in 'n'" in str(call_error(call, [tool]))


def test_an_empty_tag_is_not_given_unless_it_is_a_text_b14() -> None:
    text = (
        "<function=f><parameter=limit></parameter><parameter=tags>\n\n</parameter><parameter=name></parameter>"
        "<parameter=flag>None</parameter></function>"
    )
    tool = spec(
        limit={"type": "integer"}, tags={"type": "array"}, name={"type": "string"}, flag={"type": ["boolean", "null"]}
    )
    assert only(text, tool).arguments == {"name": "", "flag": None}
    assert only(text, spec(**tool.parameters["properties"] | {"flag": {"type": "boolean"}})).arguments == {"name": ""}
    assert only(text, spec(flag={"type": "string"})).arguments["flag"] == "None"


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, " 5 ", 5),
        ({"type": "integer"}, "9007199254740993.0", 9007199254740993),
        ({"type": "integer"}, "02134", "02134"),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "integer"}, "1e999", "1e999"),
        ({"type": "integer"}, "1e22", 10**22),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "integer"}, "true", "true"),
        ({"type": "number"}, "5.0", 5.0),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "string"}, "  a ", "  a "),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "", ""),
        ({"type": ["integer", "null"]}, "None", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5.0", 5),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "02134", "02134"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12", 12),
        ({"oneOf": [{"$ref": "#/$defs/Id"}, {"type": "null"}]}, "7", 7),
        ({"$ref": "#/$defs/Place"}, '{"zip": "02134"}', {"zip": "02134"}),
        ({"$ref": "#/$defs/Nothing"}, "7", "7"),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"type": "integer", "nullable": True}, "5.0", 5),
        ({"$ref": "#/$defs/Id", "nullable": True}, "None", None),
        ({"type": "array", "nullable": True}, "null", None),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "string", "nullable": True}, "", ""),
        ({"type": "string", "nullable": False}, "null", "null"),
        ({"nullable": True}, "null", "null"),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"const": True}, "true", True),
        ({"type": "array"}, '[1, "</parameter></function>"]', [1, "</parameter></function>"]),
        ({"type": "array"}, "['a']", "['a']"),
        ({"type": "object"}, "[1]", "[1]"),
        ({"type": "object"}, '{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
        ({}, "5", "5"),
        (True, "{}", "{}"),
    ],
    ids=str,
)
def test_values_have_the_type_of_their_schema_b08(schema: Any, text: str, value: Any) -> None:
    call = only(f"<tool_call><function=f><parameter=x>{text}</parameter></function></tool_call>", spec(x=schema))
    assert call.arguments == {"x": value}
    assert type(call.arguments["x"]) is type(value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "nullable": True},
        {"type": ["integer", "null"]},
        {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        {"oneOf": [{"$ref": "#/$defs/Id"}, {"const": None}]},
    ],
    ids=str,
)
@pytest.mark.parametrize("text", ["null", "None", "", "\n\n"])
def test_nothing_is_null_where_the_schema_requires_a_value_that_may_be_null_b08_b14(schema: Any, text: str) -> None:
    tool = spec(x=schema)
    required = ToolSpec(name="f", description="", parameters={**tool.parameters, "required": ["x"]})
    call = f"<tool_call><function=f><parameter=x>{text}</parameter></function></tool_call>"
    assert only(call, required).arguments == {"x": None}
    assert only(call, tool).arguments == ({"x": None} if text.strip() else {})


def test_a_schema_that_refers_to_itself_ends() -> None:
    tool = ToolSpec(name="f", description="", parameters={"properties": {"x": {"$ref": "#/properties/x"}}})
    assert only("<function=f><parameter=x>5</parameter></function>", tool).arguments == {"x": "5"}


def test_one_line_break_at_either_end_belongs_to_the_tags() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=x>\n\n  indented\n\n</parameter>\n</function>\n</tool_call>"
    assert only(text).arguments == {"x": "\n  indented\n"}


def test_tags_inside_a_text_end_nothing() -> None:
    value = "a </parameter> b </function> c </tool_call> d <tool_call> e <parameter=y> f"
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call> Done."
    turn = parse(text)
    assert as_pairs(turn.calls) == [("f", {"x": value})]
    assert turn.content == "Done."


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("<function=f>\n<parameter=x>1\n<parameter=y>2</parameter>\n</function>", "</parameter> must follow"),
        ("<function=f><parameter=x>1</parameter>", "</function> must stand where"),
        ("<function=f><parameter=x>1</parameter><parameter=x>2</parameter></function>", "stands twice"),
        ("<function=f>x=1</function>", "must stand where 'x=1</function>"),
        ('{"name": "f", "arguments": {}}', "<function=TOOL> must come first"),
        ("<function=f", "<function=TOOL> must come first"),
        ("<function=f></function> and more", "</tool_call> must follow </function>"),
        ("", "<function=TOOL> must come first"),
    ],
)
def test_a_malformed_call_says_what_is_wrong_and_the_next_one_is_whole(body: str, reason: str) -> None:
    good = "<tool_call>\n<function=g>\n<parameter=y>2</parameter>\n</function>\n</tool_call>"
    failed, call = parse(f"<tool_call>\n{body}\n</tool_call>\n{good}").calls
    assert isinstance(failed, CallError)
    assert reason in failed.text
    assert call == ToolCall(call_id="c_1", name="g", arguments={"y": "2"})


def test_several_functions_in_one_block_and_a_function_alone() -> None:
    both = "<function=f>\n<parameter=x>1</parameter>\n</function>\n<function=g>\n</function>"
    for text in (f"<tool_call>\n{both}\n</tool_call>", both):
        assert as_pairs(parse(text).calls) == [("f", {"x": "1"}), ("g", {})]


def test_a_call_that_a_value_quotes_never_runs() -> None:
    text = (
        "<tool_call>\n<function=write>\n<parameter=text>\nExample:\n<tool_call>\n<function=rm>\n<parameter=path>\n/srv\n"
        "</parameter>\n</function>\n</tool_call>\n</parameter>\n</function>\n</tool_call>\nDone."
    )
    tools = [ToolSpec(name=name, description="", parameters={"type": "object"}) for name in ("write", "rm")]
    turn = tool_format("qwen3_coder").parse(text, call_id_prefix="c", finish_reason="stop", tools=tools)
    (call,) = turn.calls
    assert isinstance(call, CallError)
    assert "holds a tool call" in call.text
    assert turn.content == "Done."


@pytest.mark.parametrize(("opened", "closed"), [("<tool_call>\n", "\n</tool_call>"), ("", "")])
def test_a_call_that_a_value_of_a_broken_call_quotes_never_runs(opened: str, closed: str) -> None:
    quoted = f"{opened}<function=h></function>{closed}"
    broken = f"{opened}<function=f>junk<parameter=x>as in {quoted}</parameter></function>{closed}"
    (told,) = parse(broken).calls
    assert isinstance(told, CallError)
    following = "<tool_call><function=g><parameter=y>1</parameter></function></tool_call>"
    assert [name for name, _ in as_pairs(parse(f"{broken}\n{following}").calls[1:])] == ["g"]


def test_an_opener_behind_the_last_closer_raises_nothing() -> None:
    text = "<function=f><parameter=x>a <function=h> \n<parameter=y>2</parameter></function>"
    assert [type(call) for call in parse(text).calls] == [CallError]


def test_a_parameter_that_was_not_closed_leaves_the_next_call_alone() -> None:
    text = (
        "<tool_call>\n<function=f>\n<parameter=x>\n1\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=g>\n</function>\n</tool_call>"
    )
    turn = tool_format("qwen3_coder").parse(text, call_id_prefix="c", finish_reason="stop")
    assert [type(call).__name__ for call in turn.calls] == ["CallError", "ToolCall"]


@pytest.mark.parametrize(
    "following",
    [
        '<parameter name="n">\n5\n</parameter>',
        "<param=n>\n5\n</parameter>",
        "<n>\n5\n</parameter>",
        "<parameter>n</parameter>",
    ],
)
@pytest.mark.parametrize("value", ["\na\n", "a"])
def test_a_value_that_swallowed_the_next_parameter_is_an_error_b03(value: str, following: str) -> None:
    tool = spec(query={"type": "string"}, n={"type": "integer"})
    text = f"<tool_call>\n<function=f>\n<parameter=query>{value}</parameter>\n{following}\n</function>\n</tool_call>"
    good = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
    error, other = parse(f"{text}\n{good}", tool).calls
    assert isinstance(error, CallError)
    assert isinstance(other, ToolCall)


def test_a_value_may_hold_markup_with_parameters_of_its_own() -> None:
    written = '<job>\n<parameter name="a">1</parameter>\n<parameter name="b">\n2\n</parameter>\n</job>'
    text = f"<tool_call>\n<function=f>\n<parameter=zip>\n{written}\n</parameter>\n</function>\n</tool_call>"
    assert only(text, spec(zip={"type": "string"})).arguments == {"zip": written}
