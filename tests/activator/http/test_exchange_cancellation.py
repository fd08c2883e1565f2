"""ClientCancelScope ends a block on disconnect, timeout or cancellation, and leaves no timer or watcher behind."""

import asyncio
from collections.abc import Callable

import pytest

from activator.http.client_connection import ClientConnection
from activator.http.exchange import ClientCancelScope, ClientGone
from tests.activator.exchanges import FakeConnection


class WatchedConnection(FakeConnection):
    """A connection that shows its watcher."""

    watch, unwatch = ClientConnection.watch, ClientConnection.unwatch
    _notify_disconnect = ClientConnection._notify_disconnect
    _on_disconnect: Callable[[], None] | None = None
    _is_open = True

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    @property
    def gone(self) -> Callable[[], None] | None:
        return self._on_disconnect

    def leave(self) -> None:
        assert self._on_disconnect is not None
        self._on_disconnect()


async def _end_of(
    within_s: float | None, end: Callable[[WatchedConnection, "asyncio.Task[None]"], None]
) -> BaseException | None:
    """Return how a block that waits for ever ended. Fails if the block left a watcher or a cancellation."""
    client = WatchedConnection()

    async def stay() -> None:
        with ClientCancelScope(client, within_s):
            await asyncio.Event().wait()

    task = asyncio.create_task(stay())
    await asyncio.sleep(0)
    end(client, task)
    await asyncio.wait((task,))
    assert client.gone is None
    if task.cancelled():
        return asyncio.CancelledError()
    assert not task.cancelling(), "the scope's own cancellation is undone"
    return task.exception()


@pytest.mark.parametrize(("within_s", "end", "want"), [
    pytest.param(None, lambda client, task: client.leave(), ClientGone, id="a client that leaves"),
    pytest.param(0.0, lambda client, task: None, TimeoutError, id="its timeout"),
    pytest.param(60.0, lambda client, task: client.leave(), ClientGone, id="a client that leaves before the timeout"),
    pytest.param(60.0, lambda client, task: task.cancel(), asyncio.CancelledError, id="another cancellation"),
    pytest.param(60.0, lambda client, task: (client.leave(), task.cancel()), asyncio.CancelledError,
                 id="another cancellation and a client that leaves"),
])  # fmt: skip
async def test_scope_ends_on_disconnect_timeout_or_cancellation(
    within_s: float | None, end: Callable[[WatchedConnection, "asyncio.Task[None]"], None], want: type[BaseException]
) -> None:
    assert type(await _end_of(within_s, end)) is want


async def test_a_block_that_ends_by_itself_is_not_ended_again() -> None:
    """Its timer and its watcher end with it. Its own exception is raised."""

    client = WatchedConnection()
    with ClientCancelScope(client, 0.0):
        pass
    with pytest.raises(KeyError), ClientCancelScope(client, 0.0):
        raise KeyError
    await asyncio.sleep(0.001)
    assert client.gone is None


@pytest.mark.parametrize("ends", ["its time", "its client"])
async def test_scope_exit_does_not_affect_the_next_request(ends: str) -> None:
    """A request's task may end after the next one has begun. Timeout and disconnect still end the next one."""
    client = WatchedConnection()
    before = ClientCancelScope(client, 60.0)
    before.__enter__()

    async def after() -> None:
        with ClientCancelScope(client, 0.05 if ends == "its time" else 60.0):
            await asyncio.Event().wait()

    task = asyncio.create_task(after())
    await asyncio.sleep(0)
    before.__exit__(None, None, None)
    if ends == "its client":
        client.leave()
    await asyncio.wait((task,), timeout=30)
    assert task.done()
    assert isinstance(task.exception(), TimeoutError if ends == "its time" else ClientGone)


async def test_a_client_that_has_gone_already_ends_a_block() -> None:
    """The client may have left during an earlier wait. A block that doesn't wait is not cancelled."""
    client = WatchedConnection()
    client._is_open = False
    with ClientCancelScope(client, None):
        pass
    await asyncio.sleep(0)
    with pytest.raises(ClientGone), ClientCancelScope(client, None):
        await asyncio.wait_for(asyncio.Event().wait(), 30)
