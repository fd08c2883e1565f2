"""Build usage records for tests. A call without keywords makes a valid one."""

from msgspec import UNSET, UnsetType

from controlplane.ledger.policy.month import month_bounds_us
from kelvin.contracts.accounting.usage import LifetimeRecord, RecordOrigin, RequestRecord

MONTH = "2026-11"
BEGIN_US, END_US = month_bounds_us(MONTH)
HOUR_US = 3_600_000_000


def request_record(
    number: int,
    *,
    origin: RecordOrigin = RecordOrigin.ACTIVATOR,
    source: str = "activator-1",
    sequence: int | None = None,
    request_id: str | None = None,
    tenant: str = "acme",
    model: str = "m",
    runtime_id: str | None = "rt-1",
    ended_at_us: int | None = None,
    outcome: str = "ok",
    status: int = 200,
    prompt_tokens: int = 10,
    cached_tokens: int = 4,
    completion_tokens: int = 7,
    device_us: int = 1000,
    once: str | UnsetType = UNSET,
    degraded: str | UnsetType = UNSET,
) -> RequestRecord:
    """Return the record of request `number`. Its sequence is the number, too."""
    ended = BEGIN_US + HOUR_US + number if ended_at_us is None else ended_at_us
    return RequestRecord(
        request_id=request_id or f"req-{number}",
        origin=origin,
        source=source,
        sequence=number if sequence is None else sequence,
        tenant=tenant,
        model=model,
        version="f" * 64,
        key_id="key",
        runtime_id=runtime_id,
        started_at_us=ended - 500,
        ended_at_us=ended,
        queued_us=3,
        outcome=outcome,
        status=status,
        stream=True,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        completion_tokens=completion_tokens,
        device_us=device_us,
        once=once,
        degraded=degraded,
    )


def lifetime_record(
    number: int,
    *,
    runtime_id: str | None = None,
    source: str = "supervisor-1",
    sequence: int | None = None,
    tenant: str | None = "acme",
    model: str | None = "m",
    device_class: str = "cpu-1",
    died_at_us: int | None = None,
    standby_us: int = 500_000,
    restore_us: int = 250_000,
    active_us: int = 2_000_000,
    idle_us: int = 7_250_000,
    total_us: int | None = None,
    requests: int = 1,
) -> LifetimeRecord:
    """Return the record of dead replica `number`. It served one request."""
    died = BEGIN_US + 2 * HOUR_US + number if died_at_us is None else died_at_us
    total = standby_us + restore_us + active_us + idle_us if total_us is None else total_us
    return LifetimeRecord(
        runtime_id=runtime_id or f"rt-{number}",
        source=source,
        sequence=number if sequence is None else sequence,
        pid=1000 + number,
        tenant=tenant,
        model=model,
        version="f" * 64,
        device_class=device_class,
        born_at_us=died - total,
        died_at_us=died,
        total_us=total,
        standby_us=standby_us,
        restore_us=restore_us,
        active_us=active_us,
        idle_us=idle_us,
        requests=requests,
        exit_status=0,
        cpu_us=total,
        max_rss_kb=100_000,
    )
