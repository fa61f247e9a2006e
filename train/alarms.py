"""Which of a step's numbers say that training goes wrong, and what helps? One line each, when it begins.

The bounds are rules of thumb. A mean over the last steps is compared where one step says little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

_WINDOW = 5
"""Steps over which a mean is taken."""


def alarms(rows: Sequence[Row]) -> list[str]:
    """The alarms that begin with the last of `rows` (all of the run so far, one a step): what, and the remedy.

    >>> quiet, gap = {"step": 1, "logprob_gap/mean": 0.01}, {"step": 2, "logprob_gap/mean": 0.3}
    >>> [line.partition(";")[0] for line in alarms([quiet, gap])]
    ['engine and trainer differ by 0.300 nats a token']
    >>> alarms([quiet, gap, gap])
    []
    """
    lines: list[str] = []
    for look in _ALARMS:
        line = look(rows)
        if line is not None and look(rows[:-1]) is None:
            lines.append(line)
    return lines


def _entropy_collapses(rows: Sequence[Row]) -> str | None:
    known = _values(rows, "entropy")
    if len(known) < 2 * _WINDOW:
        return None
    first, last = _mean(known[:_WINDOW]), _mean(known[-_WINDOW:])
    if last >= 0.2 * first:
        return None
    return (
        f"entropy fell from {first:.3f} to {last:.3f} nats a token: the policy stops exploring; lower "
        "optimizer.learning_rate, raise grpo.epsilon_high, or set grpo.beta"
    )


def _engine_and_trainer_differ(rows: Sequence[Row]) -> str | None:
    known = _values(rows[-1:], "logprob_gap/mean")
    if not known or known[0] <= 0.1:
        return None
    return (
        f"engine and trainer differ by {known[0]:.3f} nats a token; compare rollout.engine.dtype with grpo.dtype, "
        "lower grpo.max_staleness, and look at sync/logprob_gap_max"
    )


def _correction_takes_much(rows: Sequence[Row]) -> str | None:
    known = _values(rows[-1:], "correction/tokens")
    if not known or known[0] <= 0.1:
        return None
    return (
        f"the correction between engine and trainer changes {100 * known[0]:.0f} % of the tokens; find out why they "
        "differ (logprob_gap/mean, staleness/max) before raising its bounds"
    )


def _rewards_are_missing(rows: Sequence[Row]) -> str | None:
    known = _values(rows[-1:], "rewards/excluded")
    if not known or not known[0]:
        return None
    return (
        f"{known[0]:.0f} trajectories have a reward of None or NaN and are left out; the environment's grade must give "
        "finite numbers, and trajectories/ has what they said"
    )


def _groups_are_dead(rows: Sequence[Row]) -> str | None:
    known = _values(rows, "groups/dead")[-_WINDOW:]
    if len(known) < _WINDOW or _mean(known) <= 0.8:
        return None
    rewards = _values(rows[-1:], "reward/mean")
    hint = "too easy" if rewards and rewards[0] > 0.5 else "too hard: more SFT, or easier tasks"
    return (
        f"{100 * _mean(known):.0f} % of the groups of the last {_WINDOW} steps were dead; the tasks are {hint}; raise "
        "grpo.num_generations or grpo.max_resampled_groups"
    )


def _machinery_fails(rows: Sequence[Row]) -> str | None:
    recent = rows[-_WINDOW:]
    failed, total = sum(_values(recent, "trajectories/failed")), sum(_values(recent, "trajectories"))
    if len(recent) < _WINDOW or failed <= 0.2 * total:
        return None
    return (
        f"{failed:.0f} of {total:.0f} trajectories of the last {_WINDOW} steps were lost to sandbox or engine; their "
        "errors are in trajectories/"
    )


def _all_is_cut(rows: Sequence[Row]) -> str | None:
    recent = rows[-_WINDOW:]
    cut = _values(recent, "tokens/excluded/truncated")
    trained = _values(recent, "tokens/trained")
    if len(recent) < _WINDOW or not cut or sum(cut) <= sum(trained):
        return None
    return (
        "more tokens were left out for a limit (truncated) than were trained; raise the limit that stop/… names, or "
        "set grpo.mask_truncated_completions to false"
    )


_ALARMS: tuple[Callable[[Sequence[Row]], str | None], ...] = (
    _entropy_collapses,
    _engine_and_trainer_differ,
    _correction_takes_much,
    _rewards_are_missing,
    _groups_are_dead,
    _machinery_fails,
    _all_is_cut,
)


def _values(rows: Sequence[Row], name: str) -> list[float]:
    """A step without an update has no entropy, and what was not finite is None in the file."""
    return [row[name] for row in rows if row.get(name) is not None]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
