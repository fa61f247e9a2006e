"""How many tokens did rollouts read and write, and what does that cost? Pure arithmetic over finished turns.

Each call of a model reads its whole context again. There are two counts of what a prefix cache saves of that:

- a price list's (and the textbooks'): what the previous call's context began with too is cached, the rest is fresh, so
  that a turn is fresh input once, when the call after it reads it;
- the engine's: it caches in blocks, generated tokens too, and across trajectories.

They are reported side by side; money is by the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollouts.config import LimitsConfig, PricesConfig
from rollouts.types import Trajectory, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCount:
    """Tokens of one trajectory or many; counts add up with `+`.

    input: the contexts of all calls, each counted whole.
    fresh: how many of them were not in the context of the call before.
    output: sampled tokens.
    engine_cached: input that the engine took from its own cache; None where it does not say.
    trained_over: tokens of the streams, all of which a trainer must read to train the sampled ones.
    """

    calls: int = 0
    input: int = 0
    fresh: int = 0
    output: int = 0
    engine_cached: int | None = 0
    trained_over: int = 0

    @property
    def cached(self) -> int:
        return self.input - self.fresh

    @property
    def trained_share(self) -> float:
        """At most this share of what a trainer reads is trained: the sampled part. Masks and dead groups leave less."""
        return self.output / self.trained_over if self.trained_over else 0.0

    def __add__(self, other: TokenCount) -> TokenCount:
        unknown = self.engine_cached is None or other.engine_cached is None
        return TokenCount(
            calls=self.calls + other.calls,
            input=self.input + other.input,
            fresh=self.fresh + other.fresh,
            output=self.output + other.output,
            engine_cached=None if unknown else (self.engine_cached or 0) + (other.engine_cached or 0),
            trained_over=self.trained_over + other.trained_over,
        )


def count_turns(turns: Iterable[Turn]) -> TokenCount:
    """The calls of some turns; streams are not looked at.

    Worked example, a prompt of 100 tokens, a turn of 10 and its observation of 20, and another turn of 5:

        call    context    fresh    output
        0       100        100      10
        1       130        30       5
        sum     230        130      15
    """
    count = TokenCount()
    for turn in turns:
        count += TokenCount(
            calls=1,
            input=turn.prompt_tokens,
            fresh=turn.prompt_tokens - turn.repeated_prompt_tokens,
            output=turn.sampled_tokens,
            engine_cached=turn.cached_prompt_tokens,
        )
    return count


def count_tokens(trajectories: Iterable[Trajectory]) -> TokenCount:
    """All calls of some trajectories, and their streams."""
    count = TokenCount()
    for trajectory in trajectories:
        unfinished = () if trajectory.unfinished is None else (trajectory.unfinished,)
        count += count_turns((*trajectory.turns, *unfinished))
        count += TokenCount(trained_over=sum(len(stream) for stream in trajectory.streams))
    return count


def context_growth(*, base: int, step: int, calls: int) -> int:
    """Input of `calls` calls when each adds the same number of tokens: T·B + d·T(T-1)/2, the law of context growth.

    Args:
        base: B, tokens of system prompt, tools and task.
        step: d, tokens that one turn and its observations add.
        calls: T.

    >>> context_growth(base=1200, step=400, calls=6), context_growth(base=2000, step=800, calls=10)
    (13200, 56000)
    """
    return calls * base + step * calls * (calls - 1) // 2


def cost_usd(count: TokenCount, prices: PricesConfig, *, prefix_cache: bool = True) -> float:
    """What a count costs; without a prefix cache all input is fresh.

    >>> six_steps = TokenCount(calls=6, input=13_200, fresh=3_200, output=480)
    >>> prices = PricesConfig(input=3, cached_input=0.30, output=15)
    >>> round(cost_usd(six_steps, prices), 4), round(cost_usd(six_steps, prices, prefix_cache=False), 4)
    (0.0198, 0.0468)
    """
    cached = count.cached if prefix_cache else 0
    cached_price = prices.input if prices.cached_input is None else prices.cached_input
    dollars = (count.input - cached) * prices.input + cached * cached_price + count.output * prices.output
    return dollars / 1e6


def affordable_tokens(left_usd: float, next_call: TokenCount, prices: PricesConfig) -> int | None:
    """How many tokens the next call may sample for `left_usd`, once its input is paid; None: as many as it likes.

    Args:
        next_call: its input alone.
    """
    left = left_usd - cost_usd(next_call, prices)
    if left < 0:
        return 0
    # A budget of just the price must be enough, whatever the last bit of a sum of dollars.
    return None if prices.output == 0 else int(left * 1e6 / prices.output + 1e-6)


def check_prices(limits: LimitsConfig, prices: PricesConfig) -> None:
    """Refuse a budget that nothing could use up.

    Raises:
        ValueError: `max_cost_usd` is set and every price is 0.
    """
    if limits.max_cost_usd is not None and not (prices.input or prices.cached_input or prices.output):
        raise ValueError(
            f"rollout.limits.max_cost_usd is {limits.max_cost_usd:g}, but all of rollout.prices are 0, so it would "
            "never be reached; set the prices, or take it out"
        )


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two contexts begin with in common.

    >>> common_prefix([1, 2, 3], [1, 2, 4, 5])
    2
    """
    if second[: len(first)] == first:  # as a rule a context only grows; this is much faster than to look at each token
        return len(first)
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
