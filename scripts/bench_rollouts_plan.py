"""What do the trajectories of the rollouts benchmark say, and how long do their tools take?

A plan fixes, from a seed, each turn's token ids, the call that it makes and the latency of that call, so that every
contender does the same work. The tool is real: it waits, and looks the key of the call up in a table. It needs no
sandbox, which none of the contenders has then to pay for. How turns come out of a model is not said here.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from transformers.utils import get_json_schema

from data.chat import Renderer
from data.types import Segment
from envs.base import Split
from envs.sandbox.base import Sandbox, SandboxSpec
from envs.types import Message, Task, ToolCall, ToolResult, ToolSpec

SYSTEM = "Look the facts up, one call at a time. Then say done."
TURNS = (3, 6)
WORDS = (8, 32)
"""Of the prose before a call, and of a final answer: about 25 to 65 tokens a turn with the call."""
FACT_WORDS = (8, 24)
LATENCY_P50_S = 0.05
LATENCY_P99_S = 2.0
_VOCABULARY = "the river town has a bridge and park near old road with stone wall over green hill by north gate".split()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTurn:
    """`token_ids` `[n]`, the stop token included; `key` is what its call looks up, None in a final answer."""

    token_ids: tuple[int, ...]
    key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One trajectory for each task. `facts`: what the tool answers, by key; `latency_s`: after how long."""

    turns: Mapping[str, tuple[PlannedTurn, ...]]
    tasks: tuple[Task, ...]
    facts: Mapping[str, str]
    latency_s: Mapping[str, float]

    @property
    def num_turns(self) -> int:
        return sum(len(turns) for turns in self.turns.values())

    @property
    def sampled_tokens(self) -> int:
        return sum(len(turn.token_ids) for turns in self.turns.values() for turn in turns)


def make_plan(renderer: Renderer, *, trajectories: int, seed: int, turns: tuple[int, int] = TURNS) -> Plan:
    """`trajectories` tasks with `turns` (from, to) turns each, evenly drawn; the last turn is the final answer."""
    chance = random.Random(f"rollouts/{seed}")
    tasks: list[Task] = []
    said: dict[str, tuple[PlannedTurn, ...]] = {}
    facts: dict[str, str] = {}
    for number in range(trajectories):
        task = Task(task_id=f"record-{number:04}", prompt=f"Tell me about record {number:04}.")
        keys = [f"fact {turn} of record {number:04}" for turn in range(chance.randint(*turns) - 1)]
        facts |= {key: _words(chance, FACT_WORDS) for key in keys}
        calls = [_turn(renderer, _words(chance, WORDS), key) for key in keys]
        said[task.task_id] = (*calls, _turn(renderer, _words(chance, WORDS), None))
        tasks.append(task)
    waits_s = latencies_s(len(facts))
    chance.shuffle(waits_s)
    return Plan(turns=said, tasks=tuple(tasks), facts=facts, latency_s=dict(zip(facts, waits_s, strict=True)))


def latencies_s(count: int) -> list[float]:
    """The `count` quantiles of a log-normal distribution in the middle of `count` equal shares, from short to long.

    So half of them are below `LATENCY_P50_S` and one in a hundred is above `LATENCY_P99_S` in every plan, and none is
    longer by bad luck.

    >>> latencies_s(1)
    [0.05]
    """
    normal = NormalDist()
    scale = math.log(LATENCY_P99_S / LATENCY_P50_S) / normal.inv_cdf(0.99)
    return [LATENCY_P50_S * math.exp(scale * normal.inv_cdf((index + 0.5) / count)) for index in range(count)]


def calls_of(plan: Plan, renderer: Renderer, env: PlannedEnv) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """The engine's calls of a plan as our renderer writes them: prompt ids and sampled ids, by `{task}/{turn}`."""
    calls: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for task in plan.tasks:
        prompt = _ids(renderer.opening(env.opening(task), env.tools))
        for index, turn in enumerate(plan.turns[task.task_id]):
            calls[f"{task.task_id}/{index}"] = prompt, turn.token_ids
            if turn.key is not None:
                result = Message(role="tool", content=plan.facts[turn.key], call_id="call")
                bridge = renderer.bridge([result], prompt_ids=prompt, sampled_ids=turn.token_ids, tools=env.tools)
                assert bridge is not None, "a tool's result never begins a new stream"
                prompt += turn.token_ids + _ids(bridge)
    return calls


def _ids(segments: Sequence[Segment]) -> tuple[int, ...]:
    return tuple(token for segment in segments for token in segment.token_ids)


def _turn(renderer: Renderer, prose: str, key: str | None) -> PlannedTurn:
    calls = () if key is None else (ToolCall(call_id="call", name="lookup", arguments={"key": key}),)
    message = Message(role="assistant", content=prose, tool_calls=calls)
    return PlannedTurn(token_ids=tuple(renderer.turn_ids(message)), key=key)


def _words(chance: random.Random, count: tuple[int, int]) -> str:
    return " ".join(chance.choices(_VOCABULARY, k=chance.randint(*count)))


class Facts:
    """The tool. `returned` is told of each result, when it is there."""

    def __init__(self, plan: Plan, *, wait: bool, returned: Callable[[], None] = lambda: None) -> None:
        self._facts = plan.facts
        self._latency_s = plan.latency_s if wait else None
        self._returned = returned

    # No annotation of the result: TRL writes it into the tool's schema, and ours has none.
    async def lookup(self, key: str):
        """Look up a fact.

        Args:
            key: such as: fact 2 of record 0017
        """
        if self._latency_s is not None:
            await asyncio.sleep(self._latency_s[key])
        self._returned()
        return self._facts[key]


class PlannedEnv:
    """The environment of a plan, for our own rollouts: each task's opening, and one tool."""

    name = "planned"

    def __init__(self, plan: Plan, facts: Facts) -> None:
        self._plan = plan
        self._facts = facts
        # The schema that TRL makes of the same function.
        schema: dict[str, Any] = get_json_schema(facts.lookup)["function"]
        self.tools: Sequence[ToolSpec] = (ToolSpec(**schema),)

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return list(self._plan.tasks[:count])

    def opening(self, task: Task) -> list[Message]:
        return [Message(role="system", content=SYSTEM), Message(role="user", content=task.prompt)]

    def sandbox_spec(self, task: Task) -> SandboxSpec:
        return SandboxSpec()

    def session(self, task: Task, sandbox: Sandbox) -> _PlannedSession:
        return _PlannedSession(self._facts)

    def demonstrate(self, task: Task, messages: Sequence[Message], seed: int) -> Message:
        raise NotImplementedError("a plan is carried out, not demonstrated")


class _PlannedSession:
    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    async def call(self, call: ToolCall) -> ToolResult:
        return ToolResult(call_id=call.call_id, content=await self._facts.lookup(**call.arguments))

    async def grade(self, messages: Sequence[Message]) -> Mapping[str, float]:
        return {"done": float(messages[-1].role == "assistant")}
