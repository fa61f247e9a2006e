"""What the tests of trajectories share: an environment whose tools fail in every way, and one attempt at a task.

The engine is scripted and tools run in the local sandbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data.chat import Renderer
from data.ledger import Ledger
from data.template_renderer import TemplateRenderer
from data.types import Segment, Source, TokenStream
from envs.base import Env, Split, TransientToolError
from envs.sandbox.base import Sandbox, SandboxError, SandboxFactory, SandboxSpec
from envs.sandbox.local import LocalFactory
from envs.tools import call_error
from envs.types import Message, Task, ToolCall, ToolResult, ToolSpec
from rollouts.config import LimitsConfig, PricesConfig, SamplingConfig
from rollouts.engine import Engine, RecordingEngine
from rollouts.engine_scripted import ScriptedEngine
from rollouts.runner import Runner
from rollouts.types import Trajectory

Result = TypeVar("Result")

EMBEDDED = Path(__file__).parents[2] / "models" / "embedded"
TOKENIZER: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(EMBEDDED)
RENDERER = TemplateRenderer(TOKENIZER, name="embedded")
STOP = RENDERER.stop_token_ids[0]
TASK = Task(task_id="t", prompt="Say ok.")


class Desk:
    """Tools that answer, that never return, that end it, and that fail (`flaky` the first so many times as its text
    says); the reward is 1 when the last message says ok.

    A prompt may ask for trouble: "no sandbox", "grading hangs", "grading fails".
    """

    name = "desk"
    tools: Sequence[ToolSpec] = tuple(
        ToolSpec(
            name=name,
            description=f"Does {name}.",
            parameters={
                "type": "object",
                "properties": {"text": {"type": "string"}},
                "required": ["text"],
                "additionalProperties": False,
            },
        )
        for name in ("echo", "wait", "block", "break", "crash", "done", "flaky")
    )

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return [Task(task_id=f"{split}-{seed}-{index}", prompt=f"Say ok, {index}.") for index in range(count)]

    def opening(self, task: Task) -> list[Message]:
        return [Message(role="user", content=task.prompt)]

    def sandbox_spec(self, task: Task) -> SandboxSpec:
        if "no sandbox" in task.prompt:
            raise SandboxError("no sandbox to be had; start one")
        return SandboxSpec()

    def session(self, task: Task, sandbox: Sandbox) -> DeskSession:
        return DeskSession(task, sandbox)

    def demonstrate(self, task: Task, messages: Sequence[Message], seed: int) -> Message:
        return Message(role="assistant", content="ok")


class DeskSession:
    """One attempt at the desk."""

    def __init__(self, task: Task, sandbox: Sandbox) -> None:
        self._task = task
        self._sandbox = sandbox
        self.tried = 0

    async def call(self, call: ToolCall) -> ToolResult:
        error = call_error(call, Desk.tools)
        if error is not None:
            return ToolResult(call_id=call.call_id, content=error, is_error=True)
        text = str(call.arguments["text"])
        if call.name == "wait":
            await asyncio.Event().wait()
        if call.name == "block":
            await self._sandbox.exec(["sleep", "600"], timeout_s=600.0)
        if call.name == "break":
            raise SandboxError("the sandbox is gone; start a new one")
        if call.name == "crash":
            raise RuntimeError("a fault of the environment")
        self.tried += 1
        if call.name == "flaky" and self.tried <= int(text):
            raise TransientToolError(f"busy, {self.tried}")
        return ToolResult(call_id=call.call_id, content=text, ends_trajectory=call.name == "done")

    async def grade(self, messages: Sequence[Message]) -> Mapping[str, float]:
        if "grading hangs" in self._task.prompt:
            await asyncio.Event().wait()
        if "grading fails" in self._task.prompt:
            raise RuntimeError("the tests could not be run")
        return {"ok": float(messages[-1].role == "assistant" and messages[-1].content == "ok")}


def say(content: str = "", *calls: tuple[str, str]) -> list[int]:
    """A turn as the policy would sample it: prose, and calls of (tool, text)."""
    asked = tuple(ToolCall(call_id="", name=name, arguments={"text": text}) for name, text in calls)
    return list(RENDERER.turn_ids(Message(role="assistant", content=content, tool_calls=asked)))


def raw(text: str) -> list[int]:
    """A turn that says `text`, control tokens in it included."""
    return [*TOKENIZER.encode(text, add_special_tokens=False), STOP]


def in_sandboxes(work: Callable[[SandboxFactory], Coroutine[Any, Any, Result]]) -> Result:
    """What `work` gives; its sandboxes are gone afterwards."""

    async def run() -> Result:
        async with LocalFactory() as factory:
            return await work(factory)

    return asyncio.run(run())


def make_runner(
    engine: Engine,
    sandboxes: SandboxFactory,
    *,
    env: Env | None = None,
    tool_timeout_s: float = 5.0,
    seed: int = 0,
    renderer: Renderer = RENDERER,
    sampling: SamplingConfig | None = None,
    prices: PricesConfig | None = None,
    **limits: float,
) -> Runner:
    values: dict[str, float] = {
        "max_turn_tokens": 1000,
        "max_trajectory_tokens": 4000,
        "wall_clock_s": 30.0,
        "retry_backoff_s": 0.0,
    }
    return Runner(
        engine=engine,
        renderer=renderer,
        env=env if env is not None else Desk(),
        sandboxes=sandboxes,
        limits=LimitsConfig.model_validate(values | limits),
        sampling=sampling or SamplingConfig(),
        prices=prices or PricesConfig(),
        tool_timeout_s=tool_timeout_s,
        seed=seed,
    )


def attempt(engine: Engine, task: Task = TASK, **options: Any) -> Trajectory:
    """One attempt; whatever came of it, its streams must be the engine's prompts and completions, token for token."""
    ledger = Ledger()
    recording = RecordingEngine(engine, ledger)
    trajectory = in_sandboxes(
        lambda sandboxes: make_runner(recording, sandboxes, **options).run(task, group_id="g", sibling_index=0)
    )
    check_record(trajectory, ledger, engine)
    return trajectory


def check_record(trajectory: Trajectory, ledger: Ledger, engine: Engine) -> None:
    """Every completion is in one stream, token for token, and has its turn; every prompt is what stands before it; what
    got no answer is in no stream."""
    sampled = [segment for stream in trajectory.streams for segment in stream if segment.source is Source.MODEL]
    recorded = [completion for completion in ledger if completion.token_ids]
    assert [s.completion_id for s in sampled] == [c.completion_id for c in recorded]
    assert [s.token_ids for s in sampled] == [c.token_ids for c in recorded]
    assert [s.logprobs for s in sampled] == [c.logprobs for c in recorded]
    assert [turn.index for turn in trajectory.turns] == list(range(len(sampled)))
    assert [turn.sampled_tokens for turn in trajectory.turns] == [len(s.token_ids) for s in sampled]
    before = [
        (number, tuple(stream.token_ids[:place]))
        for number, stream in enumerate(trajectory.streams)
        for place, segment in _places(stream)
        if segment.source is Source.MODEL
    ]
    assert [(turn.stream, turn.prompt_tokens) for turn in trajectory.turns] == [(n, len(ids)) for n, ids in before]
    if isinstance(engine, ScriptedEngine):
        prompts = [prompt for _, prompt in before]
        assert engine.prompts[: len(prompts)] == prompts
    assert all(stream.segments[-1].source is Source.MODEL for stream in trajectory.streams)


def _places(stream: TokenStream) -> list[tuple[int, Segment]]:
    """Each segment with the place where it begins."""
    ends = accumulate((len(segment.token_ids) for segment in stream), initial=0)
    return list(zip(ends, stream, strict=False))


def observations(trajectory: Trajectory) -> list[ToolResult]:
    return [result for turn in trajectory.turns for result in turn.tool_results]
