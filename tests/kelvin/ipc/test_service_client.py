"""A service client decodes JSON responses and failures over a socket."""

import asyncio
import contextlib
from pathlib import Path

import pytest
from fastapi import FastAPI, Response

from kelvin.contracts.errors import Refused, Unavailable
from kelvin.contracts.traffic_errors import Overloaded
from kelvin.ipc.failure_responses import install_failure_handlers
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.process.loops import LoopHealth
from tests.kelvin.ipc.serving import served


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

    @app.get("/odd")
    async def _odd() -> dict[str, str]:
        return {"n": "one"}

    @app.get("/broken")
    async def _broken() -> None:
        raise RuntimeError("secret detail")

    return app


async def test_an_answer_is_decoded(tmp_path: Path) -> None:
    async with served(tmp_path, _app()) as service:
        assert await service.client.call("GET", "/fine", dict[str, int], timeout_s=5) == {"n": 1}


@pytest.mark.parametrize("method", ["POST", "CONNECT"])
async def test_upgrade_with_a_body_is_refused(tmp_path: Path, method: str) -> None:
    """The status is 400 and the connection closes, so that the body isn't read as the next request."""
    head = f"{method} /fine HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n".encode()
    body = b"GET /fine HTTP/1.1\r\nHost: x\r\n\r\n"
    async with served(tmp_path, _app()) as service, asyncio.timeout(30):
        reader, writer = await asyncio.open_unix_connection(str(service.socket))
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body))
        got = await reader.readuntil(b"\r\n\r\n")
        writer.write(body)
        with contextlib.suppress(ConnectionError):
            got += await reader.read()
        writer.close()
    assert got.startswith(b"HTTP/1.1 400")
    assert got.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    ("path", "code", "retry"),
    [
        pytest.param("/full", "overloaded", 2.0, id="a failure keeps its code and retry time"),
        pytest.param("/nested", "internal", None, id="an answer nested too deeply is an internal error"),
        pytest.param("/garbled", "internal", None, id="an answer that is not UTF-8 is an internal error"),
        pytest.param("/odd", "internal", None, id="a success of another type is an internal error"),
        pytest.param("/nowhere", "not_found", None, id="an unknown route is not found"),
    ],
)
async def test_a_failure_crosses_the_socket(tmp_path: Path, path: str, code: str, retry: float | None) -> None:
    """The caller gets the peer's failure with its code and retry time."""
    async with served(tmp_path, _app()) as service:
        with pytest.raises(Refused) as refused:
            await service.client.call("GET", path, dict[str, int], timeout_s=5)
    assert refused.value.failure.code == code
    assert refused.value.failure.retry_after_s == retry


async def test_a_peer_that_is_away_is_unavailable(tmp_path: Path) -> None:
    """A socket without a listener gives a retryable failure."""
    with contextlib.closing(SocketDirectory(tmp_path)) as directory:
        client = ServiceClient(directory, "s.sock", "the ledger")
        with pytest.raises(Refused) as refused:
            await client.call("GET", "/fine", object, timeout_s=1)
        await client.close()
    assert refused.value.failure == Unavailable("the ledger")


async def test_service_is_not_ready_while_a_loop_keeps_failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`/readyz` is 503, which the client raises as a failure. Other routes are served."""
    monkeypatch.setattr(LoopHealth, "failing", lambda _: ("feed",))
    async with served(tmp_path, _app()) as service:
        async with service.client.session.get(f"{service.client.base_url}/readyz") as answer:
            assert answer.status == 503
        with pytest.raises(Refused):
            await service.client.call("GET", "/readyz", dict[str, int], timeout_s=5)
        assert await service.client.call("GET", "/fine", dict[str, int], timeout_s=5) == {"n": 1}
