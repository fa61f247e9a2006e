"""What an environment paid → one reward: checked where it comes in, so that no later sum is poisoned by one number."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real

from data.jsonl import plain_json
from envs.base import Grade
from envs.types import Message

TURN_TERM = "turn_rewards"
"""The reward term that holds the sum of the rewards of single turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """What a trajectory earned.

    total: the sum of `terms`; None where nothing was paid at all.
    terms: by name; the rewards of turns, where there are any, as the term `turn_rewards`.
    turn_rewards: `[turns]`; () where no turn was paid for.
    """

    total: float | None = None
    terms: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] = ()


def read_reward(grade: Mapping[str, float] | Grade, *, turns: int) -> Reward:
    """What `Session.grade` gave, for a conversation of so many turns. All of it counts, or none of it.

    >>> read_reward(Grade(terms={"success": 1.0}, turn_rewards={1: 0.5}), turns=3)
    Reward(total=1.5, terms={'success': 1.0, 'turn_rewards': 0.5}, turn_rewards=(0.0, 0.5, 0.0))

    Raises:
        ValueError: a term, the reward of a turn, or a sum is no finite number; a turn is paid for that there is not; a
            term's name is no text, or the one that is kept for the turns.
        TypeError: the terms, or the rewards of turns, are no mapping.
    """
    terms, paid = (grade.terms, grade.turn_rewards) if isinstance(grade, Grade) else (grade, {})
    if not isinstance(terms, Mapping):
        raise TypeError(
            f"the environment gave {reprlib.repr(terms)} for reward terms; grade must return a mapping, or a Grade"
        )
    for name, value in terms.items():
        if not isinstance(name, str):
            raise ValueError(
                f"the environment gave a reward term with the name {reprlib.repr(name)}; names are text, and what "
                "turns earned goes into Grade.turn_rewards"
            )
        if name == TURN_TERM:
            raise ValueError(
                f"the environment gave a reward term {TURN_TERM}; that name is kept for the sum of Grade.turn_rewards"
            )
        if not _is_finite(value):
            raise ValueError(
                f"the environment gave the reward term {name} = {reprlib.repr(value)}; grade must give finite numbers"
            )
    checked = {plain_json(name): float(value) for name, value in terms.items()}
    turn_rewards = _turn_rewards(paid, turns)
    try:
        if turn_rewards:
            checked[TURN_TERM] = math.fsum(turn_rewards)
        total = math.fsum(checked.values()) if checked else None
    except OverflowError as error:
        raise ValueError("the environment gave reward terms whose sum is not finite") from error
    return Reward(total=total, terms=checked, turn_rewards=turn_rewards)


def _turn_rewards(paid: Mapping[int, float], turns: int) -> tuple[float, ...]:
    """One for each turn; () where none is paid for. An index that is almost right would pay the wrong turn, so only a
    whole number of a turn that was taken will do."""
    if not isinstance(paid, Mapping):
        raise TypeError(
            f"the environment gave {reprlib.repr(paid)} for rewards of turns; Grade.turn_rewards must be a mapping "
            "from a turn's index to its reward"
        )
    rewards = [0.0] * turns
    for turn, value in paid.items():
        if not isinstance(turn, Integral) or isinstance(turn, bool) or not 0 <= turn < turns:
            there = f"turns 0 to {turns - 1}" if turns else "no turn"
            raise ValueError(
                f"the environment gave a reward for turn {reprlib.repr(turn)}; this trajectory has {there}, and "
                "Grade.turn_rewards must name turns by their index, a whole number"
            )
        if isinstance(value, bool) or not _is_finite(value):
            raise ValueError(
                f"the environment gave turn {turn} the reward {reprlib.repr(value)}; Grade.turn_rewards must hold "
                "finite numbers"
            )
        rewards[int(turn)] = float(value)
    return tuple(rewards) if paid else ()


def count_turns_said(messages: Sequence[Message], opening: Sequence[Message]) -> int:
    """How many turns a conversation has, without those that it was opened with."""
    return sum(message.role == "assistant" for message in messages[len(opening) :])


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False
