"""Tokenizers and chat templates of the model families, for tests: real vocabularies where an installed package ships
them, small ones with the families' control tokens elsewhere."""

from __future__ import annotations

import base64
import importlib.util
import json
import lzma
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import SentencePieceExtractor, TikTokenConverter, bytes_to_unicode

EMBEDDED = Path(__file__).parents[2] / "models" / "embedded"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}"
    '{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' + c.function.arguments | tojson + '
    "'}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Mistral's rules: call ids of nine letters, tools before the last user message, turns end with </s>.
MISTRAL = (
    "{{ bos_token }}{% set last = (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and m == last %}"
    "{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.role == 'assistant' and m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('call ids have nine letters') }}{% endif %}"
    '{{ \'{"name": "\' + c.function.name + \'", "arguments": \' + c.function.arguments | tojson + \', "id": "\' + '
    "c.id + '\"}' }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' + eos_token }}"
    "{% elif m.role == 'assistant' %}{{ m.content + eos_token }}{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('call ids have nine letters') }}{% endif %}"
    '{{ \'[TOOL_RESULTS]{"content": \' + m.content | tojson + \', "call_id": "\' + m.tool_call_id + '
    "'\"}[/TOOL_RESULTS]' }}{% else %}{{ raise_exception('no ' + m.role + ' message') }}{% endif %}{% endfor %}"
)
QWEN_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NOT_SPECIAL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_MISTRAL_SPECIAL = (
    "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip


def small_core(texts: tuple[str, ...] = ("Take 12 from the area of Paris. What is it?", "\n\n")) -> Tokenizer:
    """A byte-level BPE with a few merges, which cuts text as Qwen's does."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = _byte_level(QWEN_CUT)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator(
        [*texts, *[".\n"] * 9], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    return core


def make_tokenizer(core: Tokenizer, template: str | None, **options: Any) -> PreTrainedTokenizerFast:
    """With Qwen's added tokens: the call markers are added, but not special."""
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    core.add_tokens([AddedToken(token, normalized=False, special=False) for token in NOT_SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", **options)
    tokenizer.chat_template = template
    return tokenizer


def peer_templates() -> dict[str, str]:
    """Every template that TRL ships, by its name."""
    folder = _folder_of("trl") / "chat_templates"
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


def peer_template(name: str) -> str:
    """A family's own template, from the copies that TRL ships."""
    return (_folder_of("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


# What the templates write as control tokens: all between <| and |>, and tags that their families have tokens for.
_WRITTEN_TOKEN = re.compile(
    r"<\|[^|<>\s'\"]{1,40}\|>|<｜[^｜\s]{1,30}｜>|<\|\"\|>|<\|?(?:turn|channel|tool|tool_call|tool_response)\|?>"
    r"|</?(?:tool_call|tool_response|think|arg_key|arg_value|s|image|sop|start_of_turn|end_of_turn|end_of_utterance)>"
    r"|\[gMASK\]"
)


def tokenizer_for(template: str) -> PreTrainedTokenizerFast:
    """A small tokenizer that has every control token which the template writes."""
    core = small_core()
    core.add_special_tokens([AddedToken(token, normalized=False) for token in ("<|bos|>", "<|endoftext|>")])
    written = dict.fromkeys(_WRITTEN_TOKEN.findall(template))
    core.add_tokens([AddedToken(token, normalized=False) for token in written])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<|bos|>", eos_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer


@cache
def qwen_tokenizer(template: str = "qwen3") -> PreTrainedTokenizerFast:
    """Qwen's real ids."""
    vocabulary = _folder_of("dashscope") / "resources" / "qwen.tiktoken"
    core = TikTokenConverter(vocab_file=str(vocabulary), pattern=QWEN_CUT).converted()
    return make_tokenizer(core, peer_template(template))


@cache
def tekken_tokenizer() -> PreTrainedTokenizerFast:
    """Mistral's real Tekken vocabulary (byte-level)."""
    stored = json.loads((_folder_of("mistral_common") / "data" / "tekken_240911.json").read_text(encoding="utf-8"))
    size = stored["config"]["default_vocab_size"] - stored["config"]["default_num_special_tokens"]
    pieces = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in stored["vocab"][:size]}
    letters = bytes_to_unicode()
    words = {piece: "".join(letters[byte] for byte in piece) for piece in pieces}
    merges = []
    for piece, rank in pieces.items():
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [half for half in halves if half[0] in pieces and half[1] in pieces]
        merges += [(rank, pieces[left], pieces[right], words[left], words[right]) for left, right in known]
    core = Tokenizer(
        models.BPE(
            vocab={words[piece]: rank for piece, rank in pieces.items()},
            merges=[(left, right) for *_, left, right in sorted(merges)],
        )
    )
    core.pre_tokenizer = _byte_level(stored["config"]["pattern"])
    core.decoder = decoders.ByteLevel()
    return _mistral(core)


@cache
def sentencepiece_tokenizer(*, legacy: bool) -> PreTrainedTokenizerFast:
    """Mistral's real SentencePiece vocabulary, with byte fallback; `<s>` and the control tokens are in it. `legacy`
    puts a blank before every text between control tokens, else before the first alone."""
    path = _folder_of("mistral_common") / "data" / "mistral_instruct_tokenizer_240323.model.v3"
    stored: Any = SentencePieceExtractor(str(path)).extract(models.BPE)
    core = Tokenizer(
        models.BPE(stored["vocab"], stored["merges"], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if legacy:
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _mistral(core)


@cache
def smollm2_tokenizer(*, own_template: bool = False) -> PreTrainedTokenizerFast:
    """SmolLM2's real vocabulary (Apache-2.0), with the template that `make_smollm2` gives it, or with its own."""
    folder = Path(__file__).with_name("smollm2")
    core = Tokenizer.from_str(lzma.decompress((folder / "tokenizer.json.xz").read_bytes()).decode())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<|im_start|>", eos_token="<|im_end|>")
    template = folder if own_template else EMBEDDED
    tokenizer.chat_template = (template / "chat_template.jinja").read_text(encoding="utf-8")
    return tokenizer


def _mistral(core: Tokenizer) -> PreTrainedTokenizerFast:
    core.add_special_tokens([AddedToken(token, normalized=False) for token in ("<s>", "</s>", *_MISTRAL_SPECIAL)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = MISTRAL
    return tokenizer


def embedded_tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(EMBEDDED)


def _byte_level(cut: str) -> pre_tokenizers.Sequence:
    split = pre_tokenizers.Split(Regex(cut), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"the package {package}, which ships what this test reads, is not installed")
    return Path(spec.origin).parent
