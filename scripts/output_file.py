"""Can a command write its file? Asked before the work, which may take hours."""

from __future__ import annotations

import tempfile
from pathlib import Path

from data.files import check_regular, naming
from scripts.console import error_text


def check_output(path: Path) -> None:
    """Make the folder of a file, and try to write in it; nothing but the folder is left.

    The permissions alone would not tell: a file system may be read-only, full, or take no files at all.

    Raises:
        ValueError: no file can be written there.
    """
    check_regular(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with naming(path), tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(b"\n")
    except OSError as error:
        raise ValueError(f"output {path} cannot be written there: {error_text(error)}") from error
