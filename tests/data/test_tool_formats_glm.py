"""GLM's XML: values between tags, typed by the tool's schema, and what the family's templates write."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from data.template_renderer import TemplateRenderer
from data.tool_formats.base import CallError, ParsedTurn
from data.tool_formats.detect import tool_format
from data.types import FinishReason
from envs.types import Message, ToolCall, ToolSpec
from tests.contracts.tool_formats import FAMILIES, MARKS, Call, as_pairs, can_hold, conversations
from tests.data.chat_tokenizers import peer_template, tokenizer_for

GOOD = "<tool_call>g\n<arg_key>y</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
QUOTED = "<tool_call>rm\n<arg_key>path</arg_key>\n<arg_value>/srv</arg_value>\n</tool_call>"
(FAMILY,) = [family for family in FAMILIES if family.format == "glm"]
no_clock = settings(
    deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow], max_examples=40
)


def spec(name: str = "f", **properties: Any) -> ToolSpec:
    return ToolSpec(name=name, description="", parameters={"type": "object", "properties": properties})


def parse(text: str, *tools: ToolSpec, finish_reason: FinishReason = "stop") -> ParsedTurn:
    return tool_format("glm").parse(text, call_id_prefix="c", finish_reason=finish_reason, tools=tools)


def names(turn: ParsedTurn) -> list[str]:
    return [call.name if isinstance(call, ToolCall) else "error" for call in turn.calls]


def test_values_have_the_type_of_their_schema_b08_b14() -> None:
    tool = spec(
        zip={"type": "string"}, n={"type": "integer"}, day={"type": "integer"}, empty={"type": "integer"},
        none={"type": "array"}, who={"type": ["string", "null"]}, flag={"type": "boolean"}, where={"type": "object"},
    )  # fmt: skip
    texts = {
        "zip": "02134", "n": "5.0", "day": "2026-01-15", "empty": "", "none": "None", "who": "null", "flag": "True",
        "where": '{"a": [1, null]}', "other": "7",
    }  # fmt: skip
    (call,) = as_pairs(parse(FAMILY.write([("f", texts)]), tool).calls)
    assert call[1] == {
        "zip": "02134", "n": 5, "day": "2026-01-15", "who": None, "flag": True, "where": {"a": [1, None]},
        "other": "7",
    }  # fmt: skip
    assert type(call[1]["n"]) is int


def test_later_models_leave_the_line_breaks_out() -> None:
    text = FAMILY.write([("f", {"x": "a", "y": ""}), ("g", {})]).replace("\n", "")
    assert as_pairs(parse(text).calls) == [("f", {"x": "a", "y": ""}), ("g", {})]


def test_all_between_the_tags_of_a_text_is_the_text() -> None:
    for value in (
        "\n  indented\n\n",
        "",
        " ",
        "a </arg_value> b",
        "</tool_call>\n<tool_call>h",
        "<tool_call>h</tool_call>",
    ):
        turn = parse(f"{FAMILY.write([('f', {'x': value})])} Done.")
        assert as_pairs(turn.calls) == [("f", {"x": value})]
        assert turn.content == "Done."


def test_tags_in_the_strings_of_json_are_text() -> None:
    value = [f"</arg_value></tool_call>{QUOTED}", {"<arg_key>": "</arg_value><arg_key>"}]
    assert as_pairs(parse(FAMILY.write([("f", {"x": value})]), spec(x={"type": "array"})).calls) == [
        ("f", {"x": value})
    ]


@pytest.mark.parametrize("name", ["get weather", "a.b/c:d", "größe-2", "$x", "f(x)", 'say "it"'])
def test_any_line_is_a_name(name: str) -> None:
    assert as_pairs(parse(FAMILY.write([(name, {"x": "a"}), (name, {})])).calls) == [(name, {"x": "a"}), (name, {})]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("", "the tool's name must come first"),
        ("\n", "the tool's name must come first"),
        ('\n{"name": "f", "arguments": {}}\n', "the tool's name must come first, not '\\n{\"name\""),
        ("\n<function=f>\n</function>\n", "the tool's name must come first"),
        ("<arg_key>x</arg_key><arg_value>1</arg_value>", "the tool's name must come first"),
        ('f\n{"x": 1}\n', 'must stand where \'{"x": 1}'),
        ("f\n<arg_value>1</arg_value>\n", "must stand where '<arg_value>1"),
        ("f\n<arg_key>x</arg_key>\n1\n", "must stand where '<arg_key>x"),
        ("f\n<arg_key>x</arg_key>\n<arg_value>1\n", "</arg_value> must follow the value of 'x'"),
        ("f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value> so\n", "</arg_value> must follow the value of 'x'"),
        (
            "f\n<arg_key>x</arg_key>\n<arg_value>1\n<arg_key>y</arg_key>\n<arg_value>2</arg_value>\n",
            "</arg_value> must follow the value of 'x'",
        ),
        ("f\n<arg_key>x</arg_key><arg_value>1</arg_value><arg_key>x</arg_key><arg_value>1</arg_value>", "stands twice"),
    ],
)
def test_a_malformed_call_says_what_is_wrong_and_the_next_one_is_whole_b03(body: str, reason: str) -> None:
    failed, call = parse(f"<tool_call>{body}</tool_call>\nAnd {GOOD}").calls
    assert isinstance(failed, CallError)
    assert reason in failed.text
    assert call == ToolCall(call_id="c_1", name="g", arguments={"y": "2"})


def test_an_opener_that_stands_alone_leaves_the_next_call_alone() -> None:
    for broken in ("<tool_call>", "<tool_call>f\n", "<tool_call>f\n<arg_key>x"):
        assert names(parse(f"{broken}\n{GOOD}")) == ["error", "g"], broken


@pytest.mark.parametrize(
    "text",
    [
        FAMILY.write([("write", {"text": f"Example:\n{QUOTED}\n"})]),
        FAMILY.write([("write", {"text": f"Example:\n{QUOTED}\n", "n": "1"})]),
        f"{GOOD}{FAMILY.write([('write', {'text': QUOTED})])}",
        FAMILY.write([("write", {"text": f"{QUOTED}\n{QUOTED}"})]),
        "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>Example: <tool_call>rm</tool_call>\n",
        f"<tool_call>write\nJunk <arg_key>text</arg_key>\n<arg_value>Example: {QUOTED}</arg_value>\n</tool_call>",
        "<tool_call>write\nJunk <arg_key>text</arg_key><arg_value><tool_call>rm</tool_call></arg_value></tool_call>",
        "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value><tool_call>rm\n<arg_key>y</arg_key>\n<arg_value>",
    ],
)
@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_a_call_that_a_value_quotes_never_runs(text: str, finish_reason: FinishReason) -> None:
    turn = parse(text, spec("write", text={"type": "string"}), spec("rm"), finish_reason=finish_reason)
    assert set(names(turn)) <= {"error", "g"}
    if finish_reason == "stop":
        assert names(turn)[-1] == "error"


def test_drift_into_this_form_and_out_of_it_is_an_error_b11() -> None:
    f = spec(x={"type": "string"})
    for text in ("<function=f>\n<parameter=x>\na\n</parameter>\n</function>", '{"name": "f", "arguments": {"x": "a"}}'):
        assert names(parse(text, f)) == ["error"]
    for other in ("hermes", "qwen3_coder", "llama3_json", "mistral", "pythonic"):
        turn = tool_format(other).parse(
            FAMILY.write([("f", {"x": "a"})]), call_id_prefix="c", finish_reason="stop", tools=[f]
        )
        assert names(turn) == ["error"], other


@settings(no_clock, max_examples=150)
@given(
    text=st.lists(
        st.sampled_from(
            [*MARKS, "f", "\n", "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>", "</arg_key>", "<arg_value>"]
        )
    ).map("".join)
)
@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_any_text_is_read_without_an_exception(finish_reason: FinishReason, text: str) -> None:
    turn = parse(text, spec(x={"type": "array"}), finish_reason=finish_reason)
    assert [call.call_id for call in turn.calls] == [f"c_{number}" for number in range(len(turn.calls))]


@pytest.mark.parametrize(
    "mark", ["<tool_call>f<arg_key>x</arg_key><arg_value>", "<arg_value><tool_call>", "<arg_value>", "<arg_key>"]
)
def test_a_model_that_repeats_itself_is_read_at_once(mark: str) -> None:
    for begin in ("<tool_call>f\n", "<tool_call>f\n<arg_key>x</arg_key><arg_value>"):
        assert len(parse(f"{begin}{mark * 20_000}"[:100_000]).calls) <= 17


@cache
def renderer(template: str) -> TemplateRenderer:
    return TemplateRenderer(tokenizer_for(peer_template(template)), name=template, tool_format=tool_format("glm"))


@pytest.mark.parametrize("template", ["glm4moe", "glm4moe_training"])
@settings(no_clock)
@given(conversation=conversations(), thinking=st.sampled_from(["", "So be it."]))
def test_what_the_template_writes_is_read_b01(
    template: str, conversation: tuple[list[ToolSpec], list[Call]], thinking: str
) -> None:
    tools, calls = conversation
    assume(can_hold(FAMILY, calls))
    asked = tuple(
        ToolCall(call_id=f"c_{number}", name=name, arguments=arguments)
        for number, (name, arguments) in enumerate(calls)
    )
    ids = renderer(template).turn_ids(Message(role="assistant", content="", thinking=thinking, tool_calls=asked))
    turn = renderer(template).parse(ids, call_id_prefix="c", tools=tools)
    assert turn == ParsedTurn(content="", calls=asked, thinking=thinking)


@pytest.mark.parametrize(
    "following",
    [
        "<arg_name>n</arg_name>\n<arg_value>5</arg_value>",
        '<arg_key name="n">\n<arg_value>5</arg_value>',
        "n</arg_key>\n<arg_value>5</arg_value>",
        "<arg_key>n\n<arg_value>5</arg_value>",
    ],
)
def test_a_value_that_swallowed_the_next_argument_is_an_error_b03(following: str) -> None:
    tool = spec(query={"type": "string"}, n={"type": "integer"})
    text = f"<tool_call>f\n<arg_key>query</arg_key>\n<arg_value>a</arg_value>\n{following}\n</tool_call>"
    error, other = parse(f"{text}\n{GOOD}", tool).calls
    assert isinstance(error, CallError)
    assert isinstance(other, ToolCall)
