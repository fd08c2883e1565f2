"""A push's objects are reused when repeated, sealed once, repaired when damaged, and never visible in part."""

import asyncio
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kelvin.blobstore.blob_store import BlobStore, Payload
from kelvin.blobstore.verifying_store import VerifyingStore
from kelvin.contracts.artifact_errors import ChunkCorrupt, ProbeFailed
from kelvin.contracts.artifacts.push_api import CommitStep, Committed
from kelvin.contracts.errors import CapacityExceeded, Conflict, Failure, NotFound, Refused, Unavailable
from kelvin.contracts.serving.control_messages import RegistrationResult, VersionRegistration
from kelvin.contracts.wire import encode
from snapshotter.intake.plan_record import PlanRecord
from snapshotter.push.publisher import Report
from tests.snapshotter.bench import Bench, MortalStore, push
from tests.snapshotter.models import Model, Weight, default_weights, weight
from tests.snapshotter.reader import assert_whole, versions_of
from tests.snapshotter.sender import TENANT, commit, open_push, send


def failure_of(bench: Bench, model: Model) -> Failure:
    with pytest.raises(Refused) as caught:
        push(bench, model)
    return caught.value.failure


def only(directory: Path) -> Path:
    found = [path for path in directory.iterdir() if not path.name.startswith(".")]
    assert len(found) == 1, found
    return found[0]


def flip(path: Path, at: int = 0) -> None:
    """Flip one bit of a file."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("failure", "open_pushes"),
    [
        pytest.param(Unavailable("the control plane"), 1, id="the control plane is unavailable"),
        pytest.param(ProbeFailed("0" * 64, "no"), 0, id="a model that can't be sealed"),
    ],
)
def test_failed_sealing_publishes_nothing(tmp_path: Path, failure: Failure, open_pushes: int) -> None:
    """Nothing becomes visible, no draft stays, the next push reuses the packs, and a hopeless push is closed."""
    bench = Bench.over(tmp_path)
    bench.jobs.failure = failure
    assert failure_of(bench, Model()) == failure
    assert versions_of(tmp_path / "store", TENANT) == []
    assert not list((tmp_path / "store" / TENANT / "drafts").iterdir())
    assert len(list((tmp_path / "staging" / TENANT).iterdir())) == 2 * open_pushes  # the push, and its plan
    bench.jobs.failure = None
    committed = push(bench, Model())
    assert (committed.created, committed.new_chunks) == (True, 0)


def test_attestation_of_another_version_is_refused(tmp_path: Path) -> None:
    """The push is refused as if there were no attestation."""
    bench = Bench.over(tmp_path)
    bench.jobs.other_version = True
    assert isinstance(failure_of(bench, Model()), ProbeFailed)
    assert versions_of(tmp_path / "store", TENANT) == []


def test_same_push_seals_nothing_again(tmp_path: Path) -> None:
    """A repeated push sends and seals nothing, and registers the version for its model."""
    bench = Bench.over(tmp_path)
    first = push(bench, Model())
    assert first.created
    second = push(bench, Model())
    assert (second.version, second.created, second.new_chunks) == (first.version, False, 0)
    other = asyncio.run(bench.push(Model().files(), Model().request("other")))
    assert (other.model, other.version, other.created) == ("other", first.version, False)
    assert len(bench.jobs.seals) == 1
    assert [each.model for each in bench.jobs.registered or []] == ["toy", "toy", "other"]


def test_seal_job_counts_distinct_bytes(tmp_path: Path) -> None:
    """The seal's job says how many distinct bytes were sent, or 0 if all of them are distinct."""
    bench = Bench.over(tmp_path)
    push(bench, Model())
    zeros = Weight("F32", (64, 1024), bytes(64 * 4096))
    push(bench, Model(shards={"model.safetensors": default_weights() | {"model.zeros.weight": zeros}}))
    plain, repeating = bench.jobs.seals
    assert (plain.total_bytes > 0, plain.distinct_bytes) == (True, 0)
    assert plain.total_bytes < repeating.distinct_bytes < repeating.total_bytes - 30 * 8192


def test_changed_tensor_adds_one_chunk(tmp_path: Path) -> None:
    """Only the changed tensor's chunk is new, and both versions are whole."""
    bench = Bench.over(tmp_path)
    weights = default_weights()
    first = push(bench, Model(shards={"model.safetensors": weights}))
    changed = weights | {"model.norm.weight": weight((8,), 12345)}
    second = push(bench, Model(shards={"model.safetensors": changed}))
    assert second.version != first.version
    assert second.new_chunks == 1
    assert_whole(tmp_path / "store", TENANT)
    assert len(versions_of(tmp_path / "store", TENANT)) == 2


def test_concurrent_pushes_converge(tmp_path: Path) -> None:
    """Three equal pushes and another one at once: each version is sealed once, and every client gets its version.

    The three are one push. A client that comes after its end starts again, and finds the version in the store.
    """
    bench = Bench.over(tmp_path)
    changed = Model(more={"generation_config.json": b'{"top_k": 3}'})

    async def pushed(model: Model) -> Committed:
        while True:
            try:
                return await bench.push(model.files(), model.request())
            except Refused as refused:
                if not isinstance(refused.failure, NotFound):
                    raise

    async def all_at_once() -> list[Committed]:
        return await asyncio.gather(*(pushed(each) for each in (Model(), Model(), Model(), changed)))

    *same, other = asyncio.run(all_at_once())
    assert len({each.version for each in same}) == 1
    assert other.version != same[0].version
    assert any(each.created for each in same)
    assert len(bench.jobs.seals) == 2
    assert_whole(tmp_path / "store", TENANT)


@dataclass
class LyingStore(MortalStore):
    """A store that flips a bit of the first `lies` packs."""

    lies: int = 0

    async def put_if_absent(self, key: str, data: Payload) -> bool:
        if "/packs/" not in key or not self.lies:
            return await super().put_if_absent(key, data)
        self.lies -= 1
        assert not isinstance(data, bytes)
        whole = bytearray(b"".join([piece async for piece in data]))
        whole[5] ^= 1
        return await store_without_verification(self).put_if_absent(key, bytes(whole))


def store_without_verification(store: MortalStore) -> BlobStore:
    assert isinstance(store.inner, VerifyingStore)
    return store.inner._inner


def lying(data: Path, lies: int) -> Bench:
    bench = Bench.over(data)
    store = LyingStore(bench.store.inner, lies=lies)
    bench.pushes._publisher._store = store
    return Bench(bench.pushes, store, bench.jobs, bench.collector)


def test_pack_read_back_wrong_is_written_again(tmp_path: Path) -> None:
    """A pack that is read back wrong is written again."""
    push(lying(tmp_path, 1), Model())
    assert_whole(tmp_path / "store", TENANT)


def test_pack_wrong_twice_is_refused(tmp_path: Path) -> None:
    """If it is wrong twice, the push is refused, and nothing refers to the damaged pack."""
    assert isinstance(failure_of(lying(tmp_path, 2), Model()), ChunkCorrupt)
    assert versions_of(tmp_path / "store", TENANT) == []
    assert not list((tmp_path / "store" / TENANT / "packs").iterdir())
    push(Bench.over(tmp_path), Model())
    assert_whole(tmp_path / "store", TENANT)


async def test_lost_staged_chunks_are_requested_again(tmp_path: Path) -> None:
    """A power cut may lose staged chunks. Packing notices it, and all lost chunks are requested again in one round."""
    bench, files, request = Bench.over(tmp_path), Model().files(), Model().request()
    first = await open_push(bench.pushes, files, request)
    await send(bench.pushes, first)
    lost = {first.missing[0], first.missing[1], first.missing[-1]}
    for digest in lost:
        (tmp_path / "staging" / TENANT / first.push_id / "chunks" / digest).write_bytes(b"")
    with pytest.raises(Refused) as caught:
        await commit(bench.pushes, first)
    assert isinstance(caught.value.failure, Conflict)
    again = await open_push(bench.pushes, files, request)
    assert (again.push_id, set(again.missing)) == (first.push_id, lost)
    await send(bench.pushes, again)
    await commit(bench.pushes, again)
    assert_whole(tmp_path / "store", TENANT)


def damage_pack(store: Path) -> None:
    """Damage all packs and delete their indexes, as a crash and a bad disk may do together."""
    for pack in (store / TENANT / "packs").iterdir():
        flip(pack)
    for index in (store / TENANT / "index").iterdir():
        index.unlink()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(damage_pack, id="damaged packs without an index"),
        pytest.param(lambda store: only(store / TENANT / "manifests").write_bytes(b"{}"), id="a damaged manifest"),
        pytest.param(lambda store: only(store / TENANT / "inputs").write_bytes(b"f" * 64), id="wrong inputs"),
        pytest.param(
            lambda store: only(only(store / TENANT / "attestations")).write_bytes(b"{}"), id="a damaged attestation"
        ),
        pytest.param(lambda store: [path.unlink() for path in (store / TENANT / "packs").iterdir()], id="lost packs"),
        pytest.param(
            lambda store: [path.write_bytes(b"[") for path in (store / TENANT / "index").iterdir()] and None,
            id="damaged indexes",
        ),
    ],
)
def test_push_rewrites_damaged_objects(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    """The next push of the same model writes damaged objects again."""
    version = push(Bench.over(tmp_path), Model()).version
    damage(tmp_path / "store")
    again = push(Bench.over(tmp_path), Model())
    assert again.version == version
    assert_whole(tmp_path / "store", TENANT)
    assert only(tmp_path / "store" / TENANT / "inputs").read_text() == version


def test_older_control_plane_understands_a_push(tmp_path: Path) -> None:
    """The registration has no `checked` field by default, because an older control plane refuses unknown fields."""
    bench = Bench.over(tmp_path)
    push(bench, Model())
    (registration,) = bench.jobs.registered or []
    assert b"checked" not in encode(registration)


def test_a_push_says_so_of_damage_that_it_does_not_mend(tmp_path: Path) -> None:
    """A push of a version that a restore found broken reads all chunks, and is refused if one is damaged."""
    bench = Bench.over(tmp_path)
    push(bench, Model())
    bench.jobs.fault = "chunk_corrupt"
    pack, *others = sorted((tmp_path / "store" / TENANT / "packs").iterdir())
    assert others, "the version has several packs"
    whole = pack.read_bytes()
    flip(pack)
    for lost in (None, others[0]):
        if lost is not None:
            lost.unlink()
        refused = failure_of(bench, Model())
        assert isinstance(refused, Conflict)
        assert "chunk_corrupt" in refused.rule
        assert "kelvin fsck" in refused.rule
    pack.write_bytes(whole)
    push(bench, Model())
    assert [each.checked for each in bench.jobs.registered or []] == [False, False, False, False, True]


def test_next_push_registers_a_repaired_version(tmp_path: Path) -> None:
    """The first push wrote the missing chunks and was cut. The next push writes nothing and registers the version."""
    bench = Bench.over(tmp_path)
    version = push(bench, Model()).version
    for path in (tmp_path / "store" / TENANT / "packs").iterdir():
        path.unlink()
    bench.jobs.fault = "chunk_missing"
    register = bench.jobs.register

    async def fail(registration: VersionRegistration) -> RegistrationResult | None:
        raise Refused(Unavailable("the control plane"))

    bench.jobs.register = fail  # type: ignore[method-assign]
    assert isinstance(failure_of(bench, Model()), Unavailable)
    bench.jobs.register = register  # type: ignore[method-assign]
    assert push(bench, Model()).version == version


@pytest.mark.parametrize("fault", ["probe_failed", "attestation_invalid"])
def test_good_chunks_say_nothing_of_known_answers(tmp_path: Path, fault: str) -> None:
    """Only a new seal lets in a version whose known answers failed: it may have failed under another model."""
    bench = Bench.over(tmp_path)
    push(bench, Model())
    bench.jobs.fault = fault
    for _ in range(2):
        refused = failure_of(bench, Model())
        assert isinstance(refused, Conflict)
        assert "send one request to MODEL@" in refused.rule
        only(tmp_path / "store" / TENANT / "manifests").unlink()  # a push that writes it again keeps the seal
    only(only(tmp_path / "store" / TENANT / "attestations")).unlink()
    push(bench, Model())


def test_commit_steps_are_reported(tmp_path: Path) -> None:
    """A waiting client gets each step of the commit."""
    bench = Bench.over(tmp_path)
    steps: list[CommitStep] = []
    honest = bench.pushes._publisher.publish

    async def reporting_publish(record: PlanRecord, digests: tuple[str, ...], report: Report) -> Committed:
        def both(step: CommitStep) -> None:
            steps.append(step)
            report(step)

        return await honest(record, digests, both)

    bench.pushes._publisher.publish = reporting_publish  # type: ignore[method-assign]
    push(bench, Model())
    assert list(dict.fromkeys(steps)) == [
        CommitStep.PACKING, CommitStep.VERIFYING, CommitStep.SEALING, CommitStep.PUBLISHING,
    ]  # fmt: skip


def test_push_to_a_full_store_goes_on_once_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The push is refused for want of space, nothing becomes visible, and no chunk is sent again."""
    bench = Bench.over(tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        assert failure_of(bench, Model()) == CapacityExceeded("bytes in the object store", 1, 0)
    assert versions_of(tmp_path / "store", TENANT) == []
    staged = {path.name for path in (tmp_path / "staging" / TENANT).glob("*/chunks/*")}
    assert staged
    committed = push(bench, Model())
    assert (committed.created, committed.restored) == (True, False)
    assert_whole(tmp_path / "store", TENANT)
