"""The engine behind `vllm serve`: one server or many, over HTTP, token ids both ways.

Whatever becomes of the servers, `generate` returns one completion or raises: a request of a server that died is sent
to another one with the same seed, and the connection to the first is closed before. How servers are watched and chosen
is in `server_pool`, what one request goes through in `server_errand`, what is said to servers in `server_wire`, what
makes one unfit in `server_check`.

How all of them get new weights is in `server_weights`. It leaves out starting servers (`python -m scripts.serve`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from data.types import Completion, SamplingParams
from rollouts.engine import EngineError, EngineLoad, SyncReport
from rollouts.engine_adapter import AdapterWeights, check_adapter, read_adapter
from rollouts.engine_checks import check_prompt, check_scored, check_weights_fit, read_model_facts
from rollouts.engine_sleep import SleepState
from rollouts.server_check import Checked, Wanted
from rollouts.server_errand import Errand
from rollouts.server_folder import vocab_size
from rollouts.server_http import server_address
from rollouts.server_loop import LoopThread
from rollouts.server_patience import Patience
from rollouts.server_pool import ServerCounts, ServerPool
from rollouts.server_routing import Server
from rollouts.server_weights import WeightSync, is_unfinished, prepare_for_weights
from rollouts.server_wire import Reply
from rollouts.weight_transfer import PushedWeights

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_ADAPTER = "policy"
"""Under which a trainer's adapter is served."""
_START = "default"
"""vLLM's name of weights that were read from the model's folder."""


class ServerEngine:
    """An `Engine` over servers. Building one checks them all, and blocks for a second or so.

    Args:
        servers: base addresses, `http://HOST:PORT`. All must be up at the start; later they may go and come.
        model: the model's folder here, for its name and vocabulary, and to compare its weights with those of a folder
            that a server names, where that is here too.
        max_concurrent: requests that one server samples at once (`--max-num-seqs`); more wait in it.
        adapter: the name under which the servers serve the LoRA adapter to sample with.
        policy_version: of the weights that the servers started with.
        api_key: of servers that were started with `--api-key`.
        takes_weights: `load_weights` will be called: servers that take none are refused at once, and one that a run
            left paused in the middle of a sync, when it was killed, goes on.
        adapter_rank: `load_adapter` will be called, with adapters up to this rank: as `takes_weights`.

    Raises:
        ValueError: an address is none, or a server is not what is wanted; the message says how to start it.
        EngineError: a server does not answer.
    """

    def __init__(
        self,
        servers: Sequence[str],
        *,
        model: Path,
        max_context_tokens: int,
        max_concurrent: int = 64,
        adapter: str | None = None,
        policy: str = "policy",
        policy_version: int = 0,
        api_key: str | None = None,
        takes_weights: bool = False,
        adapter_rank: int = 0,
        patience: Patience | None = None,
    ) -> None:
        addresses = [server_address(server) for server in servers]
        if not addresses or len(set(addresses)) < len(addresses):
            raise ValueError(f"engine.servers is {list(servers)}: name each server once, such as http://127.0.0.1:8000")
        self._model = model
        self._wanted = Wanted(
            model=model,
            vocab_size=vocab_size(model),
            max_context_tokens=max_context_tokens,
            adapter=adapter,
        )
        self._capacity = max_concurrent
        self._policy = policy
        self._start_version = self.policy_version = policy_version
        self._loaded: str | None = None
        self._broken: str | None = None
        self._asked = 0
        self._sleep = SleepState()
        self._takes_weights = takes_weights or adapter_rank > 0
        self._adapter_rank = adapter_rank
        self._syncing = asyncio.Lock()
        self._pushed = PushedWeights()
        self._patience = patience or Patience()
        self.tokens_of_older_weights = 0
        """Sampled by a server that was behind the others; each token carries the version that it came from."""
        self._loop = LoopThread("server")
        try:
            self._pool, self._client = self._loop.wait(self._open(addresses, api_key))
        except BaseException:
            self._loop.stop()
            raise

    @property
    def max_context_tokens(self) -> int:
        return self._wanted.max_context_tokens

    @property
    def load(self) -> EngineLoad:
        """The sum over the servers that are up. Requests that wait for a server, or are on their way to one, wait where
        there is no room for them."""
        up = [server.in_flight for server in self._pool.servers if server.is_up]
        capacity = self._capacity * len(up)
        sampled = sum(min(count, self._capacity) for count in up)
        under_way = max(self._asked - sum(up), 0)
        running = min(sampled + under_way, capacity, self._asked)
        return EngineLoad(running=running, waiting=self._asked - running, capacity=capacity)

    @property
    def counts(self) -> ServerCounts:
        """How often requests were sent again and servers were lost; a copy."""
        return replace(self._pool.counts)

    async def generate(self, completion_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """See `Engine.generate`. Cancelling it closes the request, and the server stops sampling it.

        Raises:
            EngineError: there is no completion. Also when it is cancelled, as the clock of its trajectory does, and the
                servers are to blame for what it has not got: such a trajectory has no reward.
        """
        check_prompt(prompt_ids, params, max_context_tokens=self.max_context_tokens, vocab_size=self._wanted.vocab_size)
        self._sleep.check_can_sample()
        # One for all attempts, so that an attempt on another server samples the same. vLLM reads -1 as "no seed".
        seed = secrets.randbits(48) if params.seed is None else params.seed % (1 << 63)
        ids = list(prompt_ids)

        async def ask(server: Server) -> Reply:
            wire = _checked(server).wire
            body = wire.ask(ids, params, seed=seed, model=self._wanted.adapter)
            reply = wire.read(await self._pool.send(server, wire.path, body), ids, params)
            self._check_known(reply)
            return reply

        trajectory_id = completion_id.rpartition("/")[0] or completion_id
        errand = self._errand(f"completion {completion_id}", trajectory_id, ask)
        try:
            reply = await self._run(errand.run())
        except asyncio.CancelledError as cancelled:
            blame = await self._loop.run(errand.blame())
            if blame is None:
                raise
            raise EngineError(blame) from cancelled
        return self._completion(completion_id, reply)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """See `Engine.score`. Any server answers: `load_weights` has seen that they all have the same weights."""
        check_scored(token_ids, max_context_tokens=self.max_context_tokens, vocab_size=self._wanted.vocab_size)
        self._sleep.check_can_sample()
        ids = list(token_ids)

        async def ask(server: Server) -> list[float]:
            wire = _checked(server).wire
            return wire.read_score(
                await self._pool.send(server, wire.path, wire.ask_score(ids, model=self._wanted.adapter)), ids
            )

        return await self._run(self._errand("a score", "", ask).run())

    async def load_weights(self, state_dict: Mapping[str, Tensor], policy_version: int) -> SyncReport:
        """See `Engine.load_weights`: all servers at once, those too that came back without the last ones. Requests in
        flight stand still meanwhile, and go on with the new weights.

        Raises:
            EngineError: a name or a shape does not fit, and nothing was sent; or a server did not take the weights
                within `Patience.sync_timeout_s`. Those that did are sampled from, the others stay out.
        """
        self._sleep.check_can_load()
        if self._wanted.adapter is not None:
            raise EngineError(
                f"load_weights: these servers sample with the adapter {self._wanted.adapter!r}, and would put it on top"
            )
        tensors = check_weights_fit(state_dict, await asyncio.to_thread(read_model_facts, self._model))
        version = str(policy_version)
        report = await self._loop.run(
            self._sync(lambda sync: sync.send_weights(tensors, version), tensors, policy_version)
        )
        self._sleep.weights_arrived()
        return report

    async def load_adapter(self, adapter: Path | AdapterWeights, policy_version: int) -> SyncReport:
        """See `Engine.load_adapter`, and `load_weights` for what may fail. From now on it is what is sampled with."""
        self._sleep.check_can_load()
        if isinstance(adapter, Path):
            adapter = await asyncio.to_thread(read_adapter, adapter)
        check_adapter(adapter, await asyncio.to_thread(read_model_facts, self._model))
        return await self._loop.run(self._sync_adapter(adapter, policy_version))

    async def sleep(self, *, keep_weights: bool = True) -> bool:
        """See `Engine.sleep`: the servers' memory is their own."""
        self._sleep.fall_asleep(keep_weights=keep_weights, requests=self._asked)
        return False

    async def wake(self) -> None:
        """See `Engine.wake`."""
        self._sleep.wake()

    async def close(self) -> None:
        """Close every connection. Requests that still run get an `EngineError`. Safe to call twice."""
        try:
            await self._loop.run(self._close())
        except EngineError:
            return  # closed already
        await asyncio.to_thread(self._loop.stop)

    async def _run(self, request: Coroutine[Any, Any, T]) -> T:
        self._asked += 1
        try:
            return await self._loop.run(request)
        finally:
            self._asked -= 1

    # Everything below runs on the loop of the servers, but `_completion`.

    async def _open(self, addresses: Sequence[str], api_key: str | None) -> tuple[ServerPool, httpx.AsyncClient]:
        client = httpx.AsyncClient(
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            # As many connections as requests, for vLLM has the queue, and each for one request: none is written to a
            # connection that the server is just closing, and httpx looks at every idle one whenever it needs one.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            timeout=httpx.Timeout(None, connect=10.0),
            trust_env=False,  # a proxy for the world outside is none for one's own servers
        )
        pool = ServerPool(
            addresses,
            client=client,
            wanted=self._wanted,
            capacity=self._capacity,
            patience=self._patience,
            accept=self._accept,
        )
        try:
            if self._takes_weights:
                await asyncio.gather(
                    *(prepare_for_weights(client, address, adapter_rank=self._adapter_rank) for address in addresses)
                )
            await pool.open()
            versions = {server.address: self._step(_checked(server).version) for server in pool.servers}
        except BaseException:
            await client.aclose()
            raise
        self.policy_version = max(versions.values())
        if len(set(versions.values())) > 1:
            _LOG.warning("servers have different weights: %s; every token says from which it came", versions)
        return pool, client

    async def _close(self) -> None:
        counts = self.counts  # closing adds to them
        await self._pool.close()
        me = asyncio.current_task()
        left = [task for task in asyncio.all_tasks() if task is not me]
        if left:
            await asyncio.wait(left, timeout=5.0)
        await self._client.aclose()
        if counts != ServerCounts():
            _LOG.warning("what servers did in all: %s", counts)

    def _errand(self, what: str, trajectory_id: str, ask: Callable[[Server], Awaitable[T]]) -> Errand[T]:
        return Errand(
            what, trajectory_id, ask, pool=self._pool, patience=self._patience, check=self._check_weights_are_whole
        )

    def _check_known(self, reply: Reply) -> None:
        for version in set(reply.versions or ()):
            self._step(version)
        if max(reply.token_ids, default=0) >= self._wanted.vocab_size:
            raise EngineError(f"it sampled token {max(reply.token_ids)} of a vocabulary of {self._wanted.vocab_size}")

    def _check_weights_are_whole(self) -> None:
        if self._broken is not None:
            raise EngineError(self._broken)

    async def _sync_adapter(self, adapter: AdapterWeights, policy_version: int) -> SyncReport:
        before = self._wanted
        if before.adapter is None and self._asked:
            raise EngineError(f"load_adapter: {self._asked} requests run without an adapter: wait for them")
        name = before.adapter or _ADAPTER
        # Whoever comes back from now on must have it.
        self._wanted = self._pool.wanted = replace(before, adapter=name)
        try:
            return await self._sync(
                lambda sync: sync.send_adapter(
                    adapter, name, str(policy_version), takes_a_place=before.adapter is not None
                ),
                adapter.tensors,
                policy_version,
            )
        finally:
            if self.policy_version != policy_version:
                self._wanted = self._pool.wanted = before

    async def _sync(
        self, send: Callable[[WeightSync], Awaitable[None]], tensors: Mapping[str, Tensor], policy_version: int
    ) -> SyncReport:
        async with self._syncing:
            servers = {server.address: server for server in await self._pool.reachable()}
            if not servers:
                raise EngineError(f"load_weights: no server is up ({self._pool.causes})")
            running = {address: server.in_flight for address, server in servers.items()}
            sync = WeightSync(self._client, list(servers), timeout_s=self._patience.sync_timeout_s)
            before, self._loaded = self._loaded, str(policy_version)  # whoever comes back with others stays out
            try:
                await send(sync)
            finally:
                outcome = sync.outcome
                if not outcome.is_changed:
                    self._loaded = before
                elif not outcome.done:
                    self._broken = f"no server has whole weights ({outcome}); load them again, or start servers again"
                for address, reason in outcome.gone.items():
                    self._pool.lose(servers[address], reason, is_unfit=False)
                for address, reason in outcome.failed.items() if outcome.is_changed else ():
                    self._pool.lose(
                        servers[address], f"a sync left it with half of its weights ({reason})", is_unfit=True
                    )
            if not outcome.done:
                raise EngineError(str(outcome))
            self._broken, self.policy_version = None, policy_version
            await self._pool.weights_changed([servers[address] for address in outcome.done])
            if outcome.failed:
                raise EngineError(str(outcome))
        return SyncReport(
            tensors=len(tensors),
            changed=self._pushed.count_changed(tensors),
            caches_dropped=len(outcome.done),
            requests_running=sum(running[address] for address in outcome.done),
            sent_bytes=outcome.sent_bytes,
        )

    def _accept(self, checked: Checked) -> None:
        """A server that died has lost the weights that it was given."""
        if self._loaded is not None and checked.version != self._loaded:
            raise ValueError(
                f"its weights are {checked.version!r}, those of the run are of step {self._loaded}; it stays out until "
                "they are loaded again"
            )

    def _completion(self, completion_id: str, reply: Reply) -> Completion:
        n = len(reply.token_ids)
        if reply.versions is None:
            versions = (self.policy_version,) * n
        else:
            versions = tuple(self._step(version) for version in reply.versions)
        self.policy_version = max(self.policy_version, *versions)
        self.tokens_of_older_weights += sum(version < self.policy_version for version in versions)
        return Completion(
            completion_id=completion_id,
            token_ids=reply.token_ids,
            logprobs=reply.logprobs,
            finish_reason=reply.finish_reason,
            policy=self._policy,
            policy_version=versions,
            cached_prompt_tokens=reply.cached_prompt_tokens,
        )

    def _step(self, version: str | None) -> int:
        if version is None or version == _START:
            return self._start_version
        if self._takes_weights and self._loaded is None and is_unfinished(version):
            self._broken = "a run that was killed left the servers with half of some weights: load_weights comes first"
            return self._start_version
        if not version.isdecimal():
            raise EngineError(
                f"a server calls its weights {version!r}; the number of optimizer steps must be their version"
            )
        return int(version)


def _checked(server: Server) -> Checked:
    assert server.checked is not None
    return server.checked
