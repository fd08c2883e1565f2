"""Serve a directory as a read-only S3 store with limited bandwidth, and count the bytes that it sends.

Arguments: directory, bytes per second. It prints `ready`. A line of JSON on stdin is answered with the port and, per
access key and for `all`, how many bytes of packs were sent, and how many of them for the first time. Signatures are not
verified.
"""

import re
import sys
import threading
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from coldstart_bench.programs.json_lines import answer_lines

ALL = "all"  # count over all access keys
PIECE = 64 << 10
BLOCK = 4096  # first-time bytes are counted in pages, because chunks are whole pages


class SharedBandwidth:
    """A link that all connections share: each piece waits for the pieces before it."""

    def __init__(self, rate: float) -> None:
        self._rate, self._lock, self._free_at = rate, threading.Lock(), 0.0

    def pass_through(self, length: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + length / self._rate
            wait = self._free_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)


class TrafficCount:
    """Bytes of packs that were sent to one access key."""

    def __init__(self) -> None:
        self.lock, self.sent, self.seen = threading.Lock(), 0, set[tuple[str, int]]()

    def add(self, key: str, at: int, length: int) -> None:
        with self.lock:
            self.sent += length
            self.seen.update((key, block) for block in range(at // BLOCK, -(-(at + length) // BLOCK)))


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of an object, and GET of a listing."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a small body would wait for the acknowledgement of its head
    root: Path
    line: SharedBandwidth
    counts: dict[str, TrafficCount]

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing for a request."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        _, _, key = unquote(parts.path).lstrip("/").partition("/")  # the part after the bucket's name
        if key:
            self._object(key)
        else:
            self._list(parse_qs(parts.query).get("prefix", [""])[0])

    def do_HEAD(self) -> None:
        self.do_GET()

    def _list(self, prefix: str) -> None:
        found = sorted(path.relative_to(self.root).as_posix() for path in self.root.rglob("*") if path.is_file())
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f'<ETag>"e"</ETag><Size>{(self.root / key).stat().st_size}</Size></Contents>'
            for key in found
            if key.startswith(prefix)
        )
        body = f"<?xml version='1.0'?><ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
        self._head(200, len(body))
        self.wfile.write(body.encode())

    def _object(self, key: str) -> None:
        path = self.root / key
        if ".." in key or not path.is_file():
            body = b"<Error><Code>NoSuchKey</Code></Error>"
            self._head(404, len(body))
            if self.command == "GET":
                self.wfile.write(body)
            return
        size = path.stat().st_size
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        first, last = (int(asked[1]), min(int(asked[2] or size), size - 1)) if asked else (0, size - 1)
        if asked and first >= size:
            self._head(416, 0)
            return
        more = {"content-range": f"bytes {first}-{last}/{size}"} if asked else {}
        self._head(206 if asked else 200, last + 1 - first, etag='"e"', **more)
        if self.command == "GET":
            self._send(key, path, first, last + 1)

    def _send(self, key: str, path: Path, at: int, end: int) -> None:
        credential = re.search(r"Credential=([^/]+)/", self.headers.get("authorization", ""))
        counts = [self.counts[name] for name in (credential[1] if credential else "nobody", ALL)]
        with path.open("rb") as file:
            file.seek(at)
            while at < end:
                piece = file.read(min(PIECE, end - at))
                self.line.pass_through(len(piece))
                self.wfile.write(piece)
                for count in counts if "/packs/" in key else ():
                    count.add(key, at, len(piece))
                at += len(piece)

    def _head(self, status: int, length: int, **headers: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(length))
        self.send_header("last-modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


class Server(ThreadingHTTPServer):
    """A threaded server whose connections don't keep the process alive."""

    daemon_threads = True
    request_queue_size = 1024

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a client that disconnected."""


def main() -> None:
    """Serve until stdin ends."""
    Handler.root, Handler.line = Path(sys.argv[1]), SharedBandwidth(float(sys.argv[2]))
    Handler.counts = defaultdict(TrafficCount)
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def counted() -> dict[str, object]:
        counts = {name: [count.sent, len(count.seen) * BLOCK] for name, count in list(Handler.counts.items())}
        return {"port": server.server_port, "counts": counts}

    answer_lines(counted)


if __name__ == "__main__":
    main()
