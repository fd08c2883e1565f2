"""What a machine has for replicas, and what one of them gets of it: threads and KV memory. Pure."""

from typing import Annotated, Final

from msgspec import Meta

from kelvin.contracts.wire import Fact

MIN_KV_BYTES: Final = 64 << 20


class Machine(Fact, frozen=True):
    """The CPU of a machine, shared by its replicas: by this a start is given its part, whoever decides it."""

    slots: Annotated[int, Meta(ge=1)]  # replicas at once
    cores: Annotated[int, Meta(ge=1)]
    threads_cap: Annotated[int, Meta(ge=1)]
    kv_bytes: Annotated[int, Meta(ge=0)]  # of a replica, where there is room


def threads_for(cores: int, replicas: int, cap: int) -> int:
    """An equal share of the cores, one at least. Two threads that contend for one core are slower than one."""
    return min(cap, max(1, cores // max(1, replicas)))


def kv_bytes_for(wanted: int, available: int) -> int:
    """What was asked for, at most half of the memory that is available, and never under 64 MiB."""
    return max(MIN_KV_BYTES, min(wanted, available // 2))


def available_bytes(meminfo: str) -> int:
    """MemAvailable of proc(5)'s meminfo. Raises ValueError without it."""
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise ValueError("meminfo has no MemAvailable")
