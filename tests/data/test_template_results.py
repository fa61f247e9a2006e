"""Results answer calls: each is headed by the call of its id, as the native template has it."""

from __future__ import annotations

import re

import pytest

from data.demonstrations import Demonstration, to_sample
from data.template_renderer import TemplateRenderer
from data.tool_formats.base import ParsedTurn
from envs.types import Message, ToolCall
from tests.data.chat_tokenizers import (
    CHATML,
    make_tokenizer,
    peer_template,
    small_core,
    tokenizer_for,
)
from tests.data.renderings import (
    TOOL,
    bridge_after,
    ids_of,
    native_ids,
    text_of,
)


def test_results_carry_the_name_of_the_call_that_was_sampled() -> None:
    """Where a template writes it; the model's own call says which."""
    header = "'<|im_start|>' + m.role"
    named = "(' ' + messages[loop.index0 - 1].tool_calls[0].function.name if m.role == 'tool' else '')"
    renderer = TemplateRenderer(make_tokenizer(small_core(), CHATML.replace(header, f"{header} + {named}")), name="m")
    turn = renderer.turn_ids(Message(role="assistant", tool_calls=(ToolCall(call_id="c", name="look", arguments={}),)))
    bridge = bridge_after(renderer, [Message(role="tool", content="7", call_id="c")], turn=turn)
    assert "<|im_start|>tool look\n7" in text_of(renderer, bridge)


@pytest.mark.parametrize("template", ["gemma4", "gemma4_v5", "diffusion_gemma"])
@pytest.mark.parametrize("ids", [("a", "b"), ("call_0", "call_1"), ("call_1", "call_0"), ("x_7", "x_3")])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_result_answers_the_call_of_its_id_a35_a39(
    template: str, ids: tuple[str, str], order: tuple[int, int]
) -> None:
    """In whichever order a demonstration has them, the template heads each with the right name."""
    tokenizer = tokenizer_for(peer_template(template))
    renderer = TemplateRenderer(tokenizer, name="m")
    calls = tuple(
        ToolCall(call_id=call_id, name=name, arguments={}) for call_id, name in zip(ids, ("alpha", "beta"), strict=True)
    )
    results = [Message(role="tool", content=f"of {calls[i].name}", call_id=calls[i].call_id) for i in order]
    asked, said = Message(role="user", content="Hi"), Message(role="assistant", tool_calls=calls)
    chat = (asked, said, *results, Message(role="assistant", content="Done."))
    sample = to_sample(Demonstration(task_id="d", messages=chat, tools=()), renderer)
    text = renderer.decode(sample.token_ids)
    answered = [f'response:{calls[i].name}{{value:<|"|>of {calls[i].name}<|"|>}}' for i in order]
    places = [text.index(one) for one in answered]
    assert places == sorted(places)
    assert text[: places[-1]] in str(tokenizer.decode(native_ids(tokenizer, chat[:-1])))


def test_results_of_a_sampled_turn_answer_by_the_ids_that_it_was_read_with_a35() -> None:
    renderer = TemplateRenderer(tokenizer_for(peer_template("gemma4_v5")), name="m")
    turn = renderer.turn_ids(
        Message(
            role="assistant",
            tool_calls=tuple(ToolCall(call_id=name, name=name, arguments={}) for name in ("alpha", "beta")),
        )
    )
    first, second = renderer.parse(turn, call_id_prefix="call_3").calls
    for order in ((first, second), (second, first), (second,)):
        results = [Message(role="tool", content="7", call_id=call.call_id) for call in order]
        named = re.findall(r"response:(\w+)", text_of(renderer, bridge_after(renderer, results, turn=turn)))
        assert named == [call.name for call in order if isinstance(call, ToolCall)]
    unknown = [Message(role="tool", content="7", call_id=call_id) for call_id in ("p", "q", "r")]
    named = re.findall(r"response:(\w+)", text_of(renderer, bridge_after(renderer, unknown, turn=turn)))
    assert named == ["alpha", "beta", "unknown"]


@pytest.mark.parametrize("name", ["look", "a.b"])
def test_gpt_oss_thinks_calls_is_answered_and_answers(name: str) -> None:
    """As the native rendering has it, which heads a result with the function that gave it."""
    tokenizer = tokenizer_for(peer_template("gptoss"))
    renderer = TemplateRenderer(tokenizer, name="m")
    call = ToolCall(call_id="call_0_0", name=name, arguments={"x": "é\n<&>", "n": [1, None]})
    calling = Message(role="assistant", thinking="I look.", tool_calls=(call,))
    prompt = ids_of(renderer.opening([Message(role="user", content="Hi")], [TOOL]))
    turn = renderer.turn_ids(calling)
    assert renderer.control_tokens[turn[-1]] == "<|call|>"
    parsed = renderer.parse(turn, call_id_prefix="call_0", tools=[TOOL], prompt_ids=prompt)
    assert parsed == ParsedTurn(content="", calls=(call,), thinking="I look.")
    result = Message(role="tool", content="7", call_id="call_0_0")
    bridge = bridge_after(renderer, [result], turn=turn, tools=[TOOL])
    assert text_of(renderer, bridge).startswith(f"<|start|>functions.{name} to=assistant<|channel|>commentary")
    answer = renderer.turn_ids(Message(role="assistant", thinking="I have it.", content="It is 7."))
    assert renderer.control_tokens[answer[-1]] == "<|return|>"
    stream = [*prompt, *turn, *ids_of(bridge)]
    assert renderer.parse(answer, call_id_prefix="call_1", tools=[TOOL], prompt_ids=stream) == ParsedTurn(
        content="It is 7.", calls=(), thinking="I have it."
    )
