"""The embedded model is an ordinary folder, its tokens are what they promise, and its corpus holds no tools."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from envs.lookup_calc import CITIES, TOOLS, LookupCalc
from scripts.base_model_corpus import documents
from scripts.base_model_tokenizer import CONTROL_TOKENS

FOLDER = Path(__file__).parents[2] / "models" / "embedded"
TOOL_SPECS = [tool.as_openai() for tool in TOOLS]
TOKENIZER: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(FOLDER)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
# Pieces that are likely to merge with, or to be taken for, what the template puts around them.
CONTENT = st.lists(
    st.sampled_from(["\n", " ", "  ", "-", "7", '"', "}", "<", "London", "a b", "\u00e9", *CONTROL_TOKENS])
).map("".join)


def ids(text: str) -> list[int]:
    return TOKENIZER(text, split_special_tokens=True)["input_ids"]


@settings(deadline=None)
@given(TEXT)
def test_any_text_comes_back_unchanged(text: str) -> None:
    assert TOKENIZER.decode(ids(text)) == text


@settings(deadline=None)
@given(st.one_of(TEXT, CONTENT))
def test_no_text_becomes_a_control_token(text: str) -> None:
    control = set(TOKENIZER.convert_tokens_to_ids(list(CONTROL_TOKENS)))
    assert not control & set(ids(text))


def test_a_digit_is_always_one_token() -> None:
    digits = TOKENIZER.convert_tokens_to_ids(list("0123456789"))
    for text in ("1234567890", " 98", '{"expression": "21 + 67"}', "The answer is -40.", "x7y"):
        assert [token for token in ids(text) if token in digits] == [digits[int(c)] for c in text if c.isdigit()]


@pytest.mark.parametrize("city", [*CITIES["train"], *CITIES["heldout"]])
def test_a_city_is_the_same_tokens_everywhere_and_never_a_single_one(city: str) -> None:
    alone = ids(f" {city}")
    assert len(alone) > 1
    for text in (f"What is the area of {city}?", f"the age of {city} minus 2", f'{{"key": "population of {city}"}}'):
        whole = ids(text)
        assert any(whole[start : start + len(alone)] == alone for start in range(len(whole)))


def pieces_of(system: str, user: str, said: str, key: str, result: str) -> tuple[list[dict], list[str]]:
    """A conversation, and the text of it cut at the edges of the contents; contents stand at odd places."""
    call = {"type": "function", "function": {"name": "lookup", "arguments": {"key": key}}}
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": user},
        {"role": "assistant", "content": said, "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": "The answer is 7."},
    ]
    marks = [f"@{index}@" for index in range(4)]
    marked = [dict(message) for message in messages]
    for index, mark in enumerate(marks):
        marked[index]["content"] = mark
    text = TOKENIZER.apply_chat_template(marked, tools=TOOL_SPECS, tokenize=False)
    pieces = []
    for mark, content in zip(marks, (system, user, said, result), strict=True):
        before, text = text.split(mark)
        pieces += [before, content]
    return messages, [*pieces, text]


@settings(deadline=None)
@given(*[st.one_of(TEXT, CONTENT).filter(lambda text: not any(token in text for token in CONTROL_TOKENS))] * 4)
def test_the_whole_is_the_sum_of_its_pieces(system: str, user: str, said: str, result: str) -> None:
    messages, pieces = pieces_of(system, user, said or "-", "area of Paris", result)
    whole = TOKENIZER.apply_chat_template(messages, tools=TOOL_SPECS, tokenize=False)
    assert whole == "".join(pieces)
    assert TOKENIZER(whole)["input_ids"] == [token for piece in pieces for token in TOKENIZER(piece)["input_ids"]]


def test_calls_results_and_the_generation_prompt_are_rendered_as_promised() -> None:
    messages, _ = pieces_of("S", "U", "", "area of \u00c5rhus", "21")
    text = TOKENIZER.apply_chat_template(messages[1:4], tools=None, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
        '{"name": "lookup", "arguments": {"key": "area of \u00c5rhus"}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>tool\n21<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_are_shown_without_a_system_message() -> None:
    text = TOKENIZER.apply_chat_template([{"role": "user", "content": "U"}], tools=TOOL_SPECS, tokenize=False)
    assert text.startswith('<|im_start|>system\n<tools>\n{"name": "lookup", "description": "Look up')
    assert text.endswith("</tools><|im_end|>\n<|im_start|>user\nU<|im_end|>\n")


def test_prompts_are_short() -> None:
    env = LookupCalc()
    opening = [
        {"role": message.role, "content": message.content} for message in env.opening(env.tasks("train", 1, 0)[0])
    ]
    system = TOKENIZER.apply_chat_template(opening[:1], tools=TOOL_SPECS, tokenize=False)
    assert len(TOKENIZER(system)["input_ids"]) <= 130


def test_the_model_loads_in_float32_and_ends_turns() -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.tie_word_embeddings
    assert model.config.head_dim == 32
    assert model.config.vocab_size == len(TOKENIZER)
    assert (
        model.generation_config.eos_token_id == TOKENIZER.eos_token_id == TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    )
    assert TOKENIZER.bos_token_id is None
    assert (FOLDER / "model.safetensors").stat().st_size < 6_000_000


def test_the_model_copies_what_it_never_saw() -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    rng = random.Random(3)
    city = rng.choice(CITIES["heldout"])
    said = f"population of {city}, {rng.randint(10000, 99999)}"
    prompt = f"<|im_start|>user\nRepeat: {said}<|im_end|>\n<|im_start|>assistant\n"
    given_ids = TOKENIZER(prompt, return_tensors="pt")
    made = model.generate(**given_ids, do_sample=False, max_new_tokens=40)[0, given_ids["input_ids"].shape[1] :]
    assert TOKENIZER.decode(made) == f"{said}<|im_end|>"


def test_the_corpus_holds_no_tools_and_no_heldout_city_and_is_the_same_each_time() -> None:
    made = list(islice(documents(5), 2000))
    assert made == list(islice(documents(5), 2000))
    assert made != list(islice(documents(6), 2000))
    text = "\n".join(made)
    words = set("".join(c if c.isalpha() else " " for c in text).split())
    assert not words & {"tool", "tools", "lookup", "calculate", "arguments", "expression"}
    assert not words & set(CITIES["heldout"])
    assert "<tool" not in text
    assert "</tool" not in text
