"""A byte that is wrong at rest is never served: the error names the chunk. A control shows what it would have been."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldstart_bench.installation import Installation
from tests.e2e import unverified
from tests.e2e.calls import Answer, complete
from tests.e2e.inside import chunks, pack_rows
from tests.e2e.models import greedy, prompt_of

PROMPT = "w5 w9 w12"


@pytest.fixture
def cold(kelvin: Installation) -> Iterator[Installation]:
    """The model at zero, and every tier above the store empty; packs are put back as they were afterwards."""
    packs = [path for path in (kelvin.data / "store").rglob("packs/*") if path.is_file()]
    whole = {path: path.read_bytes() for path in packs}
    kelvin.to_zero("llama")
    _forget(kelvin)
    yield kelvin
    for path, content in whole.items():
        _write(path, content)
    _forget(kelvin)
    kelvin.wait(lambda: complete(kelvin, "llama", PROMPT, max_tokens=2).status == 200, "it serves again")


def _forget(kelvin: Installation) -> None:
    kelvin.forget("host")
    kelvin.forget("nvme")


def _write(path: Path, content: bytes) -> None:
    path.chmod(0o600)
    path.write_bytes(content)


def _refused(answer: Answer, chunk: str) -> None:
    assert answer.status >= 500, answer.raw
    assert chunk in answer.raw.decode()
    assert answer.json["error"]["code"] in ("chunk_corrupt", "chunk_missing")


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_byte_anywhere_is_refused_by_name(cold: Installation, seed: int) -> None:
    """One bit of one byte of one chunk in a pack; the tiers above are empty."""
    rng = random.Random(seed)
    path, rows = rng.choice(sorted(pack_rows(cold, "llama").items()))
    digest, offset, length = rng.choice(rows)
    content = bytearray(path.read_bytes())
    content[offset + rng.randrange(length)] ^= 1 << rng.randrange(8)
    _write(path, bytes(content))
    _refused(complete(cold, "llama", PROMPT, max_tokens=2), digest)


def test_a_truncated_pack_is_refused_by_name(cold: Installation) -> None:
    """The pack ends in the middle of its last chunk."""
    path, rows = sorted(pack_rows(cold, "llama").items())[0]
    digest, offset, length = max(rows, key=lambda row: row[1])
    _write(path, path.read_bytes()[: offset + length // 2])
    _refused(complete(cold, "llama", PROMPT, max_tokens=2), digest)


def test_a_flipped_byte_on_nvme_is_refused_by_name(cold: Installation) -> None:
    """The copy on this machine's disk is verified like any other."""
    assert complete(cold, "llama", PROMPT, max_tokens=2).status == 200
    cold.to_zero("llama")
    cold.forget("host")
    digest = chunks(cold, "llama")[-1]
    (path,) = (cold.data / "cache").rglob(digest)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    _write(path, bytes(content))
    _refused(complete(cold, "llama", PROMPT, max_tokens=2), digest)


def test_the_control_sees_wrong_text(cold: Installation, llama: Path) -> None:
    """With verification and probe off, flipped exponent bits do come out as other words; the product refuses them."""
    prompt = [8, 12, 15]
    right = greedy(llama, prompt, 8)
    assert unverified.generate(cold, "llama", prompt, 8) == right
    manifest = unverified.manifest_of(cold, "llama")
    ((path, rows),) = pack_rows(cold, "llama").items()
    unverified.flip_exponents(path, manifest, rows, "model.layers.0.mlp.down_proj.weight")
    assert unverified.generate(cold, "llama", prompt, 8) != right
    answer = complete(cold, "llama", prompt_of(prompt), max_tokens=8)
    assert answer.status == 500
    assert answer.json["error"]["code"] == "chunk_corrupt"
