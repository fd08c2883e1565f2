"""Values of the protocol as numpy arrays and back. What fits a type is `kelvin.contracts.artifacts.tensor_schema`'s."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kelvin.contracts.artifacts.runtime_control import KnownTensor
from kelvin.contracts.artifacts.tensor_schema import Datatype, TensorSpec, Value

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

NUMPY_DTYPES: Final[Mapping[Datatype, npt.DTypeLike]] = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
    "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64, "FP32": np.float32, "FP64": np.float64,
    "BYTES": np.object_,
}  # fmt: skip


def as_array(values: Sequence[object], datatype: Datatype, shape: Sequence[int]) -> Array:
    """Row-major values that fit the type, as many as the shape says."""
    return np.array(values, dtype=NUMPY_DTYPES[datatype]).reshape(shape)


def find_array_fault(array: object, spec: TensorSpec, rows: int) -> str | None:
    """Why it is not the tensor of so many rows that the signature promises; None where it is."""
    if not isinstance(array, np.ndarray) or array.dtype != np.dtype(NUMPY_DTYPES[spec.datatype]):
        return f"'{spec.name}' is not {spec.datatype}"
    wanted = (rows, *spec.shape[1:])
    agrees = len(array.shape) == len(wanted) and all(
        promised in (-1, found) for found, promised in zip(array.shape, wanted, strict=True)
    )
    return None if agrees else f"'{spec.name}' comes out as {list(array.shape)}, not as {list(wanted)}"


def is_finite(array: Array) -> bool:
    """Whether JSON has a number for each of its numbers."""
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def to_recorded_tensor(name: str, array: Array) -> KnownTensor:
    """As it is recorded."""
    values: tuple[Value, ...] = tuple(array.ravel().tolist())
    return KnownTensor(name=name, shape=array.shape, data=values)


def from_recorded_tensor(tensor: KnownTensor, spec: TensorSpec) -> Array:
    """What was recorded."""
    return as_array(tensor.data, spec.datatype, tensor.shape)
