"""Faults between a client and an HTTP server. Each fault plays one exchange; the proxy chooses which one.

`Exchange.ask` returns the server's answer. A fault that does not call it keeps the request from the server.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol
from xml.sax.saxutils import escape


@dataclass(frozen=True)
class Request:
    """A client's request. `target` is path and query as sent; names of headers are lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def identity(self) -> tuple[str, str, str]:
        """Requests with the same identity ask for the same bytes."""
        return self.method, self.target, self.headers.get("range", "")


@dataclass(frozen=True)
class Answer:
    """A server's answer. Content-Length is the body's length, except for HEAD, where it is the server's header."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


class Exchange(Protocol):
    """One request, and the ways to answer it."""

    @property
    def request(self) -> Request: ...

    def ask(self, request: Request | None = None) -> Answer:
        """Send the request, or another one, to the server and return its answer."""

    def first(self) -> Answer:
        """Return the first answer that the same request ever had, or ask the server if there was none."""

    def send(self, answer: Answer, *, cut_after: int | None = None) -> None:
        """Send the answer to the client. With `cut_after`, close the connection after that many bytes of the body."""

    def cut(self) -> None:
        """Reset the client's connection."""

    def wait(self, seconds: float | None) -> None:
        """Wait until the time has passed, the faults are lifted, or the proxy closes."""


Fault = Callable[[Exchange], None]


@dataclass(frozen=True)
class DelayedAnswer:
    """The answer is sent `seconds` later; None: when the faults are lifted."""

    seconds: float | None = None

    def __call__(self, exchange: Exchange) -> None:
        exchange.wait(self.seconds)
        exchange.send(exchange.ask())


@dataclass(frozen=True)
class ClosedConnection:
    """The connection is reset, and the server gets no request."""

    def __call__(self, exchange: Exchange) -> None:
        exchange.cut()


@dataclass(frozen=True)
class LostAnswer:
    """The server executes the request, and its answer is lost."""

    def __call__(self, exchange: Exchange) -> None:
        exchange.ask()
        exchange.cut()


@dataclass(frozen=True)
class TruncatedBody:
    """The head is complete, and the connection ends after `after` bytes of the body."""

    after: int = 0

    def __call__(self, exchange: Exchange) -> None:
        exchange.send(exchange.ask(), cut_after=self.after)


@dataclass(frozen=True)
class StalledBody:
    """The head and `after` bytes of the body are sent. The connection ends when the faults are lifted."""

    after: int = 0

    def __call__(self, exchange: Exchange) -> None:
        answer = exchange.ask()
        exchange.send(answer, cut_after=self.after)
        exchange.wait(None)


@dataclass(frozen=True)
class S3Error:
    """An S3 error response instead of the server's answer."""

    status: int
    code: str

    def __call__(self, exchange: Exchange) -> None:
        body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{escape(self.code)}</Code></Error>'.encode()
        exchange.send(Answer(self.status, (("Content-Type", "application/xml"),), body))


SLOW_DOWN = S3Error(503, "SlowDown")
CONFLICT = S3Error(409, "ConditionalRequestConflict")


@dataclass(frozen=True)
class AlteredBody:
    """The body is changed. The answer is well-formed HTTP of the new length, and other headers stay."""

    change: Callable[[bytes], bytes]

    def __call__(self, exchange: Exchange) -> None:
        answer = exchange.ask()
        exchange.send(replace(answer, body=self.change(answer.body)))


def truncated(keep: int) -> AlteredBody:
    """Send fewer bytes than requested, with a matching Content-Length."""
    return AlteredBody(lambda body: body[:keep])


def flipped(at: int = 0) -> AlteredBody:
    """Flip one bit of one byte."""

    def change(body: bytes) -> bytes:
        where = at % len(body)
        return body[:where] + bytes([body[where] ^ 0x10]) + body[where + 1 :]

    return AlteredBody(lambda body: change(body) if body else body)


def zeroed() -> AlteredBody:
    """Send as many bytes, all zero."""
    return AlteredBody(lambda body: bytes(len(body)))


@dataclass(frozen=True)
class StaleAnswer:
    """The first answer that the same request ever had, even if the object has changed since."""

    def __call__(self, exchange: Exchange) -> None:
        exchange.send(exchange.first())


@dataclass(frozen=True)
class SwappedAnswer:
    """The server's answer to another target."""

    target: str

    def __call__(self, exchange: Exchange) -> None:
        exchange.send(exchange.ask(replace(exchange.request, target=self.target)))
