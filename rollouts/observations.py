"""What a tool returned → the text that a model reads: one text form for any type, one rule of cleaning, one way to cut
(`cut_text.py`).

It is the same for warm-start data, training and evaluation. What a call *is* (its deadline, its failures) is in
`tool_call.py`; that no text becomes a control token is the renderer's work.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from itertools import islice
from numbers import Integral, Real
from typing import Any

from pydantic import BaseModel

from rollouts.cut_text import CHARS_A_TOKEN, cut_text

MAX_ITEMS = 10_000
"""So many entries of lists and mappings are written; a list of a million is never rendered whole."""
MAX_DEPTH = 32
MAX_INTEGER_BITS = 4096
WINDOW_CHARS = 100_000
"""Of a longer text only so many characters at each end are looked at (more, where more tokens may be kept)."""

# Terminal sequences: strings for the terminal (a title, a link), which end with BEL or ESC \; control sequences, with
# erase-in-line (K) and moves within a line (C, D, G and their like) told apart; a line down (D, E); shorter ones; an
# ESC alone. The end of the text may cut them short.
_ESCAPE = re.compile(
    r"\x1b[\]PX^_][^\x07\x1b\x9c\n]*+(?:\x07|\x1b\\|\x9c)?"
    r"|(?:\x1b\[|\x9b)(?:(?P<line>[0-2]?K|[0-9]{0,9}[CDG`a])|[0-?]*+[ -/]*+(?:[@-~]|\Z))"
    r"|\x1b(?P<down>[DE])"
    r"|\x1b[ -/]*+(?:[0-~]|\Z)"
    r"|\x1b"
)
_LONGEST_ESCAPE = 1000
"""Characters; where a long text is cut, so far back is looked for the beginning of one."""
_DOWN = re.compile(r"[\x0b\x0c\x84\x85]")
_UNSEEN = re.compile(r"[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]")
_ANYTHING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_LINE_END = re.compile(r"(?<!\r)\r++\n")
_MOVES = re.compile(r"(\r|\x08|\x1b[0-9]*[KCDG`a])")
_LAST_COLUMN = 255
"""A move beyond it ends there, or at the end of the line: a few characters must not ask for a million blanks."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def observe(
    content: object, *, max_tokens: int | None = None, encode: Callable[[str], Sequence[int]] | None = None
) -> str:
    """What a tool returned, as the model reads it: `as_text`, then `clean`, then cut to `max_tokens`.

    Args:
        max_tokens: the text has at most so many tokens: its head and its tail, and between them a line that says how
            many tokens went (about how many, where the text was too long to count them all). None: it is cut only
            where it is longer than any context.
        encode: text → token ids, to count them; the renderer's `encode_text`.

    >>> observe({"ok": True}), observe("10%\\r100%\\n"), observe(None)
    ('{"ok": true}', '100%\\n', 'null')
    """
    text = as_text(content)
    window = max(WINDOW_CHARS, CHARS_A_TOKEN * (max_tokens or 0))
    unseen = max(0, len(text) - 2 * window)
    start = _tail_start(text, window + unseen)
    head, tail = (clean(text[:window]), clean(text[start:])) if unseen else (clean(text), "")
    if max_tokens is not None:
        assert encode is not None
        return cut_text(head, tail, unseen, max_tokens, lambda piece: len(encode(piece)))
    return f"{head}\n[… {unseen} characters left out …]\n{tail}" if unseen else head


def as_text(content: object) -> str:
    """The one text form of any value.

    Text stays as it is; bytes are read as UTF-8, with U+FFFD for what is none; an exception is `Type: message`; all
    else is JSON, None being `null`. What JSON has no form for is written as text: NaN as "NaN", an object as its `str`
    (without its address in memory, which differs from run to run). A key whose text an earlier key has gets a number:
    {1: "a", "1": "b"} is {"1": "a", "1 (2)": "b"}. Long lists and deep nestings say what is left out.

    >>> as_text({"größe": [1.5, float("nan")]}), as_text(b"\\xff"), as_text(ValueError("no"))
    ('{"größe": [1.5, "NaN"]}', '�', 'ValueError: no')
    """
    if isinstance(content, str):
        return content
    try:
        plain = _JsonForm().of(content)
        return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False, allow_nan=False)
    except Exception:  # an object of a tool's own, whose `str` or whose iteration fails
        return f"<{type(content).__name__}>"


def clean(text: str) -> str:
    """The text that a terminal would show, line by line, in order: one rule for whatever programs print.

    - Colours, titles, links and all other escape sequences are taken out, also one that the end of the text cuts short.
    - Within a line a carriage return goes back to its beginning, a backspace back by one, a cursor sequence to its
      column, and what follows writes over what is there; erase-in-line erases. So of a progress bar the last state is
      left. Windows line ends become `\\n`.
    - What else moves to a new line (form feed, vertical tab, NEL, IND) becomes `\\n`. Other control characters are
      taken out; tabs and line feeds stay. Half a surrogate pair becomes U+FFFD.

    The time is linear in the length.

    >>> clean("\\x1b[31mFAIL\\x1b[0m \\x1b]0;title\\x07\\n 10%\\r 50%\\r100%\\n"), clean("ab\\bc")
    ('FAIL \\n100%\\n', 'ac')
    """
    if not _ANYTHING.search(text):
        return text
    text = _HALF_PAIR.sub("\N{REPLACEMENT CHARACTER}", text)
    # From here on an ESC stands for what happens within a line: ESC 2K erases it, ESC 5G goes to its fifth column.
    text = _ESCAPE.sub(lambda found: "\n" if found["down"] else "\x1b" + found["line"] if found["line"] else "", text)
    text = _LINE_END.sub("\n", _UNSEEN.sub("", _DOWN.sub("\n", text)))
    if not _MOVES.search(text):
        return text
    return "\n".join(_shown(line) if _MOVES.search(line) else line for line in text.split("\n"))


def _tail_start(text: str, start: int) -> int:
    """`start`, or the end of the escape sequence that it would cut in two."""
    opened = max(text.rfind(sign, max(0, start - _LONGEST_ESCAPE), start) for sign in "\x1b\x9b")
    found = _ESCAPE.match(text, opened) if opened >= 0 else None
    return max(start, found.end()) if found else start


def _shown(line: str) -> str:
    """What is left of a line when its cursor moves back and writes over it."""
    cells: list[str] = []
    cursor = 0
    for part in _MOVES.split(line):
        if part == "\r":
            cursor = 0
        elif part == "\b":
            cursor = max(0, cursor - 1)
        elif part in ("\x1bK", "\x1b0K"):
            del cells[cursor:]
        elif part == "\x1b1K":
            cells[:cursor] = " " * min(cursor, len(cells))
        elif part == "\x1b2K":
            cells = []
        elif part.startswith("\x1b"):
            cursor = _column(part, cursor, max(_LAST_COLUMN, len(cells)))
        elif part:
            cells += " " * (cursor - len(cells))
            cells[cursor : cursor + len(part)] = part
            cursor += len(part)
    return "".join(cells)


def _column(move: str, cursor: int, last: int) -> int:
    """Where a move within a line leads: to a column (G), back (D), or forward (C)."""
    count = max(1, int(move[1:-1] or 1))
    place = {"G": count - 1, "`": count - 1, "D": cursor - count}.get(move[-1], cursor + count)
    return min(max(0, place), last)


class _JsonForm:
    """Makes one value what JSON can hold, within bounds."""

    def __init__(self) -> None:
        self._items_left = MAX_ITEMS

    def of(self, value: object, depth: int = 0) -> Any:
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, Real):
            return _number(value)
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value).decode("utf-8", "replace")
        if isinstance(value, BaseException):
            return f"{type(value).__name__}: {value}"
        if depth == MAX_DEPTH:
            return "…"
        if isinstance(value, BaseModel):
            value = value.model_dump()
        elif is_dataclass(value) and not isinstance(value, type):
            value = {field.name: getattr(value, field.name) for field in fields(value)}
        if isinstance(value, Mapping):
            return self._mapping(value, depth)
        if isinstance(value, Set):  # in an order that does not depend on the process
            return sorted(self._list(value, depth), key=str)
        if isinstance(value, Sequence):
            return self._list(value, depth)
        return _ADDRESS.sub("", str(value))

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        written: dict[str, Any] = {}
        same: Counter[str] = Counter()

        def free(name: str) -> str:
            while (numbered := f"{name} ({same[name] + 1})" if same[name] else name) in written:
                same[name] += 1
            return numbered

        for key, item in value.items():
            if not self._take():
                written[free("…")] = f"{len(value) - len(written)} more"
                break
            written[free(key if isinstance(key, str) else as_text(key))] = self.of(item, depth + 1)
        return written

    def _list(self, value: Sequence[Any] | Set[Any], depth: int) -> list[Any]:
        written: list[Any] = []
        for item in islice(value, len(value)):
            if not self._take():
                written.append(f"… {len(value) - len(written)} more")
                break
            written.append(self.of(item, depth + 1))
        return written

    def _take(self) -> bool:
        self._items_left -= 1
        return self._items_left >= 0


def _number(value: Real) -> int | float | str:
    if isinstance(value, Integral):
        whole = int(value)
        bits = whole.bit_length()
        return whole if bits <= MAX_INTEGER_BITS else f"an integer of {bits} bits"
    number = float(value)
    if math.isnan(number):
        return "NaN"
    return number if math.isfinite(number) else ("Infinity" if number > 0 else "-Infinity")
