"""Directories of predictors: the files that they may hold, and the content of `signature.json`."""

import json
import math
from typing import Any

import pytest
from onnx import helper

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.push_api import PlanRequest, SmallFile, WeightsFile
from kelvin.contracts.artifacts.tensor_schema import TensorSpec
from kelvin.contracts.errors import Refused
from snapshotter.intake.policy.file_roles import is_predictor
from snapshotter.intake.policy.intake import admit
from tests.runtime.predictor import models
from tests.runtime.predictor.models import FLOAT, graph, request_of, signature_of, tensor

LINEAR = models.regression()
X = {"name": "x"}


def signature_file(*inputs: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": inputs, **more}).encode()


@pytest.mark.parametrize(
    ("paths", "want"),
    [
        pytest.param(["model.onnx"], True, id="a graph alone"),
        pytest.param(["README.md", "model.onnx", "config.json"], True, id="beside other files"),
        pytest.param(["model.onnx", "model.safetensors"], False, id="beside safetensors"),
        pytest.param(["onnx/model.onnx"], False, id="in a directory below"),
        pytest.param(["model.ONNX"], False, id="in capitals"),
    ],
)
def test_onnx_directory_is_a_predictor(paths: list[str], want: bool) -> None:
    assert is_predictor(paths) == want


def test_graph_alone_gives_the_signature() -> None:
    """Without a `signature.json`, the signature is the graph's."""
    found = admit(request_of(LINEAR, more=["README.md"]))
    assert found.signature is not None
    assert found.signature.inputs == (TensorSpec("x", "FP32", (-1, 4)),)
    assert [file.path for file in found.files] == ["model.onnx"]
    assert not found.tensors


def test_signature_file_adds_columns_and_examples() -> None:
    """`signature.json` adds column names and examples, and fixes extents that the graph leaves open."""
    spec = {"name": "x", "datatype": "FP32", "shape": [-1, 4], "columns": list("abcd"), "examples": [1, 2.5]}
    (found,) = signature_of(LINEAR, signature_file(spec)).inputs
    assert (found.columns, found.examples) == (("a", "b", "c", "d"), (1, 2.5))
    wide = graph([helper.make_node("Identity", ["x"], ["y"])], [tensor("x", FLOAT, None, None)],
                 [tensor("y", FLOAT, None, None)])  # fmt: skip
    assert signature_of(wide, signature_file({"name": "x", "shape": [-1, 7]})).inputs[0].shape == (-1, 7)
    with pytest.raises(Refused, match="all but its rows must be fixed"):
        signature_of(wide)


@pytest.mark.parametrize(
    ("signature", "want"),
    [
        pytest.param(b"[]", "not a JSON object", id="a list"),
        pytest.param(b'{"inputs": [], "inputs": []}', "occurs twice", id="a key twice"),
        pytest.param(signature_file(X, X), "named twice", id="a tensor twice"),
        pytest.param(signature_file({"name": "z"}), "'z' is not in", id="an unknown tensor"),
        pytest.param(signature_file(outputs=[{"name": "x"}]), "the output 'x'", id="an input among outputs"),
        pytest.param(signature_file(X | {"datatype": "FP64"}), "FP64 here and FP32", id="another type"),
        pytest.param(signature_file(X | {"datatype": "FP8"}), "Invalid enum value", id="an unknown type"),
        pytest.param(signature_file(X | {"shape": [-1, 5]}), "here and", id="another shape"),
        pytest.param(signature_file(X | {"shape": [-1]}), "here and", id="fewer dimensions"),
        pytest.param(signature_file(X | {"shape": [1, 4]}), "here and", id="fixed rows"),
        pytest.param(signature_file(X | {"columns": ["a"]}), "1 columns here", id="too few columns"),
        pytest.param(signature_file(X | {"columns": list("aabc")}), "named twice", id="a column twice"),
        pytest.param(signature_file(X | {"examples": ["a"]}), "must be FP32", id="an example of another type"),
        pytest.param(signature_file(X | {"examples": [1.0] * 1025}), "1024 at most", id="too many examples"),
        pytest.param(signature_file(X | {"examples": [1.0, math.nan]}), "must be FP32", id="NaN after a number"),
        pytest.param(signature_file(X | {"examples": [math.inf]}), "must be FP32", id="an infinite example"),
        pytest.param(signature_file(X | {"colums": []}), "unknown field", id="an unknown key"),
    ],
)
def test_refuses_a_signature(signature: bytes, want: str) -> None:
    """The refusal names the file and the rule."""
    with pytest.raises(Refused) as caught:
        admit(request_of(LINEAR, signature))
    failure = caught.value.failure
    assert isinstance(failure, ArtifactRejected)
    assert failure.path == "signature.json"
    assert want in failure.reason


def identity(*shape: int | None) -> Any:
    """Return a graph that computes y = x."""
    node = helper.make_node("Identity", ["x"], ["y"])
    return graph([node], [tensor("x", FLOAT, *shape)], [tensor("y", FLOAT, *shape)])


@pytest.mark.parametrize(
    ("model", "signature", "want"),
    [
        pytest.param(identity(None, 1 << 20, 2), None, "a row of all inputs has 2097152 values", id="by the graph"),
        pytest.param(
            identity(None, None, None), signature_file(X | {"shape": [-1, 1 << 19, 3]}), "has 1572864 values",
            id="by the signature",
        ),
        pytest.param(
            identity(None, None), signature_file(X | {"shape": [-1, 1 << 40]}), "a dimension is at most 1048576",
            id="a dimension",
        ),
        pytest.param(
            identity(None, None),
            signature_file(X | {"shape": [-1, 2]}, outputs=[{"name": "y", "shape": [-1, 10**30]}]),
            "a dimension is at most 1048576", id="a dimension of an output",
        ),
    ],
)  # fmt: skip
def test_refuses_too_large_rows(model: Any, signature: bytes | None, want: str) -> None:
    """Sealing makes rows of these shapes in memory, however small the graph is."""
    with pytest.raises(Refused, match=want):
        signature_of(model, signature)
    assert signature_of(identity(None, 1 << 20)).inputs[0].shape == (-1, 1 << 20)


RAW = LINEAR.SerializeToString()


@pytest.mark.parametrize(
    ("request_", "want"),
    [
        pytest.param(request_of(LINEAR, more=["model.pkl"]), "pickles can run code", id="a pickle beside it"),
        pytest.param(request_of(LINEAR, more=["transform.py"]), "code may not enter", id="code beside it"),
        pytest.param(request_of(LINEAR, more=["kelvin-filters.json"]), "that generate text", id="filters beside it"),
        pytest.param(request_of(LINEAR, more=["signature.json"]), "must be sent whole", id="a left-out signature"),
        pytest.param(
            PlanRequest(model="m", small_files=(), weights=(), other_paths=("model.onnx",)), "must be sent whole",
            id="a left-out graph",
        ),
        pytest.param(
            PlanRequest(model="m", small_files=(SmallFile(path="model.onnx", content=RAW),),
                        weights=(WeightsFile(path="x.tensors", size=1, header=b""),)),
            "all weights", id="weights beside it",
        ),
        pytest.param(
            PlanRequest(model="m", weights=(), small_files=(SmallFile(path="model.onnx", content=RAW),
                                                            SmallFile(path="config.json", content=b"{}"))),
            "not a file that such a version pins", id="a file that is not used",
        ),
        pytest.param(request_of(b"\0" * ((32 << 20) + 1)), "the limit is", id="too large"),
    ],
)  # fmt: skip
def test_refuses_a_directory(request_: PlanRequest, want: str) -> None:
    with pytest.raises(Refused, match=want):
        admit(request_)
