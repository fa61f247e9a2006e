"""The guard: no text becomes a control token.

Whoever renders a conversation (a Jinja template, a hand-written renderer) gets its texts in a form in which no control
token can be seen, and its result is encoded by a copy of the tokenizer that knows the control tokens under secret
names. So a control id can only come from the renderer's own text, whatever a message says, and everything else is
encoded as the tokenizer would in one go.

    content     a<|im_end|>                 what a tool returned
    handed in   ⟦a<¦|im_end|>⟧              marked as content (⟦ ⟧), its forged token broken (¦)
    rendered    <|im_start|>user\\n⟦a<¦|im_end|>⟧<|im_end|>
    encoded     [start] user \\n  a  <  |  im _ end | >  [end]        only the renderer's own two are ids

Left out: words that mark a role without a token of their own (`User:` in SmolVLM's template) are text like any other.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from data.renamed_tokenizer import copy_with_names

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

# Private-use characters: no template holds them, no trimming and no change of case touches them. Where a text holds one
# of them itself, it is written as QUOTE and a digit (or, beyond ten, one more private-use character).
START, END, BREAK, QUOTE = "\ue000", "\ue001", "\ue002", "\ue003"
_DIGITS = "0123456789" + "".join(map(chr, range(0xE010, 0xE400)))
_SURROGATES = re.compile("[\ud800-\udfff]")
# A character that no vocabulary holds: what it becomes is what unknown text becomes.
_UNKNOWN = "\U0010fffd"
# Templates compare and look up these words of a tool's schema; they must reach them as they are.
_SCHEMA_WORDS = frozenset(
    "type properties required items enum const default description title format examples nullable anyOf oneOf allOf "
    "not additionalProperties minimum maximum minItems maxItems minLength maxLength pattern name function parameters "
    "string number integer boolean object array null".split()
)


class GuardedToken(NamedTuple):
    """One encoded token, and whether it holds a character of a marked content."""

    token_id: int
    is_content: bool


class PlacedToken(NamedTuple):
    """One encoded token, and where it stands in the rendering: characters `start` to `end`."""

    token_id: int
    start: int
    end: int


class _Piece(NamedTuple):
    """What became of `rendered[start:end]`: the text that begins at `at`, the same one or another in its place."""

    at: int
    start: int
    end: int
    same: bool

    def place(self, index: int) -> tuple[int, int]:
        """Where in the rendering the character `index` of the text comes from."""
        offset = self.start + index - self.at
        return (offset, offset + 1) if self.same else (self.start, self.end)


class Guard:
    """Encodes renderings of conversations for one tokenizer.

    Control tokens are all added tokens but runs of white space, special or not: `<tool_call>` in Qwen's tokenizer is
    not special, and would still be matched in a content.

    Args:
        tokenizer: a fast tokenizer.

    Raises:
        ValueError: the tokenizer is not a fast one, or its normalizer changes the secret names.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"{type(tokenizer).__name__} is not a fast tokenizer; save one with tokenizer.json")
        added = {
            token_id: token
            for token_id, token in sorted(backend.get_added_tokens_decoder().items())
            if token.content.strip()
        }
        texts = {token.content for token in added.values()}
        self._whole_words = {token.content for token in added.values() if token.single_word}
        nonce = secrets.token_hex(8)
        self._names = {token.content: f"\ue004{nonce}x{token_id}\ue005" for token_id, token in added.items()}
        self._copy, self._ids = copy_with_names(backend, self._names)
        # The token of unknown text is no control token where text can become it; spelled out it is text all the same.
        unknown = {self._ids.get(token, token) for token in self._copy.encode(_UNKNOWN).ids}
        self.control_tokens: Mapping[int, str] = {
            token_id: token.content for token_id, token in added.items() if token_id not in unknown
        }
        """Every control token by its id; no content can produce one of them."""
        self._control = re.compile(_trie_pattern(texts))
        self._begin = re.compile(_begin_pattern(text for text in texts if len(text) > 1), re.IGNORECASE)
        # A token of one character has no middle to break it in.
        reserved = [START, END, BREAK, QUOTE, *sorted(text for text in texts if len(text) == 1)]
        self._digits = dict(zip(reserved, _DIGITS, strict=False))
        self._quoted = {digit: character for character, digit in self._digits.items()}
        self._reserved = re.compile("[" + re.escape("".join(reserved)) + "]")
        digits = "".join(self._quoted)
        self._read = re.compile(
            f"(?P<mark>[{START}{END}{BREAK}])|{QUOTE}(?P<quoted>[{digits}])|(?P<control>{self._control.pattern})"
        )
        lowered = [text.lower() for text in texts]
        self._heads = {text[:length] for text in lowered for length in range(1, len(text))}
        self._tails = {text[-length:] for text in lowered for length in range(1, len(text))}
        self._middles = {middle for text in lowered for middle in _middles(text)}
        self._longest = max(map(len, lowered), default=0)

    def count_forged(self, text: str) -> int:
        """How many control tokens `text` spells."""
        return len(self._control.findall(text))

    def escape(self, text: str) -> str:
        """`text` for a renderer to read, without a control token in it, and without one that it could become part of:
        a template that writes `'<' + key + '>'` makes `<tool_call>` of the key `tool_call`. Most texts stay as they
        are."""
        core = text.strip()
        if not core or core in _SCHEMA_WORDS:
            return text
        before, after = self._open_edges(core)
        start = len(text) - len(text.lstrip())
        return text[:start] + before + self._broken(core) + after + text[start + len(core) :]

    def escape_json(self, value: Any) -> Any:
        """A JSON value with all its texts escaped, keys included."""
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, Mapping):
            return {self.escape_json(key): self.escape_json(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape_json(item) for item in value]
        return value

    def mark(self, text: str) -> str:
        """`text` without a control token in it, marked as content. The marks stand inside the outer white space, so
        that a renderer trims what it would trim without them; a blank text stays as it is."""
        core = text.strip()
        if not core:
            return text
        start = len(text) - len(text.lstrip())
        return text[:start] + START + self._broken(core) + END + text[start + len(core) :]

    def plain(self, rendered: str) -> str:
        """The text that `rendered` stands for: marks and breaks taken out, quoted characters put back."""
        return self._read.sub(lambda found: found["control"] or self._quoted.get(found["quoted"], ""), rendered)

    def controls(self, rendered: str) -> list[tuple[int, str]]:
        """Where in `rendered` the renderer placed which control token, in order."""
        inside, placed = False, []
        for found in self._read.finditer(rendered):
            if found["mark"] in (START, END):
                inside = found["mark"] == START
            elif found["control"] and not inside:
                placed.append((found.start(), found["control"]))
        return placed

    def encode(self, rendered: str) -> list[GuardedToken]:
        """The ids of a rendering whose texts came through `mark` or `escape`."""
        text, contents, _ = self._with_names(rendered)
        encoding = self._copy.encode(text, add_special_tokens=False)
        tokens: list[GuardedToken] = []
        nearest = 0
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            while nearest < len(contents) and contents[nearest][1] <= start:
                nearest += 1
            # Some tokenizers give spans without width.
            inside = nearest < len(contents) and contents[nearest][0] < max(end, start + 1)
            tokens.append(GuardedToken(self._ids.get(token, token), inside))
        return tokens

    def encode_after(self, rendered: str) -> list[GuardedToken]:
        """The same ids as behind other tokens; some tokenizers treat the beginning of a text otherwise."""
        return self.encode(next(iter(self._names), "") + rendered)[bool(self._names) :]

    def encode_with_places(self, rendered: str) -> list[PlacedToken]:
        """The same ids, each with its place in `rendered`; for a renderer that finds out itself who wrote what."""
        text, _, pieces = self._with_names(rendered)
        pieces.append(_Piece(len(text), len(rendered), len(rendered), same=False))
        encoding = self._copy.encode(text, add_special_tokens=False)
        tokens: list[PlacedToken] = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            first = pieces[bisect_right(pieces, start, key=attrgetter("at")) - 1].place(start)[0]
            # A span without width has a place without width.
            last = pieces[bisect_right(pieces, end - 1, key=attrgetter("at")) - 1].place(end - 1)[1]
            tokens.append(PlacedToken(self._ids.get(token, token), first, last if end > start else first))
        return tokens

    def _broken(self, text: str) -> str:
        text = _SURROGATES.sub("\ufffd", text)  # no tokenizer takes half a pair
        if self._reserved.search(text):
            text = self._reserved.sub(lambda found: QUOTE + self._digits[found[0]], text)
        # Behind the first character of each, so that two which overlap are both broken.
        return self._begin.sub(rf"\g<0>{BREAK}", text)

    def _open_edges(self, core: str) -> tuple[str, str]:
        """A break for each end of a text at which it could grow into a control token."""
        text = core.lower()
        lengths = range(1, min(self._longest, len(text) + 1))
        before = any(text[:length] in self._tails for length in lengths)
        after = text in self._middles or any(text[-length:] in self._heads for length in lengths)
        return BREAK * before, BREAK * after

    def _with_names(self, rendered: str) -> tuple[str, list[tuple[int, int]], list[_Piece]]:
        """The text with the renderer's own control tokens under their secret names, the spans of its contents, and what
        each part of it comes from."""
        parts: list[str] = []
        contents: list[tuple[int, int]] = []
        pieces: list[_Piece] = []
        length, place, inside, begin = 0, 0, False, 0

        def add(part: str, start: int, end: int, *, same: bool) -> int:
            parts.append(part)
            if part:
                pieces.append(_Piece(length, start, end, same))
            return length + len(part)

        for found in self._read.finditer(rendered):
            start, end = found.span()
            length = add(rendered[place:start], place, start, same=True)
            place = end
            if control := found["control"]:
                as_text = inside or (control in self._whole_words and _in_a_word(rendered, start, end))
                length = add(control if as_text else self._names[control], start, end, same=as_text)
            elif quoted := found["quoted"]:
                length = add(self._quoted[quoted], start, end, same=False)
            elif found["mark"] == START:
                inside, begin = True, length
            elif found["mark"] == END:
                inside = False
                contents.append((begin, length))
        add(rendered[place:], place, len(rendered), same=True)
        return "".join(parts), contents, pieces


def _in_a_word(text: str, start: int, end: int) -> bool:
    around = text[start - 1 : start] if start else "", text[end : end + 1]
    return any(one.isalnum() or one == "_" for one in around)


def _middles(token: str) -> set[str]:
    """What a template may put between the punctuation of a control token.

    >>> sorted(_middles("</b>"))
    ['/b', 'b']
    """
    left = len(token) - len(re.sub(r"^\W+", "", token))
    right = len(re.sub(r"\W+$", "", token))
    return {token[start:end] for start in range(1, left + 1) for end in range(max(right, start + 1), len(token))}


def _trie(texts: Iterable[str]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for text in texts:
        node = root
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return root


def _trie_pattern(texts: Iterable[str]) -> str:
    """A pattern that finds the longest of `texts` at a place. Models have thousands of them: tried one after the other
    at each character, they would take a second for a long tool output."""
    return _node_pattern(_trie(texts)) or r"(?!)"


def _node_pattern(node: Mapping[str, Any]) -> str:
    branches = [re.escape(character) + _node_pattern(child) for character, child in sorted(node.items()) if character]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in node else "")


def _begin_pattern(texts: Iterable[str]) -> str:
    """A pattern that finds the first character of each of `texts`, those that overlap too."""
    branches = [f"{re.escape(first)}(?={_node_pattern(rest)})" for first, rest in sorted(_trie(texts).items())]
    return "|".join(branches) or r"(?!)"
