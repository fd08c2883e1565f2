"""Two shared installations, and small models to push to them."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from coldstart_bench.harness.installation import Installation, running_installation
from tests.e2e.tiny_models import make_tiny
from tests.kelvin.telemetry import receiver
from tests.kelvin.telemetry.receiver import Receiver
from tests.shared_fixtures import SHARED_FIXTURES, SharedFixtures

# Small tiers, fast scaling and devices for two replicas fit a test machine.
SETTINGS = {
    "KELVIN_HOST_BYTES": str(512 << 20),
    "KELVIN_SLAB_BYTES": str(16 << 20),
    "KELVIN_KV_BYTES": str(64 << 20),
    "KELVIN_CHUNK_BYTES": str(16 << 10),  # a tiny model gets many chunks
    "KELVIN_BREAKER_S": "1",  # a replica that a test broke is tried again soon
    "KELVIN_SCRUB_S": "0",  # no scrub changes chunk counters or heals what a test damaged
}


# Settings of the watched installation. They disturb no test that uses another part of it.
COLLECTORS_SECRET = "c2VjcmV0LW9mLXRoZS1jb2xsZWN0b3I"
WATCHED = {
    **SETTINGS,
    "KELVIN_TRACE_SHARE": "0",
    "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Basic%20{COLLECTORS_SECRET}",
    "KELVIN_STANDBY_TARGET": "0.95",
    "KELVIN_SCRUB_S": "1",
}


@pytest.fixture(scope="session")
def scratch() -> Iterator[Path]:
    """A directory for the session. Its path is short, as a user's would be."""
    with tempfile.TemporaryDirectory(prefix="kelvin-e2e-") as path:
        yield Path(path)


@pytest.fixture(scope="session")
def together(scratch: Path) -> Iterator[SharedFixtures]:
    """Installations that several files share. They end with the last of those files, or with the session."""
    yield SHARED_FIXTURES
    SHARED_FIXTURES.close()


@pytest.fixture(scope="session")
def llama(scratch: Path) -> Path:
    """A tiny float32 Llama."""
    return make_tiny(scratch / "llama", "llama", seed=1)


@pytest.fixture(scope="session")
def qwen2(scratch: Path) -> Path:
    """A tiny float32 Qwen2 with tied embeddings."""
    return make_tiny(scratch / "qwen2", "qwen2", seed=2)


@contextmanager
def _with_both(scratch: Path, llama: Path, qwen2: Path) -> Iterator[Installation]:
    with running_installation(scratch / "data", settings=SETTINGS) as installation:
        installation.push(llama, "llama")
        installation.push(qwen2, "qwen2")
        for model in ("llama", "qwen2"):
            installation.admin.request("PUT", f"/admin/v1/models/{model}/scale", {"max": 1})
        yield installation


@pytest.fixture(scope="module")
def kelvin(together: SharedFixtures, scratch: Path, llama: Path, qwen2: Path) -> Installation:
    """`kelvin up` with both tiny models pushed."""
    return together.get("kelvin", partial(_with_both, scratch, llama, qwen2))


@pytest.fixture(scope="session")
def collector() -> Iterator[Receiver]:
    with receiver.running() as found:
        yield found


@contextmanager
def _with_one(collector: Receiver, scratch: Path, llama: Path) -> Iterator[Installation]:
    settings = {**WATCHED, "KELVIN_OTLP_ENDPOINT": collector.endpoint}
    with running_installation(scratch / "watched", settings=settings) as installation:
        installation.push(llama, "llama")
        installation.admin.request("PUT", "/admin/v1/models/llama/scale", {"max": 1})
        yield installation


@pytest.fixture(scope="module")
def watched(together: SharedFixtures, collector: Receiver, scratch: Path, llama: Path) -> Installation:
    """`kelvin up` with one tiny model, an OTLP collector for notable requests, and a scrub every second.

    It learns its number of standbys, and prefetches weights after short pauses.
    """
    return together.get("watched", partial(_with_one, collector, scratch, llama))
