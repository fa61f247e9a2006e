"""The page of a run: how well, how it went, and what exactly was trained. One offline file that a stranger can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from data.jsonl import read_lines
from data.rows import SAMPLE
from data.types import TrainingSample
from rollouts.types import Trajectory, is_success
from train.report.evaluations import EvaluationFile, paired_difference
from train.report.figures import evaluation_figure, grpo_figures, sft_figures
from train.report.mask_page import mask_values
from train.report.masks import MaskView, sample_view
from train.report.page import render_page
from train.report.run_data import RunData
from train.report.sources import load_views, newest_model, trajectories_beside
from train.report.token_text import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One evaluation as the table shows it. change: against the stage before, in points, with its standard error."""

    run: str
    file: EvaluationFile
    change: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownMask:
    """A row whose mask is shown, with the sentence that introduces it."""

    heading: str
    view: MaskView


def render_report(runs: Sequence[RunData]) -> str:
    """The report of a run, or of several side by side, as HTML.

    Raises:
        ValueError: no run is given.
    """
    if not runs:
        raise ValueError("a report needs a run folder")
    alone = runs[0] if len(runs) == 1 else None
    notes = [note if alone else f"{run.name}: {note}" for run in runs for note in run.notes]
    shown: list[ShownMask] = []
    if alone is None:
        notes.append("Loss masks are shown in the report of a single run.")
    else:
        shown = _shown_masks(alone, notes)
    table = [row for run in runs for row in stage_rows(run)]
    settings = list(dict.fromkeys(row.file.settings for row in table))
    return render_page(
        "report.html",
        styles=["page.css", "masks.css", "report.css"],
        scripts=["masks.js"],
        values={
            "title": " against ".join(run.name for run in runs),
            "alone": alone,
            "runs": runs,
            "headline": headline(alone) if alone else "",
            "table": table,
            "pass_ks": sorted({k for row in table for k in row.file.evaluation.pass_at_k if k in (1, 8)} or {1}),
            "settings": settings,
            "evaluation_figure": evaluation_figure([row.file for row in table]) if alone else None,
            "sft_figures": sft_figures(runs),
            "grpo_figures": grpo_figures(runs),
            "notes": notes,
            "masks": _mask_parts(shown),
        },
    )


def stage_rows(run: RunData) -> list[StageRow]:
    """The evaluations of a run; the change is paired over the tasks that both stages attempted."""
    changes = [""]
    for before, after in pairwise(run.evaluations):
        difference = paired_difference(before.evaluation, after.evaluation) if _comparable(before, after) else None
        changes.append("" if difference is None else f"{100 * difference[0]:+.1f} ± {100 * difference[1]:.1f}")
    return [
        StageRow(run=run.name, file=file, change=change) for file, change in zip(run.evaluations, changes, strict=False)
    ]


def headline(run: RunData) -> str:
    """The result in one sentence."""
    stages = run.evaluations
    if not stages:
        return "No evaluation has been made yet."
    words = [f"{100 * one.evaluation.success:.1f} % ({one.name})" for one in stages]
    if len(stages) == 1:
        return f"Success on {stages[0].split_words} tasks is {words[0]}."
    if not all(_comparable(stages[0], other) for other in stages[1:]):
        return "The evaluations were made under different conditions, so they cannot be compared."
    rising = all(a.evaluation.success <= b.evaluation.success for a, b in pairwise(stages))
    return f"Success on {stages[0].split_words} tasks {'rose' if rising else 'went'} from {' to '.join(words)}."


def _comparable(a: EvaluationFile, b: EvaluationFile) -> bool:
    return a.settings == b.settings


def _mask_parts(shown: Sequence[ShownMask]) -> dict[str, Any] | None:
    if not shown:
        return None
    values = mask_values([one.view for one in shown])
    headings = [one.heading for one in shown]
    return values | {"headings": headings}


def _shown_masks(run: RunData, notes: list[str]) -> list[ShownMask]:
    """Real rows to look at: an attempt that succeeded, one that failed, and a demonstration."""
    model = newest_model(run.folder)
    if model is None:
        notes.append("Loss masks are left out: there is no checkpoint yet whose tokenizer could spell the tokens.")
        return []
    shown: list[ShownMask] = []
    try:
        if run.grpo_folder is not None:
            shown += _packed_masks(run.grpo_folder, Vocabulary.from_folder(model))
        if not shown:
            notes.append("Loss masks of attempts are left out: no step has been packed yet.")
        if run.demonstrations is not None:
            view = load_views(run.demonstrations, model, limit=1).views[0]
            shown.append(ShownMask(heading="A demonstration of the warm start", view=view))
    except (ValueError, OSError, IndexError) as error:
        notes.append(f"Some loss masks are left out: {error}.")
    return shown


def _packed_masks(folder: Path, vocabulary: Vocabulary) -> list[ShownMask]:
    files = sorted((folder / "samples").glob("step-*.jsonl"))
    if not files:
        return []
    samples = list(read_lines(files[-1], SAMPLE))
    known = trajectories_beside(files[-1])
    step = int(files[-1].stem.removeprefix("step-"))
    chosen = choose_pair(samples, known)
    return [
        ShownMask(
            heading=f"{words} of step {step}",
            view=sample_view(sample, vocabulary, kind="packed", trajectory=known.get(sample.trajectory_id)),
        )
        for words, sample in chosen
    ]


def choose_pair(samples: Sequence[TrainingSample], known: dict[str, Trajectory]) -> list[tuple[str, TrainingSample]]:
    """A success and a failure that were both trained; of the same task where there are such, and short ones first."""
    by_group: dict[str, tuple[list[TrainingSample], list[TrainingSample]]] = {}
    for sample in sorted(samples, key=len):
        if any(sample.loss_mask):
            good, bad = by_group.setdefault(sample.trajectory_id.rpartition("/")[0], ([], []))
            (good if _succeeded(sample, known.get(sample.trajectory_id)) else bad).append(sample)
    both = next(((good[0], bad[0]) for good, bad in by_group.values() if good and bad), None)
    if both is not None:
        return [
            ("An attempt that succeeded, packed in the update", both[0]),
            ("An attempt at the same task that failed, packed in the update", both[1]),
        ]
    firsts = [("An attempt that succeeded, packed in the update", good) for good, _ in by_group.values() if good][:1]
    firsts += [("An attempt that failed, packed in the update", bad) for _, bad in by_group.values() if bad][:1]
    chosen = [(words, rows[0]) for words, rows in firsts]
    return chosen or [("An attempt that was left out", sample) for sample in samples[:1]]


def _succeeded(sample: TrainingSample, trajectory: Trajectory | None) -> bool:
    """By reward where it is known, else by the sign of the advantage."""
    if trajectory is not None and trajectory.reward is not None:
        return is_success(trajectory.reward)
    return max(sample.advantages, key=abs) > 0
