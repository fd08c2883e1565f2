"""The format of one record in a segment: length, CRC-32, sequence, payload. `segment_writer` and `segment_reader`
handle files.

Bytes that are not a frame are damage if a whole frame follows them (see `find_frame`). If none does, they are the end
of the segment: a torn tail, or reserved space, which reads as zeros.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from zlib import crc32

_HEADER: Final = struct.Struct("<IIQ")
_SEQUENCE: Final = struct.Struct("<Q")
HEADER_BYTES: Final = _HEADER.size
MAX_RECORD_BYTES: Final = 256 * 1024
MAX_SEQUENCE: Final = 2**64 - 1
_NEAR_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class Frame:
    """A record that was read back whole. The next frame begins at offset `end`."""

    sequence: int
    payload: bytes
    end: int


def _checksum(sequence: int, payload: bytes | memoryview) -> int:
    # The checksum covers the sequence: a payload with another record's number would be billed as that record.
    return crc32(payload, crc32(_SEQUENCE.pack(sequence)))


def encode_frame(sequence: int, payload: bytes) -> bytes:
    """Return the frame. Raises ValueError unless the payload has 1 to MAX_RECORD_BYTES bytes and `sequence` > 0."""
    if not 0 < len(payload) <= MAX_RECORD_BYTES:
        raise ValueError(f"a record has 1 to {MAX_RECORD_BYTES} bytes, not {len(payload)}")
    if sequence < 1:
        raise ValueError(f"sequences begin at 1, not {sequence}")
    return _HEADER.pack(len(payload), _checksum(sequence, payload), sequence) + payload


def decode_frame(segment: bytes, offset: int) -> Frame | None:
    """Return the frame at `offset`, or None if the segment ends there or is damaged."""
    start = offset + HEADER_BYTES
    if start > len(segment):
        return None
    length, checksum, sequence = _HEADER.unpack_from(segment, offset)
    if not 0 < length <= MAX_RECORD_BYTES or start + length > len(segment) or sequence < 1:
        return None
    payload = segment[start : start + length]
    if _checksum(sequence, payload) != checksum:
        return None
    return Frame(sequence, payload, start + length)


def _offsets(segment: bytes, start: int) -> Iterator[int]:
    """Yield the offsets at which a frame may begin, up to the zeros at the end. The zeros are located only if no frame
    is near `start`.
    """
    last = len(segment) - HEADER_BYTES
    near = min(start + _NEAR_BYTES, last)
    yield from range(start, near)
    yield from range(max(start, near), min(len(segment.rstrip(b"\0")), last))


def find_frame(segment: bytes, offset: int, first: int, last: int) -> Frame | None:
    """Return the first whole frame at or after `offset` whose sequence is `first` to `last`, skipping damage.

    Frames have no resync mark, so every offset is tried. After n damaged bytes, a sequence is plausible up to `first`
    plus the number of frames that fit into n bytes.
    """
    frame = decode_frame(segment, offset)
    if frame is not None and frame.sequence == first:
        return frame
    for at in _offsets(segment, offset + 1):
        (sequence,) = _SEQUENCE.unpack_from(segment, at + HEADER_BYTES - _SEQUENCE.size)
        if first <= sequence <= min(last, first + (at - offset) // (HEADER_BYTES + 1)):
            frame = decode_frame(segment, at)
            if frame is not None:
                return frame
    return None
