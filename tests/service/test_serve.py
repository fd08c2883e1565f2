"""A service serves JSON and failures over its socket, drains on SIGTERM, and ends with its lifeline."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from fastapi import FastAPI, Response

from contracts.errors import NotFound, Refused
from contracts.problem import code_of
from contracts.traffic_errors import Overloaded
from service.client import ServiceClient
from service.failures import install_failure_handlers
from service.loops import LoopHealth
from service.run import serve_until
from service.unix import SocketDirectory


def _app() -> FastAPI:
    app = FastAPI()
    install_failure_handlers(app)

    @app.get("/readyz")
    @app.get("/fine")
    async def _fine() -> dict[str, int]:
        return {"n": 1}

    @app.get("/full")
    async def _full() -> None:
        raise Refused(Overloaded("the queue", 8, 2.0))

    @app.get("/nested")
    async def _nested() -> Response:
        return Response(b'{"code":"overloaded","more":' + b"[" * 100_000, 500)

    @app.get("/garbled")
    async def _garbled() -> Response:
        return Response(b'{"code":"\xff","status":500,"detail":""}', 500)

    @app.get("/broken")
    async def _broken() -> None:
        raise RuntimeError("secret detail")

    return app


async def _with_client(tmp_path: Path, use: "list[Refused]", path: str) -> dict[str, int]:
    directory, stop = SocketDirectory(tmp_path / "run"), asyncio.Event()
    listener = directory.listen("s.sock")
    serving = asyncio.create_task(serve_until(_app(), listener, stop, 1))
    client = ServiceClient(directory, "s.sock", "the service")
    try:
        return await client.call("GET", path, dict[str, int], timeout_s=5)
    except Refused as refused:
        use.append(refused)
        return {}
    finally:
        await client.close()
        stop.set()
        await serving
        listener.close()
        directory.close()


def test_an_answer_is_decoded(tmp_path: Path) -> None:
    """JSON comes back typed."""
    assert asyncio.run(_with_client(tmp_path, [], "/fine")) == {"n": 1}


@pytest.mark.parametrize("method", ["POST", "CONNECT"])
def test_upgrade_with_a_body_is_refused(tmp_path: Path, method: str) -> None:
    """Status 400 and the end of the connection: the body is not read as the next request."""
    head = f"{method} /fine HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n".encode()
    body = b"GET /fine HTTP/1.1\r\nHost: x\r\n\r\n"

    async def scenario() -> bytes:
        directory, stop = SocketDirectory(tmp_path / "run"), asyncio.Event()
        listener = directory.listen("s.sock")
        serving = asyncio.create_task(serve_until(_app(), listener, stop, 1))
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "run" / "s.sock"))
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body))
        async with asyncio.timeout(30):
            got = await reader.readuntil(b"\r\n\r\n")
            writer.write(body)
            with contextlib.suppress(ConnectionError):
                got += await reader.read()
        writer.close()
        stop.set()
        await serving
        listener.close()
        directory.close()
        return got

    got = asyncio.run(scenario())
    assert got.startswith(b"HTTP/1.1 400")
    assert got.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    ("path", "code", "retry"),
    [
        pytest.param("/full", "overloaded", 2.0, id="a failure arrives as the fact it was"),
        pytest.param("/nested", "internal", None, id="an answer that is nested too deeply is our defect"),
        pytest.param("/garbled", "internal", None, id="so is one that is no UTF-8"),
        pytest.param("/nowhere", "not_found", None, id="an unknown route is not found"),
    ],
)
def test_a_failure_crosses_the_socket(tmp_path: Path, path: str, code: str, retry: float | None) -> None:
    """Callers see the peer's failure with its code and its time."""
    refused: list[Refused] = []
    asyncio.run(_with_client(tmp_path, refused, path))
    assert code_of(refused[0].failure) == code
    assert refused[0].failure.retry_after_s == retry


def test_a_peer_that_is_away_is_unavailable(tmp_path: Path) -> None:
    """Nobody listening is a fact with a retry, not a stack trace."""

    async def call() -> None:
        directory = SocketDirectory(tmp_path)
        client = ServiceClient(directory, "s.sock", "the ledger")
        try:
            await client.call("GET", "/fine", object, timeout_s=1)
        finally:
            await client.close()
            directory.close()

    with pytest.raises(Refused) as refused:
        asyncio.run(call())
    assert refused.value.failure.message == "the ledger is not available"
    assert not isinstance(refused.value.failure, NotFound)


def test_service_is_not_ready_while_a_loop_keeps_failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `/readyz` says 503, which is `unavailable` to a sibling; its other routes answer."""
    monkeypatch.setattr(LoopHealth, "failing", lambda _: ("feed",))
    refused: list[Refused] = []
    assert asyncio.run(_with_client(tmp_path, refused, "/readyz")) == {}
    assert len(refused) == 1
    assert asyncio.run(_with_client(tmp_path, refused, "/fine")) == {"n": 1}


_PROCESS = textwrap.dedent("""
    import asyncio, sys
    from service.run import run_service
    async def main(stop):
        print("up", flush=True)
        await stop.wait()
        if sys.argv[2] == "hang":
            await asyncio.Event().wait()
    run_service(main, int(sys.argv[1]) if sys.argv[1] != "-" else None)
    print("ended", flush=True)
""")


def _spawn(lifeline: int | None, behaviour: str) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-c", _PROCESS, "-" if lifeline is None else str(lifeline), behaviour],
        stdout=subprocess.PIPE,
        pass_fds=() if lifeline is None else (lifeline,),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def test_sigterm_ends_it_cleanly() -> None:
    """SIGTERM lets the service finish and exit 0."""
    with _spawn(None, "end") as process:
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60)[0] == b"ended\n"
        assert process.returncode == 0


@pytest.mark.parametrize("behaviour", ["end", "hang"])
def test_the_end_of_the_supervisor_ends_it(behaviour: str) -> None:
    """When the other end of the lifeline closes, the process ends, also one that hangs in its drain."""
    read, write = os.pipe()
    with _spawn(read, behaviour) as process:
        os.close(read)
        os.close(write)
        process.communicate(timeout=60)
        assert process.returncode == (0 if behaviour == "end" else 1)
