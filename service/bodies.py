"""Request bodies, bounded: whoever can reach a socket must not fill its process's memory."""

from starlette.requests import Request

from contracts.errors import BodyTooLarge, Refused


async def read_body(request: Request, limit_bytes: int) -> bytearray:
    """Return the body undecoded. Raises Refused(BodyTooLarge)."""
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > limit_bytes:
            raise Refused(BodyTooLarge(limit_bytes))
    return raw
