"""Whatever a tool returned, the model reads one text form of it, cleaned by one rule, cut to the tokens allowed."""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections import deque
from dataclasses import dataclass
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from rollouts.observations import MAX_ITEMS, as_text, clean, observe
from tests.rollouts.desk import RENDERER
from tests.rollouts.letters import Letters

no_clock = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

HOLDS_ITSELF: list[object] = []
HOLDS_ITSELF.append(HOLDS_ITSELF)


@dataclass
class Point:
    x: int
    y: float


class Reply(BaseModel):
    ok: bool
    parts: list[str]


class Silent:
    """Its text fails."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Plain:
    """Python's own text of it names its place in memory."""


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain «text»\n", "plain «text»\n"),
        ("half a pair: \ud83c", "half a pair: \ufffd"),
        ({"größe": [1.5, None, True]}, '{"größe": [1.5, null, true]}'),
        ([], "[]"),
        ((1, "a"), '[1, "a"]'),
        ({"b", "a"}, '["a", "b"]'),
        (deque([1, 2]), "[1, 2]"),
        (range(3), "[0, 1, 2]"),
        (None, "null"),
        (True, "true"),
        (1.5, "1.5"),
        (float("nan"), "NaN"),
        ([float("nan"), float("-inf")], '["NaN", "-Infinity"]'),
        (10**5000, "an integer of 16610 bits"),
        (Decimal("0.10"), "0.10"),
        (b"bytes \xff\xfe", "bytes \ufffd\ufffd"),
        (memoryview(b"bytes"), "bytes"),
        ({"png": b"\x89PNG"}, '{"png": "\ufffdPNG"}'),
        (RuntimeError("no"), "RuntimeError: no"),
        ({(1, 2): 3, None: 4}, '{"[1, 2]": 3, "null": 4}'),
        ({"1": "a", 1: "b"}, '{"1": "a", "1 (2)": "b"}'),
        ({1: "a", "1": "b", "1 (2)": "c"}, '{"1": "a", "1 (2)": "b", "1 (2) (2)": "c"}'),
        ({"null": 1, None: 2, "true": 3, True: 4}, '{"null": 1, "null (2)": 2, "true": 3, "true (2)": 4}'),
        (HOLDS_ITSELF, "[" * 32 + '"…"' + "]" * 32),
        (Point(1, 2.0), '{"x": 1, "y": 2.0}'),
        (Reply(ok=True, parts=["a"]), '{"ok": true, "parts": ["a"]}'),
        (PurePosixPath("/srv/a"), "/srv/a"),
        (Silent(), "<Silent>"),
        ([Silent()], "<list>"),
        (Plain(), "<tests.rollouts.test_observations.Plain object>"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_type_has_one_text_form_b21(content: object, text: str) -> None:
    assert observe(content) == text
    assert observe(content, max_tokens=2048, encode=RENDERER.encode_text) == text


@pytest.mark.parametrize(
    "content",
    [
        [0] * 1_000_000,
        range(10**12),
        {str(number): number for number in range(1_000_000)},
        [[0] * 1000] * 1000,
        set(range(100_000)),
    ],
    ids=["list", "range", "mapping", "lists", "set"],
)
def test_a_million_entries_are_never_rendered_b21(content: object) -> None:
    text = as_text(content)
    assert len(text) < 40 * MAX_ITEMS
    assert "more" in text
    json.loads(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(), inner, max_size=4),
    max_leaves=20,
)


keys = st.text("1null(2) ", max_size=5) | st.integers(0, 2) | st.none() | st.booleans() | st.tuples(st.integers(0, 1))


@no_clock
@given(content=st.dictionaries(keys, st.integers(), max_size=8))
def test_no_entry_of_a_mapping_is_lost_where_keys_have_the_same_text_b21(content: dict[object, int]) -> None:
    """Entries stay in their order; a key that is text keeps it, but where an earlier one has it."""
    pairs = json.loads(as_text(content), object_pairs_hook=list)
    assert [item for _, item in pairs] == list(content.values())
    names = [name for name, _ in pairs]
    assert len(set(names)) == len(names)
    texts = [key if isinstance(key, str) else as_text(key) for key in content]
    assert all(re.fullmatch(re.escape(text) + r"( \(\d+\))?", name) for text, name in zip(texts, names, strict=True))
    if len(set(texts)) == len(texts):
        assert names == texts


def test_what_is_said_of_entries_left_out_takes_no_entry_s_place_b21() -> None:
    written = json.loads(as_text({"…": 0} | {str(number): number for number in range(MAX_ITEMS)}))
    assert (written["…"], written["… (2)"], len(written)) == (0, "1 more", MAX_ITEMS + 1)


@no_clock
@given(content=json_values)
def test_the_text_form_can_always_be_written_and_read_b21(content: Any) -> None:
    text = observe(content)
    assert json.loads(json.dumps(text)) == text
    text.encode("utf-8")
    if isinstance(content, list | dict):
        json.loads(as_text(content), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize(
    "content", [random.Random(0).randbytes(4096), b"\xff\xfe", b"\x89PNG\r\n\x1a\n" + bytes(64), "\x00\x01\x02\x7f\x9f"]
)
def test_undecodable_bytes_are_text_that_encodes_again_b18(content: object) -> None:
    text = observe(content, max_tokens=500, encode=RENDERER.encode_text)
    assert all(unicodedata.category(character) != "Cc" or character in "\n\t" for character in text)
    assert len(RENDERER.encode_text(text)) <= 500
    text.encode("utf-8")


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        # The literal of case B20: each state of the bar is written over the line, as on a screen.
        ("\x1b[31mFAIL\x1b[0m \x1b]0;title\x07 10%\r 50%\r100%\n", "100%  10%\n"),
        ("\x1b[31mFAIL\x1b[0m \x1b]0;title\x07ed\n", "FAIL ed\n"),
        (" 10%\r 50%\r100%\ndone\n", "100%\ndone\n"),
        ("100% done\r\x1b[K5%", "5%"),
        ("abc\x1b[2K\rd", "d"),
        ("abcdef\b\b\b\x1b[1Kx", "   xef"),
        # Bars that move the cursor instead of returning it.
        (" 10%\x1b[1G 50%\x1b[G100%\n", "100%\n"),
        ("load 10%\x1b[3D50%\x1b[6`9", "load 90%"),
        ("abc\x1b[9Dx\x1b[Cy\x1b[0Dz\x9b1Gw", "wbz"),
        ("a\x1b[4Gb\x1b[2Cc", "a  b  c"),
        ("a\x1b[999999999Gb", "a" + " " * 254 + "b"),
        ("a" * 300 + "\x1b[400G!", "a" * 300 + "!"),
        ("a\r\nb\r\r\nc", "a\nb\nc"),
        ("50%\r", "50%"),
        ("|\b/\b-\b\\\b", "\\"),
        ("N\bNA\bAM\bME\bE _\bx", "NAME x"),
        ("\b\b\ba", "a"),
        ("\x1b]8;;http://a/\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]0;never ended\nnext", "\nnext"),
        ("\x1b[2J\x1b[1;1Hhome\x1b[?25l\x1b[38;5;1m", "home"),
        ("\x1b(Bplain\x1b=\x1b7\x1bM", "plain"),
        ("\x9b31mred", "red"),
        ("bell\x07 nul\x00 del\x7f c1\x86", "bell nul del c1"),
        ("form\x0cfeed\x0btab\x85nel\x84ind", "form\nfeed\ntab\nnel\nind"),
        ("10%\r20%\x0cnext\x1bEline\x1bDdown", "20%\nnext\nline\ndown"),
        ("cut\x1b", "cut"),
        ("cut\x1b[", "cut"),
        ("cut\x1b[3", "cut"),
        ("cut\x1b[38;5", "cut"),
        ("cut\x9b31", "cut"),
        ("cut\x1b(", "cut"),
        ("cut\x1b]0;tit", "cut"),
        ("cut\x1b]8;;http://a/\x1b", "cut"),
        ("not cut\x1b[31\n", "not cut31\n"),
        ("tab\tand\n\nlines", "tab\tand\n\nlines"),
        ("\x1b[0K", ""),
    ],
)
def test_the_text_is_what_a_terminal_shows_b20(printed: str, shown: str) -> None:
    assert clean(printed) == shown


terminal_text = st.text(
    st.sampled_from("ab \n\r\b\t\x1b[]K09;mCGHDE(\x07\\\x00\x0b\x0c\x84\x85\x9b") | st.characters(codec="utf-8"),
    max_size=40,
)


@no_clock
@given(text=terminal_text | st.text())
@example(text="\x1b\x1b[\x1b]")
def test_what_is_clean_stays_as_it_is_b20(text: str) -> None:
    """Nothing that could move a cursor or colour a page is left, and text without control characters is untouched."""
    cleaned = clean(text)
    assert clean(cleaned) == cleaned
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", cleaned)
    if not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", text):
        assert cleaned == text


escapes = st.one_of(
    st.from_regex(r"(\x1b\[|\x9b)[0-?]{0,8}[ -/]{0,2}[@-JL-~]", fullmatch=True),
    st.from_regex(r"\x1b[ -/]{1,2}[0-~]", fullmatch=True),
    st.from_regex(r"\x1b[\]PX^_][ -~]{0,12}(\x07|\x1b\\)", fullmatch=True),
)


@no_clock
@given(said=st.text("ab \n", max_size=8), escape=escapes, data=st.data())
def test_of_a_sequence_that_the_end_cuts_nothing_is_left_b20(said: str, escape: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(escape)))
    assert clean(said + escape[:place]) == said


@no_clock
@given(
    parts=st.lists(st.sampled_from(["a", "b ", "\x0b", "\x0c", "\x84", "\x85", "\x1bD", "\x1bE", "\n"]), max_size=12)
)
def test_whatever_moves_to_a_new_line_is_a_line_feed_b20(parts: list[str]) -> None:
    assert clean("".join(parts)) == "".join(part if part.isprintable() else "\n" for part in parts)


@no_clock
@given(cut=st.integers(0, 40), escape=escapes)
def test_where_a_long_text_is_cut_no_part_of_a_sequence_is_left_b19(cut: int, escape: str) -> None:
    """Whether its head or its tail would have had it."""
    in_head, in_tail = "a" * (100_000 - cut) + escape, escape + "a" * (100_000 - cut)
    text = observe(in_head + "b" * 100_000 + in_tail)
    assert set(re.sub(r"\[… \d+ characters left out …\]", "", text)) <= set("ab\n")


HUGE = {
    "lines": ("y\n", 100_000_000),
    "one line": ("x", 50_000_000),
    "carriage returns": ("\r", 50_000_000),
    "escapes": ("\x1b[", 50_000_000),
    "titles": ("\x1b]0;", 50_000_000),
    "blanks": (" ", 50_000_000),
}


@pytest.mark.parametrize("name", HUGE)
def test_a_huge_result_is_cut_without_being_read_whole_b19(name: str) -> None:
    """Were any step more than linear in the length, this would not end in a day."""
    encoded = 0

    def encode(text: str) -> list[int]:
        nonlocal encoded
        encoded += len(text)
        return RENDERER.encode_text(text)

    piece, count = HUGE[name]
    text = observe(piece * count, max_tokens=2048, encode=encode)
    assert len(RENDERER.encode_text(text)) <= 2048
    assert "tokens left out …]" in text
    assert encoded < 1_000_000


@pytest.mark.parametrize("encode", [RENDERER.encode_text, Letters().encode_text], ids=["embedded", "letters"])
@pytest.mark.parametrize("max_tokens", [64, 200])
def test_head_and_tail_stay_and_the_mark_says_how_many_tokens_went_b19(encode: Any, max_tokens: int) -> None:
    text = "the beginning " + "and so on " * 100 + "the end"
    cut = observe(text, max_tokens=max_tokens, encode=encode)
    front, gone, back = re.fullmatch(r"(.*)\n\[… (\d+) tokens left out …\]\n(.*)", cut, re.DOTALL).groups()  # type: ignore[union-attr]
    assert text.startswith(front)
    assert text.endswith(back)
    assert 0.9 * max_tokens <= len(encode(cut)) <= max_tokens
    assert int(gone) == len(encode(text)) - len(encode(front)) - len(encode(back))


pieces = st.sampled_from(
    ["word ", "\n", "    ", "日本語", "e\u0301", "👩‍👩‍👧‍👦", "🇩🇪", "👍🏽", "0123456789", "<|im_end|>", "ಠ", "\u200b"]
)


@no_clock
@given(
    parts=st.lists(pieces, max_size=60),
    repeated=st.sampled_from([1, 1, 7, 60]),
    max_tokens=st.integers(16, 120),
    letters=st.booleans(),
)
def test_a_text_has_at_most_its_tokens_b19(parts: list[str], repeated: int, max_tokens: int, letters: bool) -> None:
    encode = Letters().encode_text if letters else RENDERER.encode_text
    text = "".join(parts) * repeated
    cut = observe(text, max_tokens=max_tokens, encode=encode)
    assert len(encode(cut)) <= max_tokens
    if len(encode(text)) <= max_tokens and len(text) <= 16 * max_tokens:
        assert cut == text, "what fits is left alone"
    if "left out …]\n" not in cut:
        return
    front, _, rest = cut.partition("\n[… ")
    back = rest.partition("left out …]\n")[2]
    assert text.startswith(front)
    assert text.endswith(back)
    # No cut parts what is seen as one character: a mark from its letter, an emoji's parts, a flag's letters.
    for left, right in ((front[-1:], text[len(front) :][:1]), (text[: len(text) - len(back)][-1:], back[:1])):
        if left and right and front and back:
            assert "\u200d" not in (left, right)
            assert not unicodedata.category(right).startswith("M")
            assert right != "🏽"
    for left in (front, text[: len(text) - len(back)]):
        assert len(re.findall("[🇦-🇿]*$", left)[0]) % 2 == 0


@pytest.mark.parametrize("max_tokens", [64, 65, 66, 67])
@pytest.mark.parametrize("before", ["", "x"])
@pytest.mark.parametrize("flags", [60, 1000, 200_001])
def test_a_row_of_flags_is_cut_between_two_flags_b19(flags: int, before: str, max_tokens: int) -> None:
    cut = observe(before + "🇩🇪" * flags, max_tokens=max_tokens, encode=Letters().encode_text)
    front, back = re.fullmatch(r"x?(.*)\n\[… .* left out …\]\n(.*)", cut, re.DOTALL).groups()  # type: ignore[union-attr]
    for piece in (front, back):
        assert len(piece) >= 4
        assert piece == "🇩🇪" * (len(piece) // 2)


def test_an_observation_that_was_cut_is_not_cut_again() -> None:
    text = observe("word " * 10_000, max_tokens=100, encode=RENDERER.encode_text)
    assert observe(text, max_tokens=100, encode=RENDERER.encode_text) == text


def test_without_a_tokenizer_only_what_fits_no_context_is_cut() -> None:
    text = observe("a" * 300_000)
    assert text == "a" * 100_000 + "\n[… 100000 characters left out …]\n" + "a" * 100_000
    assert observe("a" * 200_000) == "a" * 200_000


@pytest.mark.parametrize(("head", "tail"), [("a", "\x1b[0m"), ("\x00", "b"), ("\x00", "\x1b[0m")])
def test_an_end_of_which_nothing_is_seen_is_not_the_middle_b19(head: str, tail: str) -> None:
    """What is looked at of a long text, 100,000 characters at each end, may be nothing once it is clean."""
    text = head * 100_000 + "c" * 100_000 + tail * 100_000
    cut = observe(text, max_tokens=64, encode=Letters().encode_text)
    front, back = re.fullmatch(r"(.*)\n\[… about \d+ tokens left out …\]\n(.*)", cut, re.DOTALL).groups()  # type: ignore[union-attr]
    assert (set(front), set(back)) == (set(head) & {"a"}, set(tail) & {"b"})
