"""Which tool-call format does a model write? By name, or by what its chat template and its tokens say."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from data.tool_formats.base import ToolFormat
from data.tool_formats.gemma import GEMMA
from data.tool_formats.glm import GLM
from data.tool_formats.harmony import HARMONY
from data.tool_formats.hermes import HERMES
from data.tool_formats.llama3_json import LLAMA3_JSON
from data.tool_formats.mistral import MISTRAL
from data.tool_formats.pythonic import PYTHONIC
from data.tool_formats.qwen3_coder import QWEN3_CODER
from data.tool_formats.react import ReactFormat
from data.tool_formats.turn import TextFormat

GRAMMARS = (HERMES, QWEN3_CODER, GLM, LLAMA3_JSON, PYTHONIC, MISTRAL, GEMMA, HARMONY)

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    **{own.name: TextFormat(own, [other for other in GRAMMARS if other is not own]) for own in GRAMMARS},
    "react": ReactFormat(GRAMMARS),
}
"""Every format by its name."""

# What only one format writes, the most telling first: Qwen3-Coder's template and GLM's hold Hermes' tag too.
_SIGNS = (
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm"),
    ("<|tool_call>", "gemma"),
    ("<|channel|>", "harmony"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call_start|>", "pythonic"),
    ("[func_name", "pythonic"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": ', "llama3_json"),
)


def tool_format(name: str) -> ToolFormat:
    """The format of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in TOOL_FORMATS:
        raise ValueError(f"tool format {name!r} is unknown; formats: {', '.join(TOOL_FORMATS)}")
    return TOOL_FORMATS[name]


def detect_tool_format(template: str, control_tokens: Collection[str]) -> ToolFormat:
    """The format that a chat template writes; where it writes none, the one that the tokenizer has tokens for; else
    Hermes.

    >>> detect_tool_format("{{ '[TOOL_CALLS]' + calls }}", ()).name
    'mistral'
    """
    for written in (template, "\n".join(control_tokens)):
        for sign, name in _SIGNS:
            if sign in written:
                return TOOL_FORMATS[name]
    return TOOL_FORMATS["hermes"]
