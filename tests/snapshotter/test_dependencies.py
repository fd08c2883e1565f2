"""Failures of the snapshotter's dependencies that no other file tests."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kelvin.blobstore.blob_store import BlobStore, BlobUnavailable, Payload
from kelvin.blobstore.verifying_store import VerifyingStore
from kelvin.contracts.artifacts.runtime_control import ENGINE_SOCKET
from kelvin.ipc.socket_directory import SocketDirectory
from tests.eventually import wait
from tests.snapshotter.control import FakeControlPlane
from tests.snapshotter.house import (
    announce_digests,
    make_plan,
    open_house,
    post,
    problem,
    push_whole,
    serve_app,
    settings_for,
)
from tests.snapshotter.models import Model
from tests.snapshotter.sender import digests_of


class Shut(VerifyingStore):
    """A store that refuses writes while `shut`."""

    shut = False

    async def put_if_absent(self, key: str, data: Payload) -> bool:
        """Fail while `shut`, else write."""
        if self.shut:
            raise BlobUnavailable("away")
        return await super().put_if_absent(key, data)


def test_push_succeeds_once_the_store_is_back(tmp_path: Path) -> None:
    """While the store is unavailable the commit fails as such. Staged chunks stay, and the same call succeeds later."""
    stores: list[Shut] = []

    def wrap(inner: BlobStore) -> BlobStore:
        stores.append(Shut(inner))
        return stores[-1]

    with open_house(settings_for(tmp_path / "data"), wrap) as house, house.client() as client:
        wait(lambda: stores, "the snapshotter has its store")
        stores[0].shut = True
        with pytest.raises(AssertionError, match='"unavailable"'):
            push_whole(client, make_plan(client))
        stores[0].shut = False
        plan = make_plan(client)
        assert announce_digests(client, plan, digests_of(plan, Model().files())).digests == (), (
            "the staged chunks are kept"
        )
        assert push_whole(client, plan)["created"]


def test_own_engine_gates_and_seals(tmp_path: Path) -> None:
    """Without an engine, and with a dead engine's socket, a plan is refused as unavailable. Afterwards one engine gates
    the plan and another seals it, and the control plane gets no job.
    """
    run = tmp_path / "engine" / "run"
    settings = replace(settings_for(tmp_path / "data"), engine=run)
    with open_house(settings) as house, house.client() as client:
        away = (503, "unavailable", "the engine is not available")
        assert problem(post(client, "/plans", Model().request())) == away
        with closing(SocketDirectory(run)) as directory:
            directory.listen(ENGINE_SOCKET).close()
            assert problem(post(client, "/plans", Model().request())) == away
            one, other = FakeControlPlane(house.store), FakeControlPlane(house.store)
            with serve_app(one.app(), directory, ENGINE_SOCKET):
                plan = make_plan(client)
            with serve_app(other.app(), directory, ENGINE_SOCKET):
                made = push_whole(client, plan)
    assert [len(each.gates) for each in (one, other, house.control)] == [1, 0, 0]
    assert [len(each.seals) for each in (one, other, house.control)] == [0, 1, 0]
    assert [each.version for each in house.control.registrations] == [made["version"]]
