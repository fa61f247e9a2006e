"""What a person reads when a command cannot go on: a path and what is wrong with it, in one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.console import error_text


def read(path: Path) -> None:
    path.read_text(encoding="utf-8")


def make_folder(path: Path) -> None:
    path.mkdir(parents=True)


def make_folder_anew(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)


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
        (make_folder_anew, "file", "this is a file, where a folder should be"),
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


THREE_TIMES = """
import asyncio, os, signal
from scripts.console import run_async, run_main

async def work():
    try:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.05)
        print("cleaned up")

run_main(lambda: run_async(work()), again="that was all")
"""


def test_ctrl_c_pressed_again_and_again_is_one() -> None:
    done = subprocess.run([sys.executable, "-c", THREE_TIMES], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "cleaned up\n", "interrupted; that was all\n")
