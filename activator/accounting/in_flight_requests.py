"""Running requests by the names that their callers know, so that callers can cancel them."""

import asyncio
from collections import OrderedDict
from types import TracebackType
from typing import Final

from activator.accounting.request_account import Account
from kelvin.contracts.errors import Refused
from kelvin.contracts.serving.control_messages import Principal
from kelvin.contracts.traffic_errors import Cancelled

REMEMBERED: Final = 4096  # remembered names of cancelled requests, so that cancelling twice succeeds


class InFlightRequest:
    """One request, as a block in which it can be cancelled. The block then raises Refused(Cancelled)."""

    __slots__ = ("_ended", "_is_over", "_task", "account", "client_request_id", "is_cancelled")

    def __init__(self, account: Account, client_request_id: str | None) -> None:
        self.account = account
        self.client_request_id = client_request_id
        self.is_cancelled = False
        self._task: asyncio.Task[object] | None = None
        self._ended: asyncio.Event | None = None  # set at the end, if a caller waits
        self._is_over = False

    def bind_task(self, task: asyncio.Task[object]) -> "InFlightRequest":
        """Set the task that enters the block, and return the request."""
        self._task = task
        return self

    def __enter__(self) -> None:
        assert self._task is not None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self.is_cancelled and isinstance(error, asyncio.CancelledError):
            assert task is not None
            task.uncancel()
            raise Refused(Cancelled()) from None

    def try_cancel(self) -> None:
        """Cancel the request. Does nothing if its record is settled, so that only its last bytes are missing."""
        if self._task is not None and not self.is_cancelled and not self.account.is_settled:
            self.is_cancelled = True
            self._task.cancel()

    def record_end(self) -> None:
        """Record the end: its record is written or on its way, and its slot is free."""
        self._is_over = True
        if self._ended is not None:
            self._ended.set()

    async def wait_ended(self, within_s: float) -> bool:
        """Wait for the end. Return False if it takes longer than `within_s`."""
        if self._is_over:  # it ended just before this call
            return True
        self._ended = self._ended or asyncio.Event()
        try:
            async with asyncio.timeout(within_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True


class InFlightRequests:
    """The running requests of one event loop, by id, and by their callers' own names if they have one."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._by_id: dict[str, InFlightRequest] = {}
        # by tenant and name
        self._by_client_id: dict[tuple[str, str], list[InFlightRequest]] = {}
        self._cancelled: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._remembered = remembered

    def __repr__(self) -> str:
        return f"<InFlightRequests requests={len(self._by_id)} named={len(self._by_client_id)}>"

    def add(self, account: Account, client_request_id: bytes | None) -> InFlightRequest:
        """Register a request until `remove`."""
        entry = InFlightRequest(account, None if client_request_id is None else client_request_id.decode("latin-1"))
        self._by_id[account.request_id] = entry
        if entry.client_request_id is not None:
            self._by_client_id.setdefault((account.principal.tenant, entry.client_request_id), []).append(entry)
        return entry

    def remove(self, entry: InFlightRequest) -> None:
        """Remove a request that has ended."""
        del self._by_id[entry.account.request_id]
        if entry.client_request_id is not None:
            entries = self._by_client_id[client_id := (entry.account.principal.tenant, entry.client_request_id)]
            entries.remove(entry)
            if not entries:
                del self._by_client_id[client_id]
        entry.record_end()

    def cancel(self, caller: Principal, name: str) -> list[InFlightRequest] | None:
        """Cancel the caller's requests of that name, and return those that may still be running. Returns [] if they
        were cancelled before. Returns None if the tenant has no such request, or the caller may not call its model.
        """
        named = (self._by_id.get(name), *self._by_client_id.get((caller.tenant, name), ()))
        found = [each for each in named if each is not None and _is_of(each.account, caller)]
        if not found:
            return [] if (caller.tenant, name) in self._cancelled else None
        for entry in found:
            entry.try_cancel()
        self._cancelled[caller.tenant, name] = None
        if len(self._cancelled) > self._remembered:
            self._cancelled.popitem(last=False)
        return found

    def check_integrity(self) -> None:
        """Assert that both maps contain the same requests."""
        named = [entry for entries in self._by_client_id.values() for entry in entries]
        assert all(self._by_client_id.values())
        assert all(self._by_id[entry.account.request_id] is entry for entry in named)
        assert sum(entry.client_request_id is not None for entry in self._by_id.values()) == len(named)


def _is_of(account: Account, caller: Principal) -> bool:
    return account.principal.tenant == caller.tenant and caller.may_call(account.model)
