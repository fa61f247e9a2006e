"""The grammar of a constrained turn, followed token by token with the embedded tokenizer."""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data.call_grammar import CallGrammar

VOCAB_SIZE, STOP, OPEN = 800, 3, 4  # the model has more ids than the tokenizer's 768
TAG = json.dumps(
    {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<tool_call>"],
            "tags": [
                {
                    "begin": '<tool_call>{"name": "add", "arguments": ',
                    "content": {
                        "type": "json_schema",
                        "json_schema": {
                            "type": "object",
                            "properties": {"sign": {"enum": ["plus", "minus"]}},
                            "required": ["sign"],
                            "additionalProperties": False,
                        },
                    },
                    "end": "}</tool_call>",
                }
            ],
        },
    }
)
CALL = '<tool_call>{"name": "add", "arguments": {"sign": "plus"}}</tool_call>'


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained("models/embedded")


@cache
def grammar() -> CallGrammar:
    return CallGrammar(tokenizer(), VOCAB_SIZE)


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def test_prose_is_free_and_ids_beyond_the_tokenizer_are_not() -> None:
    state = grammar().start(TAG, (STOP,))
    for token in ids_of("Let me see. "):
        allowed = state.allowed()
        assert allowed[:768].all()
        assert not allowed[768:].any()
        state.accept(token)


def test_a_call_is_held_to_name_and_schema_and_cannot_be_stopped() -> None:
    state = grammar().start(TAG, (STOP,))
    for token in ids_of(CALL):
        allowed = state.allowed()
        assert allowed[token]
        state.accept(token)
    assert state.allowed()[STOP]  # behind it prose is free again

    inside = grammar().start(TAG, (STOP,))
    for token in ids_of(CALL[:-20]):
        inside.accept(token)
    assert not inside.allowed()[STOP]
    with pytest.raises(ValueError, match=f"does not allow token {STOP} here"):
        inside.accept(STOP)


def test_another_tool_is_refused() -> None:
    state = grammar().start(TAG, (STOP,))
    for token in ids_of('<tool_call>{"name": "'):
        state.accept(token)
    assert not state.allowed()[ids_of("sub")[0]]


def test_behind_the_end_everything_is_allowed() -> None:
    state = grammar().start(TAG, ())  # the tokenizer's own end-of-text id ends it too, as in vLLM
    state.accept(STOP)
    assert state.allowed().all()
    state.accept(VOCAB_SIZE - 1)


@settings(max_examples=30)
@given(choices=st.lists(st.integers(0, 10**6), min_size=1, max_size=40), begins=st.booleans())
def test_what_is_allowed_is_accepted_and_nothing_else(choices: list[int], begins: bool) -> None:
    state = grammar().start(TAG, (STOP,))
    if begins:
        state.accept(OPEN)
    for choice in choices:
        allowed = state.allowed().nonzero().flatten().tolist()
        refused = (~state.allowed()).nonzero().flatten().tolist()
        if refused:
            with pytest.raises(ValueError, match="does not allow"):
                state.accept(refused[choice % len(refused)])
        state.accept(allowed[choice % len(allowed)])


@pytest.mark.parametrize("tag", ["", "no JSON", "{}", '{"type": "structural_tag"}'])
def test_what_is_no_structural_tag_is_refused_in_one_line(tag: str) -> None:
    with pytest.raises(ValueError, match=r"^constrained calls: not a structural tag: \w") as caught:
        grammar().start(tag, (STOP,))
    assert "\n" not in str(caught.value)
    assert ".cc:" not in str(caught.value)  # where in its source xgrammar found it says nothing to a person
