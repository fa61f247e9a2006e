"""What is filled in is what the template would write; a template that looks into contents is rendered each time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from data.chat_template import ChatTemplate
from data.guard import Guard
from data.template_reading import may_look_inside
from data.template_renderer import TemplateRenderer
from envs.types import Message, ToolCall, ToolSpec
from tests.data.test_types import no_clock

EMBEDDED = Path(__file__).parents[2] / "models" / "embedded"
TOKENIZER = AutoTokenizer.from_pretrained(EMBEDDED)
WRITES_ONLY = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content | trim }}"
    "{% if m.content %}{{ '!' }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    "looks",
    [
        '{% if "/no_think" in m.content %}x{% endif %}',
        "{% if m.role == 'user' and '/no_think' in m['content'] %}x{% endif %}",
        "{% set x = '/no_think' in m.content %}{{ 'x' if x }}",
        "{% set x = m.content %}{% if x.startswith('a') %}x{% endif %}",
        "{% set ns.x = m.content %}",
        "{{ 'N' if m.content and 'a' in m.content else '' }}",
        "{% if m.content == 'reset' %}x{% endif %}",
        "{% if m.content[0] == '/' %}x{% endif %}",
        "{% if m.content | length > 2000 %}x{% endif %}",
        "{{ m.content | upper }}",
        "{{ m.content.split('a')[0] }}",
        "{% macro write(x) %}{{ x }}{% endmacro %}{{ write(m.content) }}",
        "{% if m == messages[-1] %}x{% endif %}",
        "{{ strftime_now('%d') }}",
        "{% generation %}{{ m.content }}{% endgeneration %}",
    ],
)
def test_a_template_that_may_look_into_contents_is_known(looks: str) -> None:
    assert may_look_inside("{% for m in messages %}" + looks + "{% endfor %}")
    assert not may_look_inside(WRITES_ONLY)


def test_the_embedded_model_s_template_only_writes_them() -> None:
    assert not may_look_inside(TOKENIZER.chat_template)


contents = st.text(max_size=12) | st.sampled_from(["place 0", "\ue000place 1\ue001", '{"a": "\\"}', "", " x ", "a\n"])


@settings(no_clock, max_examples=60)
@given(said=st.lists(contents, min_size=3, max_size=3), calls=st.integers(1, 2))
def test_what_is_filled_in_is_what_the_template_writes(said: list[str], calls: int) -> None:
    guard = Guard(TOKENIZER)
    template = ChatTemplate(TOKENIZER, guard, name="embedded", enable_thinking=None)
    ids = [f"c{number}" for number in range(calls)]
    asked = tuple(ToolCall(call_id=one, name="f", arguments={"x": "place 0"}) for one in ids)
    chat = [
        Message(role="system", content=said[0]),
        Message(role="user", content=said[1]),
        Message(role="assistant", tool_calls=asked),
        *(Message(role="tool", content=said[2], call_id=one) for one in ids),
    ]
    for _ in range(2):  # the skeleton made, and the skeleton kept
        filled = template.render(chat, (), writing=template.guarded, generation_prompt=True)
        assert filled == template._render(chat, (), writing=template.guarded, generation_prompt=True)


def opening(renderer: TemplateRenderer, tools: Sequence[ToolSpec]) -> str:
    (segment,) = renderer.opening([Message(role="user", content="Hi.")], tools)
    return renderer.decode(segment.token_ids)


def test_tools_that_are_equal_but_written_differently_are_not_mixed_up() -> None:
    renderer = TemplateRenderer(TOKENIZER, name="embedded")

    def tool(**properties: object) -> list[ToolSpec]:
        return [ToolSpec(name="f", description="", parameters={"type": "object", "properties": properties})]

    assert '"default": 1' in opening(renderer, tool(x={"default": 1}))
    assert '"default": true' in opening(renderer, tool(x={"default": True}))
    assert opening(renderer, tool(a={}, b={})).index('"a"') < opening(renderer, tool(a={}, b={})).index('"b"')
    assert opening(renderer, tool(b={}, a={})).index('"b"') < opening(renderer, tool(b={}, a={})).index('"a"')
    choices = ["one"]
    specs = tool(x={"enum": choices})
    opening(renderer, specs)
    choices.append("two")
    assert '"two"' in opening(renderer, specs)
