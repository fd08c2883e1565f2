"""An OTLP collector for tests, as a process. It decodes protobuf over HTTP and shows what it received.

`running()` starts it. It accepts everything, refuses everything (503) or never responds (`hang`), as last set by
`become`.
"""

import contextlib
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

MODES: Final = ("take", "refuse", "hang")


@dataclass
class Received:
    """Received traces as protobuf's JSON, newest last, with headers and counts."""

    mode: str = "take"
    released: threading.Event = field(default_factory=threading.Event)
    traces: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    asked: int = 0


class _Door(BaseHTTPRequestHandler):
    received: Received

    def do_POST(self) -> None:
        from google.protobuf.json_format import MessageToDict
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path.startswith("/mode/"):
            self.received.mode = self.path.removeprefix("/mode/")
            if self.received.mode != "hang":
                self.received.released.set()
            self._answer(200, b"")
            return
        self.received.asked += 1
        self.received.headers.append({name.lower(): value for name, value in self.headers.items()})
        if self.received.mode == "hang":
            self.received.released.wait()
            return
        if self.received.mode == "refuse":
            self._answer(503, b"")
            return
        assert self.headers["content-type"] == "application/x-protobuf"
        if self.path == "/v1/traces":
            spans = ExportTraceServiceRequest.FromString(body)
            self.received.traces.append(MessageToDict(spans, preserving_proto_field_name=True))
        else:
            self._answer(404, b"")
            return
        self._answer(200, b"")

    def do_GET(self) -> None:
        seen = self.received
        everything = {"traces": seen.traces, "headers": seen.headers, "asked": seen.asked}
        self._answer(200, json.dumps(everything).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Write no access log."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True


@dataclass(frozen=True)
class Receiver:
    """A client of the collector process."""

    endpoint: str

    def become(self, mode: str) -> None:
        """Set the mode to one of MODES."""
        assert mode in MODES
        request = urllib.request.Request(f"{self.endpoint}/mode/{mode}", data=b"", method="POST")
        urllib.request.urlopen(request, timeout=10).close()

    def seen(self) -> Any:
        """Return everything received so far."""
        with urllib.request.urlopen(self.endpoint, timeout=10) as answer:
            return json.load(answer)

    def spans(self) -> list[dict[str, Any]]:
        """Return every span with its attributes as a dict, and its resource's attributes under `resource`."""
        return [
            {
                **span,
                "attributes": plain(span.get("attributes", [])),
                "resource": plain(group["resource"]["attributes"]),
            }
            for batch in self.seen()["traces"]
            for group in batch["resource_spans"]
            for scope in group["scope_spans"]
            for span in scope["spans"]
        ]

    def trace_of(self, request_id: str) -> list[dict[str, Any]]:
        """Return the spans of the request's trace, the root span first."""
        spans = self.spans()
        for whole in spans:
            if whole["attributes"].get("kelvin.request_id") == request_id:
                return [whole, *(span for span in spans if span.get("parent_span_id") == whole["span_id"])]
        return []


def plain(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return OTLP attributes as a dict. Protobuf's JSON has 64-bit numbers as text."""
    read: dict[str, Callable[[Any], Any]] = {"string_value": str, "int_value": int, "bool_value": bool}
    return {
        item["key"]: read[kind](value) for item in attributes for kind, value in item["value"].items() if kind in read
    }


@contextlib.contextmanager
def running() -> Iterator[Receiver]:
    """Run the collector until the block ends."""
    command = [sys.executable, "-m", "tests.kelvin.telemetry.receiver"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield Receiver(f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    """Print the port, serve until killed."""
    _Door.received = Received()
    server = _Server(("127.0.0.1", 0), _Door)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
