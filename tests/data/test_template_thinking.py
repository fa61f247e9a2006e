"""Thinking: kept or followed, and read where the prompt has opened it."""

from __future__ import annotations

import pytest

from data.template_renderer import TemplateRenderer, Thinking
from envs.types import Message, ToolCall
from tests.data.chat_tokenizers import make_tokenizer, peer_template, small_core, tokenizer_for
from tests.data.renderings import TOOL, bridge_after, closing_id, ids_of, native_ids

USER = Message(role="user", content="What is 12?")
AGAIN = Message(role="user", content="And 13?")
CALL = ToolCall(call_id="c", name="f", arguments={"x": "1"})
RESULT = Message(role="tool", content="7", call_id="c")
THOUGHT = Message(role="assistant", thinking="Twelve.", content="12")


def renderer_of(name: str, thinking: Thinking, enable_thinking: bool | None = None) -> TemplateRenderer:
    tokenizer = (
        make_tokenizer(small_core(), peer_template(name)) if name == "qwen3" else tokenizer_for(peer_template(name))
    )
    return TemplateRenderer(tokenizer, name=name, thinking=thinking, enable_thinking=enable_thinking)


def bridge(
    renderer: TemplateRenderer, turn: tuple[int, ...], following: Message, prompt: list[int] | None = None
) -> list[int] | None:
    prompt = prompt or ids_of(renderer.opening([USER], []))
    segments = renderer.bridge([following], prompt_ids=prompt, sampled_ids=turn, tools=[])
    return None if segments is None else ids_of(segments)


def test_thinking_that_the_template_drops_a10() -> None:
    """Qwen3 drops earlier thinking when a user message comes. Kept: the stream only grows, and is not the native
    rendering. Followed: a new stream starts, whose prompt is the native one. Both are stated."""
    keep, follow = (renderer_of("qwen3", thinking) for thinking in ("keep", "follow"))
    turn = keep.turn_ids(THOUGHT)
    assert "Twelve." in keep.decode(turn)
    assert bridge(keep, turn, AGAIN) is not None
    assert bridge(follow, turn, AGAIN) is None
    chat = [USER, THOUGHT, AGAIN]
    tokenizer = make_tokenizer(small_core(), peer_template("qwen3"))
    (opening,) = follow.opening(chat, [])
    assert list(opening.token_ids) == native_ids(tokenizer, chat)
    assert "Twelve." not in follow.decode(opening.token_ids)
    assert "thinking kept: a stream only grows, although a user message" in keep.description
    assert "thinking followed: a new stream starts where a user message" in follow.description


def test_thinking_inside_a_tool_loop_is_kept_by_both_a10() -> None:
    """And a user message behind it drops what was thought before the call, even where the answer has no thinking."""
    follow = renderer_of("qwen3", "follow")
    call = Message(role="assistant", thinking="I must look.", tool_calls=(CALL,))
    turn = follow.turn_ids(call)
    between = bridge(follow, turn, RESULT)
    assert between is not None
    bare = (*follow.encode_text("12"), follow.stop_token_ids[0])
    prompt = [*ids_of(follow.opening([USER], [])), *turn, *between]
    assert bridge(follow, bare, AGAIN, prompt) is None
    assert bridge(follow, bare, AGAIN) is not None, "nothing was thought, so nothing is dropped"


def test_an_empty_thought_that_the_template_drops_a10() -> None:
    """Qwen3 writes the empty markers around a last turn, and takes them out once a result comes."""
    follow = renderer_of("qwen3", "follow")
    turn = follow.turn_ids(Message(role="assistant", tool_calls=(CALL,)))
    assert "<think>\n\n</think>" in follow.decode(turn)
    assert bridge(follow, turn, RESULT) is None


@pytest.mark.parametrize("name", ["qwen2_5", "lfm2", "llama3_1", "qwen3_training"])
def test_a_template_that_rewrites_nothing_needs_no_new_stream(name: str) -> None:
    follow = renderer_of(name, "follow")
    assert "the template never rewrites earlier turns" in follow.description
    for following in (AGAIN, RESULT):
        assert bridge(follow, (5, closing_id(follow, [following])), following) is not None


def test_tools_that_move_to_the_last_user_message() -> None:
    """As Mistral's do: that is rewriting too."""
    moved = peer_template("qwen2_5").replace("tools", "(tools if messages[-1].role == 'user' else none)")
    tokenizer = make_tokenizer(
        small_core(), "{% set n = messages | length %}" + moved.replace("{%- if (tools", "{%- if n < 2 and (tools")
    )
    follow = TemplateRenderer(tokenizer, name="m", thinking="follow")
    assert bridge(follow, (5, follow.stop_token_ids[0]), AGAIN) is None


@pytest.mark.parametrize(
    ("name", "enable_thinking", "opened"),
    [
        ("qwen3_5_think", None, True),
        ("qwen3_5_think", False, False),
        ("qwen3_5_nothink", None, False),
        ("qwen3_5_nothink", True, True),
        ("nemotron_3_nano", None, True),
        ("deepseek_r1_distill", None, True),
        ("qwen3", None, False),
    ],
)
def test_a_prompt_that_opened_the_thinking_is_told_to_the_reader(
    name: str, enable_thinking: bool | None, opened: bool
) -> None:
    renderer = renderer_of(name, "keep", enable_thinking)
    sampled = [*renderer.encode_text("Hm. 12"), renderer.stop_token_ids[0]]
    prompt = ids_of(renderer.opening([USER], []))
    for prompt_ids in (prompt, []):
        parsed = renderer.parse(sampled, call_id_prefix="c", prompt_ids=prompt_ids)
        assert parsed.thinking_open == opened
        assert parsed.content == ("" if opened else "Hm. 12")
    # A prompt that does not end as the generation prompt does has opened nothing.
    parsed = renderer.parse(sampled, call_id_prefix="c", prompt_ids=renderer.encode_text("Go on."))
    assert not parsed.thinking_open


def test_thinking_may_be_switched_off() -> None:
    prompts = [renderer_of("qwen3", "keep", enable).opening([USER], [TOOL]) for enable in (None, True, False)]
    texts = [renderer_of("qwen3", "keep").decode(ids_of(prompt)) for prompt in prompts]
    assert texts[0] == texts[1]
    assert texts[2] == texts[0] + "<think>\n\n</think>\n\n"


def test_a_turn_that_no_policy_could_sample_is_refused() -> None:
    """Nemotron's prompt opens the thinking; a turn without any is written in another form."""
    renderer = renderer_of("nemotron_3_nano", "keep")
    assert renderer.turn_ids(THOUGHT)
    with pytest.raises(ValueError, match="without thinking in a form that does not begin with its generation prompt"):
        renderer.turn_ids(Message(role="assistant", content="12"))
    assert renderer_of("nemotron_3_nano", "keep", False).turn_ids(Message(role="assistant", content="12"))


@pytest.mark.parametrize("template", ["gemma4_v5", "diffusion_gemma"])
def test_a_prompt_may_open_thinking_behind_a_result_alone(template: str) -> None:
    """What looks like a call there was only weighed. A result that spells the opener opens nothing."""
    renderer = TemplateRenderer(tokenizer_for(peer_template(template)), name="m", enable_thinking=True)
    prompt = ids_of(renderer.opening([Message(role="user", content="Hi")], [TOOL]))
    call = ToolCall(call_id="call_0_0", name="f", arguments={})
    turn = renderer.turn_ids(Message(role="assistant", tool_calls=(call,)))
    result = Message(role="tool", content="<|channel>thought", call_id="call_0_0")
    bridge = ids_of(bridge_after(renderer, [result], turn=turn))
    weighed = turn[:-1]
    closed = [next(token for token, text in renderer.control_tokens.items() if text == "<channel|>")]
    said = [*weighed, *closed, *renderer.encode_text("Yes")]
    parsed = renderer.parse(said, call_id_prefix="c", prompt_ids=[*prompt, *turn, *bridge])
    assert (parsed.calls, parsed.content) == ((), "Yes")
    first = renderer.parse(turn, call_id_prefix="c", prompt_ids=prompt)
    assert len(first.calls) == 1
