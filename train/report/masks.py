"""Which tokens are trained, and why? Samples and trajectories → one view per token, in words.

The views hold what the trainer had, unchanged; what breaks the law of the mask is shown as a fault, never hidden.
Leaves out how a view is drawn (`layout`, `mask_page`, `terminal`) and where the rows come from (`sources`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from data.types import Excluded, Source, TrainingSample
from envs.types import Task
from rollouts.samples import group_samples
from rollouts.types import Trajectory, TrajectoryGroup
from train.advantages import step_advantages
from train.config import GrpoConfig
from train.report.token_text import Part, Shown, Vocabulary

Kind = Literal["packed", "trajectory", "trajectory_without_run", "sft"]

KIND_WORDS: Mapping[Kind, str] = {
    "packed": "Rows that the trainer packed: the mask is the one that was trained with.",
    "trajectory": "Trajectories before packing: the mask is the one that the trainer would make of them.",
    "trajectory_without_run": "Trajectories without the configuration of a GRPO run beside them: the mask is the one "
    "that a trainer would make of them with mask_truncated_completions = true, which is the default.",
    "sft": "Demonstrations of a warm start: only their own assistant turns are trained.",
}
SOURCE_WORDS: Mapping[Source, str] = {
    Source.PROMPT: "the opening: system, tools, user",
    Source.MODEL: "sampled by the policy",
    Source.TOOL: "what a tool answered",
    Source.TEMPLATE: "put in by the chat template",
    Source.TARGET: "an assistant turn of a demonstration",
}
EXCLUDED_WORDS: Mapping[Excluded, str] = {
    Excluded.TRUNCATED: "a limit cut the trajectory before the policy had finished",
    Excluded.INFRASTRUCTURE: "our machinery failed here, which says nothing about the policy",
    Excluded.DEAD_GROUP: "all attempts at this task earned the same reward, so there is nothing to learn",
    Excluded.OFF_POLICY: "the policy of today would hardly have sampled it",
    Excluded.STALE: "it was sampled by a policy that is too old",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """One token as a person sees it.

    text: what is shown. Of a character that is split over tokens, the first token has it all and the others have ();
    part, parts: the token's place among the tokens of its character (0, 1 for an ordinary token).
    control: placed by id; the same letters as plain text are not.
    fault: it breaks the law of the mask; `why` says how.
    logprob: nats, as sampled; advantage: None before advantages exist. Both None where the policy did not sample.
    """

    index: int
    token_id: int
    text: tuple[Part, ...]
    part: int
    parts: int
    control: bool
    source: Source
    trained: bool
    excluded: Excluded | None
    why: str
    fault: bool
    turn: int
    logprob: float | None
    advantage: float | None
    policy_version: int | None
    completion_id: str | None
    completion_position: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskView:
    """The tokens of one row `[L]`, with facts about it in words (name → value)."""

    title: str
    kind: Kind
    tokens: tuple[TokenView, ...]
    facts: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskTotals:
    """Token counts: all, trained, by source, and sampled ones that are left out, by reason."""

    tokens: int
    trained: int
    faults: int
    by_source: Counter[Source]
    trained_by_source: Counter[Source]
    excluded: Counter[Excluded]

    @property
    def share(self) -> float:
        return self.trained / self.tokens if self.tokens else 0.0


def totals(views: Sequence[MaskView]) -> MaskTotals:
    """What the views add up to."""
    tokens = [token for view in views for token in view.tokens]
    return MaskTotals(
        tokens=len(tokens),
        trained=sum(token.trained for token in tokens),
        faults=sum(token.fault for token in tokens),
        by_source=Counter(token.source for token in tokens),
        trained_by_source=Counter(token.source for token in tokens if token.trained),
        excluded=Counter(token.excluded for token in tokens if token.excluded is not None),
    )


def sample_view(
    sample: TrainingSample, vocabulary: Vocabulary, *, kind: Kind, trajectory: Trajectory | None = None
) -> MaskView:
    """A row as the trainer had it; `trajectory`, where known, adds its reward and how it ended."""
    keys = [
        (sample.source[i], sample.loss_mask[i], sample.excluded[i], sample.turn[i], sample.completion_index[i])
        for i in range(len(sample))
    ]
    # A character may not swallow the border between two sources: half of it may be trained and half not.
    breaks = frozenset(i for i in range(1, len(sample)) if keys[i] != keys[i - 1])
    tokens = tuple(
        _token_view(sample, index, kind, shown)
        for shown in vocabulary.show(sample.token_ids, breaks=breaks)
        for index in range(shown.start, shown.end)
    )
    return MaskView(
        title=sample.trajectory_id,
        kind=kind,
        tokens=tokens,
        facts=trajectory_facts(trajectory) if trajectory is not None else {},
    )


def trajectory_views(
    trajectories: Sequence[Trajectory], vocabulary: Vocabulary, *, config: GrpoConfig | None
) -> list[MaskView]:
    """Trajectories with the mask that the trainer would make: the same functions make both.

    `config`: the run's; None: not known, which the kind of the views says. Siblings are found by their group; where no
    turn of it has an advantage, the group is shown as dead. One attempt alone (an evaluation, a trial) is shown as if
    its group were alive.
    """
    kind: Kind = "trajectory_without_run" if config is None else "trajectory"
    config = config or GrpoConfig()
    # Only zero or not matters here; the sizes are the trainer's business and are not shown.
    by_id = {trajectory.trajectory_id: trajectory for trajectory in trajectories}
    advantages = step_advantages(list(by_id.values()), config)
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in by_id.values():
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    views: dict[str, list[MaskView]] = {}
    for group_id, siblings in groups.items():
        of_group = {s.trajectory_id: advantages[s.trajectory_id] for s in siblings if s.trajectory_id in advantages}
        if len(of_group) == 1:
            of_group = {name: (1.0,) * len(values) for name, values in of_group.items()}
        task = Task(task_id=siblings[0].task_id, prompt="")
        group = TrajectoryGroup(group_id=group_id, task=task, trajectories=tuple(siblings))
        samples = iter(group_samples(group, of_group, mask_truncated=config.mask_truncated_completions))
        for sibling in siblings:
            views[sibling.trajectory_id] = [
                sample_view(next(samples), vocabulary, kind=kind, trajectory=sibling) for _ in sibling.streams
            ]
    return [view for trajectory in trajectories for view in views.pop(trajectory.trajectory_id, [])]


def trajectory_facts(trajectory: Trajectory) -> dict[str, str]:
    """What is known about an attempt, in words."""
    facts = {
        "task": trajectory.task_id,
        "reward": "none" if trajectory.reward is None else f"{trajectory.reward:g}",
        "ended by": trajectory.stop_reason.value.replace("_", " "),
        "turns": str(len(trajectory.turns)),
        "sampling": f"{sum(turn.generate_s for turn in trajectory.turns):.1f} s",
        "tools": f"{sum(turn.env_s for turn in trajectory.turns):.1f} s",
    }
    if trajectory.turn_rewards:
        facts["earned by turn"] = ", ".join(f"{reward:g}" for reward in trajectory.turn_rewards)
    if trajectory.error:
        facts["error"] = trajectory.error.strip().splitlines()[-1][:300]
    return facts


def _token_view(sample: TrainingSample, index: int, kind: Kind, shown: Shown) -> TokenView:
    sampled = sample.source[index] is Source.MODEL
    number = sample.completion_index[index]
    advantage = sample.advantages[index] if sampled and kind == "packed" else None
    why, fault = _why(sample, index, kind)
    return TokenView(
        index=index,
        token_id=sample.token_ids[index],
        text=shown.parts if index == shown.start else (),
        part=index - shown.start,
        parts=shown.end - shown.start,
        control=shown.control,
        source=sample.source[index],
        trained=sample.loss_mask[index],
        excluded=sample.excluded[index],
        why=why,
        fault=fault,
        turn=sample.turn[index],
        logprob=sample.sampled_logprobs[index] if sampled else None,
        advantage=advantage,
        policy_version=sample.policy_version[index] if sampled else None,
        completion_id=sample.completion_ids[number] if 0 <= number < len(sample.completion_ids) else None,
        completion_position=sample.completion_position[index] if sampled else None,
    )


def _why(sample: TrainingSample, index: int, kind: Kind) -> tuple[str, bool]:
    """Why a token is trained or not, and whether that breaks the law of the mask."""
    source, trained, excluded = sample.source[index], sample.loss_mask[index], sample.excluded[index]
    may_train = Source.TARGET if kind == "sft" else Source.MODEL
    if trained and source is not may_train:
        return f"FAULT: trained, although it is {_a(source)} token ({SOURCE_WORDS[source]})", True
    if trained and excluded is not None:
        return f"FAULT: trained, although it is to be left out ({excluded.value})", True
    if trained and source is Source.TARGET:
        return "trained: the demonstration's own words", False
    if trained and kind in ("trajectory", "trajectory_without_run"):
        return "would be trained: the policy sampled it", False
    if trained:
        return f"trained with advantage {sample.advantages[index]:+.3f}: the policy sampled it", False
    if excluded is not None:
        return f"not trained: {EXCLUDED_WORDS[excluded]}", False
    if source is Source.MODEL:
        return "FAULT: the policy sampled it, it is not trained, and no reason is given", True
    if source is Source.TARGET:
        return "not trained: this turn of the demonstration is kept as context only", False
    return f"not trained: {SOURCE_WORDS[source]}; the policy did not sample it", False


def _a(source: Source) -> str:
    return f"a {source.value}"
