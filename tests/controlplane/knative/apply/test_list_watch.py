"""A watch lists all objects, then delivers changes, and restarts by itself after any failure."""

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from controlplane import dependencies
from controlplane.knative.apply import list_watch
from controlplane.knative.apply.cluster import Deleted, Synced, Upsert
from controlplane.knative.apply.transport import Query
from controlplane.knative.policy.object_labels import OURS_SELECTOR
from tests.cluster.kube_api.api_server import ApiServer, Fault
from tests.controlplane.knative.api_server_fixture import (
    NAMESPACE,
    WatchLog,
    config_map,
    open_test_client,
    watch_objects,
)
from tests.controlplane.knative.api_server_fixture import server as server
from tests.eventually import eventually


async def test_watch_lists_then_follows(server: ApiServer, tmp_path: Path) -> None:
    """Objects have their kind, which lists of built-in kinds leave out. Only objects with the labels are delivered."""
    async with open_test_client(server, tmp_path) as it:
        a, b = server.create(config_map("a")), server.create(config_map("b"))
        async with watch_objects(it, labels=OURS_SELECTOR) as log:
            await eventually(lambda: log.values == {"a": "1", "b": "1"})
            assert log.syncs == 1
            server.change(a, {"data": {"value": "2"}})
            server.delete(b)
            server.create(config_map("c"))
            await eventually(lambda: log.values == {"a": "2", "c": "1"})
            gone = [each for each in log.changes if isinstance(each, Deleted)]
            assert [(each.ref.name, each.uid) for each in gone] == [("b", b["metadata"]["uid"])]
            server.change(a, {"metadata": {"labels": None}})
            await eventually(lambda: log.values == {"c": "1"})
            assert log.syncs == 1
        await eventually(lambda: server.open_watches == 0, "its connection is ended")


async def test_list_is_paged(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the list expires between two pages, it begins again."""
    monkeypatch.setattr(list_watch, "PAGE", 2)
    async with open_test_client(server, tmp_path) as it:
        for name in "abcde":
            server.create(config_map(name))
        async with watch_objects(it) as log:
            await eventually(lambda: log.syncs == 1)
            assert sorted(log.values) == list("abcde")
        lists = [each.query for each in server.requests if each.method == "GET"]
        assert len(lists) == 3
        assert all(each["limit"] == "2" for each in lists)
        server.requests.clear()
        server.inject_faults(Fault(0, method="GET"), Fault(410, method="GET"))
        async with watch_objects(it) as log:
            await eventually(lambda: log.syncs == 1)
            assert sorted(log.values) == list("abcde")
        assert len([each for each in server.requests if each.method == "GET"]) == 5


async def test_broken_watch_resumes_without_a_list(server: ApiServer, tmp_path: Path) -> None:
    """No change is missed."""
    async with open_test_client(server, tmp_path) as it:
        a = server.create(config_map("a"))
        async with watch_objects(it) as log:
            for round_ in range(3):
                await eventually(lambda: server.open_watches == 1)
                server.drop_watches()
                server.change(a, {"data": {"value": f"after {round_}"}})
                await eventually(partial(_is, log, {"a": f"after {round_}"}))
            assert log.syncs == 1


def _is(log: WatchLog, values: dict[str, str]) -> bool:
    return log.values == values


@pytest.mark.parametrize("as_status", [False, True], ids=["expiry as an event", "expiry as a status"])
async def test_expired_version_lists_again(server: ApiServer, tmp_path: Path, as_status: bool) -> None:
    """The new list shows which objects were deleted meanwhile."""
    async with open_test_client(server, tmp_path) as it:
        a = server.create(config_map("a"))
        server.create(config_map("b"))
        async with watch_objects(it) as log:
            await eventually(lambda: server.open_watches == 1)
            server.inject_faults(Fault(503, method="WATCH"))
            server.drop_watches()
            server.delete(a)
            server.namespace("other")  # a change that the watch does not deliver
            server.expire(as_status=as_status)
            await eventually(lambda: log.syncs == 2)
            assert log.values == {"b": "1"}
            server.create(config_map("c"))
            await eventually(lambda: log.values == {"b": "1", "c": "1"})


async def test_bookmarks_spare_a_list(server: ApiServer, tmp_path: Path) -> None:
    """A kind without changes is watched on from the last bookmark."""
    async with open_test_client(server, tmp_path) as it, watch_objects(it) as log:
        await eventually(lambda: server.open_watches == 1)
        for each in range(5):
            server.namespace(f"other-{each}")
        server.bookmark()
        before = len(log.changes)
        first = int([each for each in server.requests if each.method == "WATCH"][-1].query["resourceVersion"])
        await eventually(lambda: _watched_version(server, drop=True) > first)
        assert len(log.changes) == before


def _watched_version(server: ApiServer, *, drop: bool) -> int:
    if drop and server.open_watches:
        server.drop_watches()
    return int([each for each in server.requests if each.method == "WATCH"][-1].query["resourceVersion"])


async def test_silent_watch_is_restarted(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead connection may give no error."""
    monkeypatch.setattr(dependencies, "WATCH", replace(dependencies.WATCH, timeout_s=0.2))
    async with open_test_client(server, tmp_path) as it:
        server.inject_faults(Fault(delay_s=300, method="WATCH"))
        async with watch_objects(it) as log:
            await eventually(lambda: server.open_watches == 1)
            server.create(config_map("a"))
            await eventually(lambda: log.values == {"a": "1"})
            assert log.syncs == 1


async def test_watch_failure_is_logged_once(
    server: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A right or a kind may be missing. The failure and the recovery are each logged once."""
    caplog.set_level(logging.INFO, "kelvin.cluster")

    def logged() -> list[str]:
        return [each.getMessage().partition(":")[0] for each in caplog.records if each.name == "kelvin.cluster"]

    async with open_test_client(server, tmp_path) as it:
        server.inject_faults(*[Fault(403, method="GET")] * 4)
        async with watch_objects(it) as log:
            await eventually(lambda: log.syncs == 1)
            assert logged() == ["/api/v1/configmaps is not watched", "/api/v1/configmaps is watched again"]
            assert "is not watched: Denied: " in caplog.text
        caplog.clear()
        async with watch_objects(it, kind="Unheard"):
            await eventually(logged)
        assert logged() == ["/api/v1/unheards is not watched"]
        assert "is not watched: Missing: " in caplog.text


@pytest.mark.parametrize("fault", [Fault(429, method="WATCH", retry_after_s=1), Fault(drop=True, method="WATCH")])
async def test_busy_or_unreachable_server_is_retried(server: ApiServer, tmp_path: Path, fault: Fault) -> None:
    """The watch resumes at the same version."""
    async with open_test_client(server, tmp_path) as it:
        server.inject_faults(fault)
        async with watch_objects(it) as log:
            await eventually(lambda: server.open_watches == 1)
            server.create(config_map("a", NAMESPACE))
            await eventually(lambda: log.values == {"a": NAMESPACE})
            assert log.syncs == 1


async def test_closing_the_generator_closes_the_connection(server: ApiServer, tmp_path: Path) -> None:
    """This holds between two changes, too. The connection closes on return, not at garbage collection."""
    async with open_test_client(server, tmp_path) as it:
        open_now: list[int] = []
        lines = it._transport.stream_lines

        @asynccontextmanager
        async def counted(path: str, query: Query, *, silence_s: float) -> AsyncIterator[AsyncIterator[bytes]]:
            open_now.append(1)
            async with lines(path, query, silence_s=silence_s) as them:
                try:
                    yield them
                finally:
                    open_now.pop()

        it._transport.stream_lines = counted  # type: ignore[method-assign]
        async with aclosing(it.watch("v1", "ConfigMap")) as changes:
            assert isinstance(await anext(changes), Synced)
            server.create(config_map("a"))
            assert isinstance(await anext(changes), Upsert)
            assert open_now
        assert not open_now
