"""The feed: snapshot and changes always add up to the state, a slow reader is cut, and heartbeats fill silence."""

import asyncio
from contextlib import ExitStack

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.registry.feed_hub import FeedEnded, FeedHub, FellBehind, Subscription
from kelvin.contracts.artifacts.manifest import Limits
from kelvin.contracts.serving.control_messages import (
    Feed,
    KeyRow,
    ModelRow,
    ReplicaRow,
    RestoreFailure,
    RevisionRow,
    Scope,
    TenantRow,
    VersionRow,
)
from kelvin.contracts.serving.start_forecast import StartRow

LIMITS = Limits(max_input_tokens=1, max_output_tokens=1)


def replica(number: int, *, draining: bool = False) -> ReplicaRow:
    return ReplicaRow(
        runtime_id=f"r{number}",
        tenant="t",
        model="m",
        version="v",
        address=f"rt-r{number}.sock",
        max_streams=1,
        draining=draining,
        restore=(),
    )


def failure(number: int) -> RestoreFailure:
    return RestoreFailure(tenant="t", version="v", code=f"c{number}", status=500, message="m", retryable=False)


class Reader:
    """A feed reader that applies lines. It checks their order, and that a snapshot comes first."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, object], object] = {}
        self.revision = 0
        self.failures: list[str] = []

    def apply(self, raw: bytes) -> None:
        line = msgspec.json.decode(raw, type=Feed)
        assert raw.endswith(b"\n")
        if line.full:
            self.rows.clear()
        else:
            assert self.revision, "a change before the snapshot"
            silent = not (line.keys or line.models or line.versions or line.replicas or line.failures or line.tenants)
            silent = silent and not line.revisions
            removed = line.removed_replicas or line.removed_keys or line.removed_tenants or line.removed_revisions
            removed = removed or line.removed_versions
            wanted = self.revision + (0 if silent and not removed else 1)
            assert line.revision == wanted, "a change is missing, or comes twice"
        self.revision = line.revision
        for tenant in line.tenants:
            self.rows["tenant", tenant.tenant] = tenant
        for name in line.removed_tenants:
            self.rows.pop(("tenant", name), None)
        for row in line.keys:
            self.rows["key", row.key_id] = row
        for key_id in line.removed_keys:
            self.rows.pop(("key", key_id), None)
        for model in line.models:
            self.rows["model", (model.tenant, model.model)] = model
        for version in line.versions:
            self.rows["version", (version.tenant, version.model, version.version)] = version
        for each in line.replicas:
            self.rows["replica", each.runtime_id] = each
        for runtime_id in line.removed_replicas:
            self.rows.pop(("replica", runtime_id), None)
        for gone in line.removed_versions:
            self.rows.pop(("version", gone), None)
        for revision in line.revisions:
            self.rows["revision", (revision.tenant, revision.model, revision.version)] = revision
        for gone in (*line.removed_versions, *line.removed_revisions):
            self.rows.pop(("revision", gone), None)
        self.failures += [each.code for each in line.failures]


async def _drain(subscription: Subscription, reader: Reader) -> None:
    while subscription._lines:
        reader.apply(await subscription.next_line())
        subscription.record_sent()


def _state(hub: FeedHub) -> dict[tuple[str, object], object]:
    reader = Reader()
    reader.apply(msgspec.json.encode(hub.snapshot()) + b"\n")
    return reader.rows


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("tenant"), st.integers(0, 3)),
        st.tuples(st.just("farewell"), st.integers(0, 3)),
        st.tuples(st.just("key"), st.integers(0, 3)),
        st.tuples(st.just("revoke"), st.integers(0, 3)),
        st.tuples(st.just("model"), st.integers(0, 3)),
        st.tuples(st.just("version"), st.integers(0, 3)),
        st.tuples(st.just("forget"), st.integers(0, 3)),
        st.tuples(st.just("revision"), st.integers(0, 3)),
        st.tuples(st.just("unscale"), st.integers(0, 3)),
        st.tuples(st.just("replica"), st.integers(0, 3)),
        st.tuples(st.just("drain"), st.integers(0, 3)),
        st.tuples(st.just("remove"), st.integers(0, 3)),
        st.tuples(st.just("failure"), st.integers(0, 3)),
        st.tuples(st.just("read"), st.just(0)),
        st.tuples(st.just("resync"), st.just(0)),
    ),
    max_size=60,
)


def _publish(hub: FeedHub, step: str, number: int) -> None:
    match step:
        case "key":
            hub.publish(Feed(keys=(KeyRow(key_id=str(number), secret_sha256="0", tenant="t", scopes=(Scope.INFER,)),)))
        case "revoke":
            hub.publish(Feed(removed_keys=(str(number),)))
        case "tenant":
            hub.publish(Feed(tenants=(TenantRow(tenant=f"t{number}", suspended=number > 1),)))
        case "farewell":
            hub.publish(Feed(removed_tenants=(f"t{number}",)))
        case "model":
            hub.publish(Feed(models=(ModelRow(tenant="t", model=f"m{number}", aliases={"prod": "v"}, created_at_s=0),)))
        case "version":
            row = VersionRow(tenant="t", model="m", version=f"v{number}", limits=LIMITS, created_at_s=0)
            hub.publish(Feed(versions=(row,)))
        case "forget":
            hub.publish(Feed(removed_versions=(("t", "m", f"v{number}"),)))
        case "revision":
            name = f"m-{len(hub.snapshot().revisions)}"
            hub.publish(
                Feed(revisions=(RevisionRow(tenant="t", model="m", version=f"v{number}", namespace="n", name=name),))
            )
        case "unscale":
            hub.publish(Feed(removed_revisions=(("t", "m", f"v{number}"),)))
        case "replica":
            hub.publish(Feed(replicas=(replica(number),)))
        case "drain":
            hub.publish(Feed(replicas=(replica(number, draining=True),)))
        case "remove":
            hub.publish(Feed(removed_replicas=(f"r{number}",)))
        case "failure":
            hub.publish(Feed(failures=(failure(number),)))


async def _play(steps: list[tuple[str, int]]) -> None:
    hub, faithful, reader = FeedHub(max_lines=6), Reader(), Reader()
    with ExitStack() as readers:
        faithful_subscription = readers.enter_context(hub.subscribe())
        subscription = readers.enter_context(hub.subscribe())
        for step, number in steps:
            if step in ("read", "resync") and (subscription.is_cut or step == "resync"):
                subscription, reader = readers.enter_context(hub.subscribe()), Reader()
            elif step == "read":
                await _drain(subscription, reader)
            _publish(hub, step, number)
            await _drain(faithful_subscription, faithful)
        if not subscription.is_cut:
            await _drain(subscription, reader)
            assert reader.rows == _state(hub)
    assert faithful.rows == _state(hub)
    assert faithful.failures == [f"c{number}" for step, number in steps if step == "failure"]


@given(STEPS)
def test_snapshot_and_changes_add_up(steps: list[tuple[str, int]]) -> None:
    """This holds for readers that join at any time and are cut any number of times."""
    asyncio.run(_play(steps))


async def test_a_lost_change_is_noticed() -> None:
    """Negative control: a reader that misses one line fails the check above."""
    hub, reader = FeedHub(), Reader()
    with hub.subscribe() as subscription:
        await _drain(subscription, reader)
        hub.publish(Feed(replicas=(replica(1),)))
        subscription._lines.clear()
        hub.publish(Feed(replicas=(replica(2),)))
        with pytest.raises(AssertionError, match="missing"):
            await _drain(subscription, reader)


def test_a_start_is_over_once_a_replica_takes_requests() -> None:
    """A replica that is unproven or draining does not end the start."""
    hub = FeedHub()
    start = StartRow(tenant="t", model="m", version="v", start_ms=3000)
    hub.publish(Feed(starts=(start,)))
    hub.publish(Feed(replicas=(msgspec.structs.replace(replica(1), unproven=True), replica(2, draining=True))))
    assert hub.snapshot().starts == (start,)
    hub.publish(Feed(replicas=(replica(1),)))
    assert hub.snapshot().starts == ()


async def test_a_slow_reader_is_cut_and_others_are_not() -> None:
    """Its queue stays within the limit, its next read raises FellBehind, and a new subscription has everything."""
    hub = FeedHub(max_lines=10)
    with hub.subscribe() as slow, hub.subscribe() as quick:
        reader = Reader()
        for number in range(50):
            hub.publish(Feed(replicas=(replica(number),)))
            while quick._lines:
                reader.apply(await quick.next_line())
                quick.record_sent()
            assert len(slow._lines) <= 10
        with pytest.raises(FellBehind):
            await slow.next_line()
        assert not quick.is_cut
        with hub.subscribe() as again:
            resynced = Reader()
            resynced.apply(await again.next_line())
            assert resynced.rows == reader.rows


async def test_silence_is_filled_with_heartbeats() -> None:
    """A heartbeat changes no row and no revision."""
    hub, reader = FeedHub(), Reader()
    with hub.subscribe() as subscription:
        reader.apply(await subscription.next_line())
        before = dict(reader.rows), reader.revision
        reader.apply(await subscription.next_line(heartbeat_s=0.01))
        assert (reader.rows, reader.revision) == before


async def test_settled_waits_for_every_present_reader() -> None:
    """A reader that lags is waited for. A reader that left or was cut is not."""
    hub = FeedHub()
    with hub.subscribe() as one:
        two_block = hub.subscribe()
        two = two_block.__enter__()
        revision = hub.publish(Feed(replicas=(replica(1),)))
        settling = asyncio.create_task(hub.wait_until_delivered(revision, 5.0))
        for _ in range(2):
            await one.next_line()
            one.record_sent()
        await asyncio.sleep(0)
        assert not settling.done()
        await two.next_line()
        two.record_sent()  # only the snapshot from before the publication
        await asyncio.sleep(0)
        assert not settling.done()
        two_block.__exit__(None, None, None)
        assert await settling
        assert not await hub.wait_until_delivered(revision + 1, 0.01), "an unpublished revision was delivered"


async def test_an_end_comes_after_the_last_line() -> None:
    """Lines from before the end are delivered first."""
    hub, reader = FeedHub(), Reader()
    with hub.subscribe() as subscription:
        hub.publish(Feed(replicas=(replica(1),)))
        hub.end()
        for _ in range(2):
            reader.apply(await subscription.next_line())
        assert reader.rows == _state(hub)
        for _ in range(2):
            with pytest.raises(FeedEnded):
                await subscription.next_line()


async def test_reader_that_comes_after_the_end_is_ended() -> None:
    """It gets only the snapshot. A reader that waited for more would delay the end of the process."""
    hub = FeedHub()
    hub.publish(Feed(replicas=(replica(1),)))
    hub.end()
    reader = Reader()
    with hub.subscribe("activator-1") as subscription:
        reader.apply(await subscription.next_line())
        assert reader.rows == _state(hub)
        async with asyncio.timeout(5):
            with pytest.raises(FeedEnded):
                await subscription.next_line()
