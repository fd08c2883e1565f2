"""Bound the memory of a process that serves or judges a tenant's model.

A model is a stranger's: a template, a tokenizer or a graph may want more memory than the machine has. Then this process
fails, or is killed, and not the cache agent, whose memory all models of the machine share.
"""

import resource
from contextlib import suppress
from pathlib import Path
from typing import Final

SPARE_BYTES: Final = 4 << 30  # beside weights and KV cache: what answering takes, many times over
_OOM_SCORE_ADJ: Final = 500  # of 1000; 0 is the cache agent's, as every process's that says nothing


def go_first_when_memory_runs_out(process: Path = Path("/proc/self")) -> None:
    """Have the kernel kill this process sooner than others. Does nothing where an operator put it higher already."""
    score = process / "oom_score_adj"
    with suppress(OSError):  # some sandboxes have no such file
        if int(score.read_text()) < _OOM_SCORE_ADJ:
            score.write_text(str(_OOM_SCORE_ADJ))


def bound_memory(growth_bytes: int) -> None:
    """Let this process have so many bytes of its own more than it has now. Beyond them an allocation fails: a
    MemoryError to Python. Memory that is shared through files, as weights are, doesn't count.
    """
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _data_bytes() + growth_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def _data_bytes() -> int:
    """What the kernel counts against RLIMIT_DATA: private memory that may be written, used or not."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
