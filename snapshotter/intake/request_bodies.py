"""Read request bodies with a limit and a deadline, so that long or slow ones are refused while they arrive.

Also send large responses, which may be cut if the client doesn't read them.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kelvin.contracts.errors import BodyTooLarge, InvalidRequest, Refused
from kelvin.contracts.numbers import parse_whole_number
from kelvin.contracts.traffic_errors import Cancelled, DeadlineExceeded
from snapshotter.intake.tenant_call_limits import BodyBudget

TIMEOUT_S: Final = 120.0
PIECE_BYTES: Final = 64 << 10
MIN_BYTES_PER_S: Final = 64 << 10  # the lowest rate that is accepted (`kelvin push --limit-rate`)


async def read_body(
    request: Request, limit: int, count_bytes: Callable[[int], None] = lambda _: None, *, timeout_s: float = TIMEOUT_S
) -> bytearray:
    """Return the whole body, of at most `limit` bytes. It may take `timeout_s` plus 1 s per MIN_BYTES_PER_S bytes.

    `count_bytes` is called with the length of each piece, and may refuse it. Raises `Refused`: BodyTooLarge,
    DeadlineExceeded, or Cancelled if the client disconnects.
    """
    content_length = parse_whole_number(request.headers.get("content-length", ""), 20)
    if content_length is not None and content_length > limit:
        raise Refused(BodyTooLarge(limit))
    body, allowed_s = bytearray(), timeout_s
    try:
        async with asyncio.timeout(timeout_s) as timeout:
            began = asyncio.get_running_loop().time()
            async for piece in request.stream():
                count_bytes(len(piece))
                body += piece
                allowed_s = timeout_s + len(body) / MIN_BYTES_PER_S
                timeout.reschedule(began + allowed_s)
                if len(body) > limit:
                    raise Refused(BodyTooLarge(limit))
    except TimeoutError:
        raise Refused(DeadlineExceeded(allowed_s, "receiving the body")) from None
    except ClientDisconnect:
        raise Refused(Cancelled()) from None
    return body


async def read_exactly(
    request: Request, nbytes: int, field: str, count_bytes: Callable[[int], None] = lambda _: None
) -> bytearray:
    """Return a body of exactly `nbytes`. Raises as `read_body` does, and `Refused(InvalidRequest)` if it is shorter."""
    body = await read_body(request, nbytes, count_bytes)
    if len(body) != nbytes:
        raise Refused(InvalidRequest(field, f"{len(body)} bytes", f"must have exactly {nbytes}"))
    return body


class BufferedResponse(Response):
    """A large response. It counts in `budget` while the client reads it, and it may be cut."""

    def __init__(self, content: bytes, media_type: str, budget: BodyBudget, tenant: str) -> None:
        super().__init__(content, media_type=media_type)
        self._budget = budget
        self._tenant = tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it in pieces, so that the server buffers one at a time. Raises `Refused` if nothing was sent yet."""
        content, is_begun = bytes(self.body), False
        try:
            async with self._budget.hold(self._tenant, len(content)):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                is_begun = True
                for start in range(0, len(content), PIECE_BYTES):
                    piece = content[start : start + PIECE_BYTES]
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Refused:
            if not is_begun:
                raise
            # The server closes the connection of an incomplete response.
