"""A fake that stops while a client connects leaves no socket open."""

import asyncio
import gc
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.stub_server import StubServer


async def _clean_up_only(listening: StubServer) -> None:
    await listening._runner.cleanup()


@pytest.mark.parametrize(
    ("stop", "leaves"),
    [
        pytest.param(StubServer.stop, 0, id="stop"),
        pytest.param(
            _clean_up_only, 1, id="plain cleanup: the control",
            marks=pytest.mark.skipif(sys.version_info >= (3, 12), reason="mended in Python 3.12"),
        ),
    ],
)  # fmt: skip
def test_stub_server_closes_connections_at_any_moment(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop: Callable[[StubServer], Coroutine[Any, Any, None]],
    leaves: int,
) -> None:
    """In each of six event-loop turns, `stop` leaves nothing unclosed. A plain cleanup does (control)."""
    lost: list[object] = []

    async def scenario(turns: int) -> None:
        listening = StubServer(web.Application())
        await listening.start(tmp_path / "fake.sock")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "fake.sock"))
            for _ in range(turns):
                await asyncio.sleep(0)
            await stop(listening)

    with monkeypatch.context() as patched:
        patched.setattr(sys, "unraisablehook", lambda raised: lost.append(type(raised.exc_value)))
        for turns in range(6):
            asyncio.run(scenario(turns))
            gc.collect()
    assert bool(lost) == bool(leaves), lost
