"""After damage at rest in cache or store, the agent starts, and a lease is right or refused by the fault's name.

The damage is what power cuts, bad disks and other programs leave behind.
"""

import asyncio
from pathlib import Path

import pytest

from kelvin.contracts.errors import Refused
from tests.weightcache.kit import TENANT, RunningAgent, attest, make_version, publish_kept, run_agent, settings_of

VERSION = make_version(seed=1)
DAMAGES = ["missing", "empty", "torn", "zero-filled", "grown", "a directory"]


def damage(path: Path, how: str) -> None:
    raw = path.read_bytes()
    path.unlink()
    if how == "a directory":
        (path / "stray").mkdir(parents=True)
    elif how != "missing":
        changed = {"empty": b"", "torn": raw[: len(raw) // 2], "zero-filled": bytes(len(raw)), "grown": raw + b"x"}
        path.write_bytes(changed[how])


def fill_store_and_cache(tmp_path: Path) -> None:
    """Make a store with a sealed version, and a cache that has all of it on NVMe."""
    with run_agent(settings_of(tmp_path)) as agent:
        asyncio.run(attest(agent.store, VERSION.id))
        agent.keep(VERSION)


def check_lease(agent: RunningAgent) -> None:
    with agent.acquire(VERSION) as lease:
        assert lease.view(0, lease.total_bytes) == VERSION.linear
        assert len(lease.attestations) == 1


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("kind", ["chunk", "manifests", "attestations"])
def test_damaged_file_on_nvme_is_healed(tmp_path: Path, kind: str, how: str) -> None:
    """The store's copy replaces the damaged file. A directory in place of a chunk is left alone: it is not ours."""
    fill_store_and_cache(tmp_path)
    root = settings_of(tmp_path).cache / TENANT
    path = root / kind / VERSION.id if kind != "chunk" else root / VERSION.digests[0][:2] / VERSION.digests[0]
    right = path.read_bytes()
    damage(path, how)
    with run_agent(settings_of(tmp_path)) as agent:
        check_lease(agent)
        if (kind, how) != ("chunk", "a directory"):
            agent.wait_for("the file is right again", lambda _: path.is_file() and path.read_bytes() == right)


STRANGERS = [
    pytest.param("stray", id="a file beside the tenants"),
    pytest.param("lost+found/", id="the file system's own directory"),
    pytest.param("lost+found/aa/b", id="a file in it"),
    pytest.param(f"{TENANT}/stray", id="a file beside the chunks"),
    pytest.param(f"{TENANT}/lost+found/", id="a directory beside the chunks"),
    pytest.param(f"{TENANT}/{VERSION.digests[0][:2]}/stray", id="a file among the chunks"),
    pytest.param(f"{TENANT}/{VERSION.digests[0][:2]}/{VERSION.digests[0][:2]}{'0' * 62}/", id="a directory as a chunk"),
    pytest.param(f"{TENANT}/aa/bb/cc", id="four path segments"),
    pytest.param(f"{TENANT}/manifests/stray", id="a file among the manifests"),
    pytest.param(f"{TENANT}/manifests/lost+found/", id="a directory among the manifests"),
    pytest.param(f"{TENANT}/attestations/a/b", id="four path segments among the attestations"),
    pytest.param(".staging/lost+found/", id="a directory in the staging area"),
    pytest.param(".staging/a/b", id="a file below it"),
    pytest.param(".quarantine/lost+found/", id="a directory in the quarantine"),
    pytest.param(".other/a", id="a hidden directory"),
]


@pytest.mark.parametrize("stranger", STRANGERS)
def test_foreign_entry_in_the_cache_stops_nothing(tmp_path: Path, stranger: str) -> None:
    """The agent starts, serves, sets faulty files aside, and evicts, whatever the entry is."""
    fill_store_and_cache(tmp_path)
    root = settings_of(tmp_path).cache
    path = root / stranger
    path.parent.mkdir(parents=True, exist_ok=True)
    if stranger.endswith("/"):
        path.mkdir()
    else:
        path.write_bytes(b"not ours")
    for digest in VERSION.digests[:2]:
        damage(root / TENANT / digest[:2] / digest, "zero-filled")
    with run_agent(settings_of(tmp_path)) as agent:
        check_lease(agent)
        agent.evict("nvme")
        assert agent.state().nvme.chunks == 0
    with run_agent(settings_of(tmp_path)) as agent:
        check_lease(agent)


# The failure code of a lease if the store's only copy is damaged this way. None: the lease is served.
REFUSALS: dict[str, dict[str, str | None]] = {
    "packs": {"missing": "chunk_missing", "a directory": "chunk_missing", "zero-filled": "chunk_corrupt",
              "empty": "chunk_corrupt", "torn": "chunk_corrupt", "grown": None},
    "index": {**dict.fromkeys(DAMAGES)},  # the pack's footer has the same content
    "manifests": {"missing": "manifest_missing", "a directory": "manifest_missing", "zero-filled": "manifest_corrupt",
                  "empty": "manifest_corrupt", "torn": "manifest_corrupt", "grown": "manifest_corrupt"},
    "attestations": {"missing": None, "a directory": None, "zero-filled": "attestation_invalid",
                     "empty": "attestation_invalid", "torn": "attestation_invalid", "grown": "attestation_invalid"},
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("kind", REFUSALS)
def test_damaged_object_is_refused_by_its_name(tmp_path: Path, kind: str, how: str) -> None:
    """The lease is refused by the damage's code, or served without the object. Another version is served."""
    other = make_version(seed=2)
    with run_agent(settings_of(tmp_path)) as agent:
        agent.publish(VERSION)
        asyncio.run(attest(agent.store, VERSION.id))
        (path,) = (each for each in (tmp_path / "store" / TENANT / kind).rglob("*") if each.is_file())
        damage(path, how)
        agent.publish(other)
        with agent.acquire(other) as lease:
            assert lease.view(0, lease.total_bytes) == other.linear
        if (code := REFUSALS[kind][how]) is None:
            with agent.acquire(VERSION) as lease:
                assert lease.view(0, lease.total_bytes) == VERSION.linear
            return
        with pytest.raises(Refused) as refused:
            agent.acquire(VERSION)
        assert refused.value.failure.code == code


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_index_of_a_kept_file_harms_its_version_alone(tmp_path: Path, how: str) -> None:
    """Only this index says where the chunks are in the file, so they are missing. Versions in packs are served."""
    with run_agent(settings_of(tmp_path)) as agent:
        kept, pack = asyncio.run(publish_kept(agent.store, 3, attested=True))
        agent.publish(VERSION)
        damage(tmp_path / "store" / TENANT / "index" / pack, how)
        with agent.acquire(VERSION) as lease:
            assert lease.view(0, lease.total_bytes) == VERSION.linear
        with pytest.raises(Refused) as refused:
            agent.acquire(kept)
        assert refused.value.failure.code == "chunk_missing"
