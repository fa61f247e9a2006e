"""Fences of code in prose: which of them only show code, and where those end.

    ```bash
    curl -d '{"name": "lookup", "arguments": {}}' host
    ```

Calls in such a block are quoted, not made. A block that holds nothing but JSON may be a call, whatever its label says,
and so may one that is labelled as JSON or as a tool's, or not at all. Code between fences on one line is no block.
"""

from __future__ import annotations

import re

FENCE = (
    r"(?P<inline>```+[^\n`{]*```+|(?<!`)`(?!`)[^`\n]+`(?!`))"
    r"|(?P<fence>```+|^[ \t]*~~~+)(?P<blank>[ \t]*)(?P<label>[\w+#.-]*)(?:\s*(?=\{)|[^\n`{]*\n)"
)
"""Inline code, or the line that opens a block, up to the object where it begins with one. It wants `re.MULTILINE`."""
NOT_QUOTED = r"""(?<![ \t(=]["'])"""
"""No quotation mark of a sentence stands before."""
_MAY_BE_CALL = re.compile(r"(?:json|tool)[\w.-]*", re.IGNORECASE)
_DATA = re.compile(r"""(?:\s|(?://|#)[^\n]*\n)*(?:\{\s*["'}]|\[\s*\{)""")
_DATA_LINE = re.compile(r"""^[ \t]*(?:\[\s*)?\{\s*["']""", re.MULTILINE)

_FENCE = re.compile(FENCE, re.MULTILINE)


def without_code(text: str) -> str:
    """A text without what its code only quotes: blocks that show code, and inline code.

    >>> without_code("Write `</call>` so:\\n```xml\\n<call/>\\n```\\nDone.")
    'Write `` so:\\n``\\nDone.'
    """
    kept, place = list[str](), 0
    while found := _FENCE.search(text, place):
        end = code_end(text, found, was_cut=False)
        kept += (text[place : found.start()], "``") if end else (text[place : found.end()],)
        place = end or found.end()
    return "".join((*kept, text[place:]))


def code_end(text: str, found: re.Match[str], *, was_cut: bool) -> int | None:
    """The place behind the code that a match of `FENCE` begins; None where it is to be read for calls.

    A block that is never closed ends before a line that begins like a call, unless the turn was cut: its end might have
    come.
    """
    if found["inline"]:
        return found.end()
    start, label = found.end(), found["label"]
    if not label or found["blank"] or _MAY_BE_CALL.fullmatch(label) or _DATA.match(text, start):
        return None
    closed = block_end(text, found)
    data = None if closed or was_cut else _DATA_LINE.search(text, start)
    return closed or (data.start() if data else len(text))


def block_end(text: str, found: re.Match[str]) -> int | None:
    """The place behind the mark that closes the block which a match of `FENCE` opens; None where none does."""
    return _closed(text, found["fence"].strip(), found.end())


def _closed(text: str, mark: str, start: int) -> int | None:
    """The place behind the mark that closes a block: the last on its line, and not the end of inline code there."""
    for found in re.compile(rf"(?<!{mark[0]}){mark}{mark[0]}*[ \t]*$", re.MULTILINE).finditer(text, start):
        line = max(start, text.rfind("\n", 0, found.start()) + 1)
        if text.count(mark, line, found.end()) % 2:
            return found.end()
    return None
