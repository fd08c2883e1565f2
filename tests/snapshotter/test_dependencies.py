"""What the snapshotter depends on is taken away: what has no test in the file of who asks for it."""

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
from tests.snapshotter.house import announced, open_house, planned, post, problem, push_whole, serving, settings_for
from tests.snapshotter.models import Model
from tests.snapshotter.sender import digests_of


class Shut(VerifyingStore):
    """Takes nothing while it is `shut`."""

    shut = False

    async def put_if_absent(self, key: str, data: Payload) -> bool:
        """See `BlobStore`."""
        if self.shut:
            raise BlobUnavailable("away")
        return await super().put_if_absent(key, data)


def test_a_push_waits_for_the_store(tmp_path: Path) -> None:
    """The commit says that it is away, and what is staged stays: the same call succeeds once it is back."""
    stores: list[Shut] = []

    def wrap(inner: BlobStore) -> BlobStore:
        stores.append(Shut(inner))
        return stores[-1]

    with open_house(settings_for(tmp_path / "data"), wrap) as house, house.client() as client:
        wait(lambda: stores, "the snapshotter has its store")
        stores[0].shut = True
        with pytest.raises(AssertionError, match='"unavailable"'):
            push_whole(client, planned(client))
        stores[0].shut = False
        plan = planned(client)
        assert announced(client, plan, digests_of(plan, Model().files())).digests == (), "what was staged is here"
        assert push_whole(client, plan)["created"]


def test_an_engine_of_its_own_judges(tmp_path: Path) -> None:
    """None is there, a dead one has left its socket, one is there, then another one: the push is repeated until it is
    judged, and the control plane is asked for no job.
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
            with serving(one.app(), directory, ENGINE_SOCKET):
                plan = planned(client)
            with serving(other.app(), directory, ENGINE_SOCKET):
                made = push_whole(client, plan)
    assert [len(each.gates) for each in (one, other, house.control)] == [1, 0, 0]
    assert [len(each.seals) for each in (one, other, house.control)] == [0, 1, 0]
    assert [each.version for each in house.control.registrations] == [made["version"]]
