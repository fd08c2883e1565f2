"""A tenant's packs never exceed its quota, and a push that is too large is refused before it sends a chunk."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from kelvin.blobstore.blob_store import BlobStore, Payload
from kelvin.cli.artifacts.progress import Progress
from kelvin.cli.artifacts.push import push_directory
from kelvin.contracts.artifact_errors import StorageQuotaExceeded
from kelvin.contracts.artifacts.attestation import MAX_BUNDLE_BYTES, ORIGIN_TYPE
from kelvin.contracts.artifacts.push_api import Committed, MissingRequest, Plan
from kelvin.contracts.errors import Refused, Unavailable
from kelvin.contracts.serving.control_messages import TenantLimits
from kelvin.contracts.traffic_errors import Overloaded
from snapshotter.intake.policy.quota import PromisedBytes
from snapshotter.push.commits import digest_of_list
from snapshotter.push.staging import IDLE_S, Staging
from tests.snapshotter.bench import Bench
from tests.snapshotter.house import House, make_plan, open_house, post, settings_for
from tests.snapshotter.models import Model, default_weights
from tests.snapshotter.sender import TENANT, digests_of, open_push, send
from tests.snapshotter.store.test_attestation_store import PUBLISHER, attest, open_model_push, statement


def models(count: int) -> list[Model]:
    """Return models of equal size that have no chunk of weights in common."""
    return [Model(shards={"model.safetensors": default_weights(seed * 1000)}) for seed in range(count)]


def stored_bytes(data: Path) -> int:
    """Return the size of the tenant's packs on disk."""
    return sum(path.stat().st_size for path in (data / "store" / TENANT / "packs").glob("*"))


def bytes_of_one(tmp_path: Path) -> int:
    """Return the stored size of one model. Twice that is enough for two models, and not for three."""
    bench = Bench.over(tmp_path / "probe")
    asyncio.run(bench.push(models(1)[0].files(), models(1)[0].request()))
    return stored_bytes(tmp_path / "probe")


async def push_all(bench: Bench, pushed: Sequence[Model]) -> list[Refused | None]:
    """Push all models at once. Return their refusals."""

    async def one(model: Model) -> Refused | None:
        try:
            await bench.push(model.files(), model.request())
        except Refused as refused:
            return refused
        return None

    return await asyncio.gather(*(one(model) for model in pushed))


def overshoots(data: Path, bench: Bench, limit: int) -> bool:
    """Return whether four concurrent pushes, of which two fit, exceed the limit."""
    refusals = asyncio.run(push_all(bench, models(4)))
    for refused in refusals:
        assert refused is None or isinstance(refused.failure, StorageQuotaExceeded)
    assert None in refusals
    return stored_bytes(data) > limit


def test_together_they_stay_below(tmp_path: Path) -> None:
    """Of concurrent pushes, those that fit are stored, and the others are refused."""
    limit = 2 * bytes_of_one(tmp_path)
    bench = Bench.over(tmp_path / "data", tenant_store_bytes=limit)
    assert not overshoots(tmp_path / "data", bench, limit)
    assert stored_bytes(tmp_path / "data") > limit // 3


def test_control_without_promises_pushes_exceed_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: judged only by stored bytes, each push fits, and together they exceed the limit."""

    def no_promises(self: Staging, tenant: str, but: str, now_s: float) -> list[PromisedBytes]:
        return []

    monkeypatch.setattr(Staging, "open_promises", no_promises)
    limit = 2 * bytes_of_one(tmp_path)
    bench = Bench.over(tmp_path / "data", tenant_store_bytes=limit)
    assert overshoots(tmp_path / "data", bench, limit)


def ask_missing(client: httpx.Client, model: Model) -> tuple[Plan, httpx.Response]:
    """Plan a push and ask for its missing chunks."""
    plan = make_plan(client, model)
    return plan, post(client, f"/plans/{plan.plan_id}/missing", MissingRequest(digests=digests_of(plan, model.files())))


def read_refusal(answer: httpx.Response) -> str:
    assert answer.status_code == 507, answer.text
    assert answer.json()["code"] == "storage_quota_exceeded"
    detail: str = answer.json()["detail"]
    return detail


def list_staged(house: House) -> list[str]:
    return [path.name for path in (house.data / "staging" / TENANT).glob("*/declared.json")]


def test_refused_before_any_chunk(tmp_path: Path) -> None:
    """The refusal names used bytes and limit, and no chunk can be sent. Repeating a stored push adds nothing."""
    first, second, third = models(3)
    size = bytes_of_one(tmp_path)
    with (
        open_house(settings_for(tmp_path / "data", tenant_store_bytes=2 * size)) as house,
        house.client() as client,
    ):
        for number, model in enumerate((first, second)):
            push_directory(model.write(tmp_path / str(number)), "toy", client, Progress())
        used = stored_bytes(house.data)
        plan, answer = ask_missing(client, third)
        assert f"{used} bytes are stored or promised to open pushes, " in read_refusal(answer)
        assert f"the limit is {2 * size}" in read_refusal(answer)
        assert list_staged(house) == []
        digest = digests_of(plan, third.files())[-1]
        put = client.put(f"/push/v1/plans/{plan.plan_id}/chunks/{digest}", content=b"")
        assert put.status_code == 409
        with pytest.raises(Refused) as caught:
            push_directory(third.write(tmp_path / "third"), "toy", client, Progress())
        assert caught.value.failure.code == "storage_quota_exceeded"
        again = push_directory(tmp_path / "0", "toy", client, Progress())
        assert (again.sent_bytes, again.committed.created) == (0, False)
        with house.client("umbrella") as other:
            assert ask_missing(other, third)[1].status_code == 200  # each tenant has its own quota


def test_a_tenants_own_limit(tmp_path: Path) -> None:
    """A tenant's limit replaces the installation's from the next push. Without the control plane, pushes are
    refused.
    """
    (model,) = models(1)
    size = bytes_of_one(tmp_path)
    settings = settings_for(tmp_path / "data", tenant_store_bytes=size // 2)
    with open_house(settings) as house, house.client() as client:
        read_refusal(ask_missing(client, model)[1])
        house.control.limits[TENANT] = TenantLimits(store_bytes=2 * size)
        assert ask_missing(client, model)[1].status_code == 200
        house.control.limits[TENANT] = TenantLimits(store_bytes=10)
        assert "the limit is 10" in read_refusal(ask_missing(client, model)[1])
        house.control.failures["limits"] = [Unavailable("the control plane")]
        assert ask_missing(client, model)[1].status_code == 503


def test_restarted_service_counts_promises(tmp_path: Path) -> None:
    """A new process counts stored and promised bytes from its first request."""
    first, second, third = models(3)
    size = bytes_of_one(tmp_path)
    settings = settings_for(tmp_path / "data", tenant_store_bytes=2 * size)
    with open_house(settings) as house, house.client() as client:
        push_directory(first.write(tmp_path / "first"), "toy", client, Progress())
        assert ask_missing(client, second)[1].status_code == 200
    with open_house(settings) as house, house.client() as client:
        read_refusal(ask_missing(client, third)[1])
        assert ask_missing(client, second)[1].status_code == 200  # the same push has its promise already


def test_idle_push_makes_room(tmp_path: Path) -> None:
    """An idle push loses its promise when another push needs the room, and not before."""
    first, second = models(2)
    settings = settings_for(tmp_path / "data", tenant_store_bytes=3 * bytes_of_one(tmp_path) // 2)
    with open_house(settings) as house, house.client() as client:
        assert ask_missing(client, first)[1].status_code == 200
        read_refusal(ask_missing(client, second)[1])
        (push,) = (house.data / "staging" / TENANT).glob("*/declared.json")
        idle(push.parent)
        assert ask_missing(client, second)[1].status_code == 200
        assert len(list_staged(house)) == 1
        read_refusal(ask_missing(client, first)[1])


class InterruptingStore:
    """A store that calls `act` once while attestations are listed, and holds writes of packs until `go`."""

    def __init__(self, inner: BlobStore, act: Callable[[], Awaitable[None]]) -> None:
        self.inner = inner
        self.writing, self.go = asyncio.Event(), asyncio.Event()
        self._acts = [act]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def put_if_absent(self, key: str, data: Payload) -> bool:
        if "/packs/" in key:
            self.writing.set()
            await self.go.wait()
        return await self.inner.put_if_absent(key, data)

    async def list(self, prefix: str) -> AsyncIterator[str]:
        if prefix == f"{TENANT}/attestations/" and self._acts:
            await self._acts.pop()()
        async for key in self.inner.list(prefix):
            yield key


async def test_idle_push_that_commits_keeps_its_chunks(tmp_path: Path) -> None:
    """An idle push was chosen to make room for another one, but its commit begins before it is dropped. It stays."""
    first, second = models(2)
    limit = 3 * await asyncio.to_thread(bytes_of_one, tmp_path) // 2
    bench = Bench.over(tmp_path / "data", tenant_store_bytes=limit)
    push = await open_push(bench.pushes, first.files(), first.request())
    await send(bench.pushes, push)
    idle(tmp_path / "data" / "staging" / TENANT / push.push_id)
    commits: list[asyncio.Task[object]] = []

    async def commit() -> None:
        commits.append(asyncio.create_task(bench.pushes.commit(TENANT, push.push_id, digest_of_list(push.digests))))
        await store.writing.wait()

    bench.store.inner = store = InterruptingStore(bench.store.inner, commit)
    with pytest.raises(Refused) as refused:
        await open_push(bench.pushes, second.files(), second.request())
    assert isinstance(refused.value.failure, Overloaded)
    store.go.set()
    assert isinstance(await commits[0], Committed)


def test_statements_count_in_the_quota(tmp_path: Path) -> None:
    """Statements and bundles count in the quota, also without a commit. Stored ones may be repeated."""
    limit, (first, second, third) = 10_000_000, models(3)
    settings = settings_for(tmp_path / "data", tenant_store_bytes=limit)

    def say(client: httpx.Client, model: Model, numbers: Sequence[int]) -> list[httpx.Response]:
        push_id, version = open_model_push(client, model)
        bundles = [bytes([number]) * MAX_BUNDLE_BYTES for number in numbers]
        return [
            attest(client, push_id, PUBLISHER.attest(version, ORIGIN_TYPE, statement(each)), each) for each in bundles
        ]

    def kept(house: House) -> int:
        return sum(path.stat().st_size for path in house.store.rglob("attestations/*/*"))

    with open_house(settings) as house, house.client() as client:
        answers = [*say(client, first, range(6)), *say(client, second, range(6))]
        assert [answer.status_code for answer in answers] == [204] * 9 + [507] * 3
        assert f"the limit is {limit}" in read_refusal(answers[-1])
        assert kept(house) <= limit
        assert [answer.status_code for answer in say(client, first, range(6))] == [204] * 6
        house.control.limits[TENANT] = TenantLimits(store_bytes=kept(house))
        read_refusal(ask_missing(client, third)[1])
    with open_house(settings) as house, house.client() as client:
        read_refusal(say(client, third, [0])[0])


def idle(push: Path) -> None:
    """Make the push look idle for long enough."""
    at = push.stat().st_mtime - IDLE_S - 1
    os.utime(push, (at, at))
