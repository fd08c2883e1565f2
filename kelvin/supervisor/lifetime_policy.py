"""Compute the billed lifetime record from a replica's last meter page and the supervisor's own clock. Pure."""

from dataclasses import dataclass

from kelvin.contracts.accounting.meter_format import Meter
from kelvin.contracts.accounting.usage import KILLED, LifetimeRecord


@dataclass(frozen=True, slots=True)
class ChildDeath:
    """The supervisor's observation of a child's end. It measured `total_us` itself, from birth to death."""

    runtime_id: str
    pid: int
    died_ns: int  # CLOCK_MONOTONIC
    died_at_us: int  # wall clock
    total_us: int
    exit_status: int
    cpu_us: int
    max_rss_kb: int


def lifetime_record(meter: Meter, death: ChildDeath, source: str, sequence: int) -> LifetimeRecord:
    """Return the record. The open interval ends with the death. Each part is the runtime's own count, no remainder."""
    closed = meter.close_interval(death.died_ns)
    standby, restore, active, idle = (nanoseconds // 1000 for nanoseconds in closed.spent_ns)
    return LifetimeRecord(
        runtime_id=death.runtime_id,
        source=source,
        sequence=sequence,
        pid=death.pid,
        tenant=meter.tenant or None,
        model=meter.model or None,
        version=meter.version or None,
        device_class=meter.device_class or "none",
        born_at_us=death.died_at_us - death.total_us,
        died_at_us=death.died_at_us,
        total_us=death.total_us,
        standby_us=standby,
        restore_us=restore,
        active_us=active,
        idle_us=idle,
        requests=meter.requests,
        exit_status=death.exit_status,
        cpu_us=death.cpu_us,
        max_rss_kb=death.max_rss_kb,
    )


def unseen_death(meter: Meter, runtime_id: str, pid: int, now_ns: int, now_at_us: int, boot: str) -> ChildDeath | None:
    """Return a death that no supervisor saw, at the page's last change. None if the page is from another boot. `boot`
    is the id of this boot. Without ids, times decide, and a shorter earlier boot is not detected.
    """
    if meter.boot and boot and meter.boot != boot:
        return None
    if not meter.start_time_ns <= meter.since_ns <= now_ns:
        return None
    died_at_us = now_at_us - (now_ns - meter.since_ns) // 1000
    total_us = (meter.since_ns - meter.start_time_ns) // 1000
    return ChildDeath(runtime_id, pid, meter.since_ns, died_at_us, total_us, exit_status=KILLED, cpu_us=0, max_rss_kb=0)
