"""Typed rows in JSONL files: one JSON object a line, appended and flushed, safe against a killed writer."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import to_json

from data.files import in_one_move, naming, open_regular

Row = TypeVar("Row")

# Writers refuse values nested deeper than 255; nothing that a person or a model means comes near this.
_MAX_DEPTH = 64
DAMAGED = "the line was changed or damaged: make or copy the file anew, or delete the line"
_BLOCK = 1 << 16
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def append_line(file: BinaryIO, kind: TypeAdapter[Row], row: Row) -> None:
    """Write one row and flush it, so that a reader or a later process sees it whole."""
    with naming(Path(file.name)):
        file.write(kind.dump_json(row) + b"\n")
        file.flush()


def line_writer(kind: type[Row]) -> Callable[[Row], bytes]:
    """What makes lines of dataclasses that can be read again, whatever they hold. A number that is not finite becomes
    the text "NaN" or "Infinity", which readers take for the number; half a surrogate pair becomes U+FFFD; what is
    nested deeper than readers go, or is no JSON at all, becomes its text.
    """
    # A dataclass of its own takes no such settings; in a tuple it does.
    rows: TypeAdapter[tuple[Row]] = TypeAdapter(
        tuple[kind],  # pyright: ignore[reportInvalidTypeForm]
        config=ConfigDict(ser_json_inf_nan="strings", ser_json_bytes="base64"),
    )

    def line(row: Row) -> bytes:
        try:
            return rows.dump_json((row,), fallback=_text)[1:-1] + b"\n"
        except ValueError:
            return to_json(_writable(row), inf_nan_mode="strings", serialize_unknown=True) + b"\n"

    return line


def _writable(value: Any, depth: int = 0) -> Any:
    """What cannot be written as it is, in a form that can. A key whose text an earlier key has gets a number, as in
    what models read: {1: "a", "1": "b"} is {"1": "a", "1 (2)": "b"}."""
    if isinstance(value, str):
        return _LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", value)
    if depth > 2 * _MAX_DEPTH:
        return "(nested too deeply)"
    if is_dataclass(value):
        return {one.name: _writable(getattr(value, one.name), depth + 1) for one in fields(value) if one.name[0] != "_"}
    if isinstance(value, Mapping):
        return dict(zip(_names(value), (_writable(item, depth + 1) for item in value.values()), strict=True))
    if isinstance(value, list | tuple | set | frozenset):
        return [_writable(item, depth + 1) for item in value]
    return value if value is None or isinstance(value, int | float | bool) else _writable(_text(value))


def _names(keys: Iterable[object]) -> Iterable[str]:
    """The text of each key, no two alike."""
    names: dict[str, None] = {}
    same: Counter[str] = Counter()
    for key in keys:
        text = _writable(_text(key))
        while (name := f"{text} ({same[text] + 1})" if same[text] else text) in names:
            same[text] += 1
        names[name] = None
    return names


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # a class that cannot even say what it is
        return f"({type(value).__name__})"


def write_lines(path: Path, kind: TypeAdapter[Row], rows: Iterable[Row]) -> None:
    """Write a file of rows in one move: it is there whole or not at all."""
    with in_one_move(path) as file:
        for row in rows:
            append_line(file, kind, row)


def replace_text(path: Path, text: str) -> None:
    """Write a small file in one move: it holds the old text or the new one, whole."""
    with in_one_move(path) as file:
        file.write(text.encode())


def read_lines(path: Path, kind: TypeAdapter[Row]) -> Iterator[Row]:
    """The rows of a file, in order. A torn last line (no newline: its writer was killed) is left out.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no file of data, or a line is not such a row; the message names file, line and field.
    """
    with open_regular(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield kind.validate_json(line)
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"]) or "the row"
                raise ValueError(f"{path}, line {number}: {where}: {first['msg']}; {DAMAGED}") from error


def torn_bytes(path: Path) -> int:
    """How many bytes follow the last newline of a file, which readers leave out: its writer, or who copied it, did not
    end that line."""
    with open_regular(path) as file:
        end = place = file.seek(0, os.SEEK_END)
        while place > 0:
            start = max(0, place - _BLOCK)
            file.seek(start)
            found = file.read(place - start).rfind(b"\n")
            if found >= 0:
                return end - (start + found + 1)
            place = start
    return end


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
