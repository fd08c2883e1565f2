"""Frames are cut from what is read, wherever reads begin and end."""

from itertools import pairwise

import pytest
from hyperframe.frame import DataFrame, Frame, PingFrame
from hypothesis import given
from hypothesis import strategies as st

from activator.edge_frames import MAX_FRAME_BYTES, PREFACE, FrameReader, NotHttp2, TooLong

SAID: list[Frame] = [PingFrame(0, b"12345678"), DataFrame(5, b"x" * 300), DataFrame(1, b"", flags=("END_STREAM",))]
WHOLE = PREFACE + b"".join(frame.serialize() for frame in SAID)


@given(st.lists(st.integers(0, len(WHOLE)), max_size=8))
def test_the_same_frames_come_of_any_reads(cuts: list[int]) -> None:
    """Each whole, with what its nine bytes say."""
    reader, places = FrameReader(), [0, *sorted(cuts), len(WHOLE)]
    got = [f for begin, end in pairwise(places) for f in reader.feed(WHOLE[begin:end])]
    assert [frame.raw for frame in got] == [frame.serialize() for frame in SAID]
    assert [(frame.kind, frame.flags, frame.stream, frame.length) for frame in got] == [
        (6, 0, 0, 8), (0, 0, 5, 300), (0, 1, 1, 0),
    ]  # fmt: skip
    assert not reader.has_part


def test_a_part_is_told() -> None:
    """What it is of, once nine bytes are known, and how much of it there is."""
    reader, frame = FrameReader(), SAID[1].serialize()
    assert list(reader.feed(PREFACE[:5])) == []
    assert (reader.has_part, reader.part()) == (True, None)
    assert list(reader.feed(PREFACE[5:] + frame[:4])) == []
    assert (reader.has_part, reader.part()) == (True, None)
    assert list(reader.feed(frame[4:100])) == []
    assert reader.part() == (0, 5, 91)


@pytest.mark.parametrize(("said", "error"), [
    pytest.param(b"GET / HTTP/1.1\r\n", NotHttp2, id="HTTP/1.1"),
    pytest.param(PREFACE[:-1] + b"x", NotHttp2, id="a preface that ends otherwise"),
    pytest.param(b"\x16", NotHttp2, id="the first byte is wrong already"),
    pytest.param(PREFACE + (MAX_FRAME_BYTES + 1).to_bytes(3, "big") + bytes(6), TooLong, id="before any of it came"),
])  # fmt: skip
def test_what_is_none_is_refused(said: bytes, error: type[Exception]) -> None:
    """As early as can be."""
    with pytest.raises(error):
        list(FrameReader().feed(said))
