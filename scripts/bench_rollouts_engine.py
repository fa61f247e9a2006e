"""The one engine of the rollouts benchmark: real vLLM, made to say what the plan says; and when it was busy.

Real: every forward pass, over the right number of prompt and sampled tokens, continuous batching, the prefix cache,
sampling and its seeds, logprobs, the end at the stop token. Scripted: in each position all logits but those of the
planned token are set to minus infinity before the token is drawn, so what the model would have preferred does not
matter, and what was sampled is what stays in the conversation and in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from data.types import Completion, SamplingParams
from rollouts.engine import EngineError, EngineInFront
from scripts.bench_rollouts_plan import Plan

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.v1.engine.llm_engine import LLMEngine

    from rollouts.engine_vllm import VllmEngine


@dataclass(slots=True)
class Timeline:
    """When something happened (seconds of `time.perf_counter`), in any order.

    joined: a sequence came into the batch. left: its last token was drawn, and whether the trajectory ended with it.
    returned: a tool gave its result.
    """

    joined: list[float] = field(default_factory=list)
    left: list[tuple[float, bool]] = field(default_factory=list)
    returned: list[float] = field(default_factory=list)

    def clear(self) -> None:
        self.joined.clear()
        self.left.clear()
        self.returned.clear()


def busy(timeline: Timeline, *, began: float, trajectories: int, limit: int) -> float:
    """Mean of the running sequences over the mean of min(limit, ready ones), from `began` to the last event.

    Ready is a trajectory that samples or wants to: from when it may begin, or its tool returned, until its turn's last
    token. It may begin as soon as fewer than `limit` trajectories have begun and not ended, whether its contender
    makes use of that or not.

    Worked example, one trajectory of one turn that may begin at 0, joins the batch at 1 and leaves it at 4: it ran for
    3 of the 4 seconds in which it was ready, 0.75.
    """
    first = min(limit, trajectories)
    waiting = trajectories - first
    events: list[tuple[float, int, int]] = [(began, 0, first)]  # when, change of running, change of ready
    events += [(when, 1, 0) for when in timeline.joined]
    events += [(when, 0, 1) for when in timeline.returned]
    for when, ended in sorted(timeline.left):
        next_begins = ended and waiting > 0
        waiting -= next_begins
        events.append((when, -1, 0 if next_begins else -1))
    events.sort()
    running = ready = 0
    ran_s = could_s = 0.0
    for (when, more_running, more_ready), (until, _, _) in zip(events, [*events[1:], events[-1]], strict=True):
        running += more_running
        ready += more_ready
        ran_s += running * (until - when)
        could_s += min(limit, ready) * (until - when)
    return ran_s / could_s


class PlannedEngine(EngineInFront):
    """An `Engine` over vLLM in which each completion `…/{task}/{sibling}/{turn}` is what the plan says.

    prompts: prompt ids by `{task}/{turn}`, since the last `begin`.
    cached_tokens: prompt tokens that the engine took from its prefix cache, None where it does not say.

    Raises:
        EngineError: vLLM is not in this process, or keeps its logits processors elsewhere than in 0.32.
    """

    def __init__(self, engine: VllmEngine, plan: Plan, timeline: Timeline) -> None:
        super().__init__(engine)
        self._vllm = engine
        self._timeline = timeline
        self._turns = {
            f"{task_id}/{index}": turn for task_id, turns in plan.turns.items() for index, turn in enumerate(turns)
        }
        # A request is known inside vLLM by its seed.
        self._seeds = {name: seed for seed, name in enumerate(self._turns)}
        self._processor = Script(
            {self._seeds[name]: (turn.token_ids, turn.key is None) for name, turn in self._turns.items()}, timeline
        )
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.cached_tokens: int | None = 0

    async def install(self) -> None:
        """Put the script into vLLM's sampler."""
        await self._vllm.run(self._processor.install)

    async def begin(self) -> None:
        """Forget all: the cached prefixes, the times, and what was asked for."""
        if not await self._vllm.run(lambda llm: llm.reset_prefix_cache()):
            raise EngineError("vLLM did not drop its cached prefixes")
        self._timeline.clear()
        self.prompts = {}
        self.cached_tokens = 0

    async def generate(self, completion_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        task_id, _, turn = completion_id.split("/")[-3:]
        name = f"{task_id}/{turn}"
        self.prompts[name] = tuple(prompt_ids)
        completion = await super().generate(completion_id, prompt_ids, replace(params, seed=self._seeds[name]))
        if completion.token_ids != self._turns[name].token_ids:
            raise EngineError(f"completion {completion_id} is not what the plan says")
        cached = completion.cached_prompt_tokens
        self.cached_tokens = None if cached is None or self.cached_tokens is None else self.cached_tokens + cached
        return completion


class Script:
    """A logits processor as vLLM 0.32 calls them: `update_state` before each forward pass, `apply` after it.

    scripts: by the seed of a request, what it shall sample and whether its trajectory ends with it.
    """

    def __init__(self, scripts: Mapping[int, tuple[tuple[int, ...], bool]], timeline: Timeline) -> None:
        self._scripts = scripts
        self._timeline = timeline
        self._rows: dict[int, tuple[tuple[int, ...], bool, list[int]]] = {}
        """By row of the batch: the script, whether the trajectory ends with it, and what vLLM has sampled of it."""

    def install(self, llm: LLMEngine) -> None:
        llm.collective_rpc(self._install_in)

    def _install_in(self, worker: Any) -> None:
        try:
            worker.model_runner.input_batch.logitsprocs.non_argmax_invariant.append(self)
        except AttributeError as error:
            raise EngineError(f"this vLLM keeps its logits processors elsewhere ({error}); 0.32 is known") from error

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, _, output_ids in batch_update.added:
            self._rows[row] = (*self._scripts[params.seed], output_ids)
        for one, other, direction in batch_update.moved:
            moved, met = self._rows.pop(one, None), self._rows.pop(other, None)
            if moved is not None:
                self._rows[other] = moved
            if met is not None and direction.name == "SWAP":
                self._rows[one] = met
        self._timeline.joined += [time.perf_counter()] * len(batch_update.added)

    def apply(self, logits: Tensor) -> Tensor:
        assert logits.shape[0] == len(self._rows), "every sequence of the batch samples in each step, by the script"
        now = time.perf_counter()
        rows, tokens = list(self._rows), []
        for script, ends, output_ids in self._rows.values():
            tokens.append(script[len(output_ids)])
            if len(output_ids) == len(script) - 1:
                self._timeline.left.append((now, ends))
        logits.fill_(float("-inf"))
        logits[rows, tokens] = 0.0
        return logits
