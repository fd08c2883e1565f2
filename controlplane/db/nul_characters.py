"""Refuse NUL characters in requests with either database: PostgreSQL can't store them, SQLite can't compare them.

HTTP headers can't hold one. Paths, queries and bodies are checked where they are read.
"""

import re
from typing import Final, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from kelvin.contracts.errors import InvalidRequest, Refused
from kelvin.contracts.wire import decode
from kelvin.ipc.failure_responses import problem_response
from kelvin.ipc.http_bodies import SMALL_BYTES, read_body

T = TypeVar("T")

RULE: Final = "must hold no NUL character"
_ESCAPED: Final = b"\\u0000"
# An odd number of backslashes: after an even number `u0000` is text.
_ESCAPE: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


def reject_nul(app: ASGIApp) -> ASGIApp:
    """Wrap an application: a path or query with a NUL is answered 400 `invalid_request`."""

    async def reject_or_pass(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            query = scope["query_string"]
            for field, has_nul in (("path", "\0" in scope["path"]), ("query", b"%00" in query or b"\0" in query)):
                if has_nul:
                    await problem_response(InvalidRequest(field, "(%00)", RULE))(scope, receive, send)
                    return
        await app(scope, receive, send)

    return reject_or_pass


def replace_nul(word: str) -> str:
    """Return the word with U+FFFD for each NUL."""
    return word.replace("\0", "\ufffd")


def check_json(raw: bytes | bytearray) -> None:
    """Raise Refused(InvalidRequest) if a string of the JSON holds a NUL. A raw NUL byte is no JSON in any case."""
    if _ESCAPED in raw and _ESCAPE.search(raw):
        raise Refused(InvalidRequest("body", "(\\u0000)", RULE))


async def read_json(request: Request, kind: type[T], limit_bytes: int = SMALL_BYTES) -> T:
    """Decode a body that will be stored. Raises Refused: BodyTooLarge, or InvalidRequest with the reason."""
    raw = await read_body(request, limit_bytes)
    check_json(raw)
    return decode(raw, kind)
