"""HTTP/2's frames (RFC 9113, 4.1), cut from what is read: each is judged by its nine bytes before anybody parses it.

What is too much of which kind is `policy/h2_bounds`'s to say.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES: Final = 9
MAX_FRAME_BYTES: Final = 16_384  # of a payload: what every peer may send, and we never ask for more


class Frame(NamedTuple):
    """`raw` is all of it; `length` is its payload's."""

    kind: int
    flags: int
    stream: int
    length: int
    raw: bytes


class NotHttp2(Exception):
    """The connection does not begin as HTTP/2 does."""


class TooLong(Exception):
    """A frame says that it is longer than may be."""


class FrameReader:
    """One connection's. Holds one frame that is not whole, at the most."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._is_greeted = False

    def __repr__(self) -> str:
        return f"<FrameReader waiting={len(self._buffer)}>"

    @property
    def has_part(self) -> bool:
        """Whether a frame, or the preface, has begun and is not whole."""
        return bool(self._buffer)

    def part(self) -> tuple[int, int, int] | None:
        """Of the frame that is not whole: kind, stream, and bytes of its payload; None where not even that is known."""
        buffer = self._buffer
        if not self._is_greeted or len(buffer) < HEADER_BYTES:
            return None
        return buffer[3], int.from_bytes(buffer[5:9], "big") & 0x7FFFFFFF, len(buffer) - HEADER_BYTES

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Every frame that is whole now; the preface is none. Raises NotHttp2, TooLong."""
        buffer = self._buffer
        buffer += data
        if not self._is_greeted:
            if buffer[: len(PREFACE)] != PREFACE[: len(buffer)]:
                raise NotHttp2
            if len(buffer) < len(PREFACE):
                return
            self._is_greeted = True
            del buffer[: len(PREFACE)]
        while len(buffer) >= HEADER_BYTES:
            length = int.from_bytes(buffer[:3], "big")
            if length > MAX_FRAME_BYTES:
                raise TooLong
            end = HEADER_BYTES + length
            if len(buffer) < end:
                return
            raw = bytes(buffer[:end])
            del buffer[:end]
            yield Frame(raw[3], raw[4], int.from_bytes(raw[5:9], "big") & 0x7FFFFFFF, length, raw)
