"""Damaged bytes at rest are healed from the next source, or refused with the chunk's name, and never served.

The negative control runs the same damage through an agent whose verifier accepts everything.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kelvin.contracts.artifacts.manifest import PAGE_BYTES
from kelvin.contracts.errors import Refused, RemoteFailure
from tests.weightcache.disks import fill, make_read_only
from tests.weightcache.kit import TENANT, RunningAgent, Version, make_version, run_agent, settings_of
from weightcache.nvme.chunk_files import QUARANTINE
from weightcache.sources.source import Verify, is_digest_of

VERSION = make_version(seed=3, pages=(9, 30, 4), chunk_pages=8)
VICTIM = 4  # a full-size chunk of the second tensor
OTHER = 3  # another chunk of the same length
CHUNK = 8 * PAGE_BYTES


def accept_all(data: memoryview, digest: str) -> bool:
    return True


def flip(data: bytearray) -> None:
    data[len(data) // 3] ^= 0x10


def flip_last(data: bytearray) -> None:
    data[-1] ^= 1


def zero(data: bytearray) -> None:
    data[:] = bytes(len(data))


def swap(data: bytearray) -> None:
    data[:] = VERSION.chunks[OTHER]


def truncate(data: bytearray) -> None:
    del data[len(data) // 2 // PAGE_BYTES * PAGE_BYTES :]


def truncate_oddly(data: bytearray) -> None:
    del data[-1:]


def append(data: bytearray) -> None:
    data += bytes(PAGE_BYTES)


KEEPS_LENGTH = [
    pytest.param(flip, id="one bit flipped"),
    pytest.param(flip_last, id="the last bit flipped"),
    pytest.param(zero, id="zero-filled"),
    pytest.param(swap, id="swapped with another chunk"),
]
CHANGES_LENGTH = [
    pytest.param(truncate, id="truncated to whole pages"),
    pytest.param(truncate_oddly, id="one byte short"),
    pytest.param(append, id="a page too long"),
]
Damage = Callable[[bytearray], None]


def damage_file(path: Path, damage: Damage) -> None:
    data = bytearray(path.read_bytes())
    damage(data)
    path.write_bytes(data)


def on_nvme(data: Path) -> None:
    """Put all chunks of the version on NVMe, as a lease does."""
    with run_agent(settings_of(data)) as agent:
        agent.keep(VERSION)


def expect_refusal(agent: RunningAgent, version: Version = VERSION) -> RemoteFailure:
    with pytest.raises(Refused) as caught:
        agent.acquire(version)
    failure = caught.value.failure
    assert isinstance(failure, RemoteFailure)
    return failure


def assert_named(failure: RemoteFailure, tier: str, digest: str = VERSION.digests[VICTIM]) -> None:
    assert failure.remote_code == "chunk_corrupt"
    assert failure.message == f"chunk {digest} in tier '{tier}' does not match its digest"


@pytest.mark.parametrize("damage", KEEPS_LENGTH + CHANGES_LENGTH)
def test_damaged_nvme_file_is_healed_during_a_lease(tmp_path: Path, damage: Damage) -> None:
    """A damaged chunk file is quarantined, and the lease gets the store's copy, which replaces the file."""
    on_nvme(tmp_path)
    digest = VERSION.digests[VICTIM]
    with run_agent(settings_of(tmp_path)) as agent:
        damage_file(agent.chunk_file(digest), damage)
        with agent.acquire(VERSION) as lease:
            assert lease.view(0, lease.total_bytes) == VERSION.linear
            assert lease.chunks_by_tier["store"] == 1
        (aside,) = os.listdir(agent.settings.cache / QUARANTINE)
        assert aside.startswith(f"{TENANT}.{digest}.")
        kind = "digest" if damage in (flip, flip_last, zero, swap) else "length"
        state = agent.wait_for("it is on NVMe again", lambda state: state.admitted_chunks == 1)
        assert (state.chunk_faults, state.healed_chunks) == ({"nvme": {kind: 1}}, {"store": 1})
        assert agent.chunk_file(digest).read_bytes() == VERSION.chunks[VICTIM]


def test_each_fault_is_told_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log line has the chunk, tier, kind, and the source that healed it, or None if it was not healed."""
    on_nvme(tmp_path)
    digest = VERSION.digests[VICTIM]
    with run_agent(settings_of(tmp_path)) as agent:
        damage_file(agent.chunk_file(digest), zero)
        agent.acquire(VERSION).close()
        (line,) = [record for record in caplog.records if "faulty" in record.message]
        expected = {"chunk": digest, "tenant": TENANT, "tier": "nvme", "kind": "digest", "healed_from": "store"}
        assert expected.items() <= vars(line).items()
        assert line.levelname == "WARNING"
        caplog.clear()
    with run_agent(settings_of(tmp_path)) as agent:
        damage_file(agent.chunk_file(digest), truncate)
        damage_pack(agent, flip)
        assert_named(expect_refusal(agent), "store")
        lines = [vars(record) for record in caplog.records if "faulty" in record.message]
        assert [(line["tier"], line["kind"]) for line in lines] == [
            ("nvme", "length"),
            ("store", "digest"),
            ("store", "digest"),
        ]
        assert {(line["levelname"], line["chunk"], line["healed_from"]) for line in lines} == {("ERROR", digest, None)}


@pytest.mark.parametrize("damage", KEEPS_LENGTH)
def test_nvme_control(tmp_path: Path, damage: Damage) -> None:
    """Negative control: a verifier that accepts everything lets the damage through."""
    on_nvme(tmp_path)
    with run_agent(settings_of(tmp_path), verify=accept_all) as agent:
        damage_file(agent.chunk_file(VERSION.digests[VICTIM]), damage)
        with agent.acquire(VERSION) as lease:
            assert lease.view(0, lease.total_bytes) != VERSION.linear


@pytest.mark.parametrize("is_full", [True, False], ids=["the disk is full", "the disk became read-only"])
def test_healed_without_the_disk(tmp_path: Path, is_full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk takes no writes, the store's bytes go into memory. Once the disk works, the file is healed too."""
    on_nvme(tmp_path)
    digest = VERSION.digests[VICTIM]
    with run_agent(settings_of(tmp_path)) as agent:
        damage_file(agent.chunk_file(digest), flip)
        with monkeypatch.context() as patch:
            if is_full:
                fill(patch)
            else:
                make_read_only(patch, agent.settings.cache)
            with agent.acquire(VERSION) as lease:
                assert lease.view(0, lease.total_bytes) == VERSION.linear
                assert lease.chunks_by_tier["store"] == 1
            state = agent.wait_for("it was not admitted", lambda state: state.unadmitted_chunks == 1)
            assert (state.healed_chunks, state.leases_refused) == ({"store": 1}, {})
    with run_agent(settings_of(tmp_path)) as agent:
        with agent.acquire(VERSION) as lease:
            assert lease.view(0, lease.total_bytes) == VERSION.linear
        agent.wait_for("it is on NVMe again", lambda state: state.admitted_chunks == 1)
        assert agent.chunk_file(digest).read_bytes() == VERSION.chunks[VICTIM]


def pack_of(agent: RunningAgent) -> Path:
    (pack,) = (agent.settings.data / "store" / TENANT / "packs").iterdir()
    return pack


def damage_pack(agent: RunningAgent, damage: Damage) -> None:
    """Damage the victim chunk within its pack, and nothing else."""
    pack = pack_of(agent)
    data = bytearray(pack.read_bytes())
    begin = sum(chunk.length for chunk in VERSION.manifest.chunks[:VICTIM])
    victim = data[begin : begin + CHUNK]
    assert victim == VERSION.chunks[VICTIM]
    damage(victim)
    data[begin : begin + CHUNK] = victim
    pack.write_bytes(data)


@pytest.mark.parametrize("verify", [pytest.param(is_digest_of, id="verified"), pytest.param(accept_all, id="control")])
@pytest.mark.parametrize("damage", KEEPS_LENGTH)
def test_damaged_pack_is_refused_by_chunk(tmp_path: Path, damage: Damage, verify: Verify) -> None:
    """Damage inside a pack is refused with the chunk's name, every time. Without verification it would be served."""
    with run_agent(settings_of(tmp_path), verify=verify) as agent:
        agent.publish(VERSION)
        damage_pack(agent, damage)
        if verify is accept_all:
            with agent.acquire(VERSION) as lease:
                assert lease.view(0, lease.total_bytes) != VERSION.linear
            return
        for _ in range(2):
            assert_named(expect_refusal(agent), "store")
        state = agent.state()
        assert (state.chunk_faults, state.healed_chunks) == ({"store": {"digest": 4}}, {})
        assert state.refused_chunks == {"chunk_corrupt": 2}
        assert not agent.chunk_file(VERSION.digests[VICTIM]).exists(), "it was not admitted"


def test_truncated_pack_is_refused_by_chunk(tmp_path: Path) -> None:
    """A pack that ends early is refused with the name of a chunk that it lost."""
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        begin = sum(chunk.length for chunk in VERSION.manifest.chunks[:VICTIM])
        os.truncate(pack_of(agent), begin + PAGE_BYTES)
        failure = expect_refusal(agent)
        assert failure.remote_code == "chunk_corrupt"
        assert any(digest in failure.message for digest in VERSION.digests[VICTIM:])


def test_missing_chunk_is_named(tmp_path: Path) -> None:
    """A chunk that no source has is refused as missing, with its name."""
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        pack_of(agent).unlink()
        failure = expect_refusal(agent)
        assert failure.remote_code == "chunk_missing"
        assert failure.message.split()[1] in VERSION.digests


def test_corrupt_chunk_harms_no_other_version(tmp_path: Path) -> None:
    """A corrupt chunk does not affect versions that don't use it."""
    healthy = make_version(seed=4)
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        damage_pack(agent, flip)
        agent.publish(healthy)
        expect_refusal(agent)
        with agent.acquire(healthy) as lease:
            assert lease.view(0, lease.total_bytes) == healthy.linear


@pytest.fixture(scope="module")
def admitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("admitted")
    on_nvme(data)
    return data


@given(victim=st.integers(0, len(VERSION.digests) - 1), at=st.integers(0, CHUNK - 1), bit=st.integers(0, 7))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_flipped_bit_is_healed(admitted: Path, victim: int, at: int, bit: int) -> None:
    """Any flipped bit in any chunk on NVMe is healed, in the lease and on NVMe."""
    digest = VERSION.digests[victim]
    opened: AbstractContextManager[RunningAgent] = run_agent(settings_of(admitted))
    with opened as agent:
        path = agent.chunk_file(digest)
        good = path.read_bytes()
        bad = bytearray(good)
        bad[at % len(good)] ^= 1 << bit
        path.write_bytes(bad)
        with agent.acquire(VERSION) as lease:
            assert lease.view(0, lease.total_bytes) == VERSION.linear
            assert lease.chunks_by_tier["store"] == 1
        agent.wait_for("it is on NVMe again", lambda state: state.admitted_chunks == 1)
        assert path.read_bytes() == good
