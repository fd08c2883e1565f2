"""Manifests are verified from any source, drafts can be leased, and a lease has all attestations or is refused."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from kelvin.blobstore.file_store import FileStore
from kelvin.contracts.artifacts.manifest import PAGE_BYTES, Chunk, encode_manifest, version_of
from kelvin.contracts.errors import Refused
from kelvin.contracts.wire import encode
from tests.weightcache.kit import (
    TENANT,
    RunningAgent,
    Version,
    attest,
    attestation_of,
    make_version,
    make_version_of,
    run_agent,
    settings_of,
)

VERSION = make_version(seed=1)


def test_draft_is_leased_like_a_version(tmp_path: Path) -> None:
    """A draft is leased like a version, before and after it is published."""
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION, draft=True)
        with agent.acquire(VERSION) as lease:
            assert lease.view(0, lease.total_bytes) == VERSION.linear
            assert lease.attestations == ()
        agent.publish(VERSION)
        asyncio.run(agent.store.delete(f"{TENANT}/drafts/{VERSION.id}"))
        agent.acquire(VERSION).close()


def test_attestations_are_looked_for_until_found(tmp_path: Path) -> None:
    """If there are none, the next lease looks again. Once found, they are kept."""
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        with agent.acquire(VERSION) as lease:
            assert lease.attestations == ()
        for mark in ("0" * 16, "f" * 16):
            asyncio.run(attest(agent.store, VERSION.id, mark=mark))
        for _ in range(2):
            with agent.acquire(VERSION) as lease:
                assert lease.attestations == (attestation_of(VERSION.id),) * 2
        assert agent.state().leases_hot == 1
        assert agent.state().chunk_reads == {"store": len(VERSION.digests)}


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        pytest.param(b"{}", "does not decode", id="not an attestation"),
        pytest.param(encode(attestation_of("0" * 64)), "speaks of version 000", id="another version's"),
    ],
)
def test_bad_attestation_refuses_the_lease(tmp_path: Path, raw: bytes, reason: str) -> None:
    """An invalid attestation refuses the lease: without it, the known answers would go unchecked."""
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        asyncio.run(agent.store.put_if_absent(f"{TENANT}/attestations/{VERSION.id}/seal-{'0' * 16}", raw))
        with pytest.raises(Refused, match=reason):
            agent.acquire(VERSION)


def manifest_file(agent: RunningAgent, version: Version) -> Path:
    return agent.settings.cache / TENANT / "manifests" / version.id


def test_damaged_manifest_on_nvme_is_healed(tmp_path: Path) -> None:
    """A manifest that changed on NVMe is set aside, counted, and replaced by the store's, while the lease waits."""
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
    _keep(tmp_path, VERSION.raw.replace(b"F32", b"I32"))
    with run_agent(settings_of(tmp_path)) as agent:
        with agent.acquire(VERSION) as lease:
            assert lease.view(0, lease.total_bytes) == VERSION.linear
        assert manifest_file(agent, VERSION).read_bytes() == VERSION.raw
        state = agent.state()
        assert (state.manifest_faults, state.healed_manifests) == ({"nvme": {"digest": 1}}, {"store": 1})


def _keep(data: Path, raw: bytes) -> None:
    path = settings_of(data).cache / TENANT / "manifests" / VERSION.id
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)


def test_unreadable_manifest_on_nvme_is_replaced(tmp_path: Path) -> None:
    """A directory in place of a manifest is set aside like a wrong manifest."""
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        manifest_file(agent, VERSION).mkdir(parents=True)
        agent.acquire(VERSION).close()
        assert manifest_file(agent, VERSION).read_bytes() == VERSION.raw
        assert agent.state().manifest_faults == {"nvme": {"unreadable": 1}}


class OnceWrong(FileStore):
    """A store whose first read of each kind of object in `kinds` returns wrong bytes."""

    def __init__(self, root: Path, *kinds: str) -> None:
        super().__init__(root)
        self._kinds = set(kinds)

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        raw = await super().read(key, offset, length)
        if (kind := key.split("/")[1]) in self._kinds:
            self._kinds.remove(kind)
            return raw[:-1] + b"?"
        return raw


def test_bad_read_of_a_document_is_retried(tmp_path: Path) -> None:
    """A manifest or attestation that is read wrong once from the store is read again before it is refused."""
    with run_agent(settings_of(tmp_path), OnceWrong(tmp_path / "store", "manifests", "attestations")) as agent:
        agent.publish(VERSION)
        asyncio.run(attest(agent.store, VERSION.id))
        with agent.acquire(VERSION) as lease:
            assert lease.attestations == (attestation_of(VERSION.id),)
        state = agent.state()
        assert (state.manifest_faults, state.healed_manifests) == ({"store": {"digest": 1}}, {"store": 1})


def test_damaged_manifest_in_the_store_is_refused(tmp_path: Path) -> None:
    """A manifest that does not match its version's digest is refused, and not kept on NVMe."""
    with run_agent(settings_of(tmp_path)) as agent:
        asyncio.run(agent.store.put_if_absent(f"{TENANT}/manifests/{VERSION.id}", VERSION.raw + b" "))
        with pytest.raises(Refused, match=f"manifest of version {VERSION.id}: its bytes do not match"):
            agent.acquire(VERSION)
        assert not manifest_file(agent, VERSION).exists()
        state = agent.state()
        assert (state.manifest_faults, state.healed_manifests) == ({"store": {"digest": 2}}, {})


def test_manifest_with_two_lengths_of_a_chunk_is_refused(tmp_path: Path) -> None:
    """The lease is refused although the manifest's digest is right."""
    good = make_version_of([b"a" * 2 * PAGE_BYTES], 2 * PAGE_BYTES)
    (chunk,) = good.manifest.chunks
    chunks = (chunk, Chunk(chunk.digest, PAGE_BYTES))
    raw = encode_manifest(msgspec.structs.replace(good.manifest, chunks=chunks))
    with run_agent(settings_of(tmp_path)) as agent:
        asyncio.run(agent.store.put_if_absent(f"{TENANT}/manifests/{version_of(raw)}", raw))
        with pytest.raises(Refused, match="has two lengths"):
            agent.acquire(version_of(raw))
