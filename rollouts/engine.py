"""The contract of an engine: token ids in, token ids and logprobs out.

Engines know nothing of messages, tools or rewards. `RecordingEngine` stands in front of each of them and writes
every completion to the ledger before anybody else sees it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from data.ledger import Ledger
from data.types import Completion, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from rollouts.engine_adapter import AdapterWeights


class EngineError(RuntimeError):
    """The engine failed, not the policy. The message says what, where, and what to do."""


class EngineFault(EngineError):
    """An exception out of the engine's code that it does not know of; the message is its traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How busy an engine is: requests that it samples, that wait in it, and that it samples at most at once."""

    running: int
    waiting: int
    capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What `load_weights` did.

    tensors: how many it was given.
    changed: how many of them differ from those that it was given before; None where there were none before.
    caches_dropped: prefix caches that were emptied, which is one a server.
    requests_running: that went on with the new weights in the middle of their completion.
    sent_bytes: to each server; 0 where nothing had to be sent.
    """

    tensors: int
    changed: int | None
    caches_dropped: int
    requests_running: int
    sent_bytes: int = 0


class Engine(Protocol):
    """Samples completions. Many `generate` calls run at once; each waits only for itself."""

    @property
    def policy_version(self) -> int:
        """Optimizer steps that the loaded weights have seen."""
        ...

    @property
    def max_context_tokens(self) -> int:
        """Prompt and completion together hold at most this many tokens."""
        ...

    @property
    def load(self) -> EngineLoad:
        """Read by the scheduler before it begins a trajectory; cheap, and a moment old at most."""
        ...

    async def generate(self, completion_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Sample one completion after `prompt_ids` `[n]`.

        `completion_id` is `{trajectory_id}/{turn}`: an engine of several servers sends a trajectory's turns to one of
        them, where its prefix is cached.

        Raises:
            EngineError: the engine failed.
            ValueError: the prompt is empty, or prompt and `max_tokens` do not fit the context.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs `[n - 1]` (nats, temperature 1) of tokens 1 to n-1 given those before them."""
        ...

    async def load_weights(self, state_dict: Mapping[str, Tensor], policy_version: int) -> SyncReport:
        """Take new weights under their Hugging Face names and drop every cached prefix.

        Requests that run go on with them, after the tokens that they have: each token of a completion says which
        version sampled it.

        Raises:
            EngineError: a name is unknown or missing, or cached prefixes could not be dropped.
        """
        ...

    async def load_adapter(self, adapter: Path | AdapterWeights, policy_version: int) -> SyncReport:
        """As `load_weights`, of a LoRA adapter (PEFT) beside the weights that the engine started with: a folder, or its
        tensors. The one before it, if any, is gone then.

        Raises:
            ValueError: it does not fit the model, or is more than low-rank matrices; the one before stays.
            EngineError: the engine was started without room for it, or refused it.
        """
        ...

    async def sleep(self, *, keep_weights: bool = True) -> bool:
        """Free the GPU memory of weights and cache for somebody else, such as a trainer on the same GPU, until `wake`;
        `generate`, `score` and `load_weights` are refused meanwhile. Asleep already: nothing happens.

        Args:
            keep_weights: move them to the CPU's memory; else they are dropped, which is faster and needs no memory, and
                `load_weights` must follow `wake` before anything is sampled.

        Returns:
            Whether memory was freed. False on a CPU, and for servers, whose memory is their own.

        Raises:
            EngineError: requests run, or the engine was started without what sleeping needs.
        """
        ...

    async def wake(self) -> None:
        """Take the memory back. Awake already: nothing happens."""
        ...

    async def close(self) -> None: ...


class EngineInFront:
    """Stands in front of another engine and passes everything on. What is to be different is overridden."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @property
    def max_context_tokens(self) -> int:
        return self._engine.max_context_tokens

    @property
    def load(self) -> EngineLoad:
        return self._engine.load

    async def generate(self, completion_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        return await self._engine.generate(completion_id, prompt_ids, params)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return await self._engine.score(token_ids)

    async def load_weights(self, state_dict: Mapping[str, Tensor], policy_version: int) -> SyncReport:
        return await self._engine.load_weights(state_dict, policy_version)

    async def load_adapter(self, adapter: Path | AdapterWeights, policy_version: int) -> SyncReport:
        return await self._engine.load_adapter(adapter, policy_version)

    async def sleep(self, *, keep_weights: bool = True) -> bool:
        return await self._engine.sleep(keep_weights=keep_weights)

    async def wake(self) -> None:
        await self._engine.wake()

    async def close(self) -> None:
        await self._engine.close()


class RecordingEngine(EngineInFront):
    """An engine whose every completion is in the ledger before the caller gets it."""

    def __init__(self, engine: Engine, ledger: Ledger) -> None:
        super().__init__(engine)
        self._ledger = ledger

    @property
    def unrecorded(self) -> Engine:
        """The engine itself, for what will never be trained on."""
        return self._engine

    async def generate(self, completion_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        completion = await super().generate(completion_id, prompt_ids, params)
        if not all(map(math.isfinite, completion.logprobs)):
            raise EngineError(
                f"completion {completion_id} has a logprob that is no finite number; nothing could train on it"
            )
        self._ledger.record(completion)
        return completion
