"""How a version's flight goes, for those who wait for it: where its bytes will be, and which may be read already.

A chunk is told once it is ready, which is to say verified where it lies. A flight that has to bring the version to
another place (something in it was found wrong meanwhile) is told anew from the start.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from weightcache.policy.spans import Span, spans_of
from weightcache.resident import Resident
from weightcache.wire import MAX_SPANS


class Filling:
    """Written by the flight, read by any number."""

    def __init__(self) -> None:
        self.resident: Resident | None = None  # while it is on its way there
        self._at: dict[str, tuple[Span, ...]] = {}
        self._ready: list[Span] = []  # in the order in which they became so
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Filling placed={self.resident is not None} ready={len(self._ready)}>"

    @contextmanager
    def towards(self, resident: Resident, chunks: Sequence[tuple[str, int]], ready: Iterable[str]) -> Iterator[None]:
        """While the block brings the version there: its chunks, of which these are ready from the start."""
        self.resident, self._at, self._ready = resident, spans_of(chunks), []
        for digest in ready:
            self._ready += self._at[digest]
        self._tell()
        try:
            yield
        finally:
            self.resident = None
            self._tell()

    def add(self, resident: Resident, digest: str) -> None:
        """The chunk is ready there."""
        if self.resident is resident:
            self._ready += self._at[digest]
            self._tell()

    async def placed(self) -> Resident:
        """Where it will be, once that is known."""
        while self.resident is None:
            await self._changed.wait()
        return self.resident

    async def after(self, resident: Resident, count: int) -> tuple[Span, ...]:
        """What became ready there beyond the first `count` spans, at most `MAX_SPANS` of it, once there is some; none
        once the version is not on its way there any more.
        """
        while self.resident is resident and len(self._ready) == count:
            await self._changed.wait()
        return tuple(self._ready[count : count + MAX_SPANS]) if self.resident is resident else ()

    def _tell(self) -> None:
        """Whoever waits looks again."""
        self._changed.set()
        self._changed = asyncio.Event()
