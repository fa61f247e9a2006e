"""Reward terms → one reward: checked where they come in, so that no later sum is poisoned by one of them."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from numbers import Real

from data.jsonl import plain_json


def read_reward(terms: Mapping[str, float]) -> tuple[float | None, dict[str, float]]:
    """The reward and its terms; without terms there is no reward.

    Raises:
        ValueError: a term or their sum is no finite number.
        TypeError: the terms are no mapping.
    """
    if not isinstance(terms, Mapping):
        raise TypeError(f"the environment gave {reprlib.repr(terms)} for reward terms; grade must return a mapping")
    for name, value in terms.items():
        if not _is_finite(value):
            raise ValueError(
                f"the environment gave the reward term {name} = {reprlib.repr(value)}; grade must give finite numbers"
            )
    checked = {plain_json(str(name)): float(value) for name, value in terms.items()}
    try:
        return (math.fsum(checked.values()) if checked else None), checked
    except OverflowError as error:
        raise ValueError("the environment gave reward terms whose sum is not finite") from error


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False
