"""How is a file read that may be none, and written so that it is there whole or not at all?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def check_regular(path: Path) -> None:
    """Refuse what is there and is no file of data: a device may be read without end, a pipe is read only once, and
    neither can be replaced.

    Raises:
        ValueError: it is a folder, a device, or a pipe.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is a device or a pipe; name a file")


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is a folder, a device, or a pipe.
    """
    check_regular(path)
    return path.open("rb")


@contextmanager
def naming(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Let errors of the system say which file they befell: a write to an open file (a full disk) does not, and nobody
    knows `temporary`, which is written in its stead."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(temporary)):
            error.filename, error.filename2 = str(path), None
        raise


@contextmanager
def in_one_move(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` at the end; when anything fails, what was there is left.

    Raises:
        ValueError: a folder, a device or a pipe is in the way.
        OSError: it cannot be written; it names `path`.
    """
    check_regular(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    with naming(path, temporary):
        try:
            with temporary.open("wb") as file:
                yield file
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
