"""Pods as a bench starts them: `kelvin runtime` for a version, or waiting for one; their orders, and a first token."""

import http.client
import json
import os
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coldstart_bench.installation import InstallationFailed, free_port
from coldstart_bench.services import service
from contracts.frames import FrameDecoder, FrameKind
from contracts.jobs import Take
from contracts.roles import Role
from contracts.wire import encode

CLASS: Final = "cpu-1"
HOST: Final = "127.0.0.1"
PROBE: Final = {"k-network-probe": "queue"}
BODY: Final = {"prompt": [1, 2, 3, 4], "max_tokens": 1, "temperature": 0, "stream": True}
CALL_S: Final = 120.0
NOT_THERE: Final = (OSError, http.client.HTTPException, InstallationFailed)


@dataclass(frozen=True, slots=True)
class PodGround:
    """What pods of a run have in common: a place for what they keep, the store's URL, settings, certificates."""

    place: Path
    store: str
    settings: Mapping[str, str]
    inner: Path


@contextmanager
def own_pod(ground: PodGround, version: str, name: str) -> Iterator[int]:
    """The port of a pod that serves the version, from when it takes requests on. Nothing of it is left."""
    port = free_port()
    words = [version, "--tenant", "default", "--model", "bench"]
    with _pod(ground, words, name, port, {}, lambda: _takes_requests(port)):
        yield port


@dataclass(frozen=True, slots=True)
class ParkedPod:
    """One that waits; `pid` is its supervisor's."""

    port: int
    orders: int
    pid: int
    inner: Path

    def bind(self, take: Take) -> None:
        """Have the pod serve a version. Returns when it does. Raises InstallationFailed."""
        self._order("POST", "/control/bind", encode(take))

    def release(self, take: Take) -> None:
        """Release the version. Returns before the pod waits again. Raises InstallationFailed."""
        self._order("POST", "/control/release", encode(take))

    def waits(self) -> bool:
        """Whether it takes an order now."""
        try:
            return bool(json.loads(self._order("GET", "/control/state"))["state"] == "standby")
        except NOT_THERE:
            return False

    def _order(self, method: str, path: str, body: bytes | None = None) -> bytes:
        tls, own = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), self.inner / Role.CONTROLPLANE
        tls.check_hostname = False  # what counts is the role
        tls.load_verify_locations(own / "ca.crt")
        tls.load_cert_chain(own / "tls.crt", own / "tls.key")
        return _ask(http.client.HTTPSConnection(HOST, self.orders, timeout=CALL_S, context=tls), method, path, body)


@contextmanager
def parked_pod(ground: PodGround, name: str) -> Iterator[ParkedPod]:
    """From when it waits on. Nothing of it is left."""
    port, orders = free_port(), free_port()
    more = {"KELVIN_STANDBY_LISTEN": f"{HOST}:{orders}", "KELVIN_INNER_TLS": str(ground.inner)}
    there = ParkedPod(port, orders, 0, ground.inner)
    with _pod(ground, ["--standby", CLASS], name, port, more, there.waits) as pid:
        yield ParkedPod(port, orders, pid, ground.inner)


@contextmanager
def _pod(
    ground: PodGround, words: list[str], name: str, port: int, more: Mapping[str, str], is_ready: Callable[[], bool]
) -> Iterator[int]:
    at = ground.place / name
    at.mkdir()
    command = [sys.executable, "-m", "kelvin.main", "runtime", *words, "--threads", "1", "--store", ground.store]
    command += ["--host", HOST, "--port", str(port), "--data", str(at / "data")]
    with service(command, {**os.environ, **ground.settings, **more}, at / "said", is_ready, f"the pod {name}") as pid:
        yield pid


def _takes_requests(port: int) -> bool:
    """As an activator asks a pod that the cluster doesn't call ready yet."""
    connection = http.client.HTTPConnection(HOST, port, timeout=CALL_S)
    try:
        return _ask(connection, "GET", "/healthz", None, PROBE) == b"queue"
    except NOT_THERE:
        return False


def first_token(port: int) -> tuple[float, str]:
    """When it came, on `time.perf_counter`, and its text. The answer is read to its end. Raises InstallationFailed."""
    connection = http.client.HTTPConnection(HOST, port, timeout=CALL_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(BODY), {"x-kelvin-request-id": "bench"})
        answer, frames, came_s, text = connection.getresponse(), FrameDecoder(), 0.0, ""
        while part := answer.read1():
            for frame in frames.feed(part):
                if frame.kind is FrameKind.DATA and not came_s:
                    came_s, text = time.perf_counter(), _text(frame.payload)
        if not came_s:
            raise InstallationFailed(f"a pod answered {answer.status} without a token")
        return came_s, text
    finally:
        connection.close()


def _text(payload: bytes) -> str:
    event = payload.split(b"\n", 1)[0].removeprefix(b"data: ")
    return str(json.loads(event)["choices"][0]["text"])


def _ask(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    try:
        connection.request(method, path, body, dict(headers or {}))
        answer = connection.getresponse()
        raw = answer.read()
    finally:
        connection.close()
    if answer.status >= 400:
        raise InstallationFailed(f"{method} {path}: {answer.status} {raw.decode(errors='replace')[:500]}")
    return raw
