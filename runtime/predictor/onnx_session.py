"""A version's graph in ONNX Runtime, built from verified bytes in memory and checked against the version's signature.

ONNX Runtime is imported after the fork, because its import starts a thread, and a zygote must have none.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from kelvin.contracts.artifact_errors import ArtifactRejected
from kelvin.contracts.artifacts.tensor_schema import ANY_EXTENT, Signature, TensorSpec
from kelvin.contracts.errors import Refused, Unavailable
from runtime.models.artifact_rejection import public_message
from runtime.predictor.arrays import Array, find_array_fault

MODEL: Final = "model.onnx"
_FATAL_ONLY: Final = 4  # its messages go to standard error and contain source locations
_TYPES: Final[Mapping[str, str]] = {
    "tensor(bool)": "BOOL", "tensor(uint8)": "UINT8", "tensor(uint16)": "UINT16", "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64", "tensor(int8)": "INT8", "tensor(int16)": "INT16", "tensor(int32)": "INT32",
    "tensor(int64)": "INT64", "tensor(float)": "FP32", "tensor(double)": "FP64", "tensor(string)": "BYTES",
}  # fmt: skip


class SignatureMismatch(Exception):
    """The graph's output does not match the signature."""


class OnnxSession:
    """One model on `threads` cores. Create it after the fork; use it in one thread."""

    def __init__(self, model: bytes, signature: Signature, threads: int) -> None:
        """Raises `Refused`: Unavailable without the library, ArtifactRejected if the library rejects the graph or finds
        inputs or outputs that differ from the signature recorded at the push.
        """
        library = _library()
        options = library.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = _FATAL_ONLY
        # A spinning idle thread would take a core from threads with work.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = library.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the library's exceptions have no common base class
            raise Refused(
                ArtifactRejected(MODEL, f"ONNX Runtime does not accept it: {public_message(error)}")
            ) from error
        self._signature = signature
        self._names = [spec.name for spec in signature.outputs]
        for specs, nodes in ((signature.inputs, self._session.get_inputs()),
                             (signature.outputs, self._session.get_outputs())):  # fmt: skip
            _check_signature(specs, nodes)

    def run(self, inputs: Mapping[str, Array], rows: int) -> list[Array]:
        """Return the outputs in the signature's order, each [rows, …]. Raises the library's exceptions, and
        SignatureMismatch if an output does not match the signature.
        """
        outputs = self._session.run(self._names, dict(inputs))
        for array, spec in zip(outputs, self._signature.outputs, strict=True):
            if (fault := find_array_fault(array, spec, rows)) is not None:
                raise SignatureMismatch(fault)
        return list(outputs)


def fingerprint() -> str:
    """Return the library and its version. Raises `Refused(Unavailable)` without the library."""
    return f"onnxruntime {_library().__version__}"


@cache
def installed_fingerprint() -> str | None:
    """Return `fingerprint` without importing the library; None if it is not installed."""
    try:
        return f"onnxruntime {version('onnxruntime')}"
    except PackageNotFoundError:
        return None


def _library() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise Refused(Unavailable("ONNX Runtime (the extra 'onnx')")) from error
    return onnxruntime


def _check_signature(specs: Sequence[TensorSpec], nodes: Sequence[Any]) -> None:
    unexpected = {node.name: node for node in nodes}
    for spec in specs:
        node = unexpected.pop(spec.name, None)
        if node is None or _TYPES.get(node.type) != spec.datatype or not _shapes_match(node.shape, spec.shape):
            raise Refused(
                ArtifactRejected(
                    MODEL, f"ONNX Runtime reads '{spec.name}' with another type or shape than the push did"
                )
            )
    if unexpected:
        raise Refused(ArtifactRejected(MODEL, f"ONNX Runtime reads '{min(unexpected)}', which the push did not find"))


def _shapes_match(graph_shape: Sequence[Any], signature_shape: Sequence[int]) -> bool:
    """Compare shapes. An extent that the library leaves open is a name or None; two numbers must be equal."""
    return len(graph_shape) == len(signature_shape) and all(
        expected in (ANY_EXTENT, extent) or not isinstance(extent, int)
        for extent, expected in zip(graph_shape, signature_shape, strict=True)
    )
