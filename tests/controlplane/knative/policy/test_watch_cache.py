"""WatchCache: the changes to publish, for objects in any order and any number of repeats."""

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controlplane.knative.policy.object_status import (
    Pod,
    RevisionFailure,
    Service,
    SlicePods,
    parse_revision_failure,
    parse_service,
    parse_slice_pods,
)
from controlplane.knative.policy.watch_cache import FeedChanges, WatchCache
from controlplane.registry.policy.domain import VersionKey
from kelvin.contracts.serving.control_messages import ReplicaRow

OF = VersionKey("acme", "llama", "3f" * 32)
NAME = ("acme", "llama", "3f" * 32)
AT = ("kelvin-acme", "llama-3f3f")
SLICE = ("kelvin-acme", "llama-3f3f-00001-private-x")
R1, R2 = "llama-3f3f-00001", "llama-3f3f-00002"
FAILED = RevisionFailure("ImagePullBackOff", "noon")
RECORDED = Path(__file__).parents[4].parent / "shared" / "knative-recorded" / "lifecycle"


def pods(*names: str, is_ready: bool = True, is_leaving: bool = False) -> SlicePods:
    """Return the pods of one slice."""
    return SlicePods(AT[1], tuple(Pod(name, f"http://{name}", is_ready, is_leaving) for name in names))


def service(created: str = R1, ready: str = R1, **more: Any) -> Service:
    """Return the version's Service."""
    return Service(OF, 8, created, ready, **more)


def shown(rows: tuple[ReplicaRow, ...]) -> list[tuple[str, str]]:
    """Return the name and state of each replica row."""
    return [(row.runtime_id, "draining" if row.draining else "unproven" if row.unproven else "ready") for row in rows]


def test_feed_follows_a_service_through_its_lifecycle() -> None:
    """The revision appears, a pod starts, is ready, leaves and is gone, and the Service ends. A repeated object gives
    no change.
    """
    sight = WatchCache()
    assert not sight.update_service(AT, service("", ""))
    assert [row.name for row in sight.update_service(AT, service(ready="")).revisions] == [R1]
    assert shown(sight.update_slice(SLICE, pods("a", is_ready=False)).replicas) == [("a", "unproven")]
    assert not sight.update_slice(SLICE, pods("a", is_ready=False))
    assert shown(sight.update_slice(SLICE, pods("a")).replicas) == [("a", "ready")]
    assert not sight.update_service(AT, service()), "the published revision stays the same"
    assert shown(sight.update_slice(SLICE, pods("a", "b")).replicas) == [("b", "ready")]
    assert shown(sight.update_slice(SLICE, pods("a", "b", is_leaving=True)).replicas) == [
        ("a", "draining"),
        ("b", "draining"),
    ]
    assert sight.update_slice(SLICE, pods("b", is_leaving=True)) == FeedChanges(removed_replicas=("a",))
    assert sight.update_slice(SLICE, pods()) == FeedChanges(removed_replicas=("b",))
    assert sight.update_service(AT, None) == FeedChanges(removed_revisions=(NAME,))
    assert not sight.update_slice(SLICE, None)
    sight.check_integrity()


def test_pod_seen_before_its_service_is_published_later() -> None:
    sight = WatchCache()
    assert not sight.update_slice(SLICE, pods("a"))
    news = sight.update_service(AT, service())
    assert shown(news.replicas) == [("a", "ready")]
    assert [row.name for row in news.revisions] == [R1]


def test_old_revision_is_published_until_new_one_is_ready() -> None:
    """Pods of both revisions serve."""
    sight = WatchCache()
    sight.update_service(AT, service())
    sight.update_slice(SLICE, pods("a"))
    assert not sight.update_service(AT, service(created=R2))
    assert shown(sight.update_slice((AT[0], "other"), pods("b")).replicas) == [("b", "ready")]
    assert [row.name for row in sight.update_service(AT, service(created=R2, ready=R2)).revisions] == [R2]
    assert sight.update_slice(SLICE, None).removed_replicas == ("a",)


def test_pod_with_two_addresses_is_one_replica() -> None:
    """It stays while one slice has it."""
    sight = WatchCache()
    sight.update_service(AT, service())
    assert shown(sight.update_slice(SLICE, pods("a")).replicas) == [("a", "ready")]
    assert not sight.update_slice((AT[0], "of-ipv6"), pods("a"))
    assert not sight.update_slice((AT[0], "of-ipv6"), None)


def test_pods_of_a_deleted_service_drain() -> None:
    """They take no new requests, and leave the feed when they are gone."""
    sight = WatchCache()
    sight.update_service(AT, service())
    sight.update_slice(SLICE, pods("a"))
    news = sight.update_service(AT, service(is_being_deleted=True))
    assert (shown(news.replicas), news.removed_revisions) == ([("a", "draining")], (NAME,))
    assert sight.update_slice(SLICE, None).removed_replicas == ("a",)
    assert not sight.update_service(AT, None)
    sight.check_integrity()


def test_failure_is_published_once() -> None:
    """It is published again if it returns. Only the newest revision's failure counts."""
    sight = WatchCache()
    sight.update_service(AT, service(ready=""))
    assert sight.update_revision((AT[0], R1), FAILED).failed == ((OF, FAILED),)
    assert not sight.update_revision((AT[0], R1), FAILED)
    assert not sight.update_service(AT, service(ready=""))
    assert not sight.update_revision((AT[0], R1), None)
    assert sight.update_revision((AT[0], R1), replace(FAILED, since="one")).failed
    assert not sight.update_revision((AT[0], "another-00001"), FAILED)


def test_failure_seen_before_its_service_is_published_later() -> None:
    """A new control plane sees objects in any order."""
    sight = WatchCache()
    assert not sight.update_revision((AT[0], R1), FAILED)
    assert sight.update_service(AT, service(ready="")).failed == ((OF, FAILED),)


def test_failure_is_not_published_while_a_replica_serves() -> None:
    """This holds for a new revision beside the old one, and for a revision with a ready pod."""
    sight = WatchCache()
    sight.update_service(AT, service(created=R2))
    assert not sight.update_revision((AT[0], R2), FAILED)
    sight.update_slice(SLICE, pods("a"))
    assert not sight.update_revision((AT[0], R1), FAILED)
    assert sight.update_slice(SLICE, pods()).failed == ((OF, FAILED),), "the last pod is gone"


def test_service_without_revision_publishes_its_failure() -> None:
    sight = WatchCache()
    assert sight.update_service(AT, service("", "", refused="RevisionFailed")).failed == (
        (OF, RevisionFailure("RevisionFailed", "")),
    )


def test_changes_add_up_to_the_current_state() -> None:
    """After any steps, the changes add up to what a new cache publishes for the same objects."""
    for seed in range(200):
        luck = random.Random(seed)
        sight = WatchCache()
        revisions: dict[Any, Any] = {}
        replicas: dict[str, ReplicaRow] = {}
        services: dict[Any, Service | None] = {}
        slices: dict[Any, SlicePods | None] = {}
        for _ in range(40):
            if luck.random() < 0.4:
                at = ("kelvin-acme", luck.choice(["one", "two"]))
                made = Service(replace(OF, model=at[1]), 8, luck.choice(["", R1, R2]), luck.choice(["", R1]))
                services[at] = luck.choice([None, made, replace(made, is_being_deleted=True)])
                news = sight.update_service(at, services[at])
            else:
                where = ("kelvin-acme", luck.choice(["x", "y", "z"]))
                names = luck.sample(["a", "b", "c"], luck.randrange(4))
                found = tuple(Pod(f"{where[1]}-{n}", n, luck.random() < 0.5, luck.random() < 0.3) for n in names)
                slices[where] = luck.choice([None, SlicePods(luck.choice(["one", "two"]), found)])
                news = sight.update_slice(where, slices[where])
            sight.check_integrity()
            revisions.update({(row.tenant, row.model, row.version): row for row in news.revisions})
            for gone in news.removed_revisions:
                del revisions[gone]
            for name in news.removed_replicas:
                del replicas[name]
            replicas.update({row.runtime_id: row for row in news.replicas})
        fresh, fresh_revisions, fresh_replicas = WatchCache(), {}, {}
        everything: list[tuple[Any, Any, Any]] = [(fresh.update_service, *each) for each in services.items()]
        everything += [(fresh.update_slice, *each) for each in slices.items()]
        luck.shuffle(everything)
        for take, place, what in everything:
            news = take(place, what)
            fresh_revisions.update({(row.tenant, row.model, row.version): row for row in news.revisions})
            fresh_replicas.update({row.runtime_id: row for row in news.replicas})
        assert (revisions, replicas) == (fresh_revisions, fresh_replicas)


def _events() -> Iterator[tuple[float, str, str, dict[str, Any]]]:
    """Yield time, kind, type and object of each recorded event. A field left out is as in the event before."""
    found = []
    for kind in ("service", "revision", "endpointslice"):
        last: dict[str, Any] = {}
        for line in (RECORDED / f"{kind}.jsonl").read_text().splitlines():
            event = json.loads(line)
            if event["type"] in ("ADDED", "MODIFIED", "DELETED"):
                obj = event["object"]
                _fill(obj, last.get(obj["metadata"]["uid"]))
                last[obj["metadata"]["uid"]] = copy.deepcopy(obj)
                found.append((event["t"], kind, event["type"], obj))
    yield from sorted(found, key=lambda each: each[0])


def _fill(obj: dict[str, Any], before: Any) -> None:
    for key, value in obj.items():
        if value == "$same":
            obj[key] = copy.deepcopy(before[key])
        elif isinstance(value, dict) and key in ("metadata", "spec"):
            _fill(value, (before or {}).get(key) or {})


@pytest.mark.skipif(not RECORDED.exists(), reason="the recordings are not in the repository")
def test_recorded_lifecycle_is_replayed() -> None:
    """The recording goes from zero to one, five, zero and one pod, to a second revision, to zero, and to deletion."""
    sight = WatchCache()
    revisions: list[str] = []
    replicas: dict[str, ReplicaRow] = {}
    at: dict[float, list[str]] = {}
    marks = [3.3, 12.3, 31.5, 43.3, 45.3, 80.0, 120.0]
    for t, kind, change, obj in _events():
        while marks and t > marks[0]:
            at[marks.pop(0)] = sorted(state for _, state in shown(tuple(replicas.values())))
        about = obj["metadata"]
        place = (about["namespace"], about["name"])
        is_gone = change == "DELETED"
        if kind == "service":
            about.setdefault("labels", {}).update({"kelvin.dev/tenant": "acme", "kelvin.dev/model": "llama"})
            about.setdefault("annotations", {})["kelvin.dev/version"] = OF.version
            news = sight.update_service(place, None if is_gone else parse_service(obj))
        elif kind == "revision":
            news = sight.update_revision(place, None if is_gone else parse_revision_failure(obj))
        elif about["labels"].get("networking.internal.knative.dev/serviceType") == "Private":
            news = sight.update_slice(place, None if is_gone else parse_slice_pods(obj))
        else:
            continue
        sight.check_integrity()
        assert not news.failed
        revisions += [row.name for row in news.revisions] + ["gone" for _ in news.removed_revisions]
        for name in news.removed_replicas:
            del replicas[name]
        replicas.update({row.runtime_id: row for row in news.replicas})
        assert {row.url.rpartition(":")[2] for row in news.replicas} <= {"8012"}
    assert revisions == ["llama-3f2a91c0b7de-00001", "llama-3f2a91c0b7de-00002", "gone"]
    assert {when: states for when, states in at.items() if when != 45.3} == {
        3.3: ["ready"], 12.3: ["ready"] * 5, 31.5: [], 43.3: ["ready"], 80.0: [],
    }  # fmt: skip
    assert at[45.3].count("ready") == 2, "of both revisions"
    assert not replicas
