"""Pythonic calls: read as literals, never run."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.tool_formats.base import CallError, ParsedTurn
from data.tool_formats.detect import tool_format
from data.tool_formats.python_calls import read_arguments
from data.types import FinishReason
from envs.types import ToolCall, ToolSpec
from tests.contracts.tool_formats import as_pairs
from tests.data.test_types import no_clock

F = ToolSpec(name="f", description="", parameters={})


def parse(text: str, *tools: ToolSpec, finish_reason: FinishReason = "stop") -> ParsedTurn:
    return tool_format("pythonic").parse(text, call_id_prefix="c", finish_reason=finish_reason, tools=tools)


def test_brackets_and_commas_in_a_string_b07() -> None:
    text = "[write(path='/tmp/a.py', content='x = [f(1), \"a)]b\"]  # one, two', dry=False, mode=None)]"
    arguments = {"path": "/tmp/a.py", "content": 'x = [f(1), "a)]b"]  # one, two', "dry": False, "mode": None}
    assert as_pairs(parse(text).calls) == [("write", arguments)]


def test_comments_line_breaks_and_prose_around() -> None:
    text = """So:
[f(x=1),  # the ]first
  # and
  a.b-c(
    y=("a" "b"),  # it's
    from=[-1, +2.5, {"k": true}],
  ),
]
Done [1]."""
    turn = parse(text)
    assert as_pairs(turn.calls) == [("f", {"x": 1}), ("a.b-c", {"y": "ab", "from": [-1, 2.5, {"k": True}]})]
    assert turn.content.split() == ["So:", "Done", "[1]."]


@pytest.mark.parametrize("mark", ["<|tool_call_start|>", "<|python_tag|>"])
def test_a_mark_before_the_list_belongs_to_it(mark: str) -> None:
    turn = parse(f"Let me see.{mark}[f(x='a')]<|tool_call_end|>")
    assert as_pairs(turn.calls) == [("f", {"x": "a"})]
    assert turn.content == "Let me see."
    assert isinstance(parse(f"{mark}f(x=1)").calls[0], CallError)


def test_a_list_inside_a_line_is_a_call_of_a_known_tool_alone() -> None:
    for prose in ("See [g(1)](http://x).", "The values [f(x)] and g(x=1).", "x[1](2)"):
        assert parse(prose) == ParsedTurn(content=prose, calls=())
    assert as_pairs(parse("I call [f(x=1)] now.", F).calls) == [("f", {"x": 1})]


def test_a_call_of_a_known_tool_outside_a_list_is_an_error() -> None:
    (call,) = parse("f(x=1)", F).calls
    assert isinstance(call, CallError)
    assert call.text.endswith('a list, [...]; write [TOOL(name="value", ...)]')
    assert parse("f(x=1)").calls == ()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("1", "every argument needs its name"),
        ("x=1, x=2", "the argument 'x' stands twice"),
        ("x=y", "the value of 'x' is no literal: 'y'"),
        ("x=open('/etc/passwd')", "is no literal"),
        ("x=1 + 1", "is no literal"),
        ("x=f'{1}'", "is no literal"),
        ("x=b'a'", "is no literal"),
        ("x={1, 2}", "is no literal"),
        ("x=...", "is no literal"),
        ("x=-True", "is no literal"),
        ("**{'x': 1}", "cannot be read"),
        ("x={1: 2}", "a key that is no text"),
        ("x={'a': 1, 'a': 2}", "the key 'a' twice"),
        ("x=", "is missing"),
        ("x=1,,", "is missing"),
        ("x=1e999", "a number is not finite"),
        ("x=" + "9" * 5000, "a number that is too long"),
        ("x=0x" + "f" * 5000, "a number is too long"),
        ("x=" + "[" * 80 + "]" * 80, "nested too deeply"),
        ("x=" + "-" * 100_000 + "1", "nested too deeply"),
        ("x='a\nb'", "cannot be read"),
        ("x='\0'", "null bytes"),
        ("x=(1", "closes another bracket"),
    ],
    ids=lambda value: value[:30],
)
def test_what_is_no_literal_is_an_error(arguments: str, reason: str) -> None:
    *_, call = parse(f"[f({arguments})]").calls
    assert isinstance(call, CallError)
    assert reason in call.text


def test_a_list_that_never_ends_leaves_the_next_one_whole_b03() -> None:
    before, failed, behind = parse("[a(x=1)]\n[b(x='1)]\n[c(x=1)]").calls
    assert (before, behind) == (
        ToolCall(call_id="c_0", name="a", arguments={"x": 1}),
        ToolCall(call_id="c_2", name="c", arguments={"x": 1}),
    )
    assert isinstance(failed, CallError)


def test_half_a_surrogate_pair_b15() -> None:
    turn = parse(r"[say(text='\ud83c\udf78 and \ud83c')]")
    assert as_pairs(turn.calls) == [("say", {"text": "\U0001f378 and \N{REPLACEMENT CHARACTER}"})]


@no_clock
@given(text=st.text())
def test_any_arguments_are_read_or_refused(text: str) -> None:
    for arguments in (text, f"x={text}", f"x={text!r}"):
        with suppress(ValueError):
            read_arguments(arguments)


@pytest.mark.parametrize(
    "text",
    [
        'So:\n```python\nresults = [f(x="a"), f(x="b")]\nprint(results)\n```\nDone.',
        '```python\nprint([f(x="a")])\n```',
        '```python\n[f(x="a")]\nprint(1)\n```',
        'So:\n~~~py\nimport f\n[f(x="a")]\n~~~',
        'Use `[f(x="a")]` for that.',
        '`[f(x="a")]`',
        'results = [f(x="a")]',
        "It said \"[f(x='a')]\" to me.",
        "The rows are [[f(x=1)], [f(x=2)]] then.",
    ],
)
def test_a_list_that_code_or_a_statement_only_shows_is_no_call_b11(text: str) -> None:
    for name in ("pythonic", "hermes", "llama3_json"):
        turn = tool_format(name).parse(text, call_id_prefix="c", finish_reason="stop", tools=[F])
        assert (turn.content, turn.calls) == (text, ()), name


@pytest.mark.parametrize(
    "text",
    [
        '```python\n[f(x="a")]\n```',
        '```tool_code\n# now\n[\n  f(x="a"),\n]\n```',
        '```\n[f(x="a")]\n```',
        'Sure: [f(x="a")]',
        '```python\nprint(1)\n```\n[f(x="a")]',
        '```bash\nls\n``` and then\n[f(x="a")]',
        'I ran ```ls``` and `ls` first.\n[f(x="a")]',
    ],
)
def test_a_list_that_is_all_of_its_block_is_a_call_b11(text: str) -> None:
    turn = tool_format("pythonic").parse(text, call_id_prefix="c", finish_reason="stop", tools=[F])
    assert as_pairs(turn.calls) == [("f", {"x": "a"})]
