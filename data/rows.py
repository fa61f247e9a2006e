"""Building a `TrainingSample` segment by segment, and reading and writing samples.

The mask is made here, from who wrote each token, and nowhere else: no text is ever searched for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import TypeAdapter

from data.jsonl import write_lines
from data.types import Excluded, Segment, Source, TrainingSample

SAMPLE = TypeAdapter(TrainingSample)


class SampleBuilder:
    """Collects segments; all per-token lists grow together, so their lengths cannot differ.

    `turn` counts assistant turns: tokens before the first one have -1.
    """

    def __init__(self, trajectory_id: str) -> None:
        self._trajectory_id = trajectory_id
        self._turn = -1
        self._completion_ids: list[str] = []
        self._token_ids: list[int] = []
        self._source: list[Source] = []
        self._loss_mask: list[bool] = []
        self._sampled_logprobs: list[float] = []
        self._advantages: list[float] = []
        self._turns: list[int] = []
        self._completion_index: list[int] = []
        self._completion_position: list[int] = []
        self._policy_version: list[int] = []
        self._excluded: list[Excluded | None] = []

    def add_context(self, segment: Segment) -> None:
        """Tokens that are never trained: prompt, template, observations, an assistant turn kept as context."""
        if segment.source is Source.TARGET:
            self._turn += 1
        self._add(segment, loss_mask=False, advantage=0.0, excluded=None)

    def add_target(self, segment: Segment) -> None:
        """An assistant turn of a demonstration (TARGET), trained by SFT."""
        assert segment.source is Source.TARGET
        self._turn += 1
        self._add(segment, loss_mask=True, advantage=0.0, excluded=None)

    def add_sampled(self, segment: Segment, *, advantage: float, excluded: Excluded | None) -> None:
        """A sampled turn (MODEL): trained with `advantage`, unless `excluded` says why not; of a turn that is trained,
        the tokens that a grammar forced are not."""
        assert segment.source is Source.MODEL
        assert segment.completion_id is not None
        self._turn += 1
        self._completion_ids.append(segment.completion_id)
        self._add(
            segment, loss_mask=excluded is None, advantage=advantage if excluded is None else 0.0, excluded=excluded
        )
        if excluded is None:
            start = len(self._token_ids) - len(segment.token_ids)
            for position in segment.forced:
                index = start + position
                self._loss_mask[index], self._advantages[index] = False, 0.0
                self._excluded[index] = Excluded.FORCED

    def _add(self, segment: Segment, *, loss_mask: bool, advantage: float, excluded: Excluded | None) -> None:
        n = len(segment.token_ids)
        sampled = segment.source is Source.MODEL
        self._token_ids += segment.token_ids
        self._source += [segment.source] * n
        self._loss_mask += [loss_mask] * n
        self._sampled_logprobs += segment.logprobs if sampled else [0.0] * n
        self._advantages += [advantage] * n
        self._turns += [self._turn] * n
        self._completion_index += [len(self._completion_ids) - 1 if sampled else -1] * n
        self._completion_position += range(n) if sampled else [-1] * n
        self._policy_version += segment.policy_version if sampled else [-1] * n
        self._excluded += [excluded] * n

    def build(self) -> TrainingSample:
        return TrainingSample(
            trajectory_id=self._trajectory_id,
            token_ids=tuple(self._token_ids),
            source=tuple(self._source),
            loss_mask=tuple(self._loss_mask),
            sampled_logprobs=tuple(self._sampled_logprobs),
            advantages=tuple(self._advantages),
            turn=tuple(self._turns),
            completion_ids=tuple(self._completion_ids),
            completion_index=tuple(self._completion_index),
            completion_position=tuple(self._completion_position),
            policy_version=tuple(self._policy_version),
            excluded=tuple(self._excluded),
        )


def write_samples(path: Path, samples: Iterable[TrainingSample]) -> None:
    """Write samples as JSONL, replacing the file in one move."""
    write_lines(path, SAMPLE, samples)
