"""The ledger: what was recorded is read back equal, ids are used once, and a killed writer loses only its last line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.ledger import Ledger, read_ledger
from data.types import Completion
from tests.data.test_types import make_completion, no_clock

texts = st.text(min_size=1, max_size=10)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    ids = draw(st.lists(st.integers(0, 2**31), max_size=6))
    n = len(ids)
    logprob = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False)
    return make_completion(
        ids,
        completion_id=draw(texts),
        logprobs=tuple(draw(st.lists(logprob, min_size=n, max_size=n))),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        policy=draw(texts),
        policy_version=tuple(draw(st.lists(st.integers(0, 10**6), min_size=n, max_size=n))),
    )


@settings(no_clock, max_examples=50)
@given(written=st.lists(completions(), max_size=4, unique_by=lambda c: c.completion_id))
def test_what_was_written_is_read_back_equal(tmp_path: Path, written: list[Completion]) -> None:
    path = tmp_path / "ledger" / "completions.jsonl"
    path.unlink(missing_ok=True)
    ledger = Ledger(path)
    for completion in written:
        ledger.record(completion)
    ledger.close()
    assert list(read_ledger(path)) == list(ledger) == written
    assert all(read_ledger(path).get(c.completion_id) == c for c in written)


def test_a_completion_is_on_disk_before_record_returns(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "completions.jsonl")
    ledger.record(make_completion([4, 2]))
    assert list(read_ledger(tmp_path / "completions.jsonl")) == [make_completion([4, 2])]


def test_an_id_is_recorded_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "completions.jsonl")
    ledger.record(make_completion([4, 2]))
    with pytest.raises(ValueError, match="ledger: completion c is recorded already"):
        ledger.record(make_completion([5, 2]))
    assert list(read_ledger(tmp_path / "completions.jsonl")) == [make_completion([4, 2])]


def test_what_was_taken_stays_in_the_file(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "completions.jsonl")
    names = ["group-1/a/0/0", "group-1/a/1~1/0", "group-10/a/0/0", "group-2/b/c/0/1"]
    for name in names:
        ledger.record(make_completion([4, 2], completion_id=name))
    taken = ledger.take({"group-1/a", "group-2/b/c"})
    assert [c.completion_id for c in taken] == [names[0], names[1], names[3]]
    assert [c.completion_id for c in ledger] == [names[2]]
    ledger.forget()
    assert list(ledger) == []
    assert [c.completion_id for c in read_ledger(tmp_path / "completions.jsonl")] == names
    only = read_ledger(tmp_path / "completions.jsonl", groups={"group-10/a"})
    assert [c.completion_id for c in only] == [names[2]]


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_last_line_is_left_out_and_cut_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "completions.jsonl"
    ledger = Ledger(path)
    for name in ("a", "b"):
        ledger.record(make_completion([4, 2], completion_id=name))
    ledger.close()
    path.write_bytes(path.read_bytes()[:-cut])
    assert [c.completion_id for c in read_ledger(path)] == ["a"]

    resumed = Ledger(path)
    resumed.record(make_completion([6, 2], completion_id="b"))
    resumed.close()
    assert [c.token_ids for c in read_ledger(path)] == [(4, 2), (6, 2)]


def test_groups_that_will_be_sampled_again_are_dropped_and_those_that_wait_are_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    killed = Ledger(path)
    for index in (1, 2, 10):
        killed.record(make_completion([4, 2], completion_id=f"group-{index}/train-0-3/1/0"))
    killed.close()
    path.write_bytes(path.read_bytes() + b'{"completion_id": "group-1/')
    resumed = Ledger(path, keep=lambda group_id: group_id != "group-2/train-0-3", remember={"group-10/train-0-3"})
    resumed.close()
    assert [c.completion_id for c in read_ledger(path)] == [f"group-{index}/train-0-3/1/0" for index in (1, 10)]
    assert [c.completion_id for c in resumed] == ["group-10/train-0-3/1/0"]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    Ledger(path).record(make_completion([4, 2]))
    with path.open("ab") as file:
        file.write(b'{"completion_id": "d", "token_ids": ["x"]}\n')
    with pytest.raises(ValueError, match=r"completions\.jsonl, line 2: token_ids"):
        list(read_ledger(path))
