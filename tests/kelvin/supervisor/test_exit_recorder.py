"""Each replica's life is recorded once, wherever the recording supervisor is killed."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import select

from controlplane.db.ledger_schema import conflicts, lifetime_records
from controlplane.ledger.usage_ledger import append_lifetimes
from kelvin.contracts.accounting.meter_format import METER_FILE_BYTES, Meter, Phase, encode_meter
from kelvin.contracts.accounting.usage import LifetimeRecord
from kelvin.contracts.wire import decode
from kelvin.process.procfs import start_time_ns
from kelvin.spool.leftover_recovery import recover
from kelvin.spool.shipper import Post
from kelvin.spool.source_directory import SourceDirectory
from kelvin.spool.spool import Spool
from kelvin.supervisor.child_group import ReapedChild
from kelvin.supervisor.exit_recorder import ExitRecorder, read_recorded_runtimes
from tests.controlplane.billing_fixture import memory_ledger_engine
from tests.kelvin.dying_supervisor import PID, POINTS
from tests.kelvin.spool.disks import FailingDisk, GatedDisk

ROOT = Path(__file__).parents[3]
LIVED_US = 9_000_000  # the lifetime that the supervisor measured


def leave_page(data: Path, name: str, idle_ns: int = 0, version: str = "") -> None:
    """Write the meter page of a replica that restored for 1 s, was active for 2 s, and has been idle since."""
    now_ns = time.monotonic_ns() - idle_ns
    meter = Meter(Phase.RESTORE, now_ns - 3 * 10**9, now_ns - 3 * 10**9, tenant="acme", model="m", device_class="cpu-1")
    meter = replace(meter, version=version).enter(Phase.ACTIVE, now_ns - 2 * 10**9).enter(Phase.IDLE, now_ns)
    meters = data / "run" / "meters"
    meters.mkdir(parents=True, exist_ok=True)
    (meters / name).write_bytes(encode_meter(meter, 2).ljust(METER_FILE_BYTES, b"\0"))


def pages(data: Path) -> list[str]:
    """Return the meter pages that are not recorded yet."""
    return sorted(page.name for page in (data / "run" / "meters").iterdir())


def record_exit(recorder: ExitRecorder, reaped: ReapedChild, patience_s: float = 60.0) -> None:
    """Record the exit and wait until it is written, or for `patience_s`."""

    async def main() -> None:
        recorder.record_exit(reaped)
        await recorder.wait_recorded(patience_s)

    asyncio.run(main())


def kill_at(data: Path, point: str) -> None:
    """Run a supervisor that is killed at `point` while it records an exit."""
    command = [sys.executable, "-m", "tests.kelvin.dying_supervisor", str(data), point]
    assert subprocess.run(command, cwd=ROOT, check=False, timeout=60).returncode == -signal.SIGKILL


def start_again(data: Path, source: str, recorded: Collection[str]) -> None:
    """Recover the leftover pages, as a starting supervisor does."""
    spool = Spool.open(data / "spool", source)
    ExitRecorder(data / "run" / "meters", spool, source).recover(recorded)
    spool.close()


def ship_to_ledger(data: Path) -> tuple[list[tuple[str, int]], int]:
    """Ship all spools to a ledger. Return its (runtime, microseconds of life) pairs and the number of conflicts."""
    engine = memory_ledger_engine()

    def post_for(_: str) -> Post:
        async def post(records: Sequence[bytes]) -> None:
            with engine.begin() as connection:
                append_lifetimes(connection, [decode(raw, LifetimeRecord) for raw in records])

        return post

    assert all(found.lost == found.remaining == 0 for found in asyncio.run(recover(data / "spool", post_for)))
    with engine.connect() as connection:
        lives = connection.execute(select(lifetime_records.c.runtime_id, lifetime_records.c.total_us)).all()
        aside = connection.execute(select(conflicts)).all()
    engine.dispose()
    return [(runtime_id, total_us) for runtime_id, total_us in lives], len(aside)


@pytest.mark.deep
@pytest.mark.parametrize("point", POINTS)
def test_lifetime_is_written_once_at_every_kill_point(tmp_path: Path, point: str) -> None:
    """The killed supervisor's record is kept. Without one, the next supervisor counts to the page's last change."""
    leave_page(tmp_path, f"{PID}.rt-1")
    kill_at(tmp_path, point)
    assert pages(tmp_path) == ([] if point == "page removed" else [f"{PID}.rt-1"])
    for source in ("supervisor-2", "supervisor-3"):
        start_again(tmp_path, source, read_recorded_runtimes(tmp_path / "spool"))
    assert pages(tmp_path) == []
    is_recorded = point in ("written", "synced", "page removed")
    assert ship_to_ledger(tmp_path) == ([("rt-1", LIVED_US if is_recorded else 3_000_000)], 0)


def test_control_lifetime_is_written_twice_without_the_spool(tmp_path: Path) -> None:
    """Negative control: if the spool isn't read, the ledger gets a second record and keeps it as a conflict."""
    leave_page(tmp_path, f"{PID}.rt-1")
    kill_at(tmp_path, "synced")
    start_again(tmp_path, "supervisor-2", ())
    assert ship_to_ledger(tmp_path) == ([("rt-1", LIVED_US)], 1)


async def test_refused_lifetime_is_written_when_the_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is written once, up to the death that the supervisor saw, so idle time isn't lost."""
    monkeypatch.setattr("kelvin.supervisor.exit_recorder.RETRY_S", 0.01)
    leave_page(tmp_path, f"{PID}.rt-1")
    disk = FailingDisk("write")
    spool = Spool.open(tmp_path / "spool", "supervisor-1", disk=disk)
    recorder = ExitRecorder(tmp_path / "run" / "meters", spool, "supervisor-1")
    recorder.record_exit(ReapedChild(PID, 0, LIVED_US, time.monotonic_ns(), 0, 0))
    await recorder.wait_recorded(0.1)
    assert pages(tmp_path) == [f"{PID}.rt-1"]
    disk.fail.clear()
    await recorder.wait_recorded(60.0)
    assert pages(tmp_path) == []
    await asyncio.to_thread(spool.close)
    assert await asyncio.to_thread(ship_to_ledger, tmp_path) == ([("rt-1", LIVED_US)], 0)


@pytest.mark.parametrize("call", ["glob", "read_bytes"])
async def test_lifetime_of_an_unreadable_page_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A supervisor without file descriptors retries, and records up to the death that it saw."""

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("kelvin.supervisor.exit_recorder.RETRY_S", 0.01)
    leave_page(tmp_path, f"{PID}.rt-1")
    spool = Spool.open(tmp_path / "spool", "supervisor-1")
    recorder = ExitRecorder(tmp_path / "run" / "meters", spool, "supervisor-1")
    with monkeypatch.context() as patched:
        patched.setattr(Path, call, fail)
        recorder.record_exit(ReapedChild(PID, 0, LIVED_US, time.monotonic_ns(), 0, 0))
    await recorder.wait_recorded(60.0)
    assert pages(tmp_path) == []
    await asyncio.to_thread(spool.close)
    assert await asyncio.to_thread(ship_to_ledger, tmp_path) == ([("rt-1", LIVED_US)], 0)


def test_refused_exit_keeps_its_page_and_the_next_is_recorded(tmp_path: Path) -> None:
    """The page that couldn't be written stays for the next start. The next exit is recorded."""
    for number in (1, 2):
        leave_page(tmp_path, f"{PID + number}.rt-{number}")
    disk = FailingDisk("write")
    spool = Spool.open(tmp_path / "spool", "supervisor-1", disk=disk)
    recorder = ExitRecorder(tmp_path / "run" / "meters", spool, "supervisor-1")
    record_exit(recorder, ReapedChild(PID + 1, 0, LIVED_US, time.monotonic_ns(), 0, 0), patience_s=0.1)
    assert pages(tmp_path) == [f"{PID + 1}.rt-1", f"{PID + 2}.rt-2"]
    disk.fail.clear()
    record_exit(recorder, ReapedChild(PID + 2, 0, LIVED_US, time.monotonic_ns(), 0, 0))
    assert pages(tmp_path) == [f"{PID + 1}.rt-1"]
    spool.close()
    start_again(tmp_path, "supervisor-2", read_recorded_runtimes(tmp_path / "spool"))
    assert ship_to_ledger(tmp_path) == ([("rt-2", LIVED_US), ("rt-1", 3_000_000)], 0)


def test_a_reused_pid_is_not_billed_for_the_earlier_process(tmp_path: Path) -> None:
    """The page of the first process ends with its last change, not with the death of the second."""
    leave_page(tmp_path, f"{PID}.rt-1", idle_ns=20 * 10**9)
    spool = Spool.open(tmp_path / "spool", "supervisor-1")
    recorder = ExitRecorder(tmp_path / "run" / "meters", spool, "supervisor-1")
    leave_page(tmp_path, f"{PID}.rt-2")
    record_exit(recorder, ReapedChild(PID, 0, 50_000, time.monotonic_ns(), 0, 0))
    spool.close()
    assert pages(tmp_path) == []
    assert ship_to_ledger(tmp_path) == ([("rt-1", 3_000_000), ("rt-2", 50_000)], 0)


def test_page_of_an_earlier_process_is_not_watched(tmp_path: Path) -> None:
    """The process that now has the pid would be killed for the silence of the earlier one's socket. The last field
    tells whether a version is bound."""
    leave_page(tmp_path, f"{os.getpid()}.rt-1", idle_ns=time.monotonic_ns() - start_time_ns(os.getpid()) + 10**9)
    leave_page(tmp_path, f"{os.getpid()}.rt-2")
    leave_page(tmp_path, f"{os.getpid()}.rt-3", version="a" * 64)
    spool = Spool.open(tmp_path / "spool", "supervisor-1")
    assert ExitRecorder(tmp_path / "run" / "meters", spool, "supervisor-1").metered_processes() == [
        (os.getpid(), "rt-2", False),
        (os.getpid(), "rt-3", True),
    ]
    spool.close()


def test_the_next_supervisor_starts_over_any_entry(tmp_path: Path) -> None:
    """Foreign entries stay, and empty pages are removed. The earlier supervisor was killed before its first record."""
    SourceDirectory.lock(tmp_path / "spool", "supervisor-0").close()
    leave_page(tmp_path, f"{PID}.rt-1")
    meters = tmp_path / "run" / "meters"
    for name in ("lost+found", f"{PID}.a-directory", "no-pid", "a.b"):
        (meters / name).mkdir()
    (meters / "stray").touch()
    (meters / "a" / "b" / "c" / "d").mkdir(parents=True)
    (meters / f"{PID}.empty").touch()
    (meters / f"{PID}.zeros").write_bytes(bytes(METER_FILE_BYTES))
    start_again(tmp_path, "supervisor-1", read_recorded_runtimes(tmp_path / "spool"))
    assert pages(tmp_path) == sorted(["lost+found", f"{PID}.a-directory", "no-pid", "a.b", "stray", "a"])
    assert ship_to_ledger(tmp_path) == ([("rt-1", 3_000_000)], 0)


async def test_a_full_disk_does_not_stop_the_next_supervisor(tmp_path: Path) -> None:
    """The page stays for the next start if the disk stays full."""
    leave_page(tmp_path, f"{PID}.rt-1")
    spool = Spool.open(tmp_path / "spool", "supervisor-1", disk=FailingDisk("write"))
    recorder = ExitRecorder(tmp_path / "run" / "meters", spool, "supervisor-1")
    recorder.recover(())
    await recorder.wait_recorded(0.1)
    await asyncio.to_thread(spool.close)
    assert pages(tmp_path) == [f"{PID}.rt-1"]
    start_again(tmp_path, "supervisor-2", ())
    assert await asyncio.to_thread(ship_to_ledger, tmp_path) == ([("rt-1", 3_000_000)], 0)


async def test_leftover_lifetime_is_written_when_the_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor that found the page retries, so that no restart is needed for a balanced bill."""
    monkeypatch.setattr("kelvin.supervisor.exit_recorder.RETRY_S", 0.01)
    leave_page(tmp_path, f"{PID}.rt-1")
    disk = FailingDisk("write")
    spool = Spool.open(tmp_path / "spool", "supervisor-1", disk=disk)
    recorder = ExitRecorder(tmp_path / "run" / "meters", spool, "supervisor-1")
    recorder.recover(())
    await recorder.wait_recorded(0.1)
    assert pages(tmp_path) == [f"{PID}.rt-1"]
    disk.fail.clear()
    await recorder.wait_recorded(60.0)
    assert pages(tmp_path) == []
    await asyncio.to_thread(spool.close)
    assert await asyncio.to_thread(ship_to_ledger, tmp_path) == ([("rt-1", 3_000_000)], 0)


@pytest.mark.parametrize("recorded", [{"rt-0"}, ()], ids=["recorded", "no page"])
def test_a_page_that_cannot_be_removed_keeps_no_other(
    tmp_path: Path, recorded: Collection[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page stays, and the next one is recorded."""
    leave_page(tmp_path, f"{PID}.rt-0")
    leave_page(tmp_path, f"{PID}.rt-1")
    stuck, unlink = tmp_path / "run" / "meters" / f"{PID}.rt-0", Path.unlink
    if not recorded:
        stuck.write_bytes(b"")

    def refusing(path: Path, missing_ok: bool = False) -> None:
        if path == stuck:
            raise PermissionError(1, "not permitted", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refusing)
    start_again(tmp_path, "supervisor-1", recorded)
    assert pages(tmp_path) == [f"{PID}.rt-0"]
    assert ship_to_ledger(tmp_path) == ([("rt-1", 3_000_000)], 0)


def test_a_page_of_another_boot_is_dropped(tmp_path: Path) -> None:
    """Monotonic times of another boot have no meaning here."""
    leave_page(tmp_path, f"{PID}.rt-1")
    page = tmp_path / "run" / "meters" / f"{PID}.rt-1"
    far_ns = time.monotonic_ns() + 10**15
    page.write_bytes(encode_meter(Meter(Phase.IDLE, far_ns, far_ns), 2).ljust(METER_FILE_BYTES, b"\0"))
    start_again(tmp_path, "supervisor-1", ())
    assert pages(tmp_path) == []
    assert ship_to_ledger(tmp_path) == ([], 0)


async def test_slow_disk_holds_up_no_supervisor(tmp_path: Path) -> None:
    """While the disk stalls, the event loop continues. The life is recorded when the disk responds."""
    leave_page(tmp_path, f"{PID}.rt-1")
    disk = GatedDisk()
    spool = Spool.open(tmp_path / "spool", "supervisor-1", disk=disk)
    recorder = ExitRecorder(tmp_path / "run" / "meters", spool, "supervisor-1")
    started_s = time.monotonic()
    recorder.record_exit(ReapedChild(PID, 0, LIVED_US, time.monotonic_ns(), 0, 0))
    recorder.record_exit(
        ReapedChild(PID, 0, 1, time.monotonic_ns(), 0, 0)
    )  # a later process with the same pid, which the page doesn't belong to
    await recorder.wait_recorded(0.01)
    assert time.monotonic() - started_s < 5.0
    assert pages(tmp_path) == [f"{PID}.rt-1"]
    disk.gate.set()
    await recorder.wait_recorded(60.0)
    assert pages(tmp_path) == []
    await asyncio.to_thread(spool.close)
    assert await asyncio.to_thread(ship_to_ledger, tmp_path) == ([("rt-1", LIVED_US)], 0)
