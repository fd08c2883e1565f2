"""Request bodies in and JSON answers out, bounded and strict, alike for every route of this process."""

from typing import Final, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from contracts.wire import decode, encode
from controlplane.nul import check_json
from service.bodies import read_body

T = TypeVar("T")

SMALL_BYTES: Final = 64 << 10
LARGE_BYTES: Final = 64 << 20  # batches of records


async def read(request: Request, kind: type[T], limit_bytes: int = SMALL_BYTES) -> T:
    """Decode the body as `kind`. Raises Refused: BodyTooLarge, or InvalidRequest naming what is wrong.

    It is stored, so it may hold no NUL character: see `nul.py`.
    """
    raw = await read_body(request, limit_bytes)
    check_json(raw)
    return decode(raw, kind)


def answer(value: object, status: int = 200) -> Response:
    """`value` as JSON."""
    return Response(encode(value), status, media_type="application/json")


def nothing() -> Response:
    """204."""
    return Response(status_code=204)
