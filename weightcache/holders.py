"""Processes that were sent slabs: known by a pidfd, forgotten when they die, and their slabs with them."""

import asyncio
import os
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

_SO_PEERPIDFD: Final = 77  # Linux 6.5: names the process itself, whatever became of its number


@dataclass(eq=False, slots=True)
class Holder:
    """A living process, and the end of each of its leases: set when it dies."""

    number: int
    pid: int
    pidfd: int
    leases: set[asyncio.Event] = field(default_factory=set)


class Holders:
    """One holder per process, however many leases it has. `forget` is called with the number of each that died."""

    def __init__(self, forget: Callable[[int], None]) -> None:
        self._forget = forget
        self._by_pid: dict[int, Holder] = {}
        self._next = 0

    def __repr__(self) -> str:
        return f"<Holders {sorted(self._by_pid)}>"

    @property
    def count(self) -> int:
        """Living processes that may have slabs mapped."""
        return len(self._by_pid)

    def of(self, peer: socket.socket) -> Holder:
        """The process that connected. Raises ProcessLookupError where it is dead already."""
        pidfd, pid = _peer(peer)
        if _is_dead(pidfd):
            os.close(pidfd)
            raise ProcessLookupError(pid)
        known = self._by_pid.get(pid)
        if known is not None and _is_dead(known.pidfd):
            self._died(known)  # its number was taken over before the loop heard of its death
            known = None
        if known is not None:
            os.close(pidfd)
            return known
        holder = Holder(self._next, pid, pidfd)
        self._next += 1
        self._by_pid[pid] = holder
        asyncio.get_running_loop().add_reader(pidfd, self._died, holder)
        return holder

    def close(self) -> None:
        """Stop watching; the dead and the living are forgotten alike."""
        for holder in self._by_pid.values():
            asyncio.get_running_loop().remove_reader(holder.pidfd)
            os.close(holder.pidfd)
        self._by_pid.clear()

    def _died(self, holder: Holder) -> None:
        asyncio.get_running_loop().remove_reader(holder.pidfd)
        os.close(holder.pidfd)
        del self._by_pid[holder.pid]
        for ended in holder.leases:
            ended.set()
        self._forget(holder.number)


def _peer(sock: socket.socket) -> tuple[int, int]:
    """A pidfd of the connected process, and its number (SO_PEERCRED)."""
    pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD), pid
    except OSError:  # an older kernel
        return os.pidfd_open(pid), pid


def _is_dead(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
