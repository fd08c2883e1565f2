"""Track the processes that received slabs, until they die or have unmapped all of them.

A pidfd identifies a process. Possible mappings are kept by chunk and place, to find the processes that map a damaged
chunk: other processes may have the same slab without that chunk, or the same chunk at another place.
"""

import asyncio
import os
import select
import socket
import struct
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kelvin.blobstore.bounded_gather import cancel_and_wait
from weightcache.host.policy.extents import SlabRange

_SO_PEERPIDFD: Final = 77  # Linux 6.5: identifies the process even if its pid was reused


@dataclass(eq=False, slots=True)
class Holder:
    """A living process, and one event per lease that is set when the process dies."""

    number: int
    pid: int
    pidfd: int
    leases: set[asyncio.Event] = field(default_factory=set)
    places: dict[int, Mapping[str, SlabRange]] = field(default_factory=dict)  # of each lent version, by object id
    lend_count: int = 0

    def record_lent(self, places: Mapping[str, SlabRange]) -> None:
        """Record that the process received the slabs of these chunks. It may have them mapped until it dies."""
        self.places[id(places)] = places
        self.lend_count += 1

    def may_map(self, digest: str, place: SlabRange) -> bool:
        """Return whether the process received a version with the chunk at that place."""
        return any(places.get(digest) == place for places in self.places.values())


class MappingTracker:
    """Tracks one holder per process, with any number of leases. Calls `on_holder_end` with the number of each."""

    def __init__(self, on_holder_end: Callable[[int], None]) -> None:
        self._on_holder_end = on_holder_end
        self._by_pid: dict[int, Holder] = {}
        self._checks: set[asyncio.Task[None]] = set()
        self._next_number = 0

    def __repr__(self) -> str:
        return f"<MappingTracker {sorted(self._by_pid)}>"

    @property
    def holder_count(self) -> int:
        """Return the number of living processes that may have slabs mapped."""
        return len(self._by_pid)

    @property
    def pending_checks(self) -> int:
        """Return the number of running checks of a process's mappings."""
        return len(self._checks)

    def pids_mapping(self, digest: str, place: SlabRange) -> tuple[int, ...]:
        """Return the living processes that may have the chunk mapped from that place."""
        return tuple(sorted(holder.pid for holder in self._by_pid.values() if holder.may_map(digest, place)))

    def track_process(self, peer: socket.socket) -> Holder:
        """Return the holder of the connected process. Raises ProcessLookupError if the process is dead."""
        pidfd, pid = _open_pidfd(peer)
        if _is_dead(pidfd):
            os.close(pidfd)
            raise ProcessLookupError(pid)
        tracked = self._by_pid.get(pid)
        if tracked is not None and _is_dead(tracked.pidfd):
            self._end_holder(tracked)  # its pid was reused before the loop noticed its death
            tracked = None
        if tracked is not None:
            os.close(pidfd)
            return tracked
        holder = Holder(self._next_number, pid, pidfd)
        self._next_number += 1
        self._by_pid[pid] = holder
        asyncio.get_running_loop().add_reader(pidfd, self._end_holder, holder)
        return holder

    def note_lease_end(self, holder: Holder, inodes: Collection[int]) -> None:
        """Record that a lease of the process has ended. After the last lease, check its mappings in a thread. If the
        process no longer maps any of the memory files `inodes`, it is forgotten as if it were dead.
        """
        if self._is_idle(holder):
            task = asyncio.create_task(self._check_mappings(holder, holder.lend_count, inodes))
            self._checks.add(task)
            task.add_done_callback(self._checks.discard)

    async def close(self) -> None:
        """Stop watching, and forget all processes."""
        await cancel_and_wait(tuple(self._checks))
        for holder in self._by_pid.values():
            asyncio.get_running_loop().remove_reader(holder.pidfd)
            os.close(holder.pidfd)
        self._by_pid.clear()

    def _is_idle(self, holder: Holder) -> bool:
        """Return whether the holder is tracked and has no lease."""
        return self._by_pid.get(holder.pid) is holder and not holder.leases

    async def _check_mappings(self, holder: Holder, times_lent: int, inodes: Collection[int]) -> None:
        """Ask the kernel. Forget the process if it has none of the files and received nothing meanwhile."""
        has_mapping = await asyncio.to_thread(_has_mapping, holder.pid, inodes)
        if not has_mapping and self._is_idle(holder) and holder.lend_count == times_lent:
            self._end_holder(holder)

    def _end_holder(self, holder: Holder) -> None:
        asyncio.get_running_loop().remove_reader(holder.pidfd)
        os.close(holder.pidfd)
        del self._by_pid[holder.pid]
        for ended in holder.leases:
            ended.set()
        self._on_holder_end(holder.number)


def credentials(sock: socket.socket) -> tuple[int, int]:
    """Return pid and uid of the process that connected, as of then (SO_PEERCRED, unix(7)). The pid is 0 for a process
    outside our PID namespace (pid_namespaces(7)). The uid is -1 if the kernel can't map it here.
    """
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def _open_pidfd(sock: socket.socket) -> tuple[int, int]:
    """Return a pidfd of the connected process, and its pid."""
    pid, _ = credentials(sock)
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD), pid
    except OSError:  # an older kernel
        return os.pidfd_open(pid), pid


def _is_dead(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _has_mapping(pid: int, inodes: Collection[int]) -> bool:
    """Return whether the process has one of these memory files mapped or open, by proc(5).

    If the kernel does not answer, assume that it has; for a dead process too, since its pidfd reports the death. Only
    inode numbers are compared, so a collision keeps the process. Descriptors in transit are not seen. Call it in a
    thread: the duration grows with the process's mappings and files.
    """
    wanted = set(inodes)
    proc = Path(f"/proc/{pid}")
    try:
        maps = (proc / "maps").read_bytes().splitlines()
        # Fields: range, mode, offset, device, inode, name.
        if not maps or any(int(line.split(None, 5)[4]) in wanted for line in maps):
            return True
        for fd in os.listdir(proc / "fd"):
            with suppress(FileNotFoundError):  # closed meanwhile
                if os.stat(proc / "fd" / fd).st_ino in wanted:
                    return True
    except OSError:
        return True
    return False
