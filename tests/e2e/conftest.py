"""One installation for the tests that may share one, and small models to push to it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldstart_bench.installation import Installation, running
from tests.e2e.models import make_tiny

# Small tiers, quick scaling, two replicas' worth of devices: what a test machine has.
SETTINGS = {
    "KELVIN_HOST_BYTES": str(512 << 20),
    "KELVIN_SLAB_BYTES": str(16 << 20),
    "KELVIN_KV_BYTES": str(64 << 20),
    "KELVIN_CHUNK_BYTES": str(16 << 10),  # so that a tiny model has many
}


@pytest.fixture(scope="session")
def scratch() -> Iterator[Path]:
    """A directory for the whole session; its path is short, as a user's would be."""
    with tempfile.TemporaryDirectory(prefix="kelvin-e2e-") as path:
        yield Path(path)


@pytest.fixture(scope="session")
def llama(scratch: Path) -> Path:
    """A tiny float32 Llama."""
    return make_tiny(scratch / "llama", "llama", seed=1)


@pytest.fixture(scope="session")
def qwen2(scratch: Path) -> Path:
    """A tiny float32 Qwen2 with tied embeddings."""
    return make_tiny(scratch / "qwen2", "qwen2", seed=2)


@pytest.fixture(scope="session")
def kelvin(scratch: Path, llama: Path, qwen2: Path) -> Iterator[Installation]:
    """`kelvin up` with both tiny models pushed."""
    with running(scratch / "data", settings=SETTINGS) as installation:
        installation.push(llama, "llama")
        installation.push(qwen2, "qwen2")
        for model in ("llama", "qwen2"):
            installation.admin.request("PUT", f"/admin/v1/models/{model}/scale", {"max": 1})
        yield installation
