"""Callers can compute a signature's hash themselves. Values are checked as JSON has them."""

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kelvin.contracts.artifacts.tensor_schema import (
    Datatype,
    TensorSpec,
    check_schema,
    find_invalid_value,
    find_signature_fault,
    make_signature,
    range_of,
    schema_hash_of,
)
from kelvin.contracts.errors import Refused, SchemaMismatch

X = TensorSpec("x", "FP32", (-1, 2), columns=("äge", "income"))
Y = TensorSpec("y", "INT64", (-1,))
GOOD = make_signature([X], [Y])


def test_schema_hash_is_sha256_of_canonical_json() -> None:
    """The hash is the SHA-256 of the metadata's canonical JSON. It is fixed here, so that it never changes."""
    metadata = {"inputs": [X.described()], "outputs": [Y.described()]}
    text = json.dumps(metadata, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert GOOD.schema_hash == hashlib.sha256(text.encode()).hexdigest()
    assert GOOD.schema_hash == "dee16e8c4fe4c9af6f32f261a4d7487f7d3de4b9134c551312fce1cadd62a446"


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(structs.replace(X, name="z"), id="a name"),
        pytest.param(structs.replace(X, datatype="FP64"), id="a type"),
        pytest.param(structs.replace(X, shape=(-1, 3)), id="a shape"),
        pytest.param(structs.replace(X, columns=("income", "äge")), id="the order of columns"),
        pytest.param(structs.replace(X, columns=()), id="no columns"),
    ],
)
def test_another_schema_has_another_hash(other: TensorSpec) -> None:
    """A changed schema has another hash. The refusal shows the right one."""
    assert schema_hash_of([other], [Y]) != GOOD.schema_hash
    with pytest.raises(Refused) as caught:
        check_schema(schema_hash_of([other], [Y]), GOOD)
    assert isinstance(caught.value.failure, SchemaMismatch)
    assert GOOD.schema_hash in caught.value.failure.message


def test_examples_do_not_change_the_schema_hash() -> None:
    """Examples don't change the hash; they only change known answers."""
    check_schema(schema_hash_of([structs.replace(X, examples=(1.0,))], [Y]), GOOD)


@pytest.mark.parametrize("given", ["", "0" * 64, GOOD.schema_hash.upper(), GOOD.schema_hash[:32]])
def test_any_other_schema_hash_is_refused(given: str) -> None:
    with pytest.raises(Refused, match="schema_mismatch"):
        check_schema(given, GOOD)


@pytest.mark.parametrize(
    ("signature", "want"),
    [
        pytest.param(structs.replace(GOOD, schema_hash="0" * 64), "hash", id="another hash"),
        pytest.param(make_signature([], [Y]), "an input and an output", id="no input"),
        pytest.param(make_signature([X, X], [Y]), "twice", id="a name twice"),
        pytest.param(
            make_signature([structs.replace(X, shape=(1, 2))], [Y]), "must be open", id="a fixed number of rows"
        ),
        pytest.param(make_signature([structs.replace(X, shape=(-1, -1))], [Y]), "only the first", id="open columns"),
        pytest.param(make_signature([X], [structs.replace(Y, shape=())]), "must be open", id="an output without rows"),
    ],
)
def test_each_signature_rule_is_checked(signature: Any, want: str) -> None:
    """Each signature breaks one rule and is refused with it."""
    assert want in str(find_signature_fault(signature))
    assert find_signature_fault(GOOD) is None


@pytest.mark.parametrize(
    ("datatype", "values", "want"),
    [
        pytest.param("INT8", [1, -128, 127], None, id="within the range"),
        pytest.param("INT8", [1, 128], 1, id="above the range"),
        pytest.param("UINT8", [0, -1], 1, id="below the range"),
        pytest.param("INT64", [2**63 - 1, 2**63], 1, id="64 bits"),
        pytest.param("INT32", [1, True], 1, id="a boolean is no number"),
        pytest.param("INT32", [1.0], 0, id="a fraction is no whole number"),
        pytest.param("FP32", [1, 2.5], None, id="whole numbers are floats"),
        pytest.param("FP32", [0.0, 3.5e38], 1, id="more than float32 has"),
        pytest.param(
            "FP32", [3.4028235e38, -3.4028235e38, 3.4028234663852886e38], None, id="float32's bounds, in short"
        ),
        pytest.param("FP32", [3.4028235677973362e38, 3.4028235677973366e38], 1, id="a number that rounds to infinity"),
        pytest.param("FP32", [2**128 - 2**103], 0, id="a whole number that rounds to infinity"),
        pytest.param("FP64", [3.5e38, 10**400], 1, id="more than float64 has"),
        pytest.param("FP32", ["1"], 0, id="a text is no number"),
        pytest.param("FP32", [0.5, None], 1, id="null is no number"),
        pytest.param("FP32", [[1.0]], 0, id="a list is no number"),
        pytest.param("BOOL", [True, 1], 1, id="a number is no boolean"),
        pytest.param("BYTES", ["a", 1], 1, id="a number is no text"),
        pytest.param("BYTES", [], None, id="nothing"),
    ],
)
def test_first_value_of_the_wrong_type_is_found(datatype: Datatype, values: list[object], want: int | None) -> None:
    """The index of the first value that doesn't fit the type is returned."""
    assert find_invalid_value(values, datatype) == want


@given(st.sampled_from(["UINT8", "INT16", "UINT32", "INT64", "FP32"]), st.lists(st.integers(-(2**65), 2**65)))
def test_out_of_range_value_is_found(datatype: Datatype, values: list[int]) -> None:
    """The check of a whole list finds the same value as a check of each value."""
    low, high = range_of(datatype)
    wrong = [at for at, value in enumerate(values) if not low <= value <= high]
    assert find_invalid_value(values, datatype) == (wrong[0] if wrong else None)
