"""The faults: how the installation is started, and what happens to it during an operation."""

import contextlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coldstart_bench.clock import SteppedClock
from coldstart_bench.harness.request_outcome import bill_totals_of
from tests.drills.drill_installation import DrillInstallation, wait
from tests.drills.matrix import FaultKind
from tests.drills.operations import PreconditionFailed, StreamedRequests
from tests.drills.silent_relay import SilentRelay
from tests.faults.fault_proxy import FaultProxy
from tests.faults.http_faults import ClosedConnection
from tests.faults.s3_buckets import ENVIRONMENT, serving

DISK: Final = 192 << 20
STEP_S: Final = 600
LONG: Final = 3500  # tokens, more than all buffers on the way hold
_NAMESPACED: Final = "DRILLS_NAMESPACED"


@dataclass(frozen=True, slots=True)
class FaultScene:
    """An installation that is not started yet, and its fault. The fault lasts for the block of `during`."""

    installation: DrillInstallation
    during: Callable[[], AbstractContextManager[None]]
    call: Callable[[int], StreamedRequests]  # starts a request of so many tokens with this scene's client
    tokens: int = 10
    unread: int = 0  # how many of them may be in a connection that its client does not read
    sound: Callable[[], None] = lambda: None  # ends the fault's aftermath before the checks


def with_own_mounts() -> None:
    """Continue in a mount namespace of this process, so that no other process sees the drills' disks."""
    if os.environ.get(_NAMESPACED):
        return
    more = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", "--mount", *more, sys.executable, "-m", "tests.drills", *sys.argv[1:]]
    os.environ[_NAMESPACED] = "1"
    os.execvp(command[0], command)


def _mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PreconditionFailed(f"mount {' '.join(words)}: {done.stderr.strip()}")


@contextlib.contextmanager
def _disk(place: Path) -> Iterator[None]:
    """Mount a small file system inside the block."""
    place.mkdir(parents=True)
    _mount("-t", "tmpfs", "-o", f"size={DISK}", "drill", str(place))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=False)


def _plain(installation: DrillInstallation) -> Callable[[int], StreamedRequests]:
    return lambda tokens: installation.call(tokens)


@contextlib.contextmanager
def disk_full(work: Path) -> Iterator[FaultScene]:
    """The data directory and the store are on a disk without a free byte."""
    disk = work / "disk"

    @contextlib.contextmanager
    def full() -> Iterator[None]:
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16 if _free(disk) > 1 << 16 else 1))
        try:
            yield
        finally:
            filler.unlink()

    with _disk(disk):
        installation = DrillInstallation(disk / "data")
        yield FaultScene(installation, full, _plain(installation))


def _free(place: Path) -> int:
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


@contextlib.contextmanager
def read_only(work: Path) -> Iterator[FaultScene]:
    """The store is on a disk that refuses writes, as ext4 does after an error."""
    disk = work / "disk"

    @contextlib.contextmanager
    def sealed() -> Iterator[None]:
        _mount("-o", "remount,ro", str(disk))
        try:
            yield
        finally:
            _mount("-o", f"remount,rw,size={DISK}", str(disk))

    with _disk(disk):
        installation = DrillInstallation(work / "data", options=["--store", f"file://{disk / 'store'}"])
        yield FaultScene(installation, sealed, _plain(installation))


@contextlib.contextmanager
def slow_client(work: Path) -> Iterator[FaultScene]:
    """The client reads one event at a time, 10 ms each, through a buffer of 4 kB."""
    installation = DrillInstallation(work / "data")
    yield FaultScene(
        installation, contextlib.nullcontext, lambda tokens: installation.call(tokens, pace_s=0.01), tokens=200
    )


@contextlib.contextmanager
def half_open(work: Path) -> Iterator[FaultScene]:
    """After some words, the client's connection is silent: it reads nothing and never closes."""
    installation = DrillInstallation(work / "data")
    relays: list[SilentRelay] = []

    def call(tokens: int) -> StreamedRequests:
        relays.append(SilentRelay(installation.port))
        calls = installation.call(tokens, port=relays[-1].__enter__().port)
        calls.wait_for(lambda: calls.words > 5, "words come")
        relays[-1].fall_silent()
        return calls

    @contextlib.contextmanager
    def silent() -> Iterator[None]:
        before = bill_totals_of(installation.bill()).requests
        try:
            yield
            # The connection is still silent: the activator's stall limit ends the request.
            wait(lambda: bill_totals_of(installation.bill()).requests > before, "the door lets go of a silent client")
        finally:
            while relays:
                relays.pop().__exit__()

    yield FaultScene(installation, silent, call, tokens=LONG, unread=LONG)


@contextlib.contextmanager
def clock_step(work: Path) -> Iterator[FaultScene]:
    """The wall clock jumps ten minutes ahead, and then ten minutes behind."""
    work.mkdir(parents=True, exist_ok=True)
    clock = SteppedClock(work / "clock")
    installation = DrillInstallation(work / "data", clock=clock)

    @contextlib.contextmanager
    def stepped() -> Iterator[None]:
        clock.step(STEP_S)
        try:
            yield
        finally:
            clock.step(-STEP_S)

    yield FaultScene(installation, stepped, _plain(installation), sound=lambda: clock.step(0))


@contextlib.contextmanager
def store_away(work: Path) -> Iterator[FaultScene]:
    """Versions are in S3, and every connection to it is closed at once."""
    with serving() as buckets, FaultProxy(buckets.host, buckets.port) as proxy:
        url = buckets.url(buckets.make(), "here", port=proxy.port, read_s=5)
        installation = DrillInstallation(work / "data", settings=ENVIRONMENT, options=["--store", url])
        yield FaultScene(installation, lambda: proxy.faulty(ClosedConnection()), _plain(installation))


@contextlib.contextmanager
def locked(work: Path) -> Iterator[FaultScene]:
    """Another process holds the database's write lock."""
    installation = DrillInstallation(work / "data")

    @contextlib.contextmanager
    def held() -> Iterator[None]:
        with contextlib.closing(
            sqlite3.connect(installation.data / "kelvin.db", timeout=30, isolation_level=None)
        ) as other:
            other.execute("BEGIN EXCLUSIVE")
            try:
                yield
            finally:
                other.execute("ROLLBACK")

    yield FaultScene(installation, held, _plain(installation))


SCENES: Final[Mapping[FaultKind, Callable[[Path], AbstractContextManager[FaultScene]]]] = {
    FaultKind.DISK_FULL: disk_full,
    FaultKind.READ_ONLY: read_only,
    FaultKind.SLOW_CLIENT: slow_client,
    FaultKind.HALF_OPEN: half_open,
    FaultKind.CLOCK_STEP: clock_step,
    FaultKind.STORE_AWAY: store_away,
    FaultKind.LOCKED: locked,
}
