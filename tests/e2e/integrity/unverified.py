"""Serve a version without verification and without known answers, which Kelvin never does.

The controls of the corruption tests use it to show that refused bytes would have given wrong text.
"""

from pathlib import Path

import torch

from coldstart_bench.harness.installation import Installation
from kelvin.contracts.artifacts.attestation import read_seal
from kelvin.contracts.artifacts.manifest import Manifest, decode_manifest
from runtime.drivers.interface import Generated, GenerationRequest, Sampling
from runtime.drivers.native.engine import ModelEngine
from runtime.models.binding import TORCH_DTYPES, bind
from tests.e2e.installation_state import pack_rows


def linear_space(kelvin: Installation, model: str, manifest: Manifest) -> bytearray:
    """Return the version's bytes from its packs, without checking digests."""
    found: dict[str, bytes] = {}
    for path, rows in pack_rows(kelvin, model).items():
        content = path.read_bytes()
        found |= {digest: content[offset : offset + length] for digest, offset, length in rows}
    return bytearray(b"".join(found[chunk.digest] for chunk in manifest.chunks))


def generate(kelvin: Installation, model: str, prompt: list[int], count: int) -> list[int]:
    """Generate greedy token ids from unverified bytes, without the probe."""
    store, version = kelvin.data / "store" / "default", kelvin.model(model)["version"]
    manifest = decode_manifest((store / "manifests" / version).read_bytes(), version)
    (seal,) = (store / "attestations" / version).iterdir()
    facts = read_seal(seal.read_bytes(), version).seal.gate
    space = linear_space(kelvin, model, manifest)
    files = {file.path: bytes(space[file.offset : file.offset + file.size]) for file in manifest.files}
    tensors = {
        tensor.name: torch.frombuffer(
            space, dtype=TORCH_DTYPES[manifest.engine.dtype], count=tensor.nbytes // 4, offset=tensor.offset
        ).view(tensor.shape)
        for tensor in manifest.tensors
    }
    cpu = torch.device("cpu")
    bound = bind(manifest, files["config.json"], tensors, bind_method="library", dtype=torch.float32, device=cpu)
    engine = ModelEngine(bound, facts, version=version, kv_bytes=64 << 20, device=cpu, probe=None)
    asked = GenerationRequest(
        request_id="control",
        prompt_ids=tuple(prompt),
        sampling=Sampling(temperature=0.0, max_tokens=count),
        stop_ids=frozenset(),
    )
    refused = engine.admit(asked)
    assert refused is None
    ids: list[int] = []
    while engine.has_work:
        ids += [event.token_id for event in engine.step() if isinstance(event, Generated)]
    return ids


def flip_exponents(path: Path, manifest: Manifest, rows: list[tuple[str, int, int]], tensor_name: str) -> None:
    """Flip an exponent bit of every tenth float32 of a tensor in its pack."""
    tensor = next(each for each in manifest.tensors if each.name == tensor_name)
    content, at = bytearray(path.read_bytes()), 0
    for chunk in manifest.chunks:
        place = next(((offset, length) for digest, offset, length in rows if digest == chunk.digest), None)
        if place is not None and at <= tensor.offset < at + chunk.length:
            begin = place[0] + tensor.offset - at
            for byte in range(begin + 3, begin + tensor.nbytes, 40):
                content[byte] ^= 0x01  # the exponent's second lowest bit: bits 23-30 of a little-endian float32
        at += chunk.length
    path.chmod(0o600)
    path.write_bytes(bytes(content))


def manifest_of(kelvin: Installation, model: str) -> Manifest:
    """Return the manifest of the `prod` version."""
    version = kelvin.model(model)["version"]
    raw = (kelvin.data / "store" / "default" / "manifests" / version).read_bytes()
    return decode_manifest(raw, version)
