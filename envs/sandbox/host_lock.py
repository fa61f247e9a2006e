"""What is made once for all processes of this user on this host: one makes it, the others wait and find it.

The kernel drops a lock when its holder dies, however it dies. Lock files stay, empty: who removed one could not know
that nobody is about to lock it.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from envs.sandbox.base import SandboxUnavailableError

T = TypeVar("T")

NOTICE_S = 3.0
POLL_S = 0.05

logger = logging.getLogger(__name__)


@contextmanager
def host_lock(name: str, folder: Path) -> Iterator[None]:
    """Hold the lock `name`, alone among the processes and threads that use `folder`.

    Waits as long as it takes; after three seconds one warning is logged that says for what. Not for an event loop's
    thread, and not twice within itself: the second would wait for the first.

    Raises:
        SandboxUnavailableError: the folder cannot be made, or is not this user's own.
    """
    path = private_folder(folder) / f"{_file_name(name)}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise SandboxUnavailableError(f"sandbox: no lock file {path}: {error.strerror}") from error
    try:
        _wait_for(descriptor, name, path)
        yield
    finally:
        # Not by closing alone: a child that was forked meanwhile has the descriptor too.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def made_once(name: str, folder: Path, find: Callable[[], T | None], make: Callable[[], None]) -> T:
    """What `find` returns, after `make` if it returned None; of several callers at a time, one makes.

    Who waited while another one failed gets that one's error: sixty processes do not ask a registry that refuses sixty
    times, one after the other. A caller that comes later tries again.

    Raises:
        SandboxUnavailableError: `make` raised it, here or in the process that this one waited for.
    """
    found = find()
    if found is not None:
        return found
    failure = private_folder(folder) / f"{_file_name(name)}.failed"
    asked_s = time.monotonic()
    with host_lock(name, folder):
        found = find()
        if found is not None:
            return found
        _raise_failure_since(asked_s, failure)
        try:
            make()
        except SandboxUnavailableError as error:
            with suppress(OSError):  # the disk may be full, which is what it would say
                failure.write_text(f"{time.monotonic()}\n{error}", encoding="utf-8")
            raise
        failure.unlink(missing_ok=True)
        found = find()
    if found is None:
        raise SandboxUnavailableError(f"sandbox: {name} was made and is gone already: does something else clean up?")
    return found


def private_folder(folder: Path) -> Path:
    """`folder`, made if need be; nobody else can write into it.

    Raises:
        SandboxUnavailableError: it cannot be made, is another user's, or others may write there.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        link, status = folder.lstat(), folder.stat()  # in /tmp the link itself can be somebody's trap
    except OSError as error:
        raise SandboxUnavailableError(f"sandbox: the folder {folder} cannot be made: {error.strerror}") from error
    if {link.st_uid, status.st_uid} != {os.geteuid()}:
        raise SandboxUnavailableError(
            f"sandbox: the folder {folder} belongs to another user: remove it, or name another"
        )
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise SandboxUnavailableError(f"sandbox: others may write to the folder {folder}: run chmod 700 {folder}")
    return folder


def _wait_for(descriptor: int, name: str, path: Path) -> None:
    quiet_until_s = time.monotonic() + NOTICE_S
    while time.monotonic() < quiet_until_s:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(POLL_S)
        else:
            return
    logger.warning("waiting for another process that prepares %s (it holds %s)", name, path)
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def _raise_failure_since(asked_s: float, failure: Path) -> None:
    """Raise the failure that was written after `asked_s`; one from before a boot can have any time."""
    with suppress(OSError, ValueError):
        failed_s, text = failure.read_text(encoding="utf-8").split("\n", 1)
        if asked_s <= float(failed_s) <= time.monotonic():
            raise SandboxUnavailableError(text)


def _file_name(name: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[-60:].lstrip(".-")
    return f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
