"""Kept connections to replicas. They close when the replica is removed and its last request has ended."""

import asyncio
from contextlib import suppress
from typing import Final

from activator import dependencies
from activator.upstream.background_tasks import BackgroundTasks
from activator.upstream.http1_client import Client
from kelvin.contracts.accounting.usage import Receipt, Receipts
from kelvin.contracts.roles import Role
from kelvin.contracts.wire import encode
from kelvin.ipc.connector import Connector, ConnectorFactory, SocketConnector

MAX_RECEIPTS: Final = 256  # at most 200 bytes each: a replica reads bodies up to this size
RECEIPT_TIMEOUT_S: Final = dependencies.RECEIPTS.timeout_s
LINGER_S: Final = 0.02  # far less than a replica waits for receipts before it exits
_PATH: Final = "/v1/receipts"
_JSON: Final = (("content-type", "application/json"),)


class ReceiptSender:
    """Tells a replica what was delivered and what is recorded, in batches, one call at a time.

    Deliveries are sent at once, because the replica charges by them if this activator dies. A durable record only lets
    the replica drop the request, so it waits for a batch. Lost receipts do no harm: the replica keeps the request's
    account, and the activator's record takes precedence in the ledger.
    """

    def __init__(self, http: Client, background_tasks: BackgroundTasks, linger_s: float = LINGER_S) -> None:
        self._http = http
        self._background_tasks = background_tasks
        self._linger_s = linger_s
        self._due: dict[str, Receipt] = {}
        self._send_task: asyncio.Task[None] | None = None
        self._urgent = asyncio.Event()

    def __repr__(self) -> str:
        return f"<ReceiptSender due={len(self._due)}>"

    def queue_receipt(self, receipt: Receipt) -> None:
        """Send the receipt soon. It replaces an earlier one of the same request."""
        self._due[receipt.request_id] = receipt
        if not receipt.recorded:
            self._urgent.set()
        if self._send_task is None:
            self._start_sending()

    async def close(self) -> None:
        """Wait until all receipts are sent, or can't be."""
        while self._send_task is not None:
            self._urgent.set()
            await asyncio.wait((self._send_task,))

    def _start_sending(self) -> None:
        self._send_task = self._background_tasks.start(self._send_receipts(), RECEIPT_TIMEOUT_S)

    async def _send_receipts(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._linger_s):
                await self._urgent.wait()
        self._urgent.clear()
        batch = [self._due.pop(request_id) for request_id in list(self._due)[:MAX_RECEIPTS]]
        try:
            response = await self._http.request("POST", _PATH, encode(Receipts(receipts=tuple(batch))), _JSON)
            try:
                await response.read()
            finally:
                response.release()
        except OSError:
            return  # the replica is gone, or its session is closed
        finally:
            self._send_task = None
            if self._due:
                self._start_sending()


class ReplicaSession:
    """The connections to one replica."""

    def __init__(self, connector: Connector, background_tasks: BackgroundTasks) -> None:
        # Slots bound the connections; receipts and cancellations need some more.
        self.http = Client(connector)
        self.background_tasks = background_tasks
        self.is_on_this_host = isinstance(connector, SocketConnector)
        self.receipt_sender = ReceiptSender(self.http, background_tasks)
        self.active_requests = 0
        self._retired = False

    async def retire(self) -> None:
        """Close now, or after the last request."""
        self._retired = True
        if self.is_over:
            await self.close()

    @property
    def is_over(self) -> bool:
        """Whether it is retired and has no request."""
        return self._retired and self.active_requests == 0

    async def close(self) -> None:
        """Close after queued receipts are sent. Cancelling closes at once."""
        try:
            await self.receipt_sender.close()
        finally:
            self.http.close()


class ReplicaSessions:
    """Kept connections to all replicas. `retain` drops those of removed replicas."""

    def __init__(self, connector_factory: ConnectorFactory, background_tasks: BackgroundTasks) -> None:
        self._connector_factory = connector_factory
        self._background_tasks = background_tasks
        self._sessions: dict[str, ReplicaSession] = {}  # by address

    def __repr__(self) -> str:
        return f"<ReplicaSessions replicas={len(self._sessions)}>"

    def ensure_session(self, address: str) -> ReplicaSession:
        """Return the session of the replica at this address. Creates it if needed; connects nothing."""
        session = self._sessions.get(address)
        if session is None:
            connector = self._connector_factory.connector_to(address, Role.RUNTIME)
            session = self._sessions[address] = ReplicaSession(connector, self._background_tasks)
        return session

    def retain(self, addresses: set[str]) -> None:
        """Close the sessions of all other addresses; a busy session closes after its last request."""
        for address in self._sessions.keys() - addresses:
            self._background_tasks.start(self._sessions.pop(address).retire(), RECEIPT_TIMEOUT_S)

    async def close(self) -> None:
        """Close the connections to all replicas: idle ones now, busy ones when their response is released."""
        for session in self._sessions.values():
            session.http.close()
        self._sessions.clear()
