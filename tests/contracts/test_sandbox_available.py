"""What is said when a sandbox cannot be had: one line with what to do, before anything slow is loaded."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from envs.sandbox.base import SandboxUnavailableError
from envs.sandbox.open import Backend, open_factory
from tests.contracts.sandboxes import environment_variable
from tests.requirements import require


def reason(backend: Backend, image: str = "agentgrad-sandbox:1") -> str:
    with pytest.raises(SandboxUnavailableError) as raised:
        asyncio.run(open_factory(backend, image))
    text = str(raised.value)
    assert "\n" not in text
    return text


def test_no_docker_daemon_d16() -> None:
    """D16: Docker is off."""
    with environment_variable("DOCKER_HOST", "unix:///tmp/none.sock"):
        assert reason("docker").startswith("docker: no daemon answers at unix:///tmp/none.sock: start it")


def test_no_permission_for_docker_d16() -> None:
    """D16: the socket is there, and this user may not use it. Root becomes somebody else first."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        Path(folder).chmod(0o755)
        listener.bind(f"{folder}/docker.sock")
        listener.listen()
        Path(folder, "docker.sock").chmod(0)
        with environment_variable("DOCKER_HOST", f"unix://{folder}/docker.sock"):
            text = _as_nobody(lambda: reason("docker"))
    assert text.startswith("docker: no permission for unix:///")
    assert "group docker" in text


def _as_nobody(say: Callable[[], str]) -> str:
    """What `say()` returns in a forked process without root's rights."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
            os.write(writer, say().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text


def test_docker_hosts_that_do_not_work() -> None:
    with environment_variable("DOCKER_HOST", "ssh://somewhere"):
        assert "only plain unix:// and tcp:// hosts work" in reason("docker")


@pytest.mark.docker
def test_no_image_d16() -> None:
    """D16: a missing image that no registry gives is said at once, with what to do."""
    require("docker")
    assert reason("docker", "no-such-image:7").startswith("docker: there is no image no-such-image:7 here, and")
    assert reason("docker", "/no/such/folder").startswith("docker: ")


def test_bubblewrap_is_missing() -> None:
    with environment_variable("PATH", "/nowhere"):
        assert reason("bubblewrap") == "bubblewrap: bwrap is not installed: run apt-get install bubblewrap"


def test_auto_names_both_reasons() -> None:
    with environment_variable("DOCKER_HOST", "unix:///tmp/none.sock"), environment_variable("PATH", "/nowhere"):
        text = reason("auto")
    assert "docker: no daemon" in text
    assert "bubblewrap: bwrap is not installed" in text


def test_auto_takes_bubblewrap_without_docker() -> None:
    require("bwrap")

    async def name() -> str:
        factory = await open_factory("auto")
        await factory.close()
        return factory.name

    with environment_variable("DOCKER_HOST", "unix:///tmp/none.sock"):
        assert asyncio.run(name()) == "bubblewrap"


@pytest.mark.docker
def test_auto_takes_docker_first() -> None:
    require("docker")

    async def name() -> str:
        factory = await open_factory("auto")
        await factory.close()
        return factory.name

    assert asyncio.run(name()) == "docker"


def test_opening_imports_nothing_of_the_other() -> None:
    program = "import sys, envs.sandbox.open; sys.exit('docker' in sys.modules)"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", program]) == 0
