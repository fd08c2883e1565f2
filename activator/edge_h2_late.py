"""What of an HTTP/2 connection's frames comes too slowly: the first request, a frame, a header list.

A body has a pace of its own (`edge_body`), of which the frame that is not whole is told here.
"""

import asyncio
from collections.abc import Callable, Mapping

from h2.errors import ErrorCodes

from activator.edge_frames import FrameReader
from activator.edge_h2_stream import Stream
from activator.policy.h2_bounds import FrameBounds, Kind


class FrameWatch:
    """One connection's. `ends` hears the code with which to end it, once `limit_s` are over."""

    def __init__(
        self,
        reader: FrameReader,
        bounds: FrameBounds,
        streams: Mapping[int, Stream],
        limit_s: float,
        loop: asyncio.AbstractEventLoop,
        ends: Callable[[ErrorCodes], None],
    ) -> None:
        self.has_asked = False  # a request has come
        self._reader = reader
        self._bounds = bounds
        self._streams = streams
        self._limit_s = limit_s
        self._loop = loop
        self._ends = ends
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<FrameWatch {'waits' if self._timer is not None else 'idle'} asked={self.has_asked}>"

    def look(self, *, moved: bool = False) -> None:
        """After each change. `moved`: a frame became whole. A header list has its time once, in however many frames."""
        waits = not self.has_asked or self._bounds.in_block or (self._reader.has_part and self._awaited() is None)
        if not waits or (moved and self.has_asked and not self._bounds.in_block):
            self._stop()
        if waits and self._timer is None and not self._is_closed:
            self._timer = self._loop.call_later(self._limit_s, self._is_late)

    def count_part(self) -> None:
        """Of a frame of DATA that is not whole, its body's pace knows."""
        part, stream = self._reader.part(), self._awaited()
        if part is not None and stream is not None:
            stream.pace.came(part[2] - stream.counted)
            stream.counted = part[2]

    def close(self) -> None:
        """No time runs from now on."""
        self._is_closed = True
        self._stop()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _awaited(self) -> Stream | None:
        """Whose body the frame is of that is not whole, where that is awaited."""
        part = self._reader.part()
        stream = None if part is None or part[0] != Kind.DATA else self._streams.get(part[1])
        return stream if stream is not None and stream.is_body_awaited else None

    def _is_late(self) -> None:
        self._timer = None
        said_half = self._reader.has_part or self._bounds.in_block
        self._ends(ErrorCodes.ENHANCE_YOUR_CALM if said_half else ErrorCodes.NO_ERROR)
