"""Does a stream of frames come out as it went in, however it is cut, also with an engine's framing around it?"""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from envs.sandbox import wire
from envs.sandbox.docker_host import unwrapper

frames = st.lists(
    st.tuples(st.sampled_from([wire.PONG, wire.DATA, wire.DONE]), st.integers(0, 2**32 - 1), st.binary(max_size=300))
)


def cut(data: bytes, draw: st.DataObject) -> list[bytes]:
    places = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=8)))
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]


@given(frames, st.data())
def test_frames_come_out_as_they_went_in(sent: list[tuple[bytes, int, bytes]], draw: st.DataObject) -> None:
    reader = wire.FrameReader()
    stream = b"".join(wire.frame(kind, number, payload) for kind, number, payload in sent)
    received = [frame for piece in cut(stream, draw) for frame in reader.add(piece)]
    assert [(frame.kind, frame.id, frame.payload) for frame in received] == sent


@given(st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=100))), st.data())
def test_only_stdout_of_an_attached_stream_is_kept(written: list[tuple[int, bytes]], draw: st.DataObject) -> None:
    stream = b"".join(struct.pack(">BxxxI", number, len(text)) + text for number, text in written)
    unwrap = unwrapper()
    kept = b"".join(part for piece in cut(stream, draw) for part in unwrap(piece))
    assert kept == b"".join(text for number, text in written if number == 1)


@given(st.binary(max_size=200_000), st.integers(0, 0o7777))
def test_a_file_travels_in_pieces(content: bytes, mode: int) -> None:
    pieces = [piece[12:] for piece in wire.write_frames(7, "a/é", content, mode)]
    flags = [struct.unpack_from("<II", piece) for piece in pieces]
    path = "a/é".encode() + b"\0"
    assert b"".join(piece[8 + len(path) :] for piece in pieces) == content
    assert [first & 1 for first, _ in flags] == [1] + [0] * (len(pieces) - 1)
    assert [first & 2 for first, _ in flags] == [0] * (len(pieces) - 1) + [2]
    assert {mode for _, mode in flags} == {mode}
