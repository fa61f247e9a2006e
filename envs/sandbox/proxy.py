"""The way to the network for a sandbox whose task asked for one: an HTTP proxy at this end of its channel.

The sandbox has no network. What a program inside sends to the proxy's port arrives here, and here it is decided which
host may be reached: names of the allow-list or, for `public`, every name; and never an address of this machine, of the
local network or of a cloud's metadata service, whatever a name resolves to. Only HTTP and HTTPS pass (RFC 9110 section
9.3.6 CONNECT, and requests with an absolute target); every attempt is logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from envs.sandbox.base import SandboxSpec
from envs.sandbox.channel import Connection, Serve

MAX_HEADER_BYTES = 64 * 1024
CONNECT_S = 20.0
PIECE_BYTES = 64 * 1024

logger = logging.getLogger(__name__)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Reach = Callable[[str, int], Awaitable[Streams]]


class RefusedError(Exception):
    """This request is not let through; the message is what the program inside reads."""


def proxy_for(spec: SandboxSpec, reach: Reach | None = None) -> Serve | None:
    """What serves the connections of a sandbox; None for one without a network.

    `reach` connects to a host that the task allows: to its public addresses only, unless a test says otherwise.
    """
    if spec.network == "none":
        return None

    async def serve(connection: Connection) -> None:
        await _serve(connection, spec, reach or reach_public)

    return serve


async def _serve(connection: Connection, spec: SandboxSpec, reach: Reach) -> None:
    header, rest = await _read_header(connection)
    try:
        method, host, port, first = _request(header, rest)
        if not allowed(host, spec):
            raise RefusedError(f"the task's allowed hosts do not include {host}")
        reader, writer = await reach(host, port)
    except RefusedError as refused:
        logger.warning("a sandbox was refused the network: %s", refused)
        await connection.write(f"HTTP/1.1 403 Forbidden\r\nConnection: close\r\n\r\n{refused}\n".encode())
        return
    except OSError as error:
        await connection.write(f"HTTP/1.1 502 Bad Gateway\r\nConnection: close\r\n\r\n{error}\n".encode())
        return
    logger.info("a sandbox reaches %s:%d", host, port)
    try:
        if method == "CONNECT":
            await connection.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        writer.write(first)
        await _carry(connection, reader, writer)
    finally:
        writer.close()


async def _read_header(connection: Connection) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = await connection.read()
        if not piece or len(data) > MAX_HEADER_BYTES:
            raise ConnectionError("no request")
        data += piece
    header, _, rest = data.partition(b"\r\n\r\n")
    return header, rest


def _request(header: bytes, rest: bytes) -> tuple[str, str, int, bytes]:
    """Method, host, port, and what is sent on first.

    >>> _request(b"CONNECT example.org:443 HTTP/1.1\\r\\nHost: example.org:443", b"")
    ('CONNECT', 'example.org', 443, b'')
    >>> _request(b"GET http://example.org/a?b HTTP/1.1\\r\\nHost: other\\r\\nProxy-Connection: keep-alive", b"")[1:3]
    ('example.org', 80)
    """
    lines = header.decode("latin-1").split("\r\n")
    method, _, target = lines[0].partition(" ")
    target, _, version = target.rpartition(" ")
    parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or (method != "CONNECT" and parts.scheme != "http"):
        raise RefusedError("only http:// requests and CONNECT pass")
    if method == "CONNECT":
        return method, host, port or 443, rest
    # One request a connection: the next one could be for another host. The host that was checked is the one named.
    path = parts._replace(scheme="", netloc="").geturl() or "/"
    kept = [line for line in lines[1:] if not line.lower().startswith(("proxy-", "connection:", "host:"))]
    named = parts.netloc.rpartition("@")[2]
    sent = [f"{method} {path} {version}", f"Host: {named}", "Connection: close", *kept, "", ""]
    return method, host, port or 80, "\r\n".join(sent).encode("latin-1") + rest


def allowed(host: str, spec: SandboxSpec) -> bool:
    """Whether a name is on the list; an entry `*.example.org` stands for every name below it.

    >>> spec = SandboxSpec(network="allowlist", allowed_hosts=("example.org", "*.example.com"))
    >>> [allowed(host, spec) for host in ("example.org", "a.example.org", "a.example.com", "example.com")]
    [True, False, True, False]
    """
    if spec.network == "public":
        return True
    host = host.lower().rstrip(".")
    names = [name.lower() for name in spec.allowed_hosts]
    return host in names or any(name.startswith("*.") and host.endswith(name[1:]) for name in names)


def is_public(address: str) -> bool:
    """Whether an address is out on the internet.

    >>> [is_public(address) for address in ("1.1.1.1", "169.254.169.254", "10.0.0.1", "::1", "::ffff:127.0.0.1")]
    [True, False, False, False, False]
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_global and not (mapped or found).is_multicast


async def reach_public(host: str, port: int) -> Streams:
    """A connection to one of the host's public addresses: the very address that was checked."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(CONNECT_S):
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        public = [address for address in addresses if is_public(address)]
        if not public:
            raise RefusedError(f"{host} is not on the internet ({', '.join(addresses)})")
        error: OSError | None = None
        for address in public:
            try:
                return await asyncio.open_connection(address, port)
            except OSError as failure:
                error = failure
        raise error or OSError(f"{host} has no address")


async def _carry(connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Both ways, until the outer side has said everything."""

    async def outward() -> None:
        while piece := await connection.read():
            writer.write(piece)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()

    sending = asyncio.ensure_future(outward())
    try:
        while piece := await reader.read(PIECE_BYTES):
            await connection.write(piece)
    finally:
        sending.cancel()
