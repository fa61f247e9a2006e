"""The model families whose hand-written renderers (package `renderers`) we serve, and what has to be known about each
besides its code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Writing = Literal["json", "envelope", "arg_key", "parameter", "dsml"]
"""How a call's arguments are written: as JSON (`envelope`: with the name in it), or between tags (`arg_key`: as GLM's,
`parameter`: MiniMax's, `dsml`: DeepSeek V4's)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """
    tool_format: which of our formats reads its calls; None: the package's own parser.
    writing: how arguments are written, where the package's own parser reads them.
    switch: its name for `enable_thinking`; None where it has none.
    named_results: a tool result is headed by the name of its tool.
    call_ids: how the family's models number their calls, where results are headed by the number.
    between_results: what stands between two results, where the package's bridge takes one at most.
    forgets_separator: the package's bridge leaves out what its own rendering has behind a stop token, unless it puts
        that token in itself.
    pinned: template variables for which the package has a constant.
    """

    tool_format: str | None = None
    writing: Writing = "json"
    switch: str | None = None
    named_results: bool = False
    call_ids: str | None = None
    between_results: str | None = None
    forgets_separator: bool = False
    pinned: Mapping[str, str] = field(default_factory=dict)


_QWEN_XML = Family(tool_format="qwen3_coder", switch="enable_thinking")
_GLM = Family(tool_format="glm", switch="enable_thinking")
_LAGUNA = Family(writing="arg_key", switch="enable_thinking", forgets_separator=True)

FAMILIES: Mapping[str, Family] = {
    "qwen3": Family(tool_format="hermes", switch="enable_thinking"),
    "qwen3-vl": Family(tool_format="hermes"),
    "prime-qwen3": Family(tool_format="qwen3_coder"),
    "qwen3.5": _QWEN_XML,
    "qwen3.6": _QWEN_XML,
    "qwen3.8": _QWEN_XML,
    "nemotron-3": _QWEN_XML,
    "nemotron-3-ultra": _QWEN_XML,
    "nemotron-3.5": _QWEN_XML,
    "llama-3": Family(tool_format="llama3_json", pinned={"date_string": "26 Jul 2024"}),
    "glm-4.5": _GLM,
    "glm-5": _GLM,
    "glm-5.1": _GLM,
    "glm-5.3": Family(tool_format="glm"),
    "deepseek-v3": Family(),
    "deepseek-r1": Family(),
    "deepseek-v4": Family(writing="dsml", switch="enable_thinking", between_results="</tool_result>\n\n<tool_result>"),
    "kimi-k2": Family(call_ids="functions.{name}:{number}"),
    "kimi-k2.5": Family(switch="thinking", call_ids="functions.{name}:{number}"),
    "minimax-m2": Family(writing="parameter"),
    "gemma4": Family(tool_format="gemma", switch="enable_thinking", named_results=True),
    "hy3": Family(writing="arg_key"),
    "laguna-xs.2": _LAGUNA,
    "laguna-m.1": _LAGUNA,
    "laguna-xs-2.1": Family(writing="arg_key", switch="enable_thinking"),
    "laguna-s-2.1": Family(writing="arg_key", switch="enable_thinking"),
    "inkling": Family(writing="envelope", named_results=True),
}

REFUSED: Mapping[str, str] = {
    "gpt-oss": "its renderer encodes with a vocabulary of its own, before which the guard cannot stand",
}
"""Families of the package that are not served, and why."""


def family_traits(family: str) -> Family:
    """What is known about a family.

    Raises:
        ValueError: it is not served; the message says why, or lists those that are.
    """
    if family in REFUSED:
        raise ValueError(f"renderer {family!r} is not served: {REFUSED[family]}; use `template`")
    if family not in FAMILIES:
        raise ValueError(f"renderer {family!r} is unknown; renderers: auto, template, {', '.join(FAMILIES)}")
    return FAMILIES[family]
