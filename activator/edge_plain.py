"""HTTP/1.1 without TLS, for a port that only a cluster's inside reaches: the same bounds, the same known delivery."""

import asyncio
from functools import partial
from typing import cast

from activator.edge_http import HttpProtocol
from activator.gate import Gate


def plain_protocol(gate: Gate) -> type[asyncio.Protocol]:
    """What uvicorn takes for its protocol class; it only ever calls it."""
    return cast(type[asyncio.Protocol], partial(PlainProtocol, gate))


class PlainProtocol(HttpProtocol):
    """One connection: the socket itself is what `edge_http` writes to."""

    _may_enter = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        raw = cast(asyncio.Transport, transport)
        peer = raw.get_extra_info("peername") or ("",)  # none of one that is gone again
        self._may_enter, self.source = self._gate.try_enter(peer[0], self._loop.time())
        if not self._may_enter:
            raw.abort()
            return
        self._gate.shaken()  # there is no handshake
        self.raw = raw
        super().connection_made(raw)
        raw.set_write_buffer_limits(high=1, low=0)  # as behind TLS

    def connection_lost(self, exc: Exception | None) -> None:
        if self._may_enter:
            self._gate.left(self.source)
        super().connection_lost(exc)

    def unaccepted(self) -> int:
        return self.raw.get_write_buffer_size()
