"""What all readers of calls share: a call, what is wrong with one, and places in a text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_SHOWN = 24
"""Characters of the model's text that a reason repeats."""
_BLANK = re.compile(r"\s*")


class Call(NamedTuple):
    """A call that could be read."""

    name: str
    arguments: Mapping[str, Any]


class Bad(NamedTuple):
    """A call that could not be read, and why."""

    reason: str


class Malformed(Exception):
    """What is wrong with a call, the place up to which the text could be read, and whether more text could have made it
    right."""

    def __init__(self, reason: str, place: int, *, at_end: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.place = place
        self.at_end = at_end


def skip_blank(text: str, start: int) -> int:
    """The place of the next character that is no white space."""
    found = _BLANK.match(text, start)
    assert found
    return found.end()


def is_over(text: str, place: int) -> bool:
    """Whether only white space follows."""
    return skip_blank(text, place) == len(text)


def shown(text: str) -> str:
    """The beginning of what the model wrote, in quotes and on one line.

    >>> shown("a\\nb")
    "'a\\\\nb'"
    """
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
