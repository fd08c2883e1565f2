"""The key of each object of a tenant in the object store. Part of the format: see `docs/snapshot-format.md`. Pure."""

import re
from typing import Final

import msgspec
from blake3 import blake3

from kelvin.contracts.artifacts.runtime_control import Fingerprint

PACKS: Final = "packs"
INDEX: Final = "index"
MANIFESTS: Final = "manifests"
DRAFTS: Final = "drafts"
ATTESTATIONS: Final = "attestations"
INPUTS: Final = "inputs"
CONDEMNED: Final = "condemned"
PACK_LISTS: Final = "packlists"
# Prefixes of attestation names: a seal, a publisher's statement, the bundle that a statement names.
SEAL_PREFIX: Final = "seal-"
ORIGIN_PREFIX: Final = "origin-"
BUNDLE_PREFIX: Final = "bundle-"
TENSORS_SUFFIX: Final = ".tensors"  # suffix of a tensorizer file, and of the pack that keeps such a file unchanged
_OBJECT: Final = re.compile(
    r"[^/]+/(?:"
    rf"(?:{PACKS}|{INDEX})/[0-9a-f]{{64}}(?:{re.escape(TENSORS_SUFFIX)})?"
    rf"|(?:{MANIFESTS}|{DRAFTS}|{INPUTS}|{CONDEMNED}|{PACK_LISTS})/[0-9a-f]{{64}}"
    rf"|{ATTESTATIONS}/[0-9a-f]{{64}}/(?:{SEAL_PREFIX}|{ORIGIN_PREFIX}|{BUNDLE_PREFIX})[0-9a-f]{{16}}"
    r")"
)


def is_object_key(key: str) -> bool:
    """Return whether an object of the format can have this key. A caller that lists a prefix skips all other keys: a
    stray file is no reason to stop.
    """
    return _OBJECT.fullmatch(key) is not None


def object_name(key: str) -> str:
    """Return the part after the last slash. For most objects this is the digest."""
    return key.rsplit("/", 1)[1]


def objects_prefix(tenant: str, kind: str) -> str:
    """Return the prefix of all objects of one kind (`PACKS`, ...)."""
    return f"{tenant}/{kind}/"


def pack_key(tenant: str, pack: str) -> str:
    """Return the key of a pack: chunks, and a footer that locates them. `pack` is the BLAKE3 digest of the whole
    object.

    For a file that is kept unchanged, `pack` is the file's digest with `TENSORS_SUFFIX`, and there is no footer.
    """
    return f"{tenant}/{PACKS}/{pack}"


def index_key(tenant: str, pack: str) -> str:
    """Return the key of a pack's index, which locates the pack's chunks. The index is written after the pack. An index
    can be rebuilt from the pack's footer, except for a file that is kept unchanged.
    """
    return f"{tenant}/{INDEX}/{pack}"


def manifest_key(tenant: str, version: str) -> str:
    """Return the key of the canonical manifest. It is written last: the version exists once this object exists."""
    return f"{tenant}/{MANIFESTS}/{version}"


def draft_key(tenant: str, version: str) -> str:
    """Return the key of the draft manifest, which sealing jobs read. It is deleted once the manifest is written."""
    return f"{tenant}/{DRAFTS}/{version}"


def attestations_prefix(tenant: str, version: str) -> str:
    """Return the prefix of all attestations of a version."""
    return f"{tenant}/{ATTESTATIONS}/{version}/"


def attestation_key(tenant: str, version: str, fingerprint: Fingerprint) -> str:
    """Return the key of a version's `SealAttestation` for one engine fingerprint."""
    return f"{attestations_prefix(tenant, version)}{SEAL_PREFIX}{fingerprint_digest(fingerprint)}"


def origin_key(tenant: str, version: str, raw: bytes) -> str:
    """Return the key of a publisher's statement, derived from its bytes."""
    return f"{attestations_prefix(tenant, version)}{ORIGIN_PREFIX}{_short(raw)}"


def bundle_key(tenant: str, version: str, raw: bytes) -> str:
    """Return the key of an OpenSSF bundle of an exported version, derived from the bundle's bytes."""
    return f"{attestations_prefix(tenant, version)}{BUNDLE_PREFIX}{_short(raw)}"


def inputs_key(tenant: str, digest: str) -> str:
    """Return the key of the object that names the version made from these inputs and sealing options."""
    return f"{tenant}/{INPUTS}/{digest}"


def condemned_key(tenant: str, version: str) -> str:
    """Return the key of the empty marker that the first garbage collection without a model for the version writes. The
    marker's age decides when the grace period is over.
    """
    return f"{tenant}/{CONDEMNED}/{version}"


def pack_list_key(tenant: str, version: str) -> str:
    """Return the key of the list of packs that hold the version's chunks. A hint that saves reading all indexes."""
    return f"{tenant}/{PACK_LISTS}/{version}"


def fingerprint_digest(fingerprint: Fingerprint) -> str:
    """Return 16 hex digits of the BLAKE3 digest of the fingerprint's canonical JSON (sorted keys, no spaces)."""
    return _short(msgspec.json.encode(fingerprint, order="sorted"))


def _short(raw: bytes) -> str:
    return blake3(raw).hexdigest()[:16]
