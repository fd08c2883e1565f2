"""What all connections of one listener share: certificates, limits, who is connected, what is counted."""

import ssl
from dataclasses import dataclass, field

from activator.meters import Meters
from activator.policy.edge_rates import Addresses
from activator.porch import Porch
from activator.settings import EdgeLimits
from contracts.traffic_errors import AddressBusy


@dataclass(slots=True)
class Gate:
    """Used from one event loop."""

    context: ssl.SSLContext
    limits: EdgeLimits
    meters: Meters
    addresses: Addresses = field(init=False)
    porch: Porch = field(default_factory=Porch)
    open: int = 0
    shaking: int = 0  # of these, within their handshake
    relieved: bool = False  # another process accepts from now on: we end as a lame duck

    def __post_init__(self) -> None:
        self.addresses = Addresses(self.limits.address)

    def try_enter(self, address: str, now_s: float) -> tuple[bool, str | None]:
        """Whether a connection may come in, and the source that it counts for; None for one of our own."""
        source = self.addresses.source(address)
        if self.open >= self.limits.connections:
            self.meters.cut("all")
            return False, None
        if source is not None and not self.addresses.try_open(source, now_s):
            self.meters.cut("address")
            return False, None
        self.open += 1
        self.shaking += 1
        return True, source

    def asks(self, source: str, now_s: float) -> AddressBusy | None:
        """Count a request of a source; why it may not pass, and that is counted here too."""
        wait_s = self.addresses.asks(source, now_s)
        if wait_s is None:
            return None
        busy = AddressBusy(wait_s)
        self.meters.refused(busy)
        return busy

    def shaken(self) -> None:
        """A handshake has ended, one way or the other."""
        self.shaking -= 1

    def left(self, source: str | None) -> None:
        """A connection that was let in is over."""
        self.open -= 1
        if source is not None:
            self.addresses.closed(source)
