"""A wrong byte at rest is never served: a good copy heals it, or the error names the chunk.

A control shows the wrong text that would have been served.
"""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from click.testing import CliRunner

from coldstart_bench.harness.installation import Installation, InstallationFailed
from kelvin.cli.main import main
from tests.e2e.https_client import Answer, complete
from tests.e2e.installation_state import cache, chunks, log_lines, sole_rows
from tests.e2e.integrity import unverified
from tests.e2e.tiny_models import greedy_continuation, prompt_of

pytestmark = pytest.mark.deep

PROMPT = "w5 w9 w12"


@pytest.fixture
def cold(kelvin: Installation) -> Iterator[Installation]:
    """The installation with the model at zero and only the store filled. Packs are restored afterwards."""
    packs = [path for path in (kelvin.data / "store").rglob("packs/*") if path.is_file()]
    whole = {path: path.read_bytes() for path in packs}
    kelvin.scale_to_zero("llama")
    _forget(kelvin)
    yield kelvin
    for path, content in whole.items():
        _write(path, content)
    _forget(kelvin)
    kelvin.wait(lambda: complete(kelvin, "llama", PROMPT, max_tokens=2).status == 200, "it serves again")


def _forget(kelvin: Installation) -> None:
    kelvin.empty_tier("host")
    kelvin.empty_tier("nvme")


def _write(path: Path, content: bytes) -> None:
    path.chmod(0o600)
    path.write_bytes(content)


def _refused(answer: Answer, chunk: str) -> None:
    assert answer.status >= 500, answer.raw
    assert chunk in answer.raw.decode()
    assert answer.json["error"]["code"] in ("chunk_corrupt", "chunk_missing")


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_byte_anywhere_is_refused_by_name(cold: Installation, seed: int) -> None:
    """One flipped bit in a pack is refused with the chunk's name."""
    rng = random.Random(seed)
    path, rows = sole_rows(cold, "llama")
    digest, offset, length = rng.choice(rows)
    content = bytearray(path.read_bytes())
    content[offset + rng.randrange(length)] ^= 1 << rng.randrange(8)
    _write(path, bytes(content))
    _refused(complete(cold, "llama", PROMPT, max_tokens=2), digest)


def test_a_truncated_pack_is_refused_by_name(cold: Installation) -> None:
    """A pack that ends within its last chunk is refused with the chunk's name."""
    path, rows = sole_rows(cold, "llama")
    digest, offset, length = max(rows, key=lambda row: row[1])
    _write(path, path.read_bytes()[: offset + length // 2])
    _refused(complete(cold, "llama", PROMPT, max_tokens=2), digest)


def test_a_flipped_byte_on_nvme_is_healed(cold: Installation) -> None:
    """The request waits for the store's copy and succeeds. The fault is counted, logged and shown."""
    right = complete(cold, "llama", PROMPT, max_tokens=4)
    assert right.status == 200
    before = cache(cold)
    cold.scale_to_zero("llama")
    cold.empty_tier("host")
    digest = chunks(cold, "llama")[-1]

    def heal_logs() -> list[dict[str, Any]]:
        return [each for each in log_lines(cold, "cache") if each.get("chunk") == digest and each.get("healed_from")]

    earlier = len(heal_logs())
    _flip(_on_nvme(cold, digest))
    answer = complete(cold, "llama", PROMPT, max_tokens=4)
    assert (answer.status, answer.text) == (200, right.text)
    after = cache(cold)
    assert _faults(after) - _faults(before) == Counter({("nvme", "digest"): 1})
    assert after["healed_chunks"]["store"] - before["healed_chunks"].get("store", 0) == 1

    cold.wait(lambda: len(heal_logs()) > earlier, "it is logged")
    line = heal_logs()[-1]
    assert (line["tier"], line["kind"], line["healed_from"]) == ("nvme", "digest", "store")
    shown = CliRunner().invoke(main, ["status", "--data", str(cold.data)])
    assert f"nvme chunk digest {after['chunk_faults']['nvme']['digest']}" in shown.output
    assert blake3(_on_nvme(cold, digest).read_bytes()).hexdigest() == digest


def test_unhealable_version_is_faulty_and_others_serve(cold: Installation) -> None:
    """A version without a good copy fails with the chunk's name and can't be deployed. Another model serves.
    Once the store is repaired, the version is well again."""
    assert complete(cold, "llama", PROMPT, max_tokens=2).status == 200
    cold.scale_to_zero("llama")
    cold.empty_tier("host")
    path, rows = sole_rows(cold, "llama")
    digest, offset, _ = rows[-1]
    whole = path.read_bytes()
    _flip(_on_nvme(cold, digest))
    _write(path, whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
    for _ in range(2):
        _refused(complete(cold, "llama", PROMPT, max_tokens=2), digest)
        assert complete(cold, "qwen2", PROMPT, max_tokens=2).status == 200
    cold.wait(lambda: _health(cold) == ("faulty", "chunk_corrupt"), "the version is faulty")
    version = cold.model("llama")["version"]
    with pytest.raises(InstallationFailed, match="its last restore failed"):
        cold.admin.request("POST", "/admin/v1/models/llama/deploy", {"version": version})
    _write(path, whole)
    assert complete(cold, "llama", PROMPT, max_tokens=2).status == 200
    cold.wait(lambda: _health(cold) == ("ready", None), "the version is well again")


def _health(kelvin: Installation) -> tuple[str, str | None]:
    (version,) = kelvin.model("llama")["versions"]
    return version["health"], version["fault"]


def _on_nvme(kelvin: Installation, digest: str) -> Path:
    """Return the chunk's file, once it is there: NVMe admission follows the lease."""
    path = kelvin.data / "cache" / "default" / digest[:2] / digest
    kelvin.wait(path.exists, "the chunk is on NVMe")
    return path


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    _write(path, bytes(content))


def _faults(state: Any) -> Counter[tuple[str, str]]:
    return Counter({(tier, kind): n for tier, kinds in state["chunk_faults"].items() for kind, n in kinds.items()})


def test_control_unverified_bytes_give_other_text(cold: Installation, llama: Path) -> None:
    """Without verification and probe, flipped exponent bits give other words. The product refuses them."""
    prompt = [8, 12, 15]
    right = greedy_continuation(llama, prompt, 8)
    assert unverified.generate(cold, "llama", prompt, 8) == right
    manifest = unverified.manifest_of(cold, "llama")
    path, rows = sole_rows(cold, "llama")
    unverified.flip_exponents(path, manifest, rows, "model.layers.0.mlp.down_proj.weight")
    assert unverified.generate(cold, "llama", prompt, 8) != right
    answer = complete(cold, "llama", prompt_of(prompt), max_tokens=8)
    assert answer.status == 500
    assert answer.json["error"]["code"] == "chunk_corrupt"
