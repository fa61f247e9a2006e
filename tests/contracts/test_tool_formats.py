"""One suite that every tool-call format passes: what is written is read, and what cannot be read is answered."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from data.tool_formats.base import CallError, ParsedTurn, ToolFormat
from data.tool_formats.detect import TOOL_FORMATS, tool_format
from data.types import FinishReason
from envs.types import ToolCall, ToolSpec
from tests.contracts.tool_formats import FAMILIES, HEADLESS, MARKS, Call, Family, as_pairs, can_hold, conversations

no_clock = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=60
)
F = ToolSpec(name="f", description="", parameters={"type": "object", "properties": {"x": {"type": "string"}}})
PARTS = re.compile(r'"[^"]*": *|"[^"]*"|<[^<>]*>|\w+|\s+|.', re.DOTALL)
G = ToolSpec(name="g", description="", parameters={"type": "object", "properties": {}})


@pytest.fixture(params=FAMILIES, ids=lambda family: family.write.__name__.strip("_"))
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture(params=list(TOOL_FORMATS))
def any_format(request: pytest.FixtureRequest) -> ToolFormat:
    return tool_format(request.param)


def parse(
    family: Family,
    text: str,
    *,
    finish_reason: FinishReason = "stop",
    tools: list[ToolSpec] | None = None,
    **rest: bool,
) -> ParsedTurn:
    known = [F, G] if tools is None else tools
    return tool_format(family.format).parse(text, call_id_prefix="c", finish_reason=finish_reason, tools=known, **rest)


@settings(no_clock)
@given(conversation=conversations())
def test_what_is_written_is_read(family: Family, conversation: tuple[list[ToolSpec], list[Call]]) -> None:
    tools, calls = conversation
    assume(can_hold(family, calls))
    turn = parse(family, family.write(calls), tools=tools)
    assert as_pairs(turn.calls) == calls
    assert json.dumps(as_pairs(turn.calls)) == json.dumps(calls), "1, 1.0 and true are three values"
    assert [call.call_id for call in turn.calls] == [f"c_{number}" for number in range(len(calls))]
    assert (turn.content, turn.thinking) == ("", "")


@settings(no_clock, max_examples=15)
@given(conversation=conversations(max_calls=2))
def test_a_cut_turn_keeps_the_calls_that_were_whole_and_has_no_error(
    family: Family, conversation: tuple[list[ToolSpec], list[Call]]
) -> None:
    tools, calls = conversation
    assume(can_hold(family, calls))
    text = family.write(calls)
    for end in range(len(text)):
        found = as_pairs(parse(family, text[:end], finish_reason="length", tools=tools).calls)
        assert found == calls[: len(found)], text[:end]
    assert as_pairs(parse(family, text, finish_reason="length", tools=tools).calls) == calls


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
@settings(no_clock)
@given(
    text=st.lists(
        st.sampled_from([*MARKS, "f(", "[f(x=", "{", '"name": "f"', '"parameters": ', "Action: f["]) | st.text()
    ).map("".join)
)
def test_any_text_is_read_without_an_exception(any_format: ToolFormat, finish_reason: FinishReason, text: str) -> None:
    for in_thinking in (False, True):
        turn = any_format.parse(
            text, call_id_prefix="c", finish_reason=finish_reason, tools=[F, G], in_thinking=in_thinking
        )
        assert [call.call_id for call in turn.calls] == [f"c_{number}" for number in range(len(turn.calls))]
        for call in turn.calls:
            if isinstance(call, CallError):
                assert call.text.startswith("error: malformed tool call: ")
                assert "; write " in call.text
                assert "\n" not in call.text


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
@settings(no_clock)
@given(conversation=conversations(max_calls=2), data=st.data())
def test_a_turn_with_parts_lost_or_doubled_is_read_without_an_exception(
    family: Family, finish_reason: FinishReason, conversation: tuple[list[ToolSpec], list[Call]], data: st.DataObject
) -> None:
    """What a model garbles is mostly right: keys, brackets and markers that belong there, once too often or not at
    all."""
    tools, calls = conversation
    parts = PARTS.findall(family.write(calls))
    for _ in range(data.draw(st.integers(1, 4))):
        places = st.integers(0, len(parts))
        start, place = data.draw(places), data.draw(places)
        end = start + data.draw(st.integers(1, 6))
        doubled = parts[:place] + parts[start:end] + parts[place:]
        parts = doubled if data.draw(st.booleans()) else parts[:start] + parts[end:]
    text = "".join(parts)
    turn = parse(family, text, finish_reason=finish_reason, tools=tools)
    assert [call.call_id for call in turn.calls] == [f"c_{number}" for number in range(len(turn.calls))]


def test_a_model_that_repeats_itself_gets_few_errors(any_format: ToolFormat) -> None:
    """Nor does reading it take long: each of these would, if what follows were read again for each."""
    for mark in (
        *MARKS,
        "{",
        '{"name":',
        '{"a":[',
        "[f(x=",
        "\n[f(x='a",
        "\nAction: f(",
        "<function=f><parameter=x>",
        "[TOOL_CALLS][",
        "[TOOL_CALLS] [1" + ",1" * 100 + "]",
    ):
        turn = any_format.parse((mark * 3000)[:20_000], call_id_prefix="c", finish_reason="stop", tools=[F, G])
        assert sum(isinstance(call, CallError) for call in turn.calls) <= 17


def test_prose_around_calls_is_content_and_order_is_kept_b04(family: Family) -> None:
    calls: list[Call] = [("f", {"x": "]"}), ("g", {}), ("f", {"x": "[1, 2]"})]
    blocks = [f"\n{family.write([call])}\n" for call in calls]
    turn = parse(family, "First:" + "and then".join(blocks) + "Done.")
    assert as_pairs(turn.calls) == calls
    assert turn.content.split() == ["First:", "and", "then", "and", "then", "Done."]


def test_a_call_that_cannot_be_read_is_an_error_and_takes_no_other_with_it_b03(family: Family) -> None:
    good = family.write([("f", {"x": "a"})])
    for broken in family.broken:
        assert isinstance(parse(family, broken).calls[-1], CallError), broken
        before, error, after = parse(family, f"{good}\n{broken}\n{good}").calls
        assert isinstance(error, CallError)
        assert (before, after) == (
            ToolCall(call_id="c_0", name="f", arguments={"x": "a"}),
            ToolCall(call_id="c_2", name="f", arguments={"x": "a"}),
        )


@pytest.mark.parametrize(("name", "text"), HEADLESS)
def test_a_call_without_its_opening_marker_is_an_error_b03(name: str, text: str) -> None:
    """It would pass for a final answer, or vanish beside another call."""
    family = next(one for one in FAMILIES if one.format == name)
    good = family.write([("f", {"x": "a"})])
    (error,) = parse(family, text).calls
    assert isinstance(error, CallError)
    for whole in (f"{good}{text}", f"{good}\n{text}", f"{text}\n{good}", f"I will look.\n{text}\n{good}"):
        calls = parse(family, whole).calls
        assert {type(call) for call in calls} == {ToolCall, CallError}, whole
        assert len(calls) == 2
    assert parse(family, text, finish_reason="length").calls == () or name == "harmony"
    if name != "harmony" and text[0] != "{":  # no control token stands in prose; JSON may be a call in any block
        quoted = f"So:\n```html\n{text}\n```\nor `{text.splitlines()[-1]}` it is."
        assert parse(family, quoted) == ParsedTurn(content=quoted, calls=())


def test_a_closing_marker_that_is_doubled_says_nothing(family: Family) -> None:
    good = family.write([("f", {"x": "a"})])
    for close in ("</tool_call>", "<tool_call|>", "<|tool_call_end|>"):
        if good.endswith(close):
            assert as_pairs(parse(family, f"{good}\n{close}\n{good}{close}").calls) == [("f", {"x": "a"})] * 2


def test_a_name_that_no_tool_has_stays_a_call_b16(family: Family) -> None:
    for name in ("nothing", "F", "g_"):
        assert as_pairs(parse(family, family.write([(name, {})])).calls) == [(name, {})]


def test_the_same_call_twice_is_two_calls(family: Family) -> None:
    assert as_pairs(parse(family, family.write([("g", {})] * 2)).calls) == [("g", {})] * 2


def test_thinking_is_taken_out_and_its_calls_are_none(family: Family) -> None:
    call = family.write([("f", {"x": "a"})])
    turn = parse(family, f"<think>\nPerhaps\n{call}\nno.\n</think>\n\nSure.\n{family.write([('g', {})])}")
    assert as_pairs(turn.calls) == [("g", {})]
    assert turn.content == "Sure."
    assert turn.thinking.startswith("Perhaps")
    assert turn.thinking.endswith("no.")
    assert not turn.thinking_open


def test_thinking_that_the_prompt_opened_ends_at_its_marker(family: Family) -> None:
    call = family.write([("g", {})])
    turn = parse(family, f"Hm.\n{call}\n</think>\n{call}", in_thinking=True)
    assert as_pairs(turn.calls) == [("g", {})]
    assert turn.thinking.startswith("Hm.")
    assert turn.content == ""


def test_a_call_right_behind_thinking_begins_a_line(family: Family) -> None:
    """Also one of a tool that nobody knows, which pythonic lists and ReAct's labels are taken for there alone."""
    for name in ("g", "nothing"):
        call = family.write([(name, {})])
        for text, in_thinking in ((f"Hm.</think>{call}", True), (f"So.<think>Hm.</think>{call}", False)):
            turn = parse(family, text, in_thinking=in_thinking)
            assert as_pairs(turn.calls) == [(name, {})], text
            assert turn.content == ("" if in_thinking else "So.")
            assert turn.thinking == "Hm."


@pytest.mark.parametrize("other", ['g(x="a")', "Action: g[]", "[g()]"])
def test_a_call_in_another_form_right_behind_thinking_is_an_error_b11(family: Family, other: str) -> None:
    for text in (f"<think>Hm.</think>{other}", f"So.<think>Hm.</think>{other}"):
        turn = parse(family, text)
        assert turn.calls, text
        if family.format not in ("react", "pythonic"):
            assert isinstance(turn.calls[0], CallError)


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_thinking_that_never_ends_has_no_calls(family: Family, finish_reason: FinishReason) -> None:
    call = family.write([("g", {})])
    for text, in_thinking in ((f"<think>I call\n{call}", False), (f"I call\n{call}", True), ("<think>", False)):
        turn = parse(family, text, finish_reason=finish_reason, in_thinking=in_thinking)
        assert turn.thinking_open
        assert (turn.calls, turn.content) == ((), "")


def test_what_stood_before_thinking_that_never_ends_is_kept(family: Family) -> None:
    turn = parse(family, f"{family.write([('g', {})])}\n<think>\n{family.write([('f', {})])}")
    assert as_pairs(turn.calls) == [("g", {})]
    assert turn.thinking_open


def test_a_plain_answer_is_content_alone(family: Family) -> None:
    for text in ("It is 18 °C {roughly} [see above](x), if f(x) holds.", "", '{"answer": [1, {"name": "Bob"}]}'):
        assert parse(family, f" {text}\n") == ParsedTurn(content=text, calls=())


FENCED = '```json\n{"name": "f", "arguments": {"x": "use ```bash``` here"}}\n```'


def test_a_call_in_the_form_of_another_format_is_an_error_b11(family: Family) -> None:
    """Else it would end the trajectory as a final answer that nobody counts."""
    for other in FAMILIES:
        if other.format in (family.format, "react"):
            continue
        if family.format == "llama3_json" and '"name"' in other.write([("f", {})]):
            continue  # its own form between other marks
        turn = parse(family, f"I will look.\n{other.write([('f', {'x': 'a'})])}")
        assert any(isinstance(call, CallError) for call in turn.calls), other.format
        assert not any(isinstance(call, ToolCall) for call in turn.calls), other.format


@pytest.mark.parametrize(
    "text", [FENCED, FENCED.replace("json", ""), FENCED.removeprefix("```json\n").removesuffix("\n```")]
)
@pytest.mark.parametrize("tools", [[], [F, G]], ids=["no tools", "tools"])
def test_json_without_markers_is_an_error_unless_it_is_the_form_b11_b05(
    family: Family, text: str, tools: list[ToolSpec]
) -> None:
    """B05: a decoder that leaves out special tokens leaves such JSON too."""
    turn = parse(family, f"Let me see.\n{text}\nSo.", tools=tools)
    if family.format == "llama3_json":
        assert as_pairs(turn.calls) == [("f", {"x": "use ```bash``` here"})]
        assert turn.content.split() == ["Let", "me", "see.", "So."]
    else:
        (error,) = turn.calls
        assert isinstance(error, CallError)
        assert "'f' is not in the form" in error.text
        assert "use ```bash``` here" in turn.content


def test_a_fence_of_another_language_is_no_call_b11(family: Family) -> None:
    fence = '```bash\ncurl -d \'{"name": "f", "arguments": {}}\' host\n```'
    assert parse(family, fence).calls == ()
    turn = parse(family, f"{fence}\n{family.write([('g', {})])}")
    assert as_pairs(turn.calls) == [("g", {})]
    assert turn.content == fence


def test_json_that_names_no_tool_is_an_answer(family: Family) -> None:
    if family.format != "llama3_json":
        answer = FENCED.replace('"f"', '"example"')
        assert parse(family, answer) == ParsedTurn(content=answer, calls=())


@settings(no_clock, max_examples=20)
@given(number=st.integers(-(2**53), 2**53))
def test_a_whole_number_is_the_integer_that_the_schema_wants_b08(family: Family, number: int) -> None:
    """However it is written; a number stays the float that it was."""
    properties = {"x": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "y": {"type": "number"}}
    tool = ToolSpec(name="f", description="", parameters={"type": "object", "properties": properties})
    text = family.write([("f", {"x": float(number), "y": float(number)})])
    ((_, arguments),) = as_pairs(parse(family, text, tools=[tool]).calls)
    assert arguments == {"x": number, "y": number}
    assert [type(value) for value in arguments.values()] == [int, float]


def test_half_a_surrogate_pair_is_replaced_b15(family: Family) -> None:
    turn = parse(family, family.write([("f", {"x": "\ud83c\udf78 \ud83c"})]))
    (call,) = as_pairs(turn.calls)
    assert call[1]["x"].endswith("\ufffd")
    call[1]["x"].encode()
