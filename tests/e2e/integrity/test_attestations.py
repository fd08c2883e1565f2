"""Signed versions: claims at the push, `kelvin show`, required signatures, and recorded known answers."""

import json
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coldstart_bench.harness.installation import Installation, running_installation
from kelvin.contracts.artifacts.attestation import read_seal
from tests.e2e.commands import run
from tests.e2e.conftest import SETTINGS
from tests.e2e.https_client import complete
from tests.e2e.installation_state import cache, log_lines, wait_cache_idle
from tests.e2e.tiny_models import make_tiny
from tests.kelvin.crypto.test_signing_keys import pem_of, public_pem_of


def attestations(kelvin: Installation, version: str, kind: str) -> list[Path]:
    """Return the version's attestations of this kind."""
    return sorted((kelvin.data / "store" / "default" / "attestations" / version).glob(f"{kind}-*"))


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.chmod(0o600)
    path.write_bytes(bytes(raw))


def test_signed_and_shown(kelvin: Installation, llama: Path, tmp_path: Path) -> None:
    """Claims signed at the push are shown, and the version counts as unverified under an untrusted key."""
    (tmp_path / "key.pem").write_bytes(pem_of(Ed25519PrivateKey.generate()))
    (tmp_path / "claims.toml").write_text('licence = "MIT"\n[metrics]\nloss = 0.5\n')
    sign = ("--sign", str(tmp_path / "key.pem"), "--claims", str(tmp_path / "claims.toml"))
    version = run(kelvin, "push", str(llama), "--name", "llama", *sign).splitlines()[-1]
    found = json.loads(run(kelvin, "show", "llama", "--json"))
    assert (found["version"], found["verified"], found["faults"]) == (version, False, [])
    assert found["origins"][0]["claims"] == {"licence": "MIT", "metrics": {"loss": 0.5}}
    assert found["seals"][0]["trusted_as"] == "installation"


def test_a_new_engine_is_proven_once(kelvin: Installation, tmp_path: Path) -> None:
    """Without a seal, the first start records and signs known answers, and the next start uses them."""
    version = kelvin.push(make_tiny(tmp_path / "model", "llama", seed=61), "proven")
    (path,) = attestations(kelvin, version, "seal")
    sealed = read_seal(path.read_bytes(), version).seal
    assert (sealed.device_checksum is None) == (torch.cuda.device_count() == 0), "no device checksum without a device"
    wait_cache_idle(kelvin)  # the push also prefetched its seal
    path.unlink()
    kelvin.empty_tier("host")
    kelvin.empty_tier("nvme")
    first = complete(kelvin, "proven", "w1 w2", max_tokens=4)
    assert first.status == 200
    kelvin.wait(path.exists, "the answers are kept")
    kept = read_seal(path.read_bytes(), version)
    assert kept.key_id is not None
    assert (kept.seal.probe.token_ids, kept.seal.fast_bind) == (sealed.probe.token_ids, sealed.fast_bind)
    kelvin.scale_to_zero("proven")
    assert complete(kelvin, "proven", "w1 w2", max_tokens=4).text == first.text
    log = map(str, log_lines(kelvin, "zygote"))
    warned = [line for line in log if "no attestation for this fingerprint" in line and version in line]
    assert len(warned) == 1
    kelvin.scale_to_zero("proven")


@pytest.mark.deep
def test_nothing_unverified_starts(tmp_path: Path) -> None:
    """With `require`, an unsigned push is refused, and a version with a broken signature does not start."""
    private = Ed25519PrivateKey.generate()
    data = tmp_path / "data"
    (data / "trust").mkdir(parents=True)
    (data / "trust" / "release.pem").write_bytes(public_pem_of(private))
    (tmp_path / "key.pem").write_bytes(pem_of(private))
    (tmp_path / "stranger.pem").write_bytes(pem_of(Ed25519PrivateKey.generate()))
    model = make_tiny(tmp_path / "model", "llama", seed=62)
    push = ("push", str(model), "--name", "m")
    with running_installation(data, settings=SETTINGS | {"KELVIN_VERIFY": "require"}) as kelvin:
        assert "it has no valid signature" in run(kelvin, *push, code=3)
        assert "no trust root" in run(kelvin, *push, "--sign", str(tmp_path / "stranger.pem"), code=3)
        assert "m " not in run(kelvin, "models")
        version = run(kelvin, *push, "--sign", str(tmp_path / "key.pem")).splitlines()[-1]
        assert complete(kelvin, "m", "w1", max_tokens=2).status == 200
        assert json.loads(run(kelvin, "show", "m", "--json"))["verified"]
        for path in attestations(kelvin, version, "origin"):
            flip(path, 100)
        (data / "cache" / "default" / "attestations" / version).unlink()  # otherwise this copy would heal it
        kelvin.empty_tier("host")
        refused = complete(kelvin, "m", "w1", max_tokens=2)
        assert (refused.status, refused.json["error"]["code"]) == (500, "version_unverified")
        assert "default/attestations" in run(kelvin, "fsck", code=1, errors=False)
        assert cache(kelvin)["unverified_versions"] > 0
        run(kelvin, *push, "--sign", str(tmp_path / "key.pem"))
        assert complete(kelvin, "m", "w1", max_tokens=2).status == 200
