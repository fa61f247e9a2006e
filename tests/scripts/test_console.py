"""What a person reads when a command cannot go on: a path and what is wrong with it, in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.console import error_text


def read(path: Path) -> None:
    path.read_text(encoding="utf-8")


def make_folder(path: Path) -> None:
    path.mkdir(parents=True)


def move_to(path: Path) -> None:
    made = path.with_name("made")
    made.touch()
    made.replace(path)


@pytest.mark.parametrize(
    ("act", "name", "words"),
    [
        (read, "none", "no such file or folder"),
        (read, "folder", "this is a folder; name a file"),
        (move_to, "folder", "this is a folder; name a file"),
        (read, "file/inner", "a part of this path is a file, where a folder should be"),
        (make_folder, "file/inner", "a part of this path is a file, where a folder should be"),
        (make_folder, "folder", "File exists"),
    ],
)
def test_what_the_system_says_of_a_file_is_its_path_and_words(
    tmp_path: Path, act: Callable[[Path], None], name: str, words: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(OSError) as caught:  # noqa: PT011 - each kind of it is asked for
        act(tmp_path / name)
    assert error_text(caught.value) == f"{tmp_path / name}: {words}"


def test_other_errors_are_one_line_as_they_are() -> None:
    assert error_text(ValueError("one\n  two")) == "one two"
    assert error_text(OSError("attaching was refused")) == "attaching was refused"
    assert error_text(PermissionError(13, "Permission denied", "a/b")) == "a/b: permission denied"
