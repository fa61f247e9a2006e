"""A Docker daemon of the soak test's own, which can be killed and started again without hurting anybody's containers.

It has its own socket, data, containerd and containers, in a folder that is removed at the end, and a network namespace
of its own: a daemon that wants no bridge removes the one that is there, whosever it is. It needs root, `dockerd`, and
`unshare` and `setpriv` of util-linux.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from envs.sandbox.base import DEFAULT_IMAGE, SandboxUnavailableError
from envs.sandbox.launch import mark_lives, own_mark

PREFIX = "agentgrad-soak-"
START_S = 60.0
STOP_S = 60.0
CONTAINERD_END_S = 10.0
ROOT = Path(__file__).resolve().parent.parent


def can_have_own_daemon() -> bool:
    return os.geteuid() == 0 and all(shutil.which(program) for program in ("dockerd", "unshare", "setpriv"))


@contextmanager
def work_folder() -> Iterator[Path]:
    """A folder for one run. Those of runs that were killed are removed, with what their daemons left."""
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "owner").write_text(own_mark())
        for other in folder.parent.glob(f"{PREFIX}*/owner"):
            with suppress(OSError):
                if not mark_lives(other.read_text()):
                    remove_folder(other.parent)
        yield folder


class OwnDaemon:
    """Starts, kills and removes one `dockerd`; `host` is its DOCKER_HOST."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = f"unix://{folder}/docker.sock"
        self.restarts = 0
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the daemon, and wait until it answers.

        Raises:
            SandboxUnavailableError: it does not, with the end of its log.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        # When this process is killed, nobody else would end the daemon.
        command = "setpriv --pdeathsig TERM unshare --net dockerd".split()
        command += ["--host", self.host, "--data-root", f"{self.folder}/data"]
        command += ["--exec-root", f"{self.folder}/exec", "--pidfile", f"{self.folder}/pid"]
        command += ["--bridge=none", "--iptables=false", "--ip6tables=false"]
        command += ["--exec-opt", "native.cgroupdriver=cgroupfs", "--cgroup-parent", f"/{_group_of(self.folder)}"]
        with (self.folder / "log").open("ab") as log:
            # A session of its own: Ctrl-C ends the sandboxes first, then the daemon.
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + START_S
        while not await self._answers():
            if self._process.returncode is not None or time.monotonic() > deadline:
                end = (self.folder / "log").read_text(errors="replace").splitlines()[-3:]
                raise SandboxUnavailableError(f"the soak test's own dockerd does not answer: {' | '.join(end)}")
            await asyncio.sleep(0.1)

    async def get_image(self, image: str) -> None:
        """Build the small image, or copy another one from the machine's daemon."""
        if image == DEFAULT_IMAGE:
            script = f"bash {ROOT}/scripts/build_sandbox_image.sh"
        else:
            script = f'docker --host "$MACHINE_HOST" save "{image}" | docker load'
        machine = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
        process = await asyncio.create_subprocess_exec(
            *("bash", "-o", "pipefail", "-c", script),
            env=os.environ | {"DOCKER_HOST": self.host, "MACHINE_HOST": machine},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        _, errors = await process.communicate()
        if process.returncode != 0:
            raise SandboxUnavailableError(f"the soak test's own dockerd has no {image}: {errors.decode().strip()}")

    async def restart(self, kill: signal.Signals, down_s: float) -> None:
        """End the daemon with a signal, leave it down, and start it again."""
        await self._end(kill)
        await self._until_containerd_ended()
        await asyncio.sleep(down_s)
        await self.start()
        self.restarts += 1

    async def stop(self) -> None:
        """End the daemon and remove everything that was its own."""
        await self._end(signal.SIGTERM)
        await asyncio.to_thread(remove_folder, self.folder)

    async def _end(self, kill: signal.Signals) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(kill)
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _until_containerd_ended(self) -> None:
        """Its containerd dies with it, a little later. A new daemon that finds it still there waits for it in vain.

        One that is dead and that nobody has waited for yet counts as there, so its pid file is removed.
        """
        pid_file = self.folder / "exec/containerd/containerd.pid"
        for _ in range(int(CONTAINERD_END_S / 0.05)):
            if not pid_file.exists() or not _runs(int(pid_file.read_text())):
                break
            await asyncio.sleep(0.05)
        pid_file.unlink(missing_ok=True)

    async def _answers(self) -> bool:
        try:
            reader, writer = await asyncio.open_unix_connection(self.host.removeprefix("unix://"))
        except OSError:
            return False
        try:
            writer.write(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            return b" 200 " in await asyncio.wait_for(reader.readline(), 5)
        except (OSError, TimeoutError):
            return False
        finally:
            writer.close()


def _runs(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def remove_folder(folder: Path) -> None:
    """End what a killed daemon left running, unmount what it left mounted, and remove its control groups and files."""
    for process in Path("/proc").glob("[0-9]*"):
        _end_shim(process, folder)
    for group in daemon_groups(folder):
        for _ in range(20):
            with suppress(OSError):  # a process is still dying in it
                group.rmdir()
            if not group.exists():
                break
            time.sleep(0.05)
    # Innermost first.
    for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
        point = line.split()[4]
        if point.startswith(f"{folder}/"):
            subprocess.run(["umount", "--lazy", point], capture_output=True, check=False)
    shutil.rmtree(folder, ignore_errors=True)


def daemon_groups(folder: Path) -> list[Path]:
    """The control groups of the daemon's containers, and of the daemon, innermost first."""
    tops = (f"{place}{_group_of(folder)}" for place in ("*/", ""))
    found = [top for pattern in tops for top in Path("/sys/fs/cgroup").glob(pattern)]
    return [*(group for top in found for group in sorted(top.rglob("*/"), reverse=True) if group.is_dir()), *found]


def _group_of(folder: Path) -> str:
    return next(part for part in folder.parts if part.startswith(PREFIX))


def _end_shim(process: Path, folder: Path) -> None:
    """Kill a process of /proc when it holds a container of the folder's daemon, and the container's first process."""
    with suppress(OSError, ValueError):
        command = (process / "cmdline").read_text(errors="replace").split("\0")
        if "-id" in command and any(part.startswith(f"{folder}/") for part in command):
            children = (process / "task" / process.name / "children").read_text().split()
            for number in (*children, process.name):
                os.kill(int(number), signal.SIGKILL)
