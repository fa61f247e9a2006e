"""The trajectory file: whole lines only, whoever is killed; one writer; whatever a trajectory holds can be written."""

from __future__ import annotations

import json
import math
import multiprocessing
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.types import Segment, Source, TokenStream
from envs.types import Message, ToolCall, ToolResult
from rollouts.record import Record, read_recorded, read_settings, read_trajectories, write_trajectories
from rollouts.types import StopReason, Trajectory, Turn
from tests.data.test_types import no_clock

SETTINGS = {"model": "m", "seed": 3}


def trajectory(index: int = 0, *, text: str = "ok", arguments: dict[str, Any] | None = None) -> Trajectory:
    call = ToolCall(call_id="c", name="n", arguments=arguments or {})
    return Trajectory(
        trajectory_id=f"g/{index}",
        task_id="t",
        group_id="g",
        sibling_index=index,
        streams=(
            TokenStream(
                [
                    Segment(source=Source.PROMPT, token_ids=(1, 2)),
                    Segment(
                        source=Source.MODEL,
                        token_ids=(3,),
                        completion_id=f"g/{index}/0",
                        logprobs=(-0.5,),
                        policy_version=(0,),
                    ),
                ]
            ),
        ),
        turns=(
            Turn(
                index=0,
                message=Message(role="assistant", content=text, tool_calls=(call,)),
                tool_results=(ToolResult(call_id="c", content=text),),
                generate_s=0.25,
                env_s=0.5,
            ),
        ),
        stop_reason=StopReason.FINAL_ANSWER,
        reward=1.0,
        opening=(Message(role="user", content=text),),
    )


def written(path: Path, count: int) -> list[Trajectory]:
    rows = [trajectory(index) for index in range(count)]
    with Record(path, SETTINGS) as record:
        for row in rows:
            record.append(row)
    return rows


def test_what_is_appended_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "t.jsonl"
    rows = written(path, 3)
    assert list(read_trajectories(path)) == rows
    assert read_settings(path) == SETTINGS
    assert len(path.read_bytes().splitlines()) == 4
    with Record(path, {}) as record:
        assert (record.settings, record.torn_bytes) == (SETTINGS, 0)
        record.append(trajectory(3))
    assert [row.sibling_index for row in read_trajectories(path)] == [0, 1, 2, 3]


def test_readers_see_whole_lines_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with Record(path, SETTINGS) as record:
        for index in range(3):
            record.append(trajectory(index))
            assert [row.sibling_index for row in read_trajectories(path)] == list(range(index + 1))


@no_clock
@given(data=st.data())
def test_a_torn_file_goes_on_cleanly_wherever_it_was_torn(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "t.jsonl"
    path.unlink(missing_ok=True)
    rows = written(path, 2)
    content = path.read_bytes()
    size = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:size])
    ends = [index + 1 for index, byte in enumerate(content) if byte == ord("\n") and index < size]
    kept = rows[: max(0, len(ends) - 1)]
    assert list(read_trajectories(path)) == kept
    with Record(path, {"model": "m", "seed": 4}) as record:
        assert record.torn_bytes == size - max(ends, default=0)
        # Where nothing was recorded yet the new settings hold.
        assert record.settings == (SETTINGS if kept else {"model": "m", "seed": 4})
        record.append(trajectory(7))
    assert list(read_trajectories(path)) == [*kept, trajectory(7)]
    assert read_settings(path) == (SETTINGS if kept else {"model": "m", "seed": 4})


def test_a_file_that_was_never_written_to_is_not_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with Record(path, SETTINGS):
        assert list(read_trajectories(path)) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content", [b"my notes", b"a,b\n1,2\n", b'{"messages": []}\n', b'{"trajectory_id": "g/0"}\n{"t']
)
def test_somebody_elses_file_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="notes is there and does not say with which settings it was written"):
        Record(path, SETTINGS)
    assert path.read_bytes() == content


def test_an_unknown_version_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"format": "agentgrad.trajectories", "version": 9, "settings": {"a": 1}}\n')
    says = r"t\.jsonl, line 1: a file of format agentgrad\.trajectories 9; this program reads .* up to 2$"
    for read in (lambda: list(read_trajectories(path)), lambda: Record(path, {}), lambda: read_settings(path)):
        with pytest.raises(ValueError, match=says):
            read()


def test_files_of_version_1_and_files_put_one_behind_the_other_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = written(path, 2)
    header, *lines = path.read_bytes().splitlines(keepends=True)
    old = [json.loads(line) for line in lines]
    for row in old:
        for later in ("cost_usd", "attempt", "opening", "tools"):
            del row[later]
    (tmp_path / "v1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in old))
    first_version = [replace(row, opening=()) for row in rows]
    assert list(read_trajectories(tmp_path / "v1.jsonl")) == first_version
    assert read_settings(tmp_path / "v1.jsonl") is None
    (tmp_path / "both.jsonl").write_bytes((tmp_path / "v1.jsonl").read_bytes() + path.read_bytes() + header)
    assert list(read_trajectories(tmp_path / "both.jsonl")) == first_version + rows


def test_a_header_holds_for_what_follows_it(tmp_path: Path) -> None:
    path = tmp_path / "both.jsonl"
    parts = [written(tmp_path / "a.jsonl", 2), [trajectory(5)], [trajectory(6)]]
    with Record(tmp_path / "b.jsonl", {"model": "other"}) as record:
        record.append(trajectory(5))
    write_trajectories(tmp_path / "c.jsonl", [trajectory(6)])
    path.write_bytes(b"".join((tmp_path / f"{name}.jsonl").read_bytes() for name in "abc"))
    settings = [SETTINGS, SETTINGS, {"model": "other"}, None]
    assert list(read_recorded(path)) == list(zip(settings, [row for part in parts for row in part], strict=True))
    with Record(path, {}) as record:
        assert (record.settings, record.later_settings) == (SETTINGS, [{"model": "other"}, {}])


def test_a_line_that_is_no_trajectory_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    written(path, 2)
    path.write_bytes(path.read_bytes().replace(b'"stop_reason":"final_answer"', b'"stop_reason":"tired"', 1))
    with pytest.raises(
        ValueError, match=r"t\.jsonl, line 2: stop_reason: Input should be.*; the line was changed or damaged: make or"
    ):
        list(read_trajectories(path))
    with Record(path, {}) as record, pytest.raises(ValueError, match=r"t\.jsonl, line 2: stop_reason"):
        record.keep(lambda _: True)


def test_what_is_not_kept_goes_in_one_move(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = written(path, 4)
    with Record(path, SETTINGS) as record:
        assert record.keep(lambda row: row.sibling_index % 2 == 0) == 2
        assert list(read_trajectories(path)) == [rows[0], rows[2]]
        record.append(rows[1])
        with pytest.raises(ValueError, match="another process is writing it"):
            Record(path, SETTINGS)  # the new file is held too
    assert list(read_trajectories(path)) == [rows[0], rows[2], rows[1]]
    assert [one.name for one in tmp_path.iterdir()] == ["t.jsonl"]


def _hold(path: Path, held: Any, let_go: Any) -> None:
    with Record(path, SETTINGS) as record:
        record.append(trajectory(5))
        held.set()
        let_go.wait(60)


def test_a_second_writer_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    context = multiprocessing.get_context("spawn")
    held, let_go = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(path, held, let_go))
    process.start()
    try:
        assert held.wait(120)
        with pytest.raises(ValueError, match=r"t\.jsonl: another process is writing it"):
            Record(path, SETTINGS)
        process.kill()
        process.join(60)
        with Record(path, SETTINGS) as record:
            record.append(trajectory(6))
    finally:
        process.kill()
        process.join(60)
    assert [row.sibling_index for row in read_trajectories(path)] == [5, 6]


@contextmanager
def full_disk(at_bytes: int) -> Iterator[None]:
    """No file may be larger: a write is cut short, and the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = written(path, 1)
    content = path.read_bytes()
    with Record(path, SETTINGS) as record:
        with full_disk(len(content) + 100), pytest.raises(OSError, match="File too large") as caught:
            record.append(trajectory(1))
        assert caught.value.filename == str(path)
        assert path.read_bytes() == content
        record.append(trajectory(2))
    assert list(read_trajectories(path)) == [*rows, trajectory(2)]


def test_a_record_can_begin_anew(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("whatever was there")
    with Record(path, SETTINGS, anew=True) as record:
        record.append(trajectory())
    assert list(read_trajectories(path)) == [trajectory()]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.binary() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner),
    max_leaves=10,
)


@no_clock
@given(text=st.text(st.characters()), value=anything)
def test_whatever_a_trajectory_holds_can_be_written_and_read_b15(tmp_path: Path, text: str, value: Any) -> None:
    """Halves of surrogate pairs (`st.characters()` gives them), NaN, bytes: no line is lost for them."""
    path = tmp_path / "t.jsonl"
    row = trajectory(text=text, arguments={"value": value})
    with Record(path, SETTINGS, anew=True) as record:
        record.append(row)
        record.append(trajectory(1))
    first, second = read_trajectories(path)
    assert second == trajectory(1)
    assert first.turns[0].message.content == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert first.streams == row.streams


class Odd:
    def __str__(self) -> str:
        raise RuntimeError("cannot say")


keys = st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from(["0", "1", "1 (2)", "None", "True", "\ud800"])


@no_clock
@given(entries=st.lists(st.tuples(keys, st.integers()), unique_by=lambda entry: entry[0], min_size=1))
def test_keys_of_one_text_lose_no_entry_b15(tmp_path: Path, entries: list[tuple[object, int]]) -> None:
    """Half a surrogate pair sends the line through what writes all that JSON has no form for."""
    value, path = dict(entries), tmp_path / "t.jsonl"
    write_trajectories(path, [trajectory(text="\ud800", arguments={"value": value})])
    (read,) = read_trajectories(path)
    written = read.turns[0].message.tool_calls[0].arguments["value"]
    assert list(written.values()) == list(value.values())
    assert next(iter(written)) == str(next(iter(value))).replace("\ud800", "\ufffd")


def test_a_key_of_one_text_gets_a_number_b15(tmp_path: Path) -> None:
    value = {"1": "a", 1: "b", "1 (2)": "c", None: "\ud800"}
    write_trajectories(tmp_path / "t.jsonl", [trajectory(arguments={"value": value})])
    (read,) = read_trajectories(tmp_path / "t.jsonl")
    written = read.turns[0].message.tool_calls[0].arguments["value"]
    assert written == {"1": "a", "1 (2)": "b", "1 (2) (2)": "c", "None": "\ufffd"}


@pytest.mark.parametrize("value", [Odd(), ValueError("no"), {1, 2}, object(), b"\xff\x00"], ids=repr)
def test_what_json_has_no_form_for_does_not_lose_the_trajectory_b21(tmp_path: Path, value: object) -> None:
    deep: dict[str, Any] = {}
    deepest = deep
    for _ in range(400):
        deepest["a"] = {}
        deepest = deepest["a"]
    path = tmp_path / "t.jsonl"
    write_trajectories(path, [trajectory(arguments={"value": value, "deep": deep}), trajectory(1)])
    assert [row.sibling_index for row in read_trajectories(path)] == [0, 1]


def test_numbers_that_are_not_finite_are_valid_json_and_come_back_b21(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    (stream,) = trajectory().streams
    model = replace(stream.segments[1], logprobs=(-math.inf,))
    row = replace(trajectory(), reward=math.nan, streams=(TokenStream([stream.segments[0], model]),))
    write_trajectories(path, [row])

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    (read,) = read_trajectories(path)
    assert read.reward is not None
    assert math.isnan(read.reward)
    assert read.streams == row.streams
