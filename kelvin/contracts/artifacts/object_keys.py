"""Where each object of a tenant lies in the object store. Part of the format: see `docs/snapshot-format.md`. Pure."""

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
# How names of attestations begin: a seal, a publisher's statement, the bundle that a statement names.
SEAL_PREFIX: Final = "seal-"
ORIGIN_PREFIX: Final = "origin-"
BUNDLE_PREFIX: Final = "bundle-"
TENSORS_SUFFIX: Final = ".tensors"  # of a tensorizer file, and of the pack that keeps one as it was pushed
_OBJECT: Final = re.compile(
    r"[^/]+/(?:"
    rf"(?:{PACKS}|{INDEX})/[0-9a-f]{{64}}(?:{re.escape(TENSORS_SUFFIX)})?"
    rf"|(?:{MANIFESTS}|{DRAFTS}|{INPUTS}|{CONDEMNED}|{PACK_LISTS})/[0-9a-f]{{64}}"
    rf"|{ATTESTATIONS}/[0-9a-f]{{64}}/(?:{SEAL_PREFIX}|{ORIGIN_PREFIX}|{BUNDLE_PREFIX})[0-9a-f]{{16}}"
    r")"
)


def is_object_key(key: str) -> bool:
    """Return whether an object of the format can have this key. Whoever lists a prefix passes over all others: a
    stray file is no reason to stop.
    """
    return _OBJECT.fullmatch(key) is not None


def object_name(key: str) -> str:
    """Return what follows the last slash: the digest of most objects."""
    return key.rsplit("/", 1)[1]


def objects_prefix(tenant: str, kind: str) -> str:
    """All objects of one kind (`PACKS`, ...) lie below this."""
    return f"{tenant}/{kind}/"


def pack_key(tenant: str, pack: str) -> str:
    """Chunks and a footer that says where they lie; `pack` is the BLAKE3 digest of the whole object.

    For a file that is kept as it was pushed, `pack` is the file's digest and `TENSORS_SUFFIX`, and there is no footer.
    """
    return f"{tenant}/{PACKS}/{pack}"


def index_key(tenant: str, pack: str) -> str:
    """Where the chunks of a pack lie; written after the pack. Rebuildable from its footer, but for a kept file."""
    return f"{tenant}/{INDEX}/{pack}"


def manifest_key(tenant: str, version: str) -> str:
    """The canonical manifest; written last: a version exists from the moment this object does."""
    return f"{tenant}/{MANIFESTS}/{version}"


def draft_key(tenant: str, version: str) -> str:
    """The same bytes while sealing jobs run; deleted once the manifest is there."""
    return f"{tenant}/{DRAFTS}/{version}"


def attestations_prefix(tenant: str, version: str) -> str:
    """All attestations of a version lie below this."""
    return f"{tenant}/{ATTESTATIONS}/{version}/"


def attestation_key(tenant: str, version: str, fingerprint: Fingerprint) -> str:
    """The `SealAttestation` of a version under one engine fingerprint."""
    return f"{attestations_prefix(tenant, version)}{SEAL_PREFIX}{fingerprint_digest(fingerprint)}"


def origin_key(tenant: str, version: str, raw: bytes) -> str:
    """A publisher's statement about a version, by its bytes."""
    return f"{attestations_prefix(tenant, version)}{ORIGIN_PREFIX}{_short(raw)}"


def bundle_key(tenant: str, version: str, raw: bytes) -> str:
    """An OpenSSF bundle of an export of the version, by its bytes."""
    return f"{attestations_prefix(tenant, version)}{BUNDLE_PREFIX}{_short(raw)}"


def inputs_key(tenant: str, digest: str) -> str:
    """Holds the version that a push of these inputs and sealing options became."""
    return f"{tenant}/{INPUTS}/{digest}"


def condemned_key(tenant: str, version: str) -> str:
    """Empty; put by the first collection that found no model to name the version. Its age is what grace counts."""
    return f"{tenant}/{CONDEMNED}/{version}"


def pack_list_key(tenant: str, version: str) -> str:
    """The names of packs that hold the version's chunks: a hint that spares readers all other indexes."""
    return f"{tenant}/{PACK_LISTS}/{version}"


def fingerprint_digest(fingerprint: Fingerprint) -> str:
    """The first 16 hex digits of the BLAKE3 digest of its canonical JSON (sorted keys, no spaces)."""
    return _short(msgspec.json.encode(fingerprint, order="sorted"))


def _short(raw: bytes) -> str:
    return blake3(raw).hexdigest()[:16]
