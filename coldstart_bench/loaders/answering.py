"""HTTP/1.1 as far as who stands behind an activator that is measured speaks it: no script, what two of them share."""

import asyncio
import re
from abc import abstractmethod
from typing import Final, cast

NOTHING: Final = b"HTTP/1.1 204 No Content\r\n\r\n"
_REQUEST_ID: Final = re.compile(rb'"request_id":"([^"]+)"')
OPEN: Final = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """RFC 9112, 7.1."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def recorded_in(batch: bytes) -> list[bytes]:
    """Which requests a body of usage records has; the same batch may be shipped twice."""
    return _REQUEST_ID.findall(batch)


class Answering(asyncio.Protocol):
    """One request after another, each with a head and a body whose length is told."""

    def __init__(self) -> None:
        self._unread = b""

    @abstractmethod
    def answer(self, path: bytes, body: bytes) -> None:
        """Write to `_transport`, now or later."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own are no instances of it

    def data_received(self, data: bytes) -> None:
        self._unread += data
        while (end := self._unread.find(b"\r\n\r\n")) >= 0:
            head = self._unread[:end].lower()
            at = head.find(b"content-length:")
            length = 0 if at < 0 else int(head[at + 15 :].split(b"\r\n", 1)[0])
            if len(self._unread) < end + 4 + length:
                return
            body = self._unread[end + 4 : end + 4 + length]
            self._unread = self._unread[end + 4 + length :]
            self.answer(head.split(b" ", 2)[1], body)
