"""Publishing is idempotent at every step. Wherever it stops, no version is visible in part, and a retry completes it.

The push stops before or after each call to the store. As in a killed process, nothing runs after that.
"""

from pathlib import Path

import pytest

from kelvin.contracts.artifacts.manifest import encode_manifest, version_of
from kelvin.contracts.artifacts.object_keys import manifest_key
from kelvin.contracts.artifacts.push_api import Committed
from snapshotter.intake.plan_record import PlanRecord
from snapshotter.push.publisher import Publisher, Report
from tests.snapshotter.bench import Bench, Killed, push
from tests.snapshotter.models import Model
from tests.snapshotter.reader import assert_whole, versions_of
from tests.snapshotter.sender import TENANT

pytestmark = pytest.mark.deep


def stop_at_each_call(data: Path, model: Model, before: bool, kind: type[Publisher] = Publisher) -> int:
    """Push with a process that dies at call 1, 2, 3, ..., then push completely. Return the number of calls."""
    calls = 0
    while True:
        calls += 1
        attempt = data / f"{before}-{calls}"
        bench = Bench.over(attempt, calls, before, kind)
        try:
            push(bench, model)
        except Killed:
            assert_whole(attempt / "store", TENANT)
        if not bench.store.dead:
            return calls
        again = Bench.over(attempt)
        committed = push(again, model)
        assert committed.version == versions_of(attempt / "store", TENANT)[0]
        assert_whole(attempt / "store", TENANT)
        assert again.jobs.registered
        assert not list((attempt / "store" / TENANT / "drafts").iterdir())
        assert len(again.jobs.seals + bench.jobs.seals) <= 2


@pytest.mark.parametrize("before", [pytest.param(True, id="before"), pytest.param(False, id="after")])
def test_killed_at_each_call_of_the_store(tmp_path: Path, before: bool) -> None:
    """No visible version is incomplete, and a retry publishes and registers the version and leaves no draft."""
    assert stop_at_each_call(tmp_path, Model(), before) > 20


class HastyPublisher(Publisher):
    """A publisher that breaks the order: it writes the manifest first."""

    async def publish(self, record: PlanRecord, digests: tuple[str, ...], report: Report) -> Committed:
        raw = encode_manifest(record.manifest(digests))
        await self._store.put_if_absent(manifest_key(TENANT, version_of(raw)), raw)
        return await super().publish(record, digests, report)


def test_manifest_first_would_be_seen(tmp_path: Path) -> None:
    """The control: in the wrong order, the same test finds a version in part."""
    with pytest.raises((AssertionError, KeyError)):
        stop_at_each_call(tmp_path, Model(), before=False, kind=HastyPublisher)
