"""The store's keys are part of the format. They are written down here so that a change is noticed."""

import pytest

from kelvin.contracts.artifacts import object_keys
from kelvin.contracts.artifacts.runtime_control import Fingerprint

D = "d" * 64
PRINT = Fingerprint(torch="2.13.0", dtype="bfloat16", device_class="cpu-1")


@pytest.mark.parametrize(
    ("key", "want"),
    [
        (object_keys.pack_key("acme", D), f"acme/packs/{D}"),
        (object_keys.index_key("acme", D), f"acme/index/{D}"),
        (object_keys.manifest_key("acme", D), f"acme/manifests/{D}"),
        (object_keys.draft_key("acme", D), f"acme/drafts/{D}"),
        (object_keys.inputs_key("acme", D), f"acme/inputs/{D}"),
        (object_keys.attestations_prefix("acme", D), f"acme/attestations/{D}/"),
        (object_keys.attestation_key("acme", D, PRINT), f"acme/attestations/{D}/seal-9eb3ae7ac3fd52af"),
    ],
)
def test_object_keys_begin_with_the_tenant(key: str, want: str) -> None:
    """A key begins with its tenant, so that policies and quotas can use the prefix."""
    assert key == want


def test_different_fingerprints_have_different_keys() -> None:
    """Each field of a fingerprint changes the digest."""
    others = [
        Fingerprint(torch="2.12.0", dtype="bfloat16", device_class="cpu-1"),
        Fingerprint(torch="2.13.0", dtype="float32", device_class="cpu-1"),
        Fingerprint(torch="2.13.0", dtype="bfloat16", device_class="h200"),
    ]
    assert len({object_keys.fingerprint_digest(each) for each in (PRINT, *others)}) == 4
