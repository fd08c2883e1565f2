"""Turns the deaths of replicas into durable lifetime records. Handing them on is the desk's work."""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from contracts.doubling import is_told
from contracts.errors import Refused
from contracts.meter import Meter, decode_meter
from contracts.usage import LifetimeRecord
from contracts.wire import BadJson, decoder, encode
from kelvin.policy.lifetimes import Death, abandoned, lifetime_of
from kelvin.supervisor.children import AGAIN_S, Reaped
from kelvin.supervisor.lock import naming
from service.processes import boot_id, born_ns
from spool.recovery import left_records
from spool.spool import Spool

log = logging.getLogger(__name__)

LIFETIME_PREFIX: Final = "supervisor-"  # every other source holds request records
_PAGE: Final = re.compile(r"([0-9]{1,9})\.(.+)")


class Graves:
    """Owns the directory of meter pages once their writers are dead."""

    def __init__(self, meters: Path, spool: Spool, source: str) -> None:
        meters.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._meters = meters
        self._spool = spool
        self._source = source
        self._writing: dict[Path, asyncio.Task[None]] = {}  # by page
        self._unread: set[asyncio.Task[None]] = set()  # deaths whose page can't be read now

    def __repr__(self) -> str:
        return f"<Graves source={self._source} pages={len(list(self._pages()))}>"

    def bury(self, reaped: Reaped, failures: int = 0) -> None:
        """Start to write the lifetime record of a reaped process. One that left no meter page was no replica.

        Call it on the event loop. A task waits for the disk: see `settled`. If its page can't be read now, or the spool
        refuses, that is tried again every AGAIN_S, after so many `failures`. If this process ends first, the next start
        writes that lifetime up to the page's last change.
        """
        try:
            found = [(page, runtime_id, _read(page)) for page, _, runtime_id in self._pages(reaped.pid)]
        except OSError as error:  # this process may be out of file descriptors
            failures += 1
            if is_told(failures):
                why = {"pid": reaped.pid, "error": repr(error), "failures": failures}
                log.error("a meter page can't be read; trying again", extra=why)
            work = self._bury_again(reaped, failures)
            self._unread.add(task := asyncio.get_running_loop().create_task(work, name=f"page of {reaped.pid}"))
            task.add_done_callback(self._unread.discard)
            return
        for page, runtime_id, meter in found:
            if page in self._writing:  # an earlier process had this pid
                continue
            if meter is not None and meter.is_older_than(reaped.died_ns - reaped.lived_us * 1000):
                self._begin(page, meter, self._unseen(page, reaped.pid, runtime_id, meter))
                continue
            death = Death(
                runtime_id=runtime_id,
                pid=reaped.pid,
                died_ns=reaped.died_ns,
                died_at_us=time.time_ns() // 1000,
                total_us=reaped.lived_us,
                exit_status=reaped.status,
                cpu_us=reaped.cpu_us,
                max_rss_kb=reaped.max_rss_kb,
            )
            self._begin(page, meter, death)

    async def _bury_again(self, reaped: Reaped, failures: int) -> None:
        await asyncio.sleep(AGAIN_S)
        self.bury(reaped, failures)

    async def settled(self, patience_s: float) -> None:
        """Wait until all lifetimes are written, at most `patience_s`. Writes that take longer go on."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while pending := {*self._writing.values(), *self._unread}:
                    await asyncio.wait(pending)

    def lives(self) -> list[tuple[int, str, bool]]:
        """Return pid, runtime id, and whether it took a version, of each meter page: of running replicas and standbys,
        and of some that have ended.

        Omits pages whose pid belongs to another process by now.
        """
        found = ((pid, runtime_id, _try_read(page)) for page, pid, runtime_id in self._pages())
        return [
            (pid, runtime_id, meter is not None and bool(meter.version))
            for pid, runtime_id, meter in found
            if not _is_of_another(meter, pid)
        ]

    def so_far(self, pid: int) -> LifetimeRecord | None:
        """How a replica has lived until now, as if it ended; None where it is nobody's yet, or gone. A child."""
        for page, _, runtime_id in self._pages(pid):
            meter = _try_read(page)
            with suppress(OSError):
                born = born_ns(pid)
                if meter is not None and meter.is_older_than(born):
                    continue
                if meter is None or not meter.tenant:
                    return None
                now_ns, now_us = time.monotonic_ns(), time.time_ns() // 1000
                lived_us = (now_ns - born) // 1000
                death = Death(runtime_id, pid, now_ns, now_us, lived_us, exit_status=0, cpu_us=0, max_rss_kb=0)
                return lifetime_of(meter, death, self._source, 0)
        return None

    def recover(self, recorded: Collection[str]) -> None:
        """Write the lifetimes of replicas that ended with an earlier supervisor.

        `recorded` are those that it wrote before it was killed, and had no time to remove the page of: what it saw of
        their deaths stands, and nothing is made up beside it. Call this on the event loop, and before anything ships
        what it left. What the spool refuses is tried again every AGAIN_S; a page that can't be read or removed stays
        for the next start.
        """
        for page, pid, runtime_id in self._pages():
            try:
                self._recover(page, pid, runtime_id, is_recorded=runtime_id in recorded)
            except OSError as error:
                log.error(
                    "a meter page can't be read or removed; it stays", extra={"page": page.name, "error": repr(error)}
                )

    def _recover(self, page: Path, pid: int, runtime_id: str, *, is_recorded: bool) -> None:
        if is_recorded:
            page.unlink()
            return
        try:
            meter = decode_meter(page.read_bytes())
        except ValueError as error:
            log.warning("a meter page that is none was dropped", extra={"page": page.name, "error": str(error)})
            page.unlink()
            return
        if (death := self._unseen(page, pid, runtime_id, meter)) is None:
            return
        try:
            self._spool.append_blocking(lambda sequence: encode(lifetime_of(meter, death, self._source, sequence)))
        except Refused:
            self._begin(page, meter, death)
        else:
            page.unlink()

    def _pages(self, of_pid: int | None = None) -> Iterator[tuple[Path, int, str]]:
        """Yield path, pid and runtime id of each meter page, or of those of one pid. Skips other files."""
        for path in sorted(self._meters.glob("[0-9]*.*")):
            named = _PAGE.fullmatch(path.name)
            if named is not None and path.is_file() and of_pid in (None, int(named[1])):
                yield path, int(named[1]), named[2]

    def _unseen(self, page: Path, pid: int, runtime_id: str, meter: Meter) -> Death | None:
        """Return the death of a replica whose end nobody saw, as of its page's last change.

        Returns None, and removes the page if it can, if the page is from another boot.
        """
        death = abandoned(meter, runtime_id, pid, time.monotonic_ns(), time.time_ns() // 1000, boot_id())
        if death is None:
            log.warning("a meter page of another boot was dropped", extra={"page": page.name})
            with suppress(OSError):
                page.unlink()
        return death

    def _begin(self, page: Path, meter: Meter | None, death: Death | None) -> None:
        if meter is None:
            log.error("a meter page is unreadable", extra={"page": page.name})
        elif death is not None:
            work = self._write(page, meter, death)
            self._writing[page] = task = asyncio.get_running_loop().create_task(work, name=f"life of {death.pid}")
            task.add_done_callback(lambda _: self._writing.pop(page))

    async def _write(self, page: Path, meter: Meter, death: Death) -> None:
        await self._append(meter, death)
        _remove(page)  # only after the record is durable: killed between the two, `recover` finds that record

    async def _append(self, meter: Meter, death: Death) -> None:
        """Write the record to the spool. Try again while the spool refuses: only now is the time of the death known."""
        failures = 0
        while True:
            try:
                await self._spool.append(lambda sequence: encode(lifetime_of(meter, death, self._source, sequence)))
            except Refused as refused:
                failures += 1
                if is_told(failures):
                    why = {"runtime": death.runtime_id, "failure": str(refused), "failures": failures}
                    log.error("a lifetime is not recorded yet; trying again", extra=why)
                await asyncio.sleep(AGAIN_S)
            else:
                return


def _remove(page: Path) -> None:
    try:
        page.unlink()
    except OSError as error:
        log.error("a meter page can't be removed; it stays", extra={"page": page.name, "error": repr(error)})


@contextmanager
def open_graves(data: Path) -> Iterator[tuple[Graves, Spool]]:
    """Yield the graves of a data directory and the spool to which they write. Lifetimes that an earlier supervisor left
    unwritten are written first. Raises OSError.
    """
    source = f"{LIFETIME_PREFIX}{uuid.uuid4().hex[:12]}"
    recorded = recorded_lives(data / "spool")
    with naming(data / "spool"):
        spool = Spool.open(data / "spool", source)
    try:
        graves = Graves(data / "run" / "meters", spool, source)
        graves.recover(recorded)
        yield graves, spool
    finally:
        spool.close()


class _Named(msgspec.Struct):
    """The part of a lifetime record that says whose it is."""

    runtime_id: str


def recorded_lives(spools: Path) -> set[str]:
    """Runtimes whose lifetime an earlier supervisor left in its spool. Raises OSError."""
    lives = set()
    for raw in left_records(spools, lambda source: source.startswith(LIFETIME_PREFIX)):
        with suppress(BadJson):  # what is no lifetime is the ledger's to refuse
            lives.add(decoder(_Named).decode(raw).runtime_id)
    return lives


def _is_of_another(meter: Meter | None, pid: int) -> bool:
    """Return whether a meter page is older than the process that has its pid now."""
    try:
        return meter is not None and meter.is_older_than(born_ns(pid))
    except OSError:  # no process has it
        return False


def _read(page: Path) -> Meter | None:
    """Return None for what no runtime wrote. Raises OSError."""
    try:
        return decode_meter(page.read_bytes())
    except ValueError:
        return None


def _try_read(page: Path) -> Meter | None:
    try:
        return _read(page)
    except OSError:
        return None
