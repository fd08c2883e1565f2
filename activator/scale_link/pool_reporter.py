"""Report load of versions on shared pods, and keep those pods running.

A version on a shared pod has no Revision of its own, so the control plane decides its replicas. The pool of pods has a
Revision. Every second this activator sends Knative's autoscaler the pool size from the last feed, also while the
control plane is away, so that serving pods stay. The autoscaler adds the values of all activators, so each sends its
share. The number of activators comes from Redis if they share one, since it knows within seconds which are alive, else
from the feed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from activator.routing.policy.version_key import VersionKey, key_of
from activator.scale_link.load_reporter import PERIOD_S, ReportSink
from activator.scale_link.stat_encoding import RevisionStat
from kelvin.contracts.serving.control_messages import ConcurrencyStat, PoolRow, RevisionRow

POST_S: Final = PERIOD_S / 2


class PoolReporter:
    """A report sink: versions with a Revision to Knative's autoscaler, versions on pool pods to the control plane."""

    def __init__(
        self,
        link: ReportSink,
        send_revision_stats: Callable[[Iterable[RevisionStat]], Awaitable[bool]],
        control: ReportSink,
        revision_of: Callable[[VersionKey], RevisionRow | None],
        pools: Callable[[], tuple[PoolRow, ...]],
        activator_count: Callable[[], int | None],
    ) -> None:
        """`link` and `send_revision_stats` send to Knative's autoscaler. `activator_count` returns the current number
        of activators, or None if only the feed knows it.
        """
        self._link = link
        self._send_revision_stats = send_revision_stats
        self._control = control
        self._revision_of = revision_of
        self._pools = pools
        self._activator_count = activator_count

    def __repr__(self) -> str:
        return f"<PoolReporter pools={len(self._pools())} {self._link!r}>"

    @property
    def session(self) -> object | None:
        """The session with Knative's autoscaler, or None."""
        return self._link.session

    async def send(self, stats: tuple[ConcurrencyStat, ...]) -> bool:
        """Send each report to its autoscaler. Return whether all were accepted."""
        if not self._pools():
            return await self._link.send(stats)
        without_revision = tuple(each for each in stats if self._revision_of(key_of(each)) is None)
        with_revision = tuple(each for each in stats if self._revision_of(key_of(each)) is not None)
        is_accepted = not with_revision or await self._link.send(with_revision)
        return (not without_revision or await self._post(without_revision)) and is_accepted

    async def _post(self, stats: tuple[ConcurrencyStat, ...]) -> bool:
        """Send to the control plane within POST_S, so that it can't delay the next report to Knative."""
        try:
            async with asyncio.timeout(POST_S):
                return await self._control.send(stats)
        except TimeoutError:
            return False

    async def run(self) -> None:
        """Send the pool sizes every second until cancelled."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + PERIOD_S, loop.time())  # never twice within one second
            await asyncio.sleep(due - loop.time())
            if pools := self._pools():
                await self._send_revision_stats(
                    [RevisionStat(row.namespace, row.name, self._share(row), 0) for row in pools]
                )

    def _share(self, row: PoolRow) -> float:
        activator_count = self._activator_count()
        return row.share if activator_count is None or not row.wanted else row.wanted / activator_count
