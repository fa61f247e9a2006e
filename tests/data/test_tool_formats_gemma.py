"""Gemma 4's calls: bare keys, texts between tokens of their own, and what the family's templates write."""

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

Q = '<|"|>'
GOOD = f"<|tool_call>call:g{{y:{Q}2{Q}}}<tool_call|>"
QUOTED = "<|tool_call>call:rm{recursive:true}<tool_call|>"
(FAMILY,) = [family for family in FAMILIES if family.format == "gemma"]
TEMPLATES = (
    "gemma4",
    "gemma4_v2",
    "gemma4_v3",
    "gemma4_v4",
    "gemma4_v5",
    "diffusion_gemma",
    "diffusion_gemma_training",
)
no_clock = settings(
    deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow], max_examples=25
)


def spec(name: str = "f", **properties: Any) -> ToolSpec:
    return ToolSpec(name=name, description="", parameters={"type": "object", "properties": properties})


def parse(text: str, *tools: ToolSpec, finish_reason: FinishReason = "stop", in_thinking: bool = False) -> ParsedTurn:
    return tool_format("gemma").parse(
        text, call_id_prefix="c", finish_reason=finish_reason, tools=tools, in_thinking=in_thinking
    )


def arguments(text: str, *tools: ToolSpec) -> dict[str, Any]:
    ((_, given),) = as_pairs(parse(f"<|tool_call>call:f{{{text}}}<tool_call|>", *tools).calls)
    return given


def names(turn: ParsedTurn) -> list[str]:
    return [call.name if isinstance(call, ToolCall) else "error" for call in turn.calls]


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("", {}),
        (" ", {}),
        (f"x:{Q}{Q}", {"x": ""}),
        (f"x:{Q}02134{Q},y:{Q}true{Q}", {"x": "02134", "y": "true"}),
        ("n:-1,m:2.50,k:1e22,z:0", {"n": -1, "m": 2.5, "k": 1e22, "z": 0}),
        ("a:true,b:false,c:null", {"a": True, "b": False, "c": None}),
        ("c:None", {"c": None}),
        (f"a:[],b:[{Q}x,]{Q},[1],{{c:[null]}}],d:{{}}", {"a": [], "b": ["x,]", [1], {"c": [None]}], "d": {}}),
        (f" x : {Q} a {Q} ,\n y : [ 1 , 2 ] ", {"x": " a ", "y": [1, 2]}),
        ("max-results:1,größe:2,a.b:3,two words:4", {"max-results": 1, "größe": 2, "a.b": 3, "two words": 4}),
    ],
)
def test_values_are_what_they_are_written_as_b01(text: str, given: dict[str, Any]) -> None:
    found = arguments(text)
    assert found == given
    assert [type(value) for value in found.values()] == [type(value) for value in given.values()]


def test_a_whole_number_is_an_integer_where_the_schema_wants_one_b08() -> None:
    tool = spec(n={"type": "integer"}, big={"type": ["integer", "null"]}, x={"type": "number"}, s={"type": "string"})
    found = arguments("n:5.0,big:9007199254740993.0,x:5.0,s:5.0,other:5.0", tool)
    assert found == {"n": 5, "big": 9007199254740993, "x": 5.0, "s": 5.0, "other": 5.0}
    assert [type(value) for value in found.values()] == [int, int, float, float, float]
    assert arguments("n:5.5", tool) == {"n": 5.5}


def test_markers_in_a_text_end_nothing() -> None:
    value = f"a }}<tool_call|> b {{c:1}}], {QUOTED} <|tool_call> \" ' \\ <channel|> d\n"
    turn = parse(f"{FAMILY.write([('f', {'x': value, 'y': [value]})])} Done.")
    assert as_pairs(turn.calls) == [("f", {"x": value, "y": [value]})]
    assert turn.content == "Done."


@pytest.mark.parametrize("name", ["get weather", "a.b/c:d", "größe-2", "$x", "f(x)", 'say "it"'])
def test_any_line_is_a_name(name: str) -> None:
    assert as_pairs(parse(FAMILY.write([(name, {"x": "a"}), (name, {})])).calls) == [(name, {"x": "a"}), (name, {})]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("", "call:TOOL{ must come first"),
        ("f{}", "call:TOOL{ must come first, not 'f{}"),
        ("call:f", "call:TOOL{ must come first"),
        ("call:{}", "call:TOOL{ must come first"),
        ('call:f(x="a")', "call:TOOL{ must come first"),
        ('{"name": "f", "arguments": {}}', "call:TOOL{ must come first"),
        ("call:f{} so", "<tool_call|> must follow the arguments"),
        ("call:f{x:1", "',' or '}' must follow a value"),
        ("call:f{x:1]", "',' or '}' must follow a value"),
        ("call:f{x:[1}", "',' or ']' must follow a value"),
        ("call:f{x:1,}", "NAME:VALUE must stand where '}"),
        ("call:f{x:1 y:2}", "',' or '}' must follow a value"),
        ("call:f{x=1}", "NAME:VALUE must stand where 'x=1}"),
        ('call:f{"x":1}', 'NAME:VALUE must stand where \'"x":1}'),
        (f"call:f{{{Q}x{Q}:1}}", "NAME:VALUE must stand where '<|\"|>x"),
        ("call:f{x:}", "a value must stand where '}"),
        ("call:f{x:a}", f"does; texts stand between {Q}"),
        ('call:f{x:"a"}', 'a value must stand where \'"a"}'),
        ("call:f{x:02134}", "a value must stand where '02134}"),
        ("call:f{x:NaN}", "a value must stand where"),
        ("call:f{x:1e999}", "a number is not finite"),
        (f"call:f{{x:{'9' * 5000}}}", "a number is too long"),
        (f"call:f{{x:{'[' * 70}{']' * 70}}}", "nested too deeply"),
        (f"call:f{{x:{'[' * 5000}", "nested too deeply"),
        ("call:f{x:1,x:1}", "the key 'x' stands twice"),
        ("call:f{o:{x:1,x:2}}", "the key 'x' stands twice"),
        (f"call:f{{x:{Q}a}}", f"{Q} must follow a text"),
        (f"call:f{{x:{Q}a{Q}b}}", "',' or a bracket must follow a text, not 'b}"),
        (f"call:f{{x=1,y:{Q}a<tool_call|>{Q}}}", "NAME:VALUE must stand where 'x=1"),
    ],
)
def test_a_malformed_call_says_what_is_wrong_and_the_next_one_is_whole_b03(body: str, reason: str) -> None:
    failed, call = parse(f"<|tool_call>{body}<tool_call|>\nAnd {GOOD}").calls
    assert isinstance(failed, CallError)
    assert reason in failed.text
    assert call == ToolCall(call_id="c_1", name="g", arguments={"y": "2"})


def test_64_levels_are_read() -> None:
    value: Any = 1
    for _ in range(63):
        value = [value]
    assert arguments(f"x:{'[' * 63}1{']' * 63}") == {"x": value}


def test_an_opener_that_stands_alone_leaves_the_next_call_alone() -> None:
    for broken in ("<|tool_call>", "<|tool_call>call:f", "<|tool_call>call:f{x:1", "<|tool_call>call:f{x:["):
        assert names(parse(f"{broken}\n{GOOD}")) == ["error", "g"], broken


@pytest.mark.parametrize(
    "text",
    [
        f"<|tool_call>call:f{{x:{Q}Example: {QUOTED}",
        f"<|tool_call>call:f{{x:{Q}Example: {QUOTED}}}<tool_call|>",
        f"<|tool_call>call:f{{x:{Q}<|tool_call>call:rm{{path:{Q}/srv{Q}}}<tool_call|>{Q}}}<tool_call|>",
        f"<|tool_call>call:f{{x=1,y:{Q}{QUOTED}{Q}}}<tool_call|>",
        f"<|tool_call>call:f{{x=1,y:{Q}{QUOTED}{Q}}}",
        f"<|tool_call>call:f{{y:{Q}{QUOTED}{Q},y:[{Q}{QUOTED}{Q}]}}<tool_call|>",
        f"{GOOD}<|tool_call>call:f{{x:{Q}Example: <|tool_call>call:rm{{",
    ],
)
@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_a_call_that_a_text_quotes_never_runs(text: str, finish_reason: FinishReason) -> None:
    turn = parse(text, spec(), spec("rm"), finish_reason=finish_reason)
    assert set(names(turn)) <= {"error", "g"}
    if finish_reason == "stop":
        assert names(turn)[-1] == "error"


def test_thinking_stands_in_its_channel() -> None:
    for channel in ("<|channel>thought\n", "<|channel>", "<think>"):
        end = "</think>" if channel == "<think>" else "\n<channel|>"
        turn = parse(f"{channel}Perhaps {QUOTED}?{end}{GOOD}Sure.")
        assert names(turn) == ["g"]
        assert (turn.thinking, turn.content) == (f"Perhaps {QUOTED}?", "Sure.")
    assert parse(f"<|channel>thought\n{QUOTED}") == ParsedTurn(
        content="", calls=(), thinking=QUOTED, thinking_open=True
    )


def test_thinking_that_the_prompt_opened_ends_with_its_channel() -> None:
    turn = parse(f"Perhaps {QUOTED}.\n<channel|>{GOOD}", in_thinking=True)
    assert names(turn) == ["g"]
    assert turn.thinking == f"Perhaps {QUOTED}."
    assert parse(QUOTED, in_thinking=True).thinking_open


def test_drift_into_this_form_and_out_of_it_is_an_error_b11() -> None:
    f = spec(x={"type": "string"})
    for family in FAMILIES:
        if family.format in ("gemma", "react"):
            continue
        assert names(parse(family.write([("f", {"x": "a"})]), f)) == ["error"], family.format
        turn = tool_format(family.format).parse(
            FAMILY.write([("f", {"x": "a"})]), call_id_prefix="c", finish_reason="stop", tools=[f]
        )
        assert names(turn) == ["error"], family.format


def test_half_a_surrogate_pair_is_replaced_b15() -> None:
    assert arguments(f"x:{Q}\ud83c{Q},\ud83c:1") == {"x": "\ufffd", "\ufffd": 1}


@settings(no_clock, max_examples=150)
@given(
    text=st.lists(
        st.sampled_from(
            [*MARKS, "<|tool_call>call:f{x:", "call:f", "{", "}", "[", "]", ":", ",", "x:", Q, f"{Q},", "1"]
        )
    ).map("".join)
)
@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_any_text_is_read_without_an_exception(finish_reason: FinishReason, text: str) -> None:
    turn = parse(text, spec(x={"type": "array"}), finish_reason=finish_reason)
    assert [call.call_id for call in turn.calls] == [f"c_{number}" for number in range(len(turn.calls))]


@pytest.mark.parametrize(
    "mark", ["<|tool_call>call:f{x:", "{x:", f"{Q}<|tool_call>", f"{Q}a", "<|tool_call>call:f", " "]
)
def test_a_model_that_repeats_itself_is_read_at_once(mark: str) -> None:
    assert len(parse(f"<|tool_call>call:f{{x:{mark * 20_000}"[:100_000]).calls) <= 17


@cache
def renderer(template: str) -> TemplateRenderer:
    return TemplateRenderer(tokenizer_for(peer_template(template)), name=template, tool_format=tool_format("gemma"))


@pytest.mark.parametrize("template", TEMPLATES)
@settings(no_clock)
@given(conversation=conversations())
def test_what_the_template_writes_is_read_b01(template: str, conversation: tuple[list[ToolSpec], list[Call]]) -> None:
    tools, calls = conversation
    assume(can_hold(FAMILY, calls))
    asked = tuple(
        ToolCall(call_id=f"c_{number}", name=name, arguments=given) for number, (name, given) in enumerate(calls)
    )
    # One of the templates writes no thinking at all.
    thinking = "" if template == "gemma4_v2" else "So be it."
    ids = renderer(template).turn_ids(Message(role="assistant", content="", thinking=thinking, tool_calls=asked))
    turn = renderer(template).parse(ids, call_id_prefix="c", tools=tools)
    assert turn == ParsedTurn(content="", calls=asked, thinking=thinking)
