"""What does a token look like to a person? Ids → text in which every byte, blank and control token can be seen.

It reads a model folder's `tokenizer.json` and nothing else, so a page is made without loading a model or torch.
Decoding ids one by one would print replacement marks for characters that are split over tokens; here the tokens of one
character are grouped, and bytes that are no text are shown as `<0xF0>`. Leaves out colours and markup.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

# A character has at most four bytes; a longer wait for a clean end means that the bytes are no text.
_LONGEST_GROUP = 8
_NAMED_MARKS = {"\n": "↵", "\r": "␍", "\t": "⇥", "\u00a0": "NBSP"}
# These count as letters or marks, and yet nothing is drawn for them.
_BLANK_LETTERS = frozenset("\u115f\u1160\u3164\uffa0\u2800\u034f")
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of shown text. `mark`: it stands for something that has no look of its own: `↵`, `U+202E`, `<0xF0>`."""

    text: str
    mark: bool = False


@dataclass(frozen=True, slots=True)
class Shown:
    """Tokens `start:end` that are shown as one: a whole character, a piece of text, or a control token."""

    start: int
    end: int
    parts: tuple[Part, ...]
    control: bool = False


class Vocabulary:
    """Token ids → bytes, for byte-level BPE, for SentencePiece with byte fallback, and for plain pieces.

    `control_tokens` are the added tokens that are more than white space: the same rule as the chat renderer's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = json.dumps(json.loads(tokenizer.to_str()).get("decoder"), ensure_ascii=False)
        self._byte_level = '"ByteLevel"' in decoder
        self._sentence_piece = not self._byte_level and ("▁" in decoder or '"ByteFallback"' in decoder)
        self._bytes_of_char = _byte_level_alphabet()
        added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        self.control_tokens = {token_id: text for token_id, text in added.items() if text.strip()}
        self._known = {token_id: text.encode() for token_id, text in added.items()}

    @classmethod
    def from_folder(cls, folder: Path) -> Vocabulary:
        """The vocabulary of a model folder.

        Raises:
            ValueError: the folder has no tokenizer, or one that cannot be read.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{folder}: no tokenizer.json; --model must name a model folder")
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"{path}: not a tokenizer: {error}") from error

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that a token stands for; None when the vocabulary has no such id."""
        if token_id not in self._known:
            piece = self._tokenizer.id_to_token(token_id)
            if piece is None:
                return None
            self._known[token_id] = self._piece_bytes(piece)
        return self._known[token_id]

    def show(self, token_ids: Sequence[int], *, breaks: frozenset[int] = frozenset()) -> list[Shown]:
        """Group tokens until they decode cleanly. `breaks` are indices at which a group must not go on.

        Worked example, byte-level ids of `a`, then the four bytes of 🍸: `[Shown(0, 1, a), Shown(1, 5, 🍸)]`.
        """
        groups: list[tuple[int, int, list[str | Part]]] = []
        start, pending = 0, b""
        for index, token_id in enumerate(token_ids):
            data = self.token_bytes(token_id)
            if pending and (index in breaks or data is None or token_id in self.control_tokens):
                groups += self._one_by_one(token_ids, start, index)
                pending = b""
            if token_id in self.control_tokens:
                groups.append((index, index + 1, [self.control_tokens[token_id]]))
                continue
            if data is None:
                groups.append((index, index + 1, [Part(f"<id {token_id}>", mark=True)]))
                continue
            if pending and _state(pending + data) == "broken":
                groups += self._one_by_one(token_ids, start, index)
                pending = b""
            start, pending = (start, pending + data) if pending else (index, data)
            state = _state(pending)
            if state == "whole":
                groups.append((start, index + 1, [pending.decode()]))
                pending = b""
            elif state == "broken" or index + 1 - start >= _LONGEST_GROUP:
                groups += self._one_by_one(token_ids, start, index + 1)
                pending = b""
        if pending:
            groups += self._one_by_one(token_ids, start, len(token_ids))
        return self._with_marks(token_ids, groups)

    def _one_by_one(self, token_ids: Sequence[int], start: int, end: int) -> list[tuple[int, int, list[str | Part]]]:
        """Tokens that make no character together: each with its own bytes."""
        return [(i, i + 1, _text_and_bytes(self.token_bytes(token_ids[i]) or b"")) for i in range(start, end)]

    def _with_marks(self, token_ids: Sequence[int], groups: Sequence[tuple[int, int, list[str | Part]]]) -> list[Shown]:
        shown: list[Shown] = []
        for place, (start, end, pieces) in enumerate(groups):
            if token_ids[start] in self.control_tokens:
                shown.append(Shown(start, end, visible(str(pieces[0])), control=True))
                continue
            before = _edge(groups[place - 1][2], -1) if place else ""
            after = _edge(groups[place + 1][2], 0) if place + 1 < len(groups) else ""
            parts: list[Part] = []
            for piece in pieces:
                parts += (piece,) if isinstance(piece, Part) else visible(piece, before=before, after=after)
            shown.append(Shown(start, end, tuple(parts)))
        return shown

    def _piece_bytes(self, piece: str) -> bytes:
        if self._byte_level and all(char in self._bytes_of_char for char in piece):
            return bytes(self._bytes_of_char[char] for char in piece)
        if self._sentence_piece:
            byte = _BYTE_PIECE.fullmatch(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()
        return piece.encode()


def visible(text: str, *, before: str = "", after: str = "") -> tuple[Part, ...]:
    """Text with marks for what cannot be seen: line ends, tabs, runs of spaces, bidi controls, zero-width characters.

    `before` and `after` are the neighbouring characters; a single space between words stays a space.

    >>> [part.text for part in visible("a\\u202eb")]
    ['a', 'U+202E', 'b']
    """
    parts: list[Part] = []
    plain: list[str] = []
    for index, char in enumerate(text):
        mark = _mark(char)
        if char == " ":
            left = text[index - 1] if index else before
            right = text[index + 1] if index + 1 < len(text) else after
            mark = "·" if left.isspace() or right.isspace() else None
        if mark is None:
            plain.append(char)
            continue
        if plain:
            parts.append(Part("".join(plain)))
            plain.clear()
        parts.append(Part(mark, mark=True))
        if char == "\n":
            plain.append("\n")
    if plain:
        parts.append(Part("".join(plain)))
    return tuple(parts)


def safe(text: str) -> str:
    """One string for places without mark-up (titles, ids, error texts): marks in it are plain text, lines stay lines.

    >>> safe("\\x1b[31mred")
    'U+001B[31mred'
    """
    return "".join(part.text for part in visible(text.replace("\n", " "), before="x", after="x"))


def _mark(char: str) -> str | None:
    if char in _NAMED_MARKS:
        return _NAMED_MARKS[char]
    if char == " ":
        return None
    category = unicodedata.category(char)
    # Variation selectors can hide a whole text in an emoji.
    selector = 0xFE00 <= ord(char) <= 0xFE0F or 0xE0100 <= ord(char) <= 0xE01EF
    if category[0] in "CZ" or selector or char in _BLANK_LETTERS:
        return f"U+{ord(char):04X}"
    return None


def _state(data: bytes) -> str:
    """Is this UTF-8 `whole`, may it become so (`open`), or never (`broken`)?"""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return "open" if error.reason == "unexpected end of data" else "broken"
    return "whole"


def _text_and_bytes(data: bytes) -> list[str | Part]:
    pieces: list[str | Part] = []
    while data:
        try:
            return [*pieces, data.decode()]
        except UnicodeDecodeError as error:
            if error.start:
                pieces.append(data[: error.start].decode())
            pieces += [Part(f"<0x{byte:02X}>", mark=True) for byte in data[error.start : error.end]]
            data = data[error.end :]
    return pieces


def _edge(pieces: Sequence[str | Part], end: int) -> str:
    """The first (0) or last (-1) character of a group, "" when that is a mark."""
    piece = pieces[end] if pieces else ""
    return piece[end] if isinstance(piece, str) and piece else ""


def _byte_level_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE (GPT-2): printable bytes stand for themselves, the others for U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
