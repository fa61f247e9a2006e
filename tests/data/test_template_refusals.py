"""What a template renderer refuses, when it is made or when it is asked, and with which reason."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from data.template_renderer import TemplateRenderer
from data.tool_formats.detect import TOOL_FORMATS
from envs.types import Message, ToolCall
from tests.data.chat_tokenizers import CHATML, make_tokenizer, peer_template, small_core, tokenizer_for
from tests.data.renderings import TOOL, bridge_after, ids_of

USER = Message(role="user", content="Hi")
CALLS = tuple(ToolCall(call_id=f"c{i}", name="f", arguments={}) for i in range(2))


def renderer_of(template: str | None) -> TemplateRenderer:
    return TemplateRenderer(make_tokenizer(small_core(), template), name="m")


FOLLOWED = "cannot be followed token by token"
REFUSED = {
    "repeats content": (CHATML.replace("m.content }}", "m.content + m.content }}"), "repeats contents"),
    "moves content": (CHATML.replace("in messages", "in messages[::-1]"), "no turn could be stopped|does not close"),
    "drops the user": (CHATML.replace("in messages", "in messages if m.role != 'user'"), "drops contents"),
    "changes first letters": (CHATML.replace("m.content }}", "(m.content | capitalize) }}"), FOLLOWED),
    "cuts content": (CHATML.replace("m.content }}", "m.content[:30] }}"), "drops contents"),
    "takes results for data": (
        CHATML.replace("m.content }}", "(m.content | tojson if m.content.strip()[:1] == '{' else m.content) }}"),
        FOLLOWED,
    ),
    "is no Jinja": (CHATML.replace("{% endfor %}", "", 1), "fails on a conversation of user: .*endfor"),
    "adds text and a list": (CHATML.replace("m.content }}", "m.content + [] }}"), "conversation of user: can only"),
    "no end of turn": (CHATML.replace("<|im_end|>", "").replace("<|im_start|>", "# "), "no turn could be stopped"),
    "counts its turns": (
        CHATML.replace("'<|im_start|>' + m.role", "'<|im_start|>' + m.role + (' again' if loop.index > 3 else '')"),
        "depends on the turns before",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_cannot_be_followed_is_refused(name: str) -> None:
    template, reason = REFUSED[name]
    renderer_of(CHATML)
    with pytest.raises(ValueError, match=f"^model m: .*({reason})") as caught:
        renderer_of(template)
    assert "\n" not in str(caught.value)


FOLLOWS = {
    "trims content": CHATML.replace("m.content }}", "m.content | trim }}"),
    "strips a line break": CHATML.replace("m.content }}", "m.content.strip('\n') }}"),
    "writes results as JSON": CHATML.replace(
        "m.content }}", "(m.content | tojson if m.role == 'tool' else m.content) }}"
    ),
    "trims the system message without tools": CHATML.replace(
        "m.content }}", "(m.content if tools or m.role != 'system' else m.content | trim) }}"
    ),
    "changes contents": CHATML.replace("m.content }}", "(m.content | upper) }}"),
    "replaces in contents": CHATML.replace("m.content }}", "(m.content | replace('&', '&amp;')) }}"),
}


@pytest.mark.parametrize("name", FOLLOWS)
def test_a_template_that_changes_contents_is_followed(name: str) -> None:
    """The template itself writes them, so its ids are the native ones (checked when the renderer is made)."""
    renderer = renderer_of(FOLLOWS[name])
    assert bridge_after(renderer, [Message(role="tool", content=" a & b \n", call_id="c")])


def test_a_model_without_a_chat_template_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^model m: no chat template; add chat_template\.jinja") as caught:
        renderer_of(None)
    assert "\n" not in str(caught.value)


def test_a_system_message_that_is_dropped_is_refused() -> None:
    renderer = renderer_of(CHATML.replace("in messages", "in messages if m.role != 'system'"))
    assert "it writes no system message" in renderer.description
    with pytest.raises(ValueError, match="drops contents: of 2 in a conversation of system, user it writes 1"):
        renderer.opening([Message(role="system", content="Be brief."), USER], [])


def test_a_template_that_refuses_a_role_says_so() -> None:
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    renderer = renderer_of(refusal + CHATML)
    with pytest.raises(ValueError, match="fails on a conversation of system, user: no system role; mend"):
        renderer.opening([Message(role="system", content="Be brief."), USER], [])


def test_a_template_without_tools_serves_without_tools() -> None:
    """Gemma's: its tools can only be told as text."""
    renderer = TemplateRenderer(tokenizer_for(peer_template("gemma")), name="m")
    assert "it writes no system message, no tools, no calls, no results" in renderer.description
    assert ids_of(renderer.opening([USER], []))
    assert bridge_after(renderer, [USER])
    with pytest.raises(ValueError, match=r"^model m: its chat template writes no tools; .* set tool_format to react"):
        renderer.opening([USER], [TOOL])
    with pytest.raises(ValueError, match=r"^model m: .*roles must alternate"):
        bridge_after(renderer, [Message(role="tool", content="7", call_id="c")])
    with pytest.raises(ValueError, match=r"^model m: its chat template drops contents"):
        renderer.turn_ids(Message(role="assistant", tool_calls=CALLS[:1]))
    with pytest.raises(ValueError, match=r"^model m: its chat template drops contents"):
        renderer.opening([USER, Message(role="assistant", tool_calls=CALLS[:1])], [])


def test_a_template_whose_calls_are_not_read_serves_without_tools() -> None:
    """Muse Glimmer's, which no format reads: its calls would pass for final answers."""
    renderer = TemplateRenderer(tokenizer_for(peer_template("muse_glimmer")), name="m")
    reason = r"^model m: its chat template writes calls that are not read as llama3_json, such as ' to=f<\|message\|>"
    assert "no tools, since its calls are not read as llama3_json" in renderer.description
    assert ids_of(renderer.opening([USER], []))
    assert bridge_after(renderer, [USER])
    for refused in (
        lambda: renderer.opening([USER], [TOOL]),
        lambda: renderer.turn_ids(Message(role="assistant", tool_calls=CALLS[:1])),
        lambda: bridge_after(renderer, [Message(role="tool", content="7", call_id="c")], turn=[1]),
    ):
        with pytest.raises(ValueError, match=f"{reason}.*; set rollout.renderer.tool_format .* or to react") as caught:
            refused()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("template", ["qwen3", "qwen3_6", "llama3_1", "lfm2_v2", "glm4moe", "gemma4", "gptoss"])
def test_a_tool_format_that_is_not_the_template_s_is_refused(template: str) -> None:
    tokenizer = tokenizer_for(peer_template(template))
    own = TemplateRenderer(tokenizer, name="m")
    assert own.no_reading is None
    for name, other in TOOL_FORMATS.items():
        renderer = TemplateRenderer(tokenizer, name="m", tool_format=other)
        # Qwen3's JSON is what Llama 3 writes without tags.
        if name == own.tool_format.name or (template, name) == ("qwen3", "llama3_json"):
            assert ids_of(renderer.opening([USER], [TOOL])) == ids_of(own.opening([USER], [TOOL]))
        else:
            with pytest.raises(ValueError, match=f"^model m: .* not read as {name}, such as "):
                renderer.opening([USER], [TOOL])


def test_calls_that_lie_behind_are_read_too_where_no_turn_can_be_sampled() -> None:
    """A template that drops the thinking which its generation prompt opens, in every turn of its own."""
    opened = CHATML.replace("<|im_start|>assistant\n' }}", "<|im_start|>assistant\n<think>\n' }}")
    assert renderer_of(opened).no_reading is None
    renderer = renderer_of(opened.replace("<tool_call>", "<call>").replace('"name"', '"tool"'))
    assert renderer.no_reading is not None
    assert "such as '<|im_start|>assistant\\n<call>" in renderer.no_reading


def test_calls_that_the_template_drops_do_not_keep_it_from_answering_them() -> None:
    """LFM2's first template: what was sampled stays, and the results come behind it."""
    renderer = TemplateRenderer(tokenizer_for(peer_template("lfm2")), name="m")
    bridge = bridge_after(renderer, [Message(role="tool", content=said, call_id=said) for said in ("7", "8")])
    assert renderer.decode(ids_of(bridge)).count("<|tool_response_start|>") == 2


@pytest.mark.parametrize("separator", ["raise_exception('one call at a time')", "'<|im_end|>'"])
def test_a_template_for_one_call_a_turn_writes_no_turn_of_two_a39(separator: str) -> None:
    """It serves for turns of one call, and answers two if the policy wrote them."""
    separated = CHATML.replace("{{ '<tool_call>", "{% if not loop.first %}{{ '\n' }}{% endif %}{{ '<tool_call>")
    assert renderer_of(separated).several_calls
    if "raise" not in separator:
        renderer = renderer_of(separated.replace("{{ '\n' }}", f"{{{{ {separator} }}}}"))
        assert renderer.no_results is None or "ends a turn" in renderer.no_results
        return
    renderer = renderer_of(separated.replace("{{ '\n' }}", f"{{{{ {separator} }}}}"))
    assert not renderer.several_calls
    assert renderer.turn_ids(Message(role="assistant", tool_calls=CALLS[:1]))
    with pytest.raises(ValueError, match=r"^model m: its chat template cannot hold the 2 tool calls of one turn"):
        renderer.turn_ids(Message(role="assistant", tool_calls=CALLS))
    bridge = bridge_after(renderer, [Message(role="tool", content=said, call_id=said) for said in ("7", "8")])
    assert renderer.decode(ids_of(bridge)).count("<|im_start|>tool") == 2


def test_the_template_s_end_of_turn_is_the_stop_token_a16() -> None:
    """Not the tokenizer's end of sequence, which never stands in a chat."""
    renderer = TemplateRenderer(tokenizer_for(peer_template("gemma3")), name="m")
    assert [renderer.control_tokens[token] for token in renderer.stop_token_ids] == ["<end_of_turn>"]


def test_calls_may_end_with_another_token_a26() -> None:
    """Llama 3: an answer ends with <|eot_id|>, a call may end with <|eom_id|>; the engine stops at both, and each is
    trained where it stands."""
    renderer = TemplateRenderer(tokenizer_for(peer_template("llama3_1")), name="m")
    assert [renderer.control_tokens[token] for token in renderer.stop_token_ids] == ["<|eot_id|>", "<|eom_id|>"]
    core = small_core()
    core.add_special_tokens([AddedToken("<|eom|>", normalized=False)])
    ends = CHATML.replace("{{ '<|im_end|>\n' }}", "{{ ('<|eom|>' if m.tool_calls else '<|im_end|>') + '\n' }}")
    renderer = TemplateRenderer(make_tokenizer(core, ends), name="m")
    answer, call = (
        renderer.turn_ids(Message(role="assistant", content="Hm.", tool_calls=calls)) for calls in ((), CALLS[:1])
    )
    assert (answer[-1], call[-1]) == renderer.stop_token_ids
    result = [Message(role="tool", content="7", call_id="c0")]
    assert ids_of(bridge_after(renderer, result, turn=call)) == ids_of(bridge_after(renderer, result, turn=answer))


def test_turns_that_end_where_the_next_begins() -> None:
    """GLM: the header of the next message is what stops a turn. A turn that stopped at the wrong one keeps it, and the
    right header follows."""
    renderer = TemplateRenderer(tokenizer_for(peer_template("glm4moe")), name="m")
    user, observation = renderer.stop_token_ids
    assert renderer.turn_ids(Message(role="assistant", content="Yes."))[-1] == user
    assert renderer.turn_ids(Message(role="assistant", tool_calls=CALLS[:1]))[-1] == observation
    result = [Message(role="tool", content="7", call_id="c0")]
    right, wrong = (ids_of(bridge_after(renderer, result, turn=[5, stop])) for stop in (observation, user))
    assert wrong == [observation, *right]
