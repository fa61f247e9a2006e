"""What is in a file, and with which tokenizer is it read? Paths → mask views.

A file is told by its content: packed samples, trajectories, or demonstrations of a warm start.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from data.files import open_regular
from data.jsonl import read_lines
from data.rows import SAMPLE
from data.types import Source, TrainingSample
from rollouts.config import RendererConfig
from rollouts.record import read_recorded, read_trajectories
from rollouts.types import Trajectory
from train.config import GrpoConfig
from train.report.masks import Kind, MaskView, sample_view, trajectory_views
from train.report.run_data import grpo_setting
from train.report.token_text import Vocabulary

FileKind = Literal["samples", "trajectories", "demonstrations"]

# The field that only this kind of row, or the header before it, has.
_TELLS: tuple[tuple[str, FileKind], ...] = (
    ("loss_mask", "samples"),
    ("streams", "trajectories"),
    ("format", "trajectories"),
    ("messages", "demonstrations"),
)
# Where a run folder, or the folder of a whole quickstart, keeps model folders: the newest of the first that is there.
_MODEL_PLACES = (
    "checkpoints/step-*",
    "final",
    "grpo/checkpoints/step-*",
    "grpo/final",
    "sft/checkpoints/step-*",
    "sft/final",
)
_LEVELS_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Views of a file's first rows, and how many rows there are. `written_by`: the renderer that made tokens of
    conversations, and which configuration says so; None: the file holds tokens."""

    kind: FileKind
    views: list[MaskView]
    rows: int
    written_by: str | None = None


def file_kind(path: Path) -> FileKind:
    """What the rows of a JSONL file are.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is empty, no JSONL, or holds something else.
    """
    if path.is_dir():
        files = sorted(path.rglob("*.jsonl"))
        such_as = f"such as {files[0]}" if files else "there is no *.jsonl in it"
        raise ValueError(f"{path} is a folder; name a file in it, {such_as}")
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    with open_regular(path) as file:
        line = file.readline()
    if not line.strip():
        raise ValueError(f"{path}: the file is empty")
    try:
        row = json.loads(line)
    except ValueError as error:
        if line.startswith(b"{") and not line.endswith(b"\n"):
            raise ValueError(f"{path}: there is no whole row in it: its only line is cut off") from error
        raise ValueError(f"{path}: not a JSONL file: {error}") from error
    for field, kind in _TELLS:
        if isinstance(row, dict) and field in row:
            return kind
    raise ValueError(
        f"{path}: rows must be packed samples (with 'loss_mask'), trajectories ('streams') or conversations "
        "('messages')"
    )


def find_model(path: Path) -> Path:
    """The model folder whose tokenizer belongs to a file: the newest checkpoint of the run folder above it.

    Raises:
        ValueError: there is none.
    """
    for folder in islice(path.resolve().parents, _LEVELS_UP):
        found = newest_model(folder)
        if found is not None:
            return found
    raise ValueError(f"{path}: no run folder with a checkpoint above it; name the model folder with --model FOLDER")


def recorded_model(settings: Mapping[str, Any] | None) -> Path | None:
    """The model folder that the header of a trajectory file says it was sampled with, where it is still there."""
    model = (settings or {}).get("model")
    return Path(model) if isinstance(model, str) and (Path(model) / "tokenizer.json").is_file() else None


def newest_model(folder: Path) -> Path | None:
    """The newest model folder of a run, if it has one."""
    for place in _MODEL_PLACES:
        found = sorted(one for one in folder.glob(place) if (one / "tokenizer.json").is_file())
        if found:
            return found[-1]
    return None


def config_of(model: Path) -> Path | None:
    """The resolved configuration of the run that made a model folder (`RUN/final`, `RUN/checkpoints/step-N`)."""
    places = (folder / "config.toml" for folder in model.resolve().parents[:2])
    return next((place for place in places if place.is_file()), None)


def load_views(path: Path, model: Path | None, *, limit: int, config: Path | None = None) -> Loaded:
    """Views of the first `limit` rows of a file.

    Args:
        model: whose tokens these are; None: the run folder's newest checkpoint.
        config: the configuration whose renderer writes demonstrations; None: that of the run that made the model, and
            the defaults where no run did.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a row, the configuration or the model folder cannot be read, or there is no model; or a
            configuration was given though the file holds tokens already.
    """
    kind = file_kind(path)
    if config is not None and kind != "demonstrations":
        raise ValueError(f"{path} holds tokens, which no configuration changes; leave out --config")
    if kind == "trajectories":
        return _load_trajectories(path, model, limit)
    model = model or find_model(path)
    vocabulary = Vocabulary.from_folder(model)
    if kind == "samples":
        rows = list(read_lines(path, SAMPLE))
        known = trajectories_beside(path)
        views = [
            sample_view(row, vocabulary, kind=_row_kind(row), trajectory=known.get(row.trajectory_id))
            for row in rows[:limit]
        ]
        return Loaded(kind=kind, views=views, rows=len(rows))
    return _load_demonstrations(path, model, vocabulary, limit, config or config_of(model))


def _load_trajectories(path: Path, model: Path | None, limit: int) -> Loaded:
    """Files may have been put one behind the other: what follows a header is of the model that it names, and has no
    siblings elsewhere."""
    parts: list[tuple[Mapping[str, Any] | None, list[Trajectory]]] = []
    for settings, trajectory in read_recorded(path):
        if not parts or settings is not parts[-1][0]:
            parts.append((settings, []))
        parts[-1][1].append(trajectory)
    if not parts:
        raise ValueError(f"{path}: there are no trajectories in it")
    views: list[MaskView] = []
    for settings, trajectories in parts:
        if len(views) >= limit:
            break
        vocabulary = Vocabulary.from_folder(model or recorded_model(settings) or find_model(path))
        # All of them are needed: whether a group is dead is known from its siblings.
        views += trajectory_views(trajectories, vocabulary, config=_grpo_config(path))
    return Loaded(kind="trajectories", views=views[:limit], rows=sum(len(trajectories) for _, trajectories in parts))


def trajectories_beside(samples: Path) -> dict[str, Trajectory]:
    """The trajectories, by id, that a step's packed samples were made of; none where the file is not there."""
    path = samples.parent.parent / "trajectories" / samples.name
    if not path.exists():
        return {}
    return {trajectory.trajectory_id: trajectory for trajectory in read_trajectories(path)}


def _grpo_config(trajectories: Path) -> GrpoConfig | None:
    """What decides, in the run whose folder holds `trajectories/`, which of them are trained; None: not known."""
    folder = trajectories.resolve().parent.parent
    keys = ("mask_truncated_completions", "baseline", "discount", "truncation_penalty")
    found = {key: value for key in keys if (value := grpo_setting(folder, key)) is not None}
    try:
        return GrpoConfig.model_validate(found | {"scale_rewards": "none"}) if found else None
    except ValueError:  # of another version
        return None


def _row_kind(row: TrainingSample) -> Kind:
    """Rows of a warm start have nothing that was sampled."""
    return "sft" if Source.TARGET in row.source and Source.MODEL not in row.source else "packed"


def _load_demonstrations(path: Path, model: Path, vocabulary: Vocabulary, limit: int, config: Path | None) -> Loaded:
    # Imported here: chat templates need transformers, which takes seconds to load and which other files do without.
    # AutoTokenizer would load torch and the code of models too, six seconds more.
    from transformers import PreTrainedTokenizerFast

    from data.demonstrations import read_demonstrations, to_sample, why_dropped
    from data.open_renderer import open_renderer

    settings = RendererConfig() if config is None else _renderer_settings(config)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model, local_files_only=True)
    renderer = open_renderer(tokenizer, model=str(model), **settings.model_dump())
    rows = list(read_demonstrations(path))
    views: list[MaskView] = []
    for row in rows[:limit]:
        reason = why_dropped(row, renderer)
        try:
            sample = to_sample(row, renderer)
        except ValueError as error:
            # What cannot be written has no tokens to show.
            facts = {"left out of the warm start": reason or str(error)}
            views.append(MaskView(title=row.task_id, kind="sft", tokens=(), facts=facts))
            continue
        view = sample_view(sample, vocabulary, kind="sft")
        views.append(replace(view, facts={"left out of the warm start": reason}) if reason else view)
    source = "defaults" if config is None else config
    return Loaded(
        kind="demonstrations",
        views=views,
        rows=len(rows),
        written_by=f"{renderer.description}; renderer settings: {source}",
    )


def _renderer_settings(config: Path) -> RendererConfig:
    """`[renderer]` of a warm start's configuration, or `[rollout.renderer]` of another command's."""
    try:
        values = tomllib.loads(config.read_text(encoding="utf-8"))
        return RendererConfig.model_validate(values.get("renderer", values.get("rollout", {}).get("renderer", {})))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(("renderer", *map(str, first["loc"])))
        raise ValueError(f"configuration {config}: {key}: {first['msg']}") from error
    except (ValueError, AttributeError) as error:
        raise ValueError(f"configuration {config}: {error}") from error
