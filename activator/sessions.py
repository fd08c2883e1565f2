"""Kept connections to one replica, which end once nobody uses them and the replica is no more."""

from activator.errands import Errands
from activator.receipts import Desk
from activator.upstream_http import Client
from service.way import Way


class Session:
    """Connections to one replica."""

    def __init__(self, way: Way, errands: Errands) -> None:
        # Slots bound the connections; acknowledgements and cancellations need some beside them.
        self.http = Client(way)
        self.desk = Desk(self.http, errands)
        self.busy = 0
        self._retired = False

    async def retire(self) -> None:
        """Close now, or by whoever leaves last."""
        self._retired = True
        await self.left()

    async def left(self) -> None:
        """Close if it was to be closed and nobody uses it."""
        if self._retired and self.busy == 0:
            await self.desk.close()
            self.http.close()
