"""What are the embedded model's tokens, and how does a conversation become text?

Byte-level BPE with a small vocabulary, and a compact ChatML template. Leaves out: the text that the merges are
learned from (`base_model_corpus`), and the model (`make_base_model`).

How text is cut before BPE is chosen so that the same thing is the same tokens wherever it stands:

- a word carries the space before it, so ` Paris` in prose is ` Paris` in `"population of Paris"`;
- a digit, a minus sign and a line break always stand alone, so `-21` in a sum is `-21` in a tool's result;
- punctuation may merge across the spaces inside it (`": "`, `", "`), which keeps JSON short;
- nothing looks ahead, so text cut at a line break or at a control token is cut the same way in its pieces.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|pad|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
PIECES = r" ?\p{L}+|\p{N}|-|(?: ?[^\s\p{L}\p{N}\-]+)+|\s"

# Contents go in unchanged, without `trim`: the text of a message can be found again in the text of the whole.
CHAT_TEMPLATE = """\
{%- if tools or (messages and messages[0].role == 'system') %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}
        {{- messages[0].content }}
        {%- if tools %}{{- '\\n' }}{%- endif %}
    {%- endif %}
    {%- if tools %}
        {{- '<tools>\\n' }}
        {%- for tool in tools %}
            {{- (tool.function if tool.function is defined else tool) | tojson }}
            {{- '\\n' }}
        {%- endfor %}
        {{- '</tools>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.content %}{{- message.content }}{%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- set call = tool_call.function if tool_call.function is defined else tool_call %}
                {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
                {{- '<tool_call>\\n{"name": ' }}{{- call.name | tojson }}{{- ', "arguments": ' }}
                {%- if call.arguments is string %}
                    {{- call.arguments }}
                {%- else %}
                    {{- call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Learn the merges from `texts`; `vocab_size` counts bytes, merges and control tokens.

    Every byte has a token, so any text goes through unchanged. All control tokens are `special`: with
    `split_special_tokens=True` no text becomes one.
    """
    core = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=[token for token in CONTROL_TOKENS if token not in ("<|im_end|>", "<|pad|>")],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
