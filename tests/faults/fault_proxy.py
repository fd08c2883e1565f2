"""An HTTP/1.1 proxy on its own port that injects faults into chosen exchanges. Plain TCP towards both sides.

Within `with FaultProxy(host, port) as proxy:` clients use `proxy.url`. `proxy.inject(fault, method=…, holding=…,
times=…)` plays the fault in matching exchanges, and `proxy.lift()` ends all faults. `proxy.seen` lists the exchanges.
"""

import http.client
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from tests.eventually import wait
from tests.faults.http_faults import Answer, Fault, Request

TIMEOUT_S = 60.0
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "proxy-connection", "te"})


@dataclass
class _Rule:
    fault: Fault
    method: str | None
    holding: str
    left: int | None

    def takes(self, request: Request) -> bool:
        """Return whether this rule applies to the request, and count it."""
        if self.left == 0 or self.method not in (None, request.method) or self.holding not in request.target:
            return False
        if self.left is not None:
            self.left -= 1
        return True


@dataclass(frozen=True)
class Seen:
    """One exchange. `fault` is None if the proxy passed it on unchanged."""

    request: Request
    fault: Fault | None


class FaultProxy:
    """The proxy. Thread-safe; faults may be injected and lifted at any time."""

    def __init__(self, host: str, port: int) -> None:
        self.seen: list[Seen] = []
        self.upstream = (host, port)
        self._rules: list[_Rule] = []
        self._first: dict[tuple[str, str, str], Answer] = {}
        self._lock = threading.Lock()
        self._lifted = threading.Event()
        self._open: set[socket.socket] = set()
        proxy = self

        class Handler(_Handler):
            def setup(self) -> None:
                self.proxy = proxy
                super().setup()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False  # so that closing waits for all of them
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="fault proxy")

    def __repr__(self) -> str:
        return f"<FaultProxy {self.url} faults={len(self._rules)} seen={len(self.seen)}>"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._lifted.set()
        self._server.shutdown()
        with self._lock:
            for connection in self._open:
                _shut(connection)
        self._server.server_close()
        self._thread.join()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """The URL that clients use."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """The number of open client connections."""
        with self._lock:
            return len(self._open)

    def inject(self, fault: Fault, *, method: str | None = None, holding: str = "", times: int | None = 1) -> None:
        """Play `fault` in the next `times` exchanges (None: in all) whose target contains `holding`.

        Only the first matching rule applies to an exchange.
        """
        with self._lock:
            self._rules.append(_Rule(fault, method, holding, times))

    @contextmanager
    def faulty(self, fault: Fault, *, method: str | None = None, holding: str = "") -> Iterator[None]:
        """Inject `fault` into all matching exchanges until the block ends. Ends all other faults, too."""
        self.inject(fault, method=method, holding=holding, times=None)
        try:
            yield
        finally:
            self.lift()

    def lift(self) -> None:
        """End all faults and release the exchanges that wait in them. Keeps `seen` and the recorded answers."""
        with self._lock:
            self._rules.clear()
            lifted, self._lifted = self._lifted, threading.Event()
        lifted.set()

    def forget(self) -> None:
        """Drop `seen`, and the answers that `StaleAnswer` would send."""
        with self._lock:
            self.seen.clear()
            self._first.clear()

    def count(self, method: str, holding: str = "") -> int:
        """Return how many exchanges there were so far."""
        with self._lock:
            return sum(seen.request.method == method and holding in seen.request.target for seen in self.seen)

    def wait_until_seen(self, count: int, method: str, holding: str = "", limit_s: float = TIMEOUT_S) -> None:
        """Wait until `count` exchanges began. Fails after `limit_s`."""
        wait(lambda: self.count(method, holding) >= count, f"{count} exchanges of {method} {holding} begin", limit_s)

    def _choose(self, request: Request) -> tuple[Fault | None, threading.Event]:
        with self._lock:
            rule = next((rule for rule in self._rules if rule.takes(request)), None)
            self.seen.append(Seen(request, rule.fault if rule else None))
            return (rule.fault if rule else None), self._lifted

    def _remember(self, request: Request, answer: Answer) -> None:
        with self._lock:
            self._first.setdefault(request.identity, answer)

    def _first_of(self, request: Request) -> Answer | None:
        with self._lock:
            return self._first.get(request.identity)

    def _opened(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.add(connection)

    def _closed(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)


class _Handler(BaseHTTPRequestHandler):
    """One client connection, with its own connection to the server."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    timeout = TIMEOUT_S
    proxy: FaultProxy

    def setup(self) -> None:
        super().setup()
        self.proxy._opened(self.connection)
        self.upstream = http.client.HTTPConnection(*self.proxy.upstream, timeout=TIMEOUT_S)

    def finish(self) -> None:
        self.upstream.close()
        self.proxy._closed(self.connection)
        with suppress(OSError):  # the client has closed the connection, or a fault has
            super().finish()

    def handle(self) -> None:
        with suppress(OSError):
            super().handle()

    def handle_expect_100(self) -> bool:
        """Answer at once. Otherwise a client that sends `Expect: 100-continue` would wait a second."""
        passed = super().handle_expect_100()
        self.wfile.flush()
        return passed

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing. Tests read `seen`."""

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, self.path, headers, body)
        fault, lifted = self.proxy._choose(request)
        exchange = _Exchange(self, request, lifted)
        if fault is None:
            exchange.send(exchange.ask())
        else:
            fault(exchange)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass


class _Exchange:
    """The proxy's `http_faults.Exchange`."""

    def __init__(self, handler: _Handler, request: Request, lifted: threading.Event) -> None:
        self._handler = handler
        self._request = request
        self._lifted = lifted

    @property
    def request(self) -> Request:
        return self._request

    def ask(self, request: Request | None = None) -> Answer:
        sent = request or self._request
        response = self._reach(sent)
        kept = [(name, value) for name, value in response.getheaders() if name.lower() not in _HOP_BY_HOP]
        if sent.method == "HEAD" and (length := response.getheader("content-length")):
            kept.append(("Content-Length", length))
        answer = Answer(response.status, tuple(kept), response.read())
        if request is None:
            self._handler.proxy._remember(sent, answer)
        return answer

    def _reach(self, sent: Request) -> http.client.HTTPResponse:
        upstream = self._handler.upstream
        headers = {name: value for name, value in sent.headers.items() if name not in ("connection", "expect")}
        try:
            upstream.request(sent.method, sent.target, sent.body or None, headers)
            return upstream.getresponse()
        # the server closed an idle connection: send the request once more
        except (ConnectionError, http.client.RemoteDisconnected):
            upstream.close()
            upstream.request(sent.method, sent.target, sent.body or None, headers)
            return upstream.getresponse()

    def first(self) -> Answer:
        return self._handler.proxy._first_of(self._request) or self.ask()

    def send(self, answer: Answer, *, cut_after: int | None = None) -> None:
        handler, bodiless = self._handler, self._request.method == "HEAD"
        handler.send_response_only(answer.status)
        for name, value in answer.headers:
            handler.send_header(name, value)
        if not bodiless and answer.status not in (204, 304):
            handler.send_header("Content-Length", str(len(answer.body)))
        handler.end_headers()
        if not bodiless:
            handler.wfile.write(answer.body if cut_after is None else answer.body[:cut_after])
        handler.wfile.flush()
        if cut_after is not None:
            handler.close_connection = True

    def cut(self) -> None:
        # Linger of zero: the client sees a reset, as from a peer that died, not an orderly end.
        self._handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._handler.close_connection = True

    def wait(self, seconds: float | None) -> None:
        self._lifted.wait(TIMEOUT_S if seconds is None else seconds)


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)
