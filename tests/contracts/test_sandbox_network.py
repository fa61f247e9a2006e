"""A sandbox whose task asks for the network: what it can reach, what it cannot, and that it is said."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import resource
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from envs.sandbox.base import Sandbox, SandboxLimits, SandboxSpec
from envs.sandbox.channel import Channel
from envs.sandbox.docker_host import unwrapper
from envs.sandbox.launch import PROXY_PORT, SERVER, Launched
from envs.sandbox.open import Backend
from envs.sandbox.pool_process import open_launcher
from envs.sandbox.pool_wire import PoolKind
from envs.sandbox.proxy import PublicReach, RefusedError, Streams, proxy_for
from envs.sandbox.served import ServedSandbox, Started
from tests.contracts.sandboxes import ISOLATED, eventually, sh, with_sandbox
from tests.requirements import require

isolated = pytest.mark.parametrize("backend", ISOLATED)
LISTED = SandboxSpec(network="allowlist", allowed_hosts=("example.org", "169.254.169.254", "127.0.0.1"))

# Sends $1 to the proxy and prints what comes back, with what every image has: busybox's nc, or bash.
ASK = (
    f'if command -v nc >/dev/null; then printf "$1" | nc -w 5 127.0.0.1 {PROXY_PORT}; else bash -c \'exec 3<>/dev/tcp/'
    f'127.0.0.1/{PROXY_PORT}; printf "$1" >&3; cat <&3\' bash "$1"; fi'
)
# Connects to the proxy, and has a command ($1) for the connection's two ends.
CONNECTED = (
    f'if command -v nc >/dev/null; then exec nc 127.0.0.1 {PROXY_PORT} -e sh -c "$1"; else exec bash -c '
    f'\'exec 3<>/dev/tcp/127.0.0.1/{PROXY_PORT}; exec sh -c "$1" <&3 >&3 3>&-\' bash "$1"; fi'
)
TUNNEL = "CONNECT example.org:443 HTTP/1.1\\r\\n\\r\\n"


def resident_bytes() -> int:
    """Of this process, which is where the proxy is."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def ask(sandbox: Sandbox, request: str) -> str:
    return (await sandbox.exec(["sh", "-c", ASK, "sh", request], timeout_s=30)).stdout


class Peer:
    """A server of this machine, to which all hosts lead; `_answer` is what it does with a connection."""

    def __init__(self) -> None:
        self._port = 0
        self._over = asyncio.Event()
        self._accepted: list[asyncio.StreamWriter] = []
        self.reached: list[asyncio.StreamWriter] = []
        """The proxy's ends."""

    @property
    def all_ended(self) -> bool:
        return all(writer.is_closing() for writer in self.reached)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Say what was heard, and something long."""
        heard = await reader.read(100_000)
        writer.write(b"heard: " + heard + b"x" * 300_000)
        await writer.drain()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._accepted.append(writer)
        with contextlib.suppress(OSError):
            await self._answer(reader, writer)
            writer.close()

    async def reach(self, _host: str, _port: int) -> Streams:
        streams = await asyncio.open_connection("127.0.0.1", self._port)
        self.reached.append(streams[1])
        return streams

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            self._over.set()
            for writer in (*self._accepted, *self.reached):
                writer.transport.abort()
            server.close()
            await server.wait_closed()


class SilentPeer(Peer):
    """It neither reads nor writes, and keeps its end open."""

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._over.wait()


class TalkingPeer(Peer):
    """It writes for ever."""

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"x" * 10_000)
            await writer.drain()


class DigestPeer(Peer):
    """It says what all the bytes were that it was sent, up to a last line `end`."""

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard = b""
        while not heard.endswith(b"end\n"):
            heard += await reader.read(1_000_000)
        writer.write(hashlib.sha256(heard).hexdigest().encode())


def with_reach(
    backend: Backend, spec: SandboxSpec, use: Callable[[Sandbox], Awaitable[None]], peer: Peer | None = None
) -> None:
    """A sandbox whose allowed hosts all lead to `peer`, whatever their name."""
    peer = peer or Peer()
    require("docker" if backend == "docker" else "bwrap")

    class Lease:
        def __init__(self, launched: Launched) -> None:
            self._launched = launched

        async def release(self) -> None:
            await self._launched.end()

        async def why_gone(self) -> str:
            return await self._launched.why_gone()

    async def main() -> None:
        launcher = open_launcher(PoolKind(backend=backend))
        await launcher.check(SandboxSpec())

        async def start(wanted: SandboxSpec) -> Started:
            launched = await launcher.launch(wanted)
            unwrap = unwrapper() if backend == "docker" else None
            serve = proxy_for(wanted, peer.reach)
            channel = await Channel.open(launched.connected.dup(), backend, unwrap=unwrap, serve=serve)
            launched.connected.close()
            return Started(channel=channel, lease=Lease(launched), variables=launched.variables, server=SERVER)

        async with peer.serving(), await ServedSandbox.open(backend, spec, start) as sandbox:
            await use(sandbox)
        await launcher.close()

    asyncio.run(main())


@isolated
def test_an_allowed_host_is_reached(backend: Backend) -> None:
    async def use(sandbox: Sandbox) -> None:
        assert f"http://127.0.0.1:{PROXY_PORT}" in (await sh(sandbox, "echo $http_proxy $HTTPS_PROXY")).stdout
        plain = await ask(sandbox, "GET http://example.org/a?b HTTP/1.1\\r\\nHost: example.org\\r\\nX: y\\r\\n\\r\\n")
        assert plain.startswith("heard: GET /a?b HTTP/1.1\r\nHost: example.org\r\nConnection: close\r\nX: y\r\n\r\n")
        assert "bytes cut" in plain  # all of the long answer has come
        tunnel = await ask(sandbox, "CONNECT example.org:443 HTTP/1.1\\r\\n\\r\\nhello")
        assert tunnel.startswith("HTTP/1.1 200 Connection established\r\n\r\nheard: hellox")
        bare = await ask(sandbox, "GET http://example.org?x HTTP/1.1\\r\\n\\r\\n")
        assert bare.startswith("heard: GET /?x HTTP/1.1\r\nHost: example.org\r\n")

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
        for target in (
            "ftp://example.org/",
            "http://[x",
            "http://example.org:x/",
            "http://example.com\\0.example.org/",
        ):
            answer = await ask(sandbox, f"GET {target} HTTP/1.1\\r\\n\\r\\n")
            assert "only http:// requests and CONNECT pass" in answer, target
        for request in ("CONNECT example.org:22", "GET http://example.org:8080/"):
            answer = await ask(sandbox, f"{request} HTTP/1.1\\r\\n\\r\\n")
            assert "is not open to this task: only 80 (HTTP) and 443 (HTTPS) are" in answer, request
        # Beside the proxy there is still no network.
        assert len((await sh(sandbox, "cat /proc/net/route")).stdout.splitlines()) <= 1

    with caplog.at_level(logging.WARNING, logger="envs.sandbox.proxy"):
        with_sandbox(backend, use, LISTED)
    assert "a sandbox was refused the network: the task's allowed hosts do not include example.com" in caplog.text


@isolated
def test_what_is_sent_arrives_whole(backend: Backend) -> None:
    content = "".join(f"{number}\n" for number in range(1, 1_000_001)) + "end\n"

    async def use(sandbox: Sandbox) -> None:
        send = f"printf '{TUNNEL}'; seq 1 1000000; echo end; cat >/app/answer"
        await sandbox.exec(["sh", "-c", CONNECTED, "sh", send], timeout_s=60)
        answer = await sandbox.read_file("/app/answer")
        assert answer.endswith(hashlib.sha256(content.encode()).hexdigest().encode())

    with_reach(backend, LISTED, use, DigestPeer())


@isolated
def test_a_peer_that_does_not_read_costs_no_memory(backend: Backend) -> None:
    peer = SilentPeer()

    async def use(sandbox: Sandbox) -> None:
        before = resident_bytes()
        send = f"printf '{TUNNEL}'; head -c 300000000 /dev/zero"
        result = await sandbox.exec(["sh", "-c", CONNECTED, "sh", send], timeout_s=5)
        assert resident_bytes() - before < 100_000_000
        assert result.timed_out
        assert len(peer.reached) == 1
        assert await eventually(lambda: peer.all_ended)

    with_reach(backend, LISTED, use, peer)


@isolated
@pytest.mark.parametrize("kind", [SilentPeer, TalkingPeer])
def test_nothing_is_left_of_connections_that_programs_have_left(backend: Backend, kind: type[Peer]) -> None:
    peer = kind()

    async def use(sandbox: Sandbox) -> None:
        leave = f"for _ in $(seq 100); do (set -- \"printf '{TUNNEL}'\"; {CONNECTED}); done"
        assert (await sh(sandbox, leave)).exit_code == 0
        assert await eventually(lambda: len(peer.reached) == 100)
        assert await eventually(lambda: peer.all_ended)

    with_reach(backend, LISTED, use, peer)


@isolated
def test_more_connections_than_are_served_wait_at_no_cost(backend: Backend) -> None:
    async def use(sandbox: Sandbox) -> None:
        many = (
            f"pids=; for _ in $(seq 70); do (set -- 'exec sleep 100'; {CONNECTED}) & pids=\"$pids $!\"; done; sleep 1; "
            'cut -d" " -f14,15 /proc/1/stat; sleep 2; cut -d" " -f14,15 /proc/1/stat; kill $pids'
        )
        ticks = [int(word) for word in (await sh(sandbox, many)).stdout.split()]
        assert sum(ticks[2:]) - sum(ticks[:2]) < 50  # of the 200 that a busy process would have had
        assert (await ask(sandbox, "GET http://example.org/ HTTP/1.1\\r\\n\\r\\n")).startswith("heard: GET / ")

    with_reach(backend, replace(LISTED, limits=SandboxLimits(max_processes=300)), use)


@isolated
def test_a_sandbox_ends_with_its_connections(backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    peer = SilentPeer()

    async def use(sandbox: Sandbox) -> None:
        hold = f"(set -- \"printf '{TUNNEL}'; exec sleep 100\"; {CONNECTED}) >/dev/null 2>&1 &"
        await sh(sandbox, f"for _ in 1 2 3; do {hold} done; sleep 1")
        assert await eventually(lambda: len(peer.reached) == 3)
        assert not peer.all_ended

    with_reach(backend, LISTED, use, peer)
    assert peer.all_ended
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


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
        asyncio.run(PublicReach()(host, 80))


@pytest.mark.parametrize("host", ["a" * 64 + ".org", "a..org"])
def test_what_is_no_name_is_refused(host: str) -> None:
    with pytest.raises(RefusedError, match="is not the name of a host"):
        asyncio.run(PublicReach()(host, 80))


def test_names_are_looked_up_in_threads_of_the_proxys_own() -> None:
    async def main() -> set[str]:
        reach = PublicReach()
        with pytest.raises(RefusedError):
            await reach("localhost", 80)
        return {thread.name.partition("_")[0] for thread in threading.enumerate()}

    names = asyncio.run(main())
    assert "names" in names
    assert "asyncio" not in names  # the loop's own
