"""A faulty tensorizer file is refused with the fault, and a valid one gives its tensors and their places."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.manifest import DTYPE_BYTES
from kelvin.contracts.errors import Refused
from snapshotter.intake.policy.tensors_index import ContentCheck, IndexEntry, index_end, max_index_bytes, parse_index
from tests.snapshotter.models import Weight, weight
from tests.snapshotter.tensors_files import TensorsFile

PATH = "m.tensors"
WEIGHTS = {
    "a.weight": weight((3, 5), 1, "BF16"),
    "b": weight((), 2, "I64"),
    "c": weight((0, 4), 3, "F32"),
    "d": weight((7,), 4, "BOOL"),
}
GOOD = TensorsFile(WEIGHTS)


def parse(raw: bytes) -> tuple[IndexEntry, ...]:
    end = index_end(raw[:73], len(raw), PATH)
    return parse_index(PATH, raw[:end], len(raw))


def check(raw: bytes) -> None:
    """Check the index, the headers and all data."""
    for entry in parse(raw):
        content = ContentCheck(PATH, entry, raw[entry.header_offset : entry.tensor.offset])
        content.update(raw[entry.tensor.offset : entry.tensor.offset + entry.tensor.nbytes])
        content.finish()


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(Refused) as refused:
        act()
    assert isinstance(refused.value.failure, ArtifactRejected)
    assert refused.value.failure.path == PATH
    return refused.value.failure.reason


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(GOOD, id="a state dict"),
        pytest.param(replace(GOOD, kind=0), id="parameters of a module"),
        pytest.param(replace(GOOD, version=1), id="the first data version"),
        pytest.param(replace(GOOD, version=5, flags=2), id="records with versions, and long shapes"),
    ],
)
def test_valid_index_is_read(file: TensorsFile) -> None:
    """Names, dtypes, shapes and bytes are those that were written."""
    raw = file.build()
    found = {entry.tensor.name: entry.tensor for entry in parse(raw)}
    assert {
        name: Weight(each.dtype, each.shape, raw[each.offset : each.offset + each.nbytes])
        for name, each in found.items()
    } == WEIGHTS
    if not file.flags:
        check(raw)


def put(raw: bytes, at: int, value: bytes) -> bytes:
    return raw[:at] + value + raw[at + len(value) :]


FAULTS: Mapping[str, tuple[bytes, str]] = {
    "another magic": (put(GOOD.build(), 0, b"x"), "no tensorizer file"),
    "nothing": (b"", "ends in the middle"),
    "a cut header": (GOOD.build()[:40], "ends in the middle"),
    "a cut index": (GOOD.build()[:500], "but the file has 500"),
    "a cut tensor": (GOOD.build()[:-9], "but the file has"),
    "bytes behind": (GOOD.build() + b"x", "but the file has"),
    "an endless index": (put(GOOD.build(), 65, b"\xff" * 8), "the limit is"),
    "another data version": (replace(GOOD, version=6).build(), "data version 6"),
    "encryption by version": (replace(GOOD, version=3).build(), "encrypted"),
    "encryption by flag": (replace(GOOD, version=5, flags=1).build(), "encrypted"),
    "an unknown flag": (replace(GOOD, version=5, flags=4).build(), "flags 0x4"),
    "a flag of a later version": (replace(GOOD, flags=2).build(), "flags 0x2"),
    "no tensors": (replace(GOOD, count=0).build(), "can't hold 0 tensors"),
    "countless tensors": (replace(GOOD, count=1 << 60).build(), "can't hold"),
    "more than there are": (replace(GOOD, count=5).build(), "names a tensor b''"),
    "fewer than there are": (replace(GOOD, count=3).build(), "continues after its 3 tensors"),
    "a name twice": (TensorsFile(WEIGHTS, names={"b": b"a.weight"}).build(), "occurs twice"),
    "a nested name": (TensorsFile(WEIGHTS, names={"b": b'\x1e["x",0]'}).build(), "nested names"),
    "no name": (TensorsFile(WEIGHTS, names={"b": b""}).build(), "1 to 1024 bytes"),
    "a name of no text": (TensorsFile(WEIGHTS, names={"b": b"\xff"}).build(), "1 to 1024 bytes"),
    "an endless name": (TensorsFile(WEIGHTS, names={"b": b"x" * 1025}).build(), "1 to 1024 bytes"),
    "an unknown kind": (replace(GOOD, kind=7).build(), "of kind 7"),
    "objects": (TensorsFile(WEIGHTS, dtypes={"b": b"|O8"}).build(), "dtype b'|O8'"),
    "big-endian numbers": (TensorsFile(WEIGHTS, dtypes={"b": b">i8"}).build(), "dtype b'>i8'"),
    "another opaque type": (TensorsFile(WEIGHTS, dtypes={"a.weight": b"<V2\0torch.x"}).build(), "dtype"),
    "a larger shape": (TensorsFile(WEIGHTS, shapes={"a.weight": (4, 5)}).build(), "has 40 bytes, but lies in 30"),
    "a huge shape": (TensorsFile(WEIGHTS, shapes={"a.weight": (0xFFFFFFFF,) * 3}).build(), "but lies in 30"),
    "too many dimensions": (TensorsFile(WEIGHTS, shapes={"b": (1,) * 17}).build(), "17 dimensions"),
    "another length": (TensorsFile(WEIGHTS, lengths={"b": 16}).build(), "lies in 16"),
    "no data": (TensorsFile(WEIGHTS, lengths={"b": 0}).build(), "lies in 0"),
    "a tensor elsewhere": (TensorsFile(WEIGHTS, moved={"b": 8}).build(), "begins at byte"),
    "tensors upon each other": (TensorsFile(WEIGHTS, moved={"d": -8}).build(), "begins at byte"),
}


@pytest.mark.parametrize(("raw", "want"), [pytest.param(*case, id=name) for name, case in FAULTS.items()])
def test_invalid_index_is_refused(raw: bytes, want: str) -> None:
    assert want in refusal(lambda: parse(raw))


@pytest.mark.parametrize("flip", ["header", "hash", "data"])
def test_changed_content_is_refused(flip: str) -> None:
    """A changed byte of a tensor, its header or its hash is found."""
    raw = GOOD.build()
    entry = parse(raw)[0]
    at = {"header": entry.header_offset + 13, "hash": entry.tensor.offset - 20, "data": entry.tensor.offset + 3}[flip]
    broken = put(raw, at, bytes([raw[at] ^ 1]))
    check(raw)
    assert "'a.weight'" in refusal(lambda: check(broken))


def test_tensor_without_a_hash_is_refused() -> None:
    """A tensor without a hash is refused: its content could not be checked."""
    raw = GOOD.build()
    entry = parse(raw)[0]
    header = raw[entry.header_offset : entry.tensor.offset]
    at = len(header) - 8 - 41
    bare = (len(header) - 40).to_bytes(8, "little") + header[8 : at - 2] + b"\x01\x00\x00" + header[-8:]
    assert "no hash" in refusal(lambda: ContentCheck(PATH, entry, bare))


@given(st.data())
def test_changed_index_is_read_or_refused(data: st.DataObject) -> None:
    """Changed bytes give tensors that lie within the file without overlap, or a refusal."""
    raw = bytearray(GOOD.build())
    for _ in range(data.draw(st.integers(0, 4))):
        raw[data.draw(st.integers(0, 400))] = data.draw(st.integers(0, 255))
    size = data.draw(st.sampled_from([len(raw), 0, 73, 100, len(raw) - 1]))
    try:
        entries = parse(bytes(raw[:size]))
    except Refused:
        return
    at = 0
    for entry in entries:
        tensor = entry.tensor
        assert at <= entry.header_offset < tensor.offset
        assert tensor.nbytes == DTYPE_BYTES[tensor.dtype] * math.prod(tensor.shape)
        at = tensor.offset + tensor.nbytes
    assert at + 8 == size


@given(st.binary(max_size=200), st.binary(max_size=300))
def test_noise_is_refused(noise: bytes, header: bytes) -> None:
    """Noise instead of an index or a tensor's header is refused."""
    with pytest.raises(Refused):
        parse(GOOD.build()[:73] + noise)
    with pytest.raises(Refused):
        ContentCheck(PATH, parse(GOOD.build())[0], header)


def test_index_bytes_covers_the_records() -> None:
    """The estimate is at least the space that the records take."""
    raw = GOOD.build()
    used = len(raw[73 : 73 + 2048].rstrip(b"\0"))
    tensors = [entry.tensor for entry in parse(raw)]
    assert sum(max_index_bytes(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors) >= used
