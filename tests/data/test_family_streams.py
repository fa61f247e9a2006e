"""What stands in the streams of hand-written families: openings without a message, results and their calls, and who
wrote which token."""

from __future__ import annotations

from itertools import permutations

import pytest

from data.demonstrations import Demonstration, to_sample
from data.families import FAMILIES
from data.family_renderer import FamilyRenderer
from data.types import Source
from envs.types import Message, ToolCall, ToolSpec
from tests.data.family_tokenizers import family_tokenizer
from tests.data.test_family_renderer import TOOL, ids_of, load, turn_of

ALPHA, BETA = (ToolSpec(name=name, description="", parameters={"type": "object"}) for name in ("alpha", "beta"))
HEADED = {"gemma4": "response:{}{{", "kimi-k2": "## Return of functions.{}:", "kimi-k2.5": "## Return of functions.{}:"}
NO_TOOLS = ("deepseek-v3", "deepseek-r1")
NO_OPENING = {"qwen3.8": "No user query found", "deepseek-v4": "cannot write a conversation that begins with an assist"}


@pytest.fixture(params=FAMILIES)
def renderer(request: pytest.FixtureRequest) -> FamilyRenderer:
    return load(request.param)


def test_a_conversation_may_begin_with_an_assistant_turn_a03(renderer: FamilyRenderer) -> None:
    """Its opening is what the family writes before one, with the header of a turn to be sampled; where the family
    writes none, it says so."""
    chat = (
        Message(role="assistant", content="Hello."),
        Message(role="user", content="What is 12?"),
        Message(role="assistant", content="Twelve."),
    )
    if renderer.name in NO_OPENING:
        with pytest.raises(ValueError, match=NO_OPENING[renderer.name]):
            renderer.opening([], [])
        return
    if renderer.name == "llama-3":  # it tells the first user message about tools
        with pytest.raises(ValueError, match="requires the first non-system message to be 'user'"):
            renderer.opening([], [TOOL])
    for tools in ([], [TOOL])[: 1 + (renderer.name != "llama-3")]:
        opening, asked = ids_of(renderer.opening([], tools)), ids_of(renderer.opening(chat[1:2], tools))
        header = len(asked) - len(ids_of(renderer.opening([], tools)))
        assert header > 0, "a question stands there, and nothing else is missing"
        last = next(place for place in range(len(opening)) if opening[-place - 1] in renderer.control_tokens)
        assert opening[-last - 1 :] == asked[-last - 1 :]
        assert "Does x." in renderer.decode(opening) or tools == [] or renderer.name in NO_TOOLS
    if renderer.name != "deepseek-r1":
        sample = to_sample(Demonstration(task_id="d", messages=chat, tools=()), renderer)
        assert "Hello." in renderer.decode(sample.token_ids)


@pytest.mark.parametrize("ids", [("a", "b"), ("call_3_0", "call_3_1"), ("functions.alpha:0", "functions.beta:1")])
@pytest.mark.parametrize("family", HEADED)
def test_a_result_is_headed_by_its_own_call_whatever_the_order_a35_a39(family: str, ids: tuple[str, str]) -> None:
    renderer = load(family)
    calls = tuple(
        ToolCall(call_id=one, name=name, arguments={}) for one, name in zip(ids, ("alpha", "beta"), strict=True)
    )
    results = [Message(role="tool", content=f"{call.name}-RESULT", call_id=call.call_id) for call in calls]
    for said in (*permutations(results), results[1:]):
        chat = (
            Message(role="user", content="Go."),
            Message(role="assistant", tool_calls=calls),
            *said,
            Message(role="assistant", content="Done."),
        )
        sample = to_sample(Demonstration(task_id="d", messages=chat, tools=(ALPHA, BETA)), renderer)
        text = renderer.decode(sample.token_ids)
        places = [text.index(message.content) for message in said]
        assert places == sorted(places), "the order of the results is kept"
        for message, place in zip(said, places, strict=True):
            name = message.content.removesuffix("-RESULT")
            heads = {one: text.rfind(HEADED[family].format(one), 0, place) for one in ("alpha", "beta")}
            assert max(heads, key=lambda one: heads[one]) == name


def test_results_of_unknown_ids_are_in_the_order_of_their_calls_a35() -> None:
    renderer = load("gemma4")
    calls = tuple(ToolCall(call_id=name, name=name, arguments={}) for name in ("alpha", "beta"))
    turn = turn_of(renderer, tool_calls=calls)
    results = [Message(role="tool", content=text, call_id=f"id of {text}") for text in ("one", "two")]
    prompt = ids_of(renderer.opening([Message(role="user", content="Go.")], [ALPHA, BETA]))
    bridge = ids_of(renderer.bridge(results, prompt_ids=prompt, sampled_ids=turn, tools=[ALPHA, BETA]))
    text = renderer.decode(bridge)
    assert text.index("response:alpha{") < text.index("one") < text.index("response:beta{") < text.index("two")


def test_control_tokens_beside_a_content_are_the_template_s_a05(renderer: FamilyRenderer) -> None:
    """Gemma writes its quotes as a part of what it takes for the content."""
    turn = turn_of(renderer, tool_calls=(ToolCall(call_id="c", name="f", arguments={}),))
    prompt = ids_of(renderer.opening([Message(role="user", content="Go.")], [TOOL]))
    quotes = "".join(renderer.control_tokens.values())
    for content in ("OBSERVED", quotes, ""):
        reply = [Message(role="tool", content=content, call_id="c")]
        bridge = renderer.bridge(reply, prompt_ids=prompt, sampled_ids=turn, tools=[TOOL])
        assert bridge is not None
        for segment in bridge:
            assert segment.source is Source.TEMPLATE or not renderer.control_tokens.keys() & {*segment.token_ids}


def test_gemma_s_real_quotes_a05() -> None:
    renderer = FamilyRenderer(family_tokenizer("gemma4", "gemma4_v5"), "gemma4", model="m")
    turn = turn_of(renderer, tool_calls=(ToolCall(call_id="c", name="f", arguments={}),))
    prompt = ids_of(renderer.opening([Message(role="user", content="Go.")], [TOOL]))
    reply = [Message(role="tool", content="A", call_id="c")]
    bridge = renderer.bridge(reply, prompt_ids=prompt, sampled_ids=turn, tools=[TOOL])
    assert bridge is not None
    assert [renderer.decode(segment.token_ids) for segment in bridge if segment.source is Source.TOOL] == ["A"]
