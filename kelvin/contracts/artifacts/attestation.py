"""Signed statements about a version, stored beside its manifest. See `docs/snapshot-format.md`.

A statement is an in-toto Statement v1. Its subject is the version's digest, so it can't be moved to another version.
The envelope is DSSE v1: the signature covers the payload's type and bytes. Both must be canonical JSON (keys sorted, no
spaces), so any changed byte is detected.

A key's id is the public key itself, so checking a signature needs no list of keys. Trust in a key is decided elsewhere.
Two algorithms are supported: Ed25519 (RFC 8032), and ECDSA over P-256 with SHA-256 (FIPS 186-5). P-256 is for keys that
are shared with tools which know no other curve.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from msgspec import Meta

from kelvin.contracts.artifact_errors import AttestationInvalid
from kelvin.contracts.artifacts.manifest import Digest
from kelvin.contracts.artifacts.runtime_control import SealAttestation
from kelvin.contracts.errors import Refused
from kelvin.contracts.wire import BadJson, Wire, decode_any, decoder

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
SEAL_TYPE: Final = "urn:kelvin:attestation:seal:1"
ORIGIN_TYPE: Final = "urn:kelvin:attestation:origin:1"
MAX_ORIGIN_BYTES: Final = 64 << 10  # size limit of an envelope
MAX_BUNDLE_BYTES: Final = 1 << 20
_ENVELOPE_START: Final = b'{"payload":'  # A canonical envelope begins with this; an unsigned seal never does.

ED25519: Final = "ed25519"
P256: Final = "ecdsa-p256"
SUPPORTED_KEYS: Final = "Ed25519, or ECDSA over P-256"

KeyId = Annotated[str, Meta(pattern=r"^(ed25519:[0-9a-f]{64}|ecdsa-p256:0[23][0-9a-f]{64})$(?!\n)")]
ClaimText = Annotated[str, Meta(min_length=1, max_length=1000)]


class TrainingData(Wire, frozen=True, omit_defaults=True):
    """Name and digests of the training data, as stated by the publisher."""

    name: ClaimText | None = None
    sha256: Digest | None = None
    blake3: Digest | None = None


class Claims(Wire, frozen=True, omit_defaults=True):
    """A publisher's claims about a version. `licence` is an SPDX expression; metrics were measured offline."""

    licence: ClaimText | None = None
    training_data: TrainingData | None = None
    metrics: dict[ClaimText, float] = msgspec.field(default_factory=dict)
    provenance: dict[ClaimText, ClaimText] = msgspec.field(default_factory=dict)


class OriginPredicate(Wire, frozen=True, omit_defaults=True):
    """The predicate of a publisher's statement. `bundle` is the BLAKE3 digest of an OpenSSF bundle of the same key."""

    signed_at_s: int
    claims: Claims
    bundle: Digest | None = None


class _Subject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    digest: dict[Literal["blake3"], Digest]


class _Statement(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    rename={"type": "_type", "predicate_type": "predicateType"},
):
    type: Literal["https://in-toto.io/Statement/v1"]
    subject: tuple[_Subject]
    predicate_type: str
    predicate: msgspec.Raw


class _Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keyid: KeyId
    sig: bytes


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"payload_type": "payloadType"}):
    payload: bytes  # base64 in JSON
    payload_type: Literal["application/vnd.in-toto+json"]
    signatures: tuple[_Signature]


@dataclass(frozen=True, slots=True)
class VerifiedEnvelope:
    """An envelope that `key_id` signed, and whose subject is the version that it was opened for."""

    key_id: str
    kind: str  # the predicate's type
    predicate: bytes


@dataclass(frozen=True, slots=True)
class SealRecord:
    """The result of sealing, and the id of the key that signed it. None: unsigned, as in early stores."""

    seal: SealAttestation
    key_id: str | None


def key_id_of(public: object) -> str:
    """Return `ed25519:` and 32 bytes, or `ecdsa-p256:` and the compressed point, in hex. Raises ValueError."""
    match public:
        case Ed25519PublicKey():
            return f"{ED25519}:{public.public_bytes(Encoding.Raw, PublicFormat.Raw).hex()}"
        case ec.EllipticCurvePublicKey() if isinstance(public.curve, ec.SECP256R1):
            point = public.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
            return f"{P256}:{point.hex()}"
        case _:
            raise ValueError(f"must be a key of {SUPPORTED_KEYS}")


def is_signed_by(key_id: str, message: bytes, signature: bytes) -> bool:
    """Return whether `signature` is that key's signature of `message`. False if `key_id` is not a valid key."""
    kind, _, digits = key_id.partition(":")
    try:
        raw = bytes.fromhex(digits)
        if kind == ED25519:
            Ed25519PublicKey.from_public_bytes(raw).verify(signature, message)
        elif kind == P256:
            public = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), raw)
            public.verify(signature, message, ec.ECDSA(SHA256()))
        else:
            return False
    except (InvalidSignature, ValueError):
        return False
    return True


def encode_statement(version: str, kind: str, predicate: Wire) -> bytes:
    """Return the canonical payload of a statement about a version."""
    fields: dict[str, Any] = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "version", "digest": {"blake3": version}}],
        "predicateType": kind,
        "predicate": predicate,
    }
    return msgspec.json.encode(fields, order="sorted")


def pre_authentication_encoding(payload: bytes) -> bytes:
    """Return DSSE's pre-authentication encoding of a payload."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def encode_envelope(payload: bytes, key_id: str, signature: bytes) -> bytes:
    """Return the canonical bytes of an envelope with one signature."""
    signed = _Envelope(payload, PAYLOAD_TYPE, (_Signature(key_id, signature),))
    return msgspec.json.encode(signed, order="sorted")


def open_envelope(raw: bytes, version: str) -> VerifiedEnvelope:
    """Check form, signature and subject, but not trust. Raises `Refused(AttestationInvalid)`."""
    try:
        found = decoder(_Envelope).decode(raw)
        statement = decoder(_Statement).decode(found.payload)
        recoded = msgspec.json.encode(decode_any(found.payload), order="sorted")
    except BadJson as error:
        raise Refused(AttestationInvalid(version, f"it does not decode: {error}")) from error
    if msgspec.json.encode(found, order="sorted") != raw or recoded != found.payload:
        raise Refused(AttestationInvalid(version, "it is not in canonical form"))
    (signature,) = found.signatures
    if not is_signed_by(signature.keyid, pre_authentication_encoding(found.payload), signature.sig):
        raise Refused(AttestationInvalid(version, f"its signature is not that of {shorten_key_id(signature.keyid)}"))
    (subject,) = statement.subject
    if (about := subject.digest.get("blake3")) != version:
        raise Refused(AttestationInvalid(version, f"it speaks of version {about}"))
    return VerifiedEnvelope(signature.keyid, statement.predicate_type, bytes(statement.predicate))


def read_seal(raw: bytes, version: str) -> SealRecord:
    """Decode a stored seal, signed or unsigned. Raises `Refused(AttestationInvalid)`."""
    if not raw.startswith(_ENVELOPE_START):
        return SealRecord(_decode_seal(raw, version), None)
    opened = open_envelope(raw, version)
    if opened.kind != SEAL_TYPE:
        raise Refused(AttestationInvalid(version, "it is no seal"))
    return SealRecord(_decode_seal(opened.predicate, version), opened.key_id)


def read_origin(raw: bytes, version: str) -> tuple[OriginPredicate, str]:
    """Return a publisher's statement and the id of its key. Raises `Refused(AttestationInvalid)`."""
    opened = open_envelope(raw, version)
    if opened.kind != ORIGIN_TYPE:
        raise Refused(AttestationInvalid(version, "it does not say where the version comes from"))
    try:
        return decoder(OriginPredicate).decode(opened.predicate), opened.key_id
    except BadJson as error:
        raise Refused(AttestationInvalid(version, f"it does not decode: {error}")) from error


def shorten_key_id(key_id: str) -> str:
    """Return the key id with its first 16 hex digits only, for messages."""
    kind, _, digits = key_id.partition(":")
    return f"{kind}:{digits[:16]}"


def _decode_seal(raw: bytes, version: str) -> SealAttestation:
    try:
        seal = decoder(SealAttestation).decode(raw)
    except BadJson as error:
        raise Refused(AttestationInvalid(version, f"it does not decode: {error}")) from error
    if seal.version != version:
        raise Refused(AttestationInvalid(version, f"it speaks of version {seal.version}"))
    return seal
