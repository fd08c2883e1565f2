"""`kelvin bench ledger`: post a month of many requests to the ledger, then time its report and its proofs.

Records are posted as the activator posts them: in batches to the control plane's socket, which answers when they are
durable. The installation does not know that it is measured. The records are realistic: many replicas, several models,
every outcome. `ExpectedBill` counts, independently of the ledger, what the bill must say.
"""

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import click

from coldstart_bench.harness.capacity_check import find_shortage
from coldstart_bench.harness.installation import Installation, run_command, running_installation
from coldstart_bench.harness.process_stats import peak_resident_bytes, sampling_thread
from coldstart_bench.report.bench_report import BenchFailed, Figures, align
from coldstart_bench.suites.bench_runner import Bench, BenchPlan, option
from kelvin.contracts.accounting.usage import LifetimeRecord, RecordOrigin, RequestRecord
from kelvin.contracts.serving.control_messages import LifetimeBatch, RequestBatch
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory

TENANT: Final = "default"
BATCH: Final = 5_000  # requests per post, which is the ledger's limit
MODELS: Final = 20
REPLICAS: Final = 40  # replicas at a time
SERVED: Final = 2_000  # requests in a replica's lifetime
ORPHANS_EVERY: Final = 100_000  # of this many requests, an activator's death leaves one or two orphans
STANDBY_US: Final = 400_000
RESTORE_US: Final = 250_000
ACTIVE_SHARE: Final = 1.25  # active time divided by the requests' time: a replica also waits while it is active
ROW_BYTES: Final = 1_200  # the most disk per request: rows, indices, and the log before a checkpoint
POST_S: Final = 300.0
READ_S: Final = 6 * 3600.0  # time limit of a command that reads every row
IN_FLIGHT: Final = 2  # one batch is made and sent while the other is written
EXAMINE_EVERY_S: Final = 0.05  # between two samples of the process that reads the ledger
TELL_EVERY: Final = 250_000


@dataclass(slots=True)
class ExpectedBill:
    """The totals that the bill of the month must have."""

    requests: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    lifetimes: int = 0
    active_us: int = 0


@dataclass(slots=True)
class _Replica:
    runtime_id: str
    pid: int
    model: int
    born_at_us: int
    requests: int = 0
    used_us: int = 0
    orphans: int = 0


class SyntheticMonth:
    """Generates records, deterministic by its seed. `expected` is complete once `batches` has ended."""

    def __init__(self, requests: int, begin_us: int, end_us: int, seed: int = 1) -> None:
        self._requests = requests
        self._begin_us = begin_us
        self._end_us = end_us
        self._random = random.Random(seed)  # noqa: S311 — no secret
        self._versions = [f"{self._random.getrandbits(256):064x}" for _ in range(MODELS)]
        self._born = 0
        self._died = 0
        self._sequence = 0
        self.expected = ExpectedBill()

    def batches(self) -> Iterator[tuple[tuple[RequestRecord, ...], tuple[LifetimeRecord, ...]]]:
        """Yield requests in the order of their ends, and lifetimes of replicas that ended after them."""
        living = [self._new_replica(slot, self._begin_us) for slot in range(REPLICAS)]
        batch: list[RequestRecord] = []
        dead: list[LifetimeRecord] = []
        for number in range(self._requests):
            at_us = self._begin_us + (self._end_us - self._begin_us) * number // self._requests
            slot = number % REPLICAS
            batch.append(self._request(number, at_us, living[slot]))
            if living[slot].requests == SERVED:
                dead.append(self._end_replica(living[slot], at_us + 1))
                living[slot] = self._new_replica(slot, at_us + 1)
            if len(batch) == BATCH:
                yield tuple(batch), tuple(dead)
                batch, dead = [], []
        dead += [self._end_replica(replica, self._end_us - 1) for replica in living]
        yield tuple(batch), tuple(dead)

    def _new_replica(self, slot: int, at_us: int) -> _Replica:
        self._born += 1
        return _Replica(f"bench-{self._born}", 100 + self._born % 30_000, slot % MODELS, at_us)

    def _request(self, number: int, at_us: int, replica: _Replica) -> RequestRecord:
        chance = self._random.random
        outcome, status = (
            ("ok", 200) if chance() < 0.97 else ("cancelled", 499) if chance() < 0.7 else ("overloaded", 503)
        )
        served = outcome != "overloaded"
        prompt = 16 + int(chance() * 2_000) if served else 0
        completion = int(chance() * 500) + (outcome == "ok") if served else 0
        device_us = 200 * prompt // 16 + 900 * completion if served else 0
        is_orphan = outcome == "cancelled" and number % ORPHANS_EVERY < 100 and replica.orphans == 0
        if served:
            replica.requests += 1
            replica.used_us += device_us
        if is_orphan:
            replica.orphans += 1
        else:
            self._sequence += 1
        self.expected.requests[outcome] += 1
        self.expected.prompt_tokens += prompt
        self.expected.completion_tokens += completion
        return RequestRecord(
            request_id=f"req_{at_us // 1000:012x}{self._random.getrandbits(56):014x}",  # sorts by time, as ours do
            origin=RecordOrigin.ORPHAN if is_orphan else RecordOrigin.ACTIVATOR,
            source=replica.runtime_id if is_orphan else "activator-bench",
            sequence=1 if is_orphan else self._sequence,
            tenant=TENANT,
            model=f"model-{replica.model}",
            version=self._versions[replica.model],
            key_id=f"key{number % 7}",
            runtime_id=replica.runtime_id if served else None,
            started_at_us=at_us - device_us - 1_000,
            ended_at_us=at_us,
            queued_us=int(chance() * 2_000),
            outcome=outcome,
            status=status,
            stream=number % 3 != 0,
            prompt_tokens=prompt,
            cached_tokens=0,
            completion_tokens=completion,
            device_us=device_us,
        )

    def _end_replica(self, replica: _Replica, at_us: int) -> LifetimeRecord:
        self._died += 1
        active_us = int(replica.used_us * ACTIVE_SHARE)
        total_us = max(at_us - replica.born_at_us, STANDBY_US + RESTORE_US + active_us)
        self.expected.lifetimes += 1
        self.expected.active_us += active_us
        return LifetimeRecord(
            runtime_id=replica.runtime_id,
            source="supervisor-bench",
            sequence=self._died,
            pid=replica.pid,
            tenant=TENANT,
            model=f"model-{replica.model}",
            version=self._versions[replica.model],
            device_class="cpu-1",
            born_at_us=at_us - total_us,
            died_at_us=at_us,
            total_us=total_us,
            standby_us=STANDBY_US,
            restore_us=RESTORE_US,
            active_us=active_us,
            idle_us=total_us - STANDBY_US - RESTORE_US - active_us,
            requests=replica.requests,
            exit_status=0,
            cpu_us=active_us,
            max_rss_kb=600_000,
        )


@dataclass(frozen=True, slots=True)
class LedgerPlan(BenchPlan):
    """Options of `kelvin bench ledger`."""

    requests: int
    repeats: int


class LedgerFigures(Figures, frozen=True):
    """Wall-clock seconds, and peaks of resident memory in bytes."""

    requests: int
    lifetimes: int
    fill_s: float
    rows_per_s: float
    database_bytes: int
    first_report_s: float  # over HTTPS
    report_s: float  # median of the later reports
    report_command_s: float  # `kelvin billing report`, including the start of the command
    controlplane_before_bytes: int
    controlplane_after_bytes: int
    verify_s: float
    verify_bytes: int
    reconcile_s: float
    reconcile_bytes: int


def refusal(plan: LedgerPlan, free_disk: int, free_memory: int) -> str | None:
    """Return why the database does not fit on the disk, or None."""
    return find_shortage(plan.requests * ROW_BYTES, 0, free_disk, free_memory)


def run(plan: LedgerPlan, scratch: Path) -> LedgerFigures:
    """Run the bench. Raises InstallationFailed; BenchFailed if the bill is wrong or a proof fails."""
    with running_installation(scratch / "data") as kelvin:
        return _measure(plan, kelvin)


def last_month(now: datetime) -> tuple[str, int, int]:
    """Return YYYY-MM of last month and its bounds in µs since 1970. That month is over, so it has no other records."""
    end = datetime(now.year, now.month, 1, tzinfo=UTC)
    begin = (end - timedelta(days=1)).replace(day=1)
    return begin.strftime("%Y-%m"), int(begin.timestamp()) * 1_000_000, int(end.timestamp()) * 1_000_000


def _measure(plan: LedgerPlan, kelvin: Installation) -> LedgerFigures:
    name, begin_us, end_us = last_month(datetime.now(UTC))
    month = SyntheticMonth(plan.requests, begin_us, end_us)
    began = time.perf_counter()
    asyncio.run(_fill(plan, kelvin, month))
    fill_s = time.perf_counter() - began
    plan.tell(f"{plan.requests:,} requests in {fill_s:.0f} s")
    before = peak_resident_bytes("controlplane")
    first_s, report = _timed_report(kelvin, name)
    _check(report, month.expected)
    report_s = statistics.median(_timed_report(kelvin, name)[0] for _ in range(plan.repeats))
    after = peak_resident_bytes("controlplane")
    command_s, _ = _command(kelvin, "billing", "report", "--month", name)
    plan.tell(f"report in {first_s:.3f} s, then {report_s:.3f} s")
    verify_s, verify_bytes = _command(kelvin, "billing", "verify", "--month", name)
    plan.tell(f"verified in {verify_s:.0f} s")
    reconcile_s, reconcile_bytes = _command(kelvin, "billing", "reconcile")
    plan.tell(f"reconciled in {reconcile_s:.0f} s")
    return LedgerFigures(
        requests=plan.requests,
        lifetimes=month.expected.lifetimes,
        fill_s=fill_s,
        rows_per_s=plan.requests / fill_s,
        database_bytes=sum(file.stat().st_size for file in kelvin.data.glob("kelvin.db*")),
        first_report_s=first_s,
        report_s=report_s,
        report_command_s=command_s,
        controlplane_before_bytes=before,
        controlplane_after_bytes=after,
        verify_s=verify_s,
        verify_bytes=verify_bytes,
        reconcile_s=reconcile_s,
        reconcile_bytes=reconcile_bytes,
    )


async def _fill(plan: LedgerPlan, kelvin: Installation, month: SyntheticMonth) -> None:
    """Post all batches. At most IN_FLIGHT batches are not yet durable."""
    directory = SocketDirectory(kelvin.data / "run")
    control = ServiceClient(directory, "control.sock", "control plane")
    posting: set[asyncio.Task[None]] = set()
    done = 0
    try:
        for requests, lives in month.batches():
            while len(posting) >= IN_FLIGHT:
                finished, posting = await asyncio.wait(posting, return_when=asyncio.FIRST_COMPLETED)
                for task in finished:
                    task.result()
            posting.add(
                asyncio.create_task(_post(control, RequestBatch(records=requests), LifetimeBatch(records=lives)))
            )
            done += len(requests)
            if done % TELL_EVERY < len(requests):
                plan.tell(f"{done:,} of {plan.requests:,} requests")
        await asyncio.gather(*posting)
    finally:
        for task in posting:
            task.cancel()
        await asyncio.gather(*posting, return_exceptions=True)
        await control.close()
        directory.close()


async def _post(control: ServiceClient, requests: RequestBatch, lives: LifetimeBatch) -> None:
    for kind, batch in (("requests", requests), ("lifetimes", lives)):
        if batch.records:
            await control.call("POST", f"/internal/v1/usage/{kind}", type(None), body=batch, timeout_s=POST_S)


def _timed_report(kelvin: Installation, month: str) -> tuple[float, Any]:
    began = time.perf_counter()
    report = kelvin.admin.request("GET", f"/admin/v1/billing/report?tenant={TENANT}&month={month}")
    return time.perf_counter() - began, report


def _check(report: Any, expected: ExpectedBill) -> None:
    actual = {
        "requests": report["requests"],
        "prompt_tokens": report["prompt_tokens"],
        "completion_tokens": report["completion_tokens"],
        "lifetimes": sum(use["lifetimes"] for use in report["device"]),
        "active_us": sum(use["active_us"] for use in report["device"]),
    }
    wanted = {name: getattr(expected, name) for name in actual}
    if actual != wanted:
        raise BenchFailed(f"the bill says {actual}; it must be {wanted}")
    if not report["balance"]["balanced"]:
        raise BenchFailed(f"the month does not balance: {report['balance']['problems'][:3]}")


def _command(kelvin: Installation, *words: str) -> tuple[float, int]:
    """Return the seconds of a command, and the peak memory of the process that reads the ledger for it, or 0."""
    peaks, began = [0], time.perf_counter()
    with sampling_thread(
        lambda: peaks.append(peak_resident_bytes("controlplane.ledger_check.check_program")), EXAMINE_EVERY_S
    ):
        code, out, err = run_command(kelvin.data, *words, limit_s=READ_S)
    if code != 0:
        raise BenchFailed(f"kelvin {' '.join(words)}: {out[-2_000:]}{err[-2_000:]}")
    return time.perf_counter() - began, max(peaks)


def table(figures: LedgerFigures) -> str:
    """Return the figures as an aligned table."""
    rows = (
        ("requests, lives", f"{figures.requests:,}, {figures.lifetimes:,}"),
        ("entered", f"{figures.fill_s:.0f} s, {figures.rows_per_s:,.0f} rows/s"),
        ("database", f"{figures.database_bytes / 1e9:.2f} GB"),
        ("first report", f"{figures.first_report_s:.3f} s"),
        ("report", f"{figures.report_s:.3f} s; as a command {figures.report_command_s:.2f} s"),
        ("before the report", f"control plane's peak {_mb(figures.controlplane_before_bytes)}"),
        ("after it", f"control plane's peak {_mb(figures.controlplane_after_bytes)}"),
        ("verify", f"{figures.verify_s:.1f} s, peak {_mb(figures.verify_bytes)}"),
        ("reconcile", f"{figures.reconcile_s:.1f} s, peak {_mb(figures.reconcile_bytes)}"),
    )
    return "\n".join(align(rows, left=2))


def _mb(size: int) -> str:
    return f"{size / 1e6:.0f} MB"


BENCH: Final = Bench(
    "ledger",
    """Time how fast a month of many requests is entered, billed, verified and reconciled, and measure the memory.

    Takes up to 1.2 kB of disk per request, below $TMPDIR.
    """,
    (
        option("--requests", 300_000, click.IntRange(1, 100_000_000), "Requests in the month."),
        option("--repeats", 5, click.IntRange(1, 1000), "Reports after the first."),
    ),
    LedgerPlan,
    run,
    table,
    refusal=refusal,
)
