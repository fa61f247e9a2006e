"""What has ended so far, in a few numbers that thousands of trajectories do not make larger."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rollouts.accounting import TokenCount, count_tokens
from rollouts.summary import sampled_tokens
from rollouts.types import StopReason, Trajectory


@dataclass(slots=True, kw_only=True)
class Tally:
    """Sums over the trajectories that were added. Reward, turns and what they sampled are of those that have a reward;
    time, money and `tokens` are of all, attempts that were begun again included."""

    trajectories: int = 0
    lost: int = 0
    first_cause: str | None = None
    """What went wrong in the first that was lost."""
    begun_again: int = 0
    """Attempts that were lost, and others were begun in their stead: no trajectories, but they were paid for."""
    reward: float = 0.0
    sampled_tokens: int = 0
    turns: int = 0
    generate_s: float = 0.0
    env_s: float = 0.0
    cost_usd: float = 0.0
    tokens: TokenCount = field(default_factory=TokenCount)
    stops: Counter[StopReason] = field(default_factory=Counter)
    tools: Counter[str] = field(default_factory=Counter)
    """Calls, and what became of them."""
    forged: int = 0

    def add(self, trajectory: Trajectory) -> None:
        self.trajectories += 1
        self.stops[trajectory.stop_reason] += 1
        self.forged += trajectory.forged
        for turn in trajectory.turns:
            self.tools["calls"] += len(turn.tool_results)
            self.tools["answered with an error"] += sum(result.is_error for result in turn.tool_results)
            self.tools["invalid"] += turn.invalid_calls
            self.tools["failed inside the tool"] += sum(result.failed for result in turn.tool_results)
            self.tools["late"] += turn.deadlines
            self.tools["tried again"] += turn.retries
        self._spend(trajectory)
        reward = trajectory.usable_reward
        if reward is None:
            self.lost += 1
            self.first_cause = self.first_cause or trajectory.cause
            return
        self.reward += reward
        self.sampled_tokens += sampled_tokens(trajectory)
        self.turns += len(trajectory.turns)

    def add_begun_again(self, attempt: Trajectory) -> None:
        """Count an attempt that was lost, in whose stead another is begun."""
        self.begun_again += 1
        self._spend(attempt)

    def _spend(self, trajectory: Trajectory) -> None:
        self.cost_usd += trajectory.cost_usd
        self.tokens += count_tokens([trajectory])
        self.generate_s += sum(turn.generate_s for turn in trajectory.turns)
        self.env_s += sum(turn.env_s for turn in trajectory.turns)

    @property
    def graded(self) -> int:
        return self.trajectories - self.lost

    @property
    def tool_share(self) -> float:
        """The part of the time of all turns that went to tools."""
        return self.env_s / max(self.env_s + self.generate_s, 1e-9)

    def line(self) -> str:
        """The result of a run, for a person."""
        graded = max(1, self.graded)
        lost = f"; {self.lost} lost to infrastructure, the first: {self.first_cause}" if self.lost else ""
        again = f"; {self.begun_again} lost attempts were begun again" if self.begun_again else ""
        cost = f", ${self.cost_usd:.4f} in all" if self.cost_usd else ""
        return (
            f"reward {self.reward / graded:.2f}, {self.sampled_tokens / graded:.0f} sampled tokens and "
            f"{self.turns / graded:.1f} turns each{cost}{again}{lost}"
        )

    def details(self) -> list[str]:
        """Why trajectories ended, what tools did and what was read and written, a line each; see `accounting` for the
        two counts of what a prefix cache saves."""
        stops = ", ".join(f"{reason.value} {count}" for reason, count in self.stops.most_common())
        tools = ", ".join(f"{count:,} {what}" for what, count in self.tools.items() if count or what == "calls")
        count = self.tokens
        engine = "" if count.engine_cached is None else f" ({count.engine_cached:,} by the engine's own count)"
        forged = f"; {self.forged:,} control tokens spelled in prompts and results, kept as text" if self.forged else ""
        return [
            f"ended by: {stops}",
            f"tools: {tools or '0 calls'}{forged}",
            f"tokens: {count.input:,} read in {count.calls:,} calls of the model, {count.fresh:,} of them new to their "
            f"trajectory, {count.cached:,} cached{engine}; {count.output:,} sampled, {100 * count.trained_share:.1f} % "
            "of the streams",
        ]
