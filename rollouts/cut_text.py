"""A text that is too long for a context → its head, its tail, and between them how many tokens went.

Left out: how long it may be, and what it is the text of (`observations.py`).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

CHARS_A_TOKEN = 8
"""A text of more characters than this for each token that it may have is cut without being counted whole."""

_MOST_TOKENS_A_BYTE = 16
"""Normalising (NFKC) makes at most 11 bytes of one, and no tokenizer makes more tokens than bytes: so short a text fits
without being counted."""

_ZERO_WIDTH_JOINER = "\u200d"
_FLAG_LETTERS = "".join(map(chr, range(0x1F1E6, 0x1F200)))


def cut_text(head: str, tail: str, unseen: int, max_tokens: int, count: Callable[[str], int]) -> str:
    """The text with at most `max_tokens` tokens. It is `head`, `unseen` characters, `tail`; or `head` alone where
    none is unseen."""
    window = CHARS_A_TOKEN * max_tokens
    if not unseen and _MOST_TOKENS_A_BYTE * len(head.encode()) <= max_tokens:
        return head
    if not unseen and len(head) <= 2 * window:
        total, about = count(head), ""
        if total <= max_tokens:
            return head
        first, last = head, head
    else:
        first, last = head[:window], (tail if unseen else head)[-window:]
        density = (count(first) + count(last)) / max(1, len(first) + len(last))
        total, about = round(density * (len(head) + unseen + len(tail))), "about "

    def with_mark(front: str, back: str, gone: int) -> str:
        return f"{front}\n[… {about}{gone} tokens left out …]\n{back}"

    room = max_tokens - count(with_mark("", "", total))
    while True:
        front = _longest(first, room - room // 2, count, from_end=False)
        # Where both are pieces of one text they must not overlap.
        rest = last[len(front) :] if first is last else last
        back = _longest(rest, room // 2, count, from_end=True)
        text = with_mark(front, back, max(0, total - count(front) - count(back)))
        over = count(text) - max_tokens
        if over <= 0:
            return text
        if room <= 0:  # not even the mark has room
            return _longest(text.strip(), max_tokens, count, from_end=False)
        room -= over


def _longest(text: str, most: int, count: Callable[[str], int], *, from_end: bool) -> str:
    """A piece of `text` at one of its ends that has at most `most` tokens, and nearly as many where the text has them.

    Its length is guessed from the tokens that the guess before it had. Counting works with any tokenizer, where cutting
    between ids would not: decoding part of them need not give part of the text.
    """
    best, low, high = "", 0, len(text) + 1
    guess = min(len(text), CHARS_A_TOKEN // 2 * most)
    for attempt in range(24):
        if not low < guess < high:
            break
        piece = _piece(text, guess, from_end=from_end)
        tokens = count(piece)
        if tokens <= most:
            best, low = piece, guess
            if tokens >= 0.98 * most:
                break
        else:
            high = guess
        # Where the text is uneven the guesses may creep; halving ends that.
        guess = guess * most // max(1, tokens) if attempt < 6 else (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
    return best


def _piece(text: str, length: int, *, from_end: bool) -> str:
    """The first or last `length` characters, or a few less where the cut would part what is seen as one character."""
    place = len(text) - length if from_end else length
    for _ in range(64):
        if not 0 < place < len(text) or not _is_one(text, place, from_end=from_end):
            break
        place += 1 if from_end else -1
    return text[place:] if from_end else text[:place]


def _is_one(text: str, place: int, *, from_end: bool) -> bool:
    """Whether one visible character goes on at `place`: a mark on a letter, a joined emoji, a flag's second letter.

    Two letters make a flag; they are counted from where the text begins or, `from_end`, ends, since the other side may
    have been cut already.
    """
    left, right = text[place - 1], text[place]
    if _ZERO_WIDTH_JOINER in (left, right) or "\U0001f3fb" <= right <= "\U0001f3ff":
        return True
    if left in _FLAG_LETTERS and right in _FLAG_LETTERS:
        before, behind = text[:place], text[place:]
        rest = behind.lstrip(_FLAG_LETTERS) if from_end else before.rstrip(_FLAG_LETTERS)
        return (len(behind if from_end else before) - len(rest)) % 2 == 1
    return unicodedata.category(right).startswith("M")
