"""Signatures beside a manifest: seals by the installation, statements by publishers. Forgeries are refused."""

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from kelvin.cli.artifacts.progress import Progress
from kelvin.cli.artifacts.push import push_directory
from kelvin.contracts.artifacts.attestation import MAX_ORIGIN_BYTES, ORIGIN_TYPE, Claims, OriginPredicate, read_seal
from kelvin.contracts.artifacts.push_api import AttestationList, AttestRequest, KeepSeal
from kelvin.contracts.artifacts.runtime_control import SealAttestation
from kelvin.contracts.errors import Refused
from kelvin.contracts.wire import decode, encode
from kelvin.crypto.signing_keys import Signer
from kelvin.crypto.trust_roots import INSTALLATION
from snapshotter.store import attestation_store as module
from snapshotter.store import exports
from tests.snapshotter.bench import Bench, push
from tests.snapshotter.house import House, announce_digests, make_plan, open_house, settings_for
from tests.snapshotter.models import Model
from tests.snapshotter.sender import TENANT, digests_of

PRIVATE = Ed25519PrivateKey.generate()
PUBLISHER = Signer(PRIVATE)
BUNDLE = b'{"a": "bundle"}'
CLAIMS = Claims(licence="Apache-2.0", metrics={"perplexity": 3.25})


def statement(bundle: bytes | None = None, signed_at_s: int = 1) -> OriginPredicate:
    return OriginPredicate(
        signed_at_s=signed_at_s, claims=CLAIMS, bundle=None if bundle is None else blake3(bundle).hexdigest()
    )


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    data = tmp_path / "data"
    (data / "trust").mkdir(parents=True)
    pem = PRIVATE.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (data / "trust" / "release.pem").write_bytes(pem)
    with open_house(settings_for(data)) as opened:
        yield opened


def open_model_push(client: httpx.Client, model: Model) -> tuple[str, str]:
    """Open a push. Return its id and version."""
    plan = make_plan(client, model)
    missing = announce_digests(client, plan, digests_of(plan, model.files()))
    return missing.plan_id, missing.version


def attest(client: httpx.Client, push_id: str, envelope: bytes, bundle: bytes | None = None) -> httpx.Response:
    body = encode(AttestRequest(envelope=envelope, bundle=bundle))
    return client.post(f"/push/v1/plans/{push_id}/attestations", content=body)


def entries(client: httpx.Client, version: str) -> dict[str, tuple[str | None, str | None]]:
    """Return the kind of each attestation, with its trusted signer and its fault."""
    answer = client.get(f"/push/v1/versions/{version}/attestations").raise_for_status()
    found = decode(answer.content, AttestationList).attestations
    return {each.name.split("-")[0]: (each.trusted_as, each.fault) for each in found}


def push_model(house: House, client: httpx.Client, tmp_path: Path) -> str:
    return push_directory(Model().write(tmp_path / "model"), "toy", client, Progress()).committed.version


def test_statement_is_accepted_before_its_version(house: House, tmp_path: Path) -> None:
    """A statement is accepted while the push is open, and is listed with the version and its signer."""
    with house.client() as client:
        push_id, version = open_model_push(client, Model())
        assert client.get(f"/push/v1/versions/{version}/attestations").status_code == 404
        raw = client.get(f"/push/v1/plans/{push_id}/manifest").content
        assert blake3(raw).hexdigest() == version
        for _ in range(2):  # a repeat changes nothing
            envelope = PUBLISHER.attest(version, ORIGIN_TYPE, statement(BUNDLE))
            assert attest(client, push_id, envelope, BUNDLE).status_code == 204
        assert client.get(f"/push/v1/manifests/{version}").status_code == 404  # not lost: it was never there
        assert push_model(house, client, tmp_path) == version
        found = entries(client, version)
        assert found == {"seal": (INSTALLATION, None), "origin": ("release", None), "bundle": (None, None)}


@pytest.mark.parametrize(
    ("version", "origin", "bundle", "reason"),
    [
        pytest.param("f" * 64, statement(), None, "it speaks of version fff", id="a statement of another version"),
        pytest.param(None, statement(), BUNDLE, "the bundle is not the one", id="an unnamed bundle"),
        pytest.param(None, statement(BUNDLE), None, "the bundle is not the one", id="a missing bundle"),
        pytest.param(None, statement(BUNDLE), BUNDLE + b" ", "the bundle is not the one", id="another bundle"),
        pytest.param(
            None,
            OriginPredicate(signed_at_s=1, claims=Claims(provenance={f"k{n}": "v" * 1000 for n in range(70)})),
            None,
            f"more than {MAX_ORIGIN_BYTES} bytes",
            id="a statement that is too large",
        ),
    ],
)
def test_invalid_statement_is_refused(
    house: House, version: str | None, origin: OriginPredicate, bundle: bytes | None, reason: str
) -> None:
    """The statement is refused with its fault, and nothing of it is stored."""
    with house.client() as client:
        push_id, own = open_model_push(client, Model())
        answer = attest(client, push_id, PUBLISHER.attest(version or own, ORIGIN_TYPE, origin), bundle)
        assert (answer.status_code, answer.json()["code"]) == (422, "artifact_rejected")
        assert reason in answer.json()["detail"]
        assert not (house.store / TENANT / "attestations").exists()


def test_forged_statement_is_refused(house: House) -> None:
    """A statement under another key's name, or with a licence that was not signed, is refused."""
    with house.client() as client:
        push_id, version = open_model_push(client, Model())
        good = PUBLISHER.attest(version, ORIGIN_TYPE, statement())
        stranger = Signer(Ed25519PrivateKey.generate())
        envelope = msgspec.json.decode(good)
        changed = base64.b64decode(envelope["payload"]).replace(b"Apache-2.0", b"Apache-2.1")
        envelope["payload"] = base64.b64encode(changed).decode()
        forged = msgspec.json.encode(envelope, order="sorted")
        for raw in (good.replace(PUBLISHER.key_id.encode(), stranger.key_id.encode()), forged):
            answer = attest(client, push_id, raw)
            assert answer.status_code == 422
            assert "its signature is not that of" in answer.json()["detail"]
        assert attest(client, push_id, good).status_code == 204


def test_statement_before_the_declaration_is_refused(house: House) -> None:
    """A plan without declared chunks has no version yet that could be signed."""
    with house.client() as client:
        plan = client.post("/push/v1/plans", content=encode(Model().request())).json()["plan_id"]
        assert client.get(f"/push/v1/plans/{plan}/manifest").status_code == 409
        assert attest(client, plan, PUBLISHER.attest("f" * 64, ORIGIN_TYPE, statement())).status_code == 409
        assert client.get("/push/v1/versions/x/attestations").status_code == 404


def test_statements_are_bounded(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statements about one version are bounded, and stored ones may be repeated."""
    monkeypatch.setattr(module, "MAX_ORIGINS", 2)
    with house.client() as client:
        push_id, version = open_model_push(client, Model())
        raws = [PUBLISHER.attest(version, ORIGIN_TYPE, statement(signed_at_s=at)) for at in range(3)]
        assert [attest(client, push_id, raw).status_code for raw in (*raws, raws[0])] == [204, 204, 507, 204]


def test_answers_count_in_the_memory_for_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version may have 34 MiB of statements. Otherwise clients that do not read would fill the memory."""
    with open_house(settings_for(tmp_path / "data")) as house, house.client() as client:
        version = push_model(house, client, tmp_path)
        paths = f"/push/v1/versions/{version}/attestations", f"/push/v1/manifests/{version}"
        assert [client.get(path).status_code for path in paths] == [200, 200]
    monkeypatch.setattr(exports, "BUDGET_BYTES", 2)
    with open_house(settings_for(tmp_path / "data")) as house, house.client() as client:
        assert [client.get(path).status_code for path in paths] == [503, 503]


def other_engine(seal: SealAttestation) -> SealAttestation:
    return msgspec.structs.replace(seal, fingerprint=msgspec.structs.replace(seal.fingerprint, torch="99"))


def keep(client: httpx.Client, seal: SealAttestation, tenant: str = TENANT) -> int:
    body = encode(KeepSeal(tenant=tenant, seal=seal))
    return client.post("/internal/v1/seals", content=body).status_code


def seals_of(house: House, version: str) -> list[SealAttestation]:
    paths = sorted((house.store / TENANT / "attestations" / version).glob("seal-*"))
    return [read_seal(path.read_bytes(), version).seal for path in paths]


def test_a_replicas_seal_is_kept_once(house: House, tmp_path: Path) -> None:
    """A replica's seal of another engine is signed and kept. The first seal of an engine is never replaced."""
    with house.client() as client:
        version = push_model(house, client, tmp_path)
        (first,) = seals_of(house, version)
        other = other_engine(first)
        assert keep(client, other) == 204
        wider = msgspec.structs.replace(other, probe=msgspec.structs.replace(other.probe, tolerance=1e9))
        assert keep(client, wider) == 204
        found = seals_of(house, version)
        assert other in found
        assert first in found
        assert wider not in found
        assert keep(client, msgspec.structs.replace(other, version="f" * 64)) == 404
        assert keep(client, other, "nobody") == 404


def test_push_replaces_an_untrusted_seal(tmp_path: Path) -> None:
    """A push replaces a seal without a valid signature, and keeps a valid one."""
    bench = Bench.over(tmp_path)
    version = push(bench, Model()).version
    (path,) = (tmp_path / "store" / TENANT / "attestations" / version).iterdir()
    signed = path.read_bytes()
    push(Bench.over(tmp_path), Model())
    assert path.read_bytes() == signed
    seal = read_seal(signed, version).seal
    for raw in (encode(seal), Signer(Ed25519PrivateKey.generate()).attest(version, ORIGIN_TYPE, statement()), b"{}"):
        path.write_bytes(raw)
        again = Bench.over(tmp_path)
        push(again, Model())
        assert len(again.jobs.seals) == 1
        assert read_seal(path.read_bytes(), version).key_id is not None


def test_fsck_checks_statements(house: House, tmp_path: Path) -> None:
    """A flipped byte, a moved statement, and a bundle that no statement names are found under their keys."""
    with house.client() as client:
        push_id, version = open_model_push(client, Model())
        attest(client, push_id, PUBLISHER.attest(version, ORIGIN_TYPE, statement(BUNDLE)), BUNDLE)
        push_model(house, client, tmp_path)
        directory = house.store / TENANT / "attestations" / version

        def findings() -> dict[str, str]:
            lines = client.post("/push/v1/fsck").text.splitlines()
            found = [msgspec.json.decode(line) for line in lines]
            return {each["key"].rsplit("/", 1)[1]: each["fault"] for each in found if each["type"] == "finding"}

        assert findings() == {}
        (origin,), (bundle,) = directory.glob("origin-*"), directory.glob("bundle-*")
        raw = origin.read_bytes()
        origin.chmod(0o600)
        origin.write_bytes(raw[:-5] + bytes([raw[-5] ^ 1]) + raw[-4:])
        found = findings()
        assert found.keys() == {origin.name, bundle.name}
        assert "no statement of a publisher names it" in found[bundle.name]
        origin.write_bytes(raw)
        (directory / f"origin-{'0' * 16}").write_bytes(raw)
        assert "its name is not that of" in findings()[f"origin-{'0' * 16}"]


def test_seal_of_another_version_is_refused(tmp_path: Path) -> None:
    """A seal of another version than requested is refused."""
    bench = Bench.over(tmp_path)
    version = push(bench, Model()).version
    (path,) = (tmp_path / "store" / TENANT / "attestations" / version).iterdir()
    seal = read_seal(path.read_bytes(), version).seal
    with pytest.raises(Refused, match="another version"):
        asyncio.run(bench.pushes._attestations.store_seal(TENANT, "f" * 64, seal))
