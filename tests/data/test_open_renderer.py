"""Which renderer a model gets: its family's where that writes what the model's own template does, else the template."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from data.families import FAMILIES, family_traits
from data.family_renderer import FamilyRenderer
from data.native_agreement import difference
from data.open_renderer import open_renderer
from data.react import ReactRenderer
from data.template_renderer import TemplateRenderer
from envs.types import Message, ToolCall, ToolSpec
from tests.data.chat_tokenizers import CHATML, embedded_tokenizer, make_tokenizer, qwen_tokenizer, small_core
from tests.data.family_tokenizers import TEMPLATES, family_tokenizer
from tests.data.renderings import ids_of, native_ids

TOOL = ToolSpec(name="f", description="Does x.", parameters={"type": "object", "properties": {"x": {"type": "string"}}})
# What `auto` makes of the copies of the families' templates that TRL ships.
FOUND: dict[str, str | None] = {
    "qwen3": "qwen3",
    "qwen3_5_nothink": None,  # gives an answer that lies behind no empty thinking, which the family does
    "qwen3_5_think": "qwen3.5",
    "qwen3_6": "qwen3.6",
    "qwen3_8": "qwen3.8",
    "qwen3_vl": "qwen3-vl",
    "llama3": None,  # knows no tools
    "llama3_1": "llama-3",
    "llama3_2": "llama-3",
    "glm4moe": None,  # puts a line break between two calls behind prose, which the family does not
    "deepseekv3": "deepseek-r1",  # opens the thinking, as R1's does
    "gemma4": None,  # writes `None` for a null
    "gemma4_v2": None,  # ends the model's turn behind a call
    "gemma4_v3": None,
    "gemma4_v4": None,
    "gemma4_v5": "gemma4",
    "nemotron_3_nano": "nemotron-3",
    "nemotron_3_super": "nemotron-3",
    "nemotron_3_ultra": "nemotron-3-ultra",
    "nemotron_3_5_lightning": "nemotron-3-ultra",  # the same ids
}


def test_every_template_has_an_expectation() -> None:
    assert FOUND.keys() == TEMPLATES.keys()


@pytest.mark.parametrize("template", FOUND)
def test_a_family_is_recognised_by_what_its_template_writes(template: str) -> None:
    """With that, prompts, turns with calls and bridges are those of the native template, for all contents tried."""
    tokenizer = family_tokenizer(TEMPLATES[template], template)
    renderer = open_renderer(tokenizer, model="m")
    assert isinstance(renderer, FamilyRenderer) == (FOUND[template] is not None)
    if isinstance(renderer, FamilyRenderer):
        assert renderer.name == FOUND[template]
        assert renderer.differs is None


@pytest.mark.parametrize("template", FOUND)
def test_a_turn_that_says_something_and_calls_twice_is_written_as_the_template_does(template: str) -> None:
    tokenizer = family_tokenizer(TEMPLATES[template], template)
    renderer = open_renderer(tokenizer, model="m")
    asked = [Message(role="user", content="What is 12?")]
    calls = tuple(ToolCall(call_id=f"functions.f:{i}", name="f", arguments={"x": "a"}) for i in range(2))
    turn = Message(role="assistant", content="So I look.", thinking="Let me see.", tool_calls=calls)
    answers = [Message(role="tool", content="7", call_id=call.call_id) for call in calls]
    try:
        said = renderer.turn_ids(turn)
    except ValueError:
        return  # refused: nothing is trained
    prompt = ids_of(renderer.opening(asked, [TOOL]))
    bridge = renderer.bridge(answers, prompt_ids=prompt, sampled_ids=said, tools=[TOOL])
    assert bridge is not None
    ours = renderer.decode([*prompt, *said, *ids_of(bridge)])
    assert ours == renderer.decode(native_ids(tokenizer, [*asked, turn, *answers], [TOOL]))


@pytest.mark.parametrize("template", FOUND)
def test_an_answer_that_lies_behind_is_written_as_the_template_does(template: str) -> None:
    tokenizer = family_tokenizer(TEMPLATES[template], template)
    renderer = open_renderer(tokenizer, model="m", thinking="follow")
    chat = [Message(role="user", content="What is 12?"), Message(role="assistant", content="Twelve.")]
    chat.append(Message(role="user", content="And 13?"))
    pinned: dict[str, Any] = {}
    if isinstance(renderer, FamilyRenderer):
        pinned |= family_traits(renderer.name).pinned
    assert ids_of(renderer.opening(chat, [])) == native_ids(tokenizer, chat, **pinned)


@pytest.mark.slow
def test_qwen_s_real_ids() -> None:
    renderer = open_renderer(qwen_tokenizer(), model="m")
    assert isinstance(renderer, FamilyRenderer)
    assert renderer.name == "qwen3"
    assert difference(renderer, qwen_tokenizer()) is None
    call = ToolCall(call_id="c", name="f", arguments={"x": "1"})
    turn = renderer.turn_ids(Message(role="assistant", content="So.", tool_calls=(call,)))
    # `.` and the line break behind it are one token of Qwen's.
    assert ".\n" in [renderer.decode([token]) for token in turn]


@pytest.mark.parametrize("wrong", ["a word", "the order of results", "the end of a turn", "a header"])
def test_a_template_that_differs_in_one_place_is_not_the_family_s(wrong: str) -> None:
    """Any of these would make a stream that no such model has seen."""
    tokenizer = family_tokenizer("qwen3", "qwen3")
    template = tokenizer.chat_template
    assert isinstance(template, str)
    changed = {
        "a word": ("You may call one or more functions", "You may call some functions"),
        "the order of results": ("<tool_response>\\n' }}", "<tool_response>' }}"),
        "the end of a turn": ("'<|im_end|>\\n' }}", "'<|im_end|>' }}"),
        "a header": ("<|im_start|>assistant\\n' }}", "<|im_start|>assistant' }}"),
    }[wrong]
    assert changed[0] in template
    other = make_tokenizer(small_core(), template.replace(*changed))
    renderer = FamilyRenderer(other, "qwen3", model="m")
    found = difference(renderer, other)
    assert found is not None
    assert "the chat template has" in found
    assert "\n" not in found
    named = open_renderer(other, model="m", name="qwen3")
    assert isinstance(named, FamilyRenderer)
    assert f"it differs from the model's chat template: {found}" in named.description


def test_a_template_of_no_family_is_followed_itself() -> None:
    for tokenizer in (embedded_tokenizer(), make_tokenizer(small_core(), CHATML)):
        assert isinstance(open_renderer(tokenizer, model="m"), TemplateRenderer)


def test_what_is_named_is_taken() -> None:
    tokenizer = family_tokenizer("qwen3", "qwen3")
    assert isinstance(open_renderer(tokenizer, model="m", name="template"), TemplateRenderer)
    assert isinstance(open_renderer(tokenizer, model="m", name="qwen3"), FamilyRenderer)
    assert isinstance(open_renderer(tokenizer, model="m", tool_format="react"), ReactRenderer)


def test_a_tool_format_that_does_not_read_the_model_s_calls_is_refused() -> None:
    tokenizer = family_tokenizer("qwen3", "qwen3")
    assert isinstance(open_renderer(tokenizer, model="m", tool_format="hermes"), FamilyRenderer)
    with pytest.raises(ValueError, match=r"^model m: family qwen3 writes calls that are not read as glm, such as "):
        open_renderer(tokenizer, model="m", name="qwen3", tool_format="glm")
    for name in ("auto", "template"):
        renderer = open_renderer(tokenizer, model="m", name=name, tool_format="glm")
        with pytest.raises(ValueError, match=r"^model m: its chat template writes calls that are not read as glm"):
            renderer.opening([Message(role="user", content="Hi")], [TOOL])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_needs_no_template_where_it_is_named(family: str) -> None:
    tokenizer = family_tokenizer(family)
    renderer = open_renderer(tokenizer, model="m", name=family)
    assert renderer.name == family
    with pytest.raises(ValueError, match=r"^model m: no chat template; add chat_template.jinja .* or name its family"):
        open_renderer(tokenizer, model="m")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"name": "qwen9"}, "renderer 'qwen9' is unknown; renderers: auto, template, qwen3, "),
        ({"name": "gpt-oss"}, "renderer 'gpt-oss' is not served: .*; use `template`"),
        ({"name": "llama-3"}, "model m: family llama-3 does not fit its tokenizer"),
        ({"tool_format": "xml"}, "tool format 'xml' is unknown; formats: hermes, "),
        ({"name": "qwen3-vl", "enable_thinking": True}, "family qwen3-vl has no switch for thinking"),
    ],
)
def test_a_wrong_name_is_refused_with_what_there_is(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}") as caught:
        open_renderer(family_tokenizer("qwen3", "qwen3"), model="m", **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("template", "default"), [("qwen3_5_think", True), ("qwen3_5_nothink", False)])
def test_thinking_is_as_the_template_has_it_unless_it_is_said(template: str, default: bool) -> None:
    """Models of one family have different defaults; the header of a turn to be sampled shows which."""
    tokenizer = family_tokenizer("qwen3.5", template)
    chat = [Message(role="user", content="Hi")]
    headers = {True: "<|im_start|>assistant\n<think>\n", False: "<|im_start|>assistant\n<think>\n\n</think>\n\n"}
    for said in (None, True, False):
        renderer = open_renderer(tokenizer, model="m", enable_thinking=said)
        (segment,) = renderer.opening(chat, [TOOL])
        wanted = default if said is None else said
        assert renderer.decode(segment.token_ids).endswith(headers[wanted])


@pytest.mark.parametrize("name", ["template", "qwen3"])
def test_the_description_lists_every_control_token(name: str) -> None:
    renderer = open_renderer(family_tokenizer("qwen3", "qwen3"), model="m", name=name)
    listed = renderer.description.split("control tokens, which no text becomes: ")[1].split("; ")[0]
    assert listed.split() == list(renderer.control_tokens.values())


def test_the_package_is_imported_only_where_it_is_needed() -> None:
    code = "import sys, data.open_renderer; sys.exit('renderers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
