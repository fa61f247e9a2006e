"""The Docker sandbox: one container for each, whose process 1 is the server; no network, no rights, hard limits.

The container's stdin and stdout are the channel. `StdinOnce` closes that stdin when the connection to it ends, whoever
held it and however it died; the server then exits, and the daemon removes the container.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from docker.errors import APIError, NotFound
from docker.types import Healthcheck

from envs.sandbox import wire
from envs.sandbox.base import DEFAULT_IMAGE, SandboxError, SandboxSpec
from envs.sandbox.build_server import cache_folder, server_program
from envs.sandbox.docker_engine import DockerEngine, attach
from envs.sandbox.docker_host import unwrapper
from envs.sandbox.images import prepare_image
from envs.sandbox.launch import (
    PROXY_PORT,
    SERVER,
    SPARE_PROCESSES,
    START_S,
    Launched,
    boot_id,
    folder_bytes,
    mark_lives,
    must_answer,
    own_mark,
    proxy_variables,
    read_exactly,
    shared_memory_bytes,
    version_of,
)

OWNER_LABEL, BOOT_LABEL = "agentgrad.owner", "agentgrad.boot"
NAME_PREFIX = "agentgrad-"
USERS = {"nobody": "65534:65534", "root": "0:0"}
# What package managers need. None of it reaches outside the container's namespaces.
ROOT_CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID"]
NEVER_STARTED_S = 3600.0
REMOVE_S = 30.0
POLL_S = 0.05
DISK_POLL_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Image:
    """An image with the server in it, and what it says of itself."""

    id: str
    variables: Mapping[str, str]
    volumes: tuple[str, ...]


class _DockerLaunched:
    """One container, and the connection to it."""

    def __init__(self, engine: DockerEngine, name: str, connected: socket.socket, variables: Mapping[str, str]) -> None:
        self.name = name
        self.connected = connected
        self.variables = variables
        self._engine = engine
        self._ending: asyncio.Future[None] | None = None
        self._why: str | None = None
        self._watching: asyncio.Task[None] | None = None

    async def end(self) -> None:
        if self._ending is None or (self._ending.done() and self._ending.exception() is not None):
            self._ending = asyncio.ensure_future(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        self.connected.close()
        await self._engine.call(_remove, self._engine.api, self.name)

    def watch_disk(self, limit_bytes: int) -> None:
        """The writable layer of most storage drivers has no quota, so its size is looked at every few seconds."""
        self._watching = asyncio.ensure_future(self._watch_disk(limit_bytes))

    async def _watch_disk(self, limit_bytes: int) -> None:
        api = self._engine.api
        while True:
            await asyncio.sleep(DISK_POLL_S)
            with contextlib.suppress(SandboxError):
                found = await self._engine.call(
                    api.containers, all=True, size=True, filters={"name": f"^/{self.name}$"}
                )
                used = sum(one.get("SizeRw") or 0 for one in found)
                if used > limit_bytes:
                    self._why = f"disk limit: it wrote {used} bytes to its root file system ({limit_bytes} are allowed)"
                    await self._engine.call(_remove, api, self.name)
                    return

    async def why_gone(self) -> str:
        if self._why is not None:
            return self._why
        try:
            state = (await self._engine.call(self._engine.api.inspect_container, self.name))["State"]
        except SandboxError as error:
            if isinstance(error.__cause__, NotFound):
                return "its container was killed from outside, ran out of memory, or went with the daemon"
            return str(error)
        return f"its container is {state['Status']} (exit code {state['ExitCode']}, OOMKilled {state['OOMKilled']})"


class DockerLauncher:
    """Starts containers. `runtime` is the engine's name of another runtime than its own, such as runsc."""

    name = "docker"

    def __init__(self, runtime: str | None = None) -> None:
        self._engine = DockerEngine()
        self._runtime = runtime
        self._images: dict[tuple[str, ...], _Image] = {}

    async def check(self, spec: SandboxSpec) -> None:
        await self.prepare(spec)

    async def prepare(self, spec: SandboxSpec) -> None:
        await self._engine.connect()
        await self._image(spec, again=True)  # somebody may have removed it

    async def _image(self, spec: SandboxSpec, *, again: bool = False) -> _Image:
        image = spec.image or DEFAULT_IMAGE
        version = await asyncio.to_thread(version_of, image)
        if again or version not in self._images:
            program = await asyncio.to_thread(server_program)
            api = self._engine.api
            ready = await self._engine.call(prepare_image, api, image, program, cache_folder() / "locks")
            config = (await self._engine.call(api.inspect_image, ready))["Config"] or {}
            pairs = (text.partition("=") for text in config.get("Env") or ())
            variables = {name: value for name, _, value in pairs}
            self._images[version] = _Image(id=ready, variables=variables, volumes=tuple(config.get("Volumes") or ()))
        return self._images[version]

    async def launch(self, spec: SandboxSpec) -> Launched:
        await self._engine.connect()
        image = await self._image(spec)
        api = self._engine.api
        name = NAME_PREFIX + uuid.uuid4().hex
        making = asyncio.ensure_future(self._engine.call(self._create_and_attach, spec, image, name))
        try:
            connected = await asyncio.shield(making)
            launched = _DockerLaunched(self._engine, name, connected, {**image.variables, **proxy_variables(spec)})
            await self._engine.call(api.start, name)
            connected.setblocking(False)
            async with asyncio.timeout(START_S):
                must_answer(await _read_hello(connected), f"docker: {spec.image or DEFAULT_IMAGE}")
        except BaseException as error:
            await asyncio.shield(self._abandon(making, name))
            if isinstance(error, TimeoutError | OSError):
                why = str(error) or f"no answer in {START_S:.0f} s"
                raise SandboxError(f"docker: a container did not start: {why}") from error
            raise
        if spec.writable_root:
            launched.watch_disk(spec.limits.disk_bytes)
        return launched

    async def _abandon(self, making: asyncio.Future[socket.socket], name: str) -> None:
        # The thread goes on, and what it makes must not stay.
        with contextlib.suppress(SandboxError):
            (await making).close()
        with contextlib.suppress(SandboxError):
            await self._engine.call(_remove, self._engine.api, name)

    def _create_and_attach(self, spec: SandboxSpec, image: _Image, name: str) -> socket.socket:
        api = self._engine.api
        port = 0 if spec.network == "none" else PROXY_PORT
        process_bytes = 0 if self._engine.limits_memory else spec.limits.memory_bytes
        api.create_container(
            image.id,
            [str(spec.limits.max_file_bytes), "0", str(process_bytes), "-1", str(port)],
            entrypoint=[SERVER],
            name=name,
            hostname="sandbox",
            user=USERS[spec.user],
            working_dir=spec.workdir,
            stdin_open=True,
            stop_signal="SIGKILL",  # process 1 hears no other one
            healthcheck=Healthcheck(test=["NONE"]),
            labels={OWNER_LABEL: own_mark(), BOOT_LABEL: boot_id()},
            host_config=_host_config(self._engine, spec, image.volumes, self._runtime),
        )
        return attach(api, name)

    async def reap(self) -> int:
        """Containers that were never started, or ended and stayed: a running one ends with its connection."""
        await self._engine.connect()
        filters = {"label": OWNER_LABEL, "status": ["created", "exited", "dead"]}
        removed = 0
        for found in await self._engine.call(self._engine.api.containers, all=True, filters=filters):
            if _is_abandoned(found):
                await self._engine.call(_remove, self._engine.api, found["Id"])
                removed += 1
        return removed

    async def end_foreign(self, name: str) -> None:
        if name.startswith(NAME_PREFIX):
            await self._engine.connect()
            await self._engine.call(_remove, self._engine.api, name)

    async def close(self) -> None:
        await self._engine.close()


def _is_abandoned(found: Mapping[str, Any]) -> bool:
    """Whether its owner, of this boot of this machine, is gone. Of other machines' owners nothing can be known, but a
    start takes no hour."""
    labels = found.get("Labels") or {}
    if labels.get(BOOT_LABEL) == boot_id():
        return not mark_lives(labels[OWNER_LABEL])
    return found.get("State") == "created" and time.time() - found["Created"] > NEVER_STARTED_S


def _host_config(engine: DockerEngine, spec: SandboxSpec, volumes: tuple[str, ...], runtime: str | None) -> Any:
    """What the container may use. Writable folders are in memory, and count against it; so are the image's volumes,
    which would lie on the machine's disk without a bound."""
    limits = spec.limits
    own = () if spec.writable_root else ("/tmp", spec.workdir)
    folders = dict.fromkeys((*own, *spec.folders, *volumes))
    options = f"rw,nosuid,nodev,exec,mode=1777,size={folder_bytes(limits, len(folders))}"
    if not engine.is_podman:  # which refuses these, and needs them not
        # Where the image has such a folder, Docker gives the mount that folder's mode: its owner must be the user.
        user, group = USERS[spec.user].split(":")
        options += f",uid={user},gid={group}"
    return engine.api.create_host_config(
        network_mode="none",
        read_only=not spec.writable_root,
        tmpfs=dict.fromkeys(folders, options),
        shm_size=shared_memory_bytes(limits),
        cap_drop=["ALL"],
        cap_add=ROOT_CAPABILITIES if spec.user == "root" else None,
        security_opt=["no-new-privileges"],
        auto_remove=True,
        pids_limit=limits.max_processes + SPARE_PROCESSES,
        mem_limit=limits.memory_bytes,
        memswap_limit=limits.memory_bytes,
        nano_cpus=int(limits.cpus * 1e9),
        log_config={"type": "none"},
        runtime=runtime,
    )


async def _read_hello(connected: socket.socket) -> bytes:
    """The server's first frame, without one byte of what may follow."""
    hello = b""
    wanted = len(wire.frame(wire.HELLO, 0, bytes(4)))
    unwrap = unwrapper()
    while len(hello) < wanted:
        header = await read_exactly(connected, 8)
        if len(header) < 8:
            return b""
        size = int.from_bytes(header[4:], "big")
        hello += b"".join(unwrap(header + await read_exactly(connected, size)))
    return hello


def _remove(api: Any, container: str) -> None:
    """Remove a container, running or not, and return when it is gone. Blocking."""
    give_up = time.monotonic() + REMOVE_S
    while True:
        try:
            api.remove_container(container, force=True, v=True)
        except NotFound:
            return
        except APIError as error:
            # 409: it is being removed already. The daemon also says 500 when two removals meet.
            if time.monotonic() > give_up:
                raise
            if error.status_code not in (409, 500):
                raise
        time.sleep(POLL_S)
