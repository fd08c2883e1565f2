"""Which OpenSSF bundle goes with an export, of all that were signed for a version."""

from collections.abc import Iterable

from blake3 import blake3

from contracts.attestation import read_origin
from contracts.push import AttestationEntry


def find_bundle(version: str, entries: Iterable[AttestationEntry]) -> bytes | None:
    """That of the latest statement which names one, of a trusted key before all others; None where none does."""
    good = [entry for entry in entries if entry.fault is None]
    bundles = {blake3(entry.content).hexdigest(): entry.content for entry in good if entry.name.startswith("bundle-")}
    found: list[tuple[bool, int, bytes]] = []
    for entry in good:
        if entry.name.startswith("origin-"):
            origin, _ = read_origin(entry.content, version)
            if origin.bundle in bundles:
                found.append((entry.trusted_as is not None, origin.signed_at_s, bundles[origin.bundle]))
    return max(found)[2] if found else None
