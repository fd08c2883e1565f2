"""Frames are decoded from a byte stream that is split anywhere. Other bytes are refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kelvin.contracts.problem import WireFailure, from_wire, to_wire
from kelvin.contracts.serving.stream_frames import (
    MAX_PAYLOAD,
    Counts,
    Frame,
    FrameDecoder,
    FrameKind,
    encode_frame,
    failed_frame,
)
from kelvin.contracts.traffic_errors import ReplicaLost

_small = st.integers(0, 2**32 - 1)
_counts = st.builds(Counts, _small, _small, _small, st.integers(0, 2**64 - 1))
_frames = st.lists(st.builds(Frame, st.sampled_from(FrameKind), _counts, st.binary(max_size=300)), max_size=8)


@given(_frames, st.lists(st.integers(1, 97), min_size=1, max_size=30))
def test_any_cut_of_the_stream_gives_the_same_frames(frames: list[Frame], cuts: list[int]) -> None:
    """However the network splits the bytes, the frames come out complete and in order."""
    stream = b"".join(map(encode_frame, frames))
    decoder, got, at, turn = FrameDecoder(), [], 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        got += decoder.feed(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert got == frames
    assert decoder.is_clean


def test_a_cut_frame_is_not_a_clean_end() -> None:
    """A stream that ends within a frame is distinguished from one that ended cleanly."""
    decoder = FrameDecoder()
    assert decoder.feed(encode_frame(Frame(FrameKind.DATA, Counts(), b"abc"))[:-1]) == []
    assert not decoder.is_clean


def test_an_oversized_length_is_refused_before_it_is_buffered() -> None:
    """A length that no runtime sends is refused at once."""
    with pytest.raises(ValueError, match="over"):
        encode_frame(Frame(FrameKind.DATA, Counts(), b"x" * (MAX_PAYLOAD + 1)))
    with pytest.raises(ValueError, match="over"):
        FrameDecoder().feed(b"\x01\0\0\0" + b"\xff" * 4 + b"\0" * 20)


def test_an_unknown_kind_is_refused() -> None:
    """A frame kind of a later format is refused."""
    with pytest.raises(ValueError, match="FrameKind"):
        FrameDecoder().feed(b"\x63" + b"\0" * 27)


def test_a_failure_crosses_as_it_was() -> None:
    """A runtime's failure is rendered at the activator as it would be at the runtime."""
    (frame,) = FrameDecoder().feed(failed_frame(to_wire(ReplicaLost()), Counts(1, 0, 2, 3)))
    failure = from_wire(msgspec.json.decode(frame.payload, type=WireFailure))
    assert frame.kind is FrameKind.FAILED
    assert to_wire(failure) == to_wire(ReplicaLost())
