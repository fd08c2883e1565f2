"""Timelines of recent requests, in one bounded ring per tenant. The control plane has older ones."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from kelvin.contracts.serving.control_messages import TimelineAnswer

PER_TENANT: Final = 256
TENANTS: Final = 1024
TimelineReader = Callable[[], TimelineAnswer]


class Timelines:
    """Timelines by tenant and request. The least recent requests and tenants are dropped first."""

    def __init__(self, per_tenant: int = PER_TENANT, tenants: int = TENANTS) -> None:
        self._per_tenant = per_tenant
        self._tenants = tenants
        self._rings: OrderedDict[str, OrderedDict[str, TimelineReader]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Timelines tenants={len(self._rings)} requests={sum(map(len, self._rings.values()))}>"

    def put(self, tenant: str, request_id: str, read_timeline: TimelineReader) -> None:
        """Keep a timeline. `read_timeline` renders it on demand, because most are never read."""
        ring = self._rings.get(tenant)
        if ring is None:
            ring = self._rings[tenant] = OrderedDict()
        else:
            self._rings.move_to_end(tenant)
        ring[request_id] = read_timeline
        if len(ring) > self._per_tenant:
            ring.popitem(last=False)
        if len(self._rings) > self._tenants:
            self._rings.popitem(last=False)

    def find(self, tenant: str, request_id: str) -> TimelineAnswer | None:
        """Return the timeline, if it belongs to the tenant and is recent, else None."""
        ring = self._rings.get(tenant)
        read_timeline = None if ring is None else ring.get(request_id)
        return None if read_timeline is None else read_timeline()
