"""One trajectory: sample a turn, run its calls, append what came back, until something ends it.

This is the one place where a failure becomes data: whatever goes wrong in the engine, the sandbox or the environment
turns into a `StopReason` here, so one trajectory never stops another. Which limit ends it is in `limits.py`, what it
has so far in `progress.py`, a call of a tool, and what becomes of its failure, in `tool_call.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from data.chat import Renderer
from data.jsonl import plain_json
from data.tool_formats.base import ParsedTurn
from data.types import Completion, SamplingParams
from envs.base import Env, Session
from envs.sandbox.base import Sandbox, SandboxError, SandboxFactory, SandboxSpec
from envs.tools import check_tools
from envs.types import Message, Task, ToolCall, ToolSpec
from rollouts.accounting import check_prices, cost_usd
from rollouts.config import LimitsConfig, PricesConfig, SamplingConfig
from rollouts.engine import Engine, EngineError, EngineFault
from rollouts.limits import Streaks, allowance
from rollouts.observations import observe
from rollouts.progress import Progress, Prompt
from rollouts.reward import Reward, read_reward
from rollouts.tool_call import ToolTerms, call_tools, is_cancelled, pass_on_interruption
from rollouts.types import StopReason, Trajectory, trajectory_name

Result = TypeVar("Result")
_NO_TURN = (
    "no turn was sampled within {:g} s (limits.wall_clock_s): the engine is slow, or too many wait for it; raise that, "
    "or lower engine.max_concurrent"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """What all trajectories of a run share. `seed` and a completion's id give that completion its own seed.

    Raises:
        ValueError: a tool's schema is none, a money limit could never be reached, or calls are to be constrained in a
            format that has no grammar.
    """

    engine: Engine
    renderer: Renderer
    env: Env
    sandboxes: SandboxFactory
    limits: LimitsConfig
    sampling: SamplingConfig
    prices: PricesConfig
    tool_timeout_s: float
    seed: int
    _structural_tag: str | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_tools(self.env.tools)
        check_prices(self.limits, self.prices)
        constrained = self.sampling.constrain_calls and self.env.tools
        tag = self.renderer.structural_tag(self.env.tools) if constrained else None
        if constrained and tag is None:
            raise ValueError(
                "rollout.sampling.constrain_calls: the model's tool format has no grammar for its calls; take it out, "
                "or set rollout.renderer.tool_format"
            )
        object.__setattr__(self, "_structural_tag", tag)

    async def run(self, task: Task, *, group_id: str, sibling_index: int, attempt: int = 0) -> Trajectory:
        """Sample one attempt at `task`. Never raises for what goes wrong inside it; Ctrl-C, and being cancelled from
        outside, go through, once its tools have stopped and its sandbox is gone.

        `attempt` counts the earlier tries that our machinery lost; it makes the ids and seeds of this one its own.
        """
        progress = Progress(trajectory_id=trajectory_name(group_id, sibling_index, attempt))
        reward = Reward()
        error: str | None = None
        is_fault = False
        relaxed: tuple[str, ...] = ()
        try:
            progress.opening = self.env.opening(task)
            progress.messages.extend(progress.opening)
            spec = self.env.sandbox_spec(task)
            relaxed = spec.relaxed
            async with self._sandbox(spec) as sandbox:
                session = self.env.session(task, sandbox)
                clock = asyncio.timeout(self.limits.wall_clock_s)
                try:
                    async with clock:
                        stop_reason = await self._converse(progress, session)
                except (TimeoutError, SandboxError):  # a sandbox may answer the clock with an error
                    if is_cancelled() or not clock.expired():  # somebody else's: a failure like any other
                        raise
                    if not progress.turns:  # it only ever waited for its turn
                        raise EngineError(_NO_TURN.format(self.limits.wall_clock_s)) from None
                    stop_reason = StopReason.WALL_CLOCK
                if stop_reason is StopReason.TOOL_ERROR:
                    error = "\n".join(progress.turns[-1].tool_failures) or None
                grade = await self._in_time("reward", session.grade(progress.messages))
            try:
                reward = read_reward(grade, turns=len(progress.turns))
            except ValueError as failure:
                error = str(failure)
        except BaseException as failure:
            pass_on_interruption(failure)  # engine, sandbox and environment may answer a cancellation with an error
            stop_reason, error, is_fault = _what_failed(failure)
        return Trajectory(
            trajectory_id=progress.trajectory_id,
            task_id=task.task_id,
            group_id=group_id,
            sibling_index=sibling_index,
            streams=tuple(progress.streams),
            turns=tuple(progress.turns),
            stop_reason=stop_reason,
            reward=None if stop_reason.is_infrastructure else reward.total,
            reward_terms=reward.terms,
            turn_rewards=reward.turn_rewards,
            forged=progress.forged,
            relaxed=relaxed,
            error=None if error is None else plain_json(error),
            is_fault=is_fault,
            opening=tuple(progress.opening),
            tools=tuple(self.env.tools),
            unfinished=progress.unfinished,
            cost_usd=cost_usd(progress.count, self.prices),
            attempt=attempt,
        )

    @asynccontextmanager
    async def _sandbox(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        sandbox = await self._in_time("sandbox", self.sandboxes.start(spec))
        try:
            yield sandbox
        finally:
            await self._in_time("end of its sandbox", sandbox.close())

    async def _in_time(self, what: str, work: Awaitable[Result]) -> Result:
        """What our machinery does for a trajectory has a deadline too: a fault of its own must not hold the run."""
        clock = asyncio.timeout(self.limits.wall_clock_s)
        try:
            async with clock:
                return await work
        except TimeoutError as error:
            if not clock.expired():
                raise
            raise SandboxError(f"no {what} within {self.limits.wall_clock_s:g} s (limits.wall_clock_s)") from error

    async def _converse(self, progress: Progress, session: Session) -> StopReason:
        """Turn after turn. A prompt joins its stream only when something is sampled after it."""
        told = [*(message.content for message in progress.messages), *map(_spec_text, self.env.tools)]
        progress.forged = sum(map(self.renderer.count_forged, told))
        streaks, terms = Streaks(self.limits), self._tool_terms()
        prompt = progress.prompt(self.renderer.opening(progress.messages, self.env.tools), new_stream=True)
        while True:
            room = allowance(
                self.limits,
                self.prices,
                so_far=progress.count,
                next_call=prompt.count,
                max_context_tokens=self.engine.max_context_tokens,
            )
            if room.tokens < 1:
                return room.reason
            completion, parsed = await self._sample(progress, prompt, room.tokens)
            if completion.finish_reason == "length":
                return room.reason
            if parsed.thinking_open and not parsed.calls:
                # It says nothing, so nothing can answer it; an empty answer would be one that it never gave.
                return StopReason.PARSE_ERRORS
            if not parsed.calls:
                progress.add_answer()
                return StopReason.FINAL_ANSWER
            started = time.perf_counter()
            outcomes = await call_tools(session, parsed.calls, terms)
            if is_cancelled():  # a tool swallowed it; the clock, or whoever ends the run, meant this trajectory
                raise asyncio.CancelledError
            progress.add_results(outcomes, time.perf_counter() - started)
            # Our own words about a call that could not be read name markers too.
            answers = (o.result for o, c in zip(outcomes, parsed.calls, strict=True) if isinstance(c, ToolCall))
            progress.forged += sum(self.renderer.count_forged(result.content) for result in answers)
            reason = streaks.after_turn(parsed.calls, outcomes)
            if reason is not None:
                return reason
            if len(progress.turns) == self.limits.max_turns:
                return StopReason.MAX_TURNS
            prompt = self._next_prompt(progress, prompt, completion, progress.messages[-len(outcomes) :])

    async def _sample(self, progress: Progress, prompt: Prompt, max_tokens: int) -> tuple[Completion, ParsedTurn]:
        """The next turn, and what it says.

        Raises:
            EngineError: there is no completion, or not one that was asked for.
        """
        index = len(progress.turns)
        completion_id = f"{progress.trajectory_id}/{index}"
        params = self._sampling_params(completion_id, max_tokens)
        progress.ask(prompt)
        started = time.perf_counter()
        try:
            completion = await self.engine.generate(completion_id, prompt.token_ids, params)
        except EngineError:
            raise
        except Exception as error:  # no failure that it knows of: where it came from matters
            raise EngineFault(traceback.format_exc()) from error
        if not completion.token_ids:
            raise EngineError(f"completion {completion_id} has no token; an engine must sample at least one")
        progress.add_sampled(completion)
        generate_s = time.perf_counter() - started
        parsed = self.renderer.parse(
            completion.token_ids,
            call_id_prefix=f"call_{index}",
            finish_reason=completion.finish_reason,
            tools=self.env.tools,
            prompt_ids=prompt.token_ids,
        )
        progress.add_turn(completion, prompt, parsed, generate_s)
        _check_end(completion, params)
        return completion, parsed

    def _sampling_params(self, completion_id: str, max_tokens: int) -> SamplingParams:
        sampling = self.sampling
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            structural_tag=self._structural_tag,
            max_tokens=max_tokens,
            stop_token_ids=self.renderer.stop_token_ids,
            seed=completion_seed(self.seed, completion_id),
        )

    def _next_prompt(
        self, progress: Progress, prompt: Prompt, completion: Completion, answers: Sequence[Message]
    ) -> Prompt:
        """The context grown by `answers`; in a new stream where the renderer rewrites what came before."""
        bridge = self.renderer.bridge(
            answers, prompt_ids=prompt.token_ids, sampled_ids=completion.token_ids, tools=self.env.tools
        )
        if bridge is not None:
            return progress.prompt(bridge, new_stream=False)
        return progress.prompt(self.renderer.opening(progress.messages, self.env.tools), new_stream=True)

    @property
    def _observation_tokens(self) -> int:
        return self.limits.max_observation_tokens or max(16, min(2048, self.engine.max_context_tokens // 4))

    def _tool_terms(self) -> ToolTerms:
        return ToolTerms(
            tools=self.env.tools,
            timeout_s=self.tool_timeout_s,
            retries=self.limits.tool_retries,
            backoff_s=self.limits.retry_backoff_s,
            observe=partial(observe, max_tokens=self._observation_tokens, encode=self.renderer.encode_text),
        )


def _what_failed(failure: BaseException) -> tuple[StopReason, str, bool]:
    """Why the trajectory is lost, what a person reads of it, and whether it is a fault that would come again. None of
    it says anything about the policy."""
    if isinstance(failure, SandboxError):
        return StopReason.SANDBOX_ERROR, str(failure), False
    if isinstance(failure, EngineError):
        return StopReason.ENGINE_ERROR, str(failure), isinstance(failure, EngineFault)
    # Of ours or of the environment's code.
    return StopReason.SANDBOX_ERROR, "".join(traceback.format_exception(failure)), True


def _spec_text(tool: ToolSpec) -> str:
    """What a model is told of a tool."""
    return json.dumps(tool.as_openai(), ensure_ascii=False)


def _check_end(completion: Completion, params: SamplingParams) -> None:
    """An engine with stop tokens or a context of its own would end turns where the policy did not.

    Raises:
        EngineError: it ended neither with one of the stop tokens that were asked for nor at `max_tokens`.
    """
    n = len(completion.token_ids)
    if completion.finish_reason == "stop" and completion.token_ids[-1] not in params.stop_token_ids:
        raise EngineError(
            f"completion {completion.completion_id} stopped after token {completion.token_ids[-1]}, not one of the "
            f"stop tokens {list(params.stop_token_ids)}; let nothing else stop the engine (ignore_eos, no stop strings)"
        )
    if n > params.max_tokens or (completion.finish_reason == "length" and n < params.max_tokens):
        raise EngineError(
            f"completion {completion.completion_id} has {n} tokens and ended by its length, {params.max_tokens} were "
            "asked for; the engine's context must be at least rollout.engine.max_context_tokens"
        )


def completion_seed(run_seed: int, completion_id: str) -> int:
    """The seed of one completion: different for every completion, the same in every run with that seed."""
    digest = hashlib.sha256(f"{run_seed}/{completion_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # 63 bits, as many as engines take: no two of a run are alike
