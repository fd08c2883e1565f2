"""Messages to and from the open loop, and an incremental parser of HTTP responses. Pure.

Times are microseconds after the loop's start. Responses are parsed as in RFC 9112, as far as the activator uses it.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Final

import msgspec

from coldstart_bench.harness.process_stats import CpuLoad

CUT: Final = "cut"  # the connection ended before the response did
NO_DOOR: Final = "no_door"  # the connection was refused
NO_END: Final = "no_end"  # no response before the patience was over
_END = b"\r\n\r\n"
# Errors of decoding a response that is not in the activator's form: from a proxy, or cut short.
FOREIGN_ERRORS: Final = (msgspec.DecodeError, AttributeError, LookupError, TypeError)


class ReaderKind(StrEnum):
    """How fast the client reads its response."""

    QUICK = "quick"
    SLOW = "slow"  # it reads a little at a time
    SILENT = "silent"  # it stops reading after the first bytes and never closes, like a host that was switched off


class RequestTemplate(msgspec.Struct, frozen=True):
    """A request that may be sent any number of times."""

    key: str
    path: str
    body: str
    headers: dict[str, str] = {}
    reader: ReaderKind = ReaderKind.QUICK
    who: str = ""  # label for the report

    def request(self) -> bytes:
        """Return the bytes of the request."""
        body = self.body.encode()
        lines = [f"POST {self.path} HTTP/1.1", "host: localhost", f"authorization: Bearer {self.key}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + body


class OpenLoopPlan(msgspec.Struct, frozen=True):
    """For each of `arrivals` (at_us, number), in order of time, send `payloads[number]` at `at_us`."""

    port: int
    payloads: tuple[RequestTemplate, ...]
    arrivals: tuple[tuple[int, int], ...]
    connections: int  # connections that are opened before the start
    most: int  # most connections; a request that finds none free waits, and its wait counts
    patience_s: float  # time limit after the last request is due


class RequestResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of one request. Its latency is measured from when it was due, not from when it was sent."""

    payload: int
    due_us: int
    sent_us: int | None  # None if it got no connection
    first_us: int | None  # first stream event with text, or first byte of a whole response
    end_us: int
    status: int  # 0 without an answer
    code: str  # "" if it was answered, else the failure's code, CUT, NO_DOOR or NO_END
    text: int  # index of its text in `LoadResult.texts`, or -1
    retry_after: bool
    seen_us: int = 0  # when the loop tried to send it

    @property
    def took_s(self) -> float:
        """Seconds from when it was due to its end."""
        return (self.end_us - self.due_us) / 1e6

    @property
    def is_ok(self) -> bool:
        """Whether a complete successful response arrived."""
        return self.status == 200 and not self.code


class LoadResult(msgspec.Struct, frozen=True):
    """The results of a plan, in the order of its arrivals."""

    began_ns: int  # CLOCK_MONOTONIC, which all processes share
    sent: tuple[RequestResult, ...]
    texts: tuple[str, ...]  # distinct texts
    load: CpuLoad | None = None  # CPU load of the loop itself, without connecting

    def text(self, sent: RequestResult) -> str:
        """Return the text of the response to this request, or ""."""
        return "" if sent.text < 0 else self.texts[sent.text]

    def answers(self) -> list[str]:
        """Return the text of each response, or the error code of a request that was not answered."""
        return [self.text(sent) if sent.is_ok else f"not answered: {sent.code}" for sent in self.sent]


def send_delays_s(sent: Iterable[RequestResult]) -> list[float]:
    """Return how late the loop tried to send each request: whether it kept up. Waits for connections don't count."""
    return [(each.seen_us - each.due_us) / 1e6 for each in sent]


def connection_waits_s(sent: Iterable[RequestResult]) -> list[float]:
    """Return how long each request waited for a connection. A slow server leaves none free."""
    return [(each.sent_us - each.seen_us) / 1e6 for each in sent if each.sent_us is not None]


class HttpAnswerParser:
    """An incremental parser of one HTTP response. `status` is 0 until the head is complete; `body` is the body so far,
    without framing.
    """

    __slots__ = ("_chunked", "_left", "_unread", "body", "is_stream", "retry_after", "status")

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()
        self.is_stream = self.retry_after = False
        self._unread = bytearray()
        self._chunked = False
        self._left = 0  # bytes left of the body, or of the current chunk with its CRLF

    def feed(self, data: bytes) -> bool:
        """Return whether the response is complete. Raises ValueError for invalid data."""
        self._unread += data
        if self.status == 0 and not self._read_head():
            return False
        return self._read_chunks() if self._chunked else self._read_plain()

    def _read_head(self) -> bool:
        end = self._unread.find(_END)
        if end < 0:
            return False
        head = bytes(self._unread[:end]).lower()
        del self._unread[: end + len(_END)]
        lines = head.split(b"\r\n")
        fields = dict(line.split(b": ", 1) for line in lines[1:])
        self.status = int(lines[0][9:12])
        self.is_stream = fields.get(b"content-type", b"").startswith(b"text/event-stream")
        self.retry_after = b"retry-after" in fields
        self._chunked = fields.get(b"transfer-encoding") == b"chunked"
        self._left = int(fields.get(b"content-length", b"0"))
        return True

    def _read_plain(self) -> bool:
        self.body += self._unread[: self._left]
        self._left -= min(self._left, len(self._unread))
        self._unread.clear()
        return self._left == 0

    def _read_chunks(self) -> bool:
        unread = self._unread
        while (end := unread.find(b"\r\n")) >= 0:
            size = int(unread[:end], 16)
            if len(unread) < end + 4 + size:
                return False
            self.body += unread[end + 2 : end + 2 + size]
            del unread[: end + 4 + size]
            if size == 0:
                return True
        return False


def parse_answer(answer: HttpAnswerParser) -> tuple[str, str, bool]:
    """Return its text, the code of its failure (or ""), and whether its content is complete."""
    if answer.status == 0 or not answer.body:
        return "", "", answer.status not in (0, 200)
    if answer.is_stream:
        return _of_events(bytes(answer.body).split(b"\n\n"))
    try:
        found = msgspec.json.decode(bytes(answer.body))
        if answer.status != 200:
            return "", str(found["error"]["code"]), True
        return _text(found), "", True
    except FOREIGN_ERRORS:
        return "", "", False


def _of_events(events: Iterable[bytes]) -> tuple[str, str, bool]:
    pieces, failed, whole = [], "", False
    for event in events:
        lines = event.split(b"\n")
        data = next((line[6:] for line in lines if line.startswith(b"data: ")), b"")
        try:
            if b"event: error" in lines and data:
                failed = str(msgspec.json.decode(data)["error"]["code"])
            elif data == b"[DONE]":
                whole = True
            elif data.startswith(b"{"):
                pieces.append(_text(msgspec.json.decode(data)))
        except FOREIGN_ERRORS:  # foreign, or cut within the event
            break
    return "".join(pieces), failed, whole or bool(failed)


def _text(found: Any) -> str:
    choices = found.get("choices") or [{}]
    choice = choices[0]
    return str(choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or "")
