"""What files does a folder of a task hold? Regular ones only, with whether they can be executed, and not too many."""

from __future__ import annotations

import os
from pathlib import Path

from envs.sandbox.base import MIB, SandboxFile

MAX_TREE_BYTES = 64 * MIB
"""Of one folder: its files are held in memory and sent to each sandbox of the task."""


def read_tree(folder: Path, *, only: Path | None = None) -> dict[str, SandboxFile]:
    """Path relative to `folder` → file, sorted; empty folders are left out. `only` is the one file that is wanted.

    Raises:
        ValueError: something is neither a file nor a folder, has a name that is no text, or it is too much.
    """
    paths = [only] if only is not None else sorted(_below(folder))
    files: dict[str, SandboxFile] = {}
    size = 0
    for path in paths:
        if path.is_symlink() or not path.is_file():
            raise ValueError(f"{path}: a task folder holds plain files and folders; put the file itself there")
        size += path.stat().st_size
        if size > MAX_TREE_BYTES:
            raise ValueError(f"{folder}: more than {MAX_TREE_BYTES // MIB} MiB; build an image that holds the files")
        mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
        files[path.relative_to(folder).as_posix()] = SandboxFile(content=path.read_bytes(), mode=mode)
    return files


def _below(folder: Path) -> list[Path]:
    """Everything below a folder that is no folder itself; a link to a folder is not followed."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        found += [Path(place, name) for name in names]
        found += [Path(place, name) for name in folders if Path(place, name).is_symlink()]
    for path in found:
        if not str(path).isprintable():
            raise ValueError(f"{folder}: the name {path.name!r} is no plain text; rename the file")
    return found
