"""The lease socket: one request and one lease per connection. The lease ends with the connection or the process.

A progressive lease gets its slabs while they are being filled, and messages about which parts are ready.
"""

import asyncio
import logging
import os
import socket
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from msgspec.structs import replace

from kelvin.blobstore.bounded_gather import cancel_and_wait
from kelvin.contracts.backoff import should_log
from kelvin.contracts.errors import Failure, InvalidRequest, NotFound, Refused
from kelvin.contracts.names import require_dns_label
from kelvin.contracts.problem import to_wire
from kelvin.contracts.wire import decode, encode
from kelvin.process.race import first_completed
from kelvin.process.request_context import set_request_context
from weightcache.client.lease_protocol import MAX_MESSAGE_BYTES, LeaseReply, LeaseRequest, SlabFact
from weightcache.client.spans_policy import merge_spans
from weightcache.counters import Counters
from weightcache.fetch.version_loader import VersionLoader
from weightcache.host.arena import Arena
from weightcache.host.mapping_tracker import Holder, MappingTracker, credentials
from weightcache.host.policy.extents import SlabRange
from weightcache.host.resident_version import LoadProgress, ResidentVersion

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 1024
REQUEST_TIMEOUT_S: Final = 5.0
SEND_TIMEOUT_S: Final = 60.0
ACCEPT_PAUSE_S: Final = 0.1  # time for other code to close a descriptor
LOAD_TIMEOUT_S: Final = 900.0  # a client with a shorter timeout hangs up, which cancels the load


@dataclass(slots=True)
class _LeaseConnection:
    """A connection: the version whose slabs were sent, the stack that undoes the lease, the death of its process."""

    sock: socket.socket
    stack: ExitStack
    resident: ResidentVersion | None = None
    process_ended: asyncio.Event = field(default_factory=asyncio.Event)


class LeaseServer:
    """Serves `listener` (SEQPACKET) from `open` to `close`, to processes of its own user and of root."""

    def __init__(
        self,
        listener: socket.socket,
        version_loader: VersionLoader,
        arena: Arena,
        counters: Counters,
        tenant: str | None = None,
    ) -> None:
        """With a `tenant`, lend only versions of that tenant: a client states its tenant without proof."""
        self._tenant = tenant
        self._listener = listener
        self._version_loader = version_loader
        self._arena = arena
        self._counters = counters
        self._mappings = MappingTracker(arena.drop_holder)
        self._tasks: set[asyncio.Task[None]] = set()
        self._accept_failures = 0  # consecutive failures of accept
        self.lease_count = 0
        self.is_accepting = False

    def __repr__(self) -> str:
        return f"<LeaseServer leases={self.lease_count} connections={self.connection_count} {self._mappings!r}>"

    @property
    def connection_count(self) -> int:
        """Return the number of connected clients, with or without a lease."""
        return len(self._tasks)

    @property
    def holder_count(self) -> int:
        """Return the number of living processes that may have slabs mapped."""
        return self._mappings.holder_count

    def pids_mapping(self, digest: str, place: SlabRange) -> tuple[int, ...]:
        """Return the living processes that may have the chunk mapped from that place."""
        return self._mappings.pids_mapping(digest, place)

    def open(self) -> None:
        """Start to accept connections on the listener."""
        self._listener.setblocking(False)
        self.is_accepting = True
        self._listen()

    async def close(self) -> None:
        """End all leases. Processes keep their mappings."""
        self.is_accepting = False
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()
        await cancel_and_wait(tuple(self._tasks))
        await self._mappings.close()

    def _listen(self) -> None:
        if self.is_accepting:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            self._accept_failures += 1
            if should_log(self._accept_failures):
                log.error("accept failed", extra={"error": str(error), "failures": self._accept_failures})
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener.fileno())  # otherwise the waiting client would trigger this again at once
            loop.call_later(ACCEPT_PAUSE_S, self._listen)
            return
        self._accept_failures = 0
        if self.connection_count >= MAX_CONNECTIONS:
            sock.close()  # the client reads the end, and reports the cache as unavailable
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
                # No further message is expected: any bytes, or the end, end the lease.
                await first_completed(self._serve_lease(sock, raw), loop.sock_recv(sock, 1))
        except (TimeoutError, OSError) as error:
            log.info("a lease's client is gone", extra={"error": repr(error)})
        except Exception:
            log.exception("a lease failed")
        finally:
            sock.close()

    async def _serve_lease(self, sock: socket.socket, raw: bytes) -> None:
        """Serve one lease. Return if it was refused; otherwise last until cancelled or until the process dies."""
        with ExitStack() as stack:
            connection = _LeaseConnection(sock, stack)
            try:
                self._check_user(sock)
                request = decode(raw, LeaseRequest, field="lease request")
                self.check_tenant(require_dns_label(request.tenant, "tenant"), request.version)
                if request.request_id is not None:
                    set_request_context(request.request_id)
                await self._grant(connection, request)
            except Refused as refused:
                await self._refuse(sock, refused.failure)
                return
            await connection.process_ended.wait()

    def _check_user(self, sock: socket.socket) -> None:
        """Refuse other users, in case the mode of the directory does not. Raises `Refused`."""
        pid, uid = credentials(sock)
        # A process outside this PID namespace can't be identified, and its death not seen: its slabs would be reused.
        if pid == 0:
            self._counters.strangers += 1
            log.warning("a process of another PID namespace asked for a lease", extra={"uid": uid})
            rule = "must be of a process that the weight cache's PID namespace has (hostPID)"
            raise Refused(InvalidRequest("pid", "0", rule))
        if not may_lease(uid):
            self._counters.strangers += 1
            log.warning("another user asked for a lease", extra={"uid": uid})
            raise Refused(InvalidRequest("uid", str(uid), "must be root's, or that of the weight cache's own user"))

    def check_tenant(self, tenant: str, version: str) -> None:
        """Raise `Refused(NotFound)` if this agent serves another tenant: to this one, the version does not exist."""
        if self._tenant not in (None, tenant):
            raise Refused(NotFound("version", version))

    async def _grant(self, connection: _LeaseConnection, request: LeaseRequest) -> None:
        """Send the response, once the version is loaded. Raises OSError if the client is gone."""
        on_loading = partial(self._stream_progress, connection) if request.progressive else None
        version_loader = self._version_loader
        async with version_loader.pin_version(
            request.tenant, request.version, LOAD_TIMEOUT_S, request.engines, on_loading
        ) as loaded:
            whole_reply = LeaseReply(ok=True, chunks_by_tier=loaded.tally.chunks, bytes_by_tier=loaded.tally.bytes)
            if connection.resident is loaded.resident:
                await _send(connection.sock, whole_reply)
            else:
                if connection.resident is not None:  # the client may not have read all earlier messages
                    await _wait_until_writable(connection.sock)
                self._send_slabs(connection, loaded.resident, whole_reply)
            self._counters.leases_granted += 1
            self._counters.leases_hot += loaded.was_hot
            fields = {"tenant": request.tenant, "version": request.version, "chunks_by_tier": loaded.tally.chunks}
            log.info("leased", extra=fields)

    def _note_lease_end(self, holder: Holder) -> None:
        """Start to check whether a living process has unmapped the slabs of its leases. If so, they are released."""
        slabs = self._arena.index.slabs_of_holder(holder.number)
        self._mappings.note_lease_end(holder, [os.fstat(self._arena.slab(number).fd).st_ino for number in slabs])

    async def _stream_progress(self, connection: _LeaseConnection, progress: LoadProgress) -> None:
        """Send the slabs as early as possible, then the parts that become ready, until cancelled."""
        resident = await progress.wait_until_placed()
        if not await self._arena.wait_until_allocated(resident.slabs) or progress.resident is not resident:
            return
        self._send_slabs(connection, resident, LeaseReply(ok=True, whole=False))
        sent_count = 0
        while spans := await progress.ready_since(resident, sent_count):
            await _send(connection.sock, LeaseReply(ok=True, whole=False, ready=merge_spans(spans)))
            sent_count += len(spans)

    def _send_slabs(self, connection: _LeaseConnection, resident: ResidentVersion, reply: LeaseReply) -> None:
        """Send the reply with the slabs, which stay until the process has none of them mapped.

        The slabs are pinned now. This function must not await: between sending and holding, no slab may be evicted and
        the process not forgotten.
        """
        holder = self._mappings.track_process(connection.sock)
        slabs = [self._arena.slab(number) for number in resident.slabs]
        reply = replace(
            reply,
            manifest_bytes=resident.manifest_bytes,
            layout_bytes=resident.layout_bytes,
            slabs=tuple(SlabFact(id=n, bytes=slab.length) for n, slab in zip(resident.slabs, slabs, strict=True)),
        )
        descriptors = array("i", [resident.documents.fd, *(slab.fd for slab in slabs)])
        connection.sock.sendmsg([encode(reply)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        self._arena.index.add_holder(holder.number, resident.slabs, time.monotonic())
        holder.record_lent(resident.places)
        if connection.resident is None:
            connection.stack.enter_context(self._hold_lease(holder, connection.process_ended))
        connection.resident = resident

    @contextmanager
    def _hold_lease(self, holder: Holder, ended: asyncio.Event) -> Iterator[None]:
        """Hold a lease for the process while the block runs. The death of the process sets `ended`."""
        self.lease_count += 1
        holder.leases.add(ended)
        try:
            yield
        finally:
            holder.leases.discard(ended)
            self.lease_count -= 1
            if self.is_accepting:
                self._note_lease_end(holder)

    async def _refuse(self, sock: socket.socket, failure: Failure) -> None:
        self._counters.leases_refused[failure.code] += 1
        await _send(sock, LeaseReply(ok=False, failure=to_wire(failure)))


def may_lease(uid: int) -> bool:
    """Return whether this user's processes may receive weights: our own user, or root, which can read them anyway."""
    return uid in (0, os.geteuid())


async def _wait_until_writable(sock: socket.socket) -> None:
    """Wait until a message can be sent without blocking. Raises TimeoutError if the client does not read."""
    loop, writable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_writer(sock, writable.set)
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await writable.wait()
    finally:
        loop.remove_writer(sock)


async def _send(sock: socket.socket, reply: LeaseReply) -> None:
    """Send the reply. Raises OSError or TimeoutError if the client is gone or does not read."""
    async with asyncio.timeout(SEND_TIMEOUT_S):
        await asyncio.get_running_loop().sock_sendall(sock, encode(reply))
