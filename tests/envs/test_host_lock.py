"""Locks of a host: one at a time, whoever is killed or forked, and what happens to who waits."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from envs.sandbox import host_lock as locks
from envs.sandbox.base import SandboxUnavailableError
from envs.sandbox.host_lock import host_lock, made_once, private_folder

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def test_a_lock_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    inside: list[int] = []
    most: list[int] = []

    def work() -> None:
        with host_lock("a name / with anything", tmp_path / "locks"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.02)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8
    assert stat.S_IMODE((tmp_path / "locks").stat().st_mode) == 0o700


def test_who_waits_long_says_so_and_a_killed_holder_lets_go(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = (
        "import sys, time, pathlib, envs.sandbox.host_lock as locks\n"
        "with locks.host_lock('image x', pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path / "locks"], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        threading.Timer(locks.NOTICE_S + 1, holder.kill).start()
        with host_lock("image x", tmp_path / "locks"):
            assert holder.wait() == -signal.SIGKILL
    assert "waiting for another process that prepares image x" in caplog.text


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    with host_lock("x", tmp_path):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        with host_lock("x", tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_what_fails_is_tried_again_by_who_comes_later(tmp_path: Path) -> None:
    made: list[str] = []

    def fail() -> None:
        raise SandboxUnavailableError("no")

    for _ in range(2):
        with pytest.raises(SandboxUnavailableError, match="no"):
            made_once("x", tmp_path, lambda: next(iter(made), None), fail)
    assert made_once("x", tmp_path, lambda: next(iter(made), None), lambda: made.append("done")) == "done"
    assert not list(tmp_path.glob("*.failed"))
    with pytest.raises(SandboxUnavailableError, match="is gone already"):
        made_once("y", tmp_path, lambda: None, lambda: None)


@AS_ROOT
def test_folders_of_others_are_not_used(tmp_path: Path) -> None:
    theirs, open_to_all, place = tmp_path / "theirs", tmp_path / "open", tmp_path / "link"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    place.symlink_to(tmp_path)
    os.chown(place, 65534, 65534, follow_symlinks=False)
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    for folder_, said in (
        (theirs, "belongs to another user"),
        (place, "belongs to another user"),
        (open_to_all, f"run chmod 700 {open_to_all}"),
        (Path("/proc/none"), "cannot be made"),
    ):
        with pytest.raises(SandboxUnavailableError, match=said):
            private_folder(folder_)
