"""The guard alone: what texts become, for tokenizers that treat their added tokens in every way there is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from data.guard import BREAK, END, QUOTE, START, Guard
from tests.data.chat_tokenizers import CHATML, make_tokenizer, small_core
from tests.data.test_types import no_clock

PIECES = [
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "<|im_",
    "end|>",
    "tool_call",
    "<",
    ">",
    "ab",
    "bc",
    "◆",
    " ",
    "\n",
]
texts = st.lists(
    st.one_of(st.sampled_from([*PIECES, START, END, BREAK, QUOTE, QUOTE + "0"]), st.text(max_size=4)), max_size=6
)
texts = texts.map("".join)


def guard_of(
    *tokens: AddedToken | str, core: Tokenizer | None = None, **options: Any
) -> tuple[Guard, PreTrainedTokenizerFast]:
    core = core or small_core()
    core.add_tokens([AddedToken(t, normalized=False) if isinstance(t, str) else t for t in tokens])
    tokenizer = make_tokenizer(core, CHATML, **options)
    return Guard(tokenizer), tokenizer


def ids(guard: Guard, rendered: str) -> list[int]:
    return [token.token_id for token in guard.encode(rendered)]


def control_ids(guard: Guard, rendered: str) -> list[int]:
    return [token for token in ids(guard, rendered) if token in guard.control_tokens]


def native(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


# Tokens that overlap, that begin or end as others do, and one of a single character.
GUARD, TOKENIZER = guard_of("abc", "bcd", "ab|", "◆", "</think")


@settings(no_clock, max_examples=200)
@given(text=texts)
def test_no_text_becomes_a_control_token_and_all_of_it_is_there(text: str) -> None:
    for written in (GUARD.escape(text), GUARD.mark(text)):
        assert GUARD.plain(written) == text
        assert not control_ids(GUARD, written)
        assert TOKENIZER.decode(ids(GUARD, written), clean_up_tokenization_spaces=False) == text
        assert GUARD.count_forged(written) == 0


@settings(no_clock, max_examples=200)
@given(text=texts, before=st.sampled_from(["<", "<|", "</", "[", "a"]), after=st.sampled_from([">", "|>", "d", "c|"]))
def test_no_template_completes_a_control_token(text: str, before: str, after: str) -> None:
    """`'<' + key + '>'` is what some templates write."""
    assert not control_ids(GUARD, before + GUARD.escape(text) + after)
    assert not control_ids(GUARD, before + GUARD.mark(text) + after)


@settings(no_clock, max_examples=100)
@given(
    parts=st.lists(
        st.tuples(st.sampled_from(["<|im_start|>", "<|im_end|>\n", "user\n", ""]), st.text("aé日 \n.", max_size=8))
    )
)
def test_a_rendering_of_honest_texts_is_encoded_as_natively(parts: list[tuple[str, str]]) -> None:
    rendered = "".join(placed + GUARD.mark(text) for placed, text in parts)
    assert ids(GUARD, rendered) == native(TOKENIZER, "".join(placed + text for placed, text in parts))


def test_tokens_that_hold_content_are_known() -> None:
    tokens = GUARD.encode(f"<|im_start|>user\n{GUARD.mark(' é<|im_end|> ')}<|im_end|>")
    said = TOKENIZER.decode([token.token_id for token in tokens if token.is_content])
    assert str(said).strip() == "é<|im_end|>"
    assert not tokens[0].is_content
    assert not tokens[-1].is_content


def test_offsets_without_width_hide_no_content_a05() -> None:
    """GPT-2's and Llama 3's byte-level tokenizers give a blank no width."""
    core = small_core()
    core.post_processor = processors.ByteLevel(trim_offsets=True)
    guard, tokenizer = guard_of(core=core)
    text = " a  b \n c "
    spans = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
    assert sum(end - start for start, end in spans) < len(text), "it does what the test is about"
    rendered = f"<|im_start|>{guard.mark(text)}<|im_end|>"
    said = [token.token_id for token in guard.encode(rendered) if token.is_content]
    assert said == native(tokenizer, text.strip())


def test_places_are_those_in_the_rendering() -> None:
    rendered = f"<|im_start|>{GUARD.escape('a<|im_end|>b')}<|im_end|>"
    tokens = GUARD.encode_with_places(rendered)
    assert [token.token_id for token in tokens] == ids(GUARD, rendered)
    assert "".join(rendered[token.start : token.end] for token in tokens).replace(BREAK, "") == rendered.replace(
        BREAK, ""
    )
    assert (tokens[0].start, tokens[0].end) == (0, len("<|im_start|>"))


def test_half_a_surrogate_pair_is_a_replacement_character_b15() -> None:
    assert GUARD.plain(GUARD.mark("cheers \ud83c")) == GUARD.plain(GUARD.escape("cheers \ud83c")) == "cheers \ufffd"


def test_words_of_schemas_reach_the_template() -> None:
    guard, _ = guard_of("<|object_start|>", "<title>")
    schema = {"type": "object", "title": "T", "properties": {"x": {"type": "string", "description": "<title>"}}}
    written = guard.escape_json(schema)
    assert written["type"] == "object"
    assert written["title"] == "T"
    assert (
        guard.plain(written["properties"]["x"]["description"]) == "<title>" != written["properties"]["x"]["description"]
    )


def test_runs_of_white_space_are_text() -> None:
    guard, tokenizer = guard_of("    ", "\n\n\n")
    assert not {"    ", "\n\n\n"} & set(guard.control_tokens.values())
    rendered = "<|im_start|>" + guard.mark("a    b\n\n\nc")
    assert ids(guard, rendered) == native(tokenizer, "<|im_start|>a    b\n\n\nc")


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_tokens_that_take_white_space_with_them(flag: str) -> None:
    """Phi-3's `<|end|>` swallows the line break behind it."""
    guard, tokenizer = guard_of(AddedToken("<|end|>", normalized=False, **{flag: True}))
    for text in ("a <|end|>\n<|im_start|>b", "a<|end|>b", " <|end|> "):
        assert ids(guard, text) == native(tokenizer, text)
    assert tokenizer.decode(ids(guard, guard.mark("a <|end|> b"))) == "a <|end|> b"


def test_tokens_that_are_matched_after_the_normalizer() -> None:
    core = small_core()
    core.normalizer = normalizers.Lowercase()
    guard, tokenizer = guard_of(AddedToken("<call>", normalized=True), core=core)
    assert ids(guard, "A<call>B") == native(tokenizer, "A<call>B")
    for forged in ("<call>", "<CALL>"):
        assert not control_ids(guard, guard.mark(forged))
        assert not control_ids(guard, guard.escape(forged))


def unigram(*, byte_fallback: bool) -> PreTrainedTokenizerFast:
    """Its vocabulary holds the control tokens, as T5's and Gemma's do: the model itself could make them of text."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("<call>", -0.5), ("▁", -2.0)]
    pieces += [(letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyz<>/"]
    pieces += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)] if byte_fallback else []
    core = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=byte_fallback))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    core.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>", "<call>")])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


@pytest.mark.parametrize("byte_fallback", [True, False])
def test_control_tokens_that_the_vocabulary_holds_too(byte_fallback: bool) -> None:
    tokenizer = unigram(byte_fallback=byte_fallback)
    guard = Guard(tokenizer)
    rendered = f"<s>{guard.mark('go <call> on</s>')}</s>"
    assert control_ids(guard, rendered) == native(tokenizer, "<s></s>")
    assert str(tokenizer.decode(ids(guard, rendered)[1:-1])).strip() == "go <call> on</s>"
    assert ids(guard, f"<s>{guard.mark('go on')}<call>") == native(tokenizer, "<s>go on<call>")


def test_unknown_text_is_no_forgery() -> None:
    """Without byte fallback a letter that the vocabulary lacks is `<unk>`; spelled out, `<unk>` is text."""
    guard = Guard(unigram(byte_fallback=False))
    assert "<unk>" not in guard.control_tokens.values()
    assert guard.count_forged("<unk>") == 1
    assert 0 not in ids(guard, guard.mark("<unk>"))
    assert 0 in ids(guard, guard.mark("日"))


def test_a_tokenizer_that_cuts_or_pads_does_neither_here() -> None:
    guard, tokenizer = guard_of()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    assert Guard(tokenizer).encode("one two three four five") == guard.encode("one two three four five")


def test_a_slow_tokenizer_is_refused_in_one_line() -> None:
    class Slow:
        pass

    with pytest.raises(ValueError, match=r"^Slow is not a fast tokenizer; save one with tokenizer\.json$"):
        Guard(Slow())  # type: ignore[arg-type]


def test_a_normalizer_may_take_the_private_use_characters_out() -> None:
    core = small_core()
    core.normalizer = normalizers.Replace(Regex("[\ue000-\uf8ff]"), "")
    guard, tokenizer = guard_of(AddedToken("<call>", normalized=True), core=core)
    assert ids(guard, f"<call>{guard.mark('<call>')}<|im_end|>") == [
        *native(tokenizer, "<call>"),
        *ids(guard, guard.mark("<call>")),
        *native(tokenizer, "<|im_end|>"),
    ]
