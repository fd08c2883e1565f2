"""A tensorizer file is stored byte for byte with its version's chunks. One unlike its description is refused."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3
from msgspec import structs

from kelvin.blobstore.blob_store import BlobUnavailable
from kelvin.contracts.artifact_errors import ArtifactRejected, StorageQuotaExceeded
from kelvin.contracts.artifacts.push_api import Committed, PlanRequest
from kelvin.contracts.errors import Conflict, Refused
from tests.snapshotter.bench import Bench, Killed, push
from tests.snapshotter.maintenance.test_fsck import check
from tests.snapshotter.models import Model, default_weights, weight
from tests.snapshotter.reader import assert_whole, chunks_of, spans_of, versions_of
from tests.snapshotter.sender import TENANT, Opened, commit, open_push, send
from tests.snapshotter.tensors_files import TensorsFile, make_kept_push

WEIGHTS = default_weights() | {"model.large": weight((5000,), 7, "BF16")}
MODEL = Model(shards={"model.safetensors": WEIGHTS})
FILE = TensorsFile(dict(reversed(WEIGHTS.items())))
FILES, REQUEST = make_kept_push(MODEL, FILE)
RAW = FILES["toy.tensors"]
NAME = f"{blake3(RAW).hexdigest()}.tensors"


def push_kept(bench: Bench, files: dict[str, bytes] = FILES, request: PlanRequest = REQUEST) -> Committed:
    return asyncio.run(bench.push(files, request))


def packs(data: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (data / "store" / TENANT / "packs").iterdir()}


def test_kept_file_is_stored_unchanged(tmp_path: Path) -> None:
    """The store has the file, and packs only the small files' chunks beside it. The version equals that of the same
    tensors in safetensors, whose push then sends nothing.
    """
    committed = push_kept(Bench.over(tmp_path))
    found = packs(tmp_path)
    assert found.pop(NAME) == RAW
    (loose,) = found
    assert len(spans_of(tmp_path / "store" / TENANT / "index" / loose)) == 2
    assert_whole(tmp_path / "store", TENANT)
    assert check(tmp_path)[0] == []
    again = push(Bench.over(tmp_path), MODEL)
    assert (again.version, again.created, again.new_chunks) == (committed.version, False, 0)
    twice = push_kept(Bench.over(tmp_path))
    assert (twice.version, twice.new_chunks) == (committed.version, 0)
    assert set(packs(tmp_path)) == {NAME, loose}


def test_kept_file_is_stored_beside_packs(tmp_path: Path) -> None:
    """If the version is in packs already, the file is stored all the same, because the client asked for it."""
    version = push(Bench.over(tmp_path), MODEL).version
    committed = push_kept(Bench.over(tmp_path))
    assert (committed.version, committed.created, committed.new_chunks) == (version, False, 0)
    assert packs(tmp_path)[NAME] == RAW
    assert check(tmp_path)[0] == []


def test_repeated_tensors_are_kept(tmp_path: Path) -> None:
    """Equal tensors are one chunk in two places of the file, and the whole file is stored."""
    twins = {f"model.twin.{n}": weight((2048,), 5) for n in range(3)}
    files, request = make_kept_push(Model(shards={"model.safetensors": WEIGHTS | twins}), TensorsFile(WEIGHTS | twins))
    push_kept(Bench.over(tmp_path), files, request)
    assert files["toy.tensors"] in packs(tmp_path).values()
    assert_whole(tmp_path / "store", TENANT)
    assert check(tmp_path)[0] == []


def test_another_chunk_size_reuses_the_kept_file(tmp_path: Path) -> None:
    """With another chunk size, the stored file stays, new chunks are packed, and both versions are whole."""
    first = push_kept(Bench.over(tmp_path))
    bench = Bench.over(tmp_path)
    bench.pushes._limits = replace(bench.pushes._limits, chunk_bytes=4096)
    second = push_kept(bench)
    assert first.version != second.version
    assert second.new_chunks > 0
    assert [name for name in packs(tmp_path) if name.endswith(".tensors")] == [NAME]
    assert_whole(tmp_path / "store", TENANT)
    assert check(tmp_path)[0] == []


def test_another_layout_keeps_an_index_that_could_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed read of its index, the index is not replaced: the first version finds its chunks only by it."""
    push_kept(Bench.over(tmp_path))
    bench = Bench.over(tmp_path)
    bench.pushes._limits = replace(bench.pushes._limits, chunk_bytes=4096)
    read, left = bench.store.read, 2  # once when the client asks for missing chunks, once when the commit begins

    async def fail_first(key: str, offset: int = 0, length: int | None = None) -> bytes:
        nonlocal left
        if key == f"{TENANT}/index/{NAME}" and left:
            left -= 1
            raise BlobUnavailable("it does not answer")
        return await read(key, offset, length)

    monkeypatch.setattr(bench.store, "read", fail_first)
    with suppress(Refused):
        push_kept(bench)
    assert left == 0
    assert_whole(tmp_path / "store", TENANT)
    push_kept(bench)
    assert len(versions_of(tmp_path / "store", TENANT)) == 2
    assert_whole(tmp_path / "store", TENANT)
    assert check(tmp_path)[0] == []


def expect_refusal(act: object) -> Refused:
    with pytest.raises(Refused) as caught:
        act()  # type: ignore[operator]
    return caught.value


def test_file_with_another_digest_is_refused(tmp_path: Path) -> None:
    """If the chunks and the rest do not make the file's digest, the push is refused and closed."""
    whole = REQUEST.weights[0].whole
    assert whole is not None
    for wrong in (structs.replace(whole, digest="0" * 64), structs.replace(whole, between=whole.between[:-1] + b"x")):
        weights = (structs.replace(REQUEST.weights[0], whole=wrong),)
        refusal = expect_refusal(lambda weights=weights: push_kept(
            Bench.over(tmp_path), FILES, structs.replace(REQUEST, weights=weights)
        ))  # fmt: skip
        assert isinstance(refusal.failure, ArtifactRejected)
        assert "do not match the file" in refusal.failure.reason
        assert list((tmp_path / "staging" / TENANT).iterdir()) == []
    assert versions_of(tmp_path / "store", TENANT) == []
    assert list((tmp_path / "store" / TENANT).glob("packs/*.tensors")) == []


def test_false_claim_about_a_stored_file_is_refused(tmp_path: Path) -> None:
    """A push that names a stored file without an index, but sends other chunks, is refused and writes no index."""
    push_kept(Bench.over(tmp_path))
    for path in (tmp_path / "store" / TENANT / "index").iterdir():
        path.unlink()
    other = WEIGHTS | {"model.large": weight((5000,), 8, "BF16")}
    tensors_file = TensorsFile(dict(reversed(other.items())))
    files, request = make_kept_push(Model(shards={"model.safetensors": other}), tensors_file)
    whole = request.weights[0].whole
    assert whole is not None
    wrong_digest = structs.replace(whole, digest=NAME.removesuffix(".tensors"))
    request = structs.replace(request, weights=(structs.replace(request.weights[0], whole=wrong_digest),))
    refusal = expect_refusal(lambda: push_kept(Bench.over(tmp_path), files, request))
    assert isinstance(refusal.failure, ArtifactRejected)
    assert not (tmp_path / "store" / TENANT / "index" / NAME).exists()
    push_kept(Bench.over(tmp_path))
    assert_whole(tmp_path / "store", TENANT)


def test_damaged_at_rest(tmp_path: Path) -> None:
    """A damaged file without a valid index is stored again, and so is a damaged index."""
    version = push_kept(Bench.over(tmp_path)).version
    store = tmp_path / "store" / TENANT
    for damage in (lambda: (store / "packs" / NAME).write_bytes(RAW[:-1] + b"x"), lambda: None):
        damage()
        (store / "index" / NAME).write_bytes(b"{")
        assert push_kept(Bench.over(tmp_path)).version == version
        assert packs(tmp_path)[NAME] == RAW
        assert_whole(tmp_path / "store", TENANT)
        assert check(tmp_path)[0] == []


async def cut_off(bench: Bench) -> Opened:
    """Open a push and send everything, without a commit."""
    push = await open_push(bench.pushes, FILES, REQUEST)
    await send(bench.pushes, push)
    return push


async def test_lost_staged_bytes_are_sent_again(tmp_path: Path) -> None:
    """A lost chunk is requested again. A lost rest of the file comes again with the plan."""
    bench = Bench.over(tmp_path)
    first = await cut_off(bench)
    whole = REQUEST.weights[0].whole
    assert whole is not None
    rest = blake3(REQUEST.weights[0].header + whole.between).hexdigest()
    for lost in (first.missing[-1], rest):
        for path in (tmp_path / "staging" / TENANT).glob(f"*/chunks/{lost}"):
            path.write_bytes(b"")
        with pytest.raises(Refused) as caught:
            await commit(bench.pushes, first)
        assert isinstance(caught.value.failure, Conflict)
        again = await cut_off(bench)
        assert again.push_id == first.push_id
        assert again.missing == ((lost,) if lost in first.missing else ())
    await commit(bench.pushes, first)
    assert packs(tmp_path)[NAME] == RAW


async def test_kept_file_counts_once_towards_the_quota(tmp_path: Path) -> None:
    """A kept file counts with all its bytes, once, whether stored or promised, and also beside packs."""
    room = len(RAW) + 20_000

    async def is_too_much(bench: Bench, files: dict[str, bytes], request: PlanRequest) -> bool:
        try:
            await open_push(bench.pushes, files, request)
        except Refused as refused:
            return isinstance(refused.failure, StorageQuotaExceeded)
        return False

    bench = Bench.over(tmp_path, tenant_store_bytes=room)
    await cut_off(bench)
    other = Model(shards={"model.safetensors": {**WEIGHTS, "model.large": weight((11_000,), 8, "BF16")}})
    assert await is_too_much(bench, other.files(), other.request())  # the file is promised
    await bench.push(FILES, REQUEST)
    assert await is_too_much(bench, other.files(), other.request())  # the file is stored
    assert not await is_too_much(bench, MODEL.files(), MODEL.request())  # its chunks are stored
    small = Bench.over(tmp_path / "small", tenant_store_bytes=62_000)  # the packs, and half of the file
    await small.push(MODEL.files(), MODEL.request())
    assert await is_too_much(small, FILES, REQUEST)


@pytest.mark.deep
@pytest.mark.parametrize("before", [pytest.param(True, id="before the call"), pytest.param(False, id="after it")])
def test_push_stopped_at_any_call_can_be_repeated(tmp_path: Path, before: bool) -> None:
    """Wherever the push stops, every visible version is whole, and repeating the push completes it."""
    at = 0
    while True:
        at += 1
        data = tmp_path / str(at)
        try:
            push_kept(Bench.over(data, dies_at=at, before=before))
        except Killed:
            assert_whole(data / "store", TENANT)
            push_kept(Bench.over(data))
            assert packs(data)[NAME] == RAW
            assert_whole(data / "store", TENANT)
            continue
        break
    assert at > 10
    assert len(chunks_of(data / "store", TENANT)) > 1
