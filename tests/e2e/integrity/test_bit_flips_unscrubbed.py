"""The control of `test_bit_flips.py`: without the scrub, damage stays."""

from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from coldstart_bench.harness.installation import Installation
from tests.e2e.https_client import complete
from tests.e2e.installation_state import cache, sole_replica
from tests.e2e.integrity.test_bit_flips import AT, MODEL, PROMPT, agent, file, flip_on_disk, injured, serving, state
from tests.e2e.tiny_models import prompt_of
from tests.weightcache.flips import byte_at, flip_bit_of_process

pytestmark = pytest.mark.deep


def _seen(kelvin: Installation) -> Any:
    """Return all counters of what the scrub checked and found."""
    now = cache(kelvin)
    return [now[name] for name in ("sweeps", "examined_chunks", "chunk_faults", "damaged")]


def test_bit_flips_stay_unseen_without_scrubbing(kelvin: Installation, scratch: Path) -> None:
    """Negative control: without the scrub both flips stay, and the replica serves on. A check on demand finds both."""
    serving(kelvin, scratch)
    before, seen = sole_replica(kelvin, MODEL), _seen(kelvin)
    in_memory, memory_bytes, on_disk, _ = injured(kelvin)
    flip_bit_of_process(agent(kelvin), memory_bytes, AT)
    flip_on_disk(kelvin, on_disk)
    for _ in range(3):
        assert complete(kelvin, MODEL, prompt_of(PROMPT), max_tokens=4).status == 200
    assert _seen(kelvin) == seen
    assert byte_at(agent(kelvin), memory_bytes, AT) == memory_bytes[AT] ^ 1
    assert blake3(file(kelvin, on_disk).read_bytes()).hexdigest() != on_disk
    assert sole_replica(kelvin, MODEL)["pid"] == before["pid"]
    checked = kelvin.admin.request("POST", "/admin/v1/cache/check")
    assert {(fault["tier"], fault["chunk"]) for fault in checked["faults"]} == {("host", in_memory), ("nvme", on_disk)}
    kelvin.wait(lambda: state(kelvin, before["runtime_id"]) is None, "the replica was sent away")
    kelvin.scale_to_zero(MODEL)
