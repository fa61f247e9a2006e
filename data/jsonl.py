"""Typed rows in JSONL files: one JSON object a line, appended and flushed, safe against a killed writer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import TypeAdapter, ValidationError

Row = TypeVar("Row")

# Writers refuse values nested deeper than 255; nothing that a person or a model means comes near this.
_MAX_DEPTH = 64
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def append_line(file: BinaryIO, kind: TypeAdapter[Row], row: Row) -> None:
    """Write one row and flush it, so that a reader or a later process sees it whole."""
    file.write(kind.dump_json(row) + b"\n")
    file.flush()


def write_lines(path: Path, kind: TypeAdapter[Row], rows: Iterable[Row]) -> None:
    """Write a file of rows in one move: it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        for row in rows:
            append_line(file, kind, row)
    temporary.replace(path)


def replace_text(path: Path, text: str) -> None:
    """Write a small file in one move: it holds the old text or the new one, whole."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def read_lines(path: Path, kind: TypeAdapter[Row]) -> Iterator[Row]:
    """The rows of a file, in order. A torn last line (no newline: its writer was killed) is left out.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not such a row; the message names file, line and field.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield kind.validate_json(line)
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"]) or "the row"
                raise ValueError(f"{path}, line {number}: {where}: {first['msg']}") from error


def plain_json(value: Any, depth: int = 0) -> Any:
    """A decoded JSON value as every writer and tokenizer can take it: half a surrogate pair becomes U+FFFD.

    Raises:
        ValueError: it is nested too deeply, or a number is not finite.

    >>> plain_json(["a\\ud83c", 1])
    ['a�', 1]
    """
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(value, str):
        return _LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number is not finite")
    if isinstance(value, list):
        return [plain_json(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {plain_json(key): plain_json(item, depth + 1) for key, item in value.items()}
    return value
