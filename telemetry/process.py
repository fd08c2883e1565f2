"""What every process says of itself: processor time, memory, descriptors, its loops, what became of its telemetry."""

import os
import time
from pathlib import Path
from typing import Final

from service.loops import PROCESS
from telemetry.policy.instruments import Kind, Page, by
from telemetry.sender import Sender

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def describe_process(page: Page, sender: Sender | None) -> None:
    """Names are the Prometheus clients' customary ones."""
    page.read("process_cpu_seconds_total", "Processor time used.", Kind.COUNTER, (), lambda: {(): time.process_time()})
    page.gauge("process_resident_memory_bytes", "Memory in use.", _resident_bytes)
    page.gauge("process_open_fds", "Open descriptors.", lambda: len(os.listdir("/proc/self/fd")) - 1)
    errors = "Unexpected errors of background loops. Each was started again."
    page.read("kelvin_loop_errors_total", errors, Kind.COUNTER, ("loop",), lambda: by(PROCESS.errors.items()))
    failing = "Background loops that keep failing. The process is not ready unless this is 0."
    page.gauge("kelvin_loops_failing", failing, lambda: len(PROCESS.failing()))
    if sender is not None:
        told = "Traces by what became of them: sent, dropped here, not taken by the collector."
        page.read(
            "kelvin_traces_total",
            told,
            Kind.COUNTER,
            ("result",),
            lambda: by((("sent", sender.sent), ("dropped", sender.dropped), ("lost", sender.lost))),
        )


def _resident_bytes() -> float:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
