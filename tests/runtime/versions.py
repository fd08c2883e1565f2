"""Versions with a real architecture and random weights, made in a test: manifest, bytes and pinned files."""

import ctypes
import json
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from blake3 import blake3
from transformers import LlamaConfig, LlamaForCausalLM

from kelvin.contracts.artifacts.manifest import (
    CHUNK_BYTES,
    Chunk,
    Engine,
    Limits,
    Manifest,
    PinnedFile,
    Tensor,
    encode_manifest,
)
from kelvin.contracts.artifacts.runtime_control import SealAttestation
from kelvin.contracts.errors import NotFound, Refused
from runtime.lifecycle.weights import Weights
from tests.runtime.vocabularies import files as tokenizer_files
from tests.weightcache.kit import Version, pad

DtypeName = Literal["float32", "bfloat16", "float16"]
_STORED: Mapping[str, Any] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
TINY: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 0,
}


def make_llama(
    *,
    seed: int = 0,
    dtype: DtypeName = "float32",
    limits: Limits | None = None,
    files: Mapping[str, bytes] | None = None,
    **config: Any,
) -> Version:
    """Return a Llama of TINY's size, changed by `config`."""
    torch.manual_seed(seed)
    settings = LlamaConfig(**{**TINY, **config})
    model = LlamaForCausalLM(settings).to(getattr(torch, dtype))
    values = settings.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": dtype}
    pinned = {**tokenizer_files(), **(files or {}), "config.json": json.dumps(values, sort_keys=True).encode()}
    state = model.state_dict()
    if settings.tie_word_embeddings:
        del state["lm_head.weight"]
    return seal_up(pinned, state, dtype, limits or Limits(max_input_tokens=400, max_output_tokens=200, max_streams=8))


def seal_up(files: Mapping[str, bytes], state: Mapping[str, torch.Tensor], dtype: DtypeName, limits: Limits) -> Version:
    """Return a version of files and then tensors. Every section starts a chunk."""
    sections: list[bytes] = []
    pinned: list[PinnedFile] = []
    tensors: list[Tensor] = []
    offset = 0
    for path, content in sorted(files.items()):
        pinned.append(PinnedFile(path, offset, len(content), blake3(content).hexdigest()))
        sections.append(pad(content))
        offset += len(sections[-1])
    for name, tensor in state.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        tensors.append(Tensor(name, _STORED[dtype], tuple(tensor.shape), offset))
        sections.append(pad(raw))
        offset += len(sections[-1])
    chunks = [body[at : at + CHUNK_BYTES] for body in sections for at in range(0, len(body), CHUNK_BYTES)]
    manifest = Manifest(
        format=1,
        engine=Engine(1, "LlamaForCausalLM", dtype),
        limits=limits,
        chunk_bytes=CHUNK_BYTES,
        files=tuple(pinned),
        tensors=tuple(tensors),
        chunks=tuple(Chunk(blake3(chunk).hexdigest(), len(chunk)) for chunk in chunks),
    )
    return Version(encode_manifest(manifest), manifest, tuple(chunks))


@dataclass
class MemoryLease:
    """A version's bytes in this process, with the interface of a lease."""

    version: Version
    attestations: tuple[SealAttestation, ...] = ()

    def __post_init__(self) -> None:
        self._linear = bytearray(self.version.linear)
        self._lookers: list[weakref.ref[object]] = []

    @property
    def manifest(self) -> Manifest:
        return self.version.manifest

    @property
    def bytes_by_tier(self) -> dict[str, int]:
        return {"host": len(self._linear)}

    @property
    def is_whole(self) -> bool:
        return True

    def wait_until_whole(self) -> None:
        """Return at once, since all bytes are here."""

    def view(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self._linear)[offset : offset + nbytes].toreadonly()

    @property
    def in_use(self) -> bool:
        return any(looker() is not None for looker in self._lookers)

    def close(self) -> None:
        """Overwrite the memory with noise, where a real lease would crash, and take other memory for the next use."""
        self._linear[:] = b"\x5a" * len(self._linear)
        self._linear = bytearray(self.version.linear)

    def weights(self) -> Weights:
        views = {}
        buffer = (ctypes.c_ubyte * len(self._linear)).from_buffer(self._linear)
        self._lookers.append(weakref.ref(buffer))
        for tensor in self.manifest.tensors:
            dtype = _DTYPES[tensor.dtype]
            flat = torch.frombuffer(buffer, dtype=dtype, count=tensor.nbytes // dtype.itemsize, offset=tensor.offset)
            views[tensor.name] = flat.view(tensor.shape)
        return Weights(self, views)

    def acquire(self, tenant: str, version: str) -> Weights:
        """Lease the weights, like `AcquireLease`. Raises NotFound for another version."""
        if version != self.version.id:
            raise Refused(NotFound("version", version))
        return self.weights()
