"""The body of a runtime's answer to the activator: frames that carry the client's bytes beside cumulative counts.

Every frame says how many tokens and device microseconds the request has cost so far, so that whoever survives can
bill what was delivered. Pure codec; sockets are the callers'.
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
ENCODED_TOKENS_HEADER: Final = "x-kelvin-encoded-tokens"  # of a refusal, which has no frames: `Refused.encoded_tokens`
WANTS_HEADER: Final = "x-kelvin-wants"  # of a request: how many its activator would have at this replica, it included
CREDIT_HEADER: Final = (
    "x-kelvin-credit"  # of an answer's head and of `no_credit`: how many its activator may have there
)
MAX_PAYLOAD: Final = 16 << 20
_HEADER: Final = struct.Struct("<BxxxIIIIQ")  # kind, payload length, prompt, cached, completion tokens, device us
_HEADER_BYTES: Final = _HEADER.size
_unpack: Final = _HEADER.unpack_from


@dataclass(frozen=True, slots=True)
class NoCredit(Failure):
    """A replica has as many requests as it takes. No caller sees this: its activator sends the request again later."""

    limit: int
    credit: int  # requests that the activator may have there
    code, status, retryable = "no_credit", 503, True
    template = "this replica is full (limit of streams: {limit})"


class FrameKind(IntEnum):
    """What the payload is."""

    DATA = 1  # bytes for the client, to be passed on unread
    END = 2  # JSON of `StreamEnd`: the answer is complete
    FAILED = 3  # JSON of `WireFailure`: the answer ends here
    HEARTBEAT = 4  # nothing: counts moved, or the stream is alive


_KINDS: Final[dict[int, FrameKind]] = {kind.value: kind for kind in FrameKind}


class StreamEnd(Fact, frozen=True):
    """Payload of the last frame of a complete answer."""

    finish_reason: str
    spans: tuple[StageSpan, ...] = ()
    unfiltered: bool = False  # something of the prompt or the answer passed its filters unseen: not to be given again


class Counts(msgspec.Struct, frozen=True, gc=False):
    """Cumulative cost of one request at its runtime."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    device_us: int = 0


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One frame; `payload` is what its kind says."""

    kind: FrameKind
    counts: Counts
    payload: bytes = b""


def encode_frame(frame: Frame) -> bytes:
    """Header and payload. Raises ValueError over MAX_PAYLOAD."""
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
    """Feed it bytes as they come; it yields whole frames. Raises ValueError on what no runtime of ours sends."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of a frame that is not whole yet
        self._held = 0  # bytes of these
        self._wanted = 0  # bytes without which there is nothing to be done

    def feed(self, data: bytes) -> list[Frame]:
        """Frames completed by `data`, in order."""
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
        """Whether the stream could end here without cutting a frame."""
        return not self._parts


def failed_frame(failure: WireFailure, counts: Counts) -> bytes:
    """The terminal frame of an answer that failed."""
    return encode_frame(Frame(FrameKind.FAILED, counts, msgspec.json.encode(failure)))
