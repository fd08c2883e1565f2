"""The HTTP/1.1 client for replicas: kept connections, bounded reads, and cut answers that are errors."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from activator.upstream.http1_client import BUFFER_BYTES, LARGE_BODY_BYTES, Client
from kelvin.ipc.connector import SocketConnector

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
DEADLINE_S = 20.0

Script = Callable[["Server", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """A server that answers each request by a script. It counts connections and records requests."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.connections = 0
        self.requests: list[bytes] = []
        self.heard = asyncio.Event()
        self.left = asyncio.Event()  # a client closed its connection

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                self.heard.set()
                await self.script(self, reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            self.left.set()
        finally:
            writer.close()


@asynccontextmanager
async def serving(tmp_path: Path, script: Script, keep_alive_s: float = 30.0) -> AsyncIterator[tuple[Server, Client]]:
    """Start a server and a client, and close both at the end."""
    server, path = Server(script), str(tmp_path / "s.sock")
    client = Client(SocketConnector(path), keep_alive_s=keep_alive_s)
    listening = await asyncio.start_unix_server(server.serve, path)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield server, client
    finally:
        client.close()
        listening.close()
        async with asyncio.timeout(DEADLINE_S):
            await listening.wait_closed()


def script_of(*pieces: bytes, ends: bool = False) -> Script:
    """Return a script that writes these pieces one by one, and closes the connection if `ends`."""

    async def script(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if ends:
            writer.close()

    return script


async def ask(client: Client, body: bytes = b"{}") -> tuple[int, bytes]:
    """Send a request. Return its status and body."""
    answer = await client.request("POST", "/v1/x", body, [("content-type", "application/json")])
    try:
        return answer.status, await answer.read()
    finally:
        answer.release()


@pytest.mark.parametrize(
    ("pieces", "want"),
    [
        pytest.param([OK + b"content-length: 2\r\n\r\nab"], (200, b"ab"), id="in one piece"),
        pytest.param([OK, b"content-length: 2\r\n\r\n", b"a", b"b"], (200, b"ab"), id="in many"),
        pytest.param([CHUNKED + b"1\r\na\r\n2\r\nbc\r\n", b"0\r\n\r\n"], (200, b"abc"), id="in chunks"),
        pytest.param([b"HTTP/1.1 204 No Content\r\n\r\n"], (204, b""), id="without a body"),
        pytest.param([b"HTTP/1.1 503 No\r\nRetry-After: 1\r\ncontent-length: 1\r\n\r\nx"], (503, b"x"), id="a refusal"),
    ],
)
async def test_answers_come_whole_and_their_connection_is_kept(
    tmp_path: Path, pieces: list[bytes], want: tuple[int, bytes]
) -> None:
    """Three requests use one connection. Each request is sent as head and body."""

    async with serving(tmp_path, script_of(*pieces)) as (server, client):
        assert [await ask(client) for _ in range(3)] == [want] * 3
        assert server.connections == 1
        assert server.requests[0].startswith(b"POST /v1/x HTTP/1.1\r\nhost: replica\r\n")
        assert server.requests[0].endswith(b"content-type: application/json\r\n\r\n{}")


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([OK], id="in its head"),
        pytest.param([OK + b"content-length: 2\r\n\r\na"], id="in a body of a known length"),
        pytest.param([CHUNKED + b"1\r\na\r\n"], id="between chunks"),
        pytest.param([b"HELLO\r\n\r\n"], id="not HTTP"),
        pytest.param([], id="before it began"),
    ],
)
async def test_an_answer_that_is_cut_is_an_error(tmp_path: Path, pieces: list[bytes]) -> None:
    """The connection of a cut answer is not used again."""

    async with serving(tmp_path, script_of(*pieces, ends=True)) as (server, client):
        for _ in range(2):
            with pytest.raises(OSError, match=r"."):
                await ask(client)
        assert server.connections == 2


@pytest.mark.parametrize(
    ("script", "keep_alive_s"),
    [
        pytest.param(script_of(OK + b"content-length: 1\r\n\r\nab"), 30.0, id="it sent more than its length"),
        pytest.param(
            script_of(OK + b"connection: close\r\ncontent-length: 1\r\n\r\na"), 30.0, id="it announced its end"
        ),
        pytest.param(script_of(OK + b"content-length: 1\r\n\r\na"), 0.0, id="it was idle for too long"),
    ],
)
async def test_unusable_connection_is_not_reused(tmp_path: Path, script: Script, keep_alive_s: float) -> None:
    """The next request uses another connection and gets the right answer."""

    async with serving(tmp_path, script, keep_alive_s) as (server, client):
        for _ in range(2):
            try:
                assert (await ask(client))[1] == b"a"
            except OSError:
                assert keep_alive_s, "only unexpected bytes may cost an answer"
        assert server.connections == 2


async def test_a_reader_that_takes_nothing_holds_the_writer(tmp_path: Path) -> None:
    """Unread data stays at the replica, except for one buffer. All of it arrives once it is read."""
    size, sent = 64 * BUFFER_BYTES, 0

    async def script(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(OK + b"content-length: %d\r\n\r\n" % size)
        while sent < size:
            writer.write(b"x" * BUFFER_BYTES)
            await writer.drain()
            sent += BUFFER_BYTES

    async with serving(tmp_path, script) as (_, client):
        answer = await client.request("GET", "/v1/x")
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.05)
        assert sent < size / 2
        assert len(await answer.read()) == size
        answer.release()


async def test_a_large_body_arrives(tmp_path: Path) -> None:
    """A large body is not copied behind its head."""

    async with serving(tmp_path, script_of(OK + b"content-length: 0\r\n\r\n")) as (server, client):
        assert await ask(client, b"y" * (LARGE_BODY_BYTES + 1)) == (200, b"")
        assert server.requests[0].endswith(b"\r\n\r\n" + b"y" * (LARGE_BODY_BYTES + 1))


async def test_cancelling_ends_the_connection(tmp_path: Path) -> None:
    """The request is cancelled while the head is awaited, or the answer is released before its end."""

    async def silent(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        server.left.set()

    async with serving(tmp_path, silent) as (server, client):
        request_task = asyncio.create_task(ask(client))
        await server.heard.wait()
        request_task.cancel()
        await asyncio.wait((request_task,))
        await server.left.wait()
        server.left.clear()
        server.script = script_of(CHUNKED + b"1\r\na\r\n")
        answer = await client.request("GET", "/v1/x")
        assert (await answer.read_part(), answer.at_end) == (b"a", False)
        answer.release()
        await server.left.wait()
        assert repr(client).endswith("idle=0>")


async def test_unreachable_replica_raises_os_error(tmp_path: Path) -> None:
    """A closed client raises OSError too."""

    client = Client(SocketConnector(str(tmp_path / "none.sock")))
    with pytest.raises(OSError, match="No such file"):
        await ask(client)
    client.close()
    with pytest.raises(OSError, match="closed"):
        await ask(client)
