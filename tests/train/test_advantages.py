"""The comparison of returns at one turn: numbers by hand and against numpy, exact zeros, and the returns themselves."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.test_types import no_clock
from train.advantages import Spread, group_advantages, turn_returns
from train.config import Baseline, GrpoConfig, ScaleRewards

values = st.lists(st.floats(-100, 100), min_size=1, max_size=8)
scales = st.sampled_from(["group", "none"])
both_scales = pytest.mark.parametrize("scale_rewards", ["group", "none"])
own_baselines = pytest.mark.parametrize("baseline", ["group", "leave_one_out"])


@no_clock
@given(values=values, others=values)
@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["group", "leave_one_out", "batch"])
def test_they_are_those_of_numpy(
    values: list[float], others: list[float], baseline: Baseline, scale_rewards: ScaleRewards
) -> None:
    batch = np.array([*values, *others])
    own = np.array(values)
    found = group_advantages(values, batch=Spread.of(batch.tolist()), baseline=baseline, scale_rewards=scale_rewards)
    means = {
        "group": np.full(len(own), own.mean()),
        "leave_one_out": np.array([np.delete(own, i).mean() if len(own) > 1 else own[i] for i in range(len(own))]),
        "batch": np.full(len(own), batch.mean()),
    }
    spread = {"group": own.std(ddof=1) if len(own) > 1 else 0.0, "batch": batch.std(ddof=1)}
    scale = spread[scale_rewards] + 1e-4 if scale_rewards != "none" else 1.0
    # Up to 1e-9 is taken for rounding.
    tolerance = 1e-8 / scale
    assert np.abs(np.array(found) - (own - means[baseline]) / scale).max() <= tolerance


def test_numbers_by_hand() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0], scale_rewards="none") == [0.5, -0.5, -0.5, 0.5]
    # Mean 1, unbiased standard deviation 1.
    assert group_advantages([0.0, 1.0, 2.0]) == pytest.approx([-1 / 1.0001, 0.0, 1 / 1.0001])
    # The others' means are 1.5, 1 and 0.5.
    found = group_advantages([0.0, 1.0, 2.0], baseline="leave_one_out", scale_rewards="none")
    assert found == pytest.approx([-1.5, 0.0, 1.5])
    batch = Spread.of([0.0, 1.0, 2.0, 5.0])
    assert (batch.mean, batch.std) == pytest.approx((2.0, math.sqrt(14 / 3)))
    found = group_advantages([0.0, 1.0, 2.0], batch=batch, baseline="batch", scale_rewards="none")
    assert found == pytest.approx([-2.0, -1.0, 0.0])


@both_scales
@own_baselines
@pytest.mark.parametrize("reward", [0.0, 1.0, -3.5, 0.1])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_dead_group_is_exactly_zero(
    reward: float, size: int, baseline: Baseline, scale_rewards: ScaleRewards
) -> None:
    """0.1 seven times has a mean that is not 0.1 in floating point; the advantage must be zero all the same."""
    assert group_advantages([reward] * size, baseline=baseline, scale_rewards=scale_rewards) == [0.0] * size
    batch = Spread.of([reward] * 2 * size)
    assert group_advantages([reward] * size, batch=batch, baseline="batch", scale_rewards="batch") == [0.0] * size


@no_clock
@given(values=values, shift=st.integers(-5, 5), scale_rewards=scales)
@own_baselines
def test_a_constant_changes_nothing(
    values: list[float], shift: int, baseline: Baseline, scale_rewards: ScaleRewards
) -> None:
    terms = {"baseline": baseline, "scale_rewards": scale_rewards}
    shifted = group_advantages([value + shift for value in values], **terms)
    # What is rounding for the one may be just above it for the other: 1e-9, divided by the smallest scale.
    assert shifted == pytest.approx(group_advantages(values, **terms), rel=1e-6, abs=3e-5)


@no_clock
@given(values=st.lists(st.floats(-100, 100), min_size=2, max_size=8), scale_rewards=scales)
@own_baselines
def test_they_sum_to_zero(values: list[float], baseline: Baseline, scale_rewards: ScaleRewards) -> None:
    found = group_advantages(values, baseline=baseline, scale_rewards=scale_rewards)
    assert math.fsum(found) == pytest.approx(0.0, abs=1e-4)


@both_scales
@own_baselines
@pytest.mark.parametrize("values", [[0.1 + 0.2, 0.3], [0.7 + 0.2 + 0.1, 1.0, 1.0], [1e6 + 0.1 + 0.2, 1e6 + 0.3]])
def test_rounding_is_no_signal(values: list[float], baseline: Baseline, scale_rewards: ScaleRewards) -> None:
    assert group_advantages(values, baseline=baseline, scale_rewards=scale_rewards) == [0.0] * len(values)


def test_a_small_difference_is_a_signal() -> None:
    low, high = group_advantages([0.0, 1e-6], scale_rewards="none")
    assert (low, high) == (-5e-7, 5e-7)


@both_scales
@pytest.mark.parametrize("values", [[1e200, 0.0, 0.0], [1e308, 1e308, 0.0]])
def test_huge_rewards_do_not_overflow(values: list[float], scale_rewards: ScaleRewards) -> None:
    found = group_advantages(values, scale_rewards=scale_rewards)
    expected = np.array(values) / values[0] - np.mean(np.array(values) / values[0])
    scale = np.std(np.array(values) / values[0], ddof=1) if scale_rewards == "group" else 1 / values[0]
    assert found == pytest.approx((expected / scale).tolist())


def test_returns_by_hand() -> None:
    assert turn_returns([1.0, 2.0, 4.0], 8.0, turns=3) == (15.0, 14.0, 12.0)
    assert turn_returns([1.0, 2.0, 4.0], 8.0, turns=3, discount=0.5) == (1 + 0.5 * 8, 2 + 0.5 * 12, 12.0)
    assert turn_returns([], 1.0, turns=1, discount=0.5) == (1.0,)
    assert turn_returns([], 1.0, turns=0) == (1.0,)


@no_clock
@given(
    turn_rewards=st.lists(st.floats(-10, 10), min_size=1, max_size=6),
    outcome=st.floats(-10, 10),
    discount=st.floats(0.05, 1),
)
def test_returns_are_the_sum_of_the_definition(turn_rewards: list[float], outcome: float, discount: float) -> None:
    turns = len(turn_rewards)
    expected = [
        sum(discount ** (j - k) * turn_rewards[j] for j in range(k, turns)) + discount ** (turns - 1 - k) * outcome
        for k in range(turns)
    ]
    assert turn_returns(turn_rewards, outcome, turns=turns, discount=discount) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"baseline": "batch"}, "set scale_rewards to 'batch' or 'none'"),
        ({"truncation_penalty": -0.5}, "set mask_truncated_completions = false"),
        ({"truncation_penalty": 0.5, "mask_truncated_completions": False}, "less than or equal to 0"),
        ({"discount": 0.0}, "greater than 0"),
        ({"discount": 1.01}, "less than or equal to 1"),
        ({"scale_rewards": True}, "'group', 'batch' or 'none'"),
        ({"baseline": "mean"}, "'group', 'leave_one_out' or 'batch'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        GrpoConfig.model_validate(settings)


def settings_of_the_readme() -> dict[str, dict[str, object]]:
    """The table of algorithms, as settings by name; a cell is the column's value, in the last one `key = value`."""
    text = (Path(__file__).parents[2] / "train" / "README.md").read_text(encoding="utf-8")
    table = text.partition("## Settings that give an algorithm")[2].partition("##")[0]
    header, _, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line[:1] == "|"
    ]
    keys = [cell.strip("`") for cell in header[1:4]]
    return {
        row[0].split(" (")[0]: {key: cell.strip("`") for key, cell in zip(keys, row[1:4], strict=True)}
        | tomllib.loads("\n".join(pair for pair in row[4].split("`") if " = " in pair))
        for row in rows
    }


def test_the_settings_that_the_readme_names_are_settings() -> None:
    """Each algorithm has its own, and all are taken."""
    settings = settings_of_the_readme()
    assert list(settings) == ["GRPO", "Dr. GRPO", "DAPO", "GSPO", "CISPO", "RLOO", "REINFORCE++"]
    configs = [GrpoConfig.model_validate(values) for values in settings.values()]
    assert len({config.model_dump_json() for config in configs}) == len(configs)
    assert configs[2] == GrpoConfig(), "the default is DAPO"
