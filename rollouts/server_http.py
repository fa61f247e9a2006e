"""One request to one server: its answer, or what kind of failure it was.

Three kinds. A fault of the server (it is gone, hangs, is full) may pass, or pass elsewhere: `ServerFault`. A refusal of
the request will be the same every time, and everywhere unless the server is another one than it should be:
`RefusedError`. Any other answer that is none (no JSON, no such address, no right to ask) is a server's that is not what
it was when it was checked: `EngineError`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from json import JSONDecodeError
from typing import Any, Literal

import httpx

from rollouts.engine import EngineError

_READ = 10_000
_SHOWN = 100
_MARKUP = re.compile(r"<(script|style)\b.*?(</\1>|$)|<!--.*?(-->|$)|<[^>]*(>|$)", re.DOTALL | re.IGNORECASE)

FaultKind = Literal["gone", "hung", "busy", "failed"]


class ServerFault(Exception):
    """A server did not answer a request that was right.

    kind: `gone`: nothing listens there any more; `hung`: the time is over; `busy`: it asks to be left alone for a
        while; `failed`: anything else.
    """

    def __init__(self, reason: str, kind: FaultKind = "failed") -> None:
        super().__init__(reason)
        self.kind = kind


class KeyRefusedError(EngineError):
    """The server wants another API key, or one at all."""


class RefusedError(EngineError):
    """The server says that this request is wrong."""


async def call(
    client: httpx.AsyncClient,
    address: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    timeout_s: float = 60.0,
) -> dict[str, Any]:
    """The JSON that the server answers; POST where there is a body, else GET. Cancelling it closes the connection, on
    which vLLM takes the request out of its batch.

    Raises:
        ServerFault: no connection, no answer in time, 5xx, 429.
        KeyRefusedError: 401.
        RefusedError: 400, 413, 422.
        EngineError: any other status than 200, with what the server says; or no JSON.
    """
    response = await tell(client, address, path, body, timeout_s=timeout_s)
    try:
        answer = response.json()
    except (JSONDecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"{path} answered no JSON: {_start(response.text)}") from error
    if not isinstance(answer, dict):
        raise EngineError(f"{path} answered no JSON object: {_start(response.text)}")
    return answer


async def tell(
    client: httpx.AsyncClient, address: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float
) -> httpx.Response:
    """As `call`, where the answer may be anything."""
    response = await _send(client, address, path, body, timeout_s)
    if response.status_code == 429 or response.status_code >= 500:
        raise ServerFault(_status(path, response), "busy" if response.status_code in (429, 503) else "failed")
    if response.status_code == 401:
        raise KeyRefusedError(f"{_status(path, response)}; set VLLM_API_KEY to the key that it was started with")
    if response.status_code != 200:
        raise (RefusedError if response.status_code in (400, 413, 422) else EngineError)(_status(path, response))
    return response


async def check_health(client: httpx.AsyncClient, address: str, *, timeout_s: float) -> None:
    """Raises `ServerFault` where `/health` does not say that all is well."""
    response = await _send(client, address, "/health", None, timeout_s)
    if response.status_code != 200:
        raise ServerFault(_status("/health", response))


async def _send(
    client: httpx.AsyncClient, address: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
) -> httpx.Response:
    method = "GET" if body is None else "POST"
    clock = asyncio.timeout(timeout_s)
    try:
        async with clock:
            return await client.request(method, address + path, json=body)
    except httpx.ConnectError as error:
        raise ServerFault(f"no connection ({error})", "gone") from error
    except httpx.InvalidURL as error:
        raise ValueError(f"server {address}: this is no address ({error}); write http://HOST:PORT") from error
    except httpx.RequestError as error:
        raise ServerFault(f"{path}: the connection broke ({error!r})") from error
    except TimeoutError as error:
        if not clock.expired():
            raise
        raise ServerFault(f"{path}: no answer within {timeout_s:g} s", "hung") from error


def _status(path: str, response: httpx.Response) -> str:
    """What the server says, in one line."""
    try:
        said = " ".join(str(response.json()["error"]["message"]).split())[:500]
    except (ValueError, KeyError, TypeError):
        said = _start(response.text)
    return f"{path} answered {response.status_code}: {said or 'nothing'}"


def _start(text: str) -> str:
    """The beginning of what may be a page of HTML, its words only."""
    text = text.lstrip()[:_READ]
    words = " ".join((_MARKUP.sub(" ", text) if text.startswith("<") else text).split())
    return words if len(words) <= _SHOWN else f"{words[:_SHOWN]} …"


def server_address(server: str) -> str:
    """The base address of a server that a person named.

    Raises:
        ValueError: it is none.

    >>> server_address("http://127.0.0.1:8000/v1/")
    'http://127.0.0.1:8000'
    """
    try:
        url = httpx.URL(server)
    except httpx.InvalidURL as error:
        raise ValueError(f"engine.servers: {server!r} is no address ({error}); write http://HOST:PORT") from error
    if url.scheme not in ("http", "https") or not url.host or url.port not in (None, *range(1, 1 << 16)):
        raise ValueError(f"engine.servers: {server!r} is no address; write http://HOST:PORT")
    return str(url).rstrip("/").removesuffix("/v1")
