"""The edge against h11, which parses HTTP/1.1 independently: the edge delivers what h11 sees, or refuses it.

Connections of one to three requests are generated, damaged, and cut into reads at any byte. The application behind the
edge must receive a prefix of what h11 sees in the same bytes: method, target, headers, body, order of requests. Where
the prefix is shorter, one of the differences in STRICTER must explain it.

The edge is laxer in two things: it skips carriage returns and line feeds between two requests (RFC 9112, 2.2), and it
drops a trailer that h11 refuses, because trailers say nothing about the request or its end (RFC 9110, 6.5.1).
"""

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import h11
import httptools
import pytest
from hypothesis import example, find, given, settings
from hypothesis import strategies as st

from activator.http.http1_protocol import Http1Protocol
from tests.activator.http.memory_connections import DeliveredRequest, MemoryConnection
from tests.virtual_loop import run_virtually

Headers = list[tuple[bytes, bytes]]

METHODS: Final = [b"GET", b"POST", b"HEAD", b"DELETE", b"OPTIONS", b"PUT", b"CONNECT", b"PRI", b"get", b"BREW"]
TARGETS: Final = [b"/x", b"/x?a=b", b"//b/x", b"*", b"x", b"http://a/x", b"http://b/x", b"/x#y", b"/%00", b"a:443"]
VERSIONS: Final = [b"HTTP/1.1"] * 6 + [
    b"HTTP/1.0",
    b"HTTP/2.0",
    b"HTTP/0.9",
    b"HTTP/1.2",
    b"RTSP/1.0",
    b"http/1.1",
    b"",
]
INSIDE: Final = b"GET /inside HTTP/1.1\r\nHost: a\r\n\r\n"
BODIES: Final = [b"", b"abc", b"\r\n", b"0\r\n\r\n", INSIDE, INSIDE * 2]
EXTRA: Final = [
    b"Connection: upgrade\r\nUpgrade: h2c\r\n", b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n",
    b"Upgrade: x\r\n", b"Connection: close\r\n", b"Connection: keep-alive\r\n", b"Expect: 100-continue\r\n",
    b"Host: b\r\n", b"X: a\r\n b\r\n", b"X : a\r\n", b"X:\ta\t\r\n", b"X: a\rb\r\n", b"X: a\n", b"X: \xe9\r\n",
    b"X: \x01\r\n", b": a\r\n", b"X\r\n", b"X:\r\n", b"Authorization: a\r\nAuthorization: b\r\n",
    b"Content-Length: 3\r\n", b"Content-Length: 0\r\n", b"Content-Length: +3\r\n", b"Content-Length: 3, 3\r\n",
    b"Content-Length: 3 \r\n", b"Content-Length: \xd9\xa3\r\n", b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n", b"Transfer-Encoding: identity\r\n", b"Transfer-Encoding: CHUNKED \r\n",
    b"Transfer-Encoding: chunked\t\r\n", b"Transfer-Encoding: \r\n", b"Transfer-Encoding: ,chunked\r\n",
]  # fmt: skip
TRAILERS: Final = [
    b"", b"", b"X: a\r\n", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip\r\n",
    b"Connection: upgrade\r\nUpgrade: x\r\n", b"Connection: close\r\n", b"Host: b\r\n", b"X: a\n", b"X\r\n",
]  # fmt: skip
SIZES: Final = [b"%x", b"%X", b"00%x", b"%x;a=b", b'%x;a="b"', b"%x ", b" %x", b"0x%x", b"+%x", b"%x;\n"]
DAMAGE: Final = [b"\r", b"\n", b"\r\n", b" ", b"\t", b"\x00", b":", b"0", b"\xff", b";", b",", b"\x0b", b""]


@dataclass(slots=True)
class Seen:
    """One request that h11 saw, and where its bytes begin and end."""

    method: bytes
    target: bytes
    headers: Headers
    begin: int
    body: bytes = b""
    end: int | None = None  # None: the body is not complete


@dataclass(frozen=True, slots=True)
class Sent:
    """The bytes of one connection, and the positions between its reads."""

    raw: bytes
    cuts: tuple[int, ...]
    reads: list[bytes] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        places = sorted({0, len(self.raw), *(cut % (len(self.raw) + 1) for cut in self.cuts)})
        reads = [self.raw[begin:end] for begin, end in itertools.pairwise(places)]
        object.__setattr__(self, "reads", reads)


def _chunked(body: bytes, size: bytes, parts: int, trailers: bytes) -> bytes:
    step = max(1, len(body) // parts)
    pieces = [body[start : start + step] for start in range(0, len(body), step)]
    return b"".join(b"%b\r\n%b\r\n" % (size % len(piece), piece) for piece in pieces) + b"0\r\n" + trailers + b"\r\n"


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """One request, well-formed or nearly so."""
    line = b" ".join((draw(st.sampled_from(METHODS)), draw(st.sampled_from(TARGETS)), draw(st.sampled_from(VERSIONS))))
    extra = draw(st.lists(st.sampled_from(EXTRA), max_size=2))
    body = draw(st.sampled_from(BODIES))
    framing = draw(st.sampled_from(["length", "length", "chunks", "chunks", "none"]))
    host = draw(st.sampled_from([b"Host: a\r\n"] * 6 + [b"", b"Host: a\r\nHost: a\r\n", b"host:a \r\n"]))
    headers = [host, *extra]
    if framing == "length":
        headers.insert(draw(st.integers(0, len(headers))), b"Content-Length: %d\r\n" % len(body))
    elif framing == "chunks":
        headers.insert(draw(st.integers(0, len(headers))), b"Transfer-Encoding: chunked\r\n")
        size, trailers = draw(st.sampled_from(SIZES)), draw(st.sampled_from(TRAILERS))
        body = _chunked(body, size, draw(st.integers(1, 3)), trailers)
    return line.rstrip(b" ") + b"\r\n" + b"".join(headers) + b"\r\n" + body


@st.composite
def connections(draw: st.DrawFn) -> Sent:
    """Up to three requests with at most one damaged place, cut into reads. Most reads begin where a request begins."""
    parts = draw(st.lists(requests(), min_size=1, max_size=3))
    between = draw(st.sampled_from([b""] * 8 + [b"\r\n", b"\r\n\r\n", b"\n"]))
    raw = between.join(parts)
    if draw(st.integers(0, 2)) == 0:
        at, new = draw(st.integers(0, len(raw) - 1)), draw(st.sampled_from(DAMAGE))
        raw = raw[:at] + new + raw[at + draw(st.integers(0, 1)) :]
    starts = [len(between.join([*parts[:count], b""])) for count in range(1, len(parts))]
    if draw(st.integers(0, 5)) == 0:
        starts = []
    ends = [found.end() for found in re.finditer(rb"\r\n\r\n", raw)] if draw(st.booleans()) else []
    cuts = draw(st.lists(st.integers(0, len(raw)), max_size=4))
    return Sent(raw, (*starts, *ends, *cuts))


def seen_by_h11(raw: bytes) -> list[Seen]:
    """Return every request that h11 sees, until an error or the end of the connection."""
    found: list[Seen] = []
    rest = raw
    while rest := rest.lstrip(b"\r\n") if found else rest.removeprefix(b"\r\n"):
        begin = len(raw) - len(rest)
        connection = h11.Connection(h11.SERVER)
        connection.receive_data(rest)
        one: Seen | None = None
        version = b""
        try:
            while True:
                event = connection.next_event()
                if isinstance(event, h11.Request):
                    one, version = Seen(event.method, event.target, list(event.headers), begin), event.http_version
                    found.append(one)
                elif isinstance(event, h11.Data):
                    assert one is not None
                    one.body += bytes(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    break
                else:  # more data is needed
                    return found
        except h11.RemoteProtocolError as error:
            if one is None or not re.search(r"Transfer-Encoding|Content-Length", str(error)):
                return found
            # The head of this request was valid, so the error is about a trailer, which the edge drops.
            rest = rest[_bytes_until_error(rest) :]
        else:
            rest = connection.trailing_data[0]
        assert one is not None
        one.end = len(raw) - len(rest)
        closes = any(name == b"connection" and b"close" in value.lower() for name, value in one.headers)
        if closes or version < b"1.1":
            return found
    return found


def _bytes_until_error(raw: bytes) -> int:
    """Return how many bytes of a request h11 takes before it raises."""
    connection = h11.Connection(h11.SERVER)
    for count in range(len(raw)):
        connection.receive_data(raw[count : count + 1])
        try:
            while connection.next_event() is not h11.NEED_DATA:
                pass
        except h11.RemoteProtocolError:
            return count + 1
    raise AssertionError("h11 raised when it had all bytes at once")


Rule = Callable[[bytes, bytes], bool]  # of the bytes from the request on, and of its head alone


def _is_in_head(pattern: bytes) -> Rule:
    compiled = re.compile(pattern, re.IGNORECASE)
    return lambda rest, head: compiled.search(head) is not None


def _in_body(pattern: bytes) -> Rule:
    compiled = re.compile(pattern, re.IGNORECASE)
    return lambda rest, head: compiled.search(rest[len(head) :]) is not None


def _is_elsewhere(rest: bytes, head: bytes) -> bool:
    """Return whether the target is neither a path nor a URL of the named host."""
    target = head.split(b" ")[1]
    hosts = [each.strip(b" \t") for each in re.findall(rb"\nhost:([^\r]*)", head, re.IGNORECASE)]
    return not target.startswith((b"/", *(b"http://%b/" % host for host in hosts[:1])))


KNOWN_METHODS: Final = rb"GET|POST|HEAD|DELETE|OPTIONS|PUT"
CLOSE_IN_TRAILER: Final = _in_body(rb"\nconnection:[^\r]*close")
STRICTER: Final[dict[str, Rule]] = {
    "a version other than HTTP/1.0 and HTTP/1.1": _is_in_head(rb"\A\S+ \S+ (?!HTTP/1\.[01]\r\n)"),
    "CONNECT": _is_in_head(rb"\ACONNECT "),
    "a method that the parser does not know": lambda rest, head: re.match(rb"(" + KNOWN_METHODS + rb") ", head) is None,
    "a target that is no path of this host": _is_elsewhere,
    "a fragment": _is_in_head(rb"\A\S+ \S*#"),
    "a line that ends with a line feed alone": _is_in_head(rb"(?<!\r)\n"),
    "a folded header": _is_in_head(rb"\n[ \t]"),
    "a control character or DEL in a header": _is_in_head(rb"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f]"),
    "more than one length": lambda rest, head: len(re.findall(rb"\ncontent-length:", head, re.IGNORECASE)) > 1,
    "a list of lengths": _is_in_head(rb"\ncontent-length:[^\r]*,"),
    "a space inside or behind a length": _is_in_head(rb"\ncontent-length:[^\r]*\d[ \t]"),
    "a length together with chunks": lambda rest, head: (
        b"\ncontent-length:" in head.lower() and b"\ntransfer-encoding:" in head.lower()
    ),
    "a tab in a transfer coding": _is_in_head(rb"\ntransfer-encoding:[^\r]*\t"),
    "a transfer coding in HTTP/1.0": _is_in_head(rb" HTTP/1\.0\r(?s:.*)\ntransfer-encoding:"),
    "no host in HTTP/1.0": lambda rest, head: b" HTTP/1.0" in head and b"\nhost:" not in head.lower(),
    "space around a chunk's size": _in_body(rb"(\A|\n)[0-9a-f]*[ \t]"),
    "white space or a carriage return alone in a chunk's extension": _in_body(
        rb"(\A|\n)[0-9a-f]+;[^\n]*?([ \t]|\r(?!\n))"
    ),
    "a line feed alone in the chunks' frame": _in_body(rb"(?<!\r)\n"),
    "a malformed length or coding in a trailer": _in_body(rb"\n(content-length|transfer-encoding):"),
    "a close in a trailer": CLOSE_IN_TRAILER,
    "a control character in a chunk's extension or in a trailer": _in_body(rb"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f]"),
}


async def _delivered(sent: Sent, protocol: type[Http1Protocol]) -> tuple[list[DeliveredRequest], bool]:
    edge = MemoryConnection(protocol)
    for read in sent.reads:
        await edge.feed(read)
    is_closed = edge.socket.closing
    await edge.close()
    return edge.delivered, is_closed


def _comparable(headers: Headers) -> Headers:
    """Return the headers without Upgrade, which the edge ignores. h11 gives transfer codings in lower case."""
    stripped = [(name.lower(), value.strip(b" \t")) for name, value in headers if name.lower() != b"upgrade"]
    return [(name, value.lower() if name == b"transfer-encoding" else value) for name, value in stripped]


def _path(target: bytes) -> bytes:
    return re.sub(rb"\Ahttps?://[^/]*(?=/)", b"", target)


def check(sent: Sent, protocol: type[Http1Protocol] = Http1Protocol) -> None:
    """Raise AssertionError if the edge delivers what h11 does not see, or refuses without a named difference."""
    seen = seen_by_h11(sent.raw)
    delivered, is_closed = run_virtually(_delivered(sent, protocol))
    assert len(delivered) <= len(seen), "more requests than h11 sees"
    for ours, theirs in zip(delivered, seen, strict=False):
        assert ours.method.encode() == theirs.method
        assert ours.target == _path(theirs.target)
        assert _comparable(ours.headers) == _comparable(theirs.headers)
        assert theirs.body.startswith(ours.body), "another body"
        if ours.is_complete:
            assert theirs.end is not None, "h11 sees no end of this body"
            assert ours.body == theirs.body, "a body that ends sooner"
    complete = sum(each.is_complete for each in delivered)
    if complete < sum(each.end is not None for each in seen):
        assert is_closed, "neither served nor refused"
        first = seen[complete]
        rest = sent.raw[first.begin :]
        head = re.split(rb"(?<=\n)\r?\n", rest, maxsplit=1)[0]
        named = [name for name, rule in STRICTER.items() if rule(rest, head + b"\r\n")]
        end = (seen[complete - 1].end or 0) if complete else 0
        if complete:  # a trailer may close the connection after the answer to its request
            before = sent.raw[seen[complete - 1].begin : first.begin]
            head_before = re.split(rb"(?<=\n)\r?\n", before, maxsplit=1)[0]
            named += ["a close in the trailer before"] if CLOSE_IN_TRAILER(before, head_before) else []
        named += ["empty lines before a request"] if sent.raw[end : first.begin] not in (b"", b"\r\n") else []
        assert named or _is_pipelined(sent, end), "refused for no named reason"


def _is_pipelined(sent: Sent, end: int) -> bool:
    """Return whether the read that holds the end of a request also holds bytes of the next."""
    if end == 0:
        return False
    read_end, position = 0, 0
    for read in sent.reads:
        position += len(read)
        if position >= end:
            read_end = position
            break
    return bool(sent.raw[end:read_end].strip(b"\r\n"))


def smuggled() -> Sent:
    """A body that is a request, behind a head that asks for an upgrade, each in its own read."""
    head = b"POST /x HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\nContent-Length: %d\r\n\r\n" % len(
        INSIDE
    )
    return Sent(head + INSIDE, (len(head),))


def closed_by_a_trailer() -> Sent:
    """A request whose trailer closes the connection, and another request after its answer."""
    first = b"GET /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\nHost: a\r\n\r\n0\r\nConnection: close\r\n\r\n"
    return Sent(first + b"GET /x HTTP/1.1\r\nContent-Length: 0\r\nHost: a\r\n\r\n", (len(first),))


@given(connections())
@example(smuggled())
@example(closed_by_a_trailer())
@settings(max_examples=400)
def test_edge_delivers_what_h11_sees(sent: Sent) -> None:
    """400 connections: a quick version of the long check below."""
    check(sent)


@pytest.mark.deep
@pytest.mark.long
@pytest.mark.timeout(600)
@given(connections())
@settings(max_examples=8_000)
def test_edge_delivers_what_h11_sees_at_length(sent: Sent) -> None:
    check(sent)


class _BlindParser(httptools.HttpRequestParser):
    """A parser that does not report an upgrade."""

    def should_upgrade(self) -> bool:
        return False


class _WithoutRepair(Http1Protocol):
    """The edge as it would be if it served a request with Upgrade as the parser delivers it."""

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = _BlindParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _parse_without_upgrade(self, behind_head: bytes) -> None:
        pass


def _is_wrong(sent: Sent) -> bool:
    try:
        check(sent, _WithoutRepair)
    except AssertionError:
        return True
    return False


def test_control_smuggling_is_found() -> None:
    """An edge without the repair of Upgrade is found by generated connections alone."""
    found = find(connections(), _is_wrong, settings=settings(max_examples=5_000))
    assert b"pgrade" in found.raw
