"""What the tests of schedules share: an engine and tools that take time, on a plan, and count who uses them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import cast

from data.types import Completion, SamplingParams
from envs.base import Split
from envs.sandbox.base import Sandbox, SandboxError, SandboxSpec
from envs.types import Message, Task, ToolCall, ToolResult, ToolSpec
from rollouts.engine import EngineError, EngineLoad
from rollouts.engine_scripted import ScriptedEngine
from rollouts.scheduler import Scheduler
from tests.rollouts.desk import say


def planned_turns(trajectory: str) -> list[tuple[float, float]]:
    """For each turn of a trajectory (`group/sibling`) how long it samples and how long its tool takes, in seconds: up
    to five calls, tools with a long tail, a last turn without a tool."""
    random = Random(trajectory)
    turns = [(random.uniform(0.5, 1.5), random.lognormvariate(-0.5, 1.5)) for _ in range(random.randint(0, 5))]
    return [*turns, (random.uniform(0.5, 1.5), 0.0)]


class WorkshopEngine(ScriptedEngine):
    """At most `capacity` completions are sampled at once, the others wait. What a trajectory says and how long it takes
    is `planned_turns`; `fails` says of a completion whether the engine breaks on it.

    `busy_s` and `wanted_s` are integrals over time: of the running completions, and of those that could have run;
    `loaded_busy_s` is the first, and `loaded_s` the time, while trajectories are queued.
    """

    def __init__(self, capacity: int, *, fails: Callable[[str], bool] = lambda completion_id: False) -> None:
        super().__init__(lambda prompt: self._now_says, capacity=capacity)
        self._now_says: Sequence[int] = ()
        self._places = asyncio.Semaphore(capacity)
        self.fails = fails
        self.asked: list[str] = []
        self.running = 0
        self.waiting = 0
        self.most_running = 0
        self.scheduler: Scheduler | None = None
        self.max_trajectories = 0
        self.busy_s = self.wanted_s = 0.0
        self.loaded_busy_s = self.loaded_s = 0.0
        self._last_s = 0.0

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(running=self.running, waiting=self.waiting, capacity=self._capacity)

    async def generate(self, completion_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        self.asked.append(completion_id)
        trajectory, _, turn = completion_id.rpartition("/")
        plan = planned_turns(trajectory.partition("~")[0])
        self._count(waiting=1)
        try:
            await self._places.acquire()
        finally:
            self._count(waiting=-1)
        self._count(running=1)
        try:
            await asyncio.sleep(plan[int(turn)][0])
            if self.fails(completion_id):
                raise EngineError("the engine broke")
            last = int(turn) == len(plan) - 1
            self._now_says = say("ok") if last else say("", ("work", str(plan[int(turn)][1])))
            return await super().generate(completion_id, prompt_ids, params)
        finally:
            self._count(running=-1)
            self._places.release()

    def _count(self, running: int = 0, waiting: int = 0) -> None:
        now = asyncio.get_running_loop().time()
        passed_s, self._last_s = now - self._last_s, now
        ready = self.running + self.waiting
        if self.scheduler is not None and (status := self.scheduler.status).queued:
            ready += min(status.queued, self.max_trajectories - status.in_flight)
            self.loaded_s += passed_s
            self.loaded_busy_s += passed_s * self.running
        self.busy_s += passed_s * self.running
        self.wanted_s += passed_s * min(self._capacity, ready)
        self.running += running
        self.waiting += waiting
        self.most_running = max(self.most_running, self.running)


class Workshop:
    """One tool, that takes as long as it is told. A prompt may ask for trouble: "deaf" (it does not end when it is
    cancelled, the first three times), "faulty" (its code fails), "no sandbox".

    begun: the task of each attempt, in order. at_work: the tools that run.
    """

    name = "workshop"
    tools: Sequence[ToolSpec] = (
        ToolSpec(
            name="work",
            description="Takes a while.",
            parameters={"type": "object", "properties": {"text": {"type": "string"}}},
        ),
    )

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.at_work = 0

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return [Task(task_id=f"{index:03d}", prompt="Work.") for index in range(count)]

    def opening(self, task: Task) -> list[Message]:
        self.begun.append(task.task_id)
        if "faulty" in task.prompt:
            raise RuntimeError("a fault of the environment's code")
        return [Message(role="user", content=task.prompt)]

    def sandbox_spec(self, task: Task) -> SandboxSpec:
        if "no sandbox" in task.prompt:
            raise SandboxError("no sandbox to be had; start one")
        return SandboxSpec()

    def session(self, task: Task, sandbox: Sandbox) -> WorkshopSession:
        return WorkshopSession(self, deaf=3 if "deaf" in task.prompt else 0)

    def demonstrate(self, task: Task, messages: Sequence[Message], seed: int) -> Message:
        return Message(role="assistant", content="ok")


class WorkshopSession:
    def __init__(self, shop: Workshop, *, deaf: int) -> None:
        self._shop = shop
        self._deaf = deaf

    async def call(self, call: ToolCall) -> ToolResult:
        self._shop.at_work += 1
        try:
            await asyncio.sleep(float(str(call.arguments["text"])))
        finally:
            self._shop.at_work -= 1
        return ToolResult(call_id=call.call_id, content="done")

    async def grade(self, messages: Sequence[Message]) -> Mapping[str, float]:
        while self._deaf:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self._deaf -= 1
        return {"ok": 1.0}


class CountedSandboxes:
    """Sandboxes without anything in them; `open` is how many there are."""

    name = "counted"

    def __init__(self) -> None:
        self.open = 0

    async def start(self, spec: SandboxSpec) -> Sandbox:
        self.open += 1
        return cast("Sandbox", _CountedSandbox(self))

    async def close(self) -> None:
        """Nothing to close."""


class _CountedSandbox:
    def __init__(self, factory: CountedSandboxes) -> None:
        self._factory = factory

    async def close(self) -> None:
        self._factory.open -= 1
