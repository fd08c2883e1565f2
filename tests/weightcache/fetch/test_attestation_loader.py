"""Policy decides about versions without a trusted signature. Kept attestations replace an unavailable store's."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from kelvin.blobstore.blob_store import BlobStore, BlobUnavailable
from kelvin.blobstore.file_store import FileStore
from kelvin.contracts.artifacts.attestation import ORIGIN_TYPE, SEAL_TYPE, Claims, OriginPredicate, SealRecord
from kelvin.contracts.artifacts.object_keys import attestation_key, origin_key
from kelvin.contracts.errors import Refused
from kelvin.contracts.setting_parser import BadSetting
from kelvin.contracts.wire import encode
from kelvin.crypto.signing_keys import Signer, ensure_signer
from kelvin.crypto.trust_roots import PUBLIC_FILE, SECRET_FILE
from tests.weightcache.kit import (
    TENANT,
    TIMEOUT_S,
    RunningAgent,
    attestation_of,
    make_version,
    publish,
    run_agent,
    settings_of,
)
from weightcache.app.cache import open_cache
from weightcache.app.settings import CacheSettings
from weightcache.fetch.trust_policy import VerificationPolicy, find_distrust, usable_seals

VERSION, OTHER = make_version(seed=1), make_version(seed=2)
PRIVATE = Ed25519PrivateKey.generate()
ROOT, STRANGER = Signer(PRIVATE), Signer(Ed25519PrivateKey.generate())
CLAIMED = OriginPredicate(signed_at_s=1, claims=Claims(licence="MIT"))
SEALED = attestation_of(VERSION.id)


@pytest.mark.parametrize(
    ("signers", "reason"),
    [
        pytest.param([], "it has no valid signature", id="no signature"),
        pytest.param([STRANGER.key_id], "which is no trust root here", id="an unknown key's"),
        pytest.param([STRANGER.key_id, ROOT.key_id], None, id="a trust root's among others"),
    ],
)
def test_one_trusted_signature_is_enough(signers: list[str], reason: str | None) -> None:
    found = find_distrust(signers, lambda key_id: key_id == ROOT.key_id)
    assert found is reason if reason is None else reason in (found or "")


@pytest.mark.parametrize(
    ("policy", "key_id", "usable"),
    [
        pytest.param(VerificationPolicy.REQUIRE, ROOT.key_id, True, id="signed, if required"),
        pytest.param(VerificationPolicy.REQUIRE, STRANGER.key_id, False, id="an unknown key's, if required"),
        pytest.param(VerificationPolicy.REQUIRE, None, False, id="not signed, if required"),
        pytest.param(VerificationPolicy.WARN, None, True, id="not signed, if only warned about"),
        pytest.param(VerificationPolicy.OFF, STRANGER.key_id, True, id="an unknown key's, if not checked"),
    ],
)
def test_usable_seals(policy: VerificationPolicy, key_id: str | None, usable: bool) -> None:
    """If signatures are required, seals need one, too. Without one, a replica records its own known answers."""
    found = usable_seals(policy, [SealRecord(SEALED, key_id)], lambda name: "root" if name == ROOT.key_id else None)
    assert found == ((SEALED,) if usable else ())


def settings(data: Path, policy: VerificationPolicy) -> CacheSettings:
    """Return settings with one trust root."""
    (data / "trust").mkdir(parents=True, exist_ok=True)
    pem = PRIVATE.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (data / "trust" / "release.pem").write_bytes(pem)
    return replace(settings_of(data), verify=policy)


def put(store: BlobStore, key: str, raw: bytes) -> None:
    async def again() -> None:
        await store.delete(key)
        await store.put_if_absent(key, raw)

    asyncio.run(again())


def seal(store: BlobStore, data: Path, version: str = VERSION.id) -> None:
    """Seal the version with the installation's own key."""
    own = ensure_signer(data / SECRET_FILE, data / PUBLIC_FILE)
    found = attestation_of(version)
    put(store, attestation_key(TENANT, version, found.fingerprint), own.attest(version, SEAL_TYPE, found))


def sign(store: BlobStore, raw: bytes, version: str = VERSION.id) -> None:
    put(store, origin_key(TENANT, version, raw), raw)


def refusal(agent: RunningAgent) -> str:
    with pytest.raises(Refused) as caught:
        agent.acquire(VERSION)
    return f"{caught.value.failure.code}: {caught.value.failure.message}"


BY_ROOT = ROOT.attest(VERSION.id, ORIGIN_TYPE, CLAIMED)
BY_STRANGER = STRANGER.attest(VERSION.id, ORIGIN_TYPE, CLAIMED)
FLIPPED = BY_ROOT[:40] + bytes([BY_ROOT[40] ^ 1]) + BY_ROOT[41:]


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        pytest.param(None, "it has no valid signature", id="nothing is signed"),
        pytest.param(
            STRANGER.attest(VERSION.id, ORIGIN_TYPE, CLAIMED), "which is no trust root here", id="an unknown key"
        ),
        pytest.param(
            ROOT.attest(OTHER.id, ORIGIN_TYPE, CLAIMED), "it has no valid signature", id="another version's statement"
        ),
        pytest.param(FLIPPED, "it has no valid signature", id="a flipped byte"),
        pytest.param(
            STRANGER.attest(VERSION.id, ORIGIN_TYPE, CLAIMED).replace(STRANGER.key_id.encode(), ROOT.key_id.encode()),
            "it has no valid signature",
            id="a forged signature",
        ),
    ],
)
def test_unsigned_version_is_not_started(tmp_path: Path, raw: bytes | None, why: str) -> None:
    """With `require` it is refused by name before a chunk is read. With `warn` it starts and is counted."""
    with run_agent(settings(tmp_path, VerificationPolicy.REQUIRE)) as agent:
        agent.publish(VERSION)
        seal(agent.store, tmp_path)
        if raw is not None:
            sign(agent.store, raw)
        failure_text = refusal(agent)
        assert failure_text.startswith(f"version_unverified: version {VERSION.id} is not started: ")
        assert why in failure_text
        state = agent.state()
        assert (state.unverified_versions, state.chunk_reads) == (1, {})
        assert state.leases_refused == {"version_unverified": 1}
    with run_agent(settings(tmp_path, VerificationPolicy.WARN)) as agent:
        agent.acquire(VERSION).close()
        assert agent.state().unverified_versions == 1


@pytest.mark.parametrize("policy", VerificationPolicy)
def test_signed_version_is_started(tmp_path: Path, policy: VerificationPolicy) -> None:
    """The control: a signed version starts under every policy, and is never counted."""
    with run_agent(settings(tmp_path, policy)) as agent:
        agent.publish(VERSION)
        seal(agent.store, tmp_path)
        sign(agent.store, BY_ROOT)
        with agent.acquire(VERSION) as lease:
            assert lease.attestations == (SEALED,)
        assert agent.state().unverified_versions == 0


def test_signatures_are_not_checked_where_off(tmp_path: Path) -> None:
    """With `off`, an unsigned version starts and is not counted."""
    with run_agent(settings(tmp_path, VerificationPolicy.OFF)) as agent:
        agent.publish(VERSION)
        agent.acquire(VERSION).close()
        assert agent.state().unverified_versions == 0


def test_requiring_signatures_without_a_key_is_refused(tmp_path: Path) -> None:
    """`KELVIN_VERIFY=require` without a trusted public key stops the start with a message."""

    async def start() -> None:
        wanted = replace(settings_of(tmp_path), verify=VerificationPolicy.REQUIRE)
        async with open_cache(wanted, FileStore(tmp_path / "store")):
            raise AssertionError("it started")

    with pytest.raises(BadSetting, match="KELVIN_VERIFY=require: needs a public key"):
        asyncio.run(start())


def test_signed_version_starts_after_a_refusal(tmp_path: Path) -> None:
    """A refused version starts once it is signed, because refusals are not cached."""
    with run_agent(settings(tmp_path, VerificationPolicy.REQUIRE)) as agent:
        agent.publish(VERSION)
        assert "it has no valid signature" in refusal(agent)
        sign(agent.store, BY_ROOT)
        agent.acquire(VERSION).close()


class Pairs(FileStore):
    """While `is_slow`, a read of an attestation ends only after a second read has begun."""

    is_slow = False

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reading, self.two = 0, asyncio.Event()

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        if self.is_slow and "/attestations/" in key:
            self.reading += 1
            if self.reading > 1:
                self.two.set()
            await self.two.wait()
        return await super().read(key, offset, length)


async def test_new_attestation_among_many_is_seen(tmp_path: Path) -> None:
    """Attestations are read in parallel. One by one, many of them would take too long."""
    store = Pairs(tmp_path / "store")
    await publish(store, VERSION)
    await store.put_if_absent(origin_key(TENANT, VERSION.id, BY_STRANGER), BY_STRANGER)
    async with open_cache(settings(tmp_path, VerificationPolicy.REQUIRE), store) as cache:
        with pytest.raises(Refused):
            await cache.version_loader.load(TENANT, VERSION.id, TIMEOUT_S, urgent=True)
        await store.put_if_absent(origin_key(TENANT, VERSION.id, BY_ROOT), BY_ROOT)
        store.is_slow = True
        await cache.version_loader.load(TENANT, VERSION.id, TIMEOUT_S, urgent=True)


def test_seal_of_an_unknown_key_is_ignored(tmp_path: Path) -> None:
    """With `require`, a seal without a trusted signature is ignored, and the replica records its own."""
    with run_agent(settings(tmp_path, VerificationPolicy.REQUIRE)) as agent:
        agent.publish(VERSION)
        sign(agent.store, BY_ROOT)
        put(agent.store, attestation_key(TENANT, VERSION.id, SEALED.fingerprint), encode(SEALED))
        with agent.acquire(VERSION) as lease:
            assert lease.attestations == ()


def test_a_forged_seal_is_refused(tmp_path: Path) -> None:
    """A forged seal is refused under any policy: its known answers would accept a wrong model."""
    forged = msgspec.structs.replace(SEALED, probe=msgspec.structs.replace(SEALED.probe, tolerance=1e9))
    raw = STRANGER.attest(VERSION.id, SEAL_TYPE, forged).replace(STRANGER.key_id.encode(), ROOT.key_id.encode())
    with run_agent(settings(tmp_path, VerificationPolicy.OFF)) as agent:
        agent.publish(VERSION)
        put(agent.store, attestation_key(TENANT, VERSION.id, SEALED.fingerprint), raw)
        assert refusal(agent).startswith("attestation_invalid: ")
        assert agent.state().attestation_faults == {"store": {"digest": 2}}


class Away(FileStore):
    """A store that fails, or with `hangs` never answers, while `is_available` is False."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.is_available = True
        self.hangs = False

    async def _answer(self) -> None:
        if not self.is_available and self.hangs:
            await asyncio.Event().wait()
        if not self.is_available:
            raise BlobUnavailable("away")

    async def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        await self._answer()
        return await super().read(key, offset, length)

    async def read_into(self, key: str, offset: int, into: memoryview) -> None:
        await self._answer()
        await super().read_into(key, offset, into)

    async def list(self, prefix: str) -> AsyncIterator[str]:
        await self._answer()
        async for key in super().list(prefix):
            yield key


def fill_nvme(tmp_path: Path, store: Away, policy: VerificationPolicy = VerificationPolicy.REQUIRE) -> None:
    """Run and end an agent that has leased the version: all of it is on NVMe, nothing in memory."""
    asyncio.run(publish(store, VERSION))
    seal(store, tmp_path)
    sign(store, BY_ROOT)
    with run_agent(settings(tmp_path, policy), store) as agent:
        agent.keep(VERSION)


@pytest.mark.parametrize("hangs", [pytest.param(False, id="fails"), pytest.param(True, id="never answers")])
def test_a_start_without_the_store(tmp_path: Path, hangs: bool) -> None:
    """NVMe has every byte, and the version starts, verified and with its known answers."""
    store = Away(tmp_path / "store")
    fill_nvme(tmp_path, store)
    store.is_available, store.hangs = False, hangs
    with run_agent(settings(tmp_path, VerificationPolicy.REQUIRE), store) as agent:
        with agent.acquire(VERSION) as lease:
            assert lease.view(0, lease.total_bytes) == VERSION.linear
            assert lease.attestations == (SEALED,)
        assert agent.state().chunk_reads == {"nvme": len(VERSION.digests)}


def kept_file(data: Path) -> Path:
    return settings_of(data).cache / TENANT / "attestations" / VERSION.id


def test_without_a_kept_copy_it_does_not_start(tmp_path: Path) -> None:
    """The control: without the kept attestations, the version does not start."""
    store = Away(tmp_path / "store")
    fill_nvme(tmp_path, store)
    kept_file(tmp_path).unlink()
    store.is_available = False
    with run_agent(settings(tmp_path, VerificationPolicy.REQUIRE), store) as agent:
        assert refusal(agent).startswith("unavailable")


@pytest.mark.parametrize("at", [0, 70, -1])
def test_damaged_kept_copy_is_replaced(tmp_path: Path, at: int) -> None:
    """The damaged copy is set aside, counted and replaced by the store's. Without the store, the lease is refused."""
    store = Away(tmp_path / "store")
    fill_nvme(tmp_path, store)
    raw = bytearray(kept_file(tmp_path).read_bytes())
    raw[at] ^= 1
    kept_file(tmp_path).write_bytes(raw)
    store.is_available = False
    with run_agent(settings(tmp_path, VerificationPolicy.REQUIRE), store) as agent:
        assert refusal(agent).startswith("unavailable")
        assert agent.state().attestation_faults == {"nvme": {"digest": 1}}
        assert not kept_file(tmp_path).exists()
        store.is_available = True
        agent.acquire(VERSION).close()
        assert kept_file(tmp_path).exists()


def test_damaged_seal_in_the_store_is_healed_from_nvme(tmp_path: Path) -> None:
    """The kept copy replaces it. `kelvin fsck` finds the damaged one in the store."""
    store = Away(tmp_path / "store")
    fill_nvme(tmp_path, store)
    path = tmp_path / "store" / attestation_key(TENANT, VERSION.id, SEALED.fingerprint)
    raw = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(raw[:-9] + b"?" + raw[-8:])
    with run_agent(settings(tmp_path, VerificationPolicy.REQUIRE), store) as agent:
        with agent.acquire(VERSION) as lease:
            assert lease.attestations == (SEALED,)
        assert agent.state().attestation_faults == {"store": {"digest": 2}}


def test_engine_without_a_seal_looks_for_new_ones(tmp_path: Path) -> None:
    """A seal that was added to the store is found by its engine, also of a version in memory, and then kept."""
    other = msgspec.structs.replace(SEALED, fingerprint=msgspec.structs.replace(SEALED.fingerprint, torch="3"))
    with run_agent(settings(tmp_path, VerificationPolicy.OFF)) as agent:
        agent.publish(VERSION)
        seal(agent.store, tmp_path)

        def leased(torch: str) -> set[str]:
            from weightcache.client.lease import acquire

            with acquire(agent.directory, TENANT, VERSION.id, 30.0, (("other", "cpu"), (torch, "cpu-1"))) as lease:
                return {found.fingerprint.torch for found in lease.attestations}

        assert leased("2") == leased("3") == {"2"}
        own = ensure_signer(tmp_path / SECRET_FILE, tmp_path / PUBLIC_FILE)
        raw = own.attest(VERSION.id, SEAL_TYPE, other)
        put(agent.store, attestation_key(TENANT, VERSION.id, other.fingerprint), raw)
        assert leased("2") == {"2"}
        assert agent.state().leases_hot == 1
        assert leased("3") == {"2", "3"}
        assert leased("3") == leased("2") == {"2", "3"}
        assert agent.state().leases_hot == 3
