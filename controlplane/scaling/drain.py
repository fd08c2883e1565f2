"""How a replica leaves: activators are told, then the runtime, and it ends once it is empty or out of time."""

import logging
from typing import Final

from contracts.errors import Refused
from controlplane.feed import FeedHub
from controlplane.scaling.fleet import Fleet
from controlplane.scaling.process import Process

log = logging.getLogger(__name__)

TOLD_S: Final = 2.0  # for the activators to hear of it
POLL_S: Final = 0.1
LAST_BREATH_S: Final = 1.0
TERM_S: Final = 40.0  # a runtime that is told to end drains once more, for 30 s by default


async def drained(fleet: Fleet, feed: FeedHub, process: Process, revision: int, drain_s: float) -> None:
    """See a draining replica to its end. `revision` is the feed's that says it drains."""
    if not await feed.settled(revision, TOLD_S):
        log.warning("an activator may not know of a drain", extra={"runtime_id": process.runtime_id})
    limit_us = fleet.clock.monotonic_us() + int(drain_s * 1e6)
    try:
        await process.drain()
        while fleet.clock.monotonic_us() < limit_us and not process.is_gone:
            report = await process.report()
            if report.running + report.waiting == 0:
                break
            await fleet.clock.sleep(POLL_S)
    except Refused as refused:
        if not await process.gone(LAST_BREATH_S):  # an empty runtime ends by itself, and stops listening before that
            log.warning("a drain was cut short", extra={"runtime_id": process.runtime_id, "why": str(refused)})
    fleet.end(process, TERM_S)
