"""The Docker sandbox: one container for each sandbox, without network and rights, with hard limits.

Blocking calls of the SDK run in a thread pool of the factory's own; a command's output is read by the event loop from
the attached socket, so a command that runs long holds no thread. What a command leaves running lives until the sandbox
closes, or until a later command is late: then every process of the sandbox is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import tarfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from docker.errors import APIError, ImageNotFound, NotFound
from docker.types import Ulimit

from envs.sandbox.base import (
    DEFAULT_IMAGE,
    SandboxError,
    SandboxLimits,
    SandboxSpec,
    SandboxUnavailableError,
    relative_path,
)
from envs.sandbox.command import COMMAND_ENVIRONMENT, KILLED_EXIT_CODE, CommandSandbox, RawResult
from envs.sandbox.docker_engine import DockerEngine
from envs.sandbox.docker_exec import AttachedExec, ExecStream, new_mark, wrapped
from envs.sandbox.factory import CommandFactory

OWNER_LABEL = "agentgrad.owner"
# The container's own process has another user than the commands, so that a command's `kill -9 -1`, and ours, ends the
# commands and never the sandbox.
KEEPER, USER = "65533:65533", "65534:65534"
UNPACK_S = 60.0
KILL_S = 20.0
LAST_OUTPUT_S = 1.0
POLL_S = 0.02
# Processes that the sandbox's own commands (a kill, a file) may need on top of the spec's limit.
SPARE_PROCESSES = 16


class DockerSandbox(CommandSandbox):
    """One running container."""

    def __init__(self, engine: DockerEngine, container_id: str, limits: SandboxLimits) -> None:
        super().__init__("docker", limits)
        self.container_id = container_id
        self._engine = engine
        self._oom_kills = 0

    async def put_files(self, files: Mapping[str, bytes]) -> None:
        # Docker's archive call refuses a read-only root, although /work itself can be written.
        argv = ["tar", "-x", "-f", "-"]
        done = await self._run(argv, timeout_s=UNPACK_S, stdin=_tar(files), max_output_bytes=4096)
        if done.exit_code != 0:
            raise SandboxError(
                f"docker: the task's files could not be unpacked: {done.stderr.decode('utf-8', 'replace')}"
            )

    async def _run(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes, max_output_bytes: int) -> RawResult:
        done = await self._run_once(argv, timeout_s, stdin, max_output_bytes)
        if done is None:
            # What earlier commands left running can have used up the processes. That is no fault of Docker's, and
            # must not be raised as one: the leftovers are killed.
            await self._kill_all()
            done = await self._run_once(argv, timeout_s, stdin, max_output_bytes)
        if done is None:
            raise SandboxError("docker: the container cannot start commands any more")
        if done.exit_code == KILLED_EXIT_CODE and not done.timed_out:
            return replace(done, oom_killed=await self._ran_out_of_memory())
        return done

    async def _run_once(
        self, argv: Sequence[str], timeout_s: float, stdin: bytes, max_output_bytes: int
    ) -> RawResult | None:
        """One exec; None when Docker could not start it."""
        mark = new_mark()
        stream = ExecStream(max_output_bytes, mark)
        timed_out = False
        exec_id, attached = await self._attach(wrapped(argv, mark), bool(stdin))
        try:
            transport = await attached.connect(stream)
            if stdin:
                transport.write(stdin)
                transport.write_eof()
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(stream.stopped)
        except TimeoutError:
            timed_out = True
        finally:
            if not stream.stopped.done() or stream.flooded:
                await asyncio.shield(self._kill_all())
                await asyncio.wait([stream.stopped], timeout=LAST_OUTPUT_S)
            attached.close()
        code = 0 if timed_out or stream.flooded else stream.exit_code
        if code is None:
            code = await self._exit_code(exec_id)
        return None if code is None else stream.result(code, timed_out=timed_out)

    async def _exit_code(self, exec_id: str) -> int | None:
        """Of a wrapper that was killed by its own command; None when Docker never started it."""
        while True:
            state = await self._engine.call(self._engine.api.exec_inspect, exec_id)
            if not state["Running"]:
                return int(state["ExitCode"]) if state["Pid"] != 0 else None
            await asyncio.sleep(POLL_S)

    async def _attach(self, command: Sequence[str], has_stdin: bool) -> tuple[str, AttachedExec]:
        opening = asyncio.ensure_future(self._engine.call(self._open_exec, command, has_stdin))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The thread goes on, and what it starts must not stay.
            with contextlib.suppress(SandboxError):
                (await opening)[1].close()
                await self._kill_all()
            raise

    def _open_exec(self, command: Sequence[str], has_stdin: bool) -> tuple[str, AttachedExec]:
        """Start a command and take over its connection. Blocking."""
        api = self._engine.api
        made = api.exec_create(self.container_id, list(command), stdin=has_stdin, user=USER, workdir="/work")
        return made["Id"], AttachedExec(api.exec_start(made["Id"], socket=True))

    async def _kill_all(self) -> None:
        """Kill every process of the sandbox's user in one system call, which no fork can outrun."""
        # A command may have used up the processes, and then nothing more can be started beside it.
        await self._set_process_limit(2 * self._limits.max_processes + SPARE_PROCESSES)
        api = self._engine.api
        try:
            made = await self._engine.call(api.exec_create, self.container_id, ["sh", "-c", "kill -9 -1"], user=USER)
            async with asyncio.timeout(KILL_S):
                await self._engine.call(api.exec_start, made["Id"])
            killed = (await self._engine.call(api.exec_inspect, made["Id"]))["Pid"] != 0
        except (SandboxError, TimeoutError):
            killed = False
        if not killed:  # then the sandbox ends: what runs in it cannot be known any more
            with contextlib.suppress(SandboxError):
                await self._engine.call(api.kill, self.container_id)
        await self._set_process_limit(self._limits.max_processes + SPARE_PROCESSES)

    async def _set_process_limit(self, count: int) -> None:
        # The engine's update call can do it; the SDK's method for that call has no argument for it.
        api = self._engine.api
        url = api._url("/containers/{0}/update", self.container_id)
        with contextlib.suppress(SandboxError):
            await self._engine.call(api._post_json, url, data={"PidsLimit": count})

    async def _ran_out_of_memory(self) -> bool:
        """Whether the container's count of killings for memory has grown (of cgroup version 2, or 1)."""
        script = "cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control 2>/dev/null"
        done = await self._run_once(["sh", "-c", script], KILL_S, b"", 4096)
        if done is None:
            return False
        kills = sum(int(count) for count in re.findall(rb"^oom_kill (\d+)$", done.stdout, re.MULTILINE))
        grown, self._oom_kills = kills > self._oom_kills, kills
        return grown

    async def _release(self) -> None:
        await self._engine.call(_remove, self._engine.api, self.container_id)


class DockerFactory(CommandFactory):
    """Starts `DockerSandbox`es; made by `create`.

    Every container carries the label `agentgrad.owner`, this factory's own id, and ends by itself after `ttl_s`
    seconds, so that nothing stays for ever when this process is killed.
    """

    name = "docker"

    def __init__(self, engine: DockerEngine, image: str, ttl_s: int) -> None:
        super().__init__()
        self.owner = uuid.uuid4().hex
        self._engine = engine
        self._image = image
        self._ttl_s = ttl_s

    @classmethod
    async def create(cls, image: str = DEFAULT_IMAGE, *, ttl_s: int = 6 * 3600) -> Self:
        """A factory, when the daemon answers and has the image. Nothing is ever pulled.

        `image` needs a POSIX shell, awk, readlink and tar; `ttl_s` is the longest life of a container in seconds.

        Raises:
            SandboxUnavailableError: no daemon, no permission, or no image; one line says what to do.
        """
        engine = DockerEngine()
        try:
            await engine.connect()
            await engine.call(engine.api.inspect_image, image)
        except SandboxError as error:
            await engine.close()
            if isinstance(error.__cause__, ImageNotFound):
                how = "bash scripts/build_sandbox_image.sh" if image == DEFAULT_IMAGE else f"docker pull {image}"
                raise SandboxUnavailableError(f"docker: there is no image {image}: run {how}") from error
            raise SandboxUnavailableError(str(error)) from error
        except BaseException:
            await engine.close()
            raise
        return cls(engine, image, ttl_s)

    async def _start(self, spec: SandboxSpec) -> DockerSandbox:
        api = self._engine.api
        container_id = await self._engine.call(self._create_container, spec.limits)
        sandbox = DockerSandbox(self._engine, container_id, spec.limits)
        try:
            await self._engine.call(api.start, container_id)
            if spec.files:
                await sandbox.put_files(spec.files)
        except BaseException:
            await asyncio.shield(sandbox.close())
            raise
        return sandbox

    def _create_container(self, limits: SandboxLimits) -> str:
        api = self._engine.api
        made = api.create_container(
            self._image,
            ["sleep", str(self._ttl_s)],
            user=KEEPER,
            working_dir="/work",
            environment={**COMMAND_ENVIRONMENT, "HOME": "/work"},
            labels={OWNER_LABEL: self.owner, "agentgrad.boot": _boot_id(), "agentgrad.pid": str(os.getpid())},
            host_config=_host_config(api, limits),
        )
        return made["Id"]

    async def _release(self) -> None:
        try:
            # Also containers of starts that were cancelled halfway. The filter on a label with a value is exact.
            filters = {"label": f"{OWNER_LABEL}={self.owner}"}
            for found in await self._engine.call(self._engine.api.containers, all=True, filters=filters):
                await self._engine.call(_remove, self._engine.api, found["Id"])
        finally:
            await self._engine.close()


def _host_config(api: Any, limits: SandboxLimits) -> Any:
    """What the container may use. The two tmpfs count against its memory."""
    tmpfs = "rw,nosuid,nodev,exec,mode=1777,size="
    return api.create_host_config(
        network_mode="none",
        read_only=True,
        tmpfs={"/work": f"{tmpfs}{2 * limits.max_file_bytes}", "/tmp": f"{tmpfs}{limits.max_file_bytes}"},
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        init=True,
        auto_remove=True,
        pids_limit=limits.max_processes + SPARE_PROCESSES,
        mem_limit=limits.memory_bytes,
        memswap_limit=limits.memory_bytes,
        nano_cpus=int(limits.cpus * 1e9),
        ulimits=[
            Ulimit(name="fsize", soft=limits.max_file_bytes, hard=limits.max_file_bytes),
            Ulimit(name="core", soft=0, hard=0),
        ],
        log_config={"type": "none"},
    )


def _remove(api: Any, container_id: str) -> None:
    try:
        api.remove_container(container_id, force=True, v=True)
    except NotFound:
        return  # it ended by itself
    except APIError as error:
        if error.status_code != 409:  # 409: it is being removed already
            raise


def _tar(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, content in files.items():
            entry = tarfile.TarInfo(relative_path(path))
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""
