"""A safetensors header is accepted only if it covers its file's bytes exactly once. Each refusal names the rule."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.manifest import DTYPE_BYTES
from kelvin.contracts.errors import Refused
from snapshotter.intake.policy.safetensors_header import MAX_HEADER_BYTES, header_bytes, parse_header
from tests.snapshotter.models import Weight, raw_safetensors, safetensors, weight

F32_4 = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


def split(raw: bytes) -> tuple[bytes, int]:
    """Split a file into the parts that a client sends: the header, and the size."""
    return raw[: 8 + int.from_bytes(raw[:8], "little")], len(raw)


def reason_of(raw: bytes) -> str:
    with pytest.raises(Refused) as caught:
        parse_header("w.safetensors", *split(raw))
    assert isinstance(caught.value.failure, ArtifactRejected)
    assert caught.value.failure.path == "w.safetensors"
    return caught.value.failure.reason


def of(header: Any, data: bytes = bytes(16)) -> bytes:
    return raw_safetensors(json.dumps(header).encode(), data)


@pytest.mark.parametrize(
    ("raw", "want"),
    [
        pytest.param(b"", "begins with 8 bytes", id="an empty file"),
        pytest.param(b"\x02\0\0\0", "begins with 8 bytes", id="a file shorter than the prefix"),
        pytest.param((2).to_bytes(8, "little"), "but the file has 8", id="a header that the file does not hold"),
        pytest.param((1 << 63).to_bytes(8, "little"), "the limit is", id="a length of 2 to the 63"),
        pytest.param(raw_safetensors(b""), "does not begin with '{'", id="an empty header"),
        pytest.param(raw_safetensors(b"[]"), "does not begin with '{'", id="a list"),
        pytest.param(raw_safetensors(b" {}"), "does not begin with '{'", id="space before the object"),
        pytest.param(raw_safetensors(b"{"), "not valid JSON", id="half an object"),
        pytest.param(raw_safetensors(b"{}{}"), "not valid JSON", id="two objects"),
        pytest.param(raw_safetensors(b'{"a\xff":1}'), "not UTF-8", id="bytes that are not UTF-8"),
        pytest.param(
            raw_safetensors(b'{"a":' + b"[" * 200_000), "nested more than 64 deep", id="nesting that would overflow"
        ),
        pytest.param(raw_safetensors(b'{"a":1,"a":1}'), "occurs twice", id="a tensor named twice"),
        pytest.param(
            raw_safetensors(b'{"a":{"dtype":"F32","dtype":"F16","shape":[],"data_offsets":[0,4]}}', bytes(4)),
            "occurs twice",
            id="a field given twice",
        ),
        pytest.param(of({"__metadata__": {"a": 1}, "a": F32_4}), "texts to texts", id="metadata that holds a number"),
        pytest.param(of({"__metadata__": [], "a": F32_4}), "texts to texts", id="metadata that is a list"),
        pytest.param(of({"a": 1}), "must have exactly", id="a tensor that is a number"),
        pytest.param(of({"a": {**F32_4, "more": 1}}), "must have exactly", id="a field more"),
        pytest.param(of({"a": {"dtype": "F32", "shape": [4]}}), "must have exactly", id="a field less"),
        pytest.param(of({"": F32_4}), "a name has", id="a tensor without a name"),
        pytest.param(of({"x" * 1025: F32_4}), "a name has", id="a name that is too long"),
        pytest.param(raw_safetensors(b'{"\\ud800":1}'), "half of a surrogate", id="half a surrogate pair as a name"),
        pytest.param(of({"a": {**F32_4, "dtype": "F8_E4M3"}}), "is not one of", id="a dtype that is not served"),
        pytest.param(of({"a": {**F32_4, "dtype": 32}}), "is not one of", id="a dtype that is a number"),
        pytest.param(of({"a": {**F32_4, "shape": [-4]}}), "shape must be", id="a negative extent"),
        pytest.param(of({"a": {**F32_4, "shape": [4.0]}}), "shape must be", id="an extent that is a float"),
        pytest.param(of({"a": {**F32_4, "shape": [True, 4]}}), "shape must be", id="an extent that is a boolean"),
        pytest.param(of({"a": {**F32_4, "shape": 4}}), "shape must be", id="a shape that is a number"),
        pytest.param(of({"a": {**F32_4, "shape": [1] * 17}}), "shape must be", id="seventeen dimensions"),
        pytest.param(of({"a": {**F32_4, "data_offsets": [16, 0]}}), "begin <= end", id="offsets backwards"),
        pytest.param(of({"a": {**F32_4, "data_offsets": [-16, 0]}}), "begin <= end", id="a negative offset"),
        pytest.param(of({"a": {**F32_4, "data_offsets": [0, 16, 16]}}), "begin <= end", id="three offsets"),
        pytest.param(of({"a": {**F32_4, "data_offsets": [0, 16.0]}}), "begin <= end", id="an offset that is a float"),
        pytest.param(of({"a": {**F32_4, "shape": [5]}}), "its offsets span 16", id="a shape larger than the span"),
        pytest.param(of({"a": {**F32_4, "shape": [3]}}), "its offsets span 16", id="a shape smaller than the span"),
        pytest.param(of({"a": {**F32_4, "shape": [1 << 62, 1 << 62]}}), "span 16", id="a shape that would overflow"),
        pytest.param(of({"a": F32_4, "b": {**F32_4, "data_offsets": [8, 24]}}, bytes(24)), "overlaps", id="an overlap"),
        pytest.param(of({"a": F32_4, "b": F32_4}), "overlaps", id="two tensors on the same bytes"),
        pytest.param(of({"a": {**F32_4, "data_offsets": [4, 20]}}, bytes(20)), "a hole of 4", id="a hole at the start"),
        pytest.param(
            of({"a": F32_4, "b": {**F32_4, "data_offsets": [20, 36]}}, bytes(36)), "a hole of 4", id="a hole between"
        ),
        pytest.param(of({"a": F32_4}, bytes(17)), "the file has", id="a byte behind the last tensor"),
        pytest.param(of({"a": F32_4}, bytes(15)), "the file has", id="a file that was cut"),
        pytest.param(of({}, bytes(1)), "the file has", id="bytes without any tensor"),
    ],
)
def test_invalid_header_is_refused(raw: bytes, want: str) -> None:
    """The refusal names the fault of the header."""
    assert want in reason_of(raw)


def test_incomplete_header_is_refused() -> None:
    """A part of the header, or a header with an extra byte, is refused."""
    header, size = split(of({"a": F32_4}))
    with pytest.raises(Refused, match="were sent"):
        parse_header("w", header[:-1], size)
    with pytest.raises(Refused, match="were sent"):
        parse_header("w", header + b" ", size)


def test_header_limit_equals_the_reference_implementation() -> None:
    """A header of 100 MB is accepted, and one byte more is not, as in the reference implementation."""
    size = MAX_HEADER_BYTES + 1000
    assert header_bytes(MAX_HEADER_BYTES.to_bytes(8, "little"), size, "w") == MAX_HEADER_BYTES + 8
    with pytest.raises(Refused, match="the limit is"):
        header_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), size, "w")


def test_accepts_what_writers_write() -> None:
    """Metadata, padding after the JSON, empty tensors, scalars, and tensors in any order are accepted."""
    tensors = {"z": weight((2, 3), 1, "BF16"), "empty": Weight("F32", (0, 7), b""), "a": weight((), 2, "I64")}
    raw = safetensors(tensors, {"format": "pt"})
    header, _ = split(raw)
    padded = raw_safetensors(header[8:] + b"   ", raw[len(header) :])
    found = parse_header("w", *split(padded))
    assert {(tensor.name, tensor.dtype, tensor.shape) for tensor in found} == {
        ("z", "BF16", (2, 3)), ("empty", "F32", (0, 7)), ("a", "I64", ()),
    }  # fmt: skip
    for tensor in found:
        assert padded[tensor.offset : tensor.offset + tensor.nbytes] == tensors[tensor.name].data


weights = st.builds(
    weight,
    st.lists(st.integers(0, 5), max_size=4),
    st.integers(0, 1000),
    st.sampled_from(sorted(DTYPE_BYTES)),
)


@given(
    st.dictionaries(st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"), weights, max_size=6)
)
def test_finds_every_tensor(tensors: dict[str, Weight]) -> None:
    """The parser returns exactly the names, types, shapes and bytes of any set of tensors."""
    raw = safetensors(tensors)
    found = parse_header("w", *split(raw))
    assert {tensor.name for tensor in found} == tensors.keys()
    for tensor in found:
        want = tensors[tensor.name]
        assert (tensor.dtype, tensor.shape) == (want.dtype, want.shape)
        assert raw[tensor.offset : tensor.offset + tensor.nbytes] == want.data


@given(
    st.dictionaries(st.sampled_from("abc"), weights, max_size=3),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3),
)
def test_is_stricter_than_the_library(tensors: dict[str, Weight], edits: list[tuple[int, int]]) -> None:
    """If the parser accepts changed bytes, the reference implementation reads the same tensors."""
    raw = bytearray(safetensors(tensors))
    for at, value in edits:
        raw[at % len(raw)] = value
    try:
        found = parse_header("w", *split(bytes(raw)))
    except Refused:
        return
    try:
        reference = dict(deserialize(bytes(raw)))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise AssertionError(f"accepted what the library refuses: {error}") from error
    assert {tensor.name: list(tensor.shape) for tensor in found} == {n: t["shape"] for n, t in reference.items()}
    for tensor in found:
        assert bytes(reference[tensor.name]["data"]) == raw[tensor.offset : tensor.offset + tensor.nbytes]
