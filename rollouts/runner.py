"""One trajectory: sample a turn, run its calls, append what came back, until something ends it.

This is the one place where a failure becomes data: whatever goes wrong in the engine, the sandbox or a tool turns into
a `StopReason` here, so one trajectory never stops another.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from data.chat import Renderer
from data.jsonl import plain_json
from data.tool_formats.base import CallError, ParsedTurn
from data.types import Completion, SamplingParams, Segment, TokenStream
from envs.base import Env, Session
from envs.sandbox.base import Sandbox, SandboxError, SandboxFactory, SandboxSpec
from envs.tools import check_tools
from envs.types import Message, Task, ToolCall, ToolResult
from rollouts.config import LimitsConfig
from rollouts.engine import Engine, EngineError
from rollouts.reward import read_reward
from rollouts.tool_call import call_tool
from rollouts.types import StopReason, Trajectory, Turn

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """What all trajectories of a run share.

    `seed` and a completion's id give that completion its own seed. `temperature` is the one that the trainer
    applies too.
    """

    engine: Engine
    renderer: Renderer
    env: Env
    sandboxes: SandboxFactory
    limits: LimitsConfig
    temperature: float
    tool_timeout_s: float
    seed: int

    def __post_init__(self) -> None:
        """Raises `ValueError` for a tool whose schema is none."""
        check_tools(self.env.tools)

    async def run(self, task: Task, *, group_id: str, sibling_index: int) -> Trajectory:
        """Sample one attempt at `task`. Never raises for what goes wrong inside it; Ctrl-C, and being cancelled from
        outside, go through."""
        progress = _Progress(trajectory_id=f"{group_id}/{sibling_index}")
        reward: float | None = None
        reward_terms: dict[str, float] = {}
        error: str | None = None
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
                except TimeoutError:
                    if not clock.expired():  # somebody else's time-out: a failure like any other
                        raise
                    stop_reason = StopReason.WALL_CLOCK
                terms = await self._in_time("reward", session.grade(progress.messages))
            try:
                reward, reward_terms = read_reward(terms)
            except ValueError as failure:
                error = str(failure)
        except SandboxError as failure:
            stop_reason, error = StopReason.SANDBOX_ERROR, str(failure)
        except EngineError as failure:
            stop_reason, error = StopReason.ENGINE_ERROR, str(failure)
        except (Exception, SystemExit, asyncio.CancelledError) as failure:
            if isinstance(failure, asyncio.CancelledError) and _is_cancelled():
                raise
            # A fault of ours or of the environment's code: it says nothing about the policy.
            stop_reason, error = StopReason.SANDBOX_ERROR, traceback.format_exc()
        return Trajectory(
            trajectory_id=progress.trajectory_id,
            task_id=task.task_id,
            group_id=group_id,
            sibling_index=sibling_index,
            streams=(progress.stream,),
            turns=tuple(progress.turns),
            stop_reason=stop_reason,
            reward=None if stop_reason.is_infrastructure else reward,
            reward_terms=reward_terms,
            forged=progress.forged,
            relaxed=relaxed,
            error=None if error is None else plain_json(error),
            opening=tuple(progress.opening),
            tools=tuple(self.env.tools),
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

    async def _converse(self, progress: _Progress, session: Session) -> StopReason:
        for segment in self.renderer.opening(progress.messages, self.env.tools):
            progress.stream.append(segment)
        progress.forged = sum(self.renderer.count_forged(message.content) for message in progress.messages)
        parse_errors = 0
        for index in range(self.limits.max_turns):
            room = self._room(progress)
            if isinstance(room, StopReason):
                return room
            started = time.perf_counter()
            completion = await self._sample(progress, index, room)
            generated = time.perf_counter()
            progress.add_completion(completion)
            parsed = self.renderer.parse(completion.token_ids, call_id_prefix=f"call_{index}")
            if completion.finish_reason == "length":
                progress.add_cut_turn(index, parsed.content, generated - started)
                return self._length_reason(progress)
            if not parsed.calls:
                progress.add_turn(index, parsed, (), generated - started, 0.0)
                return StopReason.FINAL_ANSWER
            results = await asyncio.gather(*(self._call(session, call) for call in parsed.calls))
            # Our own words about a call that could not be read name markers too.
            answers = (r for call, r in zip(parsed.calls, results, strict=True) if isinstance(call, ToolCall))
            progress.forged += sum(self.renderer.count_forged(result.content) for result in answers)
            progress.add_turn(index, parsed, results, generated - started, time.perf_counter() - generated)
            parse_errors = parse_errors + 1 if any(isinstance(call, CallError) for call in parsed.calls) else 0
            if parse_errors == self.limits.max_parse_errors:
                return StopReason.PARSE_ERRORS
            sampled = len(completion.token_ids)
            ids = progress.stream.token_ids
            bridge = self.renderer.bridge(
                progress.messages[-len(results) :],
                prompt_ids=ids[:-sampled],
                sampled_ids=ids[-sampled:],
                tools=self.env.tools,
            )
            assert bridge is not None
            if len(progress.stream) + sum(len(s.token_ids) for s in bridge) >= self.engine.max_context_tokens:
                # Nothing could be sampled after it; without it, every stream fits the context and a micro-batch.
                return StopReason.CONTEXT_FULL
            for segment in bridge:
                progress.stream.append(segment)
        return StopReason.MAX_TURNS

    async def _sample(self, progress: _Progress, index: int, max_tokens: int) -> Completion:
        completion_id = f"{progress.trajectory_id}/{index}"
        params = SamplingParams(
            temperature=self.temperature,
            max_tokens=max_tokens,
            stop_token_ids=self.renderer.stop_token_ids,
            seed=completion_seed(self.seed, completion_id),
        )
        completion = await self.engine.generate(completion_id, progress.stream.token_ids, params)
        if not completion.token_ids:
            raise EngineError(f"completion {completion_id} has no token; an engine must sample at least one")
        return completion

    async def _call(self, session: Session, call: ToolCall | CallError) -> ToolResult:
        if isinstance(call, CallError):
            return ToolResult(call_id=call.call_id, content=call.text, is_error=True)
        return await call_tool(session, call, timeout_s=self.tool_timeout_s)

    def _room(self, progress: _Progress) -> int | StopReason:
        """How many tokens the next turn may have, or why there is no next turn."""
        budget = self.limits.max_trajectory_tokens - progress.sampled_tokens
        context = self.engine.max_context_tokens - len(progress.stream)
        if budget <= 0:
            return StopReason.TOKEN_BUDGET
        if context <= 0:
            return StopReason.CONTEXT_FULL
        return min(self.limits.max_turn_tokens, budget, context)

    def _length_reason(self, progress: _Progress) -> StopReason:
        full = len(progress.stream) >= self.engine.max_context_tokens
        return StopReason.CONTEXT_FULL if full else StopReason.TOKEN_BUDGET


@dataclass(slots=True, kw_only=True)
class _Progress:
    """What a trajectory has so far; it survives whatever ends the conversation."""

    trajectory_id: str
    opening: list[Message] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    stream: TokenStream = field(default_factory=TokenStream)
    turns: list[Turn] = field(default_factory=list)
    sampled_tokens: int = 0
    forged: int = 0

    def add_completion(self, completion: Completion) -> None:
        self.stream.append(Segment.sampled(completion))
        self.sampled_tokens += len(completion.token_ids)

    def add_cut_turn(self, index: int, content: str, generate_s: float) -> None:
        """The policy had not finished: half a call is not a call, and half an answer is not an answer, so the turn is
        on record but is not part of the conversation that is graded."""
        message = Message(role="assistant", content=content)
        self.turns.append(Turn(index=index, message=message, tool_results=(), generate_s=generate_s, env_s=0.0))

    def add_turn(
        self, index: int, parsed: ParsedTurn, results: Sequence[ToolResult], generate_s: float, env_s: float
    ) -> None:
        calls = tuple(call for call in parsed.calls if isinstance(call, ToolCall))
        message = Message(role="assistant", content=parsed.content, tool_calls=calls)
        self.messages.append(message)
        for result in results:
            self.messages.append(Message(role="tool", content=result.content, call_id=result.call_id))
        turn = Turn(index=index, message=message, tool_results=tuple(results), generate_s=generate_s, env_s=env_s)
        self.turns.append(turn)


def _is_cancelled() -> bool:
    """Whether somebody cancelled this task; else a `CancelledError` is a tool's own, of a task that it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def completion_seed(run_seed: int, completion_id: str) -> int:
    """The seed of one completion: different for every completion, the same in every run with that seed."""
    digest = hashlib.sha256(f"{run_seed}/{completion_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF
