"""Keys that sign attestations, and whether a signature is theirs. A key's id is the public key itself.

Two kinds: Ed25519 (RFC 8032), and ECDSA over P-256 with SHA-256 (FIPS 186-5) for who shares a key with tools that know
elliptic curves alone. As the id is the key, a signature can be checked by whoever has it; whether the key is to be
trusted is another question.
"""

from typing import Annotated, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from msgspec import Meta

ED25519: Final = "ed25519"
P256: Final = "ecdsa-p256"
KeyId = Annotated[str, Meta(pattern=r"^(ed25519:[0-9a-f]{64}|ecdsa-p256:0[23][0-9a-f]{64})$(?!\n)")]
KINDS: Final = "Ed25519, or ECDSA over P-256"


def key_id_of(public: object) -> str:
    """`ed25519:` and 32 bytes, or `ecdsa-p256:` and the compressed point, in hex. Raises ValueError for other keys."""
    match public:
        case Ed25519PublicKey():
            return f"{ED25519}:{public.public_bytes(Encoding.Raw, PublicFormat.Raw).hex()}"
        case ec.EllipticCurvePublicKey() if isinstance(public.curve, ec.SECP256R1):
            point = public.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
            return f"{P256}:{point.hex()}"
        case _:
            raise ValueError(f"must be a key of {KINDS}")


def is_signed_by(key_id: str, message: bytes, signature: bytes) -> bool:
    """Whether `signature` is that key's over `message`; an id that is no key has signed nothing."""
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
