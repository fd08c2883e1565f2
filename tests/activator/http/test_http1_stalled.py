"""A client that reads no responses keeps no request running in the activator."""

import asyncio

import pytest

from tests.activator.http.memory_connections import Application, MemoryServer

REQUEST = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
STALL_S = 20.0  # the default of KELVIN_STALL_S


@pytest.mark.parametrize("reads", [pytest.param(False, id="never reads"), pytest.param(True, id="control: reads late")])
@pytest.mark.virtual_time
async def test_client_that_does_not_read_is_cut(reads: bool) -> None:
    """Its next request ends after KELVIN_STALL_S, with the connection. Control: a late reader gets its response."""

    server = MemoryServer(Application())
    protocol, socket = server.http1()
    protocol.data_received(REQUEST)
    await server.run_tasks_to_end()
    socket.waiting = 1
    protocol.pause_writing()
    protocol.data_received(REQUEST)
    if reads:
        await asyncio.sleep(STALL_S - 1)
        socket.waiting = 0
        protocol.resume_writing()
    assert server.state.tasks
    _, inside = await asyncio.wait(server.state.tasks, timeout=STALL_S + 1)
    assert not inside
    assert socket.closing is not reads
    protocol.connection_lost(None)
