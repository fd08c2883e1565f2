"""Collects every child that dies, also the runtimes that the zygote forked twice (we are their subreaper, prctl(2)).

The clock of a lifetime is read here, from the kernel's start time of the process, before it is reaped.
"""

import asyncio
import ctypes
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from service.processes import born_ns

log = logging.getLogger(__name__)

AGAIN_S: Final = 1.0
_PR_SET_CHILD_SUBREAPER: Final = 36


@dataclass(frozen=True, slots=True)
class Reaped:
    """A child that is gone. `status` is as Popen.returncode.

    `died_ns` (CLOCK_MONOTONIC) is when it was found dead; `lived_us` is the time from its fork until then.
    """

    pid: int
    status: int
    lived_us: int
    died_ns: int
    cpu_us: int
    max_rss_kb: int


def call_on_deaths(collect: Callable[[], None]) -> None:
    """Have the running event loop call `collect` when children have died, and again after AGAIN_S if that fails.

    No second signal tells of a death that could not be looked at, as for want of a file descriptor.
    """
    loop = asyncio.get_running_loop()

    def call() -> None:
        try:
            collect()
        except OSError as error:
            log.warning("dead processes can't be collected; trying again", extra={"error": repr(error)})
            loop.call_later(AGAIN_S, call)

    loop.add_signal_handler(signal.SIGCHLD, call)


def become_subreaper() -> None:
    """Orphaned descendants become our children instead of init's. Raises OSError where the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def reap() -> Iterator[Reaped]:
    """Every child that has died since, each collected once."""
    while True:
        try:
            seen = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if seen is None:
            return
        died_ns = time.monotonic_ns()
        lived_us = max(0, died_ns - born_ns(seen.si_pid)) // 1000
        pid, status, usage = os.wait4(seen.si_pid, 0)
        yield Reaped(
            pid,
            os.waitstatus_to_exitcode(status),
            lived_us,
            died_ns,
            int((usage.ru_utime + usage.ru_stime) * 1e6),
            usage.ru_maxrss,
        )


def children() -> tuple[int, ...]:
    """Process ids of all our children, those that were handed to us included."""
    pids: list[int] = []
    for task in os.listdir("/proc/self/task"):
        # The thread may have ended since: what it had begun is another thread's then.
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/self/task/{task}/children") as listing:
            pids.extend(int(pid) for pid in listing.read().split())
    return tuple(pids)
