"""What may go wrong between a client and an HTTP server. Each fault plays one exchange; the proxy says which.

`Exchange.ask` is the server's true answer; a fault that does not ask keeps the request from the server.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol
from xml.sax.saxutils import escape


@dataclass(frozen=True)
class Request:
    """What the client sent. `target` is path and query, as they were on the wire; names of headers are lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def identity(self) -> tuple[str, str, str]:
        """Two requests with the same one ask for the same bytes."""
        return self.method, self.target, self.headers.get("range", "")


@dataclass(frozen=True)
class Answer:
    """What the server sent; the length is the body's, except for HEAD, where it is the server's word."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


class Exchange(Protocol):
    """One request, and what can be done with it."""

    @property
    def request(self) -> Request: ...

    def ask(self, request: Request | None = None) -> Answer:
        """The server's answer to the request, or to another one."""

    def first(self) -> Answer:
        """The first answer that was ever given to the same request; the server's where there was none."""

    def send(self, answer: Answer, *, cut_after: int | None = None) -> None:
        """Hand the answer to the client; with `cut_after` only so many bytes of the body, then the line is cut."""

    def cut(self) -> None:
        """Close the client's connection without a word."""

    def wait(self, seconds: float | None) -> None:
        """Until so much time has passed, the faults are lifted, or the proxy closes."""


Fault = Callable[[Exchange], None]


@dataclass(frozen=True)
class DelayedAnswer:
    """The answer comes, `seconds` later; None: when the faults are lifted."""

    seconds: float | None = None

    def __call__(self, exchange: Exchange) -> None:
        exchange.wait(self.seconds)
        exchange.send(exchange.ask())


@dataclass(frozen=True)
class ClosedConnection:
    """The connection is closed; the server never hears of the request."""

    def __call__(self, exchange: Exchange) -> None:
        exchange.cut()


@dataclass(frozen=True)
class LostAnswer:
    """The server does what was asked, and its answer is lost."""

    def __call__(self, exchange: Exchange) -> None:
        exchange.ask()
        exchange.cut()


@dataclass(frozen=True)
class TruncatedBody:
    """The head is whole, the body ends after so many bytes, and the connection with it."""

    after: int = 0

    def __call__(self, exchange: Exchange) -> None:
        exchange.send(exchange.ask(), cut_after=self.after)


@dataclass(frozen=True)
class StalledBody:
    """The head and so many bytes of the body come; the rest when the faults are lifted, which cuts the line."""

    after: int = 0

    def __call__(self, exchange: Exchange) -> None:
        answer = exchange.ask()
        exchange.send(answer, cut_after=self.after)
        exchange.wait(None)


@dataclass(frozen=True)
class S3Error:
    """An error in the form of S3, instead of the server's answer."""

    status: int
    code: str

    def __call__(self, exchange: Exchange) -> None:
        body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{escape(self.code)}</Code></Error>'.encode()
        exchange.send(Answer(self.status, (("Content-Type", "application/xml"),), body))


SLOW_DOWN = S3Error(503, "SlowDown")
CONFLICT = S3Error(409, "ConditionalRequestConflict")


@dataclass(frozen=True)
class AlteredBody:
    """The body is another one: well-formed HTTP of the new length. Other headers stay."""

    change: Callable[[bytes], bytes]

    def __call__(self, exchange: Exchange) -> None:
        answer = exchange.ask()
        exchange.send(replace(answer, body=self.change(answer.body)))


def truncated(keep: int) -> AlteredBody:
    """Fewer bytes than were asked for, and a head that says so."""
    return AlteredBody(lambda body: body[:keep])


def flipped(at: int = 0) -> AlteredBody:
    """One bit of one byte is wrong."""

    def change(body: bytes) -> bytes:
        where = at % len(body)
        return body[:where] + bytes([body[where] ^ 0x10]) + body[where + 1 :]

    return AlteredBody(lambda body: change(body) if body else body)


def zeroed() -> AlteredBody:
    """As many bytes, all of them zero."""
    return AlteredBody(lambda body: bytes(len(body)))


@dataclass(frozen=True)
class StaleAnswer:
    """What the same request was first answered, whatever has happened since."""

    def __call__(self, exchange: Exchange) -> None:
        exchange.send(exchange.first())


@dataclass(frozen=True)
class SwappedAnswer:
    """The answer to another target."""

    target: str

    def __call__(self, exchange: Exchange) -> None:
        exchange.send(exchange.ask(replace(exchange.request, target=self.target)))
