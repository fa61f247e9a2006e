"""Which format a chat template writes, for the templates that people train."""

from __future__ import annotations

from pathlib import Path

import pytest
import trl

from data.tool_formats.detect import TOOL_FORMATS, detect_tool_format, tool_format
from data.tool_formats.turn import opens_thinking

TEMPLATES = Path(trl.__file__).parent / "chat_templates"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("qwen2_5", "hermes"),
        ("qwen3", "hermes"),
        ("qwen3_instruct_2507", "hermes"),
        ("qwen3_vl", "hermes"),
        ("qwen3_5_think", "qwen3_coder"),
        ("qwen3_6", "qwen3_coder"),
        ("nemotron_3_nano", "qwen3_coder"),
        ("llama3_1", "llama3_json"),
        ("llama3_2", "llama3_json"),
        ("lfm2_2_5", "pythonic"),
        ("lfm2_v2", "pythonic"),
        ("glm4moe", "glm"),
        ("gemma4", "gemma"),
        ("gemma4_v5", "gemma"),
        ("diffusion_gemma", "gemma"),
        ("gptoss", "harmony"),
        ("phi3", "hermes"),
    ],
)
def test_the_templates_of_trl(template: str, name: str) -> None:
    assert detect_tool_format((TEMPLATES / f"{template}.jinja").read_text(), ()).name == name


def test_a_template_without_calls_is_known_by_its_tokens() -> None:
    assert detect_tool_format("{{ messages }}", ["<s>", "[TOOL_CALLS]"]).name == "mistral"
    assert detect_tool_format("{{ messages }}", ["<|eot_id|>", "<|python_tag|>"]).name == "llama3_json"
    assert detect_tool_format("{{ messages }}", ["<s>"]).name == "hermes"
    assert detect_tool_format("{{ '<tool_call>' }}", ["<|python_tag|>"]).name == "hermes"


def test_every_format_has_its_name() -> None:
    for name, own in TOOL_FORMATS.items():
        assert tool_format(name).name == own.name == name
    with pytest.raises(ValueError, match="tool format 'xml' is unknown; formats: hermes, qwen3_coder"):
        tool_format("xml")


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("[/INST][THINK]", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<think>Hm.</think><|im_end|>\n<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_whether_the_prompt_opened_thinking(prompt: str, opened: bool) -> None:
    assert opens_thinking(prompt) == opened
