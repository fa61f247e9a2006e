"""The words of token-exact training: who wrote which token, with which probability, and whether it is trained.

All lists are one-dimensional; `[n]` in a docstring is the length of that object's own tokens, `[L]` that of a
whole sample. Log-probabilities are in nats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal


class Source(StrEnum):
    """Who put a token into the stream. Only MODEL tokens may be trained by RL, only TARGET tokens by SFT."""

    PROMPT = "prompt"
    """The opening: system, tools, user, with their headers."""
    MODEL = "model"
    """Sampled by the policy, the stop token included."""
    TOOL = "tool"
    """The content of an observation."""
    TEMPLATE = "template"
    """Added by the chat template: headers, the newline after a turn, a closing token after a length stop."""
    TARGET = "target"
    """An assistant turn of a demonstration: text that this policy did not sample."""


class Excluded(StrEnum):
    """Why a sampled token is not trained."""

    TRUNCATED = "truncated"
    INFRASTRUCTURE = "infrastructure"
    DEAD_GROUP = "dead_group"
    OFF_POLICY = "off_policy"
    STALE = "stale"
    FORCED = "forced"
    """The grammar of a constrained turn allowed this token alone: the policy had no choice."""


FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one completion is sampled. `seed` makes it reproducible; every completion of a run has its own.

    Names and meanings are vLLM's; the defaults leave the distribution whole, at its temperature. `structural_tag` is
    xgrammar's JSON: what a tool call that was begun must look like.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    structural_tag: str | None = None
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int | None = None

    def __post_init__(self) -> None:
        if (
            self.temperature < 0
            or not 0 < self.top_p <= 1
            or self.top_k < 0
            or not 0 <= self.min_p <= 1
            or self.repetition_penalty <= 0
            or self.max_tokens < 1
        ):
            raise ValueError(f"sampling parameters out of range: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine sampled for one prompt.

    token_ids: `[n]`, the stop token included when `finish_reason` is "stop".
    logprobs: `[n]`, nats, of the distribution that the tokens were really drawn from (temperature applied).
    policy_version: `[n]`, how many steps of training the weights had seen when each token was sampled.
    cached_prompt_tokens: prompt tokens that the engine took from its prefix cache; None where it does not say.
    forced: positions at which a grammar allowed the sampled token alone, ascending; their logprob is 0.
    """

    completion_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy: str
    policy_version: tuple[int, ...]
    cached_prompt_tokens: int | None = None
    forced: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        if not n == len(self.logprobs) == len(self.policy_version):
            raise ValueError(
                f"completion {self.completion_id}: {n} token ids, {len(self.logprobs)} logprobs and "
                f"{len(self.policy_version)} versions must have one length"
            )
        for position in self.forced:
            if not 0 <= position < n or self.logprobs[position] != 0:
                raise ValueError(
                    f"completion {self.completion_id}: token {position} cannot be forced; it must be one of {n} and "
                    "have the logprob 0"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of tokens from one source. MODEL segments name their completion and carry its logprobs `[n]`, its versions
    `[n]` and which of its positions were forced."""

    source: Source
    token_ids: tuple[int, ...]
    completion_id: str | None = None
    logprobs: tuple[float, ...] = ()
    policy_version: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        if self.source is Source.MODEL:
            if self.completion_id is None or not n == len(self.logprobs) == len(self.policy_version):
                raise ValueError(f"a MODEL segment of {n} tokens needs a completion_id, logprobs and versions [n]")
        elif self.completion_id is not None or self.logprobs or self.policy_version or self.forced:
            raise ValueError(f"only MODEL segments carry a completion and logprobs, not {self.source.value}")

    @classmethod
    def sampled(cls, completion: Completion) -> Segment:
        """The MODEL segment of a completion, token for token."""
        return cls(
            source=Source.MODEL,
            token_ids=completion.token_ids,
            completion_id=completion.completion_id,
            logprobs=completion.logprobs,
            policy_version=completion.policy_version,
            forced=completion.forced,
        )


@dataclass(slots=True)
class TokenStream:
    """Append-only segments: what the policy has in its context, from first to last token.

    Its ids are kept once beside the segments, so that its length costs nothing and each turn one copy. Only `append`
    may add a segment.
    """

    segments: list[Segment] = field(default_factory=list)
    _token_ids: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._token_ids = [token for segment in self.segments for token in segment.token_ids]

    def append(self, segment: Segment) -> None:
        """Add a segment at the end. Empty segments are left out."""
        if segment.token_ids:
            self.segments.append(segment)
            self._token_ids.extend(segment.token_ids)

    @property
    def token_ids(self) -> list[int]:
        """All ids `[L]`, as a list of the caller's own: it stays as it is when the stream grows."""
        return self._token_ids.copy()

    def __len__(self) -> int:
        return len(self._token_ids)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One row of training, one entry per token `[L]`.

    source: who wrote the token.
    loss_mask: True = trained. In RL True only where the source is MODEL; in SFT only where it is TARGET.
    sampled_logprobs: nats; 0.0 where the token was not sampled.
    advantages: per token, so that outcome, turn-level and intermediate rewards use one path; 0.0 elsewhere.
    turn: index of the completion that a token belongs to or follows; -1 before the first.
    completion_index: index into `completion_ids`; -1 where the token was not sampled.
    completion_position: the token's place inside its completion; -1 where it was not sampled.
    policy_version: -1 where the token was not sampled.
    excluded: why a MODEL token is not trained; None elsewhere.

    Worked example, `<user>` sampled `4` and `<end>`, then the template's newline:

        token_ids            [7, 4, 2, 9]
        source               [PROMPT, MODEL, MODEL, TEMPLATE]
        loss_mask            [F, T, T, F]
        completion_index     [-1, 0, 0, -1]
        completion_position  [-1, 0, 1, -1]
    """

    trajectory_id: str
    token_ids: tuple[int, ...]
    source: tuple[Source, ...]
    loss_mask: tuple[bool, ...]
    sampled_logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    turn: tuple[int, ...]
    completion_ids: tuple[str, ...]
    completion_index: tuple[int, ...]
    completion_position: tuple[int, ...]
    policy_version: tuple[int, ...]
    excluded: tuple[Excluded | None, ...]

    def __post_init__(self) -> None:
        lengths = {
            name: len(getattr(self, name))
            for name in (
                "token_ids", "source", "loss_mask", "sampled_logprobs", "advantages", "turn",
                "completion_index", "completion_position", "policy_version", "excluded",
            )
        }  # fmt: skip
        if len(set(lengths.values())) != 1:
            raise ValueError(f"trajectory {self.trajectory_id}: per-token fields differ in length: {lengths}")

    def __len__(self) -> int:
        return len(self.token_ids)
