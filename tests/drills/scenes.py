"""Each fault as a scene: how its installation is started, and what is done to it while an operation is under way."""

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
from coldstart_bench.endings import totals_of
from tests.drills.ground import Ground, wait
from tests.drills.matrix import Fault
from tests.drills.operations import Calls, NotSo
from tests.drills.relay import Relay
from tests.faults.buckets import ENVIRONMENT, serving
from tests.faults.faults import Refused
from tests.faults.proxy import FaultProxy

DISK: Final = 192 << 20
STEP_S: Final = 600
LONG: Final = 3500  # tokens, more than all buffers on the way hold
_NAMESPACED: Final = "DRILLS_NAMESPACED"


@dataclass(frozen=True, slots=True)
class Scene:
    """An installation, not started, and its fault, which lasts as long as its block."""

    ground: Ground
    during: Callable[[], AbstractContextManager[None]]
    call: Callable[[int], Calls]  # a request of so many tokens, as this scene's client makes it
    tokens: int = 10
    unread: int = 0  # of which so many may lie in a line that its client does not read
    sound: Callable[[], None] = lambda: None  # back to where it was, for the checks


def with_own_mounts() -> None:
    """Go on in a mount namespace of this process's own, so that a disk of the drills is nobody else's."""
    if os.environ.get(_NAMESPACED):
        return
    more = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", "--mount", *more, sys.executable, "-m", "tests.drills", *sys.argv[1:]]
    os.environ[_NAMESPACED] = "1"
    os.execvp(command[0], command)


def _mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotSo(f"mount {' '.join(words)}: {done.stderr.strip()}")


@contextlib.contextmanager
def _disk(place: Path) -> Iterator[None]:
    """A small file system of its own."""
    place.mkdir(parents=True)
    _mount("-t", "tmpfs", "-o", f"size={DISK}", "drill", str(place))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=False)


def _plain(ground: Ground) -> Callable[[int], Calls]:
    return lambda tokens: ground.call(tokens)


@contextlib.contextmanager
def disk_full(work: Path) -> Iterator[Scene]:
    """Data directory and store are on a disk whose last byte is taken."""
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
        ground = Ground(disk / "data")
        yield Scene(ground, full, _plain(ground))


def _free(place: Path) -> int:
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


@contextlib.contextmanager
def read_only(work: Path) -> Iterator[Scene]:
    """The store is on a disk that takes no write any more, as ext4's after an error."""
    disk = work / "disk"

    @contextlib.contextmanager
    def sealed() -> Iterator[None]:
        _mount("-o", "remount,ro", str(disk))
        try:
            yield
        finally:
            _mount("-o", f"remount,rw,size={DISK}", str(disk))

    with _disk(disk):
        ground = Ground(work / "data", options=["--store", f"file://{disk / 'store'}"])
        yield Scene(ground, sealed, _plain(ground))


@contextlib.contextmanager
def slow_client(work: Path) -> Iterator[Scene]:
    """The client takes an event at a time, and a hundredth of a second for each, through a buffer of four kilobytes."""
    ground = Ground(work / "data")
    yield Scene(ground, contextlib.nullcontext, lambda tokens: ground.call(tokens, pace_s=0.01), tokens=200)


@contextlib.contextmanager
def half_open(work: Path) -> Iterator[Scene]:
    """After some words the client's line is silent: it takes nothing, and never closes."""
    ground = Ground(work / "data")
    relays: list[Relay] = []

    def call(tokens: int) -> Calls:
        relays.append(Relay(ground.port))
        calls = ground.call(tokens, port=relays[-1].__enter__().port)
        calls.wait_for(lambda: calls.words > 5, "words come")
        relays[-1].fall_silent()
        return calls

    @contextlib.contextmanager
    def silent() -> Iterator[None]:
        before = totals_of(ground.bill()).requests
        try:
            yield
            # The line is silent still: what ends the request is the door's patience.
            wait(lambda: totals_of(ground.bill()).requests > before, "the door lets go of a silent client")
        finally:
            while relays:
                relays.pop().__exit__()

    yield Scene(ground, silent, call, tokens=LONG, unread=LONG)


@contextlib.contextmanager
def clock_step(work: Path) -> Iterator[Scene]:
    """The wall clock is ten minutes ahead at once, and then ten minutes behind."""
    work.mkdir(parents=True, exist_ok=True)
    clock = SteppedClock(work / "clock")
    ground = Ground(work / "data", clock=clock)

    @contextlib.contextmanager
    def stepped() -> Iterator[None]:
        clock.step(STEP_S)
        try:
            yield
        finally:
            clock.step(-STEP_S)

    yield Scene(ground, stepped, _plain(ground), sound=lambda: clock.step(0))


@contextlib.contextmanager
def store_away(work: Path) -> Iterator[Scene]:
    """Versions are in S3, and every connection to it is closed without a word."""
    with serving() as buckets, FaultProxy(buckets.host, buckets.port) as proxy:
        url = buckets.url(buckets.make(), "here", port=proxy.port, read_s=5)
        ground = Ground(work / "data", settings=ENVIRONMENT, options=["--store", url])
        yield Scene(ground, lambda: proxy.faulty(Refused()), _plain(ground))


@contextlib.contextmanager
def locked(work: Path) -> Iterator[Scene]:
    """Another process holds the database's write lock."""
    ground = Ground(work / "data")

    @contextlib.contextmanager
    def held() -> Iterator[None]:
        with contextlib.closing(sqlite3.connect(ground.data / "kelvin.db", timeout=30, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            try:
                yield
            finally:
                other.execute("ROLLBACK")

    yield Scene(ground, held, _plain(ground))


SCENES: Final[Mapping[Fault, Callable[[Path], AbstractContextManager[Scene]]]] = {
    Fault.DISK_FULL: disk_full,
    Fault.READ_ONLY: read_only,
    Fault.SLOW_CLIENT: slow_client,
    Fault.HALF_OPEN: half_open,
    Fault.CLOCK_STEP: clock_step,
    Fault.STORE_AWAY: store_away,
    Fault.LOCKED: locked,
}
