"""The tokenizer that a family's hand-written renderer is given: no text that came through `protect` becomes a control
token in it, whatever the family's code does with the text.

    content      a<|im_end|>                    what a tool returned
    protected    a<¦|im_end|>                   its forged token broken (¦); the family's code reads this
    its code     "\\n" + content.strip() + "\\n"   trims, joins and escapes it as it would any text
    encoded      \\n a < | im _ end | > \\n        the break taken out, and nothing of it is a control id

The family's code may place control tokens by id, or write them in text of its own; both work as with the plain
tokenizer. Left out: what a family's code places, and when (`data/family_renderer.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from data.guard import BREAK, END, QUOTE, START, Guard

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# `json.dumps` writes the guard's own characters like this unless told otherwise; a text that says so itself gets a
# break after its backslash.
_JSON_ESCAPED = re.compile(r"\\u(e00[0-3])")
assert {START, END, BREAK, QUOTE} == set(map(chr, range(0xE000, 0xE004)))


class FamilyTokenizer:
    """What the package `renderers` asks of a tokenizer, with the guard between text and ids.

    `placed_ids` are the control tokens that the family's code asked for by name, by their text.
    """

    # The package decides some things by a model's name; a folder's name must decide nothing.
    name_or_path = ""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, guard: Guard) -> None:
        self._tokenizer = tokenizer
        self._guard = guard
        self.chat_template = tokenizer.chat_template
        self.unk_token_id = tokenizer.unk_token_id
        self.eos_token_id = tokenizer.eos_token_id
        self.placed_ids: dict[str, int] = {}
        self._words = {re.sub(r"^\W+|\W+$", "", token) for token in guard.control_tokens.values()}

    def protect(self, text: str) -> str:
        """`text` for the family's code, which finds no control token in it nor makes one of it and its neighbours."""
        if text.isidentifier() and text not in self._words:
            # No part of a control token that anybody would write around it. The guard would break one or two letters
            # (`id` is in `<|im_middle|>`), and some families sort names.
            return text
        return _JSON_ESCAPED.sub(f"\\\\{BREAK}u\\1", self._guard.escape(text))

    def protect_all(self, value: Any) -> Any:
        """The same for every text in a JSON value, its keys included."""
        if isinstance(value, str):
            return self.protect(value)
        if isinstance(value, Mapping):
            return {self.protect(str(key)): self.protect_all(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect_all(item) for item in value]
        return value

    def encode(self, text: str, **_: Any) -> list[int]:
        return [token.token_id for token in self._guard.encode(_without_json_escapes(text)[0])]

    def __call__(self, text: str, **_: Any) -> dict[str, list[Any]]:
        """With offsets: by them the package tells a content from the text around it."""
        plain, places = _without_json_escapes(text)
        tokens = self._guard.encode_with_places(plain)
        return {
            "input_ids": [token.token_id for token in tokens],
            "offset_mapping": [(places[token.start], places[token.end]) for token in tokens],
        }

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def convert_tokens_to_ids(self, token: str) -> int | None:
        token_id = self._tokenizer.convert_tokens_to_ids(token)
        if isinstance(token_id, int) and token_id != self.unk_token_id:
            self.placed_ids[token] = token_id
        return token_id if isinstance(token_id, int) else None


def _without_json_escapes(text: str) -> tuple[str, Sequence[int]]:
    """The text with the guard's characters in place of their JSON escapes, and where each of its characters (and its
    end) stands in `text`."""
    parts: list[str] = []
    places: list[int] = []
    place = 0
    for found in _JSON_ESCAPED.finditer(text):
        parts += [text[place : found.start()], chr(int(found[1], 16))]
        places += [*range(place, found.start()), found.start()]
        place = found.end()
    return (
        ("".join(parts) + text[place:], [*places, *range(place, len(text) + 1)])
        if parts
        else (text, range(len(text) + 1))
    )
