"""Files that are none, and files that cannot be written: one clear error, and what was there is left."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from data.demonstrations import read_demonstrations, write_demonstrations
from data.files import in_one_move
from data.jsonl import read_lines, replace_text, torn_bytes, write_lines
from data.ledger import read_ledger
from rollouts.record import Record, read_settings, read_trajectories, write_trajectories
from tests.rollouts.test_record import SETTINGS, full_disk
from train.report.page import write_page
from train.report.sources import file_kind

ROW = TypeAdapter(str)


@pytest.fixture(params=["device", "pipe"])
def no_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """/dev/null ends at once where /dev/full and /dev/zero never do: nothing here can fill the memory."""
    if request.param == "device":
        return Path("/dev/null")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize(
    "act",
    [
        lambda path: list(read_trajectories(path)),
        read_settings,
        lambda path: Record(path, SETTINGS),
        lambda path: Record(path, SETTINGS, anew=True),
        lambda path: list(read_lines(path, ROW)),
        lambda path: list(read_demonstrations(path)),
        read_ledger,
        torn_bytes,
        file_kind,
        lambda path: write_trajectories(path, []),
        lambda path: write_lines(path, ROW, []),
        lambda path: write_demonstrations(path, []),
        lambda path: write_page(path, "text"),
        lambda path: replace_text(path, "text"),
    ],
)
def test_what_is_no_file_is_neither_read_nor_replaced(no_file: Path, act: Callable[[Path], object]) -> None:
    with pytest.raises(ValueError, match=f"^{no_file} is a device or a pipe; name a file$"):
        act(no_file)
    assert not no_file.is_file()


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_lines(path, ROW, ["a" * 999]),
        lambda path: write_page(path, "a" * 999),
        lambda path: replace_text(path, "a" * 999),
    ],
)
def test_a_full_disk_is_said_of_the_file_that_a_person_named(tmp_path: Path, write: Callable[[Path], None]) -> None:
    path = tmp_path / "name.html"
    path.write_text("old")
    with full_disk(100), pytest.raises(OSError, match="File too large") as caught:
        write(path)
    assert caught.value.filename == str(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_of_another_file_keeps_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, in_one_move(tmp_path / "a"):
        (tmp_path / "none").read_bytes()
    assert caught.value.filename == str(tmp_path / "none")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "a\n", "a\nbc", "abc", "a\n" + "b" * 70_000, "b" * 70_000, "\n" + "b" * 65_536])
def test_torn_bytes_are_those_behind_the_last_newline(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    assert torn_bytes(path) == len(text.rpartition("\n")[2])
