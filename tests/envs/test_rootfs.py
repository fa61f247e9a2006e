"""Root file systems for bubblewrap: what archives hold, what they try, and what is left when one fails."""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import random
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from envs.sandbox.base import SandboxUnavailableError
from envs.sandbox.rootfs import unpack_rootfs

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
MTIME = 1_000_000_000


def entry(name: str, content: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    made = tarfile.TarInfo(name)
    made.size, made.mtime = len(content), MTIME
    for field, value in fields.items():
        setattr(made, field, value)
    return made, content


def link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.SYMTYPE, linkname=target)


def hard_link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.LNKTYPE, linkname=target)


def folder(name: str, mode: int = 0o755) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.DIRTYPE, mode=mode)


def device(name: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.CHRTYPE, devmajor=1, devminor=3)


def pack(path: Path, *entries: tuple[tarfile.TarInfo, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for made, content in entries:
            archive.addfile(made, io.BytesIO(content))
    return path


def reason(archive: Path, cache: Path) -> str:
    """Why it cannot be unpacked; nothing but locks and failures is left in the cache."""
    with pytest.raises(SandboxUnavailableError) as raised:
        unpack_rootfs(archive, cache)
    text = str(raised.value)
    assert "\n" not in text
    assert text.startswith((f"image {archive}: ", "sandbox: "))
    left = list(cache.iterdir()) if cache.is_dir() else []
    assert [path for path in left if path.suffix not in (".lock", ".failed")] == []
    return text


ROOT = (
    folder("./"),
    folder("./usr/bin/", 0o555),
    entry("./usr/bin/sh", b"shell", mode=0o4755, uid=1234),
    entry("./etc/shadow", b"secret", mode=0o640),
    link("./bin", "usr/bin"),
    link("./etc/mtab", "/proc/self/mounts"),
    link("./etc/up", "../../../etc/passwd"),
    hard_link("./usr/bin/ash", "./usr/bin/sh"),
    device("./dev/null"),
    entry("./run/pipe", type=tarfile.FIFOTYPE),
    folder("./tmp", 0o1777),
)


@pytest.mark.parametrize(
    ("suffix", "mode"), [(".tar", "w"), (".tgz", "w:gz"), (".tar.xz", "w:xz"), (".tar.bz2", "w:bz2")]
)
def test_an_archive_is_unpacked_once(tmp_path: Path, suffix: str, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    archive = pack(tmp_path / f"root{suffix}", *ROOT, mode=mode)
    with caplog.at_level(logging.INFO):
        root = unpack_rootfs(archive, tmp_path / "cache")
    assert "2 entries left out" in caplog.text
    assert root.parent == tmp_path / "cache"
    assert stat.S_IMODE(root.stat().st_mode) == 0o755
    shell = root / "usr/bin/sh"
    assert (shell.read_bytes(), stat.S_IMODE(shell.stat().st_mode)) == (b"shell", 0o755)
    assert (shell.stat().st_uid, shell.stat().st_mtime) == (os.geteuid(), MTIME)
    assert (root / "usr/bin/ash").stat().st_ino == shell.stat().st_ino
    assert stat.S_IMODE((root / "usr/bin").stat().st_mode) == 0o755  # 0o555 and the owner's rights
    assert stat.S_IMODE((root / "etc/shadow").stat().st_mode) == 0o640
    links = [(root / name).readlink() for name in ("bin", "etc/mtab", "etc/up")]
    assert links == [Path("usr/bin"), Path("/proc/self/mounts"), Path("../../../etc/passwd")]
    assert not (root / "dev/null").exists()
    before = root.stat().st_ctime_ns
    assert unpack_rootfs(archive, tmp_path / "cache") == root
    assert root.stat().st_ctime_ns == before


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([entry("../escaped", b"x")], "the entry ../escaped lies outside"),
        ([entry("a/../../escaped", b"x")], "the entry a/../../escaped lies outside"),
        ([link("a", "{outside}"), entry("a/escaped", b"x")], "lies behind a, which is no folder"),
        ([link("a", "{outside}"), folder("a/b"), entry("a/b/escaped", b"x")], "lies behind a"),
        ([entry("b/c", b"x"), link("b/a", "../.."), entry("b/a/escaped", b"x")], "lies behind b/a"),
        ([link("a", "{outside}"), hard_link("b", "a/secret")], "b is a hard link to nothing"),
        ([hard_link("b", "../secret")], "the entry ../secret lies outside"),
        ([folder("a"), entry("a", b"x")], "cannot be unpacked"),
    ],
)
def test_an_archive_that_reaches_outside(tmp_path: Path, entries: list[Any], said: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    for made, _ in entries:
        made.linkname = made.linkname.format(outside=outside)
    archive = pack(tmp_path / "root.tar", *entries)
    assert said in reason(archive, tmp_path / "cache")
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert not list(tmp_path.rglob("escaped"))


def test_what_comes_later_replaces_and_never_follows(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("as before")
    entries = [
        link("a", str(outside)),
        entry("a", b"new"),
        link("b", str(tmp_path)),
        folder("b"),
        entry("b/c", b"in b"),
    ]
    linked = [link("s", str(outside)), hard_link("h", "s"), entry("/absolute", b"inside")]
    root = unpack_rootfs(pack(tmp_path / "root.tar", *entries, *linked), tmp_path / "cache")
    assert outside.read_text() == "as before"
    assert (root / "a").read_bytes() == b"new"
    assert not (root / "a").is_symlink()
    assert (root / "b/c").read_bytes() == b"in b"
    assert (root / "h").is_symlink()
    assert outside.stat().st_nlink == 1
    assert (root / "absolute").read_bytes() == b"inside"


@pytest.mark.parametrize(
    ("suffix", "mode"), [(".tar", "w"), (".tgz", "w:gz"), (".tar.xz", "w:xz"), (".tar.bz2", "w:bz2")]
)
def test_a_damaged_archive_leaves_nothing(tmp_path: Path, suffix: str, mode: str) -> None:
    chance = random.Random(3)
    good = pack(tmp_path / f"good{suffix}", *[entry(f"f{n}", chance.randbytes(900)) for n in range(9)], mode=mode)
    whole = good.read_bytes()
    bad = tmp_path / f"bad{suffix}"
    for size in [0, 1, 511, 512, 1536, 2048, 3072, len(whole) // 2, len(whole) // 2 + 100]:
        bad.write_bytes(whole[:size])
        assert "make it again" in reason(bad, tmp_path / "cache")
    bad.write_bytes(b"hello\n" * 2000 + bytes(1024))
    assert "no whole tar archive" in reason(bad, tmp_path / "cache")


@pytest.mark.parametrize(
    ("suffix", "mode"), [(".tar", "w"), (".tgz", "w:gz"), (".tar.xz", "w:xz"), (".tar.bz2", "w:bz2")]
)
def test_random_damage_is_told_in_one_line_or_is_in_a_file_s_content(tmp_path: Path, suffix: str, mode: str) -> None:
    chance = random.Random(5)
    whole = pack(tmp_path / "good", *ROOT, entry("f", chance.randbytes(900)), mode=mode).read_bytes()
    bad = tmp_path / f"bad{suffix}"
    refused: list[str] = []
    for number in range(60):
        changed = bytearray(whole)
        changed[chance.randrange(len(changed) if suffix != ".tar" else 10 * 512)] ^= chance.randrange(1, 256)
        bad.write_bytes(changed)
        try:
            unpack_rootfs(bad, tmp_path / f"cache-{number}")
        except SandboxUnavailableError as error:
            refused.append(str(error))
    assert len(refused) > 30
    assert all(said.startswith(f"image {bad}: ") and "\n" not in said for said in refused)


def test_a_middle_that_is_damaged_is_not_the_end(tmp_path: Path) -> None:
    archive = pack(tmp_path / "root.tar", *[entry(f"f{n}", b"x" * 512) for n in range(9)])
    content = bytearray(archive.read_bytes())
    content[4 * 1024] ^= 1
    archive.write_bytes(content)
    assert "no whole tar archive (bad checksum): make it again" in reason(archive, tmp_path / "cache")


def test_a_compressed_archive_may_be_called_tar(tmp_path: Path) -> None:
    assert unpack_rootfs(pack(tmp_path / "root.tar", *ROOT, mode="w:gz"), tmp_path / "cache").is_dir()


def test_archives_that_are_not_there_or_of_no_known_kind(tmp_path: Path) -> None:
    said = reason(tmp_path / "none.tar", tmp_path / "cache")
    assert said == f"image {tmp_path}/none.tar: there is no such archive: check the path"
    (tmp_path / "root.tar.zst").write_bytes(b"x")
    assert said.startswith("image ")
    assert "archives are read: repack it" in reason(tmp_path / "root.tar.zst", tmp_path / "cache")
    (tmp_path / "folder.tar").mkdir()
    assert "cannot be read: Is a directory" in reason(tmp_path / "folder.tar", tmp_path / "cache")


@AS_ROOT
def test_no_space_leaves_nothing(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(0o700)
    archive = pack(tmp_path / "root.tar", *[entry(f"f{n}", bytes(300_000)) for n in range(5)])
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "none", cache], check=False)
    if mounted.returncode:
        pytest.skip("needs to mount a small file system")
    try:
        said = reason(archive, cache)
        assert said == f"image {archive}: no space left in {cache}: free some, or set another cache folder"
        assert unpack_rootfs(pack(tmp_path / "small.tar", entry("f", bytes(300_000))), cache).is_dir()
    finally:
        subprocess.run(["umount", cache], check=True)


@AS_ROOT
def test_somebody_without_rights_can_unpack() -> None:
    with tempfile.TemporaryDirectory() as home:
        os.chown(home, 65534, 65534)
        archive = pack(Path(home, "root.tar"), *ROOT)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setgroups([])
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
                root = unpack_rootfs(archive, Path(home, "cache"))
                code = 0 if (root / "bin/sh").read_bytes() == b"shell" else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert Path(home, "cache").stat().st_uid == 65534


def unpack_in_process(archive: Path, cache: Path) -> tuple[Path, int]:
    root = unpack_rootfs(archive, cache)
    return root, root.stat().st_ino


def test_processes_unpack_once(tmp_path: Path) -> None:
    archive = pack(tmp_path / "root.tgz", *[entry(f"f{n}", os.urandom(99_000)) for n in range(99)], mode="w:gz")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(4, mp_context=spawn) as pool:
        found = list(pool.map(unpack_in_process, [archive] * 8, [tmp_path / "cache"] * 8))
    assert len({*found}) == 1
    assert len(list(found[0][0].iterdir())) == 99


def test_what_a_killed_unpacking_left_goes(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    big = pack(tmp_path / "big.tar.gz", *[entry(f"d/f{n}", bytes(1000)) for n in range(20_000)], mode="w:gz")
    code = "import sys, pathlib, envs.sandbox.rootfs as r; r.unpack_rootfs(*map(pathlib.Path, sys.argv[1:]))"
    child = subprocess.Popen([sys.executable, "-c", code, big, cache])
    while not list(cache.glob("unpacking-*/d/*")):
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert list(cache.glob("unpacking-*"))
    unpack_rootfs(pack(tmp_path / "small.tar", entry("f")), cache)
    assert not list(cache.glob("unpacking-*"))
