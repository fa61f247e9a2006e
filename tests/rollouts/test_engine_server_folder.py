"""Are the weights that servers sample from those that the model's folder and the trajectory file speak of?"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rollouts.engine_server import ServerEngine
from rollouts.record import Record, read_settings
from rollouts.types import StopReason, Trajectory
from scripts.run_rollouts import check_served_weights, recorded_settings
from scripts.settings import RolloutSettings, load_settings
from tests.rollouts.stub_fleet import run_one
from tests.rollouts.stub_server import StubServer


@pytest.mark.parametrize("how", ["absolute", "relative"])
def test_other_weights_in_a_folder_of_the_same_name_are_refused(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], stub_model: Path, tmp_path: Path, how: str
) -> None:
    other = tmp_path / stub_model.name
    shutil.copytree(stub_model, other)
    (other / "model.safetensors").write_bytes(b"trained further")
    server = stub(name="x", root=str(other) if how == "absolute" else os.path.relpath(other))
    with pytest.raises(ValueError, match="whose weights are not those of") as caught:
        connect(server)
    message = str(caught.value)
    assert all(text in message for text in (server.address, f"serves {other.resolve()}", f"of {stub_model.resolve()};"))
    assert "\n" not in message


def test_the_same_weights_are_taken_from_wherever_they_are_served(
    stub: Callable[..., StubServer], connect: Callable[..., ServerEngine], stub_model: Path, tmp_path: Path
) -> None:
    """The folder itself, a copy of it, one of another machine."""
    copy = tmp_path / stub_model.name
    shutil.copytree(stub_model, copy)
    roots = [str(stub_model), str(copy), f"/nowhere/{stub_model.name}"]
    assert run_one(connect(*(stub(root=root) for root in roots))).token_ids


def rollout_settings(output: Path, model: Path, server: StubServer) -> RolloutSettings:
    return load_settings(
        RolloutSettings,
        [
            *("--config", "configs/eval_quickstart.toml", "--output", str(output), "--model", str(model)),
            *("--rollout.engine.kind", "server", "--rollout.engine.servers", f'["{server.address}"]'),
            *("--rollout.engine.dtype", "auto"),
        ],
    )


@pytest.mark.parametrize("bias", [0, 3])
def test_a_file_is_gone_on_with_only_by_servers_of_the_same_weights(
    stub: Callable[..., StubServer],
    connect: Callable[..., ServerEngine],
    stub_model: Path,
    tmp_path: Path,
    bias: int,
) -> None:
    """Whatever is in our folder."""
    path, server = tmp_path / "t.jsonl", stub()
    settings = rollout_settings(path, stub_model, server)
    with Record(path, recorded_settings(settings)) as record:
        asyncio.run(check_served_weights(settings, record, connect(server)))
        record.append(
            Trajectory(
                trajectory_id="e/t/0",
                task_id="t",
                group_id="e/t",
                sibling_index=0,
                streams=(),
                turns=(),
                stop_reason=StopReason.FINAL_ANSWER,
                reward=0.5,
            )
        )
    assert len((read_settings(path) or {})["served_scores"]) == 15
    later = connect(stub(bias=bias))
    with Record(path, recorded_settings(settings)) as record:
        if not bias:
            asyncio.run(check_served_weights(settings, record, later))
            return
        with pytest.raises(ValueError, match=r"t\.jsonl holds trajectories of other weights than http.* serves now"):
            asyncio.run(check_served_weights(settings, record, later))
