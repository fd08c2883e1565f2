"""Installations under measurement: ports, failed starts, lost connections, and leftovers."""

import asyncio
import os
import secrets
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web

from coldstart_bench.harness import installation
from coldstart_bench.harness.installation import (
    FIRST_PORT,
    HttpsClient,
    Installation,
    InstallationFailed,
    find_leftovers,
    find_stray_sockets,
    find_unfinished_writes,
    free_port,
    free_ports,
    running_installation,
)
from coldstart_bench.harness.temporary_certificates import make_certificate
from tests.eventually import wait
from tests.loop_thread import running_http_server


def test_a_port_is_none_that_a_connection_may_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A free port is below the ephemeral range, and a port in use is drawn again."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    port = free_port()
    assert FIRST_PORT <= port < low
    with socket.create_server(("127.0.0.1", port)):
        other = free_port()
        drawn = iter([each - FIRST_PORT for each in (port, port, other)])
        monkeypatch.setattr(secrets, "randbelow", lambda _: next(drawn))
        assert free_port() == other


def test_long_log_blocks_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log larger than a pipe blocks no start, and its end is in the error."""
    program = "import sys; print('noise ' * 40_000, 'the reason', file=sys.stderr, flush=True); print('not today')"
    (tmp_path / "kelvin_noisy.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(InstallationFailed, match=r"(?s)not today.*the reason"):
        running_installation(tmp_path, program="kelvin_noisy").__enter__()


def test_lost_connection_is_a_failure_of_the_installation(tmp_path: Path) -> None:
    """A cut stream and a refused connection raise InstallationFailed. The next call uses a new connection."""
    certificate, private = make_certificate(tmp_path / "tls")
    (tmp_path / "key").write_text("k")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, private)

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET":
            return web.json_response({"models": []})
        stream = web.StreamResponse(headers={"content-length": "9"})
        await stream.prepare(request)
        assert request.transport is not None
        request.transport.abort()
        return stream

    with running_http_server(answer, tls) as port:
        door = HttpsClient(port, certificate, tmp_path / "key")
        for call in (lambda: door.start("m", "w1"), lambda: door.complete("m", "w1", 1)):
            with pytest.raises(InstallationFailed):
                call()
            assert door.request("GET", "/v1/models") == {"models": []}
        door.close()
    with pytest.raises(InstallationFailed, match="GET /v1/models: ConnectionRefusedError"):
        door.request("GET", "/v1/models")


def test_empty_directory_has_no_leftovers(tmp_path: Path) -> None:
    assert (find_leftovers(tmp_path), find_unfinished_writes(tmp_path), find_stray_sockets(tmp_path)) == ([], [], [])


def test_leftover_process_is_found_by_its_directory(tmp_path: Path) -> None:
    """A leftover process is found by the data directory in its environment."""
    command = [sys.executable, "-c", "print(flush=True); import signal; signal.pause()"]
    environment = {**os.environ, "KELVIN_DATA": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert [line for line in find_leftovers(tmp_path) if str(process.pid) in line]
            assert find_leftovers(tmp_path / "other") == []
        finally:
            process.kill()


def test_leftover_files_are_found_by_name(tmp_path: Path) -> None:
    """Leftover files are found by name. An empty spool segment was shipped, and does not count."""
    places = ("run/meters/12.rt1", "spool/act-1/000", "staging/t/p/declared.json", "run/rt-dead.sock")
    for place in places:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("x")
    (tmp_path / "spool/act-1/001").touch()
    assert find_leftovers(tmp_path) == ["a meter page is left: 12.rt1", "records are left: 000"]
    assert find_unfinished_writes(tmp_path) == ["a push is left: declared.json"]
    assert find_stray_sockets(tmp_path) == ["the socket of a dead runtime is left: dead"]


def test_several_ports_are_different(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([15_001, 15_001, 15_002])
    monkeypatch.setattr(installation, "free_port", lambda: next(drawn))
    assert free_ports(2) == [15_001, 15_002]


def test_a_start_that_says_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the process's output."""
    (tmp_path / "kelvin_silent.py").write_text("import signal, sys; print('why', file=sys.stderr); signal.pause()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(installation, "START_S", 1.0)
    with pytest.raises(InstallationFailed, match="not ready after 1 s: why"):
        running_installation(tmp_path, program="kelvin_silent").__enter__()


@pytest.fixture
def tls(tmp_path: Path) -> ssl.SSLContext:
    """A server's TLS context. Its certificate and a client key are in `tmp_path`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*make_certificate(tmp_path / "tls"))
    (tmp_path / "key").write_text("k")
    return context


def _door(port: int, place: Path) -> HttpsClient:
    return HttpsClient(port, place / "tls" / "cert.pem", place / "key")


def test_a_post_that_may_have_arrived_is_not_sent_again(tmp_path: Path, tls: ssl.SSLContext) -> None:
    """A failed POST is sent once, because it may have been done. A failed GET is sent twice."""
    arrived: list[str] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        arrived.append(request.method)
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    with running_http_server(answer, tls) as port, closing(_door(port, tmp_path)) as door:
        for method, times in (("POST", 1), ("GET", 2)):
            with pytest.raises(InstallationFailed):
                door.request(method, "/x")
            assert arrived.count(method) == times


def test_a_connection_that_was_closed_while_idle_is_made_anew(tmp_path: Path, tls: ssl.SSLContext) -> None:
    """A POST on a connection that was closed while idle arrives once, over a new connection."""
    arrived: list[str] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        arrived.append(request.method)
        assert request.transport is not None
        asyncio.get_running_loop().call_later(0.05, request.transport.close)
        return web.json_response({})

    with running_http_server(answer, tls) as port, closing(_door(port, tmp_path)) as door:
        door.request("GET", "/x")
        wait(door._is_closed, "the connection is closed")
        assert door.request("POST", "/x") == {}
    assert arrived == ["GET", "POST"]


def test_a_start_that_is_refused_says_why(tmp_path: Path, tls: ssl.SSLContext) -> None:
    """The error has the answer's text."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET":
            return web.json_response({"models": []})
        return web.json_response({"error": {"code": "not_found"}}, status=404)

    refused = pytest.raises(InstallationFailed, match=r"m: 404 .*not_found")
    with running_http_server(answer, tls) as port, closing(_door(port, tmp_path)) as door, refused:
        door.start("m", "w1")


class Refusing(Installation):
    """A stub installation without models whose cache empties no tier. Its `wait` fails at once."""

    def __init__(self) -> None:
        self.admin = cast(HttpsClient, self)

    def request(self, method: str, path: str, body: object | None = None) -> Any:
        if method == "GET":
            return {"models": []}
        raise InstallationFailed("400 no such tier")

    def wait(self, is_so: Callable[[], bool], what: str, limit_s: float = 0.0) -> None:
        assert not is_so()
        raise InstallationFailed(f"it is not so that {what}")


def test_a_tier_that_can_t_be_emptied_says_why() -> None:
    """The error has the last refusal."""
    with pytest.raises(InstallationFailed, match="the tier 'tape' is empty: 400 no such tier"):
        Refusing().empty_tier("tape")
