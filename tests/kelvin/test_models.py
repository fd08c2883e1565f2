"""What `kelvin status` says of the weight cache, in one line."""

from typing import Any

import pytest

from kelvin.models import cache_line

QUIET: dict[str, Any] = {
    "chunk_faults": {},
    "manifest_faults": {},
    "attestation_faults": {},
    "unverified_versions": 0,
    "healed_chunks": {},
    "healed_manifests": {},
    "refused_chunks": {},
}


@pytest.mark.parametrize(
    ("cache", "want"),
    [
        pytest.param(None, "weight cache: does not answer", id="the agent is away"),
        pytest.param(QUIET, "weight cache: faulty copies: none; healed 0, chunks refused 0", id="nothing happened"),
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
            "nvme manifest digest 1; healed 3, chunks refused 1",
            id="healed and refused",
        ),
        pytest.param(
            QUIET | {"attestation_faults": {"store": {"digest": 2}}, "unverified_versions": 3},
            "weight cache: faulty copies: store attestation digest 2; healed 0, chunks refused 0; "
            "3 loads of versions that nobody vouches for",
            id="forged, and not signed",
        ),
    ],
)
def test_cache_line(cache: dict[str, Any] | None, want: str) -> None:
    """Each fault by tier, what and kind; what was healed and what was not."""
    assert cache_line(cache) == want
