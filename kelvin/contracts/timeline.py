"""The stages of a request, and of the start that it waited for. Each is stamped once.

A process stamps microseconds since the call to it began (`StageSpan`). Its caller shifts them to the request's own
clock (`Timeline.merge_spans`).
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from operator import itemgetter
from typing import Final

import msgspec

_when = itemgetter(1)
_HUNDREDTHS: Final = [f"{hundredths:02}" for hundredths in range(100)]  # formatting a float takes three times as long


class Stage(StrEnum):
    """Ends of stages, in the order of a cold request."""

    ROUTED = "routed"  # activator: authenticated, resolved, admitted
    POKED = "poked"  # activator: the scaler was notified
    DECIDED = "decided"  # control plane: replicas raised
    PROMOTED = "promoted"  # control plane: a standby took the version
    LEASED = "leased"  # runtime: chunks verified and mapped
    BOUND = "bound"  # runtime: parameters bound to the skeleton
    READY = "ready"  # runtime: accepts requests
    DISPATCHED = "dispatched"  # activator: sent upstream
    TOKENIZED = "tokenized"  # runtime: prompt is ids
    PREFILLED = "prefilled"  # runtime: first logits, probe verified
    FIRST_TOKEN = "first_token"  # activator: first byte of the response sent
    DONE = "done"  # activator: last byte


class Stamp(msgspec.Struct, frozen=True):
    """A stage that ended `at_us` microseconds after the request arrived at the activator."""

    stage: Stage
    at_us: int


class StageSpan(msgspec.Struct, frozen=True):
    """A stage stamped by another process: microseconds since the call to it began. The caller shifts it."""

    stage: Stage
    after_us: int


class Timeline(msgspec.Struct):
    """One request's stamps. `began_us` is its arrival in monotonic microseconds."""

    began_us: int
    _at_us: dict[Stage, int] = msgspec.field(default_factory=dict)

    def stamp(self, stage: Stage, now_us: int) -> None:
        """Stamp a stage. Does nothing if the stage has a stamp already."""
        self._at_us.setdefault(stage, now_us - self.began_us)

    def clear_stage(self, stage: Stage) -> None:
        """Remove the stamp of a stage that has to be repeated."""
        self._at_us.pop(stage, None)

    def merge_spans(self, spans: Iterable[StageSpan], call_began_us: int) -> None:
        """Add another process's spans, shifted by `call_began_us` of this process. They include the hop's latency."""
        zero_us = call_began_us - self.began_us
        for span in spans:
            self._at_us.setdefault(span.stage, zero_us + span.after_us)

    @property
    def at_us(self) -> Mapping[Stage, int]:
        """Return when each stage ended, so far."""
        return self._at_us

    def stamps(self) -> tuple[Stamp, ...]:
        """Return all stamps in order of time."""
        return tuple([Stamp(stage, at) for stage, at in self._in_order()])

    def server_timing(self) -> str:
        """Return the `Server-Timing` header (W3C): `stage;dur=ms` of each stage since the one before it."""
        parts, before = [], 0
        for stage, at_us in self._in_order():
            hundredths = (at_us - before + 5) // 10  # of a millisecond
            parts.append(stage + f";dur={hundredths // 100}.{_HUNDREDTHS[hundredths % 100]}")
            before = at_us
        return ", ".join(parts)

    def _in_order(self) -> list[tuple[Stage, int]]:
        return sorted(self._at_us.items(), key=_when)
