"""A change returns only after every feed reader has it. A reader that just left counts as undelivered."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from activator.routing.feed_client import LONGEST_BACKOFF_S, FeedClient
from controlplane.registry import feed_hub
from controlplane.registry import registry as subject
from controlplane.registry.feed_hub import RECONNECT_S, FeedHub, Subscription
from controlplane.registry.registry import Registry
from kelvin.contracts.serving.control_messages import Feed
from kelvin.contracts.serving.degradation_steps import Ladder
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from tests.controlplane.builders import BY, NOW_S, TENANT, opened_registry, registration
from tests.controlplane.control_plane_server import ControlPlaneClient, running_control_plane
from tests.eventually import eventually

TELL_S = 1.0
NAME = "activator-1"


async def read_line(reader: Subscription) -> None:
    """Read all queued lines."""
    while reader._lines:
        await reader.next_line()
        reader.record_sent()


def reader_left(hub: FeedHub, name: str = NAME) -> int:
    """Let a reader leave, then publish a change. Return the change's revision."""
    with hub.subscribe(name):
        pass
    return hub.publish(Feed(removed_keys=("k",)))


def test_reader_is_remembered_longer_than_a_reconnect() -> None:
    """A reader pauses once before it reconnects, and connecting may take as long again."""
    assert RECONNECT_S >= 2 * LONGEST_BACKOFF_S


@pytest.mark.parametrize(
    ("name", "told"),
    [pytest.param(NAME, False, id="named"), pytest.param("", True, id="without a name, as an older one")],
)
@pytest.mark.virtual_time
async def test_departed_reader_counts_as_undelivered(name: str, told: bool) -> None:
    """A reader with a name may come back. Control: one without a name is not waited for."""
    hub = FeedHub()
    assert await hub.wait_until_delivered(reader_left(hub, name), TELL_S) is told


@pytest.mark.virtual_time
async def test_returned_reader_counts_as_delivered() -> None:
    """The reader must also read the snapshot. Another reader's name does not count."""
    hub = FeedHub()
    settling = asyncio.create_task(hub.wait_until_delivered(reader_left(hub), TELL_S))
    with hub.subscribe("activator-2") as other:
        await read_line(other)
        await asyncio.sleep(0.1)
        assert not settling.done()
        with hub.subscribe(NAME) as reader:
            await asyncio.sleep(0.1)
            assert not settling.done()
            await read_line(reader)
            assert await settling


@pytest.mark.virtual_time
async def test_absent_reader_is_forgotten() -> None:
    """It is forgotten after RECONNECT_S, even during a wait, and nothing of it is kept."""
    hub = FeedHub()
    revision = reader_left(hub)
    began_s = asyncio.get_running_loop().time()
    assert not await hub.wait_until_delivered(revision, RECONNECT_S - 0.5)
    assert await hub.wait_until_delivered(revision, RECONNECT_S)
    assert asyncio.get_running_loop().time() - began_s == pytest.approx(RECONNECT_S, abs=0.01)
    assert hub._recently_left == {}


@pytest.mark.virtual_time
async def test_readers_that_stay_away_are_not_counted() -> None:
    """Standby pools divide their size by this count. One reader too many would end pods that have a version."""
    hub = FeedHub()
    with hub.subscribe("activator-2"):
        reader_left(hub)
        assert hub.readers == 2
        await asyncio.sleep(RECONNECT_S + 0.1)
        assert hub.readers == 1


@pytest.mark.virtual_time
async def test_second_connection_of_a_reader_keeps_it_present() -> None:
    """The old connection ends after the new one has begun."""
    hub = FeedHub()
    old = hub.subscribe(NAME)
    old.__enter__()
    with hub.subscribe(NAME) as new:
        old.__exit__(None, None, None)
        await read_line(new)
        assert await hub.wait_until_delivered(1, 0.0)


@pytest.mark.virtual_time
async def test_cut_reader_counts_as_undelivered() -> None:
    """It fell behind and must reconnect, but has not noticed yet."""
    hub = FeedHub(max_lines=1)
    with hub.subscribe(NAME) as reader:
        revision = hub.publish(Feed(removed_keys=("k",)))
        assert reader.is_cut
        assert not await hub.wait_until_delivered(revision, TELL_S)


@pytest.mark.virtual_time
async def test_ended_feed_waits_for_no_reader() -> None:
    """A reader that leaves then does not come back to this process."""
    hub = FeedHub()
    with hub.subscribe(NAME) as reader:
        hub.end()
        await read_line(reader)
    assert await hub.wait_until_delivered(hub.publish(Feed(removed_keys=("k",))), 0.0)


async def test_revocation_reports_an_absent_activator(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real feed client connects, disconnects and reconnects: the answer says whether the revocation was delivered."""
    monkeypatch.setattr(feed_hub, "RECONNECT_S", 3600.0)

    async def revoked(client: ControlPlaneClient, key_id: str, *, told: bool) -> None:
        async with asyncio.timeout(60):
            while (await client.admin("POST", f"/keys/{key_id}/revoke"))[1]["told"] is not told:
                pass  # the server has not noticed the change of the connection yet

    async with running_control_plane(data) as client:
        with closing(SocketDirectory(data / "run")) as directory:
            control = ServiceClient(directory, "control.sock", "the control plane")
            seen: list[Feed] = []
            feed_client = FeedClient(control, seen.append, NAME)
            _, made = await client.admin("POST", "/keys", {"name": "k", "scopes": ["infer"]})
            for told in (True, False, True):
                following = asyncio.create_task(feed_client.run()) if told else None
                if following is not None:
                    await eventually(lambda: feed_client.connected)
                await revoked(client, made["key"]["key_id"], told=told)
                if following is not None:
                    following.cancel()
                    await asyncio.gather(following, return_exceptions=True)
                    feed_client.connected = False
            await control.close()


LIMIT_S = 30.0

Change = Callable[[Registry], Coroutine[Any, Any, object]]


def in_use(_: object) -> bool:
    return False


CHANGES: dict[str, Change] = {
    "push": lambda registry: registry.register(registration(letter="c"), NOW_S),
    "deploy": lambda registry: registry.deploy(BY, TENANT, "m", "b" * 12, NOW_S),
    "split": lambda registry: registry.split(BY, TENANT, "m", {"a" * 12: 1, "b" * 12: 1}, NOW_S),
    "ladder": lambda registry: registry.set_ladder(BY, TENANT, "m", Ladder(steps=()), NOW_S),
    "scale": lambda registry: registry.rescale(BY, TENANT, "m", {"backlog_s": 5.0}, NOW_S),
    "delete": lambda registry: registry.delete(BY, TENANT, "m", "b" * 12, NOW_S, in_use),
    "delete model": lambda registry: registry.delete_model(BY, TENANT, "m", NOW_S, in_use, force=True),
}


async def changed(path: Path, change: Change, reads: bool) -> bool:
    """Return whether the change returned while a reader lagged. If `reads`, the reader reads afterwards."""
    hub = FeedHub()
    async with opened_registry(path, hub) as registry:
        await registry.register(registration(letter="a"), NOW_S)
        await registry.register(registration(letter="b"), NOW_S)
        with hub.subscribe() as reader:
            await read_line(reader)
            before = hub.snapshot().revision
            changing = asyncio.ensure_future(change(registry))
            while hub.snapshot().revision == before:
                await asyncio.sleep(0.001)
            for _ in range(5):
                await asyncio.sleep(0)
            early = changing.done()
            if reads:
                await read_line(reader)
            await asyncio.wait_for(changing, LIMIT_S)
            return early


@pytest.mark.parametrize("name", CHANGES)
async def test_a_change_waits_for_its_readers(tmp_path: Path, name: str) -> None:
    """The change waits no longer than that."""
    assert not await changed(tmp_path, CHANGES[name], reads=True)


async def test_stalled_reader_delays_a_change_by_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the limit, the change returns anyway."""
    monkeypatch.setattr(subject, "DELIVERY_LIMIT_S", 0.05)
    assert not await changed(tmp_path, CHANGES["deploy"], reads=False)
