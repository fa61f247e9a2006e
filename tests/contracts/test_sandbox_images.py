"""A sandbox with an image of its own: its programs, its variables, its folders, and what a writable one may write."""

from __future__ import annotations

import asyncio
import contextlib
import io
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from envs.sandbox.base import (
    DEFAULT_IMAGE,
    MIB,
    Sandbox,
    SandboxError,
    SandboxFactory,
    SandboxLimits,
    SandboxSpec,
    SandboxUnavailableError,
)
from envs.sandbox.open import Backend
from tests.contracts.sandboxes import ISOLATED, sh, with_factory, with_sandbox
from tests.requirements import require

isolated = pytest.mark.parametrize("backend", ISOLATED)
DOCKERFILE = f"""
FROM {DEFAULT_IMAGE}
ENV GREETING="good day" PATH=/opt/tools:/bin
WORKDIR /app
COPY --chmod=755 tool /opt/tools/tool
RUN echo made > /app/made && chmod 777 /app
VOLUME /data
HEALTHCHECK CMD false
ENTRYPOINT ["/bin/false"]
"""


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Path]:
    """A folder with a Dockerfile; what is built from it goes with the test."""
    require("docker")
    (tmp_path / "Dockerfile").write_text(DOCKERFILE.replace("--chmod=755 ", ""))
    (tmp_path / "tool").write_text("#!/bin/sh\necho tool: $GREETING\n")
    (tmp_path / "tool").chmod(0o755)
    client = docker.from_env()
    before = {image["Id"] for image in client.api.images()}
    try:
        yield tmp_path
    finally:
        made = [image["Id"] for image in client.api.images() if image["Id"] not in before]
        # Those that were made of others go first; the list itself is by whole seconds.
        for image in sorted(made, key=lambda one: client.api.inspect_image(one)["Created"], reverse=True):
            client.api.remove_image(image, force=True)
        client.close()


@isolated
@pytest.mark.docker
def test_a_root_file_system(backend: Backend, tmp_path: Path) -> None:
    """The same archive runs in both; nothing of the machine's own programs is seen."""
    require("docker")
    archive = tmp_path / "root.tar"
    client = docker.from_env()
    made = client.containers.create(DEFAULT_IMAGE)
    try:
        with archive.open("wb") as file:
            file.writelines(made.export())
    finally:
        made.remove()
        client.close()

    async def use(sandbox: Sandbox) -> None:
        done = await sh(sandbox, "cat a; readlink -f /bin/awk; ls /usr; touch /bin/x /etc/x; pwd; id -u")
        assert done.stdout.split() == ["1", "/bin/busybox", "/app", "65534"]

    with_sandbox(backend, use, SandboxSpec(image=str(archive), files={"a": b"1\n"}))


@pytest.mark.docker
def test_a_dockerfile_is_built_and_its_image_is_run(context: Path) -> None:
    """Its variables and its content count; its entry point and health check do not, and its volume goes with it."""

    async def use(sandbox: Sandbox) -> None:
        done = await sh(sandbox, "tool; cat made; pwd; id -u; touch /app/new /etc/new /data/new && echo written")
        assert done.stdout.splitlines() == ["tool: good day", "made", "/app", "0", "written"]
        assert "tmpfs /data" in (await sh(sandbox, "cut -d' ' -f1,2 /proc/mounts")).stdout
        assert (await sh(sandbox, "cat /etc/new && mount -t tmpfs x /app")).exit_code != 0

    volumes = _volumes()
    spec = SandboxSpec(image=str(context), workdir="/app", user="root", writable_root=True)
    assert spec.relaxed == ("user root", "writable root file system")
    with_sandbox("docker", use, spec)
    assert _volumes() == volumes


def _volumes() -> set[str]:
    client = docker.from_env()
    try:
        return {volume.name for volume in client.volumes.list()}
    finally:
        client.close()


@pytest.mark.docker
def test_a_writable_layer_has_a_bound_d09(context: Path) -> None:
    """D09: no quota holds there, so the sandbox ends, the reason is said, and the space comes back."""
    limits = SandboxLimits(disk_bytes=8 * MIB)
    spec = SandboxSpec(image=str(context), workdir="/app", user="root", writable_root=True, limits=limits)

    async def use(factory: SandboxFactory) -> None:
        async with await factory.start(spec) as sandbox:
            filling = sh(sandbox, "dd if=/dev/zero of=/app/big bs=1000000 count=20; sleep 60", timeout_s=60)
            with pytest.raises(SandboxError, match=r"disk limit: it wrote .* bytes to its root file system"):
                await filling

    with_factory("docker", use)


@isolated
@pytest.mark.docker
def test_a_path_means_what_lies_there_now(backend: Backend, tmp_path: Path) -> None:
    """Relative to the folder of whoever asks, also when the archive changes while the pool lives on."""
    require("docker")
    client = docker.from_env()
    archive = tmp_path / "root.tar"

    def pack(text: bytes) -> None:
        made = client.containers.create(DEFAULT_IMAGE)
        try:
            whole = b"".join(made.export())
        finally:
            made.remove()
        with tarfile.open(fileobj=io.BytesIO(whole)) as old, tarfile.open(archive, "w") as new:
            for entry in old:
                new.addfile(entry, old.extractfile(entry) if entry.isfile() else None)
            entry = tarfile.TarInfo("version")
            entry.size = len(text)
            new.addfile(entry, io.BytesIO(text))

    async def use(factory: SandboxFactory) -> list[str]:
        said: list[str] = []
        for text in (b"one", b"two!"):
            pack(text)
            async with await factory.start(SandboxSpec(image="./root.tar")) as sandbox:
                said.append((await sh(sandbox, "cat /version")).stdout)
        return said

    with contextlib.chdir(tmp_path):
        assert with_factory(backend, use) == ["one", "two!"]
    client.close()


def test_bubblewrap_says_what_it_has_not() -> None:
    require("bwrap")

    async def use(factory: SandboxFactory) -> None:
        for spec, words in (
            (SandboxSpec(writable_root=True), "always read-only here; use docker"),
            (SandboxSpec(image="debian:12"), "there is no registry for debian:12: give the path of a root file system"),
            (SandboxSpec(image="/no/such.tar"), "there is no such archive"),
        ):
            with pytest.raises(SandboxUnavailableError, match=words):
                await factory.start(spec)

    with_factory("bubblewrap", use)


@pytest.mark.docker
def test_docker_stop_ends_a_sandbox_at_once() -> None:
    """The daemon's own shutdown stops containers in the same way."""
    require("docker")

    async def use(factory: SandboxFactory) -> None:
        async with await factory.start(SandboxSpec()) as sandbox:
            name = sandbox._started.lease._name  # pyright: ignore[reportAttributeAccessIssue]
            stopping = await asyncio.to_thread(subprocess.run, ["docker", "stop", name], capture_output=True, timeout=9)
            assert stopping.returncode == 0
            with pytest.raises(SandboxError, match="ended by itself"):
                await sh(sandbox, "echo x")

    with_factory("docker", use)
