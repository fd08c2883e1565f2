"""End a replica: tell activators, then its runtime, and end the process once it is empty or out of time.

`end_damaged_replica` ends a replica whose memory is damaged. It tells the runtime first, and kills it if that fails.
"""

import logging
from contextlib import suppress
from typing import Final

from controlplane.registry.feed_hub import DRAIN_DELIVERY_LIMIT_S, FeedHub
from controlplane.scaling.local.fleet import Fleet
from controlplane.scaling.local.runtime_process import RuntimeProcess
from kelvin.contracts.errors import Refused

log = logging.getLogger(__name__)

POLL_S: Final = 0.1
EXIT_GRACE_S: Final = 1.0


async def drain_and_end(
    fleet: Fleet, feed: FeedHub, process: RuntimeProcess, revision: int, drain_s: float, term_s: float
) -> None:
    """Drain a replica and end it. Feed revision `revision` says that it drains. Once it is empty, or after `drain_s`
    seconds, it is told to end; after another `term_s` it is killed. Returns before it has ended.

    A silent runtime may be computing a long prompt on a loaded core, so it is asked again: ending it now would give its
    streams less than `drain_s`. If it hangs, the supervisor's watchdog kills it.
    """
    if not await feed.wait_until_delivered(revision, DRAIN_DELIVERY_LIMIT_S):
        log.warning("an activator may not know of a drain", extra={"runtime_id": process.runtime_id})
    limit_us = fleet.clock.monotonic_us() + int(drain_s * 1e6)
    is_draining = False
    while fleet.clock.monotonic_us() < limit_us and not process.is_gone:
        with suppress(Refused):
            if not is_draining:
                await process.drain()
                is_draining = True
            report = await process.report()
            if report.running + report.waiting == 0:
                break
        await fleet.clock.sleep(POLL_S)
    fleet.end(process, term_s)


async def end_damaged_replica(
    fleet: Fleet, feed: FeedHub, process: RuntimeProcess, revision: int, drain_s: float, term_s: float
) -> None:
    """Tell a replica that its memory is damaged, before activators know. Its requests end with an error. If it computes
    over a copy on a device, it drains as usual.
    """
    try:
        await process.report_damage()
    except Refused as refused:
        if not await process.wait_gone(EXIT_GRACE_S):
            log.error("a damaged replica is killed", extra={"runtime_id": process.runtime_id, "why": str(refused)})
        fleet.end(process, term_s=0.0)
        return
    await drain_and_end(fleet, feed, process, revision, drain_s, term_s)
