"""What the snapshotter depends on is taken away: what has no test in the file of who asks for it."""

from pathlib import Path

import pytest

from blobstore.store import BlobStore, BlobUnavailable, Payload
from blobstore.verifying import VerifyingStore
from tests.eventually import wait
from tests.snapshotter.house import open_house, settings_for
from tests.snapshotter.models import Model
from tests.snapshotter.sender import digests_of
from tests.snapshotter.test_routes import announced, planned, push_whole


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
