"""A signed statement is about one version and by one key. It can't be changed or moved to another version."""

import base64
import json
from collections.abc import Callable

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kelvin.contracts.artifact_errors import AttestationInvalid
from kelvin.contracts.artifacts.attestation import (
    ORIGIN_TYPE,
    SEAL_TYPE,
    Claims,
    OriginPredicate,
    TrainingData,
    encode_statement,
    is_signed_by,
    key_id_of,
    open_envelope,
    pre_authentication_encoding,
    read_origin,
    read_seal,
)
from kelvin.contracts.errors import Refused
from kelvin.contracts.wire import encode
from kelvin.crypto.signing_keys import Signer
from tests.weightcache.kit import attestation_of

VERSION, OTHER = "a" * 64, "b" * 64
SIGNERS = {
    "ed25519": Signer(Ed25519PrivateKey.generate()),
    "p-256": Signer(ec.generate_private_key(ec.SECP256R1())),
}
CLAIMS = Claims(
    licence="Apache-2.0",
    training_data=TrainingData(name="books", sha256="c" * 64),
    metrics={"perplexity": 12.5, "accuracy": 1.0, "tiny": 1e-9},
    provenance={"commit": "größer"},
)
SAID = OriginPredicate(signed_at_s=1_795_000_000, claims=CLAIMS)


def reason_of(raw: bytes, version: str = VERSION) -> str:
    with pytest.raises(Refused) as caught:
        open_envelope(raw, version)
    assert isinstance(caught.value.failure, AttestationInvalid)
    assert caught.value.failure.version == version
    return caught.value.failure.reason


@pytest.mark.parametrize("signer", SIGNERS.values(), ids=SIGNERS)
def test_statement_and_key_id_round_trip(signer: Signer) -> None:
    """The statement and the id of its key are read back."""
    assert read_origin(signer.attest(VERSION, ORIGIN_TYPE, SAID), VERSION) == (SAID, signer.key_id)
    sealed = read_seal(signer.attest(VERSION, SEAL_TYPE, attestation_of(VERSION)), VERSION)
    assert (sealed.seal, sealed.key_id) == (attestation_of(VERSION), signer.key_id)


@pytest.mark.parametrize("signer", SIGNERS.values(), ids=SIGNERS)
def test_every_byte_counts(signer: Signer) -> None:
    """An envelope with one changed bit, in any byte, is refused."""
    raw = signer.attest(VERSION, ORIGIN_TYPE, SAID)
    for at in range(len(raw)):
        reason_of(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])


def test_envelope_follows_in_toto_and_dsse() -> None:
    """Other programs can read the envelope: its fields and the signed encoding follow both specifications."""
    signer = SIGNERS["ed25519"]
    envelope = json.loads(signer.attest(VERSION, ORIGIN_TYPE, SAID))
    payload = base64.b64decode(envelope["payload"])
    said = json.loads(payload)
    assert envelope["payloadType"] == "application/vnd.in-toto+json"
    assert said["_type"] == "https://in-toto.io/Statement/v1"
    assert said["subject"] == [{"name": "version", "digest": {"blake3": VERSION}}]
    assert said["predicate"]["claims"]["licence"] == "Apache-2.0"
    (signature,) = envelope["signatures"]
    signed = b"DSSEv1 28 application/vnd.in-toto+json " + str(len(payload)).encode() + b" " + payload
    assert signed == pre_authentication_encoding(payload)
    assert is_signed_by(signature["keyid"], signed, base64.b64decode(signature["sig"]))


def test_statement_of_another_version_is_refused() -> None:
    """A statement that is moved to another version is refused."""
    assert reason_of(SIGNERS["p-256"].attest(OTHER, ORIGIN_TYPE, SAID)) == f"it speaks of version {OTHER}"


Change = Callable[[dict[str, object]], object]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(lambda e: e | {"signatures": []}, "does not decode", id="no signature"),
        pytest.param(lambda e: e | {"more": 1}, "does not decode", id="another field"),
        pytest.param(lambda e: e | {"payloadType": "text/plain"}, "does not decode", id="another type"),
        pytest.param(
            lambda e: e | {"signatures": [{"keyid": SIGNERS["p-256"].key_id, "sig": e["signatures"][0]["sig"]}]},
            "its signature is not that of ecdsa-p256",
            id="another key's id",
        ),
        pytest.param(
            lambda e: e | {"signatures": [{"keyid": "ed25519:" + "0" * 64, "sig": e["signatures"][0]["sig"]}]},
            "its signature is not that of",
            id="an invalid key id",
        ),
        pytest.param(lambda e: json.dumps(e, indent=1), "canonical", id="spaces"),
    ],
)
def test_forged_envelope_is_refused(change: Change, reason: str) -> None:
    """Each forged envelope is refused with the reason."""
    changed = change(json.loads(SIGNERS["ed25519"].attest(VERSION, ORIGIN_TYPE, SAID)))
    raw = changed if isinstance(changed, str) else json.dumps(changed, sort_keys=True, separators=(",", ":"))
    assert reason in reason_of(raw.encode())


def test_non_canonical_payload_is_refused() -> None:
    """A payload in non-canonical form is refused even if its signature is valid."""
    signer = SIGNERS["ed25519"]
    payload = encode_statement(VERSION, ORIGIN_TYPE, SAID).replace(b'"_type":', b'"_type": ')
    fields = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": "application/vnd.in-toto+json",
        "signatures": [
            {
                "keyid": signer.key_id,
                "sig": base64.b64encode(signer.sign(pre_authentication_encoding(payload))).decode(),
            }
        ],
    }
    assert "canonical" in reason_of(msgspec.json.encode(fields, order="sorted"))


def test_origin_statement_is_no_seal() -> None:
    """An origin statement is not read as a seal, nor a seal as an origin statement. Unknown fields are refused."""
    signer = SIGNERS["ed25519"]
    with pytest.raises(Refused, match="it is no seal"):
        read_seal(signer.attest(VERSION, ORIGIN_TYPE, SAID), VERSION)
    with pytest.raises(Refused, match="does not say where"):
        read_origin(signer.attest(VERSION, SEAL_TYPE, attestation_of(VERSION)), VERSION)
    with pytest.raises(Refused, match="does not decode"):
        read_origin(signer.attest(VERSION, ORIGIN_TYPE, attestation_of(VERSION)), VERSION)


def test_unsigned_seal_opens_without_key_id() -> None:
    """A seal of an early store, which is unsigned, is read with key id None."""
    sealed = read_seal(encode(attestation_of(VERSION)), VERSION)
    assert (sealed.seal, sealed.key_id) == (attestation_of(VERSION), None)
    with pytest.raises(Refused, match="it speaks of version"):
        read_seal(encode(attestation_of(OTHER)), VERSION)
    with pytest.raises(Refused, match="speaks of version b"):
        read_seal(SIGNERS["ed25519"].attest(VERSION, SEAL_TYPE, attestation_of(OTHER)), VERSION)


def test_other_keys_are_refused() -> None:
    """RSA keys and other curves have no key id."""
    for private in (rsa.generate_private_key(65537, 2048), ec.generate_private_key(ec.SECP384R1())):
        with pytest.raises(ValueError, match="Ed25519, or ECDSA over P-256"):
            key_id_of(private.public_key())
    assert not is_signed_by("rsa:00", b"", b"")
    assert not is_signed_by("ed25519:zz", b"", b"")
