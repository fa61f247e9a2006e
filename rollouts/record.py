"""The trajectory file: JSONL, one trajectory a line, appended the moment it ends.

The first line is a header, `{"format": "agentgrad.trajectories", "version": 2, "settings": …}`; `settings` is the
configuration that the trajectories were sampled with, where one command wrote them all. Files may be put one behind
the other: a header holds for what follows it, up to the next one. Files without any are version 1, and are read too.

A line counts once its newline is there. So a writer that is killed leaves whole lines and perhaps one torn one, which
readers leave out and the next writer cuts off. Lines are handed to the operating system at once, and to the disk when
the file is closed: a power failure, other than a killed process, can cost the last of them.
"""

from __future__ import annotations

import fcntl
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from pydantic import TypeAdapter, ValidationError

from data.files import check_regular, in_one_move, naming, open_regular
from data.jsonl import DAMAGED, line_writer, torn_bytes
from rollouts.types import Trajectory

FORMAT = "agentgrad.trajectories"
VERSION = 2

_TRAJECTORY = TypeAdapter(Trajectory)
_line = line_writer(Trajectory)
_HEADER_START = b'{"format":'


def write_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write a file in one move: it is there whole or not at all."""
    with in_one_move(path) as file:
        file.write(_header({}))
        file.writelines(map(_line, trajectories))


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """The trajectories of a file, in order; one that is still being written, or whose writer was killed, gives its
    whole lines.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is no trajectory, or of a version that this program does not know; the message names file and
            line.
    """
    for _, trajectory in read_recorded(path):
        yield trajectory


def read_recorded(path: Path) -> Iterator[tuple[Mapping[str, Any] | None, Trajectory]]:
    """The trajectories of a file, each with the settings that it was sampled with, as the header before it says: one
    object for all that follow one header; None where that says nothing. Errors as `read_trajectories`."""
    with open_regular(path) as file:
        for _, settings, trajectory in _read(file, path):
            yield settings, trajectory


def read_settings(path: Path) -> Mapping[str, Any] | None:
    """The settings in the first header of a file; None where it does not begin with one. Errors as
    `read_trajectories`."""
    with open_regular(path) as file:
        line = file.readline()
    return _settings(line, f"{path}, line 1") or None


class Record:
    """A trajectory file that is being written; nobody else can write it meanwhile, everybody can read it.

    A file that is there is gone on with: `settings` are then those in its header, `later_settings` those in the headers
    of files that were put behind it, and a torn last line has been cut off (`torn_bytes`). `anew`: whatever is there is
    deleted. A file that was opened and never written to is not left behind.

    Raises:
        ValueError: another process writes the file, or what is there is no trajectory file with a header.
        OSError: the file cannot be made; as when it cannot be written later, it names the file.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, anew: bool = False) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _open_alone(path)
        self._size = 0
        try:
            # Read before anything is cut: it may be somebody's file of another kind.
            if anew:
                self._file.truncate(0)
            header = _header_to_go_on_with(path)
            self.torn_bytes = self._cut_torn_line()
            if self._size == len(header):  # nothing was recorded yet
                self._file.truncate(0)
                self._size = 0
            self.settings = _settings(header, str(path)) if self._size else settings
            self.later_settings = _later_settings(path)
        except BaseException:
            self._file.close()
            raise

    def append(self, trajectory: Trajectory) -> None:
        """Write one line. When that fails (a full disk), the file is as it was before.

        Raises:
            OSError: it could not be written.
        """
        line = _line(trajectory)
        self._write(line if self._size else _header(self.settings) + line)

    def keep(self, wanted: Callable[[Trajectory], bool]) -> int:
        """Ask `wanted` about each trajectory that is there, take the others out in one move, and count them.

        Raises:
            ValueError: a line is no trajectory.
        """
        with self.path.open("rb") as file:
            unwanted = {number for number, _, trajectory in _read(file, self.path) if not wanted(trajectory)}
            if unwanted:
                file.seek(0)
                self._replace(line for number, line in enumerate(file, start=1) if number not in unwanted)
        return len(unwanted)

    def close(self) -> None:
        """Let go of the file. Safe to call twice."""
        if self._file.closed:
            return
        if self._size == 0:
            self.path.unlink(missing_ok=True)
        else:
            with naming(self.path):
                os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _cut_torn_line(self) -> int:
        """Cut off what follows the last newline; returns how many bytes that was."""
        torn = torn_bytes(self.path)
        self._size = self._file.seek(0, os.SEEK_END) - torn
        self._file.truncate(self._size)
        return torn

    def _write(self, data: bytes) -> None:
        try:
            with naming(self.path):
                _write_all(self._file, data)
        except BaseException:
            self._file.truncate(self._size)
            raise
        self._size += len(data)

    def _replace(self, lines: Iterator[bytes]) -> None:
        temporary = self.path.with_name(self.path.name + ".tmp")
        temporary.unlink(missing_ok=True)
        with naming(self.path, temporary):
            file, size = _open_alone(temporary), 0
            for line in lines:
                _write_all(file, line)
                size += len(line)
            os.fsync(file.fileno())
            temporary.replace(self.path)
        self._file.close()  # held until now, so that nobody came between
        self._file, self._size = file, size


def _write_all(file: FileIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _open_alone(path: Path) -> FileIO:
    """Open a file, made where it is not there, that no other process writes."""
    check_regular(path)
    while True:
        file = path.open("a+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ValueError(f"{path}: another process is writing it; wait for it, or name another file") from None
        except OSError as error:  # some network file systems have no locks
            warnings.warn(f"{path} cannot be locked ({error.strerror}): let no second process write it", stacklevel=3)
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()  # its last writer put another file in its place, or took it away


def _header_to_go_on_with(path: Path) -> bytes:
    """The header of a file that is there; empty where it has no whole line yet."""
    with open_regular(path) as file:
        line = file.readline()
    if not line.endswith(b"\n") and (line.startswith(_HEADER_START) or _HEADER_START.startswith(line)):
        return b""
    if not _settings(line, f"{path}, line 1"):
        raise ValueError(
            f"{path} is there and does not say with which settings it was written, so nothing can be added to it; "
            "name another file, or delete it"
        )
    return line


def _header(settings: Mapping[str, Any]) -> bytes:
    return json.dumps({"format": FORMAT, "version": VERSION, "settings": settings}).encode() + b"\n"


def _settings(line: bytes, where: str) -> Mapping[str, Any]:
    """What a header says; nothing for a line that is none."""
    if not line.startswith(_HEADER_START):
        return {}
    try:
        header = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: the header cannot be read: {error}") from error
    if header.get("format") != FORMAT or header.get("version") != VERSION:
        raise ValueError(
            f"{where}: a file of format {header.get('format')} {header.get('version')}; this program reads {FORMAT} "
            f"up to {VERSION}"
        )
    return header.get("settings", {})


def _later_settings(path: Path) -> list[Mapping[str, Any]]:
    """What the headers behind the first line say."""
    with open_regular(path) as file:
        lines = enumerate(file, start=1)
        return [
            _settings(line, f"{path}, line {number}")
            for number, line in lines
            if number > 1 and line.startswith(_HEADER_START) and line.endswith(b"\n")
        ]


def _read(file: BinaryIO, path: Path) -> Iterator[tuple[int, Mapping[str, Any] | None, Trajectory]]:
    """The trajectories of an open file, each with the number of its line and the settings in force there."""
    settings: Mapping[str, Any] | None = None
    for number, line in enumerate(file, start=1):
        if not line.endswith(b"\n"):
            return
        if line.startswith(_HEADER_START):
            settings = _settings(line, f"{path}, line {number}") or None
            continue
        try:
            yield number, settings, _TRAJECTORY.validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the row"
            raise ValueError(f"{path}, line {number}: {where}: {first['msg']}; {DAMAGED}") from error
