"""A machine's capacity for replicas, and the share of one replica: threads and KV memory. Pure."""

from typing import Annotated, Final

from msgspec import Meta

from kelvin.contracts.wire import Fact

MIN_KV_BYTES: Final = 64 << 20


class Machine(Fact, frozen=True):
    """The capacity of a machine that its replicas share. Every component computes a start's share from it."""

    slots: Annotated[int, Meta(ge=1)]  # replicas at once
    cores: Annotated[int, Meta(ge=1)]
    threads_cap: Annotated[int, Meta(ge=1)]
    kv_bytes: Annotated[int, Meta(ge=0)]  # per replica, if memory allows


def threads_for(cores: int, replicas: int, cap: int) -> int:
    """Return an equal share of the cores, from 1 to `cap`. Two threads that contend for a core are slower than one."""
    return min(cap, max(1, cores // max(1, replicas)))


def kv_bytes_for(requested_bytes: int, available: int) -> int:
    """Return `requested_bytes`, at most half of the available memory, and at least 64 MiB."""
    return max(MIN_KV_BYTES, min(requested_bytes, available // 2))


def available_bytes(meminfo: str) -> int:
    """Return MemAvailable from the text of /proc/meminfo, in bytes. Raises ValueError if it is missing."""
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise ValueError("meminfo has no MemAvailable")
