"""What a replica gets of this machine: threads and KV memory. How many replicas there may be is the table's slots."""

from pathlib import Path
from typing import Final

MIN_KV_BYTES: Final = 64 << 20


def threads_for(cores: int, replicas: int, cap: int) -> int:
    """An equal share of the cores, one at least. Two threads that contend for one core are slower than one."""
    return min(cap, max(1, cores // max(1, replicas)))


def kv_bytes_for(wanted: int, available: int) -> int:
    """What was asked for, at most half of the memory that is available, and never under 64 MiB."""
    return max(MIN_KV_BYTES, min(wanted, available // 2))


class Device:
    """The CPU of this machine, shared by its replicas."""

    def __init__(self, cores: int, threads_cap: int, kv_bytes: int, meminfo: Path = Path("/proc/meminfo")) -> None:
        self._cores = cores
        self._threads_cap = threads_cap
        self._kv_bytes = kv_bytes
        self._meminfo = meminfo

    def __repr__(self) -> str:
        return f"<Device cores={self._cores} threads<={self._threads_cap} kv={self._kv_bytes >> 20} MiB>"

    def threads(self, replicas: int) -> int:
        """Compute threads of one of `replicas`."""
        return threads_for(self._cores, replicas, self._threads_cap)

    def kv_bytes(self) -> int:
        """KV memory for one more replica, by what the kernel says is available now (a few microseconds in procfs)."""
        return kv_bytes_for(self._kv_bytes, available_bytes(self._meminfo.read_text()))


def available_bytes(meminfo: str) -> int:
    """MemAvailable of proc(5)'s meminfo. Raises ValueError without it."""
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise ValueError("meminfo has no MemAvailable")
