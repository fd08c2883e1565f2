"""The proxy passes requests on unchanged, and each fault sends on the wire what it promises."""

import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.faults.fault_proxy import FaultProxy
from tests.faults.http_faults import (
    SLOW_DOWN,
    ClosedConnection,
    DelayedAnswer,
    Fault,
    LostAnswer,
    StaleAnswer,
    StalledBody,
    SwappedAnswer,
    TruncatedBody,
    flipped,
    truncated,
    zeroed,
)

BODY = bytes(range(1, 200))


class _ObjectServer(BaseHTTPRequestHandler):
    """A server for GET, HEAD and PUT of objects in a dictionary."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]

    def do_PUT(self) -> None:
        self.objects[self.path] = self.rfile.read(int(self.headers["content-length"]))
        self._answer(200, b"")

    def do_GET(self) -> None:
        found = self.objects.get(self.path)
        self._answer(404 if found is None else 200, found or b"")

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    """A proxy in front of a server with two objects."""
    _ObjectServer.objects = {"/a": BODY, "/b": b"another"}
    server = ThreadingHTTPServer(("127.0.0.1", 0), _ObjectServer)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    with FaultProxy("127.0.0.1", server.server_address[1]) as proxy:
        yield proxy
    server.shutdown()
    server.server_close()
    thread.join()


def ask(proxy: FaultProxy, method: str = "GET", target: str = "/a", body: bytes | None = None) -> tuple[int, bytes]:
    """Return status and body. Raises what `http.client` raises."""
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=30)
    try:
        connection.request(method, target, body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_exchange_without_a_fault_passes(proxy: FaultProxy) -> None:
    """Bodies, statuses and HEAD pass, and the proxy counts every exchange."""
    assert ask(proxy) == (200, BODY)
    assert ask(proxy, "PUT", "/c", b"new") == (200, b"")
    assert ask(proxy, target="/c") == (200, b"new")
    assert ask(proxy, "HEAD") == (200, b"")
    assert ask(proxy, target="/none") == (404, b"")
    assert [proxy.count(method) for method in ("GET", "PUT", "HEAD")] == [3, 1, 1]


@pytest.mark.parametrize(
    ("fault", "status", "body"),
    [
        pytest.param(DelayedAnswer(0.001), 200, BODY, id="late, but whole"),
        pytest.param(SLOW_DOWN, 503, b"SlowDown", id="slow down"),
        pytest.param(truncated(7), 200, BODY[:7], id="fewer bytes in a well-formed answer"),
        pytest.param(flipped(3), 200, BODY[:3] + bytes([BODY[3] ^ 0x10]) + BODY[4:], id="one bit"),
        pytest.param(zeroed(), 200, bytes(len(BODY)), id="zeroes"),
        pytest.param(SwappedAnswer("/b"), 200, b"another", id="another object"),
    ],
)
def test_faults_that_are_answers(proxy: FaultProxy, fault: Fault, status: int, body: bytes) -> None:
    """The fault changes one exchange, and the next one is unchanged."""
    proxy.inject(fault)
    answered_status, found = ask(proxy)
    assert answered_status == status
    assert found == body or (status == 503 and body in found)
    assert ask(proxy) == (200, BODY)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        pytest.param(ClosedConnection(), ConnectionError, id="a connection that is closed"),
        pytest.param(LostAnswer(), ConnectionError, id="an answer that is lost"),
        pytest.param(TruncatedBody(50), http.client.IncompleteRead, id="a body that is cut"),
    ],
)
def test_cutting_faults_break_the_connection(proxy: FaultProxy, fault: Fault, error: type[Exception]) -> None:
    """The client sees the connection break, and the next exchange is unchanged."""
    proxy.inject(fault)
    with pytest.raises(error):
        ask(proxy)
    assert ask(proxy) == (200, BODY)


def test_lost_answer_was_executed_and_refused_was_not(proxy: FaultProxy) -> None:
    """A PUT whose answer is lost took effect; a PUT whose connection is closed did not."""
    for fault, status in ((ClosedConnection(), 404), (LostAnswer(), 200)):
        proxy.inject(fault, method="PUT")
        with pytest.raises(ConnectionError):
            ask(proxy, "PUT", "/d", b"x")
        assert ask(proxy, target="/d")[0] == status


def test_stale_is_the_first_answer(proxy: FaultProxy) -> None:
    """`StaleAnswer` sends the first answer to the same request, even after the object was written."""
    assert ask(proxy, target="/e")[0] == 404
    ask(proxy, "PUT", "/e", b"now")
    proxy.inject(StaleAnswer(), method="GET", holding="/e", times=2)
    assert ask(proxy, target="/a") == (200, BODY)
    assert ask(proxy, target="/e")[0] == 404
    assert ask(proxy, target="/e")[0] == 404
    assert ask(proxy, target="/e") == (200, b"now")


def test_lifting_faults_releases_waiting_clients(proxy: FaultProxy) -> None:
    """A client that waits in `DelayedAnswer` gets its answer; one in `StalledBody` is cut off."""
    proxy.inject(DelayedAnswer(), holding="/a", times=None)
    proxy.inject(StalledBody(3), holding="/b", times=None)
    answers: list[object] = []

    def late() -> None:
        answers.append(ask(proxy))

    def stalled() -> None:
        with pytest.raises(http.client.IncompleteRead) as broken:
            ask(proxy, target="/b")
        answers.append(broken.value.partial)

    threads = [threading.Thread(target=work) for work in (late, stalled)]
    for thread in threads:
        thread.start()
    proxy.wait_until_seen(2, "GET")
    assert answers == []
    proxy.lift()
    for thread in threads:
        thread.join(30)
    assert sorted(answers, key=str) == sorted([(200, BODY), b"ano"], key=str)
