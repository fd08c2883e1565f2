"""Where an installation under measurement listens, what becomes of one that does not come up, and what one leaves."""

import os
import secrets
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web

from coldstart_bench.certificates import make_certificate
from coldstart_bench.installation import (
    FIRST_PORT,
    Door,
    InstallationFailed,
    ended,
    free_port,
    running,
    stray_sockets,
    unfinished,
)
from tests.loops import answering


def test_a_port_is_none_that_a_connection_may_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that somebody has: then another is drawn."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    port = free_port()
    assert FIRST_PORT <= port < low
    with socket.create_server(("127.0.0.1", port)):
        other = free_port()
        drawn = iter([each - FIRST_PORT for each in (port, port, other)])
        monkeypatch.setattr(secrets, "randbelow", lambda _: next(drawn))
        assert free_port() == other


def test_what_it_says_of_itself_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that is larger than any pipe is written to its end, and its end is in the error."""
    program = "import sys; print('noise ' * 40_000, 'the reason', file=sys.stderr, flush=True); print('not today')"
    (tmp_path / "kelvin_noisy.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(InstallationFailed, match=r"(?s)not today.*the reason"):
        running(tmp_path, program="kelvin_noisy").__enter__()


def test_lost_connection_is_a_failure_of_the_installation(tmp_path: Path) -> None:
    """Also in the middle of a stream, and where nobody listens. The next call has a connection of its own."""
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

    with answering(answer, tls) as port:
        door = Door(port, certificate, tmp_path / "key")
        for call in (lambda: door.start("m", "w1"), lambda: door.complete("m", "w1", 1)):
            with pytest.raises(InstallationFailed):
                call()
            assert door.request("GET", "/v1/models") == {"models": []}
        door.close()
    with pytest.raises(InstallationFailed, match="GET /v1/models: ConnectionRefusedError"):
        door.request("GET", "/v1/models")


def test_nothing(tmp_path: Path) -> None:
    """Of a directory that is empty."""
    assert (ended(tmp_path), unfinished(tmp_path), stray_sockets(tmp_path)) == ([], [], [])


def test_a_process(tmp_path: Path) -> None:
    """By the directory that it was started with; another one's is none of ours."""
    command = [sys.executable, "-c", "print(flush=True); import signal; signal.pause()"]
    environment = {**os.environ, "KELVIN_DATA": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert [line for line in ended(tmp_path) if str(process.pid) in line]
            assert ended(tmp_path / "other") == []
        finally:
            process.kill()


def test_files(tmp_path: Path) -> None:
    """Each by its name; what is empty was shipped."""
    places = ("run/meters/12.rt1", "spool/act-1/000", "staging/t/p/declared.json", "run/rt-dead.sock")
    for place in places:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("x")
    (tmp_path / "spool/act-1/001").touch()
    assert ended(tmp_path) == ["a meter page is left: 12.rt1", "records are left: 000"]
    assert unfinished(tmp_path) == ["a push is left: declared.json"]
    assert stray_sockets(tmp_path) == ["the socket of a dead runtime is left: dead"]
