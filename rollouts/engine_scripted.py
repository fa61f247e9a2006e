"""An engine without a model: it answers what a script says. For tests of everything that stands on an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from data.types import Completion, FinishReason, SamplingParams
from rollouts.engine import EngineError, EngineLoad, SyncReport
from rollouts.engine_checks import check_prompt, check_scored
from rollouts.engine_sleep import SleepState
from rollouts.weight_transfer import PushedWeights

if TYPE_CHECKING:
    from torch import Tensor

    from rollouts.engine_adapter import AdapterWeights

Script = Callable[[Sequence[int]], Sequence[int]] | Mapping[tuple[int, ...], Sequence[int]] | Sequence[Sequence[int]]
"""Prompt ids to answer ids: a function, a table, or the answers in the order of the calls."""


class ScriptedEngine:
    """An `Engine` that answers from a script.

    An answer is cut after its first stop id (finish reason "stop") or at `max_tokens` ("length").

    logprobs: one number for every token (nats), or a function from the answer's ids `[n]` to their logprobs `[n]`.
    delay_s: how long each call takes.
    fail_calls: the calls of `generate`, counted from 0, that raise `EngineError`.

    Worked example, with the stop id 2:

        ScriptedEngine([[5, 2], [6, 2]])    the first call answers (5, 2), the second (6, 2)
    """

    def __init__(
        self,
        script: Script,
        *,
        logprobs: float | Callable[[Sequence[int]], Sequence[float]] = -1.0,
        delay_s: float = 0.0,
        fail_calls: Sequence[int] = (),
        max_context_tokens: int = 4096,
        vocab_size: int = 1 << 31,
        capacity: int = 64,
        policy: str = "scripted",
        policy_version: int = 0,
    ) -> None:
        self._script = script
        self._logprobs = logprobs
        self._delay_s = delay_s
        self._fail_calls = frozenset(fail_calls)
        self._max_context_tokens = max_context_tokens
        self._vocab_size = vocab_size
        self._capacity = capacity
        self._running = 0
        self._sleep = SleepState()
        self._pushed = PushedWeights()
        self._policy = policy
        self.policy_version = policy_version
        self.prompts: list[tuple[int, ...]] = []
        """The prompts of all calls of `generate` so far."""

    @property
    def max_context_tokens(self) -> int:
        return self._max_context_tokens

    @property
    def load(self) -> EngineLoad:
        running = min(self._running, self._capacity)
        return EngineLoad(running=running, waiting=self._running - running, capacity=self._capacity)

    async def generate(self, completion_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """See `Engine.generate`.

        Raises:
            ValueError: also when the answer neither holds a stop id nor fills `max_tokens`; no engine ends so.
        """
        check_prompt(prompt_ids, params, max_context_tokens=self._max_context_tokens, vocab_size=self._vocab_size)
        self._sleep.check_can_sample()
        call, version = len(self.prompts), self.policy_version
        self.prompts.append(tuple(prompt_ids))
        answer, finish_reason = _cut(self._answer(call, tuple(prompt_ids)), params)
        self._running += 1
        try:
            await asyncio.sleep(self._delay_s)
        finally:
            self._running -= 1
        if call in self._fail_calls:
            raise EngineError(f"call {call} fails, as the script says")
        logprobs = self._logprobs(answer) if callable(self._logprobs) else [self._logprobs] * len(answer)
        return Completion(
            completion_id=completion_id,
            token_ids=tuple(answer),
            logprobs=tuple(logprobs),
            finish_reason=finish_reason,
            policy=self._policy,
            policy_version=(version,) * len(answer),
        )

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """See `Engine.score`: what `logprobs` says of tokens 1 to n-1."""
        check_scored(token_ids, max_context_tokens=self._max_context_tokens, vocab_size=self._vocab_size)
        self._sleep.check_can_sample()
        rest = list(token_ids[1:])
        return list(self._logprobs(rest)) if callable(self._logprobs) else [self._logprobs] * len(rest)

    async def load_weights(self, state_dict: Mapping[str, Tensor], policy_version: int) -> SyncReport:
        """Take the version; there are no weights, and no prefixes are cached."""
        self._sleep.check_can_load()
        self._sleep.weights_arrived()
        self.policy_version = policy_version
        changed = self._pushed.count_changed(state_dict)
        return SyncReport(tensors=len(state_dict), changed=changed, caches_dropped=0, requests_running=self._running)

    async def load_adapter(self, adapter: Path | AdapterWeights, policy_version: int) -> SyncReport:
        """Take the version, as `load_weights` does."""
        return await self.load_weights({} if isinstance(adapter, Path) else adapter.tensors, policy_version)

    async def sleep(self, *, keep_weights: bool = True) -> bool:
        """See `Engine.sleep`; there is no memory to free."""
        self._sleep.fall_asleep(keep_weights=keep_weights, requests=self._running)
        return False

    async def wake(self) -> None:
        """See `Engine.wake`."""
        self._sleep.wake()

    async def close(self) -> None:
        """Nothing to close."""

    def _answer(self, call: int, prompt_ids: tuple[int, ...]) -> Sequence[int]:
        if callable(self._script):
            return self._script(prompt_ids)
        if isinstance(self._script, Mapping):
            if prompt_ids not in self._script:
                raise ValueError(f"the script has no answer to the prompt {prompt_ids}")
            return self._script[prompt_ids]
        if call >= len(self._script):
            raise ValueError(f"the script has {len(self._script)} answers, this is call {call}")
        return self._script[call]


def _cut(answer: Sequence[int], params: SamplingParams) -> tuple[list[int], FinishReason]:
    for index, token in enumerate(answer[: params.max_tokens]):
        if token in params.stop_token_ids:
            return list(answer[: index + 1]), "stop"
    if len(answer) < params.max_tokens:
        raise ValueError(f"the script's answer {list(answer)} neither ends with a stop id nor fills max_tokens")
    return list(answer[: params.max_tokens]), "length"
