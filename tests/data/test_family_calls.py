"""Calls of the families whose own parser reads them: the rules are those of all our formats."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.families import FAMILIES
from data.family_renderer import FamilyRenderer
from data.tool_formats.base import CallError, ParsedTurn
from data.types import FinishReason
from envs.types import Message, ToolCall, ToolSpec
from tests.data.family_tokenizers import family_tokenizer
from tests.data.test_family_renderer import ids_of, load, turn_of
from tests.data.test_types import no_clock

PROPERTIES = {
    "x": {"type": "string"},
    "n": {"type": "integer"},
    "m": {"type": "number"},
    "u": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
}
TOOL = ToolSpec(name="lookup", description="Looks up.", parameters={"type": "object", "properties": PROPERTIES})
ASKED = [Message(role="user", content="What is 12?")]
OWN = [family for family, traits in FAMILIES.items() if traits.tool_format is None and family != "deepseek-r1"]
TAGGED = [family for family in OWN if FAMILIES[family].writing not in ("json", "envelope")]
DRIFTED = {
    "fence": '```json\n{"name": "lookup", "arguments": {"x": "1"}}\n```',
    "bare": '{"name": "lookup", "arguments": {"x": "1"}}',
    "hermes": '<tool_call>\n{"name": "lookup", "arguments": {"x": "1"}}\n</tool_call>',
    "xml": "<function=lookup>\n<parameter=x>\n1\n</parameter>\n</function>",
    "python": '[lookup(x="1")]',
}


@pytest.fixture(params=OWN)
def renderer(request: pytest.FixtureRequest) -> FamilyRenderer:
    return load(request.param)


def called(renderer: FamilyRenderer, **arguments: Any) -> str:
    """A turn with one call, as text, behind thinking that the header opened."""
    ids = turn_of(renderer, tool_calls=(ToolCall(call_id="c", name="lookup", arguments=arguments),))
    return renderer.decode(ids[:-1])


def read(renderer: FamilyRenderer, text: str, finish: FinishReason = "stop") -> ParsedTurn:
    """A turn of this text in which control tokens are control tokens, as a policy samples them."""
    ids = family_tokenizer(renderer.name).encode(text, add_special_tokens=False)
    ids += [renderer.stop_token_ids[0]] if finish == "stop" else []
    prompt = ids_of(renderer.opening(ASKED, [TOOL]))
    return renderer.parse(ids, call_id_prefix="c", finish_reason=finish, tools=[TOOL], prompt_ids=prompt)


def prose(renderer: FamilyRenderer, text: str) -> str:
    """An answer as the family writes it, with what closes the thinking that its header opened."""
    return renderer.decode(turn_of(renderer, content="PROSE")[:-1]).replace("PROSE", text)


def arguments_of(turn: ParsedTurn) -> list[Any]:
    return [dict(call.arguments) if isinstance(call, ToolCall) else call.text for call in turn.calls]


def error_of(turn: ParsedTurn) -> str:
    (error,) = turn.calls
    assert isinstance(error, CallError)
    assert "A call is written like this: " in error.text
    return error.text


@settings(no_clock, max_examples=10)
@given(count=st.integers(1, 4), between=st.sampled_from(["", "\n", "And now:"]), cut=st.booleans())
def test_every_section_of_calls_is_read_b04(renderer: FamilyRenderer, count: int, between: str, cut: bool) -> None:
    """Whether or not a turn opens a section for each call; a cut behind them takes none away."""
    first = called(renderer, x="v0")
    begin = first.rfind("</think") + 1
    begin = first.index(">", begin) + 1 if begin else 0
    more = [between + called(renderer, x=f"v{number}")[begin:] for number in range(1, count)]
    turn = read(renderer, first + "".join(more), "length" if cut else "stop")
    assert arguments_of(turn) == [{"x": f"v{number}"} for number in range(count)]
    assert [call.call_id for call in turn.calls] == [f"c_{number}" for number in range(count)]


@pytest.mark.parametrize("family", ["kimi-k2", "kimi-k2.5", "deepseek-v3"])
def test_a_call_outside_of_any_section_is_an_error_b03(family: str) -> None:
    renderer = load(family)
    text = called(renderer, x="1")
    sections = [token for token in renderer.control_tokens.values() if "section" in token or "calls" in token]
    for section in sections:
        text = text.replace(section, "")
    assert "stands where no call is read" in error_of(read(renderer, text))
    assert read(renderer, text, "length").calls == ()


@pytest.mark.parametrize("family", ["kimi-k2", "deepseek-v3"])
def test_a_section_that_was_only_thought_of_is_none_b06(family: str) -> None:
    renderer = load(family)
    draft, call = called(renderer, x="draft"), called(renderer, x="1")
    assert arguments_of(read(renderer, f"<think>{draft}</think>{call}")) == [{"x": "1"}]
    assert read(renderer, f"<think>{draft}</think>Never mind.").calls == ()


@pytest.mark.parametrize("form", DRIFTED)
def test_a_call_in_another_form_is_an_error_b11(renderer: FamilyRenderer, form: str) -> None:
    """Else it would pass for a final answer. Behind the own marker such a form is an error too."""
    turn = read(renderer, prose(renderer, DRIFTED[form]))
    assert turn.calls
    assert all(isinstance(call, CallError) for call in turn.calls)
    assert read(renderer, prose(renderer, DRIFTED[form].replace("lookup", "other"))).calls == () or "laguna" in (
        renderer.name
    )


def test_prose_that_names_a_tool_is_prose_b11(renderer: FamilyRenderer) -> None:
    said = "I would use lookup here, but 12 is twelve."
    turn = read(renderer, prose(renderer, said))
    assert (turn.content.strip(), turn.calls) == (said, ())


@pytest.mark.parametrize("written", ["", "None", "null"])
@pytest.mark.parametrize("family", TAGGED)
def test_nothing_is_left_out_or_null_by_the_schema_b14(family: str, written: str) -> None:
    renderer = load(family)
    text = called(renderer, x="TEXT", n=77, u=88)
    turn = read(renderer, text.replace("TEXT", written).replace("77", written).replace("88", written))
    (arguments,) = arguments_of(turn)
    assert arguments.get("x") == written
    if family == "deepseek-v4" and written == "null":
        assert arguments["n"] is None, "its tag says that it is JSON"
    else:
        assert "n" not in arguments
    assert arguments.get("u") is None


def test_a_whole_number_is_an_integer_where_the_schema_says_so_b08(renderer: FamilyRenderer) -> None:
    text = called(renderer, n=77, m=88).replace("77", "5.0").replace("88", "5.0")
    (arguments,) = arguments_of(read(renderer, text))
    assert arguments == {"n": 5, "m": 5.0}
    assert (type(arguments["n"]), type(arguments["m"])) == (int, float)


def test_a_key_that_stands_twice_is_an_error_b02(renderer: FamilyRenderer) -> None:
    text = called(renderer, x="1", y="2").replace('"y"', '"x"').replace(">y<", ">x<")
    reason = "not of the right form" if renderer.name == "deepseek-v4" else "'x' stands twice"
    assert reason in error_of(read(renderer, text))


@pytest.mark.parametrize("family", TAGGED)
def test_an_argument_that_has_no_end_is_not_dropped_b03(family: str) -> None:
    """The rest of the call would run without it."""
    renderer = load(family)
    text = called(renderer, x="1", n=2)
    for end in ("</arg_value>", "</arg_value:opensource>", "</parameter>", "</｜DSML｜parameter>"):
        before, found, after = text.rpartition(end)
        text = before + after if found else text
    assert error_of(read(renderer, text))


@settings(no_clock, max_examples=30)
@given(data=st.data())
def test_no_call_is_dropped_whatever_stands_in_it_b03(renderer: FamilyRenderer, data: st.DataObject) -> None:
    """A character taken out of a call, anywhere: a call, an error, or the model is still thinking."""
    ids = turn_of(renderer, tool_calls=(ToolCall(call_id="c", name="lookup", arguments={"x": "1", "n": 2}),))
    prompt = ids_of(renderer.opening(ASKED, [TOOL]))
    place = data.draw(st.integers(0, len(ids) - 2))
    turn = renderer.parse([*ids[:place], *ids[place + 1 :]], call_id_prefix="c", tools=[TOOL], prompt_ids=prompt)
    begin = renderer.control_tokens.get(ids[place], "")
    assert turn.calls or turn.thinking_open or begin, "only without its marker is it no call"


def test_an_invocation_without_an_end_is_an_error_b03() -> None:
    """MiniMax's block holds several; one that is not closed runs neither alone nor as a part of another."""
    renderer = load("minimax-m2")
    whole = called(renderer, x="1")
    broken = '<invoke name="lookup">\n<parameter name="x">2</parameter>\n'
    turn = read(renderer, whole.replace("</minimax:tool_call>", broken + "</minimax:tool_call>"))
    assert arguments_of(turn)[0] == {"x": "1"}
    assert "not of the right form" in arguments_of(turn)[1]
    assert isinstance(read(renderer, whole.replace("</invoke>", broken + "</invoke>")).calls[0], CallError)


def opened(family: str) -> str:
    """What closes the thinking that the family's header opened."""
    return prose(load(family), "")


@pytest.mark.parametrize(
    ("family", "written", "broken"),
    [
        ("minimax-m2", '<parameter name="x">1</parameter>', '{"x": "1"}'),
        ("minimax-m2", '<parameter name="x">1</parameter>', '<param name="x">1</param>'),
        ("minimax-m2", '<parameter name="x">1</parameter>', 'x: <parameter name="x">1</parameter>'),
        ("hy3", "<arg_key:opensource>x</arg_key:opensource>", ""),
        ("hy3", "<arg_key:opensource>x</arg_key:opensource>", "x</arg_key:opensource>"),
        ("hy3", "<arg_key:opensource>x</arg_key:opensource>\n", '{"x": "1"}'),
        ("laguna-xs-2.1", "</arg_value>", "</arg_key><arg_value>2</arg_value>"),
        ("inkling", '"args"', '"arguments"'),
        ("inkling", '"args"', '"limit": 5, "args"'),
        ("inkling", '"name"', '"tool"'),
        ("deepseek-v3", 'lookup\n```json\n{"x": "1"}\n```', 'lookup{"x": "1"}'),
        ("deepseek-v3", 'lookup\n```json\n{"x": "1"}\n```', '{"x": "1"}'),
        ("deepseek-v3", "function<", 'lookup {"x": "1"}<'),
        ("kimi-k2", "<|tool_call_argument_begin|>", ""),
        ("kimi-k2", ":0<|tool_call_argument_begin|>", ' {"x": "1"}:0<|tool_call_argument_begin|>'),
        ("kimi-k2", ":0<", ":0 x=1<"),
    ],
)
def test_nothing_of_a_call_is_left_out_b03(family: str, written: str, broken: str) -> None:
    """It would run without the arguments that stand in another form, or in another place; a whole one beside it is none
    the worse."""
    renderer = load(family)
    text = called(renderer, x="1")
    wrong = text.replace(written, broken)
    assert wrong != text
    assert error_of(read(renderer, wrong))
    begin = opened(family)
    both = arguments_of(read(renderer, wrong + text.removeprefix(begin) if begin else wrong + text))
    assert {"x": "1"} in both
    assert len([one for one in both if isinstance(one, str)]) == 1


@pytest.mark.parametrize("family", ["kimi-k2", "kimi-k2.5", "deepseek-v3", "hy3", "laguna-xs.2"])
def test_a_call_without_its_first_or_last_mark_takes_no_other_with_it_b03(family: str) -> None:
    """Nor is it dropped, nor does it run with a half of what it says."""
    renderer = load(family)
    calls = tuple(ToolCall(call_id=x, name="lookup", arguments={"x": x}) for x in "123")
    text = renderer.decode(turn_of(renderer, tool_calls=calls)[:-1])
    marks = [renderer.control_tokens[token] for token in renderer._form.inner]  # pyright: ignore[reportPrivateUsage]
    for mark in marks:
        if "arg_" not in mark and mark != "<tool_sep:opensource>":  # without which all of the call is there
            for number, place in enumerate(found.start() for found in re.finditer(re.escape(mark), text)):
                turn = read(renderer, text[:place] + text[place + len(mark) :])
                whole = [{"x": x} for x in "123" if x != "123"[number]]
                assert [one for one in arguments_of(turn) if isinstance(one, dict)] == whole, (mark, number)
                assert len(turn.calls) == 3


def test_a_model_that_repeats_its_opening_mark_gets_few_errors_b03(renderer: FamilyRenderer) -> None:
    for token in renderer.control_tokens.values():
        if "call" in token or "invoke" in token:
            assert len(read(renderer, opened(renderer.name) + token * 200).calls) <= 20, token
