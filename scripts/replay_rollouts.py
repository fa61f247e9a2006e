"""Run recorded trajectories again, without an engine: do today's template, renderer and parser make the same streams
and masks of them? Exit code 1 and the place of each difference where not."""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollouts.config import RolloutConfig
from rollouts.record import read_recorded
from rollouts.replay import Replay
from scripts.console import run_async, run_main, say_torn
from scripts.open_rollouts import renderer_of
from train.report.sources import file_kind

EXAMPLE = "python -m scripts.replay_rollouts rollouts.jsonl"
_SHOWN = 20
_REPLAYED = "replay a file of run_rollouts, of run_eval, or in the folder trajectories/ of a run"


async def replay_file(path: Path, model: str | None) -> tuple[int, list[str], list[str]]:
    """How many trajectories of a file were run again, what came out differently, and which could not be run.

    Args:
        model: the model folder; None: the one that they were sampled with.

    Raises:
        ValueError: the file does not say how its trajectories were sampled, a line of it is none, or there are none.
    """
    if (kind := file_kind(path)) != "trajectories":
        raise ValueError(f"{path} holds {kind}, not trajectories; {_REPLAYED}")
    say_torn(path)
    count, differences, skipped = 0, list[str](), list[str]()
    replay, of = None, None
    for settings, trajectory in read_recorded(path):
        if replay is None or settings is not of:
            replay, of = _replay_of(settings_of(path, settings), model), settings
        try:
            differences += await replay.differences(trajectory)
            count += 1
        except ValueError as error:
            skipped.append(str(error))
    if not count and not skipped:
        raise ValueError(f"{path}: there are no trajectories in it")
    return count, differences, skipped


def _replay_of(settings: Mapping[str, Any], model: str | None) -> Replay:
    config = RolloutConfig.model_validate(settings["rollout"])
    return Replay(
        renderer=renderer_of(config, model or settings["model"]),
        limits=config.limits,
        sampling=config.sampling,
        prices=config.prices,
        max_context_tokens=config.engine.max_context_tokens,
    )


def settings_of(path: Path, settings: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What trajectories of a file were sampled with: as the header before them says (`settings`), or the run folder
    that the file lies in.

    Raises:
        ValueError: neither says it.
    """
    config = path.resolve().parent.parent / "config.toml"
    if settings is None and config.is_file():
        settings = tomllib.loads(config.read_text(encoding="utf-8"))
    if settings is None or not {"model", "rollout"} <= settings.keys():
        raise ValueError(
            f"{path}: neither its header nor a run folder says what its trajectories were sampled with; {_REPLAYED}"
        )
    return settings


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.replay_rollouts", description=__doc__, epilog=f"example: {EXAMPLE}"
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="trajectories (JSONL)")
    parser.add_argument("--model", metavar="FOLDER", help="whose template and tokenizer (default: the recorded model)")
    arguments = parser.parse_args()
    count, differences, skipped = run_async(replay_file(arguments.path, arguments.model))
    for line in differences[:_SHOWN]:
        print(line)
    if len(differences) > _SHOWN:
        print(f"… and {len(differences) - _SHOWN} more differences")
    rest = f"; {len(skipped)} could not be run again, the first: {skipped[0]}" if skipped else ""
    if differences:
        print(f"replay: {count} trajectories run again, {len(differences)} differences{rest}")
        sys.exit(1)
    if not count:
        raise ValueError(f"{arguments.path}: no trajectory could be run again{rest}")
    print(f"replay: {count} trajectories give the same streams and masks{rest}")


if __name__ == "__main__":
    run_main(main)
