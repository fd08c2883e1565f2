"""The load client parses answers cut at any byte, and takes no incomplete answer for a complete one."""

import pytest

from coldstart_bench.harness.load_protocol import HttpAnswerParser, parse_answer

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: "
JSON = b'{"choices":[{"text":"w1"}]}'
PLAIN = HEAD + b"application/json\r\nContent-Length: %d\r\n\r\n" % len(JSON) + JSON
FAILED = b'{"error":{"code":"overloaded"}}'
REFUSED = b"HTTP/1.1 503 X\r\nretry-after: 1\r\ncontent-length: %d\r\n\r\n" % len(FAILED) + FAILED
STREAM = HEAD + b"text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """Encode a chunk (RFC 9112, 7.1)."""
    return b"%x\r\n%s\r\n" % (len(data), data)


WORDS = chunk(b': waiting\n\ndata: {"choices":[{"text":"w1"}]}\n\n') + chunk(b'data: {"choices":[{"text":"w2"}]}\n\n')
WHOLE = STREAM + WORDS + chunk(b"data: [DONE]\n\n") + chunk(b"")
LOST = STREAM + WORDS + chunk(b'event: error\ndata: {"error":{"code":"replica_lost"}}\n\n') + chunk(b"")


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize(
    ("wire", "want"),
    [
        pytest.param(PLAIN, ("w1", "", True), id="a whole answer"),
        pytest.param(REFUSED, ("", "overloaded", True), id="a refusal"),
        pytest.param(WHOLE, ("w1w2", "", True), id="a stream"),
        pytest.param(LOST, ("w1w2", "replica_lost", True), id="a stream that ends with a failure"),
        pytest.param(STREAM + chunk(b"") + b"", ("", "", False), id="a stream that says nothing"),
    ],
)
def test_answer_in_any_pieces_is_parsed(wire: bytes, size: int, want: tuple[str, str, bool]) -> None:
    """An answer in pieces of any size is complete with its last byte, and not before."""
    answer = HttpAnswerParser()
    ends = [answer.feed(wire[at : at + size]) for at in range(0, len(wire), size)]
    assert ends == [*[False] * (len(ends) - 1), True]
    assert parse_answer(answer) == want
    assert answer.retry_after == (wire is REFUSED)


@pytest.mark.parametrize("body", [b"[]", b"7", b'{"error":"no"}', b'{"detail":"gone"}', b"<html>"])
@pytest.mark.parametrize("status", [b"200 OK", b"502 Bad Gateway"])
@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream"])
def test_answer_of_another_form_says_nothing(body: bytes, status: bytes, kind: bytes) -> None:
    """An answer of another form, as from a proxy, is read to its end and has neither text nor code."""
    if kind == b"text/event-stream":
        body = b"event: error\ndata: " + body + b"\n\n"
    answer = HttpAnswerParser()
    head = b"HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (status, kind, len(body))
    assert answer.feed(head + body)
    assert parse_answer(answer)[:2] == ("", "")


@pytest.mark.parametrize(
    "wire", [PLAIN[:-1], WHOLE[: WHOLE.index(b"[DONE]")], LOST[: LOST.index(b"event")], b"HT", b""]
)
def test_truncated_answer_is_incomplete(wire: bytes) -> None:
    """An answer cut short, or without its last event, is incomplete."""
    answer = HttpAnswerParser()
    assert not answer.feed(wire)
    assert not parse_answer(answer)[2]
