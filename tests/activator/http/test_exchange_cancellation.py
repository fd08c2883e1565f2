"""What ends a block that waits for a client and a time, and that nothing of it is left behind."""

import asyncio
from collections.abc import Callable

import pytest

from activator.http.client_connection import ClientConnection
from activator.http.exchange import ClientCancelScope, ClientGone
from tests.activator.exchanges import FakeConnection


class Watched(FakeConnection):
    """Knows who watches it."""

    watch, unwatch = ClientConnection.watch, ClientConnection.unwatch
    _client_left = ClientConnection._client_left
    _gone: Callable[[], None] | None = None
    _is_open = True

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    @property
    def gone(self) -> Callable[[], None] | None:
        return self._gone

    def leave(self) -> None:
        assert self._gone is not None
        self._gone()


async def _end_of(within_s: float | None, end: Callable[[Watched, "asyncio.Task[None]"], None]) -> BaseException | None:
    """How a block ended that would wait for ever; what it leaves of itself fails here."""
    client = Watched()

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
    assert not task.cancelling(), "a cancellation of ours is taken back"
    return task.exception()


@pytest.mark.parametrize(("within_s", "end", "want"), [
    pytest.param(None, lambda client, task: client.leave(), ClientGone, id="a client that leaves"),
    pytest.param(0.0, lambda client, task: None, TimeoutError, id="its time"),
    pytest.param(60.0, lambda client, task: client.leave(), ClientGone, id="a client that leaves before its time"),
    pytest.param(60.0, lambda client, task: task.cancel(), asyncio.CancelledError, id="somebody else: that goes on"),
    pytest.param(60.0, lambda client, task: (client.leave(), task.cancel()), asyncio.CancelledError,
                 id="somebody else beside a client that leaves"),
])  # fmt: skip
async def test_scope_ends_on_disconnect_timeout_or_cancellation(
    within_s: float | None, end: Callable[[Watched, "asyncio.Task[None]"], None], want: type[BaseException]
) -> None:
    """Each with its own exception."""
    assert type(await _end_of(within_s, end)) is want


async def test_a_block_that_ends_by_itself_is_not_ended_again() -> None:
    """Neither its timer nor its watcher outlives it; what it raises goes through."""

    client = Watched()
    with ClientCancelScope(client, 0.0):
        pass
    with pytest.raises(KeyError), ClientCancelScope(client, 0.0):
        raise KeyError
    await asyncio.sleep(0.001)
    assert client.gone is None


@pytest.mark.parametrize("ends", ["its time", "its client"])
async def test_the_end_of_one_leaves_the_next_on_its_connection_alone(ends: str) -> None:
    """A request's task may end after the next request has come: that one's time, and its client, still end it."""
    client = Watched()
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
    """It may have left while something else was waited for. A block that waits for nothing is not ended."""
    client = Watched()
    client._is_open = False
    with ClientCancelScope(client, None):
        pass
    await asyncio.sleep(0)
    with pytest.raises(ClientGone), ClientCancelScope(client, None):
        await asyncio.wait_for(asyncio.Event().wait(), 30)
