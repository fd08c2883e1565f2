"""Asks for what takes long until it is there: the installation reads its ledger or audit, however many rows it has."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final, Protocol

from rich.console import Console

from contracts.billing import Examining
from contracts.wire import decode
from kelvin.client import DoorClosed

ASK_S: Final = 60.0  # the installation answers well before that, with a report or with how far it is
_NOT_YET: Final = 202
_NOT_FOUND: Final = 404


class Door(Protocol):
    """The way in: a client of which one call is needed. Refusals are raised."""

    def get(self, path: str, *, params: dict[str, str], timeout: float) -> Any: ...


def examined(door: Door, path: str, params: dict[str, str]) -> bytes:
    """The report's JSON. How far it is meanwhile is shown on a terminal. Raises what the door raises."""
    console = Console(stderr=True)
    with console.status("reading") if console.is_terminal else nullcontext() as status:
        while (answer := door.get(path, params=params, timeout=ASK_S)).status_code == _NOT_YET:
            seen = decode(answer.content, Examining, what="answer of the control plane")
            if status is not None:
                status.update(f"reading: {seen.rows:,} of {seen.of:,} rows")
    content = answer.content
    assert isinstance(content, bytes)
    return content


@contextmanager
def hint_own_key(tenant: str | None, scope: str) -> Iterator[None]:
    """Say which key a tenant's ledger needs. To any other key, an operator's too, the tenant seems not to exist."""
    try:
        yield
    except DoorClosed as closed:
        if tenant is None or closed.status != _NOT_FOUND:
            raise
        raise DoorClosed(
            f"the ledger of tenant '{tenant}' is shown to keys of that tenant alone, and this key is another's. "
            f"Make one with `kelvin keys create NAME --tenant {tenant} --scope {scope} --output FILE`, "
            "then use --key FILE",
            closed.status,
        ) from closed


def of_month(tenant: str | None, month: str | None) -> dict[str, str]:
    """Return the query of a tenant and a month: without a tenant the key's own, without a month all of them."""
    return {name: value for name, value in (("tenant", tenant), ("month", month)) if value is not None}
