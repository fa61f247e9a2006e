"""Any text in any field of any message: no control token comes of it. For every tokenizer that can be had here."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings

from data.template_renderer import TemplateRenderer
from data.types import Source
from envs.types import Message
from tests.data.chat_tokenizers import (
    embedded_tokenizer,
    make_tokenizer,
    peer_template,
    qwen_tokenizer,
    sentencepiece_tokenizer,
    small_core,
    smollm2_tokenizer,
    tekken_tokenizer,
    tokenizer_for,
)
from tests.data.renderings import FORGED, bridge_after, control_ids, everything_said, hostile, ids_of, text_of
from tests.data.test_types import no_clock

TOKENIZERS = {
    "embedded": embedded_tokenizer,
    "qwen2_5": lambda: make_tokenizer(small_core(), peer_template("qwen2_5")),
    "qwen3": lambda: make_tokenizer(small_core(), peer_template("qwen3")),
    "qwen3 real ids": qwen_tokenizer,
    "smollm2": smollm2_tokenizer,
    "mistral sentencepiece": lambda: sentencepiece_tokenizer(legacy=False),
    "mistral sentencepiece legacy": lambda: sentencepiece_tokenizer(legacy=True),
    "mistral tekken": tekken_tokenizer,
    **{
        name: lambda name=name: tokenizer_for(peer_template(name))
        for name in (
            "llama3_1",
            "gptoss",
            "gemma4_v5",
            "glm4moe",
            "nemotron_3_nano",
            "lfm2_2_5",
            "muse_glimmer",
            "phi3",
        )
    },
}
SLOW = ("qwen3 real ids", "mistral sentencepiece", "mistral sentencepiece legacy", "mistral tekken")


@cache
def load(family: str) -> TemplateRenderer:
    return TemplateRenderer(TOKENIZERS[family](), name=family)


@pytest.fixture(params=[pytest.param(f, marks=pytest.mark.slow) if f in SLOW else f for f in TOKENIZERS])
def renderer(request: pytest.FixtureRequest) -> TemplateRenderer:
    return load(request.param)


@settings(no_clock, max_examples=25)
@given(text=hostile.filter(str.strip))  # templates leave out what is blank
def test_no_text_becomes_a_control_token(renderer: TemplateRenderer, text: str) -> None:
    placed_by_id = [control_ids(renderer, ids) for ids in everything_said(renderer, "word")]
    assert [control_ids(renderer, ids) for ids in everything_said(renderer, text)] == placed_by_id


@settings(no_clock, max_examples=25)
@given(text=hostile)
def test_an_observation_is_one_tool_segment_that_says_the_text(renderer: TemplateRenderer, text: str) -> None:
    answers_calls = renderer.no_results is None and renderer.no_reading is None
    user, result = Message(role="user", content=text), Message(role="tool", content=text, call_id="c")
    segments = bridge_after(renderer, [result if answers_calls else user])
    observed = [segment for segment in segments if segment.source is Source.TOOL]
    assert len(observed) == (1 if text.strip() else 0)
    assert not control_ids(renderer, ids_of(observed))
    assert all(segment.source in (Source.TOOL, Source.TEMPLATE) for segment in segments)


@pytest.mark.parametrize(
    "family", ["embedded", "qwen2_5", "qwen3", pytest.param("qwen3 real ids", marks=pytest.mark.slow)]
)
def test_forged_markers_in_tool_output_b12(family: str) -> None:
    renderer = load(family)
    forged, honest = (
        bridge_after(renderer, [Message(role="tool", content=content, call_id="c")]) for content in (FORGED, "done")
    )
    assert [segment.source for segment in forged] == [segment.source for segment in honest]
    assert control_ids(renderer, ids_of(forged)) == control_ids(renderer, ids_of(honest))
    (observed,) = [segment for segment in forged if segment.source is Source.TOOL]
    assert not control_ids(renderer, observed.token_ids)
    assert text_of(renderer, forged).replace(FORGED, "") == text_of(renderer, honest).replace("done", "")
    assert renderer.count_forged(FORGED) == 5
    assert renderer.count_forged("done") == 0


def test_every_control_token_is_listed() -> None:
    """Special or not."""
    for family in ("embedded", "qwen2_5", "qwen3"):
        listed = load(family).control_tokens
        assert {"<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"} <= set(listed.values())
        assert list(listed) == sorted(listed)
        assert all(token in load(family).description for token in listed.values())
