"""Chunks are prefetched while a start waits for its process. `test_commands` tests prefetch by a deploy."""

from pathlib import Path

import pytest

from coldstart_bench.harness.installation import Installation, InstallationFailed, running_installation
from tests.e2e.conftest import SETTINGS
from tests.e2e.https_client import complete
from tests.e2e.installation_state import cache, chunk_reads, chunks, wait_cache_idle


def is_forgotten(kelvin: Installation) -> bool:
    """Return whether the host tier could be emptied. A slab stays while its chunks are written to NVMe."""
    try:
        kelvin.admin.request("POST", "/admin/v1/cache/evict", {"tier": "host"})
    except InstallationFailed:
        return False
    return True


@pytest.mark.deep
def test_waiting_start_prefetches_its_bytes(tmp_path: Path, llama: Path) -> None:
    """Without standbys, a start's chunks are prefetched while its process starts, and each is read once."""
    with running_installation(tmp_path / "data", settings={**SETTINGS, "KELVIN_STANDBYS": "0"}) as kelvin:
        kelvin.push(llama, "llama")
        kelvin.wait(lambda: cache(kelvin)["prefetches"]["done"] >= 1, "what `prod` names was brought")
        wait_cache_idle(kelvin)
        kelvin.wait(lambda: is_forgotten(kelvin), "the host tier is empty")
        done = cache(kelvin)["prefetches"]["done"]
        before = chunk_reads(kelvin)
        assert complete(kelvin, "llama", "w1 w2 w3", max_tokens=2).status == 200
        kelvin.wait(lambda: cache(kelvin)["prefetches"]["done"] == done + 1, "what the start waited for was brought")
        assert chunk_reads(kelvin) - before == len(set(chunks(kelvin, "llama")))
        assert cache(kelvin)["leases_hot"] == 0
