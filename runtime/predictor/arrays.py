"""Convert the protocol's values to numpy arrays and back. `tensor_schema.py` in contracts validates values."""

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
    """Return an array of row-major values. They must fit the type and the shape."""
    return np.array(values, dtype=NUMPY_DTYPES[datatype]).reshape(shape)


def find_array_fault(array: object, spec: TensorSpec, rows: int) -> str | None:
    """Return why `array` is not the signature's tensor with `rows` rows; None if it is."""
    if not isinstance(array, np.ndarray) or array.dtype != np.dtype(NUMPY_DTYPES[spec.datatype]):
        return f"'{spec.name}' is not {spec.datatype}"
    expected_shape = (rows, *spec.shape[1:])
    is_equal = len(array.shape) == len(expected_shape) and all(
        expected in (-1, extent) for extent, expected in zip(array.shape, expected_shape, strict=True)
    )
    return None if is_equal else f"'{spec.name}' has shape {list(array.shape)}, not {list(expected_shape)}"


def is_finite(array: Array) -> bool:
    """Return whether JSON can represent every number in the array."""
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def to_recorded_tensor(name: str, array: Array) -> KnownTensor:
    """Return the array in the form of a known answer."""
    values: tuple[Value, ...] = tuple(array.ravel().tolist())
    return KnownTensor(name=name, shape=array.shape, data=values)


def from_recorded_tensor(tensor: KnownTensor, spec: TensorSpec) -> Array:
    """Return the array of a known answer."""
    return as_array(tensor.data, spec.datatype, tensor.shape)
