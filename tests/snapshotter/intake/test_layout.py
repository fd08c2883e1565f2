"""A layout covers every byte once, on page boundaries, and depends only on the model. Packs hold every chunk once."""

import random
from itertools import pairwise

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kelvin.contracts.artifacts.manifest import PAGE_BYTES, Chunk, find_manifest_fault
from kelvin.contracts.artifacts.push_api import SmallFile
from kelvin.contracts.artifacts.runtime_control import GateJob
from snapshotter.intake.policy.intake import Intake, admit
from snapshotter.intake.policy.layout import Layout, assemble, first_use_order, group_into_packs, lay_out, pads_are_zero
from snapshotter.intake.policy.safetensors_header import SourceTensor
from snapshotter.intake.policy.version_inputs import build_manifest, choose_sealing
from tests.snapshotter.control import gate_facts
from tests.snapshotter.models import Model, Weight, request_of, resharded, weight

CHUNK = 4 * PAGE_BYTES
sizes = st.one_of(
    st.integers(0, 3), st.integers(0, 6 * PAGE_BYTES), st.sampled_from([PAGE_BYTES, CHUNK - 1, CHUNK, CHUNK + 1])
)
weights_of = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3), st.builds(lambda n, s: weight((n,), s, "U8"), sizes, st.integers(0, 99)),
    min_size=1, max_size=8,
)  # fmt: skip
files_of = st.lists(st.integers(0, 2 * CHUNK), max_size=4)


def small_files(lengths: list[int]) -> list[SmallFile]:
    return [SmallFile(path=f"f{n}.json", content=random.Random(n).randbytes(size)) for n, size in enumerate(lengths)]


def laid_out(
    weights: dict[str, Weight], files: list[SmallFile], first_use: list[str], chunk_bytes: int = CHUNK, shards: int = 1,
    seed: int = 0,
) -> tuple[Layout, dict[str, bytes]]:  # fmt: skip
    """Return the layout of `weights` spread over `shards` files, and the files' contents."""
    contents = {file.path: file.content for file in files}
    tensors = []
    for path, part in resharded(weights, shards, seed).items():
        at = 0
        for name, tensor in part.items():
            tensors.append(SourceTensor(name, "U8", tensor.shape, path, at, len(tensor.data)))
            at += len(tensor.data)
        contents[path] = b"".join(tensor.data for tensor in part.values())
    random.Random(seed).shuffle(tensors)
    with_digests = [(file, blake3(file.content).hexdigest()) for file in files]
    return lay_out(with_digests, tensors, first_use, chunk_bytes), contents


def linear_space(layout: Layout, contents: dict[str, bytes]) -> bytes:
    return b"".join(assemble(chunk, contents) for chunk in layout.chunks)


@given(weights_of, files_of, st.randoms())
def test_layout_covers_every_byte_once(weights: dict[str, Weight], lengths: list[int], random_: random.Random) -> None:
    """Each file and tensor is at its offset, aligned and without overlap, and all other bytes are zero."""
    files = small_files(lengths)
    first_use = [name for name in weights if random_.random() < 0.7]
    layout, contents = laid_out(weights, files, first_use)
    space = linear_space(layout, contents)
    tensors = (SourceTensor(name, "U8", each.shape, "", 0, len(each.data)) for name, each in weights.items())
    assert len(space) == Intake(tuple(files), tuple(tensors)).total_bytes
    spans = [(file.offset, file.size, contents[file.path]) for file in layout.files]
    spans += [(tensor.offset, tensor.nbytes, weights[tensor.name].data) for tensor in layout.tensors]
    assert len(spans) == len(files) + len(weights)
    remaining = bytearray(space)
    for offset, nbytes, data in spans:
        assert offset % PAGE_BYTES == 0
        assert space[offset : offset + nbytes] == data
        remaining[offset : offset + nbytes] = bytes(nbytes)
    assert not any(remaining)
    for (offset, nbytes, _), (following, _, _) in pairwise(spans):
        assert offset + nbytes <= following


@given(weights_of, files_of)
def test_chunks_are_cut_by_the_rules(weights: dict[str, Weight], lengths: list[int]) -> None:
    """Chunks are whole pages within the limit. Files have their own chunks, and a large tensor begins a new one."""
    files = small_files(lengths)
    layout, contents = laid_out(weights, files, sorted(weights))
    paths = {file.path for file in files}
    starts, at = set(), 0
    for number, chunk in enumerate(layout.chunks):
        starts.add(at)
        at += chunk.length
        assert 0 < chunk.length <= CHUNK
        assert chunk.length % PAGE_BYTES == 0
        assert chunk.length == sum(piece.length + piece.pad for piece in chunk.pieces)
        assert all((piece.path in paths) == (number < layout.file_chunks) for piece in chunk.pieces)
        assert pads_are_zero(chunk, assemble(chunk, contents))
    assert all(tensor.offset in starts for tensor in layout.tensors if tensor.nbytes >= CHUNK)


@given(weights_of, files_of, st.integers(1, 4), st.integers(0, 99))
def test_sharding_changes_no_layout(weights: dict[str, Weight], lengths: list[int], shards: int, seed: int) -> None:
    """The spread of tensors over files and their order do not change the bytes or their places."""
    files = small_files(lengths)
    one, one_contents = laid_out(weights, files, ["a", "b"])
    other, other_contents = laid_out(weights, list(reversed(files)), ["a", "b"], shards=shards, seed=seed)
    assert (one.files, one.tensors) == (other.files, other.tensors)
    assert [chunk.length for chunk in one.chunks] == [chunk.length for chunk in other.chunks]
    assert linear_space(one, one_contents) == linear_space(other, other_contents)


@given(st.integers(1, 4), st.integers(0, 99))
def test_shards_do_not_change_the_version(shards: int, seed: int) -> None:
    """Any sharding of the same model gives the same valid manifest."""
    model = Model()
    weights = model.shards["model.safetensors"]
    assert version_bytes(Model(shards=resharded(weights, shards, seed))) == version_bytes(model)


def test_any_change_changes_the_version() -> None:
    """The control: other weights or pinned files give other manifests. Ignored files do not."""
    plain = version_bytes(Model())
    weights = dict(Model().shards["model.safetensors"])
    flipped = weights["model.norm.weight"]
    weights["model.norm.weight"] = Weight(flipped.dtype, flipped.shape, bytes([flipped.data[0] ^ 1]) + flipped.data[1:])
    assert version_bytes(Model(shards={"model.safetensors": weights})) != plain
    assert version_bytes(Model(more={"generation_config.json": b"{} "})) != plain
    assert version_bytes(Model(more={"generation_config.json": b"{}", "README.md": b"other"})) == plain


def version_bytes(model: Model) -> object:
    """Return the manifest of a model, with the fake gate's facts."""
    files = model.files()
    intake = admit(request_of(files))
    job = GateJob(config_json=intake.config_json, tensors={t.name: (str(t.dtype), t.shape) for t in intake.tensors})
    facts = gate_facts(job)
    pinned = [(file, blake3(file.content).hexdigest()) for file in intake.files]
    layout = lay_out(pinned, intake.tensors, facts.first_use, CHUNK)
    chunks = [Chunk(blake3(data).hexdigest(), len(data)) for data in (assemble(c, files) for c in layout.chunks)]
    manifest = build_manifest(choose_sealing(facts, intake.dtype, CHUNK), layout.files, layout.tensors, chunks)
    assert find_manifest_fault(manifest) is None
    return manifest


def test_first_use_order() -> None:
    """Tensors are in order of first use, counting a repeated name once, then unused tensors by name."""
    tensors = [SourceTensor(name, "U8", (1,), "w", 0, 1) for name in "abcde"]
    ordered = first_use_order(tensors, ["d", "ghost", "b", "d"])
    assert [tensor.name for tensor in ordered] == ["d", "b", "a", "c", "e"]


def test_large_tensor_keeps_its_chunks() -> None:
    """A small tensor that grows leaves the chunks of the large tensor behind it unchanged."""
    big = weight((3 * CHUNK,), 1, "U8")
    chunks = []
    for small in (10, PAGE_BYTES + 10):
        layout, contents = laid_out({"a": weight((small,), 2, "U8"), "b": big}, [], ["a", "b"])
        chunks.append({assemble(chunk, contents) for chunk in layout.chunks})
    assert len(chunks[0] & chunks[1]) == 3


def test_bytes_in_the_padding_are_found() -> None:
    """A byte in the padding is found, because it would make equal models differ."""
    layout, contents = laid_out({"a": weight((10,), 1, "U8"), "b": weight((10,), 2, "U8")}, [], ["a", "b"])
    data = bytearray(assemble(layout.chunks[0], contents))
    assert pads_are_zero(layout.chunks[0], bytes(data))
    for at in (10, PAGE_BYTES - 1, PAGE_BYTES + 10, 2 * PAGE_BYTES - 1):
        wrong_padding = bytes(data[:at]) + b"\x01" + bytes(data[at + 1 :])
        assert not pads_are_zero(layout.chunks[0], wrong_padding)


def test_chunks_are_whole_pages() -> None:
    """A chunk size that is no multiple of the page size raises ValueError: it is a bug of the caller."""
    with pytest.raises(ValueError, match="multiple"):
        lay_out([], [], [], 5000)


PACK_BYTES = 100


@given(st.lists(st.integers(1, 150)))
def test_chunks_are_grouped_into_packs(lengths: list[int]) -> None:
    """No chunk is lost or moved, only a single chunk may exceed the limit, and no two neighbours could be one pack."""
    chunks = [(str(number), length) for number, length in enumerate(lengths)]
    packs = list(group_into_packs(chunks, PACK_BYTES))
    assert [chunk for pack in packs for chunk in pack] == chunks
    totals = [sum(length for _, length in pack) for pack in packs]
    assert all(total <= PACK_BYTES or len(pack) == 1 for total, pack in zip(totals, packs, strict=True))
    assert all(total + pack[0][1] > PACK_BYTES for total, pack in zip(totals, packs[1:], strict=False))
