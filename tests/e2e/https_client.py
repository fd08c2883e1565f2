"""A small HTTPS client: tests see the status, headers and events as sent."""

import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from coldstart_bench.harness.installation import Installation


@dataclass(slots=True)
class Answer:
    """A response. `events` are the decoded data of SSE events, `comments` the comment lines."""

    status: int
    headers: dict[str, str]
    raw: bytes
    events: list[dict[str, Any]] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    error: dict[str, Any] | None = None
    done: bool = False

    @property
    def json(self) -> Any:
        """The body of a response that was not streamed."""
        return json.loads(self.raw)

    @property
    def text(self) -> str:
        """The text of a completion, streamed or not."""
        chunks = self.events or [self.json]
        return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def connect(kelvin: Installation) -> http.client.HTTPSConnection:
    """Return a new TLS connection that trusts the installation's CA."""
    context = ssl.create_default_context(cafile=str(kelvin.data / "ca.pem"))
    return http.client.HTTPSConnection("localhost", kelvin.port, context=context, timeout=120)


def headers(kelvin: Installation, key_file: str = "default.key", **extra: str) -> dict[str, str]:
    """Return authorization and content type. Names in `extra` use underscores."""
    key = (kelvin.data / key_file).read_text().strip()
    named = {name.replace("_", "-"): value for name, value in extra.items()}
    return {"authorization": f"Bearer {key}", "content-type": "application/json", **named}


PATIENCE: Final = 60  # attempts


def post(kelvin: Installation, path: str, body: object, **extra: str) -> Answer:
    """POST JSON and read the response. Send it again after `Retry-After` while the breaker is open."""
    for _ in range(PATIENCE):
        answer = _post(kelvin, path, body, **extra)
        if answer.status != 503 or b'"breaker_open"' not in answer.raw:
            break
        time.sleep(float(answer.headers["retry-after"]))
    return answer


def _post(kelvin: Installation, path: str, body: object, key_file: str = "default.key", **extra: str) -> Answer:
    return ask(kelvin, "POST", path, kelvin.data / key_file, body, headers(kelvin, key_file, **extra))


def ask(
    kelvin: Installation,
    method: str,
    path: str,
    key: Path,
    body: object | None = None,
    more: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> Answer:
    """Make one call with this key and additional headers, on a new connection.
    Raises TimeoutError if nothing arrives for `timeout_s`.
    """
    connection = connect(kelvin)
    connection.timeout = timeout_s
    try:
        sent = {**headers(kelvin, str(key.absolute())), **(more or {})}
        connection.request(method, path, None if body is None else json.dumps(body), sent)
        return read(connection.getresponse())
    finally:
        connection.close()


def complete(kelvin: Installation, model: str, prompt: str, **fields: object) -> Answer:
    """Request a completion, greedy by default."""
    return post(kelvin, "/v1/completions", {"model": model, "prompt": prompt, "temperature": 0, **fields})


def read(answer: http.client.HTTPResponse) -> Answer:
    """Read a response to its end and parse its SSE events."""
    found = Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    if not found.headers.get("content-type", "").startswith("text/event-stream"):
        return found
    for block in found.raw.decode().split("\n\n"):
        failed = "event: error" in block.splitlines()
        for line in block.splitlines():
            if line.startswith(":"):
                found.comments.append(line[1:].strip())
            elif line == "data: [DONE]":
                found.done = True
            elif line.startswith("data: ") and failed:
                found.error = json.loads(line[6:])["error"]
            elif line.startswith("data: "):
                found.events.append(json.loads(line[6:]))
    return found


def all_at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Run the calls in threads that start together. Return the results in order. Raises the first error."""
    gate = threading.Barrier(len(calls))

    def one(call: Callable[[], Any]) -> Any:
        gate.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(one, calls))
