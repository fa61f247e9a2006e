"""Real vLLM servers for tests: started with the command that people get, ended with all their processes."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from rollouts.server_command import serve_command

START_S = 300.0


class RealServer:
    """One server on a free port of this machine; it starts at once and takes about a minute.

    log: the file that gets its output.
    more: further arguments of vLLM's.
    """

    def __init__(
        self, model: Path, log: Path, *, max_context_tokens: int, adapter_rank: int = 0, more: Sequence[str] = ()
    ) -> None:
        self._log = log
        self._more = tuple(more)
        self._port = _free_port()
        self._command = serve_command(
            str(model),
            on_cpu=True,
            port=self._port,
            max_context_tokens=max_context_tokens,
            takes_weights=True,
            adapter_rank=adapter_rank,
        )
        self.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it, on the port that it had before."""
        # One thread each: the model is small, and a second one only waits where cores are shared.
        environment = os.environ | dict(self._command.environment) | {"OMP_NUM_THREADS": "1"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command.arguments, *self._more],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Return when it is well; raise with the end of its log when it ends or takes too long."""
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                if httpx.get(self.address + "/health", timeout=5, trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        self.kill()
        raise RuntimeError(f"the vLLM server did not start:\n{self._log.read_text(errors='replace')[-3000:]}")

    def kill(self) -> None:
        """SIGKILL, to all its processes."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def running(self) -> int:
        """How many requests it samples now, as it says itself."""
        return self._metric("vllm:num_requests_running")

    def finished(self) -> int:
        """How many requests it has answered since it started."""
        return self._metric("vllm:request_success_total")

    def _metric(self, name: str) -> int:
        lines = httpx.get(self.address + "/metrics", timeout=30, trust_env=False).text.splitlines()
        return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(name))


def _free_port() -> int:
    """Below those that the kernel gives to outgoing connections: one of them could have it before the server does."""
    for _ in range(100):
        port = random.randrange(20_000, 32_768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("none of a hundred ports is free")
