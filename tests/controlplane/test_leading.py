"""One process runs, and ends where the lead is lost; who waits is told to stop like anybody else."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from controlplane.leading import lead
from service.inner_settings import ALONE
from tests.controlplane.candidates import Line, Store
from tests.controlplane.virtual_time import VirtualClock


class Place:
    """A process that would run, and what became of it."""

    def __init__(self) -> None:
        self.clock, self.store, self.stop = VirtualClock(), Store(), asyncio.Event()
        self.line = Line(self.store, self.clock)
        self.seen: list[str] = []
        self.end = asyncio.Event()

    async def serve(self) -> None:
        """Until it is told to end, or is cut."""
        self.seen.append("began")
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.seen.append("cut")
            raise
        self.seen.append("ended")

    def run(self, serve: Callable[[], Awaitable[None]] | None = None) -> asyncio.Task[None]:
        """As the application does."""
        work = lead(self.line, "kelvin", ALONE, self.clock, self.stop, serve or self.serve)
        return asyncio.create_task(work)

    def somebody_leads(self) -> None:
        """And has said so just now."""
        (lease,) = self.store.kept.values()
        spec = {**lease["spec"], "holderIdentity": "another", "leaseDurationSeconds": 15}
        self.store.write({**lease, "spec": spec}, new=False)


def test_it_runs_to_its_end() -> None:
    """And gives the lead up, for whoever waits."""

    async def main() -> None:
        it = Place()
        task = it.run()
        await it.clock.advance(1.0)
        it.end.set()
        await it.clock.advance(1.0)
        await task
        assert it.seen == ["began", "ended"]
        (lease,) = it.store.kept.values()
        assert not lease["spec"].get("holderIdentity")

    asyncio.run(main())


def test_the_lead_is_lost() -> None:
    """It is cut at once, and does not run again: what it knows may be wrong by now."""

    async def main() -> None:
        it = Place()
        task = it.run()
        await it.clock.advance(1.0)
        it.somebody_leads()
        await it.clock.advance(30.0)
        await task
        assert it.seen == ["began", "cut"]

    asyncio.run(main())


def test_who_waits_is_stopped() -> None:
    """It has not run, and does not."""

    async def main() -> None:
        it = Place()
        first = it.run()
        await it.clock.advance(1.0)
        other = Place()
        other.clock, other.line, other.store = it.clock, it.line, it.store
        second = other.run()
        await it.clock.advance(5.0)
        assert other.seen == []
        other.stop.set()
        await asyncio.wait_for(second, 10)
        assert other.seen == []
        it.end.set()
        await it.clock.advance(1.0)
        await first

    asyncio.run(main())


def test_its_own_failure() -> None:
    """Is the caller's to hear."""

    async def main() -> None:
        it = Place()

        async def fails() -> None:
            raise ValueError("no such price book")

        task = it.run(fails)
        await it.clock.advance(1.0)
        with pytest.raises(ValueError, match="price book"):
            await task

    asyncio.run(main())
