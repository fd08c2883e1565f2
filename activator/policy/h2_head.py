"""The head of a request in HTTP/2 (RFC 9113, 8.3), as HTTP/1.1 would have told it. What is malformed by its form alone
(names in upper case, headers of a connection, pseudo-headers in a wrong place, two hosts that differ) never gets here:
`h2` ends the connection.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

Headers = list[tuple[bytes, bytes]]

_TOKEN: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")  # RFC 9110, 5.6.2
_TARGET: Final = re.compile(rb"/[\x21-\x7e]*")
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Head:
    """`headers` begin with the host."""

    method: bytes
    target: bytes
    headers: Headers


def read_head(fields: Iterable[tuple[bytes, bytes]]) -> Head | str:
    """The head, or what is wrong with it."""
    pseudo: dict[bytes, bytes] = {}
    headers: Headers = []
    for name, value in fields:
        if name.startswith(b":"):
            pseudo[name] = value
            continue
        if not _TOKEN.fullmatch(name):
            return "a header's name is no token"
        if _CONTROL.search(value):
            return "a header holds a control character"
        headers.append((name, value))
    method, target, authority = pseudo.get(b":method", b""), pseudo.get(b":path", b""), pseudo.get(b":authority")
    if method == b"CONNECT" or not _TOKEN.fullmatch(method):
        return "the method is none that is served"
    if not _TARGET.fullmatch(target):
        return "the path has to begin with a slash, in ASCII without blanks"
    if sum([name == b"content-length" for name, _ in headers]) > 1:
        return "there are two lengths"
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        return "there are two hosts"
    if authority is not None:
        if hosts and hosts != [authority]:
            return "host and :authority differ"
        headers = [(b"host", authority), *[header for header in headers if header[0] != b"host"]]
    return Head(method, target, headers)
