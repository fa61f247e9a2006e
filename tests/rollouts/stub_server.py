"""A stub of a vLLM server: real HTTP on a real port, a made-up model that is a function of the prompt and the seed.

It speaks the few addresses that `ServerEngine` uses, and fails on demand: it dies, hangs, drops connections, answers
any status. Its answers have the shape of vLLM 0.32's; tests/integration/test_vllm_servers.py asks the real one.
"""

from __future__ import annotations

import json
import random
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import exp, log
from pathlib import Path
from typing import Any

import torch

from rollouts.weight_transfer_tcp import receive_tensors

VOCAB_SIZE = 64
Fault = int | str
"""A status to answer with, or `drop` (the connection), `hang`, `abort` or `garbage`."""


def save_stub_model(folder: Path) -> Path:
    """What the engine reads of a model: its configuration, and weights for `load_weights`."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    LlamaConfig(vocab_size=VOCAB_SIZE, tie_word_embeddings=True).save_pretrained(folder)
    save_file({"model.embed_tokens.weight": torch.zeros(VOCAB_SIZE, 2)}, folder / "model.safetensors")
    return folder


def distribution(context: Sequence[int], temperature: float, bias: int = 0) -> list[float]:
    """Logprobs `[VOCAB_SIZE]` of the next token: the made-up model. Another `bias` is another model."""
    logits = [((sum(context[-3:]) * 31 + token * 17 + bias) % 23) / 4 / (temperature or 1.0) for token in range(64)]
    total = log(sum(exp(value) for value in logits))
    return [value - total for value in logits]


def sample(prompt_ids: Sequence[int], sampling: Mapping[str, Any], bias: int = 0) -> tuple[list[int], list[float], str]:
    """Ids, logprobs and the finish reason."""
    ids: list[int] = []
    logprobs: list[float] = []
    draws = random.Random(f"{sampling.get('seed')}/{list(prompt_ids)}")
    while len(ids) < sampling["max_tokens"]:
        row = distribution([*prompt_ids, *ids], sampling.get("temperature", 1.0), bias)
        token = draws.choices(range(VOCAB_SIZE), [exp(value) for value in row])[0]
        ids.append(token)
        logprobs.append(row[token])
        if token in sampling.get("stop_token_ids", ()):
            return ids, logprobs, "stop"
    return ids, logprobs, "length"


class StubServer:
    """One server. Everything about it may be changed while it runs.

    faults: what the next requests for tokens get instead of an answer, in order.
    is_held: requests for tokens wait until it is False.
    is_stuck: probes (one token, seed 0) wait too, until it is False. While it is paused everything waits.
    page: HTML that it answers to everything, with status `page_status`, as a server of another kind.
    change: applied to every answer, to make it wrong.
    """

    def __init__(
        self,
        *,
        name: str = "models/stub",
        root: str | None = None,
        max_model_len: int = 512,
        scale_out: bool = True,
        token_ids: bool = True,
        processed: bool = True,
        dev_mode: bool = True,
        adapters: Sequence[str] = (),
        version: str = "default",
        vocab_size: int = VOCAB_SIZE,
        bias: int = 0,
        api_key: str | None = None,
    ) -> None:
        self.root = name if root is None else root
        self.name, self.max_model_len, self.adapters = name, max_model_len, tuple(adapters)
        self.scale_out, self.token_ids, self.processed, self.dev_mode = scale_out, token_ids, processed, dev_mode
        self.version, self.vocab_size, self.bias = version, vocab_size, bias
        self.start_version, self.api_key, self.start_adapters = version, api_key, self.adapters
        self.page, self.page_status = "", 200
        self.faults: deque[Fault] = deque()
        self.health: Fault = 200
        self.is_held = self.is_stuck = False
        self.change: Callable[[dict[str, Any]], None] = lambda answer: None
        self.asked: list[Mapping[str, Any]] = []
        """The bodies of all requests for tokens, probes left out."""
        self.aborted = 0
        """Requests whose client went away before the answer."""
        self.running = 0
        self.posts: list[str] = []
        self.sync_faults: dict[str, Fault] = {}
        """What a step of a sync gets instead of its answer, by the address of the step; `die` ends the server."""
        self.is_paused = False
        self.caches_dropped = 0
        self.keeps_caches = False
        """A reset of the prefix cache is refused."""
        self.dtype = "float32"
        self.lora_rank = 0
        self.adapter_config: dict[str, Any] = {}
        self.takes = True
        """Whether it was started to take weights."""
        self.weights: dict[str, torch.Tensor] = {}
        """What the last sync brought."""
        self.stops_after = 1 << 30
        """So many tensors are read in a sync; then it stands still."""
        self._trainer: dict[str, Any] = {}
        self._death: threading.Thread | None = None
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self.port = 0
        self.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, on the port that it had before; its weights are those it was made with."""
        if self._death is not None:
            self._death.join()
        self.version, self._dead, self.is_paused = self.start_version, False, False
        self.adapters = self.start_adapters
        self._server = _Listener(("127.0.0.1", self.port), partial(_Handler, self))
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def kill(self) -> None:
        """Die as a killed process does: nobody listens, and every connection breaks."""
        self._dead = True
        self._server.shutdown()
        self._server.server_close()
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def die(self) -> None:
        """`kill`, asked for by one of its own requests."""
        self._death = threading.Thread(target=self.kill)
        self._death.start()

    def close(self) -> None:
        if not self._dead:
            self.kill()

    # What the handler calls.

    def enter(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.add(connection)

    def leave(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)

    @property
    def connections(self) -> int:
        with self._lock:
            return len(self._connections)

    def count(self, change: int) -> None:
        with self._lock:
            self.running += change

    def is_dead(self) -> bool:
        return self._dead

    def next_fault(self) -> Fault | None:
        with self._lock:
            return self.faults.popleft() if self.faults else None

    def models(self) -> dict[str, Any]:
        base = {"id": self.name, "root": self.root, "parent": None, "max_model_len": self.max_model_len}
        return {"data": [base, *({"id": a, "root": f"/x/{a}", "parent": self.name} for a in self.adapters)]}

    def answer(self, path: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        tokens_path = path == "/inference/v1/generate"
        prompt = body["token_ids"] if tokens_path else body["prompt"]
        sampling = body["sampling_params"] if tokens_path else body
        if (largest := max([*prompt, *(sampling.get("logprob_token_ids") or ())])) >= self.vocab_size:
            return _error(400, f"Token id {largest} is out of vocabulary")
        if body.get("model") not in (None, self.name, *self.adapters):
            return _error(404, f"The model `{body['model']}` does not exist.")
        ids, logprobs, reason = sample(prompt, sampling, self.bias)
        if not self.processed:
            logprobs = [distribution([*prompt, *ids[:place]], 1.0, self.bias)[token] for place, token in enumerate(ids)]
        at = distribution(prompt, sampling.get("temperature", 1.0) if self.processed else 1.0, self.bias)
        wanted = sampling.get("logprob_token_ids") or sorted(range(64), key=at.__getitem__)[-sampling["logprobs"] :]
        top = {ids[0]: at[ids[0]]} | {token: at[token % VOCAB_SIZE] for token in wanted if sampling["logprobs"]}
        rows = [None, *({str(token): {"logprob": distribution(prompt[:i], 1.0, self.bias)[token]}}
                        for i, token in enumerate(prompt) if i)]  # fmt: skip
        if tokens_path:
            content = [
                {"token_id": token, "logprob": value, "top_logprobs": []}
                for token, value in zip(ids, logprobs, strict=True)
            ]
            shown = list(top)[: max(sampling["logprobs"], 1)] if "logprob_token_ids" in sampling else list(top)
            content[0]["top_logprobs"] = [{"token_id": token, "logprob": top[token]} for token in shown]
            spans = [{"version": self.version, "start": 0, "end": len(ids)}]
            choice = {"token_ids": ids, "finish_reason": reason, "logprobs": {"content": content}} | {
                "weight_versions": spans
            }
            told = {"prompt_logprobs": rows if "prompt_logprobs" in sampling else None}
        else:
            names = [f"token_id:{token}" for token in ids]
            tops = [{f"token_id:{token}": value for token, value in top.items()}]
            choice = {
                "token_ids": ids if self.token_ids else None,
                "finish_reason": reason,
                "logprobs": {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops},
                "prompt_logprobs": rows if "prompt_logprobs" in sampling else None,
            }
            told = {}
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": len(prompt) // 2}}
        answer = {"choices": [choice], "usage": usage, **told}
        self.change(answer)
        return 200, answer

    def dev(self, path: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        if not self.dev_mode:
            return _error(404, "Not Found")
        match path.partition("?")[0]:
            case "/pause" | "/resume":
                self.is_paused = path.startswith("/pause")
            case "/collective_rpc" if body["method"] == "take_policy_adapter":
                self._trainer = body["kwargs"]["trainer"]
                self.weights, self.adapter_config = {}, body["kwargs"]["config"]
                status, said = self._take(body["kwargs"]["info"])
                put = {"path": "/tmp/adapter", "is_loaded": bool(self.adapters)}
                return (status, {"results": [put]}) if status == 200 else (status, said)
            case "/collective_rpc":
                return self._facts()
            case "/v1/load_lora_adapter":
                self.adapters = (body["lora_name"],)
            case "/init_weight_transfer_engine":
                self._trainer = body["init_info"]
            case "/start_weight_update":
                self.weights = {}
            case "/update_weights":
                return self._take(body["update_info"])
            case "/reset_prefix_cache":
                self.caches_dropped += not self.keeps_caches
                return 200, {"success": not self.keeps_caches}
            case "/update_weight_version":
                self.version = body["new_version"]
            case "/finish_weight_update":
                pass
            case _:
                return _error(404, "Not Found")
        return 200, {}

    def _facts(self) -> tuple[int, dict[str, Any]]:
        if not self.takes:
            return _error(500, "'CPUWorker' object has no attribute 'begin_policy_sync'")
        facts = {"backend": "agentgrad_tcp", "dtype": self.dtype, "lora_rank": self.lora_rank}
        return 200, {"results": [facts]}

    def _take(self, info: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        try:
            for name, tensor in receive_tensors(self._trainer, info):
                self.weights[name] = tensor
                if len(self.weights) == self.stops_after:
                    self._wait_for_the_end()
        except OSError as error:
            return _error(500, f"{type(error).__name__}: {error}")
        return 200, {}

    def _wait_for_the_end(self) -> None:
        while not self._dead:
            time.sleep(0.01)


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or our own `kill`."""


def _error(status: int, message: str) -> tuple[int, dict[str, Any]]:
    return status, {"error": {"message": message, "code": status}}


class _Handler(BaseHTTPRequestHandler):
    """One connection to a stub: reads requests, and answers, waits or fails as the stub was told to."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, stub: StubServer, *args: Any) -> None:
        self._stub = stub
        super().__init__(*args)  # it serves the whole connection

    def setup(self) -> None:
        super().setup()
        self._stub.enter(self.connection)

    def finish(self) -> None:
        self._stub.leave(self.connection)
        with suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None: ...  # noqa: A002

    def do_GET(self) -> None:
        if self._stub.page:
            self._send(self._stub.page_status, "text/html", self._stub.page.encode())
        elif self.path.startswith("/v1/") and not self._may():
            self._send(401, "application/json", b'{"error": "Unauthorized"}')
        elif self.path == "/health":
            self._say_or_fail(self._stub.health, 200, {})
        elif self.path == "/v1/models":
            self._say(200, self._stub.models())
        elif self.path == "/weight_info" and self._stub.dev_mode:
            self._say(200, {"weight_version": self._stub.version})
        else:
            self._say(*_error(404, "Not Found"))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._stub.posts.append(self.path)
        if self.path == "/inference/v1/generate" and not self._stub.scale_out:
            self._say(*_error(403, "start the server with --enable-scale-out"))
        elif self.path in ("/inference/v1/generate", "/v1/completions"):
            if _is_probe(body):
                self._answer_probe(body)
            else:
                self._answer_request(body)
        else:
            fault = self._stub.sync_faults.get(self.path.partition("?")[0])
            if fault == "die":
                self._stub.die()
                fault = "hang"
            status, answer = (200, {}) if fault else self._stub.dev(self.path, body)
            self._say_or_fail(fault, status, answer)

    def _answer_probe(self, body: Mapping[str, Any]) -> None:
        if self._wait(lambda: not self._stub.is_stuck and not self._stub.is_paused):
            self._say(*self._stub.answer(self.path, body))

    def _answer_request(self, body: Mapping[str, Any]) -> None:
        """What a request for tokens gets: its answer, or the next fault."""
        self._stub.asked.append(body)
        fault = self._stub.next_fault()
        self._stub.count(1)
        try:
            if not self._wait(lambda: not self._stub.is_held and not self._stub.is_paused):
                return
            status, answer = self._stub.answer(self.path, body)
            if fault == "abort":
                answer["choices"][0]["finish_reason"] = "abort"
                fault = None
            self._say_or_fail(fault, status, answer)
        finally:
            self._stub.count(-1)

    def _wait(self, is_over: Callable[[], bool]) -> bool:
        """Whether the client is still there when the wait is over."""
        while not is_over():
            readable, _, _ = select.select([self.connection], [], [], 0.01)
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                self._stub.aborted += 1
                self.close_connection = True
                return False
            if self._stub.is_dead():
                return False
        return True

    def _say_or_fail(self, fault: Fault | None, status: int, answer: Mapping[str, Any]) -> None:
        if fault == "hang":
            self._wait(self._stub.is_dead)
            self.close_connection = True
        elif fault == "drop":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif fault == "garbage":
            self._say(200, {"choices": []})
        elif isinstance(fault, int) and fault != 200:
            self._say(*_error(fault, f"the stub was told to answer {fault}"))
        else:
            self._say(status, answer)

    def _say(self, status: int, answer: Mapping[str, Any]) -> None:
        if self._stub.is_dead():
            self.close_connection = True
            return
        self._send(status, "application/json", json.dumps(answer).encode())

    def _may(self) -> bool:
        return self._stub.api_key is None or self.headers["Authorization"] == f"Bearer {self._stub.api_key}"

    def _send(self, status: int, kind: str, text: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def _is_probe(body: Mapping[str, Any]) -> bool:
    """Whether it asks for one token with seed 0: a check or a score of the engine, and no completion."""
    sampling = body.get("sampling_params", body)
    return sampling["max_tokens"] == 1 and sampling.get("seed") == 0
