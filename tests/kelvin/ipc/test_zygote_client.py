"""The zygote client gets a pidfd with each fork, turns refusals into failures, and leaks no descriptor."""

import asyncio
import os
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kelvin.contracts.errors import Failure, Internal, InvalidRequest, Refused, RemoteFailure, Unavailable
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.ipc.zygote_client import ZygoteClient
from tests.eventually import eventually

Answer = Callable[[socket.socket, bytes], None]


@asynccontextmanager
async def answering(path: Path, answer: Answer) -> AsyncIterator[ZygoteClient]:
    """Run a zygote with scripted replies on a real SEQPACKET socket, and check that no descriptor leaks."""
    directory = SocketDirectory(path)
    listener = directory.listen("zygote.sock", socket.SOCK_SEQPACKET)

    def accept() -> None:
        connection, _ = listener.accept()
        with connection:
            answer(connection, connection.recv(4096))

    before = len(os.listdir("/proc/self/fd"))
    thread = threading.Thread(target=accept)
    thread.start()
    yield ZygoteClient(directory)
    thread.join(10)
    assert len(os.listdir("/proc/self/fd")) <= before, "descriptors leak"
    listener.close()
    directory.close()


async def _refusal(path: Path, answer: Answer, timeout_s: float = 30.0) -> Failure:
    async with answering(path, answer) as zygote:
        with pytest.raises(Refused) as refused:
            await zygote.fork("r1", timeout_s)
        return refused.value.failure


def _send(*pieces: bytes, fds: int = 0) -> Answer:
    def answer(connection: socket.socket, _: bytes) -> None:
        given = [os.open("/dev/null", os.O_RDONLY) for _ in range(fds)]
        socket.send_fds(connection, list(pieces), given)
        for fd in given:
            os.close(fd)

    return answer


async def test_fork_returns_a_pidfd(tmp_path: Path) -> None:
    """The request names the runtime. The pidfd is not inherited by child processes."""
    requests: list[bytes] = []

    def answer(connection: socket.socket, question: bytes) -> None:
        requests.append(question)
        pidfd = os.pidfd_open(os.getpid())
        socket.send_fds(connection, [b'{"ok":true,"pid":%d}' % os.getpid()], [pidfd])
        os.close(pidfd)

    async with answering(tmp_path, answer) as zygote:
        born = await zygote.fork("r1", 5.0)
        assert born.pid == os.getpid()
        assert not os.get_inheritable(born.pidfd)
        os.close(born.pidfd)
    assert requests == [b'{"op":"fork","runtime_id":"r1"}']


async def test_fork_of_a_cancelled_caller_is_killed(tmp_path: Path) -> None:
    """No other process knows of it, so it would stay parked as long as its zygote lives."""
    requests, may_answer = threading.Event(), threading.Event()
    child, left = subprocess.Popen(["sleep", "600"]), tmp_path / "rt-r1.sock"
    left.touch()

    def answer(connection: socket.socket, _: bytes) -> None:
        requests.set()
        may_answer.wait(10)
        pidfd = os.pidfd_open(child.pid)
        socket.send_fds(connection, [b'{"ok":true,"pid":%d}' % child.pid], [pidfd])
        os.close(pidfd)

    try:
        async with answering(tmp_path, answer) as zygote:
            fork = asyncio.create_task(zygote.fork("r1", 5.0))
            await asyncio.to_thread(requests.wait, 10)
            fork.cancel()
            await asyncio.wait({fork})
            assert fork.cancelled()
            may_answer.set()
            assert await asyncio.to_thread(child.wait, 10) == -signal.SIGKILL
            await eventually(lambda: not left.exists())
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    ("answer", "want"),
    [
        pytest.param(lambda connection, question: None, Unavailable("the zygote"), id="it closes the connection"),
        pytest.param(_send(b'{"ok":true,"pid":1}'), Internal(), id="a birth without a pidfd"),
        pytest.param(_send(b'{"ok":true}', fds=1), Internal(), id="a pidfd without a birth"),
        pytest.param(_send(b'{"ok":true,"pid":1}', fds=3), Internal(), id="too many descriptors"),
        pytest.param(
            _send(b'{"ok":false,"failure":{"code":"conflict","status":409,"message":"2 threads"}}', fds=1),
            RemoteFailure("conflict", 409, "2 threads"),
            id="a refusal of the zygote",
        ),
        pytest.param(_send(b'{"ok":false}'), Internal(), id="a refusal without a reason"),
    ],
)
async def test_invalid_fork_reply_is_a_failure(tmp_path: Path, answer: Answer, want: Failure) -> None:
    """Every other reply is a failure, and its descriptors are closed."""
    assert await _refusal(tmp_path, answer) == want


async def test_undecodable_reply_is_refused(tmp_path: Path) -> None:
    assert isinstance(await _refusal(tmp_path, _send(b"[1]", fds=2)), InvalidRequest)


async def test_a_zygote_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    silent = threading.Event()

    def answer(connection: socket.socket, question: bytes) -> None:
        silent.wait(1.0)

    assert await _refusal(tmp_path, answer, 0.2) == Unavailable("the zygote")


async def test_missing_zygote_is_unavailable(tmp_path: Path) -> None:
    """Without a listener, the zygote is unavailable at once."""
    directory = SocketDirectory(tmp_path)
    with pytest.raises(Refused) as refused:
        await ZygoteClient(directory).ping(5.0)
    assert refused.value.failure == Unavailable("the zygote")
    directory.close()
