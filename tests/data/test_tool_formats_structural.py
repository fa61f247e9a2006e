"""Structural tags: what xgrammar lets a model sample once it has begun a call."""

from __future__ import annotations

import json

import pytest

from data.tool_formats.detect import TOOL_FORMATS, tool_format
from envs.types import ToolSpec
from tests.contracts.tool_formats import FAMILIES, Family, as_pairs

xgrammar = pytest.importorskip("xgrammar")

LOOKUP = ToolSpec(
    name="lookup",
    description="",
    parameters={
        "type": "object",
        "properties": {"key": {"type": "string"}, "limit": {"type": "integer"}, "more": {"type": "object"}},
        "required": ["key"],
    },
)
NOW = ToolSpec(name="now", description="", parameters={"type": "object", "properties": {}})
CONSTRAINED = [family for family in FAMILIES if family.format not in ("pythonic", "gemma", "harmony", "react")]
MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
END = 0


@pytest.fixture(scope="module")
def compiler() -> object:
    """For a tokenizer of single characters, whose markers are tokens of their own."""
    letters = [chr(code) for code in range(32, 127)] + ["\n", "é"]
    info = xgrammar.TokenizerInfo(["<end>", *letters, *MARKS], vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info)


@pytest.fixture(params=CONSTRAINED, ids=lambda family: family.write.__name__.strip("_"))
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


def takes(compiler: object, family: Family, text: str) -> bool:
    """Whether a turn may read so, and end there."""
    tag = tool_format(family.format).structural_tag([LOOKUP, NOW])
    assert tag is not None
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(tag))  # type: ignore[attr-defined]
    return matcher.accept_string(text) and matcher.accept_token(END)


def test_right_calls_pass_and_are_read(compiler: object, family: Family) -> None:
    for calls in (
        [("lookup", {"key": "é [x] </x> {", "limit": 3, "more": {"a": [1]}})],
        [("lookup", {"key": ""}), ("now", {}), ("lookup", {"key": "a"})],
    ):
        text = f"Let me see. {family.write(calls)} So."
        assert takes(compiler, family, text)
        tools = [LOOKUP, NOW]
        turn = tool_format(family.format).parse(text, call_id_prefix="c", finish_reason="stop", tools=tools)
        assert as_pairs(turn.calls) == calls


def test_tools_whose_schema_says_little(compiler: object, family: Family) -> None:
    for parameters in ({}, {"type": "object"}, {"type": "object", "properties": {}}):
        tag = tool_format(family.format).structural_tag([ToolSpec(name="f", description="", parameters=parameters)])
        matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(tag))  # type: ignore[attr-defined]
        assert matcher.accept_string(family.write([("f", {})]))
        assert matcher.accept_token(END)


def test_prose_passes(compiler: object, family: Family) -> None:
    assert takes(compiler, family, "It is 4 {roughly}.")
    assert takes(compiler, family, "")


def test_wrong_calls_do_not(compiler: object, family: Family) -> None:
    for name, arguments in (
        ("look", {"key": "a"}),
        ("lookup2", {"key": "a"}),
        ("lookup", {}),
        ("lookup", {"key": "a", "limit": "many"}),
        ("lookup", {"key": "a", "other": 1}),
        ("now", {"key": "a"}),
    ):
        assert not takes(compiler, family, family.write([(name, arguments)])), (name, arguments)
    assert not takes(compiler, family, family.write([("now", {})])[:-1] + " and")


def test_a_marker_token_begins_the_constraint(compiler: object) -> None:
    """Behind the token of a marker, only what belongs to a call can be sampled."""
    for name, mark in (("hermes", "<tool_call>"), ("qwen3_coder", "<tool_call>"), ("mistral", "[TOOL_CALLS]")):
        tag = tool_format(name).structural_tag([LOOKUP])
        matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(tag))  # type: ignore[attr-defined]
        vocabulary = ["<end>", *[chr(code) for code in range(32, 127)], "\n", "é", *MARKS]
        assert matcher.accept_token(vocabulary.index(mark))
        assert not matcher.accept_token(END)
        assert not matcher.accept_token(vocabulary.index("x"))


def test_formats_without_one() -> None:
    for name in ("pythonic", "react"):
        assert tool_format(name).structural_tag([LOOKUP]) is None
    for name in TOOL_FORMATS:
        assert tool_format(name).structural_tag([]) is None


@pytest.mark.vllm
def test_vllm_takes_the_tags() -> None:
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    for family in CONSTRAINED:
        tag = tool_format(family.format).structural_tag([LOOKUP, NOW])
        assert tag is not None
        assert json.loads(tag)["type"] == "structural_tag"
        validate_xgrammar_grammar(SamplingParams(structured_outputs=StructuredOutputsParams(structural_tag=tag)))
