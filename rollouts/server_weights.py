"""How do all servers get new weights at once, while requests run on them? The order of things, through vLLM's
weight-transfer interface (`VLLM_SERVER_DEV_MODE=1`).

    pause (running requests keep their tokens) → begin → [the weights] → drop every cached prefix, those of running
    requests too → the new version → resume

A request in flight goes on after it, from what it has, and vLLM tells which of its tokens came from which version.
Until the weights begin to move nothing has changed: a failure resumes all servers with the old ones. After that each
server is for itself: one that fails has weights that nobody may sample from, and stays out until it gets whole ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from rollouts.engine import EngineError
from rollouts.server_command import TCP_BACKEND
from rollouts.server_http import ServerFault, call, tell
from rollouts.weight_transfer import WeightChannel, update_info
from rollouts.weight_transfer_tcp import TcpChannel

if TYPE_CHECKING:
    from torch import Tensor

    from rollouts.engine_adapter import AdapterWeights

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_RESUME_S = 10.0
HOW_TO_START = "start it with python -m scripts.serve MODEL --takes-weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What a server's workers say of themselves (`weight_transfer_worker`).

    workers: how many take the weights, each all of them.
    lora_rank: of the largest adapter that there is room for; 0 = it takes none.
    """

    workers: int
    backend: str
    dtype: str
    lora_rank: int


@dataclass(slots=True, kw_only=True)
class SyncOutcome:
    """What became of each server. Where `is_changed` is False, all of them have what they had before.

    failed: why, by address.
    gone: nobody listened there when it began.
    """

    asked: int
    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)
    is_changed: bool = False
    sent_bytes: int = 0
    paused_s: float = 0.0

    def __str__(self) -> str:
        """What went wrong, in one line."""
        reasons = self.gone | self.failed
        said = "; ".join(f"server {server}: {reason}" for server, reason in reasons.items())
        return f"{len(reasons)} of {self.asked} servers did not take the weights: {said}"


async def worker_facts(client: httpx.AsyncClient, server: str, *, timeout_s: float) -> WorkerFacts:
    """Ask a server's workers what they are. It also ends an update that was left halfway.

    Raises:
        ServerFault: it does not answer.
        EngineError: it takes no weights.
    """
    asked = {"method": "begin_policy_sync"}
    try:
        results = (await call(client, server, "/collective_rpc", asked, timeout_s=timeout_s))["results"]
        first = results[0]
        return WorkerFacts(
            workers=len(results),
            backend=first["backend"],
            dtype=first["dtype"],
            lora_rank=first["lora_rank"],
        )
    except (EngineError, KeyError, TypeError, IndexError) as error:
        raise EngineError(f"it takes no weights ({error}); {HOW_TO_START}") from error
    except ServerFault as fault:
        if fault.kind == "failed":
            raise ServerFault(f"{fault}; does it take weights? If not, {HOW_TO_START}", "failed") from fault
        raise


class WeightSync:
    """One sync of some servers. Its methods run on the loop of the servers.

    Args:
        timeout_s: for all of it. What has not ended by then has failed.
    """

    def __init__(self, client: httpx.AsyncClient, servers: Sequence[str], *, timeout_s: float) -> None:
        self._client = client
        self._clock = asyncio.get_running_loop().time
        self._started_s = self._clock()
        self._timeout_s = timeout_s
        self._left = list(servers)
        self.outcome = SyncOutcome(asked=len(servers))

    async def send_weights(self, tensors: Mapping[str, Tensor], version: str) -> None:
        """Send full weights and call them `version`; `outcome` says what became of it, whatever is raised."""
        try:
            facts = await self._pause()
            if self._left and not self.outcome.failed:
                await self._send(facts, tensors, version)
        finally:
            await self._leave_no_server_paused()

    async def send_adapter(self, adapter: AdapterWeights, name: str, version: str, *, takes_a_place: bool) -> None:
        """Send a LoRA adapter's tensors alone. `takes_a_place`: the servers served one under `name` before."""
        try:
            facts = await self._pause()
            if self._left and not self.outcome.failed:
                await self._send_adapter(facts, adapter, name, version, takes_a_place)
        finally:
            await self._leave_no_server_paused()

    async def _pause(self) -> dict[str, WorkerFacts]:
        """Stop all of them, and ask what they are; nothing has changed yet."""
        await self._to_all(self._hold)
        facts = await self._to_all(lambda server: worker_facts(self._client, server, timeout_s=self._left_s()))
        return {server: facts[server] for server in self._left}

    async def _hold(self, server: str) -> None:
        try:
            await self._call(server, "/pause?mode=keep&clear_cache=false")
        except ServerFault as fault:
            if fault.kind != "gone":
                raise
            self.outcome.gone[server] = str(fault)
            self._left.remove(server)

    async def _send(self, facts: Mapping[str, WorkerFacts], tensors: Mapping[str, Tensor], version: str) -> None:
        dtype = _the_same({server: fact.dtype for server, fact in facts.items()})
        channel = open_channel(facts, timeout_s=self._left_s())
        info = update_info(tensors, dtype)

        async def take(server: str) -> None:
            await self._call(server, "/update_weight_version", new_version=unfinished(version))
            await self._call(server, "/init_weight_transfer_engine", init_info=channel.init_info(server))
            await self._call(server, "/start_weight_update")
            await self._call(server, "/update_weights", update_info=info)
            await self._call(server, "/finish_weight_update")
            await self._release(server, version)

        self.outcome.is_changed = True
        try:
            await self._together(channel, take, channel.send(tensors, dtype))
        finally:
            await channel.close()

    async def _send_adapter(
        self, facts: Mapping[str, WorkerFacts], adapter: AdapterWeights, name: str, version: str, takes_a_place: bool
    ) -> None:
        """The workers write it to a folder of their own machine, from which vLLM loads it as any other adapter."""
        dtype = _the_same({server: fact.dtype for server, fact in facts.items()})
        channel = TcpChannel({server: fact.workers for server, fact in facts.items()}, timeout_s=self._left_s())
        told = {"info": update_info(adapter.tensors, dtype), "config": dict(adapter.config)}

        async def take(server: str) -> None:
            await self._call(server, "/update_weight_version", new_version=unfinished(version))
            asked = told | {"trainer": channel.init_info(server)}
            answer = await self._call(server, "/collective_rpc", method="take_policy_adapter", kwargs=asked)
            put = answer["results"][0]
            if not put["is_loaded"]:
                load = {"lora_name": name, "lora_path": put["path"], "load_inplace": takes_a_place}
                await tell(self._client, server, "/v1/load_lora_adapter", load, timeout_s=self._left_s())
            await self._release(server, version)

        self.outcome.is_changed = True
        try:
            await self._together(channel, take, channel.send(adapter.tensors, dtype))
        finally:
            await channel.close()

    async def _together(
        self, channel: WeightChannel, take: Callable[[str], Awaitable[None]], sending: Awaitable[int]
    ) -> None:
        """Send, while every server takes. Each is for itself, so that one that hangs holds up none of the others."""
        send = asyncio.create_task(self._in_time(sending, "sending the weights"))
        took = asyncio.create_task(self._to_all(take, on_failure=channel.leave))
        try:
            await asyncio.wait((send, took), return_when=asyncio.FIRST_EXCEPTION)
            if send.done() and isinstance(send.exception(), EngineError):
                # Servers that failed have said why; those that wait for us hear nothing more.
                await asyncio.wait((took,), timeout=1.0)
                took.cancel()
                await asyncio.wait((took,))
                self._fail(dict.fromkeys(self._left, str(send.exception())))
                return
            await took
            if self.outcome.done:
                self.outcome.sent_bytes = await send
        finally:
            for task in (send, took):
                task.cancel()
            await asyncio.wait((send, took))

    async def _release(self, server: str, version: str) -> None:
        """Let it sample on, from the new weights alone."""
        if not (await self._call(server, "/reset_prefix_cache?reset_running_requests=true")).get("success"):
            raise EngineError("its cached prefixes were not dropped")
        await self._call(server, "/update_weight_version", new_version=version)
        await self._call(server, "/resume")
        self._left.remove(server)
        self.outcome.done.append(server)
        self.outcome.paused_s = self._clock() - self._started_s

    async def _leave_no_server_paused(self) -> None:
        """Those that still have their old weights whole go on with them. Half of the new ones are not sampled from, and
        would end the server: it stays paused until it has all of them."""
        if self.outcome.is_changed:
            self._fail(dict.fromkeys(self._left, "the sync was given up"))
        else:
            await asyncio.gather(*(self._resume(server) for server in [*self._left, *self.outcome.failed]))

    async def _resume(self, server: str) -> None:
        try:
            await call(self._client, server, "/resume", {}, timeout_s=_RESUME_S)
        except (ServerFault, EngineError) as error:
            _LOG.warning("server %s was not resumed after a sync that failed: %s", server, error)

    # How they are taken.

    async def _to_all(
        self, act: Callable[[str], Awaitable[T]], *, on_failure: Callable[[str], None] = lambda server: None
    ) -> dict[str, T]:
        """What the servers that are left answer. Those that fail are left out from then on, with what they said."""

        async def one(server: str) -> T | None:
            try:
                return await act(server)
            except (ServerFault, EngineError) as error:
                self._fail({server: str(error)})
                on_failure(server)
                return None

        servers = list(self._left)
        answers = await asyncio.gather(*(one(server) for server in servers))
        return {server: answer for server, answer in zip(servers, answers, strict=True) if answer is not None}

    def _fail(self, reasons: Mapping[str, str]) -> None:
        for server, reason in reasons.items():
            self.outcome.failed[server] = reason
            if server in self._left:
                self._left.remove(server)

    async def _call(self, server: str, path: str, **body: Any) -> dict[str, Any]:
        return await call(self._client, server, path, body, timeout_s=self._left_s())

    async def _in_time(self, work: Awaitable[T], what: str) -> T:
        try:
            async with asyncio.timeout(self._left_s()):
                return await work
        except TimeoutError as error:
            raise EngineError(f"{what} did not end within {self._timeout_s:g} s") from error

    def _left_s(self) -> float:
        return max(round(self._started_s + self._timeout_s - self._clock(), 2), 0.01)


async def prepare_for_weights(client: httpx.AsyncClient, server: str, *, adapter_rank: int = 0) -> None:
    """See that a server takes weights, or adapters of a rank, and let it go on where a run that was killed left it
    paused.

    Raises:
        ValueError: it does not answer, or takes none.
    """
    try:
        facts = await worker_facts(client, server, timeout_s=_RESUME_S)
        if facts.lora_rank < adapter_rank:
            raise EngineError(
                f"it has room for adapters up to rank {facts.lora_rank}, {adapter_rank} is needed; {HOW_TO_START} "
                f"--adapter-rank {adapter_rank}"
            )
        await call(client, server, "/resume", {}, timeout_s=_RESUME_S)
    except (EngineError, ServerFault) as error:
        raise ValueError(f"server {server}: {error}") from error


def unfinished(version: str) -> str:
    """What weights are called that are not all there yet: no number, so that no token can count as sampled from them.

    >>> unfinished("4"), is_unfinished(unfinished("4")), is_unfinished("4")
    ('unfinished-4', True, False)
    """
    return f"unfinished-{version}"


def is_unfinished(version: str) -> bool:
    return version.startswith("unfinished-")


def open_channel(facts: Mapping[str, WorkerFacts], *, timeout_s: float) -> WeightChannel:
    """The channel that the servers were started for.

    Raises:
        EngineError: they were started for different ones, or for one that we do not speak.
    """
    backend = _the_same({server: fact.backend for server, fact in facts.items()})
    if backend != TCP_BACKEND:
        raise EngineError(f"they take weights over {backend!r}, which nobody here sends; {HOW_TO_START}")
    return TcpChannel({server: fact.workers for server, fact in facts.items()}, timeout_s=timeout_s)


def _the_same(values: Mapping[str, str]) -> str:
    different = set(values.values())
    if len(different) > 1:
        raise EngineError(f"the servers were started in different ways: {dict(values)}; start all of them alike")
    return different.pop()
