"""ReAct text: the textbooks' ways of writing an action, what is a thought and what an answer, and invented results."""

from __future__ import annotations

from typing import Any

import pytest

from data.tool_formats.base import CallError, ParsedTurn
from data.tool_formats.detect import tool_format
from data.types import FinishReason
from envs.types import ToolSpec
from tests.contracts.tool_formats import as_pairs


def tool(name: str, **types: str) -> ToolSpec:
    properties = {key: {"type": one} for key, one in types.items()}
    return ToolSpec(name=name, description="", parameters={"type": "object", "properties": properties})


TOOLS = (
    tool("get_weather", location="string"),
    tool("multiply", a="number", b="number"),
    tool("search", query="string"),
    tool("post", zip="string", count="integer"),
    tool("now"),
)


def parse(text: str, *, finish_reason: FinishReason = "stop") -> ParsedTurn:
    return tool_format("react").parse(text, call_id_prefix="c", finish_reason=finish_reason, tools=TOOLS)


def test_the_textbooks_dialogue() -> None:
    turn = parse("Thought: I need the weather first, then compute the product.\nAction: get_weather[Paris]\n")
    assert as_pairs(turn.calls) == [("get_weather", {"location": "Paris"})]
    assert turn.thinking == "I need the weather first, then compute the product."
    assert turn.content == ""
    turn = parse("Thought: I have both results.\nAnswer: 18 °C and sunny; 17.5 × 4 = 70.")
    assert turn == ParsedTurn(content="18 °C and sunny; 17.5 × 4 = 70.", calls=(), thinking="I have both results.")


def test_a_label_right_behind_thinking_begins_a_line() -> None:
    for text, in_thinking in (("<think>Hm.</think>Final Answer: 42", False), ("Hm.</think>**Answer:** 42", True)):
        turn = tool_format("react").parse(
            text, call_id_prefix="c", finish_reason="stop", tools=TOOLS, in_thinking=in_thinking
        )
        assert turn == ParsedTurn(content="42", calls=(), thinking="Hm.")


@pytest.mark.parametrize(
    ("action", "name", "arguments"),
    [
        ("multiply[17.5, 4]", "multiply", {"a": 17.5, "b": 4}),
        ('search("population of France")', "search", {"query": "population of France"}),
        ('get_weather(location="Atlantis")', "get_weather", {"location": "Atlantis"}),
        ('multiply({"a": 1, "b": 2})', "multiply", {"a": 1, "b": 2}),
        ("multiply({'a': 1, 'b': 2})", "multiply", {"a": 1, "b": 2}),
        ('multiply[{"a": 1, "b": 2}]', "multiply", {"a": 1, "b": 2}),
        ("multiply (1,\n  b=2)", "multiply", {"a": 1, "b": 2}),
        ("search[it's a [test], or not]", "search", {"query": "it's a [test], or not"}),
        ('search["a, b"]', "search", {"query": "a, b"}),
        ('search[query="a"]', "search", {"query": "a"}),
        ("post[02134, 5.0]", "post", {"zip": "02134", "count": 5}),
        ('post["a, b", count=three]', "post", {"zip": "a, b", "count": "three"}),
        ("post[02134]", "post", {"zip": "02134"}),
        ("now[]", "now", {}),
        ("now()", "now", {}),
        ("now", "now", {}),
        ("`now`", "now", {}),
        ("search\nAction Input: how far", "search", {"query": "how far"}),
        ('post\nAction Input: {"zip": "02134"}', "post", {"zip": "02134"}),
        ('nothing({"x": 1})', "nothing", {"x": 1}),
        ("nothing[a, b]", "nothing", {"input": "a, b"}),
        ("nothing(1, x=2)", "nothing", {"input": [1], "x": 2}),
    ],
)
def test_ways_to_write_an_action(action: str, name: str, arguments: dict[str, Any]) -> None:
    for label in ("Action:", "**Action:**", "action 1 :"):
        assert as_pairs(parse(f"Thought: So.\n{label} {action}\n").calls) == [(name, arguments)]


@pytest.mark.parametrize(
    "action",
    ["", "I will search for it", "search(Paris)", "search[Paris", "multiply[1, 2, 3]", "multiply(1, a=2)", "search(",
     "post\nAction Input: {oops}", "post\nAction Input: {'zip': 1}", "multiply[1, a=2]", "now[x]", "search(x=open(1))"],
)  # fmt: skip
def test_an_action_that_cannot_be_read_is_an_error_and_the_next_one_is_whole(action: str) -> None:
    failed, call = parse(f"Thought: So.\nAction: {action}\nAction: now()").calls
    assert isinstance(failed, CallError)
    assert failed.text.endswith('; write Action: TOOL({"NAME": VALUE})')
    assert as_pairs([call]) == [("now", {})]


@pytest.mark.parametrize(
    "action",
    [
        r'search\nAction Input: "{\"query\": \"a\"}"'.replace(r"\n", "\n"),
        r'post\nAction Input: "{\"zip\": \"a\"}"'.replace(r"\n", "\n"),
        r'search("{\"query\": \"a\"}")',
        """search('{"query": "a"}')""",
        'search("""\n{\'query\': 1}\n""")',
        r'search["{\"query\": \"a\"}"]',
        "search[{'query': 'a'}]",
        'search("{}")',
        r'nothing("{\"query\": \"a\"}")',
    ],
)
def test_an_object_written_as_a_string_is_an_error_b02(action: str) -> None:
    failed, call = parse(f"Action: {action}\nAction: now()").calls
    assert isinstance(failed, CallError)
    assert "must be a JSON object, not a string" in failed.text
    assert as_pairs([call]) == [("now", {})]


def test_an_argument_that_is_named_may_be_the_text_of_an_object_b02() -> None:
    for action in ("search(query='{\"a\": 1}')", "search[query='{\"a\": 1}']", r'search({"query": "{\"a\": 1}"})'):
        assert as_pairs(parse(f"Action: {action}").calls) == [("search", {"query": '{"a": 1}'})]
    for text in ("{a} or {b}", "what is {'a': 1} in Python?", "{'a': 1} or {'b'"):
        assert as_pairs(parse(f"Action: search[{text}]").calls) == [("search", {"query": text})]


def test_an_observation_that_the_model_invents_is_dropped() -> None:
    invented = "\nObservation: 70\nThought: I have it.\nAction: multiply[70, 2]\nFinal answer: 140"
    turn = parse(f"Thought: So.\nAction: multiply[17.5, 4]{invented}")
    assert as_pairs(turn.calls) == [("multiply", {"a": 17.5, "b": 4})]
    assert (turn.content, turn.thinking) == ("", "So.")
    (error,) = parse(f"Thought: So.{invented}").calls
    assert isinstance(error, CallError)
    assert "no line begins with Action or Final answer" in error.text


def test_a_turn_of_thoughts_alone_is_an_error_unless_it_was_cut() -> None:
    (error,) = parse("Thought: Hm.").calls
    assert isinstance(error, CallError)
    assert parse("Thought: Hm.", finish_reason="length") == ParsedTurn(content="", calls=(), thinking="Hm.")


def test_an_answer_goes_on_to_the_end_whatever_is_in_it() -> None:
    answer = "Two things.\nAction: none\nObservation: it works"
    assert parse(f"I have it.\nFinal answer: {answer}") == ParsedTurn(content=answer, calls=(), thinking="I have it.")


def test_an_action_that_may_go_on_behind_the_cut_is_none() -> None:
    for text in ("Action: no", "Action: now", "Action: now\n", "Action: search\nAction Inp", "Action: search[a"):
        assert parse(text, finish_reason="length").calls == (), text
    assert as_pairs(parse("Action: now\nThought: and", finish_reason="length").calls) == [("now", {})]
