"""What runs on pods that anybody's versions share: who decides of it, and what keeps those pods there.

A version on such a pod has no Revision of its own, so that the control plane decides how many replicas it has. The pods
have one, and each second Knative's autoscaler is told of it what the feed said last: also while the control plane is
away, so that nothing that serves goes with it. It adds up what activators say, so that each says its share: by those
that share a Redis, where there is one, as that knows within seconds who died; else by those that the feed has said.
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
    """A reporter's sink: to the autoscaler what has a Revision, to the control plane what may be on a pod of a pool."""

    def __init__(
        self,
        link: ReportSink,
        send_revision_stats: Callable[[Iterable[RevisionStat]], Awaitable[bool]],
        control: ReportSink,
        revision_of: Callable[[VersionKey], RevisionRow | None],
        pools: Callable[[], tuple[PoolRow, ...]],
        activator_count: Callable[[], int | None],
    ) -> None:
        """`link` is to Knative's autoscaler. `send_revision_stats` tells that of Revisions, and returns whether it was
        taken. `activator_count`: how many activators there are by now; None where only the feed has said it.
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
        """See reporter.ReportSink."""
        return self._link.session

    async def send(self, stats: tuple[ConcurrencyStat, ...]) -> bool:
        """See reporter.ReportSink."""
        if not self._pools():
            return await self._link.send(stats)
        shared = tuple(each for each in stats if self._revision_of(key_of(each)) is None)
        own = tuple(each for each in stats if self._revision_of(key_of(each)) is not None)
        is_taken = not own or await self._link.send(own)
        return (not shared or await self._post(shared)) and is_taken

    async def _post(self, stats: tuple[ConcurrencyStat, ...]) -> bool:
        """Within half a second: a control plane that hangs must cost Knative no second's figure."""
        try:
            async with asyncio.timeout(POST_S):
                return await self._control.send(stats)
        except TimeoutError:
            return False

    async def run(self) -> None:
        """Say each second how many pods there are to be, until cancelled."""
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
