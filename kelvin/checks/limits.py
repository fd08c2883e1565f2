"""Check the limits that `kelvin up` would start with: descriptors, processes, locked memory, cores."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kelvin.checks.kernel import CGROUP, cgroup_number, try_text
from kelvin.policy.findings import GB, Finding, Level, as_bytes

FILES_PER_REQUEST: Final = 2  # a caller's socket and a replica's
FILES_BESIDE: Final = 512


def check_limits(connections: int) -> Iterator[Finding]:
    """Hard limits of this process, and its control group's. `connections` is KELVIN_CONNECTIONS."""
    yield judge_descriptors(_hard(resource.RLIMIT_NOFILE), connections)
    yield judge_processes(_hard(resource.RLIMIT_NPROC), cgroup_number("pids.max"))
    yield judge_locked_memory(_hard(resource.RLIMIT_MEMLOCK))
    yield judge_cores(core_count(), _quota())


def core_count() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def _hard(which: int) -> int | None:
    """None is unlimited, here and below."""
    limit = resource.getrlimit(which)[1]
    return None if limit == resource.RLIM_INFINITY else limit


def _quota() -> float | None:
    """Cores that `cpu.max` gives."""
    own = try_text(Path("/proc/self/cgroup")).rpartition("::")[2].lstrip("/")
    words = (try_text(CGROUP / own / "cpu.max") or try_text(CGROUP / "cpu.max")).split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else None


def judge_descriptors(hard: int | None, connections: int) -> Finding:
    """Of one process. `connections` is how many callers may be connected."""
    wanted = connections * FILES_PER_REQUEST + FILES_BESIDE
    check, mend = "limit nofile", f"LimitNOFILE={max(wanted, 65536)} in the unit, or ulimit -Hn {max(wanted, 65536)}"
    if hard is None or hard >= wanted:
        return Finding(check, Level.OK, f"hard limit {'none' if hard is None else hard}")
    served = max(0, (hard - FILES_BESIDE) // FILES_PER_REQUEST)
    cost = f"about {served} callers at once are served, the rest is refused"
    return Finding(check, Level.FAIL if hard < FILES_BESIDE else Level.WARN, f"hard limit {hard}", cost, mend)


def judge_processes(user: int | None, cgroup: int | None) -> Finding:
    """Of the user and of the control group."""
    limits = [(name, limit) for name, limit in (("nproc", user), ("pids.max", cgroup)) if limit is not None]
    seen = ", ".join(f"{name} {limit}" for name, limit in limits) or "no limit"
    least = min((limit for _, limit in limits), default=None)
    if least is None or least >= 512:
        return Finding("limit nproc", Level.OK, seen)
    cost = "a replica has a dozen threads: standbys can't be forked, starts are refused"
    return Finding(
        "limit nproc", Level.FAIL if least < 64 else Level.WARN, seen, cost, "TasksMax=4096, ulimit -Hu 4096"
    )


def judge_locked_memory(limit_bytes: int | None) -> Finding:
    """Judge the limit of one process. None: there is no limit."""
    seen = "none" if limit_bytes is None else as_bytes(limit_bytes)
    if limit_bytes is None or limit_bytes >= GB:
        return Finding("limit memlock", Level.OK, seen)
    cost = "nothing here: memory is locked only for copies to a GPU"
    return Finding("limit memlock", Level.NOTE, seen, cost, "LimitMEMLOCK=infinity, on a machine with a GPU")


def judge_cores(cores: int, quota: float | None) -> Finding:
    """`quota` is the control group's, in cores."""
    seen = f"{cores} cores" + ("" if quota is None else f", quota {quota:g}")
    if quota is not None and quota < cores:
        cost = "replicas are stopped for milliseconds when the quota is used up: uneven tokens"
        return Finding("processor", Level.WARN, seen, cost, "CPUQuota= empty, or cpusets instead of a quota")
    if cores < 2:
        return Finding(
            "processor", Level.WARN, seen, "services and replicas take turns: slow starts", "2 cores or more"
        )
    return Finding("processor", Level.OK, seen)
