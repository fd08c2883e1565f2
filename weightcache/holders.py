"""Processes that were sent slabs: known by a pidfd, forgotten when they die, and their slabs with them."""

import asyncio
import os
import select
import socket
import struct
from collections.abc import Callable, Collection
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

    def pids_of(self, numbers: Collection[int]) -> tuple[int, ...]:
        """The processes of these holders, as far as they live."""
        return tuple(sorted(holder.pid for holder in self._by_pid.values() if holder.number in numbers))

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


def uid_of(sock: socket.socket) -> int:
    """The user as which the other side connected; -1 where the kernel can't name it here."""
    return _credentials(sock)[1]


def _credentials(sock: socket.socket) -> tuple[int, int]:
    """Number and user of the process that connected, as they were then (SO_PEERCRED, unix(7))."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def _peer(sock: socket.socket) -> tuple[int, int]:
    """A pidfd of the connected process, and its number."""
    pid, _ = _credentials(sock)
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD), pid
    except OSError:  # an older kernel
        return os.pidfd_open(pid), pid


def _is_dead(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
