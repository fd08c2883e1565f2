"""Bound the memory of a process that serves or judges a tenant's model.

A model is untrusted: its template, tokenizer or graph may take more memory than the machine has. Then this process has
to fail or be killed, and not the cache agent, whose memory all models of the machine share.
"""

import resource
from contextlib import suppress
from pathlib import Path
from typing import Final

SPARE_BYTES: Final = 4 << 30  # beside weights and KV cache; requests take a small part of it
_OOM_SCORE_ADJ: Final = 500  # of 1000; the cache agent has the default, 0


def go_first_when_memory_runs_out(process: Path = Path("/proc/self")) -> None:
    """Have the kernel's OOM killer choose this process before others. A higher score that is set already stays."""
    score = process / "oom_score_adj"
    with suppress(OSError):  # some sandboxes have no such file
        if int(score.read_text()) < _OOM_SCORE_ADJ:
            score.write_text(str(_OOM_SCORE_ADJ))


def bound_memory(growth_bytes: int) -> None:
    """Limit the growth of this process's private memory. Beyond it allocations fail: MemoryError in Python.

    Shared memory, such as weights, doesn't count.
    """
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _data_bytes() + growth_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def _data_bytes() -> int:
    """Return what the kernel counts against RLIMIT_DATA: private writable memory, touched or not."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
