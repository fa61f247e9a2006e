"""A small image registry on this machine, which a Docker daemon on it trusts, that counts and can refuse.

It holds one image of one layer, for amd64. `refusals` are the statuses that the next pulls get, or all of them get the
first if `for_ever`.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
CODES = {401: "UNAUTHORIZED", 403: "DENIED", 404: "MANIFEST_UNKNOWN", 429: "TOOMANYREQUESTS", 503: "UNAVAILABLE"}


class StubRegistry:
    """`with StubRegistry() as registry:` the daemon can pull `registry.image`; `registry.pulls` counts."""

    def __init__(self, *refusals: int, for_ever: bool = False) -> None:
        self.refusals = list(refusals)
        self.for_ever = for_ever
        self.pulls = 0
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as archive:
            entry = tarfile.TarInfo("mark")
            entry.size = 36
            archive.addfile(entry, io.BytesIO(str(uuid.uuid4()).encode()))
        root = {"type": "layers", "diff_ids": [_digest(layer.getvalue())]}
        config = json.dumps({"os": "linux", "architecture": "amd64", "config": {}, "rootfs": root}).encode()
        self.blobs = {_digest(blob): blob for blob in (config, layer.getvalue())}
        self.manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST_TYPE,
                "config": _described("application/vnd.docker.container.image.v1+json", config),
                "layers": [_described("application/vnd.docker.image.rootfs.diff.tar", layer.getvalue())],
            }
        ).encode()
        self.digest = _digest(self.manifest)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.registry = self  # pyright: ignore[reportAttributeAccessIssue]
        self.repository = f"localhost:{self._server.server_port}/agentgrad-test"
        self.image = f"{self.repository}:1"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def refusal(self, method: str) -> int | None:
        """The daemon asks by HEAD, then, when that was refused, by GET for the reason."""
        if not self.refusals:
            return None
        if method == "HEAD" or self.for_ever:
            return self.refusals[0]
        return self.refusals.pop(0)


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _described(kind: str, content: bytes) -> dict[str, Any]:
    return {"mediaType": kind, "size": len(content), "digest": _digest(content)}


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        registry: StubRegistry = self.server.registry  # pyright: ignore[reportAttributeAccessIssue]
        if "/manifests/" in self.path:
            refused = registry.refusal(self.command) if self.path.endswith("/1") else None
            registry.pulls += self.command == "HEAD"
            if refused is None:
                self._say(200, registry.manifest, MANIFEST_TYPE, {"Docker-Content-Digest": registry.digest})
            else:
                error = {"errors": [{"code": CODES[refused], "message": "as the test wants it"}]}
                self._say(refused, json.dumps(error).encode(), "application/json")
        elif "/blobs/" in self.path:
            self._say(200, registry.blobs[self.path.rsplit("/", 1)[1]], "application/octet-stream")
        else:
            self._say(200, b"{}", "application/json", {"Docker-Distribution-Api-Version": "registry/2.0"})

    do_HEAD = do_GET

    def _say(self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class calls it so
        pass
