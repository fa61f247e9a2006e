"""What is left of sandboxes on this machine: processes, containers, mounts, temporary folders, control groups.

Each is a set of names, so that what was there before can be taken away from what is there after.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.sandbox.launch import SERVER, mark_lives
from scripts.bench_soak_daemon import daemon_groups

POOL_MODULE = "envs.sandbox.pool_process"
OURS = "agentgrad"
RUNC_INIT = b"runc\0init\0"
CONTAINER_ID_LENGTH = 64
OWNER_LABEL = "agentgrad.owner"
TEMP_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run")

Names = dict[str, frozenset[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where to look. `token` is in the environment of all that was started; `temporary` is its TMPDIR."""

    token: str
    temporary: Path
    docker_host: str | None
    own_daemon: Path | None
    """The folder of a daemon that nobody else uses: every container, network and volume of it counts."""


def names_of(place: Place) -> Names:
    """All that is there now and is not known to belong to somebody else."""
    names = {
        "processes": frozenset(_processes(place)),
        "mounts": frozenset(_mounts(place.own_daemon)),
        "temporary_folders": frozenset(_temporary(place.temporary)),
        "cgroups": frozenset(_cgroups(place)),
    }
    if place.docker_host is not None:
        names |= _docker(place.docker_host, place)
    return names


def left(before: Names, after: Names) -> dict[str, list[str]]:
    """What is there after and was not there before.

    >>> left({"mounts": frozenset({"/a"})}, {"mounts": frozenset({"/a", "/b"})})
    {'mounts': ['/b']}
    """
    return {kind: sorted(names - before.get(kind, frozenset())) for kind, names in after.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    number: int
    parent: int
    command: str
    has_token: bool


def _all_processes(token: str) -> dict[int, _Process]:
    found: dict[int, _Process] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes()
            parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            environment = b""
            with contextlib.suppress(PermissionError):
                environment = (entry / "environ").read_bytes()
            has_token = token.encode() in command + environment
            text = command.replace(b"\0", b" ").decode(errors="replace").strip()
            found[int(entry.name)] = _Process(number=int(entry.name), parent=parent, command=text, has_token=has_token)
    return found


def _processes(place: Place) -> Iterator[str]:
    """Each process with the token, and each sandbox's first process, whose environment is empty, unless it is
    somebody else's."""
    all_processes = _all_processes(place.token)
    for process in all_processes.values():
        is_server = process.command.startswith(SERVER) or process.command.startswith("bwrap ")
        if process.number == os.getpid() or not (process.has_token or is_server):
            continue
        if process.has_token or not _is_somebody_elses(process, all_processes, place.own_daemon):
            yield f"{process.number} {process.command[:100]}"


def _is_somebody_elses(process: _Process, others: dict[int, _Process], own_daemon: Path | None) -> bool:
    """Whether it comes from a pool without the token, or from a container of another daemon, which is counted as a
    container."""
    parent = others.get(process.parent)
    while parent is not None:
        if POOL_MODULE in parent.command:
            return not parent.has_token
        if "containerd-shim" in parent.command:
            return own_daemon is None or f"{own_daemon}/" not in parent.command
        parent = others.get(parent.parent)
    return False


def pools_of(token: str) -> list[int]:
    """The process ids of the warm pools that were started with this token."""
    found = _all_processes(token).values()
    return [one.number for one in found if one.has_token and f"-m {POOL_MODULE}" in one.command]


def _is_others_mark(mark: str, token: str) -> bool:
    """Whether a mark (`envs.sandbox.launch.own_mark`) is that of a living pool without the token."""
    number = mark.partition("-")[0]
    if not number.isdigit() or not mark_lives(mark):
        return False
    with contextlib.suppress(OSError):
        return token.encode() not in Path(f"/proc/{number}/environ").read_bytes()
    return False


def peak_memory_bytes(number: int) -> int:
    """The most memory that a process has had so far; 0 when it is gone."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        for line in Path(f"/proc/{number}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _mounts(own_daemon: Path | None) -> Iterator[str]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = line.split()[4]
        # Those of the machine's daemon belong to its containers, which are counted as such.
        if "/docker/" not in point or (own_daemon and point.startswith(f"{own_daemon}/")):
            yield point


def _temporary(temporary: Path) -> Iterator[str]:
    """Everything in the folder that was given as TMPDIR, and what carries our name in the machine's own."""
    yield from (str(path) for path in temporary.rglob("*"))
    for folder in {*TEMP_FOLDERS, tempfile.gettempdir()}:
        with contextlib.suppress(OSError):
            yield from (str(path) for path in Path(folder).glob("agentgrad-*"))


def _cgroups(place: Place) -> Iterator[str]:
    for folder, below, _ in os.walk("/sys/fs/cgroup"):
        if Path(folder).name == OURS:
            yield from (
                f"{folder}/{name}" for name in below if not _is_others_mark(name.rpartition("-")[0], place.token)
            )
    if place.own_daemon is not None:
        yield from (str(group) for group in daemon_groups(place.own_daemon) if _holds_ours(group))


def engine_orphans(daemon: Path) -> int:
    """What the engine itself leaves of containers that it was just making when it was killed: control groups with
    nothing in them, or with a `runc init` that waits for its engine for ever. No process of ours was started in them,
    and the engine that comes next does not know of them, so nobody could remove them through it."""
    groups = [group for group in daemon_groups(daemon) if not _holds_ours(group)]
    return len({group.name for group in groups if len(group.name) == CONTAINER_ID_LENGTH})


def _holds_ours(group: Path) -> bool:
    """Whether there is a process in the group, other than one that the engine has not yet turned into ours."""
    with contextlib.suppress(OSError):
        for number in (group / "cgroup.procs").read_text().split():
            if Path(f"/proc/{number}/cmdline").read_bytes() != RUNC_INIT:
                return True
    return False


def _docker(host: str, place: Place) -> Names:
    import docker

    client: Any = docker.DockerClient(base_url=host, timeout=60)  # the SDK has no types
    try:
        containers = client.containers.list(all=True, ignore_removed=True)
        networks = client.networks.list()
        volumes = client.volumes.list()
    finally:
        client.close()

    def counts(labels: dict[str, str] | None) -> bool:
        ours = [label for label in labels or {} if label.startswith(OURS)]
        others = _is_others_mark((labels or {}).get(OWNER_LABEL, ""), place.token)
        return place.own_daemon is not None or (bool(ours) and not others)

    return {
        "containers": frozenset(one.id for one in containers if counts(one.labels)),
        "networks": frozenset(one.name for one in networks if counts(one.attrs.get("Labels"))),
        "volumes": frozenset(one.name for one in volumes if counts(one.attrs.get("Labels"))),
    }
