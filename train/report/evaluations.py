"""The file of an evaluation: the figures, and the settings without which they mean nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from data.files import in_one_move
from rollouts.evaluate import Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFile:
    """name: what reports call it; model: the folder; split and temperature: how the tasks were chosen and sampled."""

    name: str
    model: str
    split: str
    temperature: float
    evaluation: Evaluation

    @property
    def split_words(self) -> str:
        return {"heldout": "held-out", "train": "training"}.get(self.split, self.split)

    @property
    def settings(self) -> str:
        """The conditions in words; figures under different ones must not be compared."""
        result = self.evaluation
        tasks = f"{result.tasks} {self.split_words} tasks"
        return f"{tasks}, {result.attempts} attempts each, temperature {self.temperature:g}"


EVALUATION_FILE = TypeAdapter(EvaluationFile)


def write_evaluation(path: Path, evaluation: EvaluationFile) -> None:
    """Write the file; it is there whole or not at all."""
    with in_one_move(path) as file:
        file.write(EVALUATION_FILE.dump_json(evaluation, indent=2) + b"\n")


def read_evaluation(path: Path) -> EvaluationFile:
    """The evaluation of a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no evaluation; the message names file and field.
    """
    try:
        return EVALUATION_FILE.validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ValueError(f"{path}: not an evaluation: {where}: {first['msg']}") from error


def paired_difference(before: Evaluation, after: Evaluation) -> tuple[float, float, int] | None:
    """How much the success differs on the tasks that both attempted: mean, its standard error, number of tasks.

    Tasks differ a lot in how hard they are; pairing takes that out. None with fewer than two common
    tasks.

    Worked example: one task goes from 1/4 to 3/4, another from 2/4 to 4/4: 0.5, 0.0, 2.
    """
    common = [task for task, (_, n) in before.counts.items() if n and after.counts.get(task, (0, 0))[1]]
    if len(common) < 2:
        return None
    differences = [_share(after.counts[task]) - _share(before.counts[task]) for task in common]
    mean = sum(differences) / len(common)
    variance = sum((difference - mean) ** 2 for difference in differences) / (len(common) - 1)
    return mean, (variance / len(common)) ** 0.5, len(common)


def _share(counts: tuple[int, int]) -> float:
    successes, attempts = counts
    return successes / attempts
