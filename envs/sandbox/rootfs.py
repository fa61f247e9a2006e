"""Root file systems for bubblewrap: a tar archive, unpacked once per content into a cache folder.

Nothing of an archive lands outside its own folder, whatever its names and links say: no entry is ever written through
a link. Links are kept as they are, absolute ones too, since they are read inside the sandbox. Owners, setuid bits and
extended attributes are left out, and so are device nodes and pipes, which a sandbox makes for itself.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import lzma
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tarfile import (
    EOFHeaderError,  # pyright: ignore[reportAttributeAccessIssue] - missing in the type checker's stubs
    HeaderError,
    ReadError,
    TarError,
    TarFile,
    TarInfo,
)
from typing import Self

from envs.sandbox.base import SandboxUnavailableError
from envs.sandbox.host_lock import host_lock, made_once, private_folder

ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.bz2", ".tbz2")
REFUSED_SUFFIXES = (".tar.zst", ".tzst", ".tar.zstd", ".tar.lz4", ".zip", ".squashfs")
UNFINISHED = "unpacking-"
BLOCK_BYTES = 512

logger = logging.getLogger(__name__)


def unpack_rootfs(archive: Path, cache: Path) -> Path:
    """The folder in `cache` that holds the content of `archive`: unpacked once, shared by all, not to be written to.

    It appears whole or not at all. What a killed unpacking left is removed by the next one.

    Raises:
        SandboxUnavailableError: no such archive, no tar archive, damaged, an entry would lie outside, or no space.
    """
    digest = archive_digest(archive)
    place = private_folder(cache) / digest[:24]
    return made_once(
        f"root file system {archive.name} {digest[:24]}",
        cache,
        lambda: place if place.is_dir() else None,
        partial(_unpack_to, archive, place),
    )


def is_archive(path: Path) -> bool:
    """Whether a file of this name is taken for a root-file-system archive (or refused as one of an unknown kind)."""
    return path.name.endswith(ARCHIVE_SUFFIXES + REFUSED_SUFFIXES)


def archive_digest(archive: Path) -> str:
    """SHA-256 of the archive, in hexadecimal.

    Raises:
        SandboxUnavailableError: it is not there, of an unknown kind, or visibly cut.
    """
    if archive.name.endswith(REFUSED_SUFFIXES):
        raise SandboxUnavailableError(
            f"image {archive}: only {', '.join(ARCHIVE_SUFFIXES)} archives are read: repack it"
        )
    try:
        with archive.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size_bytes = file.seek(0, os.SEEK_END)
            file.seek(0)
            is_tar = file.read(BLOCK_BYTES)[257:262] == b"ustar"  # a compressed one says by itself that it is cut
            file.seek(max(0, size_bytes - BLOCK_BYTES))
            # A tar cut between two entries is a shorter tar, but for the block of zeros at its end.
            if size_bytes == 0 or (is_tar and any(file.read())):
                raise SandboxUnavailableError(f"image {archive}: the archive has no end, it is cut: make it again")
            return digest
    except FileNotFoundError as error:
        raise SandboxUnavailableError(f"image {archive}: there is no such archive: check the path") from error
    except OSError as error:
        raise SandboxUnavailableError(f"image {archive}: cannot be read: {error.strerror}") from error


def _unpack_to(archive: Path, place: Path) -> None:
    # One unpacking at a time in this cache: whatever else is unfinished then was left by one that was killed.
    with host_lock("a root file system", place.parent), _errors_in_one_line(archive, place.parent):
        for leftover in place.parent.glob(f"{UNFINISHED}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{UNFINISHED}{place.name}-", dir=place.parent))
        try:
            left_out = _unpack(archive, folder)
            folder.chmod(0o755)
            folder.rename(place)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # its folders can be written: modes come last, and keep 0o700
            raise
    if left_out:
        logger.info("%s: %d entries left out that are no file, folder or link", archive, left_out)


def _unpack(archive: Path, root: Path) -> int:
    """Unpack into the empty folder `root`; how many entries (device nodes, pipes) were left out."""
    left_out = 0
    known = {root}  # the folders that were made here: never links, never replaced
    folders: list[tuple[Path, TarInfo]] = []
    with tarfile.open(archive, "r:*", tarinfo=_Entry) as tar:
        for entry in tar:
            parts = _parts(entry.name)
            target = root.joinpath(*parts)
            if not (entry.isdir() or entry.isreg() or entry.issym() or entry.islnk()):
                left_out += 1
            elif entry.isdir():
                _make_folder(root, parts, known, replace=True)
                folders.append((target, entry))
            elif parts:
                _make_folder(root, parts[:-1], known)
                target.unlink(missing_ok=True)  # a later entry of the same name wins; but a folder stays
                _make_entry(tar, entry, target, root, known)
        while tar.fileobj is not None and tar.fileobj.read(1 << 20):
            pass  # to the end, where compressed files have their checksum
    for target, entry in reversed(folders):
        target.chmod(entry.mode & 0o777 | 0o700)
        os.utime(target, (entry.mtime, entry.mtime))
    return left_out


class _Entry(TarInfo):
    """Raises where tarfile takes a damaged header, or a missing end, for the end of the archive."""

    @classmethod
    def fromtarfile(cls, tarfile: TarFile) -> Self:
        try:
            return super().fromtarfile(tarfile)
        except EOFHeaderError:
            raise
        except HeaderError as error:
            raise ReadError(str(error)) from error


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ReadError(f"the entry {name} lies outside")
    return parts


def _make_folder(root: Path, parts: list[str], known: set[Path], *, replace: bool = False) -> None:
    """Make the folder at `parts`, with those above it; `replace`: a file or link in its own place gives way."""
    path = root
    for index, part in enumerate(parts):
        path = path / part
        if path in known:
            continue
        if replace and index == len(parts) - 1:
            path.unlink(missing_ok=True)
        try:
            path.mkdir(0o755)
        except FileExistsError:
            raise ReadError(f"an entry lies behind {'/'.join(parts)}, which is no folder") from None
        known.add(path)


def _make_entry(tar: TarFile, entry: TarInfo, target: Path, root: Path, known: set[Path]) -> None:
    """Make a link or a file at `target`, where there is nothing yet."""
    if entry.issym():
        target.symlink_to(entry.linkname)
        return
    if entry.islnk():
        source = root.joinpath(*_parts(entry.linkname))
        if source.parent not in known:  # then a link could be on the way
            raise ReadError(f"{entry.name} is a hard link to nothing")
        os.link(source, target, follow_symlinks=False)
        return
    content = tar.extractfile(entry)
    assert content is not None, "a regular file has content"
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        shutil.copyfileobj(content, file, 1 << 20)
        if file.tell() != entry.size:
            raise ReadError(f"the archive ends within {entry.name}")
    target.chmod(entry.mode & 0o777)
    os.utime(target, (entry.mtime, entry.mtime))


@contextmanager
def _errors_in_one_line(archive: Path, cache: Path) -> Iterator[None]:
    try:
        yield
    except (TarError, EOFError, zlib.error, lzma.LZMAError, ValueError, OverflowError) as error:
        raise SandboxUnavailableError(f"image {archive}: {_damaged(error)}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = f"no space left in {cache}: free some, or set another cache folder"
        elif error.errno is None:  # gzip and bz2 raise it for what they read
            text = _damaged(error)
        else:
            text = f"cannot be unpacked in {cache}: {error.strerror}: {error.filename}"
        raise SandboxUnavailableError(f"image {archive}: {text}") from error


def _damaged(error: Exception) -> str:
    reason = " ".join(str(error).split())
    return f"no whole tar archive ({reason[:160]}): make it again"
