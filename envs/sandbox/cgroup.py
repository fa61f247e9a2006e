"""Control groups for sandboxes that no container engine looks after: memory, processes and processors as a whole.

Only where this process may make groups, which means root in most cases, with version 1 or 2 of the interface. Groups of
processes that are gone are empty folders, which `reap` removes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from envs.sandbox.base import SandboxLimits
from envs.sandbox.launch import SPARE_PROCESSES, mark_lives, own_mark

ROOT = Path("/sys/fs/cgroup")
PARENT = "agentgrad"
CPU_PERIOD_US = 100_000
MIN_CPU_QUOTA_US = 1000
"""The kernel refuses less."""
REMOVE_TRIES = 40
REMOVE_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Cgroup:
    """One sandbox's group: a folder in each hierarchy, and the file that counts killings for memory."""

    folders: tuple[Path, ...]
    oom_file: Path

    def remove(self) -> bool:
        """Remove the folders, once the last process is gone; blocking, up to two seconds."""
        for _ in range(REMOVE_TRIES):
            for folder in self.folders:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            if not any(folder.exists() for folder in self.folders):
                return True
            time.sleep(REMOVE_PAUSE_S)
        return False

    def processes(self) -> list[int]:
        with contextlib.suppress(OSError):
            return [int(line) for line in (self.folders[0] / "cgroup.procs").read_text().split()]
        return []


class Cgroups:
    """Makes groups below `agentgrad`. `Cgroups.find` says whether that can be done here."""

    def __init__(self, parents: tuple[Path, ...], version: int) -> None:
        self._parents = parents
        self._version = version
        self._numbers = itertools.count(1)

    @classmethod
    def find(cls) -> Cgroups | None:
        """None where no group can be made or limited."""
        with contextlib.suppress(OSError):
            if (ROOT / "cgroup.controllers").exists():
                (ROOT / "cgroup.subtree_control").write_text("+memory +pids +cpu")
                (ROOT / PARENT).mkdir(exist_ok=True)
                (ROOT / PARENT / "cgroup.subtree_control").write_text("+memory +pids +cpu")
                return cls((ROOT / PARENT,), 2)
            parents = tuple(ROOT / name / PARENT for name in ("memory", "pids", "cpu"))
            for parent in parents:
                parent.mkdir(exist_ok=True)
            return cls(parents, 1)
        return None

    def make(self, limits: SandboxLimits) -> Cgroup:
        """A new group with these limits; `OSError` when the kernel refuses."""
        name = f"{own_mark()}-{next(self._numbers)}"
        folders = tuple(parent / name for parent in self._parents)
        events = "memory.events" if self._version == 2 else "memory.oom_control"
        group = Cgroup(folders=folders, oom_file=folders[0] / events)
        try:
            for folder in folders:
                folder.mkdir()
            for path, value in self._settings(folders, limits):
                path.write_text(value)
        except OSError:
            group.remove()
            raise
        return group

    def _settings(self, folders: tuple[Path, ...], limits: SandboxLimits) -> Iterator[tuple[Path, str]]:
        memory, processes, cpu = folders if self._version == 1 else folders * 3
        quota = str(max(MIN_CPU_QUOTA_US, int(limits.cpus * CPU_PERIOD_US)))
        yield processes / "pids.max", str(limits.max_processes + SPARE_PROCESSES)
        if self._version == 2:
            yield memory / "memory.max", str(limits.memory_bytes)
            with contextlib.suppress(OSError):  # there is no such file where the kernel counts no swap
                (memory / "memory.swap.max").write_text("0")
            yield cpu / "cpu.max", f"{quota} {CPU_PERIOD_US}"
            return
        yield memory / "memory.limit_in_bytes", str(limits.memory_bytes)
        with contextlib.suppress(OSError):
            (memory / "memory.memsw.limit_in_bytes").write_text(str(limits.memory_bytes))
        yield cpu / "cpu.cfs_period_us", str(CPU_PERIOD_US)
        yield cpu / "cpu.cfs_quota_us", quota

    def reap(self) -> int:
        """Remove the groups of pools that are gone. A group with a process in it cannot be removed, and stays."""
        removed = 0
        for parent in self._parents:
            for folder in parent.iterdir():
                mark, _, number = folder.name.rpartition("-")
                if folder.is_dir() and number.isdigit() and not mark_lives(mark):
                    with contextlib.suppress(OSError):
                        folder.rmdir()
                        removed += 1
        return removed


def entering(group: Cgroup | None, command: list[str]) -> list[str]:
    """The command line that joins the group before it becomes `command`."""
    if group is None:
        return command
    script = 'while [ "$1" != -- ]; do echo $$ >"$1/cgroup.procs" || exit 71; shift; done; shift; exec "$@"'
    return ["sh", "-c", script, "sh", *(os.fspath(folder) for folder in group.folders), "--", *command]
