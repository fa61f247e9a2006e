"""Trajectories of which only ids, turns, rewards and how they ended matter: a turn is one token."""

from __future__ import annotations

from collections.abc import Sequence

from data.types import Completion, Segment, Source, TokenStream
from envs.types import Task
from rollouts.reward import TURN_TERM
from rollouts.types import StopReason, Trajectory, TrajectoryGroup


def graded(
    group_id: str,
    sibling_index: int,
    reward: float | None,
    *,
    turns: int = 1,
    turn_rewards: Sequence[float] = (),
    stop_reason: StopReason = StopReason.FINAL_ANSWER,
    new_streams: Sequence[int] = (),
    tokens: int = 1,
    tool_tokens: int = 1,
) -> Trajectory:
    """`reward` is the whole of it, what turns earned included. A new stream begins at each turn of `new_streams`."""
    name = f"{group_id}/{sibling_index}"
    streams = [TokenStream([Segment(source=Source.PROMPT, token_ids=(1,))])] if turns else []
    for turn in range(turns):
        if turn in new_streams:
            streams.append(TokenStream([Segment(source=Source.PROMPT, token_ids=(1,) * (turn + 1))]))
        elif turn:
            streams[-1].append(Segment(source=Source.TOOL, token_ids=(9,) * tool_tokens))
        completion = Completion(
            completion_id=f"{name}/{turn}",
            token_ids=(2,) * tokens,
            logprobs=(-1.0,) * tokens,
            finish_reason="stop",
            policy="p",
            policy_version=(0,) * tokens,
        )
        streams[-1].append(Segment.sampled(completion))
    terms = {} if reward is None else {"success": reward - sum(turn_rewards)}
    return Trajectory(
        trajectory_id=name,
        task_id=group_id,
        group_id=group_id,
        sibling_index=sibling_index,
        streams=tuple(streams),
        turns=(),
        stop_reason=stop_reason,
        reward=reward,
        reward_terms=terms | ({TURN_TERM: sum(turn_rewards)} if turn_rewards else {}),
        turn_rewards=tuple(turn_rewards),
    )


def grouped(trajectories: Sequence[Trajectory]) -> list[TrajectoryGroup]:
    """By their group_id, in the order in which each comes first."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    return [
        TrajectoryGroup(group_id=name, task=Task(task_id=name, prompt=""), trajectories=tuple(members))
        for name, members in groups.items()
    ]
