"""The group baseline: numbers by hand and against numpy, exact zeros for dead groups, no reward outside every mean."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.test_types import no_clock
from train.advantages import group_advantages

rewards = st.lists(st.floats(-100, 100), min_size=1, max_size=8)
some_missing = st.lists(st.none() | st.floats(-100, 100), max_size=8)


@no_clock
@given(values=rewards, scale_rewards=st.booleans())
def test_they_are_those_of_numpy(values: list[float], scale_rewards: bool) -> None:
    found = group_advantages(values, scale_rewards=scale_rewards)
    if max(values) - min(values) <= 1e-9:
        assert found == [0.0] * len(values)
        return
    expected = np.array(values) - np.mean(values)
    if scale_rewards:
        expected /= np.std(values, ddof=1) + 1e-4
    assert found == pytest.approx(expected.tolist(), rel=1e-9, abs=1e-9)


def test_numbers_by_hand() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0], scale_rewards=False) == [0.5, -0.5, -0.5, 0.5]
    # Mean 1, unbiased standard deviation 1.
    assert group_advantages([0.0, 1.0, 2.0], scale_rewards=True) == pytest.approx([-1 / 1.0001, 0.0, 1 / 1.0001])


@no_clock
@given(values=some_missing, scale_rewards=st.booleans())
def test_no_reward_is_no_advantage_and_is_in_no_mean_c02(values: list[float | None], scale_rewards: bool) -> None:
    found = group_advantages(values, scale_rewards=scale_rewards)
    assert [advantage is None for advantage in found] == [reward is None for reward in values]
    known = [reward for reward in values if reward is not None]
    assert [a for a in found if a is not None] == group_advantages(known, scale_rewards=scale_rewards)
    assert all(math.isfinite(advantage) for advantage in found if advantage is not None)


@pytest.mark.parametrize("scale_rewards", [False, True])
def test_rewards_that_are_partly_or_all_missing_c02(scale_rewards: bool) -> None:
    found = group_advantages([1.0, None, 0.0, 1.0], scale_rewards=scale_rewards)
    without = group_advantages([1.0, 0.0, 1.0], scale_rewards=scale_rewards)
    assert found == [without[0], None, *without[1:]]
    assert group_advantages([None] * 4, scale_rewards=scale_rewards) == [None] * 4
    assert group_advantages([], scale_rewards=scale_rewards) == []


@pytest.mark.parametrize("scale_rewards", [False, True])
def test_a_missing_reward_is_not_zero_c04(scale_rewards: bool) -> None:
    assert group_advantages([1.0, 1.0, 1.0, None], scale_rewards=scale_rewards) == [0.0, 0.0, 0.0, None]


@pytest.mark.parametrize("scale_rewards", [False, True])
def test_the_mean_is_the_group_s_own_c35(scale_rewards: bool) -> None:
    assert group_advantages([1.0, 1.0], scale_rewards=scale_rewards) == [0.0, 0.0]
    assert group_advantages([0.0, 0.0], scale_rewards=scale_rewards) == [0.0, 0.0]


@pytest.mark.parametrize("scale_rewards", [False, True])
@pytest.mark.parametrize("reward", [0.0, 1.0, -3.5, 0.1])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_dead_group_is_exactly_zero(reward: float, size: int, scale_rewards: bool) -> None:
    """0.1 seven times has a mean that is not 0.1 in floating point; the advantage must be zero all the same."""
    assert group_advantages([reward] * size, scale_rewards=scale_rewards) == [0.0] * size


@no_clock
@given(values=rewards, shift=st.integers(-5, 5), scale_rewards=st.booleans())
def test_a_constant_changes_nothing(values: list[float], shift: int, scale_rewards: bool) -> None:
    shifted = group_advantages([reward + shift for reward in values], scale_rewards=scale_rewards)
    assert shifted == pytest.approx(group_advantages(values, scale_rewards=scale_rewards), rel=1e-6, abs=1e-5)


@pytest.mark.parametrize("scale_rewards", [False, True])
@pytest.mark.parametrize("values", [[0.1 + 0.2, 0.3], [0.7 + 0.2 + 0.1, 1.0, 1.0], [1e6 + 0.1 + 0.2, 1e6 + 0.3]])
def test_rounding_is_no_signal(values: list[float], scale_rewards: bool) -> None:
    assert group_advantages(values, scale_rewards=scale_rewards) == [0.0] * len(values)


def test_a_small_difference_is_a_signal() -> None:
    low, high = group_advantages([0.0, 1e-6], scale_rewards=False)
    assert (low, high) == (-5e-7, 5e-7)


@pytest.mark.parametrize("scale_rewards", [False, True])
@pytest.mark.parametrize("values", [[1e200, 0.0, 0.0], [1e308, 1e308, 0.0]])
def test_huge_rewards_do_not_overflow(values: list[float], scale_rewards: bool) -> None:
    found = group_advantages(values, scale_rewards=scale_rewards)
    expected = np.array(values) / values[0] - np.mean(np.array(values) / values[0])
    scale = np.std(np.array(values) / values[0], ddof=1) if scale_rewards else 1 / values[0]
    assert found == pytest.approx((expected / scale).tolist())
