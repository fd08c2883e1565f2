"""The lease socket: one request and one lease per connection, ended by the connection's end or the process's."""

import asyncio
import logging
import os
import socket
import time
from array import array
from collections.abc import Awaitable, Collection
from typing import Final

from contracts.errors import Failure, InvalidRequest, Refused
from contracts.names import dns_label
from contracts.problem import code_of, to_wire
from contracts.wire import decode, encode
from service.cause import begin
from weightcache.arena import Arena
from weightcache.counters import Counters
from weightcache.holders import Holder, Holders, uid_of
from weightcache.residents import Arrival, Residents
from weightcache.wire import MAX_MESSAGE_BYTES, LeaseReply, LeaseRequest, SlabFact

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 1024
REQUEST_TIMEOUT_S: Final = 5.0
LOAD_TIMEOUT_S: Final = 900.0  # a client that waits less hangs up, which cancels


class LeaseServer:
    """Serves `listener` (SEQPACKET) from `open` to `close`, to processes of its own user and of root."""

    def __init__(self, listener: socket.socket, residents: Residents, arena: Arena, counters: Counters) -> None:
        self._listener = listener
        self._residents = residents
        self._arena = arena
        self._counters = counters
        self._holders = Holders(arena.drop_holder)
        self._tasks: set[asyncio.Task[None]] = set()
        self.active = 0
        self.accepting = False

    def __repr__(self) -> str:
        return f"<LeaseServer leases={self.active} connections={self.connections} {self._holders!r}>"

    @property
    def connections(self) -> int:
        """Clients that are connected, granted or not."""
        return len(self._tasks)

    @property
    def holder_count(self) -> int:
        """Living processes that may have slabs mapped."""
        return self._holders.count

    def pids_of(self, holders: Collection[int]) -> tuple[int, ...]:
        """Numbers of the processes."""
        return self._holders.pids_of(holders)

    def open(self) -> None:
        """Begin to accept."""
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)
        self.accepting = True

    async def close(self) -> None:
        """Ends all leases; processes keep what they mapped."""
        self.accepting = False
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._holders.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            log.error("accept failed", extra={"error": str(error)})
            return
        if self.connections >= MAX_CONNECTIONS:
            sock.close()  # the client reads an end and reports the cache unavailable
            return
        sock.setblocking(False)
        task = asyncio.create_task(self._serve(sock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                raw = await loop.sock_recv(sock, MAX_MESSAGE_BYTES)
            if raw:
                # Nothing more is expected: whatever comes is the end.
                await _first(self._lease(sock, raw), loop.sock_recv(sock, 1))
        except (TimeoutError, OSError) as error:
            log.info("a lease's client is gone", extra={"error": repr(error)})
        except Exception:
            log.exception("a lease failed")
        finally:
            sock.close()

    async def _lease(self, sock: socket.socket, raw: bytes) -> None:
        """Returns where it was refused; otherwise lasts until it is cancelled or the process dies."""
        try:
            self._check_user(sock)
            request = decode(raw, LeaseRequest, what="lease request")
            dns_label(request.tenant, "tenant")
            if request.request_id is not None:
                begin(request.request_id)
            holder, ended = await self._grant(sock, request)
        except Refused as refused:
            self._refuse(sock, refused.failure)
            return
        self.active += 1
        holder.leases.add(ended)
        try:
            await ended.wait()
        finally:
            holder.leases.discard(ended)
            self.active -= 1

    def _check_user(self, sock: socket.socket) -> None:
        """The directory's mode keeps others out; where that was loosened, this does. Raises `Refused`."""
        uid = uid_of(sock)
        if not may_lease(uid):
            self._counters.strangers += 1
            log.warning("another user asked for a lease", extra={"uid": uid})
            raise Refused(InvalidRequest("uid", str(uid), "must be root's, or that of the weight cache's own user"))

    async def _grant(self, sock: socket.socket, request: LeaseRequest) -> tuple[Holder, asyncio.Event]:
        """Send the answer. Raises OSError where the client is gone."""
        async with self._residents.pinned(request.tenant, request.version, LOAD_TIMEOUT_S, request.engines) as arrival:
            # No awaiting from here on: between sending and holding nothing may be evicted, nor the process forgotten.
            holder = self._holders.of(sock)
            self._send(sock, arrival)
            self._arena.index.hold(holder.number, arrival.resident.slabs, time.monotonic())
            self._counters.leases_granted += 1
            self._counters.leases_hot += arrival.tally is arrival.resident.tally
            seen = {"tenant": request.tenant, "version": request.version, "chunks_by_tier": arrival.tally.chunks}
            log.info("leased", extra=seen)
            return holder, asyncio.Event()

    def _send(self, sock: socket.socket, arrival: Arrival) -> None:
        resident = arrival.resident
        slabs = [self._arena.slab(number) for number in resident.slabs]
        reply = LeaseReply(
            ok=True,
            manifest_bytes=resident.manifest_bytes,
            layout_bytes=resident.layout_bytes,
            slabs=tuple(SlabFact(id=n, bytes=slab.length) for n, slab in zip(resident.slabs, slabs, strict=True)),
            chunks_by_tier=arrival.tally.chunks,
            bytes_by_tier=arrival.tally.bytes,
        )
        descriptors = array("i", [resident.papers.fd, *(slab.fd for slab in slabs)])
        sock.sendmsg([encode(reply)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])

    def _refuse(self, sock: socket.socket, failure: Failure) -> None:
        self._counters.leases_refused[code_of(failure)] += 1
        sock.send(encode(LeaseReply(ok=False, failure=to_wire(failure))))


def may_lease(uid: int) -> bool:
    """Whether a process of this user may be sent weights: of our own, or of root, who can read them anyway."""
    return uid in (0, os.geteuid())


async def _first(work: Awaitable[object], end: Awaitable[object]) -> None:
    """Until either is done; the other is cancelled, and gone when this returns."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(end)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
