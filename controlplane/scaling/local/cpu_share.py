"""Threads and KV memory of a replica on this machine. The replica table limits the number of replicas."""

from pathlib import Path

from kelvin.contracts.serving.machine import available_bytes, kv_bytes_for, threads_for


class CpuShare:
    """The cores and the memory of this machine, shared by its replicas."""

    def __init__(self, cores: int, threads_cap: int, kv_bytes: int) -> None:
        self._cores = cores
        self._threads_cap = threads_cap
        self._kv_bytes = kv_bytes

    def __repr__(self) -> str:
        return f"<CpuShare cores={self._cores} threads<={self._threads_cap} kv={self._kv_bytes >> 20} MiB>"

    def threads(self, replicas: int) -> int:
        """Return the compute threads of each of `replicas` replicas."""
        return threads_for(self._cores, replicas, self._threads_cap)

    def kv_bytes(self) -> int:
        """Return the KV memory of one more replica, by the memory that is available now (read in microseconds)."""
        return kv_bytes_for(self._kv_bytes, available_bytes(Path("/proc/meminfo").read_text()))
