"""A frame is decoded as it was encoded, or not at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kelvin.spool.frame import HEADER_BYTES, MAX_RECORD_BYTES, decode_frame, encode_frame

PAYLOADS = st.binary(min_size=1, max_size=300)
SEQUENCES = st.integers(min_value=1, max_value=2**64 - 1)


@given(SEQUENCES, PAYLOADS, st.binary(max_size=40))
def test_a_frame_reads_back(sequence: int, payload: bytes, before: bytes) -> None:
    """Sequence, payload and end offset are decoded at any offset."""
    frame = decode_frame(before + encode_frame(sequence, payload) + bytes(64), len(before))
    assert frame is not None
    assert (frame.sequence, frame.payload) == (sequence, payload)
    assert frame.end == len(before) + HEADER_BYTES + len(payload)


@given(SEQUENCES, PAYLOADS, st.data())
def test_a_torn_frame_is_no_frame(sequence: int, payload: bytes, data: st.DataObject) -> None:
    """A truncated frame, zero-filled or not, is read as the end."""
    whole = encode_frame(sequence, payload)
    cut = data.draw(st.integers(min_value=0, max_value=len(whole) - 1))
    assert decode_frame(whole[:cut], 0) is None
    padded = whole[:cut] + bytes(len(whole) - cut)
    assert padded == whole or decode_frame(padded, 0) is None


@given(SEQUENCES, PAYLOADS, st.data())
def test_a_flipped_bit_is_found(sequence: int, payload: bytes, data: st.DataObject) -> None:
    """A frame with one flipped bit, even in its sequence, is refused."""
    whole = bytearray(encode_frame(sequence, payload))
    bit = data.draw(st.integers(min_value=0, max_value=len(whole) * 8 - 1))
    whole[bit // 8] ^= 1 << (bit % 8)
    assert decode_frame(bytes(whole), 0) is None


@pytest.mark.parametrize(
    ("sequence", "payload"),
    [
        pytest.param(1, b"", id="an empty record would read as the end"),
        pytest.param(1, bytes(MAX_RECORD_BYTES + 1), id="a record over the limit"),
        pytest.param(0, b"x", id="sequences begin at 1"),
    ],
)
def test_illegal_records_are_refused(sequence: int, payload: bytes) -> None:
    """A record that couldn't be read back is not written."""
    with pytest.raises(ValueError, match="not"):
        encode_frame(sequence, payload)


def test_zeros_are_the_end() -> None:
    """Preallocated space contains no frame."""
    assert decode_frame(bytes(4096), 0) is None
