"""The record of a rollout: trajectories, their turns, why they stopped, and the group they belong to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from data.types import Source, TokenStream
from envs.types import Message, Task, ToolResult, ToolSpec


class StopReason(StrEnum):
    """Why a trajectory ended. The same reason drives reward, mask and metrics."""

    FINAL_ANSWER = "final_answer"
    MAX_TURNS = "max_turns"
    TOKEN_BUDGET = "token_budget"
    TURN_TOKENS = "turn_tokens"
    CONTEXT_FULL = "context_full"
    WALL_CLOCK = "wall_clock"
    COST_BUDGET = "cost_budget"
    PARSE_ERRORS = "parse_errors"
    REPEATED_CALL = "repeated_call"
    TOOL_ERROR = "tool_error"
    ENV_DONE = "env_done"
    SANDBOX_ERROR = "sandbox_error"
    ENGINE_ERROR = "engine_error"
    CANCELLED = "cancelled"

    @property
    def is_truncated(self) -> bool:
        """A limit of ours cut the trajectory; the policy had not finished."""
        return self in _TRUNCATED

    @property
    def is_infrastructure(self) -> bool:
        """Our machinery failed; the trajectory says nothing about the policy and never enters a baseline."""
        return self in _INFRASTRUCTURE


_TRUNCATED = frozenset(
    {
        StopReason.MAX_TURNS,
        StopReason.TOKEN_BUDGET,
        StopReason.TURN_TOKENS,
        StopReason.COST_BUDGET,
        StopReason.CONTEXT_FULL,
        StopReason.WALL_CLOCK,
        StopReason.TOOL_ERROR,
    }
)
_INFRASTRUCTURE = frozenset({StopReason.SANDBOX_ERROR, StopReason.ENGINE_ERROR, StopReason.CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One completion and the environment's reply to it.

    message: what the completion says: thinking, prose and the calls that could be read.
    stream: index of the stream that holds the completion.
    prompt_tokens: length of the context that it was sampled after.
    repeated_prompt_tokens: how many of them, from the first on, the previous call's context began with too: what a
        price list calls cached.
    cached_prompt_tokens: how many of them the engine says it had cached; None where it does not say.
    sampled_tokens: length of the completion.
    thinking_open: it ended before its thinking did; only what stood before that counts.
    invalid_calls: calls that could not be read, name no tool, or do not fit its schema.
    tool_failures: what went wrong inside tools, with the traceback; the model read one line of it.
    retries: calls made again after a transient failure of a tool.
    deadlines: calls that gave no result in time.
    loop_held_s: the longest time that a tool held the thread that all trajectories share.
    """

    index: int
    message: Message
    tool_results: tuple[ToolResult, ...]
    generate_s: float
    env_s: float
    stream: int = 0
    prompt_tokens: int = 0
    repeated_prompt_tokens: int = 0
    cached_prompt_tokens: int | None = None
    sampled_tokens: int = 0
    thinking_open: bool = False
    invalid_calls: int = 0
    tool_failures: tuple[str, ...] = ()
    retries: int = 0
    deadlines: int = 0
    loop_held_s: float = 0.0


def asked_turn(index: int, *, prompt_tokens: int, repeated: int) -> Turn:
    """A turn of which only the prompt is known yet. That costs what it costs, whatever becomes of the answer."""
    return Turn(
        index=index,
        message=Message(role="assistant", content=""),
        tool_results=(),
        generate_s=0.0,
        env_s=0.0,
        prompt_tokens=prompt_tokens,
        repeated_prompt_tokens=repeated,
        cached_prompt_tokens=0,  # unknown would hide what the engine says of all other calls
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One attempt at one task.

    `reward` is None when the environment could not grade it (infrastructure failures). It is the sum of `reward_terms`,
    one of which, `turn_rewards`, is what single turns earned, where the environment pays for turns; the field
    `turn_rewards` `[turns]` then says which earned how much, and is () where it does not. `error` says what went wrong
    there, `is_fault` that it is of somebody's code or configuration: it would come again. `forged` counts the control
    tokens that prompt and tool results spell; they stayed text. `relaxed` is what the task's sandbox was less strict in
    than the defaults, in words. `opening` and `tools` are what the model was given: with them and the completions the
    streams can be made again. `unfinished` is the last call of the model where no turn came of it: it was cut off,
    failed, or could not be read; it is paid for all the same. `cost_usd` is by the run's prices. `attempt` counts the
    earlier tries that our machinery lost.
    """

    trajectory_id: str
    task_id: str
    group_id: str
    sibling_index: int
    streams: tuple[TokenStream, ...]
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    reward: float | None
    reward_terms: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] = ()
    forged: int = 0
    relaxed: tuple[str, ...] = ()
    error: str | None = None
    is_fault: bool = False
    opening: tuple[Message, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    unfinished: Turn | None = None
    cost_usd: float = 0.0
    attempt: int = 0

    def __post_init__(self) -> None:
        if self.turn_rewards and len(self.turn_rewards) != len(self.completion_ids):
            raise ValueError(
                f"trajectory {self.trajectory_id}: {len(self.turn_rewards)} rewards of turns, but "
                f"{len(self.completion_ids)} turns; give one for each, or none"
            )

    @property
    def completion_ids(self) -> tuple[str, ...]:
        """What was sampled, over all streams: the completion of turn 0, of turn 1, …"""
        return tuple(
            segment.completion_id
            for stream in self.streams
            for segment in stream
            if segment.source is Source.MODEL and segment.completion_id is not None
        )

    @property
    def usable_reward(self) -> float | None:
        """`reward` where it may be averaged and trained with: None also where our machinery failed, or where it is no
        finite number."""
        if self.reward is None or self.stop_reason.is_infrastructure or not math.isfinite(self.reward):
            return None
        return self.reward

    @property
    def oldest_version(self) -> int:
        """Of the weights that sampled its tokens; 0 where there is none."""
        versions = [min(segment.policy_version) for stream in self.streams for segment in stream if segment.logprobs]
        return min(versions, default=0)

    @property
    def cause(self) -> str:
        """What went wrong, in one line: the last one of `error` that says something, else why it stopped."""
        lines = (self.error or "").splitlines()
        return next((line.strip() for line in reversed(lines) if any(map(str.isalnum, line))), self.stop_reason.value)


def trajectory_name(group_id: str, sibling_index: int, attempt: int = 0) -> str:
    """The id of one attempt; its completions are `{id}/0`, `{id}/1`, …, and no id is used twice.

    >>> trajectory_name("step-1/t", 3), trajectory_name("step-1/t", 3, 1)
    ('step-1/t/3', 'step-1/t/3~1')
    """
    return f"{group_id}/{sibling_index}" + (f"~{attempt}" if attempt else "")


def is_success(reward: float) -> bool:
    """A reward of 1 or more; the terms of one may sum to 0.9999999999999999."""
    return reward >= 1.0 - 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """The trajectories of one task that share a baseline.

    `lost` holds the attempts that were begun again, or cancelled: no member of the group, but what was sampled for them
    is in the ledger, and is accounted for as excluded.
    """

    group_id: str
    task: Task
    trajectories: tuple[Trajectory, ...]
    lost: tuple[Trajectory, ...] = ()

    def __post_init__(self) -> None:
        for trajectory in (*self.trajectories, *self.lost):
            if trajectory.group_id != self.group_id:
                raise ValueError(
                    f"group {self.group_id}: trajectory {trajectory.trajectory_id} is of group {trajectory.group_id}; "
                    "put together those of one group_id only"
                )

    @property
    def failures(self) -> tuple[Trajectory, ...]:
        """Trajectories that our machinery lost; they are outside the baseline and are counted."""
        return tuple(t for t in self.trajectories if t.stop_reason.is_infrastructure)
