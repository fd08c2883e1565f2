"""A version is the digest of its manifest's bytes. A manifest that breaks a rule of the geometry isn't decoded."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kelvin.contracts.artifact_errors import ManifestCorrupt
from kelvin.contracts.artifacts.manifest import (
    DTYPE_BYTES,
    PAGE_BYTES,
    Chunk,
    Engine,
    Limits,
    Manifest,
    PinnedFile,
    Tensor,
    decode_manifest,
    encode_manifest,
    find_manifest_fault,
    version_of,
)
from kelvin.contracts.artifacts.tensor_schema import TensorSpec, make_signature
from kelvin.contracts.errors import Refused

D = "a" * 64
GOOD = Manifest(
    format=1,
    engine=Engine(1, "LlamaForCausalLM", "bfloat16"),
    limits=Limits(127, 64),
    chunk_bytes=2 * PAGE_BYTES,
    files=(PinnedFile("config.json", 0, 10, D),),
    tensors=(Tensor("a", "BF16", (2, 3), PAGE_BYTES), Tensor("b", "F32", (), 2 * PAGE_BYTES)),
    chunks=(Chunk(D, PAGE_BYTES), Chunk("b" * 64, 2 * PAGE_BYTES)),
)


def encoded(manifest: Manifest) -> tuple[bytes, str]:
    raw = encode_manifest(manifest)
    return raw, version_of(raw)


def reason(raw: bytes) -> str:
    with pytest.raises(Refused) as caught:
        decode_manifest(raw, version_of(raw))
    assert isinstance(caught.value.failure, ManifestCorrupt)
    return caught.value.failure.reason


def test_manifest_round_trips() -> None:
    """The decoded manifest equals the encoded one, and its sizes add up."""
    assert decode_manifest(*encoded(GOOD)) == GOOD
    assert (GOOD.total_bytes, GOOD.weight_bytes) == (3 * PAGE_BYTES, 16)
    assert find_manifest_fault(GOOD) is None


def test_the_version_is_frozen() -> None:
    """The bytes and digest of one manifest are fixed here. A build that computes others would rename all versions."""
    raw, version = encoded(GOOD)
    assert raw.startswith(b'{"chunk_bytes":8192,"chunks":[{"digest":"aaaa')
    assert version == "8a46d85b4012ca927e022bf579d6fd6f1eda5d7955c12bc29afb3fbdb6b71cf1"


SIGNATURE = make_signature([TensorSpec("x", "FP32", (-1, 2), examples=(1, 2.5))], [TensorSpec("y", "BYTES", (-1,))])
PREDICTOR = structs.replace(GOOD, engine=Engine(1, "onnx", "float32", "predict"), tensors=(), signature=SIGNATURE)


def test_predictor_manifest_pins_its_signature() -> None:
    """The signature and its hash are part of the version. Manifests of other kinds don't mention it."""
    raw, version = encoded(PREDICTOR)
    assert decode_manifest(raw, version) == PREDICTOR
    assert SIGNATURE.schema_hash.encode() in raw
    assert b"signature" not in encoded(GOOD)[0]


@pytest.mark.parametrize(
    ("manifest", "want"),
    [
        pytest.param(structs.replace(PREDICTOR, signature=None), "has a signature", id="no signature"),
        pytest.param(structs.replace(GOOD, signature=SIGNATURE), "and only then", id="a signature of a generator"),
        pytest.param(
            structs.replace(PREDICTOR, signature=structs.replace(SIGNATURE, outputs=SIGNATURE.inputs)), "hash",
            id="another schema under the hash",
        ),
    ],
)  # fmt: skip
def test_broken_signature_is_refused_in_a_manifest(manifest: Manifest, want: str) -> None:
    """The signature's hash is computed again at each decoding."""
    assert want in reason(encode_manifest(manifest))


def test_kind_is_encoded_only_if_it_is_not_generate() -> None:
    """The kind is encoded only if it isn't `generate`, so older manifests keep their bytes."""
    raw, _ = encoded(GOOD)
    assert b"kind" not in raw
    embeds = msgspec.structs.replace(GOOD, engine=Engine(1, "BertModel", "float32", "embed"))
    assert b'"kind":"embed"' in encode_manifest(embeds)
    assert decode_manifest(*encoded(embeds)) == embeds
    said = raw.replace(b'"interface":1}', b'"interface":1,"kind":"generate"}')
    assert said != raw
    assert "canonical" in reason(said)


def test_changed_manifest_bytes_are_refused() -> None:
    """Manifest bytes with one changed bit, one byte less or one byte more don't match the version."""
    raw, version = encoded(GOOD)
    for at in range(len(raw)):
        bent = bytearray(raw)
        bent[at] ^= 1
        with pytest.raises(Refused, match="do not match"):
            decode_manifest(bytes(bent), version)
    for bent_raw in (raw[:-1], raw + b"\n"):
        with pytest.raises(Refused, match="do not match"):
            decode_manifest(bent_raw, version)


@pytest.mark.parametrize(
    ("raw", "want"),
    [
        pytest.param(b"", "truncated", id="nothing"),
        pytest.param(b"\xff", "malformed", id="no text"),
        pytest.param(b"{}", "missing required field", id="no field"),
        pytest.param(encode_manifest(GOOD).replace(b'"format":1', b'"format":2'), "Invalid enum value 2",
                     id="a format of the future"),
        pytest.param(encode_manifest(GOOD)[:-1] + b',"more":1}', "unknown field", id="a field of the future"),
        pytest.param(encode_manifest(GOOD) + b" ", "canonical", id="a space behind"),
        pytest.param(msgspec.json.format(encode_manifest(GOOD)), "canonical", id="spaces within"),
        pytest.param(encode_manifest(GOOD).replace(b'"BF16"', b'"FP4"'), "Invalid enum value", id="an unknown dtype"),
        pytest.param(encode_manifest(GOOD).replace(D.encode(), b"A" * 64), "regex", id="a digest in capitals"),
        pytest.param(encode_manifest(GOOD).replace(b'"offset":0', b'"offset":-4096'), ">= 0", id="a negative offset"),
    ],
)  # fmt: skip
def test_non_canonical_manifest_is_refused(raw: bytes, want: str) -> None:
    """A matching digest isn't enough: only the canonical form of this format is decoded."""
    assert want in reason(raw)


def change(**fields: Any) -> Manifest:
    return structs.replace(GOOD, **fields)


def a_at(offset: int, shape: tuple[int, ...] = (2, 3)) -> tuple[Tensor, Tensor]:
    return Tensor("a", "BF16", shape, offset), GOOD.tensors[1]


FAULTS: list[tuple[str, Callable[[], Manifest], str]] = [
    ("a tensor off the page", lambda: change(tensors=a_at(PAGE_BYTES + 8)), "boundary"),
    ("a file off the page", lambda: change(files=(PinnedFile("c", 1, 1, D),)), "boundary"),
    (
        "a tensor behind the end",
        lambda: change(tensors=(Tensor("a", "F32", (1,), 3 * PAGE_BYTES),)),
        "after the last chunk",
    ),
    (
        "a tensor over the end",
        lambda: change(tensors=(Tensor("a", "U8", (PAGE_BYTES + 1,), 2 * PAGE_BYTES),)),
        "after the last",
    ),
    ("tensors that overlap", lambda: change(tensors=a_at(PAGE_BYTES, (1, PAGE_BYTES))), "overlaps"),
    ("tensors out of order", lambda: change(tensors=GOOD.tensors[::-1]), "precedes"),
    ("a file behind the tensors", lambda: change(files=(PinnedFile("c", 2 * PAGE_BYTES, 1, D),)), "overlaps"),
    ("a name twice", lambda: change(tensors=(GOOD.tensors[0], structs.replace(GOOD.tensors[1], name="a"))), "twice"),
    ("a tensor named as a file", lambda: change(tensors=(Tensor("config.json", "F32", (), PAGE_BYTES),)), "twice"),
    ("a chunk off the page", lambda: change(chunks=(*GOOD.chunks, Chunk(D, PAGE_BYTES + 1))), "has a length"),
    ("a chunk over the limit", lambda: change(chunks=(*GOOD.chunks, Chunk(D, 3 * PAGE_BYTES))), "has a length"),
    ("no chunks", lambda: change(chunks=()), "after the last chunk"),
]


@pytest.mark.parametrize(("manifest", "want"), [pytest.param(make, want, id=name) for name, make, want in FAULTS])
def test_broken_geometry_rule_is_refused(manifest: Callable[[], Manifest], want: str) -> None:
    """Each manifest breaks one rule of the geometry and is refused with it."""
    assert want in reason(encode_manifest(manifest()))


@given(st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(0, 9), max_size=5))
def test_tensor_nbytes_is_width_times_extents(dtype: Any, shape: list[int]) -> None:
    """The size of a tensor is the width of its type times its extents. A scalar has one element."""
    want = DTYPE_BYTES[dtype]
    for extent in shape:
        want *= extent
    assert Tensor("t", dtype, tuple(shape), 0).nbytes == want
