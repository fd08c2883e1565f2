"""Turn deaths of replicas into durable lifetime records. `ledger_client.py` ships them to the ledger."""

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

from kelvin.contracts.accounting.meter_format import Meter, decode_meter
from kelvin.contracts.accounting.usage import LifetimeRecord
from kelvin.contracts.backoff import should_log
from kelvin.contracts.errors import Refused
from kelvin.contracts.wire import BadJson, decoder, encode
from kelvin.process.procfs import boot_id, start_time_ns
from kelvin.spool.leftover_recovery import leftover_records
from kelvin.spool.spool import Spool
from kelvin.supervisor.child_group import RETRY_S, ReapedChild
from kelvin.supervisor.data_lock import name_path_in_errors
from kelvin.supervisor.lifetime_policy import ChildDeath, lifetime_record, unseen_death

log = logging.getLogger(__name__)

LIFETIME_PREFIX: Final = "supervisor-"  # spool sources with other names hold request records
_PAGE: Final = re.compile(r"([0-9]{1,9})\.(.+)")


class ExitRecorder:
    """Owns the meter pages of dead replicas."""

    def __init__(self, meters: Path, spool: Spool, source: str) -> None:
        meters.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._meters = meters
        self._spool = spool
        self._source = source
        self._writing: dict[Path, asyncio.Task[None]] = {}  # by page
        self._unread: set[asyncio.Task[None]] = set()  # retries of pages that can't be read now

    def __repr__(self) -> str:
        return f"<ExitRecorder source={self._source} pages={len(list(self._pages()))}>"

    def record_exit(self, reaped: ReapedChild, failures: int = 0) -> None:
        """Start writing the lifetime record of a reaped process. A process without a meter page was no replica.

        Call it on the event loop. It does not wait for the disk: see `wait_recorded`. If the page can't be read or the
        spool refuses, retry every RETRY_S; `failures` counts earlier attempts. If this process ends first, the next
        start writes the lifetime up to the page's last change.
        """
        try:
            found = [(page, runtime_id, _read_page(page)) for page, _, runtime_id in self._pages(reaped.pid)]
        except OSError as error:  # this process may be out of file descriptors
            failures += 1
            if should_log(failures):
                why = {"pid": reaped.pid, "error": repr(error), "failures": failures}
                log.error("a meter page can't be read; trying again", extra=why)
            work = self._retry_record(reaped, failures)
            self._unread.add(task := asyncio.get_running_loop().create_task(work, name=f"page of {reaped.pid}"))
            task.add_done_callback(self._unread.discard)
            return
        for page, runtime_id, meter in found:
            if page in self._writing:  # an earlier process had this pid
                continue
            if meter is not None and meter.is_older_than(reaped.died_ns - reaped.lived_us * 1000):
                self._start_write(page, meter, self._unseen_death(page, reaped.pid, runtime_id, meter))
                continue
            death = ChildDeath(
                runtime_id=runtime_id,
                pid=reaped.pid,
                died_ns=reaped.died_ns,
                died_at_us=time.time_ns() // 1000,
                total_us=reaped.lived_us,
                exit_status=reaped.status,
                cpu_us=reaped.cpu_us,
                max_rss_kb=reaped.max_rss_kb,
            )
            self._start_write(page, meter, death)

    async def _retry_record(self, reaped: ReapedChild, failures: int) -> None:
        await asyncio.sleep(RETRY_S)
        self.record_exit(reaped, failures)

    async def wait_recorded(self, patience_s: float) -> None:
        """Wait until all lifetimes are written, for at most `patience_s`. Slower writes go on afterwards."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while pending := {*self._writing.values(), *self._unread}:
                    await asyncio.wait(pending)

    def metered_processes(self) -> list[tuple[int, str, bool]]:
        """Return (pid, runtime id, has taken a version) of each meter page. These are running replicas and standbys,
        and some that have ended. Pages whose pid now belongs to another process are left out.
        """
        found = ((pid, runtime_id, _try_read_page(page)) for page, pid, runtime_id in self._pages())
        return [
            (pid, runtime_id, meter is not None and bool(meter.version))
            for pid, runtime_id, meter in found
            if not _is_of_earlier_process(meter, pid)
        ]

    def running_lifetime(self, pid: int) -> LifetimeRecord | None:
        """Return the lifetime of a running child replica up to now. None if it has no tenant yet, or is gone."""
        for page, _, runtime_id in self._pages(pid):
            meter = _try_read_page(page)
            with suppress(OSError):
                process_start_ns = start_time_ns(pid)
                if meter is not None and meter.is_older_than(process_start_ns):
                    continue
                if meter is None or not meter.tenant:
                    return None
                now_ns, now_us = time.monotonic_ns(), time.time_ns() // 1000
                lived_us = (now_ns - process_start_ns) // 1000
                death = ChildDeath(runtime_id, pid, now_ns, now_us, lived_us, exit_status=0, cpu_us=0, max_rss_kb=0)
                return lifetime_record(meter, death, self._source, 0)
        return None

    def recover(self, recorded: Collection[str]) -> None:
        """Write the lifetimes of replicas that ended under an earlier supervisor.

        `recorded` are runtimes whose record that supervisor had written before it was killed, but whose page it had not
        removed. Their records stand. Call this on the event loop, before leftover spools are shipped. If the spool
        refuses, retry every RETRY_S. A page that can't be read or removed stays until the next start.
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
            log.warning("an invalid meter page was dropped", extra={"page": page.name, "error": str(error)})
            page.unlink()
            return
        if (death := self._unseen_death(page, pid, runtime_id, meter)) is None:
            return
        try:
            self._spool.append_blocking(lambda sequence: encode(lifetime_record(meter, death, self._source, sequence)))
        except Refused:
            self._start_write(page, meter, death)
        else:
            page.unlink()

    def _pages(self, of_pid: int | None = None) -> Iterator[tuple[Path, int, str]]:
        """Yield (path, pid, runtime id) of each meter page, or of one pid's pages. Other files are skipped."""
        for path in sorted(self._meters.glob("[0-9]*.*")):
            named = _PAGE.fullmatch(path.name)
            if named is not None and path.is_file() and of_pid in (None, int(named[1])):
                yield path, int(named[1]), named[2]

    def _unseen_death(self, page: Path, pid: int, runtime_id: str, meter: Meter) -> ChildDeath | None:
        """Return the death of a replica that no supervisor saw die, as of its page's last change. If the page is from
        another boot, try to remove it and return None.
        """
        death = unseen_death(meter, runtime_id, pid, time.monotonic_ns(), time.time_ns() // 1000, boot_id())
        if death is None:
            log.warning("a meter page from another boot was dropped", extra={"page": page.name})
            with suppress(OSError):
                page.unlink()
        return death

    def _start_write(self, page: Path, meter: Meter | None, death: ChildDeath | None) -> None:
        if meter is None:
            log.error("a meter page is unreadable", extra={"page": page.name})
        elif death is not None:
            work = self._write(page, meter, death)
            self._writing[page] = task = asyncio.get_running_loop().create_task(work, name=f"life of {death.pid}")
            task.add_done_callback(lambda _: self._writing.pop(page))

    async def _write(self, page: Path, meter: Meter, death: ChildDeath) -> None:
        await self._append(meter, death)
        _remove_page(page)  # only now: the record is durable, and `recover` finds it if this process is killed here

    async def _append(self, meter: Meter, death: ChildDeath) -> None:
        """Write the record, and retry while the spool refuses: the time of death is known only in this process."""
        failures = 0
        while True:
            try:
                await self._spool.append(lambda sequence: encode(lifetime_record(meter, death, self._source, sequence)))
            except Refused as refused:
                failures += 1
                if should_log(failures):
                    why = {"runtime": death.runtime_id, "failure": str(refused), "failures": failures}
                    log.error("a lifetime is not recorded yet; trying again", extra=why)
                await asyncio.sleep(RETRY_S)
            else:
                return


def _remove_page(page: Path) -> None:
    try:
        page.unlink()
    except OSError as error:
        log.error("a meter page can't be removed; it stays", extra={"page": page.name, "error": repr(error)})


@contextmanager
def open_exit_recorder(data: Path) -> Iterator[tuple[ExitRecorder, Spool]]:
    """Yield the exit recorder of a data directory, and its spool. Raises OSError. Lifetimes that an earlier supervisor
    left unwritten are written first.
    """
    source = f"{LIFETIME_PREFIX}{uuid.uuid4().hex[:12]}"
    recorded = read_recorded_runtimes(data / "spool")
    with name_path_in_errors(data / "spool"):
        spool = Spool.open(data / "spool", source)
    try:
        exit_recorder = ExitRecorder(data / "run" / "meters", spool, source)
        exit_recorder.recover(recorded)
        yield exit_recorder, spool
    finally:
        spool.close()


class _RecordOwner(msgspec.Struct):
    """The field of a lifetime record that names its runtime."""

    runtime_id: str


def read_recorded_runtimes(spools: Path) -> set[str]:
    """Return the runtimes whose lifetimes an earlier supervisor left in its spool. Raises OSError."""
    lives = set()
    for raw in leftover_records(spools, lambda source: source.startswith(LIFETIME_PREFIX)):
        with suppress(BadJson):  # the ledger refuses and reports a bad record
            lives.add(decoder(_RecordOwner).decode(raw).runtime_id)
    return lives


def _is_of_earlier_process(meter: Meter | None, pid: int) -> bool:
    """Return whether a meter page is older than the process that has its pid now."""
    try:
        return meter is not None and meter.is_older_than(start_time_ns(pid))
    except OSError:  # no process has this pid
        return False


def _read_page(page: Path) -> Meter | None:
    """Return the meter, or None if no runtime wrote the page. Raises OSError."""
    try:
        return decode_meter(page.read_bytes())
    except ValueError:
        return None


def _try_read_page(page: Path) -> Meter | None:
    try:
        return _read_page(page)
    except OSError:
        return None
