"""When is a trajectory ended? How much the next turn may sample, and what a turn leads to that brought no answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from data.tool_formats.base import CallError
from envs.types import ToolCall
from rollouts.accounting import TokenCount, affordable_tokens, cost_usd
from rollouts.config import LimitsConfig, PricesConfig
from rollouts.tool_call import CallOutcome
from rollouts.types import StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """How many tokens the next turn may sample, and why a turn that needs more is over there."""

    tokens: int
    reason: StopReason


def allowance(
    limits: LimitsConfig,
    prices: PricesConfig,
    *,
    so_far: TokenCount,
    next_call: TokenCount,
    max_context_tokens: int,
) -> Allowance:
    """The least that any limit leaves to the next turn; less than one token means that there is none.

    Money bounds it like tokens: a call whose input and first token cannot be paid is not made, and no turn costs more
    than what is left, so `max_cost_usd` is never exceeded.

    Args:
        so_far: the calls that were made. next_call: the input of the one to come.
    """
    bounds = [
        Allowance(tokens=max_context_tokens - next_call.input, reason=StopReason.CONTEXT_FULL),
        Allowance(tokens=limits.max_trajectory_tokens - so_far.output, reason=StopReason.TOKEN_BUDGET),
        Allowance(tokens=limits.max_turn_tokens, reason=StopReason.TURN_TOKENS),
    ]
    if limits.max_cost_usd is not None:
        tokens = affordable_tokens(limits.max_cost_usd - cost_usd(so_far, prices), next_call, prices)
        if tokens is not None:
            bounds.append(Allowance(tokens=tokens, reason=StopReason.COST_BUDGET))
    return min(bounds, key=lambda bound: bound.tokens)


class Streaks:
    """What has happened in turns one after the other: calls that cannot be read, tools that fail, calls repeated."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self._parse_errors = 0
        self._tool_errors = 0
        self._repeats = 0
        self._last: str | None = None

    def after_turn(self, calls: Sequence[ToolCall | CallError], outcomes: Sequence[CallOutcome]) -> StopReason | None:
        """Why the turn with these calls was the last one, if it was."""
        unread = any(isinstance(call, CallError) for call in calls)
        self._parse_errors = self._parse_errors + 1 if unread else 0
        failed = any(outcome.result.failed for outcome in outcomes)
        self._tool_errors = self._tool_errors + 1 if failed else 0
        same = None if unread else _signature(calls, outcomes)
        self._repeats = self._repeats + 1 if same is not None and same == self._last else 1
        self._last = same
        if any(outcome.result.ends_trajectory for outcome in outcomes):
            return StopReason.ENV_DONE
        if self._parse_errors >= self._limits.max_parse_errors:
            return StopReason.PARSE_ERRORS
        if self._tool_errors >= self._limits.max_tool_errors:
            return StopReason.TOOL_ERROR
        if self._repeats >= self._limits.max_repeated_calls:
            return StopReason.REPEATED_CALL
        return None


def _signature(calls: Sequence[ToolCall | CallError], outcomes: Sequence[CallOutcome]) -> str:
    """The calls and what came of them, without ids and times."""
    asked = [(call.name, dict(call.arguments)) for call in calls if isinstance(call, ToolCall)]
    return json.dumps([asked, [outcome.result.content for outcome in outcomes]], sort_keys=True)
