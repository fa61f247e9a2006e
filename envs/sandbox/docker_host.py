"""Where the Docker daemon is, whether it can be reached at all, and how an attached stream of it is framed.

It needs no SDK, so that the process that trains loads none.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

from envs.sandbox.base import SandboxUnavailableError

DEFAULT_HOST = "unix:///var/run/docker.sock"
CHECK_S = 10.0


def docker_host() -> str:
    return os.environ.get("DOCKER_HOST") or DEFAULT_HOST


def check_host() -> None:
    """See that something listens where the daemon should be. Blocking.

    Raises:
        SandboxUnavailableError: no daemon, no permission, or a kind of host that does not work.
    """
    host = docker_host()
    if not host.startswith(("unix://", "tcp://", "http://")) or os.environ.get("DOCKER_TLS_VERIFY"):
        raise SandboxUnavailableError(
            f"docker: {host}: only plain unix:// and tcp:// hosts work; forward another one (ssh -NL "
            "/tmp/docker.sock:/var/run/docker.sock HOST) and set DOCKER_HOST=unix:///tmp/docker.sock"
        )
    try:
        connect(host, CHECK_S).close()
    except OSError as error:
        raise SandboxUnavailableError(why_unavailable(error, host)) from error


def connect(host: str, timeout_s: float) -> socket.socket:
    """A plain connection to the daemon; `OSError` when it does not answer. Blocking."""
    if host.startswith("unix://"):
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.settimeout(timeout_s)
        try:
            connected.connect(host.removeprefix("unix://"))
        except BaseException:
            connected.close()
            raise
        return connected
    parts = urlsplit(host)
    connected = socket.create_connection((parts.hostname or "localhost", parts.port or 2375), timeout=timeout_s)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return connected


def unwrapper() -> Callable[[bytes], list[bytes]]:
    """Takes Docker's framing off an attached stream, and keeps what was written to stdout.

    Each piece has a header of 8 bytes: the stream's number (1 stdout, 2 stderr), three zeros, the length (big-endian),
    as the Docker Engine API describes under ContainerAttach.

    >>> unwrap = unwrapper()
    >>> unwrap(b"\\x01\\0\\0\\0\\0\\0\\0\\x03ab"), unwrap(b"c\\x02\\0")
    ([b'ab'], [b'c'])
    """
    header = b""
    left, kept = 0, False

    def unwrap(data: bytes) -> list[bytes]:
        nonlocal header, left, kept
        parts: list[bytes] = []
        while data:
            if left == 0:
                wanted = 8 - len(header)
                header, data = header + data[:wanted], data[wanted:]
                if len(header) < 8:
                    break
                left, kept = int.from_bytes(header[4:], "big"), header[0] == 1
                header = b""
                continue
            part, data = data[:left], data[left:]
            left -= len(part)
            if kept:
                parts.append(part)
        return parts

    return unwrap


def why_unavailable(error: BaseException, host: str) -> str:
    """One line about a connection that failed, and what to do."""
    text = f"{error} {error.__cause__} {error.__context__}"
    if "PermissionError" in text or "Permission denied" in text:
        return f"docker: no permission for {host}: add yourself to the group docker, or set DOCKER_HOST"
    return f"docker: no daemon answers at {host}: start it (systemctl start docker), or set DOCKER_HOST"
