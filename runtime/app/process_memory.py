"""Limit the memory of a process that runs a tenant's model.

A model is untrusted: its template, tokenizer or graph may need more memory than the machine has. This process must then
fail or be killed. The cache agent must survive, because all models of the machine share its memory.
"""

import resource
from contextlib import suppress
from pathlib import Path
from typing import Final

SPARE_BYTES: Final = 4 << 30  # in addition to weights and KV cache; requests use a small part of it
_OOM_SCORE_ADJ: Final = 500  # of 1000; the cache agent has the default, 0


def raise_oom_score(process: Path = Path("/proc/self")) -> None:
    """Make the kernel's OOM killer prefer this process. Never lowers a score."""
    score = process / "oom_score_adj"
    with suppress(OSError):  # some sandboxes lack this file
        if int(score.read_text()) < _OOM_SCORE_ADJ:
            score.write_text(str(_OOM_SCORE_ADJ))


def limit_memory(growth_bytes: int) -> None:
    """Limit how much this process's private memory may still grow. Beyond that, allocations fail (MemoryError in
    Python). Shared memory, such as weights, doesn't count.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _data_bytes() + growth_bytes
    if hard_limit != resource.RLIM_INFINITY:
        limit = min(limit, hard_limit)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard_limit))


def _data_bytes() -> int:
    """Return the bytes that the kernel counts against RLIMIT_DATA: private writable memory, touched or not."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
