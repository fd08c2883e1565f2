"""Read request bodies and write JSON responses of internal routes, strictly and within limits."""

from typing import Final, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from kelvin.contracts.errors import BodyTooLarge, Refused
from kelvin.contracts.wire import decode, encode

T = TypeVar("T")

SMALL_BYTES: Final = 64 << 10
LARGE_BYTES: Final = 64 << 20  # batches of records, the tensor tables of models, texts for filters


async def read_json(request: Request, kind: type[T], limit_bytes: int = SMALL_BYTES) -> T:
    """Decode the body as `kind`. Raises Refused: BodyTooLarge, or InvalidRequest with the fault."""
    return decode(await read_body(request, limit_bytes), kind)


async def read_body(request: Request, limit_bytes: int) -> bytearray:
    """Return the body undecoded. Raises Refused(BodyTooLarge)."""
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > limit_bytes:
            raise Refused(BodyTooLarge(limit_bytes))
    return raw


def json_response(value: object, status: int = 200) -> Response:
    """Return `value` as a JSON response."""
    return Response(encode(value), status, media_type="application/json")


def empty_response() -> Response:
    """Return an empty response with status 204."""
    return Response(status_code=204)
