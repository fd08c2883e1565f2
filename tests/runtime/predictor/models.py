"""Small ONNX graphs made in the tests, and versions of them in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from blake3 import blake3
from onnx import TensorProto, helper

from kelvin.contracts.artifacts.manifest import (
    CHUNK_BYTES,
    Chunk,
    Engine,
    Limits,
    Manifest,
    PinnedFile,
    encode_manifest,
)
from kelvin.contracts.artifacts.push_api import PlanRequest, SmallFile
from kelvin.contracts.artifacts.tensor_schema import Signature
from runtime.drivers.interface import Event, Predicted, PredictionRequest
from runtime.predictor.engine import PredictorEngine
from runtime.predictor.onnx_session import OnnxSession
from snapshotter.intake.policy.intake import admit
from tests.runtime.restoring import sealed_lease
from tests.runtime.versions import MemoryLease
from tests.weightcache.kit import Version, pad

OPSETS = (helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3))
FLOAT, STRING, INT64 = TensorProto.FLOAT, TensorProto.STRING, TensorProto.INT64
WEIGHTS = np.random.default_rng(1).normal(size=(4, 2)).astype(np.float32)


def tensor(name: str, kind: int, *shape: int | str | None) -> Any:
    """Return an input or output."""
    return helper.make_tensor_value_info(name, kind, list(shape))


def graph(
    nodes: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    weights: Mapping[str, Any] | None = None,
    opsets: Sequence[Any] = OPSETS,
) -> Any:
    """Return an ONNX model of these nodes."""
    initializers = [onnx.numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    made = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    return helper.make_model(made, opset_imports=opsets, ir_version=8)


def regression() -> Any:
    """y = x W, of four columns."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    return graph(nodes, [tensor("x", FLOAT, None, 4)], [tensor("y", FLOAT, None, 2)], {"w": WEIGHTS})


def classifier() -> Any:
    """Classes `left`, `right` and `grün` by the scores of two columns."""
    node = helper.make_node(
        "LinearClassifier", ["x"], ["label", "scores"], domain="ai.onnx.ml",
        coefficients=[1.0, 0.0, 0.0, 1.0, -1.0, -1.0], intercepts=[0.0, 0.1, 0.2],
        classlabels_strings=["left", "right", "grün"], multi_class=1, post_transform="SOFTMAX",
    )  # fmt: skip
    outputs = [tensor("label", STRING, None), tensor("scores", FLOAT, None, 3)]
    return graph([node], [tensor("x", FLOAT, "rows", 2)], outputs)


def picky() -> Any:
    """One-hot of two known colours. It fails on any other."""
    node = helper.make_node(
        "OneHotEncoder", ["colour"], ["hot"], domain="ai.onnx.ml", cats_strings=["red", "green"], zeros=0
    )
    return graph([node], [tensor("colour", STRING, None, 1)], [tensor("hot", FLOAT, None, 1, 2)])


def centred() -> Any:
    """A row minus the mean of all rows in the batch, which no served model may do."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["m"], axes=[0], keepdims=1),
        helper.make_node("Sub", ["x", "m"], ["y"]),
    ]
    return graph(nodes, [tensor("x", FLOAT, None, 4)], [tensor("y", FLOAT, None, 4)])


def logarithm() -> Any:
    """A logarithm, which gives no number for a row of 0 or less."""
    return graph([helper.make_node("Log", ["x"], ["y"])], [tensor("x", FLOAT, None, 1)], [tensor("y", FLOAT, None, 1)])


def request_of(model: Any, signature: bytes | None = None, more: Sequence[str] = ()) -> PlanRequest:
    """Return a push request for a directory with this graph."""
    raw = model if isinstance(model, bytes) else model.SerializeToString()
    small = [SmallFile(path="model.onnx", content=raw)]
    if signature is not None:
        small.append(SmallFile(path="signature.json", content=signature))
    return PlanRequest(model="m", small_files=tuple(small), weights=(), other_paths=tuple(more))


def signature_of(model: Any, signature: bytes | None = None) -> Signature:
    """Return the signature that intake reads."""
    found = admit(request_of(model, signature)).signature
    assert found is not None
    return found


def version_of(model: Any, signature: bytes | None = None) -> Version:
    """Return a version with manifest and bytes."""
    files = {"model.onnx": model.SerializeToString()} | ({} if signature is None else {"signature.json": signature})
    pinned, bodies, at = [], [], 0
    for path, content in sorted(files.items()):
        pinned.append(PinnedFile(path, at, len(content), blake3(content).hexdigest()))
        bodies.append(pad(content))
        at += len(bodies[-1])
    manifest = Manifest(
        format=1,
        engine=Engine(1, "onnx", "float32", "predict"),
        limits=Limits(100, 1, 8),
        chunk_bytes=CHUNK_BYTES,
        files=tuple(pinned),
        tensors=(),
        chunks=tuple(Chunk(blake3(body).hexdigest(), len(body)) for body in bodies),
        signature=signature_of(model, signature),
    )
    return Version(encode_manifest(manifest), manifest, tuple(bodies))


def sealed(model: Any, signature: bytes | None = None) -> MemoryLease:
    """Return a sealed version."""
    return sealed_lease(MemoryLease(version_of(model, signature)))


@dataclass(frozen=True)
class Predictor:
    """A session with its signature."""

    session: OnnxSession
    signature: Signature

    def engine(self, **options: Any) -> PredictorEngine:
        return PredictorEngine(self.session, self.signature, **{"version": "v", "max_rows": 50, **options})


def opened(model: Any, signature: bytes | None = None) -> Predictor:
    """Open the graph with ONNX Runtime on one core."""
    found = signature_of(model, signature)
    return Predictor(OnnxSession(model.SerializeToString(), found, 1), found)


def ask(request_id: str, **inputs: Any) -> PredictionRequest:
    return PredictionRequest(request_id=request_id, rows=len(next(iter(inputs.values()))), inputs=inputs)


def outputs_of(events: Sequence[Event], request_id: str, at: int = 0) -> Any:
    """Return one output of all rows of a request, in order."""
    parts = [event.outputs[at] for event in events if isinstance(event, Predicted) and event.request_id == request_id]
    return np.concatenate(parts)
