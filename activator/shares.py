"""How many requests each tenant has under way, so that one tenant's do not fill what all share. One event loop's."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from contracts.errors import Refused
from contracts.traffic_errors import TenantBusy

RETRY_AFTER_S: Final = 1.0


class Shares:
    """Counts by tenant; keeps nothing of tenants that have none."""

    def __init__(self) -> None:
        self._inside: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Shares tenants={len(self._inside)} inside={self._inside.total()}>"

    @contextmanager
    def enter(self, tenant: str, limit: int | None) -> Iterator[None]:
        """One more while the block lasts. Raises `Refused(TenantBusy)` where `limit` are inside."""
        if limit is not None and self._inside[tenant] >= limit:
            raise Refused(TenantBusy(limit, RETRY_AFTER_S))
        self._inside[tenant] += 1
        try:
            yield
        finally:
            self._inside[tenant] -= 1
            if not self._inside[tenant]:
                del self._inside[tenant]
