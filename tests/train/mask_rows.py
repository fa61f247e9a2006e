"""Small hand-made trajectories and rows in the embedded model's tokens, for the tests of masks and pages."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from data.ledger import Ledger
from data.types import Completion, Segment, Source, TokenStream, TrainingSample
from envs.types import Message, Task, ToolResult
from rollouts.samples import group_samples
from rollouts.types import StopReason, Trajectory, TrajectoryGroup, Turn
from tests.by_turn import by_turn
from train.report.token_text import Vocabulary

MODEL = Path(__file__).parents[2] / "models" / "embedded"
HOSTILE = "🍸 สวัสดี <script>alert(1)</script> <|im_end|>"


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary.from_folder(MODEL)


@cache
def _tokenizers() -> tuple[Tokenizer, Tokenizer]:
    """One that reads control tokens, for what a template places, and one that does not, for contents."""
    template, content = (Tokenizer.from_file(str(MODEL / "tokenizer.json")) for _ in range(2))
    content.encode_special_tokens = True
    return template, content


def ids(text: str) -> tuple[int, ...]:
    """A template's own text: control tokens are control tokens."""
    return tuple(_tokenizers()[0].encode(text, add_special_tokens=False).ids)


def plain_ids(text: str) -> tuple[int, ...]:
    """Content: whatever it spells, it stays text."""
    return tuple(_tokenizers()[1].encode(text, add_special_tokens=False).ids)


def completion(completion_id: str, text: str, *, version: int = 3) -> Completion:
    tokens = ids(text)
    return Completion(
        completion_id=completion_id,
        token_ids=tokens,
        logprobs=tuple(-0.01 * (index + 1) for index in range(len(tokens))),
        finish_reason="stop",
        policy="policy",
        policy_version=(version,) * len(tokens),
    )


def trajectory(
    sibling_index: int = 0,
    *,
    answer: str = "The answer is 14.",
    reward: float | None = 1.0,
    tool_text: str = "12",
    stop_reason: StopReason = StopReason.FINAL_ANSWER,
    group_id: str = "step-4/train-0-1",
    ledger: Ledger | None = None,
) -> Trajectory:
    """One call and one answer; its completions go into the ledger."""
    name = f"{group_id}/{sibling_index}"
    call = completion(
        f"{name}/0", '<tool_call>\n{"name": "lookup", "arguments": {"key": "age of Oslo"}}\n</tool_call><|im_end|>'
    )
    final = completion(f"{name}/1", f"{answer}<|im_end|>")
    for one in (call, final):
        if ledger is not None:
            ledger.record(one)
    stream = TokenStream()
    for segment in (
        Segment(
            source=Source.PROMPT,
            token_ids=(
                *ids("<|im_start|>system\n"), *plain_ids("Use the tools."), *ids("<|im_end|>\n<|im_start|>user\n"),
                *plain_ids("What is the age of Oslo plus 2?"), *ids("<|im_end|>\n<|im_start|>assistant\n"),
            ),
        ),
        Segment.sampled(call),
        Segment(source=Source.TEMPLATE, token_ids=ids("\n<|im_start|>tool\n")),
        Segment(source=Source.TOOL, token_ids=plain_ids(tool_text)),
        Segment(source=Source.TEMPLATE, token_ids=ids("<|im_end|>\n<|im_start|>assistant\n")),
        Segment.sampled(final),
    ):  # fmt: skip
        stream.append(segment)
    result = ToolResult(call_id="call_0_0", content=tool_text)
    turns = (
        Turn(index=0, message=Message(role="assistant"), tool_results=(result,), generate_s=0.5, env_s=0.1),
        Turn(index=1, message=Message(role="assistant", content=answer), tool_results=(), generate_s=0.3, env_s=0.0),
    )
    return Trajectory(
        trajectory_id=name,
        task_id=group_id.split("/")[-1],
        group_id=group_id,
        sibling_index=sibling_index,
        streams=(stream,),
        turns=turns,
        stop_reason=stop_reason,
        reward=reward,
        reward_terms={} if reward is None else {"success": reward},
    )


def pair(ledger: Ledger | None = None, *, tool_text: str = "12") -> list[Trajectory]:
    """A success and a failure of one group."""
    return [
        trajectory(0, reward=1.0, tool_text=tool_text, ledger=ledger),
        trajectory(1, answer="The answer is 13.", reward=0.0, tool_text=tool_text, ledger=ledger),
    ]


def samples(
    trajectories: list[Trajectory], *, advantages: tuple[float | None, ...] = (0.7, -0.7)
) -> list[TrainingSample]:
    """The rows that the trainer would pack."""
    task = Task(task_id=trajectories[0].task_id, prompt="")
    group = TrajectoryGroup(group_id=trajectories[0].group_id, task=task, trajectories=tuple(trajectories))
    return group_samples(group, by_turn(group, advantages), mask_truncated=True)


def changed(sample: TrainingSample, field: str, index: int, value: object) -> TrainingSample:
    """The sample with one entry of one field changed."""
    entries = list(getattr(sample, field))
    entries[index] = value
    return replace(sample, **{field: tuple(entries)})  # type: ignore[arg-type]
