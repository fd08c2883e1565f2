"""From a replica's last meter page and the supervisor's own clock to the record that is billed. Pure."""

from dataclasses import dataclass

from kelvin.contracts.accounting.meter_format import Meter
from kelvin.contracts.accounting.usage import KILLED, LifetimeRecord


@dataclass(frozen=True, slots=True)
class ChildDeath:
    """What the supervisor saw of a child's end. `total_us` is its own measurement, from birth to death."""

    runtime_id: str
    pid: int
    died_ns: int  # CLOCK_MONOTONIC
    died_at_us: int  # wall clock
    total_us: int
    exit_status: int
    cpu_us: int
    max_rss_kb: int


def lifetime_record(meter: Meter, death: ChildDeath, source: str, sequence: int) -> LifetimeRecord:
    """The open interval ends with the death. No part is a remainder: each is the runtime's own count."""
    closed = meter.closed(death.died_ns)
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
    """A death that no supervisor saw: it ended with the page's last change. None where the page is from another boot.

    `boot` is the id of this boot. Without ids the times decide: an earlier boot that was shorter is not found out.
    """
    if meter.boot and boot and meter.boot != boot:
        return None
    if not meter.born_ns <= meter.since_ns <= now_ns:
        return None
    died_at_us = now_at_us - (now_ns - meter.since_ns) // 1000
    total_us = (meter.since_ns - meter.born_ns) // 1000
    return ChildDeath(runtime_id, pid, meter.since_ns, died_at_us, total_us, exit_status=KILLED, cpu_us=0, max_rss_kb=0)
