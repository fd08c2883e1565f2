"""Read header and index of a tensorizer file (`.tensors`) strictly: they must cover the file exactly once.

Source: the structures of `tensorizer/serialization.py` 2.12, data versions 1, 2, 4 and 5. All little-endian:

    "|TZR|" | version u32 | flags, 32 bytes | total u64 | unused u64 | tensors u64 | index length u64 | index
    | entries | 0 u64

An index has one record per tensor, then zeros. An entry is the tensor's header, then its data, not aligned. Nothing is
unpickled, and only these bytes are read: the library itself accepts truncated files silently.
"""

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Final

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.manifest import DTYPE_BYTES, MAX_RANK, Dtype
from kelvin.contracts.errors import Refused
from snapshotter.intake.policy.safetensors_header import MAX_NAME_BYTES, SourceTensor

MAGIC: Final = b"|TZR|"
PREFIX_BYTES: Final = 73
INDEX_BYTES: Final = 256 << 10  # the size that the library reserves, for any number of tensors
END_BYTES: Final = 8
MAX_INDEX_BYTES: Final = 16 << 20
MAX_HEADER_BYTES: Final = 4096
_RECORD_BYTES: Final = 29  # an index record without name, dtype and shape
_VERSIONS: Final = (1, 2, 4, 5)
_ENCRYPTED_VERSION: Final = 3
_LONG_VERSION: Final = 5
_ENCRYPTED, _VERSIONED = 1, 2
_KINDS: Final = (0, 1, 2)  # parameter, buffer, entry of a state dict
_PATH_MARK: Final = b"\x1e"  # the first byte of a name that is a path of keys and numbers
_CRC32, _SHA256 = 0, 1
_HASH_BYTES: Final = {_CRC32: 4, _SHA256: 32}
DTYPES: Final[dict[bytes, Dtype]] = {
    b"<f8": "F64", b"<f4": "F32", b"<f2": "F16", b"<V2\0torch.bfloat16": "BF16",
    b"<i8": "I64", b"<i4": "I32", b"<i2": "I16", b"|i1": "I8", b"|u1": "U8", b"|b1": "BOOL",
}  # fmt: skip
_NAMES: Final = {dtype: raw for raw, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A tensor of the index. Its own header begins at `header_offset`, before its data.

    Index and header both contain `name`, `kind` and `shape`, in the same bytes.
    """

    tensor: SourceTensor
    header_offset: int
    name: bytes
    kind: int
    shape: bytes


class _Reader:
    """A reader of consecutive fields. Raises `Refused(ArtifactRejected)` if the bytes end too early."""

    def __init__(self, path: str, raw: bytes | memoryview, name: str) -> None:
        self._path = path
        self._raw = memoryview(raw)
        self._name = name
        self.offset = 0

    def read(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        if self.offset + count > len(self._raw):
            raise self.refusal("ends in the middle of a field")
        found = bytes(self._raw[self.offset : self.offset + count])
        self.offset += count
        return found

    def read_number(self, nbytes: int) -> int:
        """Return the next unsigned number."""
        return int.from_bytes(self.read(nbytes), "little")

    def read_rest(self) -> bytes:
        """Return all remaining bytes."""
        return self.read(len(self._raw) - self.offset)

    def refusal(self, rule: str) -> Refused:
        """Return the refusal of these bytes."""
        return Refused(ArtifactRejected(self._path, f"{self._name} {rule}"))


def index_end(prefix: bytes, file_size: int, path: str) -> int:
    """Return the bytes of prefix and index, from the first `PREFIX_BYTES`. Raises `Refused(ArtifactRejected)`."""
    reader = _Reader(path, prefix[:PREFIX_BYTES], "its header")
    if reader.read(len(MAGIC)) != MAGIC:
        raise Refused(ArtifactRejected(path, "it is no tensorizer file: it does not begin with '|TZR|'"))
    reader.read(PREFIX_BYTES - len(MAGIC) - 8)
    length = reader.read_number(8)
    if length > MAX_INDEX_BYTES:
        raise reader.refusal(f"claims an index of {length} bytes; the limit is {MAX_INDEX_BYTES}")
    if PREFIX_BYTES + length + END_BYTES > file_size:
        raise reader.refusal(f"claims an index of {length} bytes, but the file has {file_size}")
    return PREFIX_BYTES + length


def parse_index(path: str, raw: bytes, file_size: int) -> tuple[IndexEntry, ...]:
    """Return the tensors in order of their offsets. `raw` is prefix and index, nothing more.

    Raises `Refused(ArtifactRejected)` with file, tensor and rule.
    """
    end = index_end(raw, file_size, path)
    if len(raw) != end:
        raise Refused(ArtifactRejected(path, f"its index ends at byte {end}, but {len(raw)} were sent"))
    header = _Reader(path, memoryview(raw)[len(MAGIC) : PREFIX_BYTES], "its header")
    version, flags = header.read_number(4), header.read_number(32)
    if version == _ENCRYPTED_VERSION or flags & _ENCRYPTED:
        raise header.refusal("says that it is encrypted")
    if version not in _VERSIONS or flags & ~_VERSIONED or (flags and version < _LONG_VERSION):
        raise header.refusal(f"has data version {version} with flags {flags:#x}: only {_VERSIONS} are read")
    header.read(16)  # sizes that the library does not read either
    count = header.read_number(8)
    index = _Reader(path, memoryview(raw)[PREFIX_BYTES:], "its index")
    if not 0 < count <= len(raw) // _RECORD_BYTES:
        raise index.refusal(f"can't hold {count} tensors")
    entries = [_entry(index, path, bool(flags & _VERSIONED)) for _ in range(count)]
    if index.read_rest().strip(b"\0"):
        raise index.refusal(f"continues after its {count} tensors")
    entries.sort(key=lambda entry: entry.header_offset)
    _check_cover(entries, path, end, file_size)
    return tuple(entries)


def _entry(index: _Reader, path: str, is_versioned: bool) -> IndexEntry:
    has_long_fields = is_versioned and _metadata_version(index) == _LONG_VERSION
    raw_name = index.read(index.read_number(2))
    name = _name(index, raw_name)
    label = f"names tensor {name[:80]!r},"
    kind = index.read_number(1)
    if kind not in _KINDS:
        raise index.refusal(f"{label} which is of kind {kind}")
    raw_dtype = index.read(index.read_number(1))
    dtype = DTYPES.get(raw_dtype)
    if dtype is None:
        raise index.refusal(f"{label} whose dtype {raw_dtype[:40]!r} is not one of {', '.join(DTYPE_BYTES)}")
    rank = index.read_number(1)
    if rank > MAX_RANK:
        raise index.refusal(f"{label} which has {rank} dimensions; the limit is {MAX_RANK}")
    raw_shape = index.read(rank * (8 if has_long_fields else 4))
    width = 8 if has_long_fields else 4
    shape = tuple(int.from_bytes(raw_shape[i : i + width], "little") for i in range(0, rank * width, width))
    header_offset, data_offset, length = index.read_number(8), index.read_number(8), index.read_number(8)
    expected_bytes = DTYPE_BYTES[dtype] * prod(shape)
    if length != expected_bytes:
        rule = f"{label} which as {dtype} of shape {list(shape)} has {expected_bytes} bytes, but lies in {length}"
        raise index.refusal(rule)
    tensor = SourceTensor(name, dtype, shape, path, data_offset, length)
    return IndexEntry(tensor, header_offset, raw_name, kind, raw_shape)


def _metadata_version(index: _Reader) -> int:
    version = index.read_number(4)
    if version not in (1, _LONG_VERSION):
        raise index.refusal(f"has a record of version {version}")
    return version


def _name(index: _Reader, raw: bytes) -> str:
    if raw.startswith(_PATH_MARK):
        raise index.refusal("holds nested names: only flat state dicts are read")
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        name = ""
    if not 0 < len(raw) <= MAX_NAME_BYTES or not name:
        raise index.refusal(f"names a tensor {raw[:40]!r}: a name has 1 to {MAX_NAME_BYTES} bytes of UTF-8")
    return name


def _check_cover(entries: list[IndexEntry], path: str, start: int, file_size: int) -> None:
    """Check that entries are adjacent, from the index's end to the last eight bytes, and that no name occurs twice."""
    offset = start
    for entry in entries:
        label = f"tensor {entry.tensor.name[:80]!r}"
        if entry.header_offset != offset:
            raise Refused(ArtifactRejected(path, f"{label} begins at byte {entry.header_offset}, not at {offset}"))
        if not 0 < entry.tensor.offset - offset <= MAX_HEADER_BYTES:
            rule = f"{label} has a header of {entry.tensor.offset - offset} bytes; the limit is {MAX_HEADER_BYTES}"
            raise Refused(ArtifactRejected(path, rule))
        offset = entry.tensor.offset + entry.tensor.nbytes
    if offset + END_BYTES != file_size:
        rule = f"its tensors end at byte {offset}, plus {END_BYTES} bytes at the end, but the file has {file_size}"
        raise Refused(ArtifactRejected(path, rule))
    seen: set[str] = set()
    for entry in entries:
        if entry.tensor.name in seen:
            raise Refused(ArtifactRejected(path, f"tensor {entry.tensor.name[:80]!r} occurs twice"))
        seen.add(entry.tensor.name)


class ContentCheck:
    """The check of one tensor: its header against the index, and its data against the header's hashes.

    Feed it the data in order, then call `finish`. Raises `Refused(ArtifactRejected)`.
    """

    def __init__(self, path: str, entry: IndexEntry, header: bytes) -> None:
        self._path = path
        self._label = f"tensor {entry.tensor.name[:80]!r}"
        blank = bytearray(header)
        hashes = dict(self._hashes(entry, header, blank))
        if not hashes:
            raise self._refusal("its header has no hash")
        # Use the stronger hash; the other one adds nothing.
        self._hash_kind, self._expected_hash = max(hashes.items())
        self._crc = zlib.crc32(blank)
        self._sha = hashlib.sha256(blank)

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes of the data."""
        if self._hash_kind == _SHA256:
            self._sha.update(data)
        else:
            self._crc = zlib.crc32(data, self._crc)

    def finish(self) -> None:
        """Compare the hash, after all data was added."""
        found = self._sha.digest() if self._hash_kind == _SHA256 else self._crc.to_bytes(4, "little")
        if found != self._expected_hash:
            raise self._refusal("its bytes do not match the hash in the file")

    def _hashes(self, entry: IndexEntry, header: bytes, blank: bytearray) -> Iterator[tuple[int, bytes]]:
        """Yield kind and value of each hash, and set it to zero in `blank`, as it was when the hash was computed."""
        reader = _Reader(self._path, header, f"the header of {self._label}")
        is_same = reader.read_number(8) == len(header)
        reader.read(2)  # a number that is not used here
        is_same &= reader.read_number(1) == entry.kind
        is_same &= reader.read(reader.read_number(2)) == entry.name
        is_same &= reader.read(reader.read_number(1)) == _NAMES[entry.tensor.dtype]
        rank = reader.read_number(1)
        is_same &= rank == len(entry.tensor.shape) and reader.read(len(entry.shape)) == entry.shape
        if not is_same:
            raise self._refusal("its header differs from the index")
        end = reader.read_number(2) + reader.offset
        for _ in range(reader.read_number(1)):
            kind, length = reader.read_number(1), reader.read_number(1)
            if _HASH_BYTES.get(kind) != length:
                raise self._refusal(f"its header has a hash of kind {kind} with {length} bytes")
            blank[reader.offset : reader.offset + length] = bytes(length)
            yield kind, reader.read(length)
        if reader.offset != end or reader.read_number(8) != entry.tensor.nbytes or reader.offset != len(header):
            raise self._refusal("its header differs from the index")

    def _refusal(self, rule: str) -> Refused:
        return Refused(ArtifactRejected(self._path, f"{self._label}: {rule}"))


def max_index_bytes(name: str, dtype: Dtype, shape: tuple[int, ...]) -> int:
    """Return the most that a tensor takes of the index, whose size the library fixes at `INDEX_BYTES`."""
    width = 8 if any(extent >= 1 << 32 for extent in shape) else 4
    return _RECORD_BYTES + 4 + len(name.encode()) + len(_NAMES[dtype]) + width * len(shape)
