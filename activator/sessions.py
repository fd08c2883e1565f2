"""Kept connections to one replica, which end once nobody uses them and the replica is no more."""

from activator.errands import Errands
from activator.receipts import Desk
from activator.upstream_http import Client
from service.way import SocketWay, Way


class Session:
    """Connections to one replica."""

    def __init__(self, way: Way, errands: Errands) -> None:
        # Slots bound the connections; acknowledgements and cancellations need some beside them.
        self.http = Client(way)
        self.is_on_this_host = isinstance(way, SocketWay)
        self.desk = Desk(self.http, errands)
        self.busy = 0
        self._retired = False

    async def retire(self) -> None:
        """Close now, or by whoever leaves last."""
        self._retired = True
        if self.is_over:
            await self.close()

    @property
    def is_over(self) -> bool:
        """Whether it was to be closed and nobody uses it."""
        return self._retired and self.busy == 0

    async def close(self) -> None:
        """Once what was to be told has been."""
        await self.desk.close()
        self.http.close()
