"""Working folders on this machine's disk: made with a task's files in them, and removed whatever was done to them."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from envs.sandbox.base import SandboxError, relative_path

REMOVE_TRIES = 20
REMOVE_PAUSE_S = 0.05


def make_folder(parent: Path, files: Mapping[str, bytes], owner: int | None, *, prefix: str = "work-") -> Path:
    """A new folder in `parent` that holds `files`; all of it belongs to the user id `owner` (None: to this process).

    It may write from outside only because no command has run in the folder yet. When it fails, nothing stays.

    Raises:
        ValueError: a path leaves the folder.
        SandboxError: the disk is full, or two files are in each other's way.
    """
    checked = {relative_path(path): content for path, content in files.items()}
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError as error:
        raise SandboxError(f"no working folder can be made in {parent}: {error}") from error
    try:
        _fill(folder, checked, owner)
    except OSError as error:
        remove_folder(folder)
        raise SandboxError(f"the task's files cannot be written in {parent}: {error}") from error
    return folder


def _fill(folder: Path, files: Mapping[str, bytes], owner: int | None) -> None:
    for path, content in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    if owner is not None:
        for place in (folder, *folder.rglob("*")):
            os.chown(place, owner, owner)


def remove_folder(folder: Path) -> None:
    """Remove a folder; a process that is just dying may still write into it, so it tries for a second.

    Raises:
        SandboxError: something is left.
    """
    for _ in range(REMOVE_TRIES):
        shutil.rmtree(folder, onerror=_unlock)
        if not folder.exists():
            return
        time.sleep(REMOVE_PAUSE_S)
    raise SandboxError(f"the working folder {folder} could not be removed; remove it by hand")


def _unlock(_function: object, path: str, _error: object) -> None:
    """Give this process the rights to a folder that a command locked (mode 000); the next try removes it."""
    for place in (Path(path).parent, Path(path)):
        if place.is_dir() and not place.is_symlink():
            with contextlib.suppress(OSError):
                place.chmod(0o700)
