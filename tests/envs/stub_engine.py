"""A stand-in for the Docker daemon: the few calls of the Engine API that images need, with answers that a test names.

It is for what a real daemon does not do on demand (a full disk, a registry that refuses) and for counting.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

Answer = tuple[int, str]
"""A status and a text: with status 200 an error in the middle of an answer, with 0 an answer that breaks off after it,
else the whole answer."""


class StubEngine:
    """Runs on a port of its own: `with StubEngine() as engine: docker.APIClient(engine.url)`.

    `images` holds what can be inspected, by name. `answers` are given in turn to pulls, imports and builds; when there
    are none left, they work. `calls` counts them by kind. `slow_s` is how long each takes.
    """

    def __init__(self, *answers: Answer, slow_s: float = 0.0, images: tuple[str, ...] = ()) -> None:
        self.answers = list(answers)
        self.slow_s = slow_s
        self.images = {name: _inspected(name) for name in images}
        self.calls: Counter[str] = Counter()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.engine = self  # pyright: ignore[reportAttributeAccessIssue]
        self.url = f"tcp://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def make(self, kind: str, name: str) -> Answer | None:
        """Count a pull, import or build; the image is there afterwards, unless a failure is its answer."""
        self.calls[kind] += 1
        time.sleep(self.slow_s)
        if self.answers:
            return self.answers.pop(0)
        self.images[name] = _inspected(name)
        return None


def _inspected(name: str) -> dict[str, Any]:
    return {"Id": f"sha256:id-of-{name}", "Os": "linux", "Architecture": "amd64", "Config": {}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path == "/version":
            self._say(200, {"ApiVersion": "1.41"})
            return
        name = path.split("/images/")[1].removesuffix("/json")
        found = self._engine.images.get(name)
        self._say(*((200, found) if found else (404, {"message": f"No such image: {name}"})))

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        self._read_body()
        if url.path.endswith("/build"):
            failure = self._engine.make("build", query["t"])
        elif "fromImage" in query:
            separator = "@" if query["tag"].startswith("sha256:") else ":"
            failure = self._engine.make("pull", f"{query['fromImage']}{separator}{query['tag']}")
        else:
            failure = self._engine.make("import", f"{query['repo']}:{query['tag']}")
        if failure is None:
            self._say(200, {"status": "done"})
        elif failure[0] == 200:
            self._say(200, {"stream": "Step 1/2 : FROM x"}, {"error": failure[1], "errorDetail": {}})
        elif failure[0] == 0:  # as if the daemon had been killed
            if failure[1]:
                self.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n20\r\n" + failure[1].encode())
            self.close_connection = True
        else:
            self._say(failure[0], {"message": failure[1]})

    @property
    def _engine(self) -> StubEngine:
        return self.server.engine  # pyright: ignore[reportAttributeAccessIssue]

    def _read_body(self) -> None:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline(), 16):
                self.rfile.read(size + 2)
            self.rfile.readline()
        else:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _say(self, status: int, *lines: dict[str, Any]) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if status != 200:  # the daemon answers so too: what works comes in pieces, what is refused does not
            body = json.dumps(lines[0]).encode()
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in lines:
            chunk = json.dumps(line).encode() + b"\r\n"
            self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class calls it so
        pass
