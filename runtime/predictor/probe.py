"""Known answers of a predictor: rows made by the rules of its signature, and its outputs for them.

Recording also proves that rows in one forward are independent: the same row alone gives the same output.
"""

from typing import Final

import numpy as np

from kelvin.contracts.artifacts.runtime_control import KnownTensor, Probe
from kelvin.contracts.artifacts.tensor_schema import Signature, TensorSpec, Value
from runtime.models.artifact_rejection import public_message
from runtime.predictor.arrays import Array, Arrays, as_array, from_recorded_tensor, is_finite, to_recorded_tensor
from runtime.predictor.onnx_session import OnnxSession, SignatureMismatch

ROWS: Final = 8
TOLERANCE: Final = 1e-4  # relative to the value, or to 1 if that is larger
_STEP: Final = 0x9E3779B1  # Knuth's multiplicative hashing: consecutive numbers give distant values
_SPAN: Final = 1 << 32


def example_rows(signature: Signature) -> Arrays:
    """Return ROWS rows: the signature's examples, or else floats in [-2, 2), small whole numbers and words."""
    return {spec.name: _example(spec, position) for position, spec in enumerate(signature.inputs)}


def _example(spec: TensorSpec, position: int) -> Array:
    shape = (ROWS, *spec.shape[1:])
    count = int(np.prod(shape))
    if spec.examples:
        values: list[Value] = [spec.examples[number % len(spec.examples)] for number in range(count)]
    else:
        values = [_value(spec, number + 7919 * position) for number in range(count)]
    return as_array(values, spec.datatype, shape)


def _value(spec: TensorSpec, number: int) -> Value:
    hashed = (number + 1) * _STEP % _SPAN
    match spec.datatype:
        case "FP32" | "FP64":
            return 4 * hashed / _SPAN - 2
        case "BOOL":
            return hashed % 2 == 1
        case "BYTES":
            return "abcdefgh"[hashed % 8]
        case _:
            return hashed % 8


def record(session: OnnxSession, signature: Signature) -> Probe:
    """Return the known answers. Raises ValueError with the reason: the model can't compute the rows, an output is not
    finite, or rows depend on each other.
    """
    inputs = example_rows(signature)
    try:
        outputs = session.run(inputs, ROWS)
        single_rows = [session.run({name: array[i : i + 1] for name, array in inputs.items()}, 1) for i in range(ROWS)]
    except SignatureMismatch as error:
        raise ValueError(str(error)) from error
    except Exception as error:
        raise ValueError(f"it does not compute example rows: {public_message(error)}") from error
    for index, (spec, array) in enumerate(zip(signature.outputs, outputs, strict=True)):
        if not is_finite(array):
            raise ValueError(f"'{spec.name}' is not finite for example rows")
        for row in range(ROWS):
            if _find_difference(array[row : row + 1], single_rows[row][index], TOLERANCE) is not None:
                raise ValueError(f"'{spec.name}' of a row depends on the rows beside it")
    return Probe(
        token_ids=(),
        top_ids=(),
        top_logits=(),
        tolerance=TOLERANCE,
        inputs=tuple(to_recorded_tensor(spec.name, inputs[spec.name]) for spec in signature.inputs),
        outputs=tuple(
            to_recorded_tensor(spec.name, array) for spec, array in zip(signature.outputs, outputs, strict=True)
        ),
    )


def verify(probe: Probe, session: OnnxSession, signature: Signature) -> str | None:
    """Return what is wrong, in words; None if the model reproduces its known answers."""
    if [tensor.name for tensor in probe.inputs] != [spec.name for spec in signature.inputs]:
        return "known answers for other inputs"
    if [tensor.name for tensor in probe.outputs] != [spec.name for spec in signature.outputs]:
        return "known answers for other outputs"
    inputs = {
        spec.name: from_recorded_tensor(tensor, spec)
        for tensor, spec in zip(probe.inputs, signature.inputs, strict=True)
    }
    try:
        outputs = session.run(inputs, _rows(probe.inputs))
    except Exception as error:
        return f"it raised: {public_message(error)}"
    for array, tensor, spec in zip(outputs, probe.outputs, signature.outputs, strict=True):
        if (difference := _find_difference(from_recorded_tensor(tensor, spec), array, probe.tolerance)) is not None:
            return f"'{spec.name}': {difference}"
    return None


def _rows(tensors: tuple[KnownTensor, ...]) -> int:
    return tensors[0].shape[0]


def _find_difference(expected: Array, actual: Array, tolerance: float) -> str | None:
    if expected.shape != actual.shape:
        return f"{list(actual.shape)} instead of {list(expected.shape)}"
    if expected.dtype.kind != "f":
        return None if bool(np.array_equal(expected, actual)) else "another value"
    errors = np.abs(actual.astype(np.float64) - expected) / np.maximum(1.0, np.abs(expected))
    # This comparison is False for NaN, so NaN counts as different.
    return None if bool((errors <= tolerance).all()) else f"off by {float(errors.max()):.4g}, tolerance {tolerance:.4g}"
