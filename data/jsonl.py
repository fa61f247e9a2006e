"""Typed rows in JSONL files: one JSON object a line, appended and flushed, safe against a killed writer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from pydantic import TypeAdapter, ValidationError

Row = TypeVar("Row")


def append_line(file: BinaryIO, kind: TypeAdapter[Row], row: Row) -> None:
    """Write one row and flush it, so that a reader or a later process sees it whole."""
    file.write(kind.dump_json(row) + b"\n")
    file.flush()


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


def drop_torn_line(path: Path) -> None:
    """Cut an unfinished last line, which a killed process leaves, off a JSONL file."""
    if not path.exists():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)
