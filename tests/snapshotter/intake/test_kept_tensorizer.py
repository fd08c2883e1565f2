"""The description of a kept tensorizer file must cover all its bytes. Chunks and the rest make the file again."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kelvin.blobstore.packs import FileChunk, FileIndex, FileSpan
from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.manifest import Chunk, Engine, Limits, Manifest, PinnedFile
from kelvin.contracts.artifacts.push_api import PlanRequest, WholeFile
from kelvin.contracts.errors import Refused
from snapshotter.intake.policy.intake import admit
from snapshotter.intake.policy.kept_tensorizer import file_parts, has_weights_of, unchunked_spans
from snapshotter.intake.policy.layout import assemble, lay_out
from snapshotter.intake.policy.tensors_index import parse_index
from tests.snapshotter.models import Model, default_weights, weight
from tests.snapshotter.tensors_files import TensorsFile, make_kept_push

WEIGHTS = default_weights() | {"model.large": weight((5000,), 7, "BF16"), "model.none": weight((0, 2), 8)}
MODEL = Model(shards={"model.safetensors": WEIGHTS})
FILE = TensorsFile(WEIGHTS)


@given(order=st.permutations(list(WEIGHTS)), first_use=st.permutations(list(WEIGHTS)), pages=st.integers(1, 6))
def test_parts_make_the_kept_file(order: list[str], first_use: list[str], pages: int) -> None:
    """For any order of tensors in file and version, and any chunk size, the parts make the file."""
    file = TensorsFile({name: WEIGHTS[name] for name in order})
    raw = file.build()
    tensors = [entry.tensor for entry in parse_index("m.tensors", raw[: 73 + file.index_bytes], len(raw))]
    layout = lay_out([], tensors, first_use, pages * 4096)
    digests = [f"{n:064x}" for n in range(len(layout.chunks))]
    chunks = {d: assemble(chunk, {"m.tensors": raw}) for d, chunk in zip(digests, layout.chunks, strict=True)}
    spans = [tuple(FileSpan(piece.offset, piece.length) for piece in chunk.pieces) for chunk in layout.chunks]
    index = FileIndex(tuple(map(FileChunk, digests, spans)), len(raw))
    rest = b"".join(raw[offset : offset + length] for offset, length in unchunked_spans(index))
    again = b""
    for part in file_parts(layout.chunks, digests, len(raw)):
        source = rest if part.digest is None else chunks[part.digest]
        again += source[part.offset : part.offset + part.length]
    assert again == raw


def refusal(request: PlanRequest, whole: WholeFile) -> str:
    (file,) = request.weights
    with pytest.raises(Refused) as refused:
        admit(structs.replace(request, weights=(structs.replace(file, whole=whole),)))
    assert isinstance(refused.value.failure, ArtifactRejected)
    return refused.value.failure.reason


def test_kept_file_has_all_bytes_outside_tensors() -> None:
    """The rest is all bytes that belong to no tensor."""
    files, request = make_kept_push(MODEL, FILE)
    whole = admit(request).kept_tensorizer
    assert whole is not None
    tensors = sum(len(tensor.data) for tensor in WEIGHTS.values())
    assert (whole.size, len(whole.rest)) == (len(files["toy.tensors"]), len(files["toy.tensors"]) - tensors)
    assert whole.rest.startswith(b"|TZR|")
    assert admit(make_kept_push(MODEL, FILE, keep=False)[1]).kept_tensorizer is None


def test_wrong_bytes_between_tensors_are_refused() -> None:
    """A description that is too short, too long, of other headers, or of another kind of file is refused."""
    _, request = make_kept_push(MODEL, FILE)
    whole = request.weights[0].whole
    assert whole is not None
    for between in (whole.between[:-1], whole.between + b"x", b""):
        assert "belong to no tensor" in refusal(request, structs.replace(whole, between=between))
    other = make_kept_push(MODEL, replace(FILE, kind=0))[1].weights[0].whole
    assert other is not None
    assert "differs from the index" in refusal(request, other)
    safetensors = MODEL.request()
    assert "only a tensorizer file" in refusal(safetensors, whole)


def test_kept_file_is_matched_to_its_version() -> None:
    """A kept file matches a version if its chunks are exactly those after the pinned files' chunks."""
    digests = [f"{n:064x}" for n in range(4)]
    pinned = (PinnedFile("config.json", 0, 5000, "c" * 64),)
    manifest = Manifest(
        format=1, engine=Engine(1, "t", "float32"), limits=Limits(1, 1), chunk_bytes=8192, files=pinned, tensors=(),
        chunks=tuple(Chunk(digest, 8192) for digest in digests),
    )  # fmt: skip

    def holds(*chosen: str) -> bool:
        chunks = tuple(FileChunk(digest, (FileSpan(n * 8192, 8192),)) for n, digest in enumerate(chosen))
        return has_weights_of(FileIndex(chunks, 1 << 20), manifest)

    assert holds(*digests[1:])
    for chosen in (digests, digests[2:], digests[1:3], [digests[2], digests[1], digests[3]]):
        assert not holds(*chosen)
    assert not has_weights_of(FileIndex((), 100), structs.replace(manifest, chunks=manifest.chunks[:1]))
