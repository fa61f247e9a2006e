"""A call in a form that no format reads is an error; prose, code and data that only look like one are an answer."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.tool_formats.base import CallError, ParsedTurn, ToolFormat
from data.tool_formats.detect import TOOL_FORMATS
from data.tool_formats.other_forms import called_in_other_forms
from data.types import FinishReason
from envs.types import ToolSpec
from tests.contracts.tool_formats import MARKS

WEATHER = ToolSpec(
    name="get_weather", description="", parameters={"type": "object", "properties": {"location": {"type": "string"}}}
)
SEARCH = ToolSpec(name="search", description="", parameters={"type": "object", "properties": {}})
ARGUMENTS = {"location": "Paris"}


def parse(
    any_format: ToolFormat, text: str, tools: tuple[ToolSpec, ...] = (WEATHER, SEARCH), reason: FinishReason = "stop"
) -> ParsedTurn:
    return any_format.parse(text, call_id_prefix="c", finish_reason=reason, tools=tools)


@pytest.fixture(params=list(TOOL_FORMATS))
def any_format(request: pytest.FixtureRequest) -> ToolFormat:
    return TOOL_FORMATS[request.param]


OBJECTS = [
    {"type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}},
    {"type": "function", "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}},
    {"tool_calls": [{"name": "get_weather", "arguments": ARGUMENTS}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "get_weather"}}]},
    {"tool": "get_weather", "args": ARGUMENTS},
    {"tool_name": "get_weather", "parameters": ARGUMENTS},
    {"action": "get_weather", "action_input": ARGUMENTS},
    {"thought": "Hm.", "action": "get_weather", "action_input": "Paris"},
    {"function": "get_weather", "input": ARGUMENTS},
    {"tool": "get_weather"},
    {"name": "get_weather", "description": "The weather in Paris.", "arguments": ARGUMENTS},
]
WRITTEN = [
    *(text for one in OBJECTS for text in (json.dumps(one, indent=1), repr(one), f"[{json.dumps(one)}]")),
    "{'name': 'get_weather', 'arguments': {'location': 'Paris', 'exact': True}}",
]


@pytest.mark.parametrize("written", WRITTEN)
def test_an_object_that_names_a_tool_and_its_arguments_b11(any_format: ToolFormat, written: str) -> None:
    for around in ("{}", "I will look.\n{}\nSo.", "```json\n{}\n```", "```python\n{}\n```", "```\n{}"):
        (error,) = parse(any_format, around.replace("{}", written)).calls
        assert isinstance(error, CallError)
        assert "'get_weather' is not in the form" in error.text or "unknown key 'description'" in error.text


@pytest.mark.parametrize(
    "text",
    [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"location": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"location": "Paris"}<｜tool▁call▁end｜>',
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n</｜DSML｜invoke>',
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"a": 1}',
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="location">Paris</parameter>\n</invoke>',
        "<tool_calls>\n<tool_call>get_weather\n<tool_sep>\n",
        '<function=get_weather>{"location": "Paris"}</function>',
        "Action: get_weather[Paris]",
        '**Action:** get_weather({"location": "Paris"})',
        'Thought: Hm.\nAction: get_weather\nAction Input: {"location": "Paris"}',
        'get_weather(location="Paris")',
        "I will look.\n  get_weather('Paris')  # now\nSo.",
        'get_weather(\n    location="Paris",\n);',
        'functions.get_weather(location="Paris")',
        '```python\nget_weather(location="Paris")\n```',
        '```tool_code\nget_weather(location="Paris")\n```',
        '```tool_code\nprint(default_api.get_weather(location="Paris"))\n```',
        '```tool_call\nweather = get_weather(location="Paris")\n```',
    ],
)
def test_a_name_behind_marks_and_a_call_alone_on_its_line_b11(any_format: ToolFormat, text: str) -> None:
    if any_format.name == "react" and "Action:" in text:
        return  # its own form
    turn = parse(any_format, text)
    assert turn.calls
    assert all(isinstance(call, CallError) for call in turn.calls)


@pytest.mark.parametrize(
    "text",
    [
        "I used get_weather and search for this.",
        'Use `get_weather(location="Paris")` for that.',
        '`get_weather(location="Paris")`',
        '- `get_weather(location="Paris")`: the weather\n- `search()`: all else',
        'I called get_weather(location="Paris") before, and search("x") too.',
        "get_weather(location) takes a place.\nsearch(query)",
        "search(1) = 4",
        "The form is `<invoke name='search'>`, so `<｜tool▁call▁begin｜>search` too.",
        "```xml\n<function>search</function>\n```",
        "```html\n<tool>search</tool>\n<function>search</function>\n```",
        'So:\n```yaml\n- tool:\n    <invoke name="search">\naction: search\naction input: x\n```\nDone.',
        "My action: search the web.\nAction: search the web",
        "```bash\nget_weather Paris\nsearch --all\n```",
        '```bash\ncurl -d \'{"tool": "search", "args": {}}\' host\n```',
        '```python\nprint(len("Paris"))\nfetch(location="Paris")\n```',
        '```python\ndef search(query):\n    return []\n\nsearch("Paris")\n```',
        '```python\nfrom web import search\n\nsearch("Paris")\n```',
        '```python\nfor city in cities:\n    search(query="Paris")\n```',
        '```python\nfound = search(query="Paris")\nprint(found)\n```',
        '```json\n{"city": "Paris", "weather": {"temperature": 18}}\n```',
        '```json\n{"type": "function", "function": {"name": "fetch", "arguments": {}}}\n```',
        '[{"action": "none", "action_input": {}}]',
        '{"action": "search", "of": "the house"}',
        '{"type": "function", "function": {"name": "search", "description": "Find.", "parameters": {}}}',
        '{"name": "search", "description": "Find.", "parameters": {"type": "object", "properties": {}}}',
        '```json\n[{"name": "search", "description": "Find."}]\n```',
        '{"steps": ["search", "get_weather"], "used": {"tool": {"title": "search"}}}',
        "{'city': 'Paris'} and {'a', 'b'}",
    ],
)
def test_prose_code_and_data_stay_an_answer_b11(any_format: ToolFormat, text: str) -> None:
    if any_format.name == "react" and "action:" in text.lower():
        return  # its own form
    assert parse(any_format, text) == ParsedTurn(content=text, calls=())


BROKEN = [
    '{"type": "function", "name": "search", "parameters": {"query": "x"}',
    '{"type": "function", "name": "search", "parameters": {"query": "x}}',
    '{"type": "function", "name": "search", "parameters": {"query": "say "hi""}}',
    '{"parameters": {"query": "x"}, "name": "search"',
    '{"function": "search", "parameters": {"query": "x"}',
    '{"type": "function", "function": {"name": "search", "parameters": {"query": "x"}}',
    '{"tool_calls": [{"function": {"name": "search", "arguments": {"query": "x"}}]}',
    '{"name": "search", "arguments": {"query": "x",}}',
    '{"name" "search", "parameters": {"query": "x"}}',
    '{"name": search, "parameters": {"query": "x"}}',
    '{name: "search", parameters: {query: "x"}}',
    "{'tool': 'search', 'args': {'query': x}}",
    '{"name": "search"',
    '{"name": "get_weather", "location": "Paris",}',
]


@pytest.mark.parametrize("written", BROKEN)
def test_an_object_that_cannot_be_read_and_asks_for_a_tool_b11_b03(any_format: ToolFormat, written: str) -> None:
    """Whatever key comes first, and whatever it is that is wrong."""
    for around in ("{}", "I will look.\n{}", "```json\n{}\n```"):
        calls = parse(any_format, around.replace("{}", written)).calls
        assert calls, around
        assert all(isinstance(call, CallError) for call in calls)


@pytest.mark.parametrize(
    "text",
    [
        '{"parameters": {"lr": 0.1}}',
        '{"parameters": [1, 2]}',
        '{"name": "Alice", "parameters": [1, 2]}',
        '```json\n{"name": "adam", "parameters": null}\n```',
        'The best run: {"name": "adam-lr3", "parameters": {"lr": 0.1}, "loss": 0.3}',
        '{"arguments": ["a"], "name": 5}',
        '{"name": "search", "version": "3.11"}',
        '{"name": "search", "version": "3.11",}',
        '{"name": "Bob", "role": "search", "x": 1, // c\n}',
        '{"name": "adam", "parameters": {"search": 1},}',
        '{"name": "search", "strict": true, "parameters": {"type": "object", "properties": {}}}',
        '{"name": "search", "parameters": {"type": "object", "properties": {},}}',
    ],
)
def test_data_with_the_keys_of_a_call_is_an_answer_b11(any_format: ToolFormat, text: str) -> None:
    """It names no tool, or asks nothing of one."""
    assert parse(any_format, text) == ParsedTurn(content=text, calls=())


def test_without_tools_an_object_may_name_any_and_python_none_b11(any_format: ToolFormat) -> None:
    (error,) = parse(any_format, '{"tool": "fetch", "args": {}}', ()).calls
    assert isinstance(error, CallError)
    for text in ('{"tool": "fetch"}', 'fetch(x="a")', '<invoke name="fetch">'):
        assert parse(any_format, text, ()).calls == ()


def test_a_cut_turn_is_not_searched_b11(any_format: ToolFormat) -> None:
    assert parse(any_format, '{"tool": "search", "args": {}}', reason="length").calls == ()


def test_many_calls_in_another_form_get_few_errors_b11(any_format: ToolFormat) -> None:
    for one in ('{"tool": "search", "args": {}}\n', 'search("x")\n', "<tool_call>search\n"):
        assert 0 < len(parse(any_format, one * 500).calls) <= 17


@settings(deadline=None, max_examples=150)
@given(
    text=st.lists(
        st.sampled_from([*MARKS, "search", "search(", "{'", '{"tool": "search", ', "<tool>", "```tool\n", "f(1)"])
        | st.text(max_size=8)
    ).map("".join)
)
def test_any_text_is_searched_without_an_exception_b11(text: str) -> None:
    for tools in ((), (WEATHER, SEARCH)):
        called = called_in_other_forms(text, tools)
        assert not tools or set(called) <= {"search"}


def test_no_text_takes_long_to_search() -> None:
    for mark in ("{'", '{"a":[', "search(", "search(\n", "```tool\n", "<tool>", "<tool> ", "{'a': [", '```a\n{"', "`a"):
        assert called_in_other_forms((mark * 10_000)[:30_000], (WEATHER, SEARCH)) == []
