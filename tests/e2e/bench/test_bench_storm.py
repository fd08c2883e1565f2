"""Small runs of `kelvin bench storm`, `kelvin bench pool` and `kelvin bench integrity`."""

import random
from pathlib import Path

import pytest

from coldstart_bench.suites import integrity_bench, pool_bench
from tests.e2e import bench_command

pytestmark = pytest.mark.deep


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_small_storm(tmp_path: Path) -> None:
    """Each version reaches each agent, and each byte leaves the store about once per agent."""
    words = ["--agents", "2", "--models", "4", "--model-mib", "2", "--line", "0.1"]
    found, _ = bench_command.run_passing(tmp_path, "storm", *words)
    miss = found["miss"]
    assert [len(ends) for ends in miss["finished_s"]] == [4, 4]
    assert miss["failures"] == []
    assert [len(ends) for ends in found["peered"]["finished_s"]] == [4, 4]
    assert found["peered"]["store"]["sent_bytes"] < 1.5 * found["peered"]["store"]["distinct_bytes"]
    for node in miss["nodes"]:
        assert node["distinct_bytes"] >= 4 * (2 << 20)
        assert node["sent_bytes"] <= 1.01 * node["distinct_bytes"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_small_pool(tmp_path: Path) -> None:
    """Each round starts with and without a parked standby. The standby is faster."""
    found, _ = bench_command.run_passing(tmp_path, "pool", "--size", "0.05", "--repeats", "2")
    own, waiting = (
        next(row for row in found["rows"] if row["system"] == name) for name in (pool_bench.OWN, pool_bench.WAITING)
    )
    assert (own["n"], waiting["n"], found["failures"]) == (2, 2, [])
    assert own["median_s"] > waiting["median_s"]
    assert found["verdicts"][0]["value"] == pytest.approx(own["median_s"] / waiting["median_s"])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_small_injuries(tmp_path: Path) -> None:
    """Damage on NVMe is healed, damage in the store is refused with its name, and every claim passes."""
    found, _ = bench_command.run_passing(tmp_path, "integrity", "--corruptions", "10", "--size", "0.05")
    nvme, store = found["tallies"]
    assert (nvme["injected"], nvme["healed"]) == (8, 8)
    assert (store["injected"], store["refused"]) == (2, 2)
    assert found["mended"]
    assert found["verified_rate"] > 0
    assert [verdict["passed"] for verdict in found["verdicts"]] == [True] * 4 + [None]


def test_damage_is_damage() -> None:
    """Negative control: each kind of damage changes the bytes."""
    source, right, other = random.Random(1), bytes(range(256)) * 16, bytes(4096)
    for kind, damage in integrity_bench.ALL.items():
        assert damage(right, other, source) != right, kind
