"""What is asked of the open loop, what it says of each request, and an answer as its bytes come. Pure.

Times are microseconds after the loop's beginning. Answers are read as RFC 9112 has it, as far as the door uses it.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Final

import msgspec

from coldstart_bench.harness.process_stats import CpuLoad

CUT: Final = "cut"  # the connection ended before the answer did
NO_DOOR: Final = "no_door"  # nobody took the connection
NO_END: Final = "no_end"  # it was still waiting when the patience was over
_END = b"\r\n\r\n"
# What reading raises of an answer that has another form than the door's: a proxy's, or one that was cut.
FOREIGN_ERRORS: Final = (msgspec.DecodeError, AttributeError, LookupError, TypeError)


class ReaderKind(StrEnum):
    """How the client takes its answer."""

    QUICK = "quick"
    SLOW = "slow"  # a little at a time
    SILENT = "silent"  # nothing after the first bytes, and it never closes: a peer that was switched off


class RequestTemplate(msgspec.Struct, frozen=True):
    """One kind of request; many may be the same."""

    key: str
    path: str
    body: str
    headers: dict[str, str] = {}
    reader: ReaderKind = ReaderKind.QUICK
    who: str = ""  # for who reads the report

    def request(self) -> bytes:
        """Return the whole request."""
        body = self.body.encode()
        lines = [f"POST {self.path} HTTP/1.1", "host: localhost", f"authorization: Bearer {self.key}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + body


class OpenLoopPlan(msgspec.Struct, frozen=True):
    """Send `payloads[number]` at `at_us`, for each of `arrivals`, which are in order of time."""

    port: int
    payloads: tuple[RequestTemplate, ...]
    arrivals: tuple[tuple[int, int], ...]
    connections: int  # that are open before the beginning
    most: int  # that may be open at all; who finds none free waits for one, and its clock runs
    patience_s: float  # after the last was due


class RequestResult(msgspec.Struct, frozen=True, array_like=True):
    """Of one request, whatever came of it. What it waited is counted from when it was due, not from when it went."""

    payload: int
    due_us: int
    sent_us: int | None  # None where no connection was to be had
    first_us: int | None  # of its answer: the first event of a stream that has text, or the first byte
    end_us: int
    status: int  # 0 without an answer
    code: str  # "" where it was answered, the failure's code otherwise, or one of the words above
    text: int  # which of the texts it was answered with, -1 where it has none
    retry_after: bool
    seen_us: int = 0  # when the loop came to send it, a connection or not

    @property
    def took_s(self) -> float:
        """Seconds from when it was due to its end."""
        return (self.end_us - self.due_us) / 1e6

    @property
    def is_ok(self) -> bool:
        """Whether its answer came, whole."""
        return self.status == 200 and not self.code


class LoadResult(msgspec.Struct, frozen=True):
    """What came of a plan, in the order of its arrivals."""

    began_ns: int  # CLOCK_MONOTONIC, which is one for all processes
    sent: tuple[RequestResult, ...]
    texts: tuple[str, ...]  # each once
    load: CpuLoad | None = None  # of the loop itself, connections not counted

    def text(self, sent: RequestResult) -> str:
        """What it was answered with."""
        return "" if sent.text < 0 else self.texts[sent.text]

    def answers(self) -> list[str]:
        """What each was answered, or that it was not."""
        return [self.text(sent) if sent.is_ok else f"not answered: {sent.code}" for sent in self.sent]


def send_delays_s(sent: Iterable[RequestResult]) -> list[float]:
    """How late the loop came to send each: whether it kept up itself. A wait for a connection is not among it."""
    return [(each.seen_us - each.due_us) / 1e6 for each in sent]


def connection_waits_s(sent: Iterable[RequestResult]) -> list[float]:
    """How long each waited for a connection, of which a door that answers late leaves none free."""
    return [(each.sent_us - each.seen_us) / 1e6 for each in sent if each.sent_us is not None]


class HttpAnswerParser:
    """An answer of the door to one request, as its bytes come.

    `status` is 0 until its head is here; `body` has what has come of it, without framing.
    """

    __slots__ = ("_chunked", "_left", "_unread", "body", "is_stream", "retry_after", "status")

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()
        self.is_stream = self.retry_after = False
        self._unread = bytearray()
        self._chunked = False
        self._left = 0  # bytes of the body, or of the chunk that is being read with its line's end

    def feed(self, data: bytes) -> bool:
        """Whether it is whole. Raises ValueError for what is no answer."""
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
    """Its text, the code of its failure (or ""), and whether it is whole as far as its own form says."""
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
        except FOREIGN_ERRORS:  # or cut in the middle of it
            break
    return "".join(pieces), failed, whole or bool(failed)


def _text(found: Any) -> str:
    choices = found.get("choices") or [{}]
    choice = choices[0]
    return str(choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or "")
