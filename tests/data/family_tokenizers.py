"""Small tokenizers with the control tokens of the model families, for tests."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.data.chat_tokenizers import peer_template, small_core

_QWEN = (
    "<|im_start|> <|im_end|> <|endoftext|> <think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"
)
_VISION = " <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>"
_GLM = (
    "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <|endoftext|> <think> </think> <tool_call> "
    "</tool_call> <arg_key> </arg_key> <arg_value> </arg_value>"
)
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> "
    "<｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁outputs▁begin｜> "
    "<｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> <think> </think>"
)
_KIMI = (
    "<|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|im_end|> <|tool_calls_section_begin|> "
    "<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|> <think> </think>"
)
_LAGUNA = "〈|EOS|〉 <think> </think> <assistant> </assistant> <tool_call> </tool_call>"
_HY3 = (
    "<｜hy_begin_of_sentence:opensource｜> <｜hy_eos:opensource｜> <｜hy_User:opensource｜> "
    "<｜hy_Assistant:opensource｜> <｜reasoning_mode:opensource｜> "
) + " ".join(
    f"<{name}:opensource> </{name}:opensource>"
    for name in "think tool_calls tool_call tool_sep arg_key arg_value tool_responses tool_response".split()
)

CONTROL_TOKENS: dict[str, str] = {
    "qwen3": _QWEN,
    "qwen3-vl": _QWEN + _VISION,
    "prime-qwen3": _QWEN,
    "qwen3.5": _QWEN + _VISION,
    "qwen3.6": _QWEN + _VISION,
    "qwen3.8": _QWEN + _VISION,
    "nemotron-3": _QWEN,
    "nemotron-3-ultra": _QWEN,
    "nemotron-3.5": _QWEN + " <image>",
    "llama-3": (
        "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|end_of_text|> <|eom_id|> <|python_tag|>"
    ),
    "glm-4.5": _GLM,
    "glm-5": _GLM + " <tool_response> </tool_response>",
    "glm-5.1": _GLM + " <tool_response> </tool_response>",
    "glm-5.3": _GLM + " <tool_response> </tool_response>",
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
    "deepseek-v4": (
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜latest_reminder｜> "
        "<think> </think> ｜DSML｜ <｜action｜> <｜query｜> <｜authority｜> <｜domain｜> <｜title｜> <｜read_url｜>"
    ),
    "kimi-k2": _KIMI,
    "kimi-k2.5": _KIMI + " <|media_begin|> <|media_content|> <|media_pad|> <|media_end|> <|endoftext|>",
    "minimax-m2": "]~!b[ ]~b] [e~[ <think> </think> <minimax:tool_call> </minimax:tool_call>",
    "gemma4": (
        "<bos> <eos> <|turn> <turn|> <|channel> <channel|> <|think|> <|tool> <tool|> <|tool_call> <tool_call|> "
        '<|tool_response> <tool_response|> <|image> <|image|> <image|> <|"|> <|audio|> <|video|>'
    ),
    "hy3": _HY3,
    "laguna-xs.2": _LAGUNA,
    "laguna-m.1": _LAGUNA,
    "laguna-xs-2.1": _LAGUNA,
    "laguna-s-2.1": _LAGUNA,
    "inkling": (
        "<|message_user|> <|message_model|> <|message_system|> <|message_tool|> <|content_text|> <|content_thinking|> "
        "<|content_image|> <|content_audio_input|> <|content_xml|> <|content_invoke_tool_json|> "
        "<|content_invoke_tool_text|> <|content_model_end_sampling|> <|end_message|> <|audio_end|> <|unused_200054|> "
        "<|unused_200053|> <|endoftext|>"
    ),
}
"""The control tokens that the families' own tokenizers have, as far as their renderers place them."""

TEMPLATES: dict[str, str] = {
    "qwen3": "qwen3",
    "qwen3_5_nothink": "qwen3.5",
    "qwen3_5_think": "qwen3.5",
    "qwen3_6": "qwen3.6",
    "qwen3_8": "qwen3.8",
    "qwen3_vl": "qwen3-vl",
    "llama3": "llama-3",
    "llama3_1": "llama-3",
    "llama3_2": "llama-3",
    "glm4moe": "glm-4.5",
    "deepseekv3": "deepseek-v3",
    "gemma4": "gemma4",
    "gemma4_v2": "gemma4",
    "gemma4_v3": "gemma4",
    "gemma4_v4": "gemma4",
    "gemma4_v5": "gemma4",
    "nemotron_3_nano": "nemotron-3",
    "nemotron_3_super": "nemotron-3",
    "nemotron_3_ultra": "nemotron-3-ultra",
    "nemotron_3_5_lightning": "nemotron-3.5",
}
"""The copies of the families' own templates that TRL ships, and the family of each."""

_BEGINNINGS = ("<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<bos>", "[gMASK]")


@cache
def family_tokenizer(family: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with a family's control tokens; `template` names one of TRL's copies."""
    core = small_core()
    tokens = CONTROL_TOKENS[family].split()
    core.add_tokens([AddedToken(token, normalized=False, special=token[1] != "/") for token in tokens])
    beginning = next((token for token in _BEGINNINGS if token in tokens), None)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=beginning)
    tokenizer.chat_template = peer_template(template) if template else None
    return tokenizer
