"""Trajectories → numbers: what a step's or an evaluation's sampling looked like."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from data.types import Source
from rollouts.accounting import count_tokens
from rollouts.reward import TURN_TERM
from rollouts.types import StopReason, Trajectory


def summarise(trajectories: Sequence[Trajectory], lost: Sequence[Trajectory] = ()) -> dict[str, float]:
    """The metrics of some trajectories, and of the `lost` attempts that were begun again in their stead.

    - `reward/…`, `length/mean`, `turns/mean`: over the trajectories that have a reward (infrastructure failures are
      only counted); `reward/std` is unbiased. `length` is in tokens that the policy sampled; tool tokens never count.
      A reward term is averaged over the trajectories that have it (an environment may grade tasks of several kinds),
      and `turn_rewards` over all: where no turn earned anything, it is not there.
    - `rewards/excluded`: trajectories that ended by themselves, and for which the environment gave no reward that is a
      finite number: they are in no mean and no baseline.
    - `stop/<reason>`: the share of the trajectories that ended so, for every reason.
    - `tools/…`: of those that have a reward: all calls; those answered with an error; those of them that were wrong
      (`invalid_calls`); those whose tool failed by itself (`failures`) or gave nothing in time (`deadlines`); retries
      that the policy never saw; the longest time that a tool held the thread of all.
    - `turns/thinking_open`, `answers/empty`: turns, and final answers, that say nothing. `streams/extra`: histories
      that were written anew.
    - `tokens/…`, `cost/usd`: what everything took, lost attempts included; see `accounting.TokenCount`. What the engine
      counts (`tokens/engine_…`) is there where it says so.
    """
    graded = [trajectory for trajectory in trajectories if trajectory.usable_reward is not None]
    rewards = [trajectory.usable_reward or 0.0 for trajectory in graded]
    turns = [turn for trajectory in graded for turn in trajectory.turns]
    results = [result for turn in turns for result in turn.tool_results]
    row: dict[str, float] = {
        "trajectories": len(trajectories),
        "trajectories/failed": len(trajectories) - len(graded),
        "trajectories/lost_attempts": len(lost),
        "reward/mean": _mean(rewards),
        "reward/std": statistics.stdev(rewards) if len(rewards) > 1 else 0.0,
        "reward/min": min(rewards, default=0.0),
        "reward/max": max(rewards, default=0.0),
        "rewards/excluded": sum(t.usable_reward is None and not t.stop_reason.is_infrastructure for t in trajectories),
        "length/mean": _mean([sampled_tokens(trajectory) for trajectory in graded]),
        "turns/mean": _mean([len(trajectory.turns) for trajectory in graded]),
        "turns/thinking_open": sum(turn.thinking_open for turn in turns),
        "answers/empty": sum(_is_empty_answer(trajectory) for trajectory in graded),
        "streams/extra": sum(max(0, len(trajectory.streams) - 1) for trajectory in graded),
        "tools/calls": len(results),
        "tools/errors": sum(result.is_error for result in results),
        "tools/invalid_calls": sum(turn.invalid_calls for turn in turns),
        "tools/failures": sum(result.failed for result in results),
        "tools/retries": sum(turn.retries for turn in turns),
        "tools/deadlines": sum(turn.deadlines for turn in turns),
        "tools/loop_held_s/max": max((turn.loop_held_s for turn in turns), default=0.0),
        "control_tokens/forged": sum(trajectory.forged for trajectory in trajectories),
    }
    for name in sorted({name for trajectory in graded for name in trajectory.reward_terms}):
        # An environment may name a term as one of ours.
        key = f"reward/{name}" if f"reward/{name}" not in row else f"reward/term/{name}"
        row[key] = _mean([t.reward_terms.get(name, 0.0) for t in graded if name in t.reward_terms or name == TURN_TERM])
    for reason in StopReason:
        row[f"stop/{reason.value}"] = _mean([trajectory.stop_reason is reason for trajectory in trajectories])
    return row | _spent([*trajectories, *lost])


def sampled_tokens(trajectory: Trajectory) -> int:
    """How many tokens the policy sampled."""
    return sum(
        len(segment.token_ids) for stream in trajectory.streams for segment in stream if segment.source is Source.MODEL
    )


def _spent(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    count = count_tokens(trajectories)
    row: dict[str, float] = {
        "tokens/input": count.input,
        "tokens/input_fresh": count.fresh,
        "tokens/input_cached": count.cached,
        "tokens/output": count.output,
        "tokens/trained_share": count.trained_share,
        "cost/usd": sum(trajectory.cost_usd for trajectory in trajectories),
    }
    if count.engine_cached is not None:
        row["tokens/engine_input_fresh"] = count.input - count.engine_cached
        row["tokens/engine_input_cached"] = count.engine_cached
    return row


def _is_empty_answer(trajectory: Trajectory) -> bool:
    said = [turn.message.content.strip() for turn in trajectory.turns[-1:]]
    return trajectory.stop_reason is StopReason.FINAL_ANSWER and said == [""]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
