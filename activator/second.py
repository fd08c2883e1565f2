"""The second attempt at a request that is late at its first replica. Its own task keeps slot and connection for as long
as the request needs them; whether it does is `hedges`'.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from activator.exchange import now_us
from activator.failings import blame, failure_of
from activator.proxy import Declined, Lost, Upstream
from activator.throttler import Slot, Throttler
from contracts.frames import Frame, FrameKind

log = logging.getLogger(__name__)


class Second:
    """Starts at once. `begun` is called with its first frame, unless it was ended before."""

    def __init__(self, throttler: Throttler, slot: Slot, upstream: Upstream, begun: Callable[[], None]) -> None:
        self.slot = slot
        self.upstream = upstream
        self.sent_us = now_us()
        self.frames: list[Frame] | None = None  # the first ones
        self.is_lead = False  # its answer is passed on
        self._throttler = throttler
        self._begun = begun
        loop = asyncio.get_running_loop()
        self._let_go: asyncio.Future[None] = loop.create_future()
        self._known = asyncio.Event()
        self._task = loop.create_task(self._run(), name="second")
        self._task.add_done_callback(self._ended)

    def __repr__(self) -> str:
        return f"<Second begun={self.frames is not None} lead={self.is_lead} over={self._task.done()}>"

    async def known(self) -> None:
        """Until it has begun an answer, or has come to nothing."""
        await self._known.wait()

    def end(self) -> None:
        """Its answer was passed on, or won't be: then its replica is told that. Returns at once. Idempotent."""
        if self.is_lead:
            if not self._let_go.done():
                self._let_go.set_result(None)
        elif not self._task.done():
            self.upstream.disown()
            self._task.cancel()

    async def ended(self) -> None:
        """Until nothing is left of it."""
        await asyncio.wait((self._task,))
        if self.upstream.telling is not None:
            await asyncio.wait((self.upstream.telling,))

    async def _run(self) -> None:
        replica = self.slot.replica
        try:
            async with self.upstream:
                self._throttler.report_began(replica, self.upstream.credit)
                frames = await self.upstream.some()
                while not speaks(frames):
                    frames = await self.upstream.some()
                if frames[-1].kind is FrameKind.FAILED:  # the first replica may do better
                    self.upstream.disown()
                    raise Declined(failure_of(frames[-1]))
                self.frames = frames
                self._known.set()
                self._begun()
                await self._let_go
        except (Lost, Declined) as failed:
            blame(self._throttler, replica, failed)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """By itself or not, also where it was ended before its first step."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("unforeseen failure", exc_info=error)
        self._known.set()
        if self.is_lead:
            self.slot.release()
        else:
            self.slot.outrun(self.upstream.telling)


def speaks(frames: Sequence[Frame]) -> bool:
    """Whether an answer has begun: more than a beat, or one that counts a token (of an answer that doesn't stream)."""
    return any(frame.kind is not FrameKind.BEAT or frame.counts.completion_tokens for frame in frames)
