"""The way to the network for a sandbox whose task asked for one: an HTTP proxy at this end of its channel.

The sandbox has no network. What a program inside sends to the proxy's port arrives here, and here it is decided which
host may be reached: names of the allow-list or, for `public`, every name; and never an address of this machine, of the
local network or of a cloud's metadata service, whatever a name resolves to. Only HTTP and HTTPS pass (RFC 9110 section
9.3.6 CONNECT, and requests with an absolute target), to their own ports; every attempt is logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import urlsplit

from envs.sandbox.base import SandboxSpec
from envs.sandbox.channel import Connection, Serve

MAX_HEADER_BYTES = 64 * 1024
CONNECT_S = 20.0
LAST_S = 5.0
"""A peer outside may take so long for the last bytes that are sent to it."""
PIECE_BYTES = 64 * 1024
PORTS = {"http": 80, "https": 443}
MAX_LOOKUPS = 4
"""Of names, at once: each one holds a thread."""
_UNICAST = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

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

    way = reach or PublicReach()

    async def serve(connection: Connection) -> None:
        await _serve(connection, spec, way)

    return serve


async def _serve(connection: Connection, spec: SandboxSpec, reach: Reach) -> None:
    header, rest = await _read_header(connection)
    try:
        method, host, port, first = _request(header, rest)
        if not allowed(host, spec):
            raise RefusedError(f"the task's allowed hosts do not include {host}")
        if port not in PORTS.values():
            raise RefusedError(f"port {port} is not open to this task: only 80 (HTTP) and 443 (HTTPS) are")
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
        if writer.transport.get_write_buffer_size() > 0:
            asyncio.get_running_loop().call_later(LAST_S, writer.transport.abort)


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
    >>> _request(b"GET http://example.org?b HTTP/1.1", b"")[3]
    b'GET /?b HTTP/1.1\\r\\nHost: example.org\\r\\nConnection: close\\r\\n\\r\\n'
    >>> _request(b"GET http://[x HTTP/1.1", b"")
    Traceback (most recent call last):
    envs.sandbox.proxy.RefusedError: only http:// requests and CONNECT pass
    >>> _request(b"CONNECT other.org\\0.example.org:443 HTTP/1.1", b"")
    Traceback (most recent call last):
    envs.sandbox.proxy.RefusedError: only http:// requests and CONNECT pass
    """
    lines = header.decode("latin-1").split("\r\n")
    method, _, target = lines[0].partition(" ")
    target, _, version = target.rpartition(" ")
    only = RefusedError("only http:// requests and CONNECT pass")
    try:
        parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise only from error
    # A look-up would end at a NUL, and find another name than the one that is checked.
    if not host or not host.isprintable() or (method != "CONNECT" and parts.scheme != "http"):
        raise only
    if method == "CONNECT":
        return method, host, PORTS["https"] if port is None else port, rest
    # One request a connection: the next one could be for another host. The host that was checked is the one named.
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    kept = [line for line in lines[1:] if not line.lower().startswith(("proxy-", "connection:", "host:"))]
    named = parts.netloc.rpartition("@")[2]
    sent = [f"{method} {path} {version}", f"Host: {named}", "Connection: close", *kept, "", ""]
    return method, host, PORTS["http"] if port is None else port, "\r\n".join(sent).encode("latin-1") + rest


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

    An address of version 6 that stands for one of version 4 is as public as that one (NAT64, RFC 6052; 6to4, RFC 3056;
    Teredo, RFC 4380, is never public); what is not global unicast (site-local, IPv4-compatible) is not.

    >>> [is_public(address) for address in ("2606:4700::1111", "64:ff9b::1.1.1.1", "2002:101:101::1")]
    [True, True, True]
    >>> [is_public(address) for address in ("64:ff9b::10.0.0.1", "2002:a00:1::1", "2001:0:a00:1::f5ff:fffe")]
    [False, False, False]
    >>> [is_public(address) for address in ("::127.0.0.1", "::1.1.1.1", "fec0::1", "ff0e::1")]
    [False, False, False, False]
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is None and (found not in _UNICAST or found.teredo is not None):
            return False
        found = inner or found
    return found.is_global and not found.is_multicast


class PublicReach:
    """Connects to one of a host's public addresses: the very address that was checked."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    async def __call__(self, host: str, port: int) -> Streams:
        """Read and write it.

        Raises:
            RefusedError: the host has no public address.
            OSError: it cannot be found or reached, or not in time.
        """
        async with asyncio.timeout(CONNECT_S):
            addresses = await self._addresses(host, port)
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

    async def _addresses(self, host: str, port: int) -> list[str]:
        # Not in the loop's own threads, which others wait for: what runs inside chooses the names, and slow ones too.
        # These threads end when this object is forgotten.
        if self._threads is None:
            self._threads = ThreadPoolExecutor(MAX_LOOKUPS, thread_name_prefix="names")
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._threads, look_up)
        except ValueError as error:  # what IDNA cannot encode
            raise RefusedError(f"{host!r} is not the name of a host") from error
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))


async def _carry(connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Both ways, until the outer side has said everything, or the program inside is gone."""

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
        await asyncio.wait([sending])
        if not sending.cancelled():
            sending.exception()  # seen: the other way has failed too, or ended in good order
