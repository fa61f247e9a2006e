"""A run folder has one writer: a second one would mix its steps with the first one's."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder, which is made where it is not there; a process that dies lets go of it.

    Raises:
        ValueError: another process holds it, or it is no folder.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; name a folder to write the run into")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            pid = file.read().strip()
            raise ValueError(
                f"{folder}: process {pid} is writing this run; wait for it, or end it: kill {pid}"
            ) from None
        except OSError as error:
            # Some network file systems have no locks.
            print(f"{folder} cannot be locked ({error.strerror}): let no second process write it", file=sys.stderr)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
