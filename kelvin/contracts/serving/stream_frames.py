"""Frames of a runtime's response to the activator: the client's bytes and cumulative counts.

Every frame has the tokens and device microseconds that the request has cost so far. So if one side dies, the other can
bill what was delivered. Pure codec; callers own the sockets.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import msgspec

from kelvin.contracts.errors import Failure
from kelvin.contracts.problem import WireFailure
from kelvin.contracts.timeline import StageSpan
from kelvin.contracts.wire import Fact

CONTENT_TYPE: Final = "application/x-kelvin-frames"
# On a refusal, which has no frames: see `Refused.encoded_tokens`
ENCODED_TOKENS_HEADER: Final = "x-kelvin-encoded-tokens"
WANTS_HEADER: Final = "x-kelvin-wants"  # on a request: how many requests its activator wants here, this one included
CREDIT_HEADER: Final = "x-kelvin-credit"  # on a response and on `no_credit`: how many its activator may have here
MAX_PAYLOAD: Final = 16 << 20
_HEADER: Final = struct.Struct("<BxxxIIIIQ")  # kind, payload length, prompt, cached, completion tokens, device us
_HEADER_BYTES: Final = _HEADER.size
_unpack: Final = _HEADER.unpack_from


@dataclass(frozen=True, slots=True)
class NoCredit(Failure):
    """The replica is full. The activator sends the request again later; no caller sees this."""

    limit: int
    credit: int  # requests that the activator may have at this replica
    code, status, retryable = "no_credit", 503, True
    template = "this replica is full (limit of streams: {limit})"


class FrameKind(IntEnum):
    """The kind of a frame's payload."""

    DATA = 1  # bytes for the client, passed on unread
    END = 2  # JSON of `StreamEnd`: the response is complete
    FAILED = 3  # JSON of `WireFailure`: the response ends here
    HEARTBEAT = 4  # empty: counts changed, or a sign of life


_KINDS: Final[dict[int, FrameKind]] = {kind.value: kind for kind in FrameKind}


class StreamEnd(Fact, frozen=True):
    """Payload of the last frame of a complete response."""

    finish_reason: str
    spans: tuple[StageSpan, ...] = ()
    unfiltered: bool = False  # some text passed its filters unchecked, so the response must not be reused


class Counts(msgspec.Struct, frozen=True, gc=False):
    """Cumulative cost of one request at its runtime."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    device_us: int = 0


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One frame. The format of `payload` depends on `kind`."""

    kind: FrameKind
    counts: Counts
    payload: bytes = b""


def encode_frame(frame: Frame) -> bytes:
    """Return header and payload. Raises ValueError if the payload is over MAX_PAYLOAD."""
    if len(frame.payload) > MAX_PAYLOAD:
        raise ValueError(f"frame payload of {len(frame.payload)} bytes is over {MAX_PAYLOAD}")
    counts = frame.counts
    return (
        _HEADER.pack(
            frame.kind,
            len(frame.payload),
            counts.prompt_tokens,
            counts.cached_tokens,
            counts.completion_tokens,
            counts.device_us,
        )
        + frame.payload
    )


class FrameDecoder:
    """Incremental decoder: `feed` takes bytes as they arrive and returns whole frames. Raises ValueError for bytes that
    no Kelvin runtime sends.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # bytes of an incomplete frame
        self._held = 0  # their number
        self._wanted = 0  # bytes needed before decoding can continue

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames completed by `data`, in order."""
        if self._parts:
            self._parts.append(data)
            self._held += len(data)
            if self._held < self._wanted:
                return []
            data, self._parts = b"".join(self._parts), []
        frames: list[Frame] = []
        at, size, self._wanted = 0, len(data), _HEADER_BYTES
        while (begin := at + _HEADER_BYTES) <= size:
            kind, length, *counts = _unpack(data, at)
            if length > MAX_PAYLOAD:
                raise ValueError(f"frame payload of {length} bytes is over {MAX_PAYLOAD}")
            end = begin + length
            if size < end:
                self._wanted = end - at
                break
            frames.append(Frame(_KINDS.get(kind) or FrameKind(kind), Counts(*counts), data[begin:end]))
            at = end
        if at < size:
            self._parts, self._held = [data[at:]], size - at
        return frames

    @property
    def is_clean(self) -> bool:
        """Return whether the stream could end here without cutting a frame."""
        return not self._parts


def failed_frame(failure: WireFailure, counts: Counts) -> bytes:
    """Return the terminal frame of a response that failed."""
    return encode_frame(Frame(FrameKind.FAILED, counts, msgspec.json.encode(failure)))
