"""Malformed and ambiguous HTTP requests: smuggled bodies, doubled headers, codings, versions.

All go to one installation. After each test, a well-formed request on another connection is answered.
"""

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from coldstart_bench.harness.installation import Installation, run_command, running_installation
from tests.attack.attacker import SETTINGS, Bystander, RawTlsConnection, request
from tests.e2e.https_client import ask
from tests.e2e.tenants import Tenant, default_tenant, make_tenant
from tests.eventually import wait

pytestmark = [pytest.mark.deep, pytest.mark.timeout(600)]

BODY: Final = {"model": "m", "prompt": "w1", "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def up(scratch: Path, tiny: Path) -> Iterator[Installation]:
    """An installation with one model."""
    with running_installation(scratch / "forms", settings=SETTINGS) as up:
        up.push(tiny, "m")
        yield up


@pytest.fixture
def victim(up: Installation) -> Iterator[Tenant]:
    """A tenant whose well-formed request is answered after the attack."""
    tenant = default_tenant(up)
    yield tenant
    assert tenant.complete().status == 200


UPGRADES: Final = {
    "unknown": ("Connection: upgrade", "Upgrade: x"),
    "h2c": ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"),
    "websocket": ("Connection: keep-alive, Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"),
}


@pytest.mark.parametrize("upgrade", UPGRADES.values(), ids=UPGRADES.keys())
@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunks"])
def test_upgrade_smuggles_no_request(
    up: Installation, victim: Tenant, upgrade: tuple[str, ...], is_chunked: bool
) -> None:
    """A request hidden in the body of an upgrade request is not run.
    A proxy reuses the connection for a second caller, who gets the answer to their own request and no other.
    """
    inner = request(up, BODY)
    key = victim.infer.read_text().strip()
    if is_chunked:
        first = request(up, b"%x\r\n%b\r\n0\r\n\r\n" % (len(inner), inner), "Transfer-Encoding: chunked", *upgrade)
    else:
        first = request(up, inner, *upgrade)
    second = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n\r\n".encode()
    with RawTlsConnection(up) as wire:
        wire.send(first)
        refused = wire.answer()
        assert refused is not None
        assert (refused.status, refused.json["error"]["code"]) == (
            400,
            "invalid_request",
        )  # a raw HTTP request is not JSON
        wire.send(second)
        answer = wire.answer()
        assert answer is not None
        assert (answer.status, answer.json.get("object")) == (200, "list")
        assert wire.more() is None


FORMS: Final = {
    "two keys": (b"", ("Authorization: Bearer kv-0-0",)),
    "two deadlines": (b"", ("x-kelvin-deadline-ms: 1", "x-kelvin-deadline-ms: 60000")),
    "two sessions": (b"", ("x-kelvin-session: a", "x-kelvin-session: b")),
    "two lengths": (b"", ("Content-Length: 1", "Content-Length: 71")),
    "gzip, chunked": (b"0\r\n\r\n", ("Transfer-Encoding: gzip, chunked",)),
    "chunked and a length": (b"0\r\n\r\n", ("Transfer-Encoding: chunked", "Content-Length: 5")),
    "gzip content": (b"", ("Content-Encoding: gzip",)),
}


@pytest.mark.parametrize(("raw", "headers"), FORMS.values(), ids=FORMS.keys())
def test_ambiguous_form_is_refused(up: Installation, victim: Tenant, raw: bytes, headers: tuple[str, ...]) -> None:
    """A header given twice, or a coding that the server does not undo, is 400. Nothing after it is run as a request."""
    with RawTlsConnection(up) as wire:
        wire.send(request(up, raw or BODY, *headers))
        answer = wire.answer()
        assert answer is not None
        assert answer.status == 400, answer.raw
        if (following := wire.more(0.3)) is not None:
            assert following.status == 400


@pytest.mark.parametrize("version", ["HTTP/2.0", "HTTP/1.2", "HTTP/0.9", "RTSP/1.0"])
def test_other_versions_are_refused(up: Installation, victim: Tenant, version: str) -> None:
    """A request line with an unsupported HTTP version is 400."""
    with RawTlsConnection(up) as wire:
        wire.send(request(up, BODY, version=version))
        answer = wire.answer()
        assert answer is not None
        assert answer.status == 400


def test_trailers_are_dropped(up: Installation, victim: Tenant) -> None:
    """A key, a length and a host in the trailers are ignored: each body is answered once."""
    raw = json.dumps(BODY).encode()
    trailers = b"Authorization: Bearer kv-0-0\r\nContent-Length: 3\r\nHost: elsewhere\r\nTransfer-Encoding: gzip\r\n"
    chunks = b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(raw), raw, trailers)
    with RawTlsConnection(up) as wire:
        for _ in range(2):
            wire.send(request(up, chunks, "Transfer-Encoding: chunked"))
            answer = wire.answer()
            assert answer is not None
            assert answer.status == 200, answer.raw
        assert wire.more(0.3) is None


def test_retry_hint_is_reachable(up: Installation, victim: Tenant, scratch: Path) -> None:
    """A request above its tenant's tokens per minute is refused without a retry hint. A smaller one succeeds by its
    hints."""
    small = make_tenant(up, "small", scratch, "--tpm", "100")
    code, out, err = run_command(up.data, "models", "grant", "m", "small")
    assert code == 0, out + err
    wait(lambda: small.complete(model="default/m").status != 404, "the grant is known")
    refused = small.complete(model="default/m", max_tokens=2000)
    assert (refused.status, refused.json["error"]["code"]) == (400, "request_exceeds_rate")
    assert "retry-after" not in refused.headers
    limit = time.monotonic() + 70
    while (answer := small.complete(model="default/m", max_tokens=4)).status == 429:
        assert time.monotonic() < limit, "the retry hints never led to an answer"
        time.sleep(float(answer.headers["retry-after"]))
    assert answer.status == 200, answer.raw


def test_locked_database(up: Installation, victim: Tenant, scratch: Path, tiny: Path) -> None:
    """While another process holds the database's write lock, requests are answered and changes are refused with 503.
    Afterwards a budget of one micro-unit stops all requests.
    """
    spender = make_tenant(up, "locked", scratch)
    assert spender.push(tiny)["exit"] == 0
    assert spender.complete().status == 200
    with closing(sqlite3.connect(up.data / "kelvin.db", timeout=30, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        try:
            with Bystander(victim.complete) as bystander:
                refused = ask(up, "POST", "/admin/v1/tenants", up.data / "admin.key", {"tenant": "late"})
                assert (refused.status, refused.json["code"]) == (503, "unavailable"), refused.raw
                bystander.wait_for(1)
                assert spender.complete().status == 200
        finally:
            other.execute("ROLLBACK")
    assert bystander.failures == []
    code, out, err = run_command(up.data, "tenants", "set", "locked", "--budget-micros", "1")
    assert code == 0, out + err
    wait(lambda: spender.complete().status == 429, "the budget is enforced", 40)
    codes = {spender.complete().json.get("error", {}).get("code") for _ in range(50)}
    assert codes == {"insufficient_quota"}
