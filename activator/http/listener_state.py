"""State that all connections of one listener share: TLS context, limits, counters, and the start queue of requests."""

import asyncio
import ssl
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

from activator.accounting.metrics import RequestMetrics
from activator.http.address_limits_policy import AddressLimiter, AddressLimits
from kelvin.contracts.traffic_errors import AddressBusy

K = TypeVar("K")
V = TypeVar("V")
STARTS_PER_TICK: Final = 8  # about a millisecond of work


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of a client before it has authenticated: bytes and seconds of a connection."""

    head_bytes: int
    head_s: float
    handshake_s: float
    idle_s: int
    lame_duck_s: int  # idle timeout once another process has taken over
    connections: int
    headers: int
    body_rate: float  # bytes/s, over each `head_s`
    address: AddressLimits
    stall_s: float = 20.0  # a client that accepts no data for so long is cut


class PendingRequest(Protocol):
    """A request that may have to wait for its start. If it starts or is refused at once, only that method is called."""

    @property
    def source(self) -> str | None:
        """The source of its address, or None for a trusted address."""
        ...

    def credential(self) -> bytes:
        """Return the credential as it arrived. It has not been checked."""
        ...

    def try_begin(self) -> bool:
        """Start serving. Return False if the client has left. If the request waited, that uses no start. Call this or
        `refuse`, once.
        """
        ...

    def refuse(self) -> None:
        """Refuse the request, because the drain is over."""
        ...


class RequestStarter:
    """Limit how many requests start in one iteration of the event loop.

    After a stall, hundreds of requests are readable at once. Starting them all would delay replies from replicas,
    which free the slots that other requests wait for, so throughput would fall as load rises. Requests above the limit
    wait in a queue and start in later iterations.

    The queue is round-robin over client addresses, then over credentials of one address, then first come, first served.
    """

    def __init__(self, starts_per_tick: int = STARTS_PER_TICK) -> None:
        self._starts_per_tick = starts_per_tick
        self._starts_left = starts_per_tick  # left in this iteration
        self._queues: OrderedDict[str | None, OrderedDict[bytes, deque[PendingRequest]]] = OrderedDict()
        self._count = 0
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<RequestStarter waiting={self._count}{' closed' if self._is_closed else ''}>"

    def enter(self, pending_request: PendingRequest) -> None:
        """Start the request now, or in a later iteration."""
        if self._is_closed:
            pending_request.refuse()
            return
        if self._starts_left == self._starts_per_tick:
            asyncio.get_running_loop().call_soon(self._begin_tick)
        if self._starts_left:
            self._starts_left -= 1
            pending_request.try_begin()
        else:
            queues = self._queues.setdefault(pending_request.source, OrderedDict())
            queues.setdefault(pending_request.credential(), deque()).append(pending_request)
            self._count += 1

    def close(self) -> None:
        """Refuse all waiting requests and all later ones, because the drain is over."""
        self._is_closed = True
        while self._count:
            self._pop_next().refuse()

    def _begin_tick(self) -> None:
        self._starts_left = self._starts_per_tick
        if self._count:
            asyncio.get_running_loop().call_soon(self._begin_tick)
        while self._starts_left and self._count:
            self._starts_left -= self._pop_next().try_begin()

    def _pop_next(self) -> PendingRequest:
        source, queues = next(iter(self._queues.items()))
        credential, queue = next(iter(queues.items()))
        pending_request = queue.popleft()
        self._count -= 1
        _rotate(queues, credential, is_empty=not queue)
        _rotate(self._queues, source, is_empty=not queues)
        return pending_request


@dataclass(slots=True)
class ListenerState:
    """State of one listener. Not thread-safe: use from one event loop."""

    context: ssl.SSLContext
    limits: ConnectionLimits
    metrics: RequestMetrics
    address_limiter: AddressLimiter = field(init=False)
    request_starter: RequestStarter = field(default_factory=RequestStarter)
    open_connections: int = 0
    open_handshakes: int = 0  # of `open_connections`, those still in their handshake
    is_replaced: bool = False  # another process has taken over: drain as a lame duck

    def __post_init__(self) -> None:
        self.address_limiter = AddressLimiter(self.limits.address)

    def try_admit_connection(self, address: str, now_s: float) -> tuple[bool, str | None]:
        """Return whether a new connection is accepted, and its source. The source of a trusted address is None."""
        source = self.address_limiter.source(address)
        if self.open_connections >= self.limits.connections:
            self.metrics.count_refused_connection("all")
            return False, None
        if source is not None and not self.address_limiter.try_open(source, now_s):
            self.metrics.count_refused_connection("address")
            return False, None
        self.open_connections += 1
        self.open_handshakes += 1
        return True, source

    def check_request_rate(self, source: str, now_s: float) -> AddressBusy | None:
        """Count a request of a source. Return a failure, also counted in the metrics, if it is above its rate."""
        wait_s = self.address_limiter.check_request_rate(source, now_s)
        if wait_s is None:
            return None
        busy = AddressBusy(wait_s)
        self.metrics.count_refusal(busy)
        return busy

    def record_handshake_ended(self) -> None:
        """Record the end of a handshake, successful or not."""
        self.open_handshakes -= 1

    def record_connection_closed(self, source: str | None) -> None:
        """Release the place of an accepted connection."""
        self.open_connections -= 1
        if source is not None:
            self.address_limiter.record_closed(source)


def _rotate(queues: OrderedDict[K, V], group: K, *, is_empty: bool) -> None:
    """Move the group that was just served to the end, or remove it if it is empty."""
    if is_empty:
        del queues[group]
    else:
        queues.move_to_end(group)
