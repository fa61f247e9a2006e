"""A sandbox whose task asks for the network: what it can reach, what it cannot, and that it is said."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from envs.sandbox.base import Sandbox, SandboxSpec
from envs.sandbox.channel import Channel
from envs.sandbox.docker_host import unwrapper
from envs.sandbox.launch import PROXY_PORT, SERVER, Launched
from envs.sandbox.open import Backend
from envs.sandbox.pool_process import open_launcher
from envs.sandbox.pool_wire import PoolKind
from envs.sandbox.proxy import RefusedError, Streams, proxy_for, reach_public
from envs.sandbox.served import ServedSandbox, Started
from tests.contracts.sandboxes import ISOLATED, sh, with_sandbox
from tests.requirements import require

isolated = pytest.mark.parametrize("backend", ISOLATED)
LISTED = SandboxSpec(network="allowlist", allowed_hosts=("example.org", "169.254.169.254", "127.0.0.1"))

# Sends $1 to the proxy and prints what comes back, with what every image has: busybox's nc, or bash.
ASK = (
    f'if command -v nc >/dev/null; then printf "$1" | nc -w 5 127.0.0.1 {PROXY_PORT}; else bash -c \'exec 3<>/dev/tcp/'
    f'127.0.0.1/{PROXY_PORT}; printf "$1" >&3; cat <&3\' bash "$1"; fi'
)


async def ask(sandbox: Sandbox, request: str) -> str:
    return (await sandbox.exec(["sh", "-c", ASK, "sh", request], timeout_s=30)).stdout


def with_reach(backend: Backend, spec: SandboxSpec, use: Callable[[Sandbox, int], Awaitable[None]]) -> None:
    """A sandbox whose allowed hosts all lead to an echoing server of this machine, whatever their name."""
    require("docker" if backend == "docker" else "bwrap")

    class Lease:
        def __init__(self, launched: Launched) -> None:
            self._launched = launched

        async def release(self) -> None:
            await self._launched.end()

        async def why_gone(self) -> str:
            return await self._launched.why_gone()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard = await reader.read(100_000)
        writer.write(b"heard: " + heard + b"x" * 300_000)
        await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        port: int = server.sockets[0].getsockname()[1]

        async def reach(host: str, _port: int) -> Streams:
            return await asyncio.open_connection("127.0.0.1", port)

        launcher = open_launcher(PoolKind(backend=backend))
        await launcher.check(SandboxSpec())

        async def start(wanted: SandboxSpec) -> Started:
            launched = await launcher.launch(wanted)
            unwrap = unwrapper() if backend == "docker" else None
            serve = proxy_for(wanted, reach)
            channel = await Channel.open(launched.connected.dup(), backend, unwrap=unwrap, serve=serve)
            launched.connected.close()
            return Started(channel=channel, lease=Lease(launched), variables=launched.variables, server=SERVER)

        async with server, await ServedSandbox.open(backend, spec, start) as sandbox:
            await use(sandbox, port)
        await launcher.close()

    asyncio.run(main())


@isolated
def test_an_allowed_host_is_reached(backend: Backend) -> None:
    async def use(sandbox: Sandbox, port: int) -> None:
        assert f"http://127.0.0.1:{PROXY_PORT}" in (await sh(sandbox, "echo $http_proxy $HTTPS_PROXY")).stdout
        plain = await ask(sandbox, "GET http://example.org/a?b HTTP/1.1\\r\\nHost: example.org\\r\\nX: y\\r\\n\\r\\n")
        assert plain.startswith("heard: GET /a?b HTTP/1.1\r\nHost: example.org\r\nConnection: close\r\nX: y\r\n\r\n")
        assert "bytes cut" in plain  # all of the long answer has come
        tunnel = await ask(sandbox, "CONNECT example.org:443 HTTP/1.1\\r\\n\\r\\nhello")
        assert tunnel.startswith("HTTP/1.1 200 Connection established\r\n\r\nheard: hellox")

    with_reach(backend, LISTED, use)


@isolated
def test_other_hosts_are_refused_d10(backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    """D10: opting in is explicit and logged, and never opens this machine, its network or the metadata address."""

    async def use(sandbox: Sandbox) -> None:
        for host in ("example.com", "sub.example.org", "10.0.0.1"):
            refused = await ask(sandbox, f"CONNECT {host}:443 HTTP/1.1\\r\\n\\r\\n")
            assert refused.startswith("HTTP/1.1 403 Forbidden"), host
            assert f"the task's allowed hosts do not include {host}" in refused
        for host in ("127.0.0.1", "169.254.169.254"):  # also when the task lists them
            refused = await ask(sandbox, f"GET http://{host}/latest HTTP/1.1\\r\\n\\r\\n")
            assert "is not on the internet" in refused, host
        assert "only http:// requests and CONNECT pass" in await ask(
            sandbox, "GET ftp://example.org/ HTTP/1.1\\r\\n\\r\\n"
        )
        # Beside the proxy there is still no network.
        assert len((await sh(sandbox, "cat /proc/net/route")).stdout.splitlines()) <= 1

    with caplog.at_level(logging.WARNING, logger="envs.sandbox.proxy"):
        with_sandbox(backend, use, LISTED)
    assert "a sandbox was refused the network: the task's allowed hosts do not include example.com" in caplog.text


@isolated
def test_without_a_network_there_is_no_proxy(backend: Backend) -> None:
    async def use(sandbox: Sandbox) -> None:
        assert (await sh(sandbox, "echo $http_proxy; cat /proc/net/tcp | wc -l")).stdout.split() == ["1"]

    with_sandbox(backend, use)


def test_the_record_says_so() -> None:
    assert LISTED.relaxed == ("network to example.org, 169.254.169.254, 127.0.0.1",)
    assert SandboxSpec(network="public").relaxed == ("network to every public host",)
    with pytest.raises(ValueError, match="allowed_hosts go with network 'allowlist'"):
        SandboxSpec(network="allowlist")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "10.1.2.3", "169.254.169.254", "::1", "0.0.0.0"])
def test_only_public_addresses_are_reached(host: str) -> None:
    with pytest.raises(RefusedError, match="is not on the internet"):
        asyncio.run(reach_public(host, 80))
