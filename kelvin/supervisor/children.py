"""The processes that `kelvin up` keeps: how each is started, and how one that died comes back."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from kelvin.policy.restarts import Restarts
from kelvin.supervisor.watchdog import Watched
from service.startup import BAD_SETTING_STATUS

log = logging.getLogger(__name__)

POLL_S: Final = 0.02  # between two looks at what a process is about to do
KILL_AFTER_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process of the installation. `socket` answers `/healthz` and `/readyz`; None is asked in its own way."""

    name: str
    module: str
    socket: str | None
    uses_store: bool = False
    listens: bool = False  # on the socket of the front door, which the supervisor keeps open


# In order of start; they are ended the other way round, the door first.
SPECS: Final = (
    ChildSpec("zygote", "runtime.zygote", None),
    ChildSpec("cache", "weightcache", "cache.sock", uses_store=True),
    ChildSpec("controlplane", "controlplane", "control.sock"),
    ChildSpec("snapshotter", "snapshotter", "snapshotter.sock", uses_store=True),
    ChildSpec("activator", "activator", "activator.sock", listens=True),
)

FILTERS: Final = ChildSpec("filters", "filters", "filters.sock")


def specs_of(*, filters: bool) -> tuple[ChildSpec, ...]:
    """The processes of an installation; the one of the filters where it runs any, which replicas need to their end."""
    return (FILTERS, *SPECS) if filters else SPECS


@dataclass(slots=True)
class Child:
    """A running process of ours, or one that waits for its restart."""

    spec: ChildSpec
    process: subprocess.Popen[bytes] | None = None
    born_s: float = 0.0
    restarts: Restarts = field(default_factory=Restarts)
    refused: bool = False  # it said that its settings are wrong
    is_kept: bool = True  # whether it comes back when it dies

    def __repr__(self) -> str:
        pid = self.process.pid if self.process else "down"
        return f"<Child {self.spec.name} pid={pid} deaths={self.restarts.deaths}>"

    @property
    def pid(self) -> int | None:
        """Process id while it lives."""
        return self.process.pid if self.process else None

    @property
    def watched(self) -> Watched | None:
        """The process for the watchdog to probe; None while it is down or ending."""
        return Watched(self.spec.name, self.pid, self.spec.socket) if self.pid is not None and self.is_kept else None

    def start(self, logs: Path | None, environment: Mapping[str, str], *fds: int) -> None:
        """Spawn it with these descriptors, in a session of its own: a terminal's Ctrl-C reaches only the supervisor.

        Without a directory for its log it writes where we do. Raises OSError.
        """
        with _sink(logs, self.spec.name) as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.spec.module],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                pass_fds=fds,
                start_new_session=True,
            )
        self.born_s = time.monotonic()

    def buried(self, status: int) -> None:
        """The reaper collected it; Popen must not try again."""
        assert self.process is not None
        self.process.returncode = status
        self.refused = status == BAD_SETTING_STATUS
        self.process = None
        self.restarts = self.restarts.after_death(time.monotonic() - self.born_s)

    def signal(self, number: int) -> None:
        """Harmless where it is down."""
        if self.process is not None:
            # Popen's own way looks whether it is dead, and would collect it behind the reaper. No other process gets
            # its number before that has.
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)


def log_end(child: Child, status: int, *, is_expected: bool) -> None:
    """Log that a process ended: as a warning, unless it was told to end and did so cleanly or by the signal itself."""
    extra = {"child": child.spec.name, "status": status}
    if is_expected and status in (0, -signal.SIGTERM):
        log.info("a process ended", extra=extra)
    else:
        log.warning("a process died", extra=extra)


async def bring_back(child: Child, start: Callable[[Child], None], is_wanted: Callable[[], bool]) -> None:
    """Start one that died, after the pause that its deaths ask for, unless nobody wants it any more.

    A start that the system refuses (no memory, process, descriptor, or room for its log) counts as a death. No signal
    tells of it, so it is tried again here.
    """
    await asyncio.sleep(child.restarts.delay_s)
    while is_wanted():
        try:
            start(child)
            return
        except OSError as error:
            child.restarts = child.restarts.after_death(0.0)
            why = {"child": child.spec.name, "error": repr(error), "deaths": child.restarts.deaths}
            log.warning("a process can't be started; trying again", extra=why)
        await asyncio.sleep(child.restarts.delay_s)


@contextmanager
def _sink(logs: Path | None, name: str) -> Iterator[IO[bytes] | None]:
    if logs is None:
        yield None
        return
    logs.mkdir(exist_ok=True)
    with (logs / f"{name}.log").open("ab") as sink:
        yield sink
