"""Requests under way, by the names that their callers know them by, for those to end them. How one ends is its own."""

import asyncio
from collections import OrderedDict
from types import TracebackType
from typing import Final

from activator.accounting.request_account import Account
from kelvin.contracts.errors import Refused
from kelvin.contracts.serving.control_messages import Principal
from kelvin.contracts.traffic_errors import Cancelled

REMEMBERED: Final = 4096  # names by which requests were cancelled, of all tenants: a second time changes nothing


class InFlightRequest:
    """One request; a block in which it can be cancelled. The block then raises Refused(Cancelled)."""

    __slots__ = ("_ended", "_is_over", "_task", "account", "is_cancelled", "own_id")

    def __init__(self, account: Account, own_id: str | None) -> None:
        self.account = account
        self.own_id = own_id
        self.is_cancelled = False
        self._task: asyncio.Task[object] | None = None
        self._ended: asyncio.Event | None = None  # for who waits for it
        self._is_over = False

    def bind_task(self, task: asyncio.Task[object]) -> "InFlightRequest":
        """Of that task, which is the one that enters the block."""
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
        """Nothing where it has ended but for its last bytes: its record stands."""
        if self._task is not None and not self.is_cancelled and not self.account.is_settled:
            self.is_cancelled = True
            self._task.cancel()

    def finish(self) -> None:
        """Its record is written, or on its way; its slot is free."""
        self._is_over = True
        if self._ended is not None:
            self._ended.set()

    async def wait_ended(self, within_s: float) -> bool:
        """Wait until it is; False where it takes longer."""
        if self._is_over:  # in the moment before this was asked
            return True
        self._ended = self._ended or asyncio.Event()
        try:
            async with asyncio.timeout(within_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True


class InFlightRequests:
    """One event loop's. A request goes by its id and, where its caller gave it one, by that as well."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._by_id: dict[str, InFlightRequest] = {}
        self._by_own_id: dict[tuple[str, str], list[InFlightRequest]] = {}  # tenant and name: several may share one
        self._cancelled: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._remembered = remembered

    def __repr__(self) -> str:
        return f"<InFlightRequests requests={len(self._by_id)} named={len(self._by_own_id)}>"

    def enter(self, account: Account, own_id: bytes | None) -> InFlightRequest:
        """It can be named from now on, until `leave`."""
        entry = InFlightRequest(account, None if own_id is None else own_id.decode("latin-1"))
        self._by_id[account.request_id] = entry
        if entry.own_id is not None:
            self._by_own_id.setdefault((account.principal.tenant, entry.own_id), []).append(entry)
        return entry

    def leave(self, entry: InFlightRequest) -> None:
        """It has ended."""
        del self._by_id[entry.account.request_id]
        if entry.own_id is not None:
            named = self._by_own_id[own := (entry.account.principal.tenant, entry.own_id)]
            named.remove(entry)
            if not named:
                del self._by_own_id[own]
        entry.finish()

    def cancel(self, caller: Principal, name: str) -> list[InFlightRequest] | None:
        """End what the caller calls so; the entries, which may not be over yet. [] where they were cancelled before;
        None where the caller's tenant has none of that name, or has it of a model that the caller may not call.
        """
        named = (self._by_id.get(name), *self._by_own_id.get((caller.tenant, name), ()))
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
        """Both maps name the same requests."""
        own = [entry for entries in self._by_own_id.values() for entry in entries]
        assert all(self._by_own_id.values())
        assert all(self._by_id[entry.account.request_id] is entry for entry in own)
        assert sum(entry.own_id is not None for entry in self._by_id.values()) == len(own)


def _is_of(account: Account, caller: Principal) -> bool:
    return account.principal.tenant == caller.tenant and caller.may_call(account.model)
