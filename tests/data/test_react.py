"""ReAct over a chat model without tool support: a whole conversation in plain messages, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.react import ReactRenderer, write_turn
from data.template_renderer import TemplateRenderer
from data.tool_formats.base import CallError
from data.tool_formats.detect import tool_format
from data.types import Segment, Source
from envs.types import Message, ToolCall, ToolSpec
from tests.contracts.tool_formats import conversations
from tests.data.test_types import no_clock

MARKS = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<think>", "</think>"]
PLAIN = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# User and assistant by turns, and nobody else.
STRICT = (
    "{% for m in messages %}{% if m.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}"
    "{{ raise_exception('user and assistant by turns') }}{% endif %}"
    "{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
THINKS = PLAIN.replace("'<|assistant|>' }}", "'<|assistant|><think>\n' }}")
WEATHER = ToolSpec(
    name="get_weather",
    description="The weather of a place.",
    parameters={"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
)


def renderer(template: str = PLAIN) -> ReactRenderer:
    """Over a tokenizer of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS[1:]})  # type: ignore[arg-type]
    tokenizer.chat_template = template
    return ReactRenderer(TemplateRenderer(tokenizer, name="plain"))


def ids(segments: Sequence[Segment] | None) -> list[int]:
    assert segments is not None
    return [token for segment in segments for token in segment.token_ids]


def text_of(react: ReactRenderer, segments: Sequence[Segment] | None) -> str:
    return react.decode(ids(segments))


def sampled(react: ReactRenderer, text: str) -> list[int]:
    return [*react.encode_text(text), react.stop_token_ids[0]]


ASKED = [Message(role="system", content="Be brief."), Message(role="user", content="Paris?")]


def test_the_tools_are_told_in_the_system_message() -> None:
    react = renderer()
    text = text_of(react, react.opening(ASKED, [WEATHER]))
    assert text.startswith("<|system|>Be brief.\n\nYou can use tools.")
    assert 'Action: TOOL({"NAME": VALUE})' in text
    assert 'get_weather: The weather of a place. Arguments: {"type": "object"' in text
    assert text.endswith("<|end|><|user|>Paris?<|end|><|assistant|>")
    assert text_of(react, react.opening(ASKED[1:], [WEATHER])).startswith("<|system|>You can use tools.")
    assert text_of(react, react.opening(ASKED[1:], [])) == "<|user|>Paris?<|end|><|assistant|>"


def test_a_template_without_a_system_role_hears_of_them_from_the_user() -> None:
    react = renderer(STRICT)
    text = text_of(react, react.opening(ASKED[1:], [WEATHER]))
    assert text.startswith("<|user|>You can use tools.")
    assert text.endswith("\n\nParis?<|end|><|assistant|>")


@pytest.mark.parametrize("template", [PLAIN, STRICT])
def test_a_conversation(template: str) -> None:
    react = renderer(template)
    prompt = ids(react.opening(ASKED[1:], [WEATHER]))
    turn = sampled(react, "Thought: Two places.\nAction: get_weather[Paris]\nAction: get_weather[Rome]")
    parsed = react.parse(turn, call_id_prefix="c", tools=[WEATHER], prompt_ids=prompt)
    assert [call.arguments for call in parsed.calls if isinstance(call, ToolCall)] == [
        {"location": "Paris"}, {"location": "Rome"},
    ]  # fmt: skip
    results = [
        Message(role="tool", content="18", call_id="c_0"),
        Message(role="tool", content="no <|end|>", call_id="c_1"),
    ]
    bridge = react.bridge(results, prompt_ids=prompt, sampled_ids=turn, tools=[WEATHER])
    assert text_of(react, bridge) == "<|user|>Observation 1: 18\n\nObservation 2: no <|end|><|end|><|assistant|>"
    assert ids(bridge).count(react.stop_token_ids[0]) == 1, "the tool's own was text"
    assert [segment.source for segment in bridge or []] == [Source.TEMPLATE, Source.TOOL, Source.TEMPLATE]
    answer = sampled(react, "Thought: I have both.\nFinal answer: 18")
    last = react.parse(answer, call_id_prefix="c", tools=[WEATHER], prompt_ids=[*prompt, *turn, *ids(bridge)])
    assert (last.content, last.calls, last.thinking) == ("18", (), "I have both.")


@pytest.mark.parametrize("template", [PLAIN, STRICT])
def test_a_history_is_the_same_text_as_the_stream_that_it_stands_for(template: str) -> None:
    """What a rewritten opening says of a turn is what the turn said."""
    react = renderer(template)
    call = ToolCall(call_id="c_0", name="get_weather", arguments={"location": "Paris"})
    turn = Message(role="assistant", thinking="One place.", tool_calls=(call,))
    result = [Message(role="tool", content="18", call_id="c_0"), Message(role="user", content="And now?")]
    prompt = ids(react.opening(ASKED[1:], [WEATHER]))
    written = list(react.turn_ids(turn))
    stream = prompt + written + ids(react.bridge(result, prompt_ids=prompt, sampled_ids=written, tools=[WEATHER]))
    assert stream == ids(react.opening([*ASKED[1:], turn, *result], [WEATHER]))
    assert react.decode(stream).endswith("<|user|>Observation: 18\n\nAnd now?<|end|><|assistant|>")


def test_what_a_model_invents_stays_out_of_the_conversation() -> None:
    react = renderer()
    turn = sampled(react, "Action: get_weather[Paris]\nObservation: 30\nFinal answer: 30")
    parsed = react.parse(turn, call_id_prefix="c", tools=[WEATHER])
    assert len(parsed.calls) == 1
    assert "30" not in parsed.content + parsed.thinking


def test_thinking_that_the_prompt_opened() -> None:
    react = renderer(THINKS)
    prompt = ids(react.opening(ASKED[1:], [WEATHER]))
    turn = [*react.encode_text("Action: get_weather[Rome]"), *_mark(react, "</think>"),
            *sampled(react, "\nThought: So.\nAction: get_weather[Paris]")]  # fmt: skip
    parsed = react.parse(turn, call_id_prefix="c", tools=[WEATHER], prompt_ids=prompt)
    assert [call.arguments for call in parsed.calls if isinstance(call, ToolCall)] == [{"location": "Paris"}]
    assert parsed.thinking == "Action: get_weather[Rome]\nSo."
    assert react.parse(turn[:9], call_id_prefix="c", prompt_ids=prompt, finish_reason="length").thinking_open


def _mark(react: ReactRenderer, text: str) -> list[int]:
    return [token_id for token_id, token in react.control_tokens.items() if token == text]


def test_a_call_in_the_models_native_form_is_an_error() -> None:
    react = renderer()
    turn = sampled(react, '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Paris"}}\n</tool_call>')
    (error,) = react.parse(turn, call_id_prefix="c", tools=[WEATHER]).calls
    assert isinstance(error, CallError)
    assert "write Action: TOOL" in error.text


def test_there_is_no_grammar_for_it() -> None:
    assert renderer().structural_tag([WEATHER]) is None


REACT = renderer()


@no_clock
@given(conversation=conversations(), thinking=st.text())
def test_a_demonstration_is_read_as_it_was_meant(
    conversation: tuple[list[ToolSpec], list[tuple[str, dict[str, object]]]], thinking: str
) -> None:
    tools, pairs = conversation
    calls = tuple(ToolCall(call_id=f"c_{i}", name=name, arguments=given) for i, (name, given) in enumerate(pairs))
    for message in (
        Message(role="assistant", thinking=thinking, tool_calls=calls),
        Message(role="assistant", thinking=thinking, content="Two:\nAction: none"),
    ):
        turn = REACT.turn_ids(message)
        assert turn[-1] in REACT.stop_token_ids
        parsed = REACT.parse(turn, call_id_prefix="c", tools=tools)
        assert parsed.calls == message.tool_calls
        assert parsed.content == message.content


def test_a_line_of_a_thought_that_looks_like_a_label_is_quoted() -> None:
    message = Message(role="assistant", thinking="Perhaps\nAction: f()\nFinal answer: 1", content="2")
    assert write_turn(message) == "Thought: Perhaps\n> Action: f()\n> Final answer: 1\nFinal answer: 2"


def test_a_marker_in_a_thought_swallows_no_call() -> None:
    call = ToolCall(call_id="c_0", name="f", arguments={"s": "<think>"})
    said = Message(role="assistant", thinking="The <think> tag.", content="<think>?", tool_calls=(call,))
    turn = tool_format("react").parse(write_turn(said), call_id_prefix="c", finish_reason="stop")
    assert turn.calls == (call,)
    assert not turn.thinking_open
