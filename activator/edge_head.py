"""The head of a request, of whichever protocol: how large it may be, and what the application is told of it."""

from itertools import chain
from typing import Any, Final
from urllib.parse import unquote

import httptools
from starlette.types import Scope

from activator.exchange import ARRIVED, NAMED, arrival
from activator.settings import EdgeLimits

Headers = list[tuple[bytes, bytes]]

_ASGI: Final = {"version": "3.0", "spec_version": "2.3"}


def is_too_large(target: bytes, headers: Headers, limits: EdgeLimits) -> bool:
    """In bytes, as HTTP/1.1 has them on the wire, or in number."""
    size = len(target) + 4 * len(headers) + sum(map(len, chain.from_iterable(headers)))
    return size > limits.head_bytes or len(headers) > limits.headers


def scope_of(
    version: str,
    method: str,
    target: bytes,
    headers: Headers,
    server: Any,
    client: Any,
    extensions: dict[str, Any],
    request_id: str,
) -> Scope:
    """ASGI's scope, that it came just now, and how it is named. `target` is in ASCII and was parsed once. Raises
    httptools' error of one that is no target.
    """
    parsed = httptools.parse_url(target)
    path = parsed.path.decode("ascii")
    return {
        "type": "http",
        "asgi": _ASGI,
        "http_version": version,
        "method": method,
        "scheme": "https",
        "server": server,
        "client": client,
        "root_path": "",
        "path": unquote(path) if "%" in path else path,
        "raw_path": parsed.path,
        "query_string": parsed.query or b"",
        "headers": headers,
        "extensions": extensions,
        ARRIVED: arrival(),
        NAMED: request_id,
    }
