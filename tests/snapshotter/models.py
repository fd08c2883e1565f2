"""Tiny models in the Hugging Face layout, written by hand, so that no library decides their bytes."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kelvin.contracts.artifacts.manifest import DTYPE_BYTES
from kelvin.contracts.artifacts.push_api import PlanRequest, SmallFile, WeightsFile

VOCAB = 32
HIDDEN = 8


@dataclass(frozen=True)
class Weight:
    """One tensor's dtype, shape and bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def weight(shape: Sequence[int], seed: int, dtype: str = "F32") -> Weight:
    """Return random bytes that depend only on the seed."""
    count = DTYPE_BYTES[dtype]
    for extent in shape:
        count *= extent
    return Weight(dtype, tuple(shape), random.Random(seed).randbytes(count))


def safetensors(tensors: Mapping[str, Weight], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a whole file with the tensors in this order."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in tensors.items():
        end = at + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    return raw_safetensors(json.dumps(header).encode(), b"".join(tensor.data for tensor in tensors.values()))


def raw_safetensors(header: bytes, data: bytes = b"") -> bytes:
    """Return a file with any header."""
    return len(header).to_bytes(8, "little") + header + data


def default_weights(seed: int = 0, layers: int = 2) -> dict[str, Weight]:
    """Return embedding, layers and norm of a toy decoder: a few pages each."""
    found = {"model.embed_tokens.weight": weight((VOCAB, HIDDEN), seed)}
    for layer in range(layers):
        found[f"model.layers.{layer}.mlp.weight"] = weight((40, 40 + layer), seed + 1 + layer)
        found[f"model.layers.{layer}.norm.weight"] = weight((HIDDEN,), seed + 100 + layer)
    found["model.norm.weight"] = weight((HIDDEN,), seed + 999)
    return found


def default_config() -> dict[str, object]:
    return {
        "architectures": ["ToyForCausalLM"],
        "model_type": "toy",
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "dtype": "float32",
    }


def default_tokenizer(size: int = VOCAB) -> dict[str, object]:
    return {
        "version": "1.0",
        "added_tokens": [{"id": size - 1, "content": "<end>"}],
        "model": {"type": "BPE", "vocab": {f"t{number}": number for number in range(size - 1)}, "merges": []},
    }


@dataclass
class Model:
    """The contents of a model directory. `shards` maps file names to tensors. Several shards get an index."""

    shards: dict[str, dict[str, Weight]] = field(default_factory=lambda: {"model.safetensors": default_weights()})
    config: dict[str, object] = field(default_factory=default_config)
    tokenizer: dict[str, object] = field(default_factory=default_tokenizer)
    more: dict[str, bytes] = field(default_factory=lambda: {"generation_config.json": b"{}", "README.md": b"# toy\n"})
    without: frozenset[str] = frozenset()

    def files(self) -> dict[str, bytes]:
        found = {
            "config.json": json.dumps(self.config).encode(),
            "tokenizer.json": json.dumps(self.tokenizer).encode(),
            **{path: safetensors(tensors) for path, tensors in self.shards.items()},
        }
        if len(self.shards) > 1:
            placed = {name: path for path, tensors in self.shards.items() for name in tensors}
            found["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": placed}).encode()
        found |= self.more
        return {path: content for path, content in found.items() if path not in self.without}

    def write(self, directory: Path) -> Path:
        for path, content in self.files().items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_bytes(content)
        return directory

    def request(self, model: str = "toy") -> PlanRequest:
        """Return the plan request of a client for this directory, without touching a disk."""
        return request_of(self.files(), model)


SMALL = (".json", ".jinja")


def request_of(files: Mapping[str, bytes], model: str = "toy") -> PlanRequest:
    """Return the plan request of a client that checks nothing."""
    small = [SmallFile(path=path, content=content) for path, content in files.items() if path.endswith(SMALL)]
    weights = []
    for path, content in files.items():
        if path.endswith(".safetensors"):
            length = int.from_bytes(content[:8], "little")
            weights.append(WeightsFile(path=path, size=len(content), header=content[: 8 + length]))
    known = {file.path for file in small} | {file.path for file in weights}
    others = tuple(path for path in files if path not in known)
    return PlanRequest(model=model, small_files=tuple(small), weights=tuple(weights), other_paths=others)


def resharded(weights: Mapping[str, Weight], shards: int, seed: int) -> dict[str, dict[str, Weight]]:
    """Shuffle the tensors over that many files."""
    names = list(weights)
    random.Random(seed).shuffle(names)
    parts = [names[start::shards] for start in range(shards)]
    if shards == 1:
        return {"model.safetensors": {name: weights[name] for name in parts[0]}}
    return {
        f"model-{number + 1:05}-of-{shards:05}.safetensors": {name: weights[name] for name in part}
        for number, part in enumerate(parts)
    }
