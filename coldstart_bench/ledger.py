"""`kelvin bench ledger`: a month of many requests through the ledger's own door, then its report, and its proofs.

Records go in as the activator's do: batches to the control plane's socket, answered when they are durable. Nothing of
the installation is told that it is measured.
"""

import asyncio
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import click

from coldstart_bench.frame import Bench, BenchPlan, option
from coldstart_bench.installation import Installation, running
from coldstart_bench.processes import peak_of, sampling
from coldstart_bench.report import BenchFailed, Figures, align
from coldstart_bench.room import shortage
from coldstart_bench.usage import TENANT, Expected, Month
from contracts.control import LifetimeBatch, RequestBatch
from service.client import ServiceClient
from service.unix import SocketDirectory

ROW_BYTES: Final = 1_200  # of disk, at most: rows, indices and the log before a checkpoint
POST_S: Final = 300.0
READ_S: Final = 6 * 3600.0  # for a command that reads every row
IN_FLIGHT: Final = 2  # one is made and sent while the other is written
EXAMINE_EVERY_S: Final = 0.05  # between looks at the process that reads the ledger
TELL_EVERY: Final = 250_000


@dataclass(frozen=True, slots=True)
class LedgerPlan(BenchPlan):
    """Options of `kelvin bench ledger`."""

    requests: int
    repeats: int


class LedgerFigures(Figures, frozen=True):
    """Seconds of wall clock; memory is the peak of resident bytes."""

    requests: int
    lifetimes: int
    fill_s: float
    rows_per_s: float
    database_bytes: int
    first_report_s: float  # over HTTPS
    report_s: float  # median of the following ones
    report_command_s: float  # `kelvin billing report`, its start included
    controlplane_before_bytes: int
    controlplane_after_bytes: int
    verify_s: float
    verify_bytes: int
    reconcile_s: float
    reconcile_bytes: int


def refusal(plan: LedgerPlan, free_disk: int, free_memory: int) -> str | None:
    """Why there is no room for it."""
    return shortage(plan.requests * ROW_BYTES, 0, free_disk, free_memory)


def run(plan: LedgerPlan, scratch: Path) -> LedgerFigures:
    """Raises InstallationFailed, and BenchFailed where the ledger does not say what was put in, or a proof fails."""
    with running(scratch / "data") as kelvin:
        return _measure(plan, kelvin)


def last_month(now: datetime) -> tuple[str, int, int]:
    """YYYY-MM and its bounds in microseconds since 1970: a month that is over is nobody else's."""
    end = datetime(now.year, now.month, 1, tzinfo=UTC)
    begin = (end - timedelta(days=1)).replace(day=1)
    return begin.strftime("%Y-%m"), int(begin.timestamp()) * 1_000_000, int(end.timestamp()) * 1_000_000


def _measure(plan: LedgerPlan, kelvin: Installation) -> LedgerFigures:
    name, begin_us, end_us = last_month(datetime.now(UTC))
    month = Month(plan.requests, begin_us, end_us)
    began = time.perf_counter()
    asyncio.run(_fill(plan, kelvin, month))
    fill_s = time.perf_counter() - began
    plan.tell(f"{plan.requests:,} requests in {fill_s:.0f} s")
    before = peak_of("controlplane")
    first_s, report = _timed_report(kelvin, name)
    _check(report, month.expected)
    report_s = statistics.median(_timed_report(kelvin, name)[0] for _ in range(plan.repeats))
    after = peak_of("controlplane")
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


async def _fill(plan: LedgerPlan, kelvin: Installation, month: Month) -> None:
    """Each batch is durable before the one after the next is sent."""
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


def _check(report: Any, expected: Expected) -> None:
    """The bill is what was put in, and it balances."""
    said = {
        "requests": report["requests"],
        "prompt_tokens": report["prompt_tokens"],
        "completion_tokens": report["completion_tokens"],
        "lifetimes": sum(use["lifetimes"] for use in report["device"]),
        "active_us": sum(use["active_us"] for use in report["device"]),
    }
    wanted = {name: getattr(expected, name) for name in said}
    if said != wanted:
        raise BenchFailed(f"the bill says {said}; what was put in is {wanted}")
    if not report["balance"]["balanced"]:
        raise BenchFailed(f"the month does not balance: {report['balance']['problems'][:3]}")


def _command(kelvin: Installation, *words: str) -> tuple[float, int]:
    """Seconds of a command, and the most memory of the process that reads the ledger for it, 0 where there is none."""
    command = [sys.executable, "-m", "kelvin.main", *words, "--data", str(kelvin.data)]
    peaks, began = [0], time.perf_counter()
    with sampling(lambda: peaks.append(peak_of("controlplane.examine")), EXAMINE_EVERY_S):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=READ_S)
    if done.returncode != 0:
        raise BenchFailed(f"kelvin {' '.join(words)}: {done.stdout[-2_000:]}{done.stderr[-2_000:]}")
    return time.perf_counter() - began, max(peaks)


def table(found: LedgerFigures) -> str:
    """Return the figures as the text that a person reads."""
    rows = (
        ("requests, lives", f"{found.requests:,}, {found.lifetimes:,}"),
        ("entered", f"{found.fill_s:.0f} s, {found.rows_per_s:,.0f} rows/s"),
        ("database", f"{found.database_bytes / 1e9:.2f} GB"),
        ("first report", f"{found.first_report_s:.3f} s"),
        ("report", f"{found.report_s:.3f} s; as a command {found.report_command_s:.2f} s"),
        ("before the report", f"control plane's peak {_mb(found.controlplane_before_bytes)}"),
        ("after it", f"control plane's peak {_mb(found.controlplane_after_bytes)}"),
        ("verify", f"{found.verify_s:.1f} s, peak {_mb(found.verify_bytes)}"),
        ("reconcile", f"{found.reconcile_s:.1f} s, peak {_mb(found.reconcile_bytes)}"),
    )
    return "\n".join(align(rows, left=2))


def _mb(size: int) -> str:
    return f"{size / 1e6:.0f} MB"


BENCH: Final = Bench(
    "ledger",
    """A month of many requests: how fast it enters, is billed, verified and reconciled, in how much memory.

    Takes up to 1.2 kB of disk per request, below $TMPDIR.
    """,
    (
        option("--requests", 300_000, click.IntRange(1, 100_000_000), "In one month."),
        option("--repeats", 5, click.IntRange(1, 1000), "Reports after the first."),
    ),
    LedgerPlan,
    run,
    table,
    refusal=refusal,
)
