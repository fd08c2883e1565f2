"""tensorizer files written by hand, from the structures in the library's source. A test compares them with the library.

Tests can change each part of a file.
"""

import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from blake3 import blake3
from msgspec import structs

from kelvin.contracts.artifacts.push_api import PlanRequest, WeightsFile, WholeFile
from snapshotter.intake.policy.tensors_index import DTYPES, parse_index
from tests.snapshotter.models import Model, Weight

RAW_DTYPES = {dtype: raw for raw, dtype in DTYPES.items()}


@dataclass
class TensorsFile:
    """A tensorizer file of these tensors. Other fields override parts of it."""

    tensors: Mapping[str, Weight]
    version: int = 2
    flags: int = 0
    index_bytes: int = 2048
    count: int | None = None
    kind: int = 2
    names: dict[str, bytes] = field(default_factory=dict)  # written instead of the tensor's name
    dtypes: dict[str, bytes] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)  # offset error of a tensor's place in the index, in bytes
    lengths: dict[str, int] = field(default_factory=dict)

    def build(self) -> bytes:
        index, entries = b"", b""
        at = 73 + self.index_bytes
        for name, tensor in self.tensors.items():
            header = _header(name, tensor, self.kind)
            raw_name = self.names.get(name, name.encode())
            dtype = self.dtypes.get(name, RAW_DTYPES[tensor.dtype])  # type: ignore[index]
            shape = self.shapes.get(name, tensor.shape)
            place = at + self.moved.get(name, 0)
            if self.flags & 2:
                index += (5).to_bytes(4, "little")
            index += _record(raw_name, self.kind, dtype, shape, 8 if self.flags & 2 else 4)
            index += place.to_bytes(8, "little") + (place + len(header)).to_bytes(8, "little")
            index += self.lengths.get(name, len(tensor.data)).to_bytes(8, "little")
            entries += header + tensor.data
            at += len(header) + len(tensor.data)
        count = len(self.tensors) if self.count is None else self.count
        head = b"|TZR|" + self.version.to_bytes(4, "little") + self.flags.to_bytes(32, "little") + bytes(16)
        head += count.to_bytes(8, "little") + self.index_bytes.to_bytes(8, "little")
        return head + index.ljust(self.index_bytes, b"\0") + entries + bytes(8)


def _record(name: bytes, kind: int, dtype: bytes, shape: tuple[int, ...], width: int) -> bytes:
    found = len(name).to_bytes(2, "little") + name + bytes([kind, len(dtype)]) + dtype + bytes([len(shape)])
    return found + b"".join(extent.to_bytes(width, "little") for extent in shape)


def _header(name: str, tensor: Weight, kind: int) -> bytes:
    raw, dtype = name.encode(), RAW_DTYPES[tensor.dtype]  # type: ignore[index]
    before = bytes(2) + bytes([kind]) + len(raw).to_bytes(2, "little") + raw + bytes([len(dtype)]) + dtype
    before += bytes([len(tensor.shape)]) + b"".join(extent.to_bytes(4, "little") for extent in tensor.shape)
    size = (8 + len(before) + 2 + 41 + 8).to_bytes(8, "little")
    length = len(tensor.data).to_bytes(8, "little")

    def whole(crc: bytes, sha: bytes) -> bytes:
        return size + before + (41).to_bytes(2, "little") + b"\x02\x00\x04" + crc + b"\x01\x20" + sha + length

    blank = whole(bytes(4), bytes(32)) + tensor.data
    return whole(zlib.crc32(blank).to_bytes(4, "little"), hashlib.sha256(blank).digest())


def describe_whole_file(raw: bytes, head_bytes: int) -> WholeFile:
    """Return a client's description of a file that is to be kept as it is."""
    between, at = b"", head_bytes
    for entry in parse_index("toy.tensors", raw[:head_bytes], len(raw)):
        between += raw[at : entry.tensor.offset]
        at = entry.tensor.offset + entry.tensor.nbytes
    return WholeFile(digest=blake3(raw).hexdigest(), between=between + raw[at:])


class KeptModel(Model):
    """A model whose weights are one tensorizer file that is to be kept as it is."""

    def files(self) -> dict[str, bytes]:
        return self._kept()[0]

    def request(self, model: str = "toy") -> PlanRequest:
        return structs.replace(self._kept()[1], model=model)

    def _kept(self) -> tuple[dict[str, bytes], PlanRequest]:
        (tensors,) = self.shards.values()
        return make_kept_push(Model(self.shards, self.config, self.tokenizer, self.more), TensorsFile(tensors))


def make_kept_push(model: Model, file: TensorsFile, keep: bool = True) -> tuple[dict[str, bytes], PlanRequest]:
    """Return the model's files with this file as its weights, and the plan request of a client for them."""
    raw, head_bytes = file.build(), 73 + file.index_bytes
    files = {path: content for path, content in model.files().items() if not path.endswith(".safetensors")}
    whole = describe_whole_file(raw, head_bytes) if keep else None
    weights = WeightsFile(path="toy.tensors", size=len(raw), header=raw[:head_bytes], whole=whole)
    return files | {"toy.tensors": raw}, structs.replace(model.request(), weights=(weights,))
