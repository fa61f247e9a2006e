"""Every chat template that TRL ships: the table of what becomes of it, and that "exact" in it means exact.

The native side is made here from the templates alone: each family's form of messages is written down below, not taken
from the renderer.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from data.template_renderer import TemplateRenderer
from data.turn_ends import Kind
from data.turn_history import Thought
from envs.types import Message, ToolCall, ToolSpec
from tests.data.chat_tokenizers import peer_templates, tokenizer_for
from tests.data.renderings import TOOL, bridge_after, ids_of
from tests.data.test_types import no_clock
from tests.golden.trl_templates import PATH, row

NAMES = sorted(peer_templates())
EXPECTED = {line.split("\t")[0]: line for line in PATH.read_text(encoding="utf-8").splitlines()[1:]}
# Forms of messages that differ from the chat-completions form.
PARTS = ("idefics3", "llava_next", "smolvlm")
THINKING = {"gptoss": "thinking", "gptoss_training": "thinking", "lfm2_2_5": "thinking"}
CONTENTS = (
    "It is 12.", "", "\n a\n\n\tb  ", "É 日本 👩\u200d👧 e\u0301", '{"x": [1, null]}', "two\nlines", "x " * 300,
)  # fmt: skip
# They write texts between quotes as they are; a call with a line break is an error when it is read.
NO_LINE_BREAKS = ("lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl")
NOT_READ = r"^model \w+: its chat template writes calls that are not read as \w+, such as .*; set rollout\.renderer\."


@cache
def load(name: str) -> tuple[TemplateRenderer, PreTrainedTokenizerFast]:
    tokenizer = tokenizer_for(peer_templates()[name])
    return TemplateRenderer(tokenizer, name=name), tokenizer


def form(name: str, message: Message) -> dict[str, Any]:
    """The message as the family's documentation hands it in."""
    made = message.as_openai()
    if name.removesuffix("_training") in PARTS:
        made["content"] = [{"type": "text", "text": message.content}]
    if message.thinking and name in THINKING:
        made[THINKING[name]] = made.pop("reasoning_content")
    return made


def native(name: str, messages: list[Message], tools: list[ToolSpec], *, generation_prompt: bool = True) -> list[int]:
    tokenizer = load(name)[1]
    specs: Any = [tool.as_openai() for tool in tools] or None
    text = tokenizer.apply_chat_template(
        [form(name, message) for message in messages],
        tools=specs,
        add_generation_prompt=generation_prompt,
        tokenize=False,
    )
    return tokenizer.encode(str(text), add_special_tokens=False)


def test_there_is_a_row_for_every_template() -> None:
    assert sorted(EXPECTED) == NAMES, "python -m tests.golden.trl_templates writes the table again"


@pytest.mark.parametrize("name", NAMES)
def test_what_becomes_of_a_template(name: str) -> None:
    assert row(name, peer_templates()[name]) == EXPECTED[name]


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_native(name: str) -> None:
    renderer, _ = load(name)
    for content in CONTENTS:
        chat = [Message(role="user", content=content)]
        if "system message" not in EXPECTED[name]:
            chat.insert(0, Message(role="system", content=content))
        for tools in [[]] if "no tools" in EXPECTED[name] or renderer.no_reading else [[], [TOOL]]:
            assert ids_of(renderer.opening(chat, tools)) == native(name, chat, tools)


def turns(name: str, kind: Kind) -> list[Message]:
    """A turn of that kind, without and with thinking."""
    calls = (ToolCall(call_id="c0", name="f", arguments={"x": "É\n", "n": [1, None]}),) if kind is Kind.CALLS else ()
    content = "" if calls else "So it is."
    renderer, _ = load(name)
    thoughts = ("", "Hm.") if renderer.template.dialect.thinking else ("",)
    return [Message(role="assistant", content=content, thinking=thought, tool_calls=calls) for thought in thoughts]


def sampled_ids(renderer: TemplateRenderer, turn: Message) -> list[int]:
    """None where no policy could sample the turn: it does not begin as the generation prompt does."""
    try:
        return list(renderer.turn_ids(turn))
    except ValueError:
        return []


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("name", NAMES)
def test_bridges_and_turns_are_native(name: str, kind: Kind) -> None:
    """Prompt, turn and bridge are the native rendering where the table says exact. Everywhere else, the bridge is what
    the native rendering ends with, and the stream differs from it."""
    renderer, _ = load(name)
    if kind not in renderer.ends or (kind is Kind.CALLS and renderer.no_reading):
        assert EXPECTED[name].split("\t")[1 + list(Kind).index(kind)] == "refused"
        return
    asked = Message(role="user", content="Do it.")
    for turn in turns(name, kind if renderer.template.no_calls is None else Kind.ANSWER):
        for content in CONTENTS:
            answer = (
                Message(role="user", content=content)
                if kind is Kind.ANSWER
                else Message(role="tool", content=content, call_id="c0")
            )
            expected = native(name, [asked, turn, answer], [])
            sampled = sampled_ids(renderer, turn)
            bridge = ids_of(bridge_after(renderer, [answer], turn=sampled))
            assert expected[-len(bridge) :] == bridge
            if not sampled:
                continue
            thought = Thought.SOME if turn.thinking else Thought.EMPTY
            prompt = native(name, [asked], [])
            stream = [*prompt, *sampled, *bridge]
            if renderer.rewrites[kind, thought]:
                # A last turn may lack its thinking already.
                assert stream != expected or (turn.thinking and turn.thinking not in renderer.decode(sampled))
            elif expected[: len(prompt)] == prompt:
                assert stream == expected
            else:
                # Two line breaks grow together across the end of the prompt; no policy could sample that.
                assert renderer.decode(stream) == renderer.decode(expected)
                assert thought is Thought.EMPTY


ARGUMENTS = st.fixed_dictionaries(
    {"x": st.text("ab 日É\n{}<:,", max_size=8).map(str.strip), "n": st.integers(-9, 10**6), "on": st.booleans()}
)
READ = ToolSpec(
    name="f",
    description="",
    parameters={
        "type": "object",
        "properties": {"x": {"type": "string"}, "n": {"type": "integer"}, "on": {"type": "boolean"}},
    },
)


@pytest.mark.parametrize("name", [name for name in NAMES if "calls (" not in EXPECTED[name]])
@settings(no_clock, max_examples=8)
@given(arguments=st.lists(ARGUMENTS, min_size=1, max_size=2), prose=st.sampled_from(["", "Let me see."]))
def test_a_template_s_own_calls_are_read_or_refused(name: str, arguments: list[dict[str, Any]], prose: str) -> None:
    """A call that is written but not read would pass for a final answer."""
    renderer, _ = load(name)
    assume(name not in NO_LINE_BREAKS or not any("\n" in one["x"] for one in arguments))
    asked = Message(role="user", content="Do it.")
    calls = tuple(ToolCall(call_id=f"c_{i}", name="f", arguments=one) for i, one in enumerate(arguments))
    turns = [
        Message(role="assistant", content=prose, thinking=thought, tool_calls=calls[: 1 + renderer.several_calls])
        for thought in ("", "Hm.")
    ]
    if EXPECTED[name].split("\t")[4].startswith("none"):
        for turn in turns:
            with pytest.raises(ValueError, match=NOT_READ):
                renderer.turn_ids(turn)
        with pytest.raises(ValueError, match=f"{NOT_READ}|(ends a turn of|depends on)"):
            bridge_after(renderer, [Message(role="tool", content="7", call_id="c_0")], turn=[1])
        with pytest.raises(ValueError, match=f"{NOT_READ}|writes no tools"):
            renderer.opening([asked], [READ])
        return
    if prose and "prose beside calls" in EXPECTED[name]:
        for turn in turns:
            with pytest.raises(ValueError, match=r"writes what a turn says beside its calls behind their results"):
                renderer.turn_ids(turn)
        return
    prompt = ids_of(renderer.opening([asked], []))
    written = [(turn, ids) for turn in turns if (ids := sampled_ids(renderer, turn))]
    assert written
    for turn, ids in written:
        assert renderer.parse(ids, call_id_prefix="c", tools=[READ], prompt_ids=prompt).calls == turn.tool_calls


def test_arguments_of_a_family_that_wants_text() -> None:
    """DeepSeek's template adds them to its own text."""
    renderer, tokenizer = load("deepseekv3")
    call = ToolCall(call_id="c0", name="f", arguments={"x": "É"})
    (opening,) = renderer.opening(
        [Message(role="user", content="Hi"), Message(role="assistant", tool_calls=(call,))], []
    )
    assert json.dumps(call.arguments, ensure_ascii=False) in str(tokenizer.decode(list(opening.token_ids)))
