"""The lines of `kelvin status`: weight cache, disk, standbys, splits, pending replicas and failures."""

from typing import Any

import click
import pytest

from kelvin.cli.models.model_commands import (
    cache_line,
    death_lines,
    disk_lines,
    failure_lines,
    fallback_version_lines,
    outdated_lines,
    pending_lines,
    pool_lines,
    read_weights,
    split_lines,
    standby_lines,
)

QUIET: dict[str, Any] = {
    "chunk_faults": {},
    "manifest_faults": {},
    "attestation_faults": {},
    "unverified_versions": 0,
    "healed_chunks": {},
    "healed_manifests": {},
    "refused_chunks": {},
    "examined_chunks": {"host": 3, "nvme": 4},
    "sweeps": 2,
    "damaged": [],
}
SCRUBBED = "; 7 checked again in 2 passes"


@pytest.mark.parametrize(
    ("cache", "want"),
    [
        pytest.param(None, "weight cache: does not answer", id="the agent is away"),
        pytest.param(
            QUIET, "weight cache: faulty copies: none; healed 0, chunks refused 0" + SCRUBBED, id="nothing happened"
        ),
        pytest.param(
            QUIET
            | {
                "chunk_faults": {"nvme": {"digest": 2, "short": 1}, "store": {"digest": 2}},
                "manifest_faults": {"nvme": {"digest": 1}},
                "healed_chunks": {"store": 2},
                "healed_manifests": {"store": 1},
                "refused_chunks": {"chunk_corrupt": 1},
            },
            "weight cache: faulty copies: nvme chunk digest 2, nvme chunk short 1, store chunk digest 2, "
            "nvme manifest digest 1; healed 3, chunks refused 1" + SCRUBBED,
            id="healed and refused",
        ),
        pytest.param(
            QUIET | {"attestation_faults": {"store": {"digest": 2}}, "unverified_versions": 3},
            "weight cache: faulty copies: store attestation digest 2; healed 0, chunks refused 0"
            + SCRUBBED
            + "; 3 loads of versions without a trusted signature",
            id="forged, and not signed",
        ),
        pytest.param(
            QUIET
            | {
                "chunk_faults": {"host": {"digest": 2}},
                "damaged": [{"tenant": "a", "chunk": "c", "pids": [4, 5]}, {"tenant": "a", "chunk": "d", "pids": [5]}],
            },
            "weight cache: faulty copies: host chunk digest 2; healed 0, chunks refused 0"
            + SCRUBBED
            + "; 2 processes have wrong memory mapped, and are being replaced",
            id="damaged in memory",
        ),
    ],
)
def test_cache_line_counts_faults_by_tier(cache: dict[str, Any] | None, want: str) -> None:
    """Faults are counted by tier, object and kind. Healed and refused chunks are counted too."""
    assert cache_line(cache) == want


@pytest.mark.parametrize(
    ("disk", "want"),
    [
        (None, []),
        ({"free_bytes": 50_000_000_000, "total_bytes": 100_000_000_000, "free_inodes": None}, []),
        (
            {"free_bytes": 0, "total_bytes": 100_000_000_000, "free_inodes": 5000},
            [
                "disk of the data directory: 0 bytes of 100 GB free: pushes are refused (507) soon, then requests"
                " (503); `kelvin doctor` says what to do"
            ],
        ),
    ],
    ids=["a cluster", "room", "full"],
)
def test_disk_lines(disk: dict[str, Any] | None, want: list[str]) -> None:
    """Only a disk without space gets a line."""
    assert list(disk_lines(disk)) == want


def test_standby_lines() -> None:
    """The lines have the counts, the reason, the hit rate and the memory."""
    pool = {
        "device": "cpu", "wanted": 3, "why": "bursts", "kept": 3, "parked": 2, "forking": 1, "target": 0.99,
        "probability": 0.99312, "starts_per_s": 0.0314, "replaced_in_s": 0.42, "hits": 12, "misses": 2,
        "memory": {"pss": 150_000_000, "private": 61_000_000}, "budget_bytes": 1 << 30,
    }  # fmt: skip
    assert list(standby_lines({"pools": [pool], "zygote": {"pss": 120_000_000, "private": 1}})) == [
        "standbys (cpu): 2 parked, 3 wanted (bursts); 12 starts found one, 2 did not",
        "  0.0314 taken per second, replaced in 0.42 s: 99.31% of starts find one (target 0.99)",
        "  memory: 61 MB private (budget 1.07 GB), 150 MB with their share of the zygote's 120 MB",
    ]


def test_split_lines() -> None:
    """Each version has its share. The largest comes first."""
    assert list(split_lines({"a" * 64: 1, "b" * 64: 3})) == ["bbbbbbbbbbbb 3 (75.0%)", "aaaaaaaaaaaa 1 (25.0%)"]
    assert list(split_lines({})) == []


def test_split_weights_are_parsed_once_each() -> None:
    """Weights are written VERSION=WEIGHT, each version once. The API checks the number."""
    assert read_weights(("a=90", "b=0")) == {"a": 90, "b": 0}
    for bad in (("a",), ("=1",), ("a=",), ("a=1.5",), ("a=-1",), ("a=\u0661",), ("a=1", "a=2")):
        with pytest.raises(click.UsageError, match="VERSION=WEIGHT"):
            read_weights(bad)


def _pending(**more: Any) -> dict[str, Any]:
    row = {"device": "cpu", "zone": "any", "spot": "no", "replicas": 2, "waited_s": None, "node_s": None, "measured": 0}
    return row | more


@pytest.mark.parametrize(
    ("row", "want"),
    [
        pytest.param(_pending(), ["pending (cpu): 2 replicas"], id="one machine: the wait is unknown"),
        pytest.param(
            _pending(device="gpu", zone="eu-1a", spot="only", waited_s=61.2, node_s=180.0),
            ["pending (gpu in eu-1a, on spot capacity alone): 2 replicas: 61 s by now, 180 s guessed in all"],
            id="a cluster without measured node starts",
        ),
        pytest.param(
            _pending(device="mig-1g.10gb", spot="may", waited_s=3.0, node_s=95.0, measured=4),
            ["pending (mig-1g.10gb, on spot capacity, too): 2 replicas: 3 s by now, 95 s expected in all"],
            id="a cluster with measured node starts",
        ),
        pytest.param(_pending(replicas=1), ["pending (cpu): 1 replica"], id="one"),
        pytest.param(_pending(replicas=0, node_s=95.0, measured=4), [], id="no pending replica"),
    ],
)
def test_pending_replicas(row: dict[str, Any], want: list[str]) -> None:
    """The line names the capacity, the number of replicas and the wait."""
    assert list(pending_lines([row])) == want


def test_pool_lines() -> None:
    """The lines have the wanted number and the states of the existing pods."""
    rows = [
        {"name": "large", "wanted": 0, "pods": {}},
        {"name": "small", "wanted": 3, "pods": {"bound": 1, "parked": 2}},
    ]
    assert list(pool_lines(rows)) == [
        "waiting pods (large): 0 wanted; none there",
        "waiting pods (small): 3 wanted; 1 bound, 2 parked",
    ]


@pytest.mark.parametrize(
    ("state", "last", "want"),
    [
        pytest.param("zero", {"failure": "no image"}, ["m: its last start: no image"], id="nothing runs"),
        pytest.param("restoring", {"failure": "no image"}, ["m: its last start: no image"], id="a new start runs"),
        pytest.param("ready", {"failure": "no image"}, [], id="a replica is ready"),
        pytest.param("zero", {"failure": None}, [], id="the last start succeeded"),
        pytest.param("zero", None, [], id="no start yet"),
    ],
)
def test_failure_lines(state: str, last: dict[str, Any] | None, want: list[str]) -> None:
    """The reason of the last failed start is printed unless a replica is ready."""
    assert list(failure_lines([{"model": "m", "state": state, "last_restore": last}])) == want


@pytest.mark.parametrize(
    ("row", "want"),
    [
        pytest.param({"meanwhile": {}}, [], id="none"),
        pytest.param(
            {"meanwhile": {"b" * 64: "a" * 64}}, [f"m: {'a' * 12} serves what {'b' * 12} can't serve yet"], id="one"
        ),
        pytest.param({}, [], id="an older control plane does not say"),
    ],
)
def test_overlap_lines(row: dict[str, Any], want: list[str]) -> None:
    """The old version serves while the new one can't yet."""
    assert list(fallback_version_lines([{"model": "m"} | row])) == want


@pytest.mark.parametrize(
    ("more", "want"),
    [
        pytest.param({"last_death": None}, [], id="none"),
        pytest.param(
            {"last_death": {"runtime_id": "r1", "at_s": 1_700_000_000, "exit_status": -9}},
            [f"m@{'a' * 12}: replica r1 ended unexpectedly, 2023-11-14 22:13 UTC: killed by signal 9"],
            id="one",
        ),
        pytest.param({}, [], id="an older control plane does not say"),
    ],
)
def test_death_lines(more: dict[str, Any], want: list[str]) -> None:
    """A replica that ended unexpectedly is reported with its time and signal."""
    assert list(death_lines([{"model": "m", "versions": [{"version": "a" * 64} | more]}])) == want


@pytest.mark.parametrize(
    ("more", "want"),
    [
        pytest.param({"image_behind": None}, [], id="none"),
        pytest.param(
            {"image_behind": {"reason": "waiting", "message": "it waits for its turn", "since_s": 1_700_000_000}},
            [f"m@{'a' * 12}: image behind since 2023-11-14 22:13 UTC (waiting): it waits for its turn"],
            id="one",
        ),
        pytest.param({}, [], id="an older control plane does not say"),
    ],
)
def test_behind_lines(more: dict[str, Any], want: list[str]) -> None:
    """A version that still runs the previous image is reported with the reason."""
    assert list(outdated_lines([{"model": "m", "versions": [{"version": "a" * 64} | more]}])) == want
