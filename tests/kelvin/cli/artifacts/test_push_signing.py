"""A push signs only the version of the local files. `kelvin show` prints the signed claims and the key."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import structs

from kelvin.cli.artifacts.export_command import export_command
from kelvin.cli.artifacts.progress import Progress
from kelvin.cli.artifacts.push import push_directory
from kelvin.cli.artifacts.push_command import push_command
from kelvin.cli.artifacts.push_signing import SIGNATURE_FILE, PushSigner, read_claims, read_key
from kelvin.cli.artifacts.push_source import scan
from kelvin.cli.artifacts.source_match_policy import LinearSpace, find_mismatch
from kelvin.cli.models.version_commands import show_command
from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.manifest import Manifest, decode_manifest, encode_manifest, version_of
from kelvin.contracts.artifacts.push_api import Plan, PlannedChunk
from kelvin.contracts.errors import Refused
from snapshotter.intake.policy.intake import admit
from tests.kelvin.cli.artifacts.test_push import FAST
from tests.kelvin.cli_targets import SnapshotterTarget
from tests.kelvin.crypto.test_signing_keys import Private, pem_of, public_pem_of
from tests.snapshotter.house import TENANT, House, open_house, settings_for
from tests.snapshotter.models import Model, default_weights, resharded

SHARDED = Model(shards=resharded(default_weights(), 2, seed=3))
CLAIMS = """
licence = "Apache-2.0"

[training_data]
name = "books"
sha256 = "cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc"

[metrics]
perplexity = 12.5
accuracy = 1

[provenance]
repository = "https://example.com/toy"
commit = "deadbeef"
"""


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    private = Ed25519PrivateKey.generate()
    trust(tmp_path / "data", private)
    (tmp_path / "key.pem").write_bytes(pem_of(private))
    (tmp_path / "claims.toml").write_text(CLAIMS)
    with open_house(settings_for(tmp_path / "data")) as opened:
        yield opened


def trust(data: Path, private: Private) -> None:
    (data / "trust").mkdir(parents=True, exist_ok=True)
    (data / "trust" / "release.pem").write_bytes(public_pem_of(private))


def run(house: House, command: Any, *arguments: str) -> Result:
    return CliRunner().invoke(command, arguments, obj=SnapshotterTarget(house))


def signed_push(house: House, tmp_path: Path, model: Model = SHARDED, *more: str) -> str:
    """Push the model with a signature and return the version."""
    directory = str(model.write(tmp_path / "model"))
    done = run(house, push_command, directory, "--name", "toy", "--sign", str(tmp_path / "key.pem"), *more)
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()[-1]


def shown(house: House, version: str) -> dict[str, Any]:
    done = run(house, show_command, version, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_show_prints_every_signed_claim(house: House, tmp_path: Path) -> None:
    """`kelvin show` prints the whole version, its signatures and claims, as JSON and as text."""
    version = signed_push(house, tmp_path, SHARDED, "--claims", str(tmp_path / "claims.toml"))
    found = shown(house, version)
    (origin,), (seal,) = found["origins"], found["seals"]
    assert (found["version"], found["verified"], found["faults"]) == (version, True, [])
    assert origin["trusted_as"] == "release"
    assert origin["key"] == read_key(tmp_path / "key.pem").key_id
    assert origin["claims"] == {
        "licence": "Apache-2.0",
        "training_data": {"name": "books", "sha256": "c" * 64},
        "metrics": {"perplexity": 12.5, "accuracy": 1.0},
        "provenance": {"repository": "https://example.com/toy", "commit": "deadbeef"},
    }
    assert (seal["trusted_as"], seal["fingerprint"]["dtype"]) == ("installation", "float32")
    assert found["tensors"]["count"] == len(default_weights())
    assert found["routes"] == ["/v1/chat/completions", "/v1/completions"]
    assert {file["path"] for file in found["files"]} == {"config.json", "generation_config.json", "tokenizer.json"}
    words = run(house, show_command, version).stdout
    for part in (
        version,
        "Apache-2.0",
        "c" * 64,
        "perplexity 12.5",
        "deadbeef",
        "trusted as release",
        "max_streams 64",
    ):
        assert part in words


def test_untrusted_signature_is_marked(house: House, tmp_path: Path) -> None:
    """A signature by a key that is no trust root is shown as untrusted."""
    (tmp_path / "key.pem").write_bytes(pem_of(Ed25519PrivateKey.generate()))
    found = shown(house, version := signed_push(house, tmp_path))
    assert (found["verified"], found["origins"][0]["trusted_as"]) == (False, None)
    words = run(house, show_command, version).stdout
    assert "NOT TRUSTED" in words
    assert "verified       NO" in words


def test_a_forged_statement_is_shown_as_one(house: House, tmp_path: Path) -> None:
    """A statement with a changed byte verifies nothing and is listed as faulty."""
    version = signed_push(house, tmp_path)
    (path,) = (house.store / TENANT / "attestations" / version).glob("origin-*")
    raw = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(raw[:30] + bytes([raw[30] ^ 1]) + raw[31:])
    found = shown(house, version)
    assert (found["verified"], found["origins"]) == (False, [])
    assert [fault["name"] for fault in found["faults"]] == [path.name]
    assert "FAULTY" in run(house, show_command, version).stdout


def test_a_version_that_was_there_can_be_signed(house: House, tmp_path: Path) -> None:
    """A second push with a key adds the statement to the existing version."""
    directory = str(SHARDED.write(tmp_path / "model"))
    first = run(house, push_command, directory, "--name", "toy")
    assert shown(house, version := first.stdout.splitlines()[-1])["verified"] is False
    assert signed_push(house, tmp_path) == version
    assert shown(house, version)["verified"] is True


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        pytest.param(("--claims", "claims.toml"), "only with --sign", id="claims without a signature"),
        pytest.param(("--sign", "key.pem", "--dry-run"), "not with --dry-run", id="a dry run"),
        pytest.param(("--sign", "claims.toml"), "holds no private key", id="no key"),
        pytest.param(("--sign", "key.pem", "--claims", "key.pem"), "claims=", id="no claims"),
        pytest.param(("--sign", "key.pem", "--sign-format", "model-signing"), "elliptic key", id="no elliptic key"),
    ],
)
def test_wrong_usage(house: House, tmp_path: Path, words: tuple[str, ...], rule: str) -> None:
    """Nothing is pushed, and the exit code is that of wrong usage."""
    directory = str(SHARDED.write(tmp_path / "model"))
    named = [str(tmp_path / word) if word.endswith((".pem", ".toml")) else word for word in words]
    done = run(house, push_command, directory, "--name", "toy", *named)
    assert (done.exit_code, rule in done.stderr) == (2, True), done.output
    assert not (house.store / TENANT / "manifests").exists()


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        pytest.param('license = "MIT"', "license", id="an unknown field"),
        pytest.param('[training_data]\nsha256 = "abc"', "sha256", id="no digest"),
        pytest.param('[metrics]\nloss = "low"', "metrics", id="a word for a number"),
        pytest.param('licence = ""', "licence", id="an empty licence"),
        pytest.param("licence =", "claims", id="no TOML"),
    ],
)
def test_invalid_claims_are_refused(tmp_path: Path, text: str, rule: str) -> None:
    """The refusal names the file and the rule."""
    (tmp_path / "claims.toml").write_text(text)
    with pytest.raises(Refused, match=rule) as caught:
        read_claims(tmp_path / "claims.toml")
    assert caught.value.failure.param == "claims"


def test_another_version_is_not_signed(house: House, tmp_path: Path) -> None:
    """The client refuses to sign if the installation's manifest differs from the local files."""
    source = scan(SHARDED.write(tmp_path / "model"))
    signing = PushSigner(read_key(tmp_path / "key.pem"), read_claims(None))
    plan, digests, manifest = planned(house, tmp_path)
    raw = encode_manifest(manifest)
    signing.sign(raw, version_of(raw), plan, digests, source, "toy")
    for change in (
        {"files": manifest.files[1:]},
        {"chunks": (*manifest.chunks[1:], manifest.chunks[0])},
        {"tensors": (structs.replace(manifest.tensors[0], name="other"), *manifest.tensors[1:])},
    ):
        other = encode_manifest(structs.replace(manifest, **change))
        with pytest.raises(Refused) as caught:
            signing.sign(other, version_of(other), plan, digests, source, "toy")
        assert not isinstance(caught.value.failure, ArtifactRejected) or "nothing was signed" in str(caught.value)


def planned(house: House, tmp_path: Path) -> tuple[Plan, tuple[str, ...], Manifest]:
    """Return plan, digests and manifest of an unchanged push of the model."""
    seen: list[tuple[Plan, tuple[str, ...], Manifest]] = []

    class Spy(PushSigner):
        def sign(self, raw: bytes, version: str, plan: Plan, digests: tuple[str, ...], source: Any, model: str) -> Any:
            seen.append((plan, digests, decode_manifest(raw, version)))
            return super().sign(raw, version, plan, digests, source, model)

    with house.client() as client:
        spy = Spy(read_key(tmp_path / "key.pem"), read_claims(None))
        push_directory(SHARDED.write(tmp_path / "spied"), "toy", client, Progress(), FAST, signing=spy)
    return seen[0]


def swapped(plan: Plan) -> Plan:
    """Return the plan with two pieces of equal length swapped."""
    pieces = [piece for chunk in plan.chunks for piece in chunk.pieces if piece.path.endswith(".safetensors")]
    one, two = next((a, b) for a in pieces for b in pieces if a.length == b.length and a != b)
    other = {one: two, two: one}
    chunks = tuple(
        PlannedChunk(length=chunk.length, pieces=tuple(other.get(piece, piece) for piece in chunk.pieces))
        for chunk in plan.chunks
    )
    return structs.replace(plan, chunks=chunks)


def test_find_mismatch_names_each_foreign_part(house: House, tmp_path: Path) -> None:
    """Each part of a manifest that differs from the local files is named. The unchanged manifest has no mismatch."""
    plan, digests, manifest = planned(house, tmp_path)
    intake = admit(scan(tmp_path / "spied").request("toy"))
    pinned = {file.path: file.content for file in intake.files}

    def stranger(made: Manifest = manifest, of: Plan = plan, here: tuple[str, ...] = digests) -> str:
        return find_mismatch(made, LinearSpace(of), here, pinned, intake.tensors) or ""

    first = manifest.tensors[0]
    shape = structs.replace(first, shape=first.shape[::-1])
    file = structs.replace(manifest.files[0], digest="0" * 64)
    assert stranger() == ""
    assert "chunks" in stranger(here=("0" * 64, *digests[1:]))
    assert "is not the one here" in stranger(structs.replace(manifest, files=(file, *manifest.files[1:])))
    assert "are not those here" in stranger(structs.replace(manifest, files=manifest.files[:-1]))
    assert "another type or shape" in stranger(structs.replace(manifest, tensors=(shape, *manifest.tensors[1:])))
    assert "its tensors are not" in stranger(structs.replace(manifest, tensors=manifest.tensors[1:]))
    assert "has other bytes" in stranger(of=swapped(plan))


def verified(directory: Path, public: Path) -> subprocess.CompletedProcess[str]:
    """Run OpenSSF's `model_signing verify` on an exported directory."""
    words = [
        "verify",
        "key",
        str(directory),
        "--signature",
        str(directory / SIGNATURE_FILE),
        "--public_key",
        str(public),
    ]
    return subprocess.run(
        [sys.executable, "-m", "model_signing", *words], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.deep
def test_the_public_tool_verifies_an_export(house: House, tmp_path: Path) -> None:
    """A signature made at the push is verified by OpenSSF's own tool after the export. The tool notices a flipped byte,
    another file and another key."""
    pytest.importorskip("model_signing", reason="the extra 'signing'", exc_type=ImportError)
    private = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "key.pem").write_bytes(pem_of(private))
    (tmp_path / "key.pub").write_bytes(public_pem_of(private))
    version = signed_push(house, tmp_path, SHARDED, "--sign-format", "model-signing")
    found = shown(house, version)
    assert found["origins"][0]["bundle"]
    assert found["faults"] == []
    done = run(house, export_command, version, str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    verification = verified(tmp_path / "out", tmp_path / "key.pub")
    assert verification.returncode == 0, verification.stderr + verification.stdout
    (tmp_path / "other.pub").write_bytes(public_pem_of(ec.generate_private_key(ec.SECP256R1())))
    assert verified(tmp_path / "out", tmp_path / "other.pub").returncode != 0
    weights = tmp_path / "out" / "model.safetensors"
    raw = weights.read_bytes()
    weights.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert verified(tmp_path / "out", tmp_path / "key.pub").returncode != 0
    weights.write_bytes(raw)
    assert verified(tmp_path / "out", tmp_path / "key.pub").returncode == 0
    (tmp_path / "out" / "more.json").write_bytes(b"{}")
    assert verified(tmp_path / "out", tmp_path / "key.pub").returncode != 0
