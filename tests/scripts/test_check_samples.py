"""The gate as a command: exit code 0 for what the policy sampled, 1 for a violation, 2 for bad input."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from data.gate import GateError
from data.ledger import Ledger, read_ledger
from data.rows import write_samples
from data.types import Source, TrainingSample
from rollouts.record import write_trajectories
from scripts.check_samples import check_samples
from tests.train.mask_rows import MODEL, changed, completion, pair, samples, trajectory

ROOT = MODEL.parents[1]


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scripts.check_samples", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def rows(tmp_path: Path) -> list[TrainingSample]:
    """The rows of step 4; the run's ledger also holds another step, as every real one does."""
    ledger = Ledger(tmp_path / "ledger" / "completions.jsonl")
    trajectory(0, group_id="group-3/train-0-9", ledger=ledger)
    trajectories = pair(ledger)
    trajectory(0, group_id="group-40/train-0-9", ledger=ledger)
    ledger.close()
    return samples(trajectories)


@pytest.fixture
def dump(tmp_path: Path, rows: list[TrainingSample]) -> Path:
    path = tmp_path / "samples" / "step-000004.jsonl"
    write_samples(path, rows)
    return path


def flipped(rows: list[TrainingSample]) -> list[TrainingSample]:
    return [changed(rows[0], "loss_mask", rows[0].source.index(Source.TOOL), True), rows[1]]


def hidden(rows: list[TrainingSample]) -> list[TrainingSample]:
    return [changed(rows[0], "loss_mask", rows[0].source.index(Source.MODEL), False), rows[1]]


def nudged(rows: list[TrainingSample]) -> list[TrainingSample]:
    index = rows[1].source.index(Source.MODEL)
    return [rows[0], changed(rows[1], "sampled_logprobs", index, rows[1].sampled_logprobs[index] + 1e-4)]


def duplicated(rows: list[TrainingSample]) -> list[TrainingSample]:
    return [*rows, rows[0]]


def lost(rows: list[TrainingSample]) -> list[TrainingSample]:
    return rows[:1]


def test_a_good_dump_passes(dump: Path, rows: list[TrainingSample]) -> None:
    done = command(dump)
    assert done.returncode == 0, done.stderr
    trained = sum(sum(row.loss_mask) for row in rows)
    assert (
        f"2 samples, {sum(map(len, rows))} tokens; of the {trained} sampled ones {trained} are trained" in done.stdout
    )


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (flipped, "a tool token is trained"),
        (hidden, "must be either trained or excluded with a reason"),
        (nudged, "is not the sampled"),
        (duplicated, "is in the batch twice"),
        (lost, "was sampled, but is neither trained nor excluded"),
    ],
)
def test_a_violation_is_named(
    dump: Path, rows: list[TrainingSample], spoil: Callable[[list[TrainingSample]], list[TrainingSample]], said: str
) -> None:
    write_samples(dump, spoil(rows))
    with pytest.raises(GateError, match=said):
        check_samples(dump)


@pytest.mark.parametrize("spoil", [flipped, nudged, duplicated])
def test_a_violation_is_exit_code_1_and_one_line(
    dump: Path, rows: list[TrainingSample], spoil: Callable[[list[TrainingSample]], list[TrainingSample]]
) -> None:
    write_samples(dump, spoil(rows))
    done = command(dump)
    assert done.returncode == 1
    assert done.stderr.startswith("error: gate: ")
    assert done.stderr.count("\n") == 1


def test_a_group_that_is_missing_as_a_whole_is_found(tmp_path: Path, dump: Path) -> None:
    """The run's record of the step says which groups it had."""
    ledger = Ledger(tmp_path / "ledger" / "completions.jsonl")
    other = trajectory(0, group_id="group-5/train-0-9", ledger=ledger)
    ledger.close()
    assert check_samples(dump).startswith("passed: 2 samples")
    write_trajectories(tmp_path / "trajectories" / dump.name, [other])
    with pytest.raises(GateError, match="completion group-5/train-0-9/0/0: token 0 was sampled, but is neither"):
        check_samples(dump)


def test_bad_input_is_exit_code_2(dump: Path, tmp_path: Path) -> None:
    assert command(tmp_path / "nothing.jsonl").returncode == 2
    (tmp_path / "ledger" / "completions.jsonl").unlink()
    done = command(dump)
    assert done.returncode == 2
    assert "--ledger F" in done.stderr
    assert command(dump, "--ledger", tmp_path / "nothing.jsonl").returncode == 2


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text('{"messages": []}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="holds demonstrations, not packed samples"):
        check_samples(path)


def test_a_step_that_was_killed_and_sampled_again_passes(tmp_path: Path) -> None:
    """What only the first attempt sampled must not count as sampled and lost."""
    path = tmp_path / "ledger" / "completions.jsonl"
    killed = Ledger(path)
    trajectory(0, ledger=killed)
    killed.record(completion("step-4/train-0-1/0/2", "and more<|im_end|>"))
    killed.record(completion("step-4/train-0-1/7/0", "and another<|im_end|>"))
    killed.close()
    resumed = Ledger(path, keep=lambda group_id: False)
    rows = samples(pair(resumed))
    resumed.close()
    write_samples(tmp_path / "samples" / "step-000004.jsonl", rows)
    assert check_samples(tmp_path / "samples" / "step-000004.jsonl").startswith("passed: 2 samples")
    assert len(list(read_ledger(path))) == 4


@pytest.mark.parametrize("torn", ["samples", "trajectories"])
def test_a_dump_that_is_cut_off_is_no_fault_of_the_training(tmp_path: Path, dump: Path, torn: str) -> None:
    write_trajectories(tmp_path / "trajectories" / dump.name, pair())
    path = tmp_path / torn / dump.name
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match=rf"{torn}/step-000004\.jsonl: the last line is cut off \(\d+ bytes of it"):
        check_samples(dump)


def test_a_ledger_that_is_cut_off_is_said(tmp_path: Path, dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "ledger" / "completions.jsonl").open("ab") as file:
        file.write(b'{"completion_id": "gro')
    assert check_samples(dump).startswith("passed: 2 samples")
    assert "completions.jsonl: the last line is cut off (22 bytes" in capsys.readouterr().err


def test_a_folder_is_no_ledger(tmp_path: Path, dump: Path) -> None:
    with pytest.raises(ValueError, match=r"--ledger .*ledger: is a folder; name the file"):
        check_samples(dump, tmp_path / "ledger")
