"""The registry of models and versions: aliases, scale settings, faults, deletion and stops. Runs on both backends."""

import asyncio
from pathlib import Path

import pytest
from msgspec import structs
from sqlalchemy import Connection, func, select, text

from controlplane.db import schema
from controlplane.db.database import disposing, reading_engine
from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.policy.version_lifecycle import VersionEvent, VersionState
from controlplane.registry.registry import Registry
from controlplane.scaling.policy.scale_settings import ScaleSettings
from kelvin.contracts.errors import Conflict, InvalidRequest, ModelNotFound, NotFound
from kelvin.contracts.serving.control_messages import Feed, RegistrationResult, VersionRegistration
from tests.controlplane import database_backends
from tests.controlplane.builders import BY, NOW_S, TENANT, digest, key, opened_registry, refusal, registration
from tests.controlplane.database_backends import SQLITE

pytestmark = pytest.mark.usefixtures("backend")


def checked(pushed: VersionRegistration) -> VersionRegistration:
    """Return the registration that the snapshotter sends after reading all chunks."""
    return structs.replace(pushed, checked=True)


async def test_the_first_push_creates_prod_and_later_ones_leave_it(tmp_path: Path) -> None:
    """`prod` names the first version until a deploy."""
    async with opened_registry(tmp_path) as registry:
        for letter in "ab":
            assert await registry.register(registration(letter=letter), NOW_S) == RegistrationResult(is_new=True)
        assert registry.model(TENANT, "m").aliases == {"prod": digest("a")}
        assert await registry.deploy(BY, TENANT, "m", "b" * 12, NOW_S) == digest("b")
        assert registry.model(TENANT, "m").aliases == {"prod": digest("b")}
        assert [each.registration.version for each in registry.model(TENANT, "m").versions] == [
            digest("a"),
            digest("b"),
        ]


async def test_repeated_registration_changes_nothing(tmp_path: Path) -> None:
    """The snapshotter may register a version any number of times."""
    async with opened_registry(tmp_path) as registry:
        assert (await registry.register(registration(), NOW_S)).is_new
        before = registry.model(TENANT, "m")
        assert await registry.register(registration(), NOW_S + 5) == RegistrationResult(is_new=False)
        assert registry.model(TENANT, "m") == before


async def test_a_restart_forgets_nothing(tmp_path: Path) -> None:
    """Models, aliases, scale settings and faults are on disk."""
    async with opened_registry(tmp_path) as registry:
        await registry.register(registration(letter="a"), NOW_S)
        await registry.register(registration(letter="b"), NOW_S + 1)
        await registry.register(registration(model="n", letter="a"), NOW_S + 2)
        await registry.deploy(BY, TENANT, "m", "b" * 64, NOW_S)
        await registry.rescale(
            BY, TENANT, "m", {"min": 1, "max": 3, "target": 2.5, "window_s": 6.0, "grace_s": 0.0}, NOW_S
        )
        await registry.record_event(key(letter="a"), VersionEvent.FOUND_BROKEN, "chunk_corrupt")
        before = registry.models(TENANT)
    async with opened_registry(tmp_path) as registry:
        assert registry.models(TENANT) == before
        assert registry.model(TENANT, "m").scale.target == 2.5
        found = registry.find(key(letter="a"))
        assert found is not None
        assert (found[1].state, found[1].fault) == (VersionState.FAULTY, "chunk_corrupt")


async def test_refusals_name_what_is_wrong(tmp_path: Path) -> None:
    """Each refusal has the value in it, and nothing changes."""
    async with opened_registry(tmp_path) as registry:
        twins = ("c" * 63 + "1", "c" * 63 + "2")
        for version in (digest("a"), *twins):
            base = registration()
            await registry.register(
                type(base)(**{name: getattr(base, name) for name in base.__struct_fields__} | {"version": version}),
                NOW_S,
            )
        before = registry.models(TENANT)
        assert await refusal(registry.deploy(BY, TENANT, "nope", "a" * 12, NOW_S)) == ModelNotFound("nope")
        assert await refusal(registry.deploy(BY, "other", "m", "a" * 12, NOW_S)) == ModelNotFound("m")
        assert await refusal(registry.deploy(BY, TENANT, "m", "d" * 12, NOW_S)) == NotFound("version", "m@" + "d" * 12)
        assert isinstance(await refusal(registry.deploy(BY, TENANT, "m", "c" * 12, NOW_S)), InvalidRequest)
        assert isinstance(await refusal(registry.deploy(BY, TENANT, "m", "a" * 11, NOW_S)), InvalidRequest)
        assert isinstance(await refusal(registry.register(registration(model="No"), NOW_S)), InvalidRequest)
        stranger = registration(model="new", tenant="stranger")
        assert await refusal(registry.register(stranger, NOW_S)) == NotFound("tenant", "stranger")
        crossing = registry.rescale(BY, TENANT, "m", {"min": 2}, NOW_S)
        assert await refusal(crossing) == InvalidRequest("min", "2", "must be 1 (max) or less")
        part = registry.rescale(BY, TENANT, "m", {"window_s": 6.5}, NOW_S)
        assert isinstance(await refusal(part), InvalidRequest)
        assert registry.models(TENANT) == before
        assert registry.models("stranger") == ()


async def test_no_alias_moves_to_a_faulty_version(tmp_path: Path) -> None:
    """A deploy of a faulty version is refused. A successful restore or a checked push ends the fault."""
    async with opened_registry(tmp_path) as registry:
        await registry.register(registration(letter="a"), NOW_S)
        await registry.register(registration(letter="b"), NOW_S)
        for mended in (
            registry.record_event(key(letter="b"), VersionEvent.RESTORED),
            registry.register(checked(registration(letter="b")), NOW_S),
        ):
            await registry.record_event(key(letter="b"), VersionEvent.FOUND_BROKEN, "chunk_corrupt")
            assert isinstance(await refusal(registry.deploy(BY, TENANT, "m", digest("b"), NOW_S)), Conflict)
            await mended
            assert await registry.deploy(BY, TENANT, "m", digest("b"), NOW_S) == digest("b")


async def test_unchecked_push_leaves_a_version_faulty(tmp_path: Path) -> None:
    """A faulty version stays faulty after an unchecked push, and the snapshotter gets the fault, also after a deletion
    and under another model. A sound version is unchanged.
    """
    async with opened_registry(tmp_path) as registry:
        again = registration(letter="a")
        await registry.register(again, NOW_S)
        assert await registry.register(again, NOW_S) == RegistrationResult(is_new=False)
        await registry.record_event(key(letter="a"), VersionEvent.FOUND_BROKEN, "chunk_corrupt")
        assert await registry.register(again, NOW_S) == RegistrationResult(is_new=False, fault="chunk_corrupt")
        assert isinstance(await refusal(registry.deploy(BY, TENANT, "m", digest("a"), NOW_S)), Conflict)
        await registry.register(registration(letter="b"), NOW_S)
        await registry.record_event(key(letter="b"), VersionEvent.FOUND_BROKEN, "chunk_corrupt")
        await registry.delete(BY, TENANT, "m", digest("b"), NOW_S, lambda _: False)
        other = registration("other", letter="a")
        assert await registry.register(other, NOW_S) == RegistrationResult(is_new=False, fault="chunk_corrupt")
        again = registration(letter="b")
        assert await registry.register(again, NOW_S) == RegistrationResult(is_new=False, fault="chunk_corrupt")
        back = await registry.register(checked(again), NOW_S)
        assert back == RegistrationResult(is_new=False, was_deleted=True)
        assert await registry.deploy(BY, TENANT, "m", digest("b"), NOW_S) == digest("b")


async def test_a_deleted_version_whose_known_answers_failed_comes_back(tmp_path: Path) -> None:
    """Its chunks are sound, and no request can reach a deleted version, so only a push can bring it back."""
    async with opened_registry(tmp_path) as registry:
        for letter, fault in (("a", "probe_failed"), ("b", "attestation_invalid")):
            await registry.register(registration("n", letter), NOW_S)
            await registry.record_event(key("n", letter), VersionEvent.FOUND_BROKEN, fault)
            assert (await registry.register(registration("n", letter), NOW_S)).fault == fault
        await registry.register(registration("n", "c"), NOW_S)
        await registry.deploy(BY, TENANT, "n", digest("c"), NOW_S)
        for letter in "ab":
            await registry.delete(BY, TENANT, "n", digest(letter), NOW_S, lambda _: False)
            back = await registry.register(registration("n", letter), NOW_S)
            assert back == RegistrationResult(is_new=False, was_deleted=True)


async def test_scale_settings_change_one_by_one(tmp_path: Path) -> None:
    """A setting that is not given stays. A target can be removed."""
    async with opened_registry(tmp_path) as registry:
        await registry.register(registration(), NOW_S)
        assert await registry.rescale(BY, TENANT, "m", {}, NOW_S) == ScaleSettings()
        assert await registry.rescale(BY, TENANT, "m", {"max": 4}, NOW_S) == ScaleSettings(max=4)
        assert await registry.rescale(BY, TENANT, "m", {"target": 3.0}, NOW_S) == ScaleSettings(max=4, target=3.0)
        assert await registry.rescale(BY, TENANT, "m", {"target": None}, NOW_S) == ScaleSettings(max=4)


async def test_change_is_durable_before_it_is_published(tmp_path: Path) -> None:
    """Each change is on disk when the feed publishes it. Negative control: before the commit it is not."""
    seen: list[tuple[int, int]] = []

    class Looking(FeedHub):
        def publish(self, change: Feed) -> int:
            if change.versions:
                seen.append((len(change.versions), _versions_on_disk(tmp_path)))
            return super().publish(change)

    async with opened_registry(tmp_path, Looking()) as registry:
        assert _versions_on_disk(tmp_path) == 0
        await registry.register(registration(letter="a"), NOW_S)
        await registry.register(registration(letter="b"), NOW_S)
    async with opened_registry(tmp_path, Looking()):
        assert seen == [(1, 1), (1, 2), (2, 2)]


def _versions_on_disk(data: Path) -> int:
    """Return the number of versions that another process would see."""
    with disposing(reading_engine(database_backends.place(data))) as engine, engine.connect() as connection:
        return connection.execute(select(func.count()).select_from(schema.versions)).scalar_one()


async def test_concurrent_writes_take_turns(tmp_path: Path) -> None:
    """After many concurrent changes, each version exists once, and a reload gives the same state."""
    letters = "abcdef"
    async with opened_registry(tmp_path) as registry:
        await registry.register(registration(letter="a"), NOW_S)
        pushes = [registry.register(registration(letter=letter), NOW_S) for letter in letters * 5]
        scales = [registry.rescale(BY, TENANT, "m", {"max": number + 1}, NOW_S) for number in range(20)]
        created = await asyncio.gather(*pushes)
        await asyncio.gather(*scales, registry.deploy(BY, TENANT, "m", digest("f"), NOW_S))
        assert sum(each.is_new for each in created) == len(letters) - 1
        before = registry.models(TENANT)
    async with opened_registry(tmp_path) as registry:
        assert registry.models(TENANT) == before


async def test_feed_has_models_and_versions(tmp_path: Path) -> None:
    """After a restart, the snapshot has each model with its aliases, and each version."""
    async with opened_registry(tmp_path) as registry:
        await registry.register(registration(letter="a"), NOW_S)
        await registry.register(registration(letter="b"), NOW_S)
    feed = FeedHub()
    async with opened_registry(tmp_path, feed):
        snapshot = feed.snapshot()
    assert [(row.model, row.aliases) for row in snapshot.models] == [("m", {"prod": digest("a")})]
    assert {row.version for row in snapshot.versions} == {digest("a"), digest("b")}


async def test_a_failed_commit_shows_nothing(tmp_path: Path) -> None:
    """If the disk refuses the write, memory and feed stay unchanged."""
    feed = FeedHub()
    async with opened_registry(tmp_path, feed) as registry:
        await registry.register(registration(letter="a"), NOW_S)
        before, snapshot = registry.models(TENANT), feed.snapshot()
        await _forbid_inserts(registry)
        with pytest.raises(Exception, match="disk is full"):
            await registry.register(registration(letter="b"), NOW_S)
        assert registry.models(TENANT) == before
        assert feed.snapshot() == snapshot


async def _forbid_inserts(registry: Registry) -> None:
    def trigger(connection: Connection) -> None:
        if connection.dialect.name == SQLITE:
            statements = ["CREATE TRIGGER no BEFORE INSERT ON versions BEGIN SELECT RAISE(ABORT, 'disk is full'); END"]
        else:
            statements = [
                "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'disk is full'; END $$",
                "CREATE TRIGGER no BEFORE INSERT ON versions FOR EACH ROW EXECUTE FUNCTION no()",
            ]
        for statement in statements:
            connection.execute(text(statement))

    await registry._database.write(trigger)


def test_scale_defaults_are_the_policys() -> None:
    """By default a model has zero to one replica, and Knative's window and grace period."""
    assert ScaleSettings() == ScaleSettings(
        min=0,
        max=1,
        target=None,
        window_s=60.0,
        grace_s=30.0,
        idle="zero",
        wait_price=10_000,
        average="linear",
        backlog_s=0.0,
    )


async def test_feed_has_only_scale_settings_of_activators(tmp_path: Path) -> None:
    """Only `backlog_s` is published, also after a restart. Other settings are for the autoscaler alone."""
    feed = FeedHub()
    async with opened_registry(tmp_path, feed) as registry:
        await registry.register(registration(letter="a"), NOW_S)
        before = feed.snapshot().revision
        await registry.rescale(BY, TENANT, "m", {"max": 4, "average": "weighted"}, NOW_S)
        assert feed.snapshot().revision == before
        await registry.rescale(BY, TENANT, "m", {"backlog_s": 5.0}, NOW_S)
        assert [row.backlog_s for row in feed.snapshot().models] == [5.0]
    again = FeedHub()
    async with opened_registry(tmp_path, again) as registry:
        assert registry.model(TENANT, "m").scale == ScaleSettings(max=4, average="weighted", backlog_s=5.0)
        assert [row.backlog_s for row in again.snapshot().models] == [5.0]


async def test_a_deleted_version_is_remembered_and_not_served(tmp_path: Path) -> None:
    """A version with an alias or a replica is not deleted. A deleted one leaves the feed until its next push."""
    feed = FeedHub()
    async with opened_registry(tmp_path, feed) as registry:
        await registry.register(registration(letter="a"), NOW_S)
        await registry.register(registration(letter="b"), NOW_S)
        await registry.register(registration(model="n", letter="b"), NOW_S)
        named = await refusal(registry.delete(BY, TENANT, "m", "a" * 12, NOW_S, lambda key: False))
        assert isinstance(named, Conflict)
        assert "'prod' names it" in named.message
        used = await refusal(registry.delete(BY, TENANT, "m", "b" * 12, NOW_S, lambda key: True))
        assert isinstance(used, Conflict)
        assert "kelvin stop m" in used.message
        assert await refusal(registry.delete(BY, TENANT, "m", "d" * 12, NOW_S, lambda key: False)) == NotFound(
            "version", "m@" + "d" * 12
        )
        for _ in range(2):
            assert await registry.delete(BY, TENANT, "m", "b" * 12, NOW_S, lambda key: False) == key(letter="b")
        assert registry.find(key(letter="b")) is None
        assert registry.version_digests(TENANT) == (digest("a"), digest("b"))  # the model n has it
        assert {(row.model, row.version) for row in feed.snapshot().versions} == {
            ("m", digest("a")),
            ("n", digest("b")),
        }
        assert isinstance(await refusal(registry.deploy(BY, TENANT, "m", "b" * 12, NOW_S)), Conflict)
        await registry.record_event(key(letter="b"), VersionEvent.RESTORED)  # an event that arrives too late
    feed = FeedHub()
    async with opened_registry(tmp_path, feed) as registry:
        (version,) = [each for each in registry.model(TENANT, "m").versions if each.is_deleted]
        assert (version.registration.version, version.state) == (digest("b"), VersionState.DELETED)
        assert ("m", digest("b")) not in {(row.model, row.version) for row in feed.snapshot().versions}
        back = RegistrationResult(is_new=False, was_deleted=True)
        assert await registry.register(registration(letter="b"), NOW_S + 9) == back
        assert await registry.register(registration(letter="b"), NOW_S + 10) == RegistrationResult(is_new=False)
        assert ("m", digest("b")) in {(row.model, row.version) for row in feed.snapshot().versions}
        assert await registry.deploy(BY, TENANT, "m", "b" * 12, NOW_S) == digest("b")


async def test_stop_is_durable_and_ends_with_use(tmp_path: Path) -> None:
    """The next control plane still knows the stop. A request, a deploy, a split or a minimum ends it."""

    def stopped(registry: Registry) -> list[bool]:
        return [version.stopped_at_s is not None for version in registry.model(TENANT, "m").versions]

    async with opened_registry(tmp_path) as registry:
        for letter in "ab":
            await registry.register(registration("m", letter), NOW_S)
        await registry.stop(BY, TENANT, "m", NOW_S)
        await registry.rescale(BY, TENANT, "m", {"max": 4}, NOW_S)
    async with opened_registry(tmp_path) as registry:
        assert stopped(registry) == [True, True]
        await registry.resume(key("m", "b"), NOW_S)
    async with opened_registry(tmp_path) as registry:
        assert stopped(registry) == [True, False]
        await registry.deploy(BY, TENANT, "m", digest("a")[:12], NOW_S)
        assert stopped(registry) == [False, False], "also where `prod` named it already"
        await registry.stop(BY, TENANT, "m", NOW_S)
        await registry.split(BY, TENANT, "m", {digest("a")[:12]: 1, digest("b")[:12]: 1}, NOW_S)
        assert stopped(registry) == [False, False]
        await registry.stop(BY, TENANT, "m", NOW_S)
        await registry.rescale(BY, TENANT, "m", {"min": 1}, NOW_S)
        assert stopped(registry) == [False, False]
    async with opened_registry(tmp_path) as registry:
        assert stopped(registry) == [False, False]


async def test_second_stop_outlasts_the_request_before_it(tmp_path: Path) -> None:
    """A request that came after the first stop ends only that stop, even if both stops are in the same second."""
    async with opened_registry(tmp_path) as registry:
        await registry.register(registration(), NOW_S)
        await registry.stop(BY, TENANT, "m", NOW_S)
        first = registry.model(TENANT, "m").versions[0].stopped_at_s
        assert first is not None
        second = registry.stop(BY, TENANT, "m", NOW_S)  # it is first in the queue for the registry's lock
        await asyncio.gather(second, registry.resume(key(), first))
    async with opened_registry(tmp_path) as registry:
        (version,) = registry.model(TENANT, "m").versions
        assert version.stopped_at_s == first + 1
        await registry.resume(key(), version.stopped_at_s)
        assert registry.model(TENANT, "m").versions[0].stopped_at_s is None


async def test_stop_after_a_deploy_outlasts_the_request_before_both(tmp_path: Path) -> None:
    """This holds within one second, and if the clock steps back."""
    async with opened_registry(tmp_path) as registry:
        await registry.register(registration(), NOW_S)
        await registry.stop(BY, TENANT, "m", NOW_S)
        first = registry.model(TENANT, "m").versions[0].stopped_at_s
        assert first is not None
        for now_s in (NOW_S, NOW_S - 1):
            await registry.deploy(BY, TENANT, "m", digest("a")[:12], now_s)
            await registry.stop(BY, TENANT, "m", now_s)
            await registry.resume(key(), first)
            assert registry.model(TENANT, "m").versions[0].stopped_at_s is not None
