"""The engine of predictors: a row is a row of the input arrays. `batch_engine.py` forms the batches."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from kelvin.contracts.artifacts.runtime_control import Probe
from kelvin.contracts.artifacts.tensor_schema import Signature
from kelvin.contracts.errors import Failure, Internal, InvalidRequest, LimitExceeded
from runtime.drivers.batch_engine import BatchEngine, RowRange
from runtime.drivers.batching_policy import BatchingWindow, next_row_limit
from runtime.drivers.interface import Event, Predicted, PredictionRequest, Request
from runtime.predictor import probe as known_answers
from runtime.predictor.arrays import Array, find_array_fault, is_finite
from runtime.predictor.onnx_session import OnnxSession, SignatureMismatch

_log = logging.getLogger(__name__)

BATCH_ROWS: Final = 1024
FIRST_ROWS: Final = 16  # limit of the first forward, when the cost of a row is unknown
Outputs = tuple[Array, ...]


class PredictorEngine(BatchEngine[PredictionRequest, Outputs]):
    """The engine of one ONNX session. A row counts as a token."""

    def __init__(
        self,
        session: OnnxSession,
        signature: Signature,
        *,
        version: str,
        max_rows: int,
        probe: Probe | None = None,
        max_waiting: int = 1024,
        batch_rows: int = BATCH_ROWS,
        window: BatchingWindow | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        super().__init__(
            version=version,
            probe=probe,
            probe_tokens=known_answers.ROWS,
            max_waiting=max_waiting,
            max_tokens=min(FIRST_ROWS, batch_rows),
            window=window,
            clock_ns=clock_ns,
        )
        self._session = session
        self._signature = signature
        self._max_rows = max_rows
        self._batch_rows = batch_rows

    def _accept(self, request: Request) -> PredictionRequest | Failure:
        if not isinstance(request, PredictionRequest):
            return Internal()  # the API sends a predictor nothing else
        if request.rows < 1:
            return InvalidRequest("inputs", "[]", "must hold a row")
        if request.rows > self._max_rows:
            return LimitExceeded("inputs", request.rows, self._max_rows, "rows")
        if request.inputs.keys() != {spec.name for spec in self._signature.inputs}:
            return Internal()
        for spec in self._signature.inputs:
            if (fault := find_array_fault(request.inputs[spec.name], spec, request.rows)) is not None:
                _log.error("an input was not checked: %s", fault)
                return Internal()
        return request

    def _costs(self, request: PredictionRequest) -> Sequence[int]:
        return (1,) * request.rows

    def _forward(
        self, ranges: Sequence[RowRange[PredictionRequest]], probe: Probe | None
    ) -> tuple[list[Outputs | Failure], str | None]:
        """Run the ranges. Known answers run separately, because their rows may differ in length from a request's."""
        if probe is not None:
            mismatch = known_answers.verify(probe, self._session, self._signature)
            if mismatch is not None or not ranges:
                return [], mismatch
        try:
            outputs = self._run(ranges)
        except Exception as error:
            _log.warning("a forward of %d requests failed: %s", len(ranges), type(error).__name__)
            return [self._try_run(rows) for rows in ranges], None
        answers: list[Outputs | Failure] = []
        start = 0
        for rows in ranges:
            answers.append(self._finite_or_failure(tuple(array[start : start + rows.count] for array in outputs)))
            start += rows.count
        return answers, None

    def _run(self, ranges: Sequence[RowRange[PredictionRequest]]) -> list[Array]:
        inputs = {}
        for spec in self._signature.inputs:
            arrays = [rows.live.request.inputs[spec.name][rows.start : rows.stop] for rows in ranges]
            inputs[spec.name] = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        count, began_ns = sum(rows.count for rows in ranges), self._clock_ns()
        outputs = self._session.run(inputs, count)
        # A graph reports no progress, so keep forwards short: a long one would count as hanging.
        elapsed_s = (self._clock_ns() - began_ns) / 1e9
        self._max_tokens = next_row_limit(count, elapsed_s, self._max_tokens, self._batch_rows)
        return outputs

    def _try_run(self, rows: RowRange[PredictionRequest]) -> Outputs | Failure:
        try:
            return self._finite_or_failure(tuple(self._run([rows])))
        except SignatureMismatch as error:
            _log.error("an output does not match the signature: %s", error)
            return Internal()
        except Exception as error:
            # Types and shapes are right, but the graph refuses a value, such as an unknown category.
            # Don't log the library's message, which may quote values.
            _log.warning("the graph refuses the values of a request: %s", type(error).__name__)
            return InvalidRequest("inputs", "(values)", "the model does not accept these values")

    def _finite_or_failure(self, outputs: Outputs) -> Outputs | Failure:
        for array, spec in zip(outputs, self._signature.outputs, strict=True):
            if not is_finite(array):
                rule = f"the model's '{spec.name}' is not finite for them, which JSON can't represent"
                return InvalidRequest("inputs", "(values)", rule)
        return outputs

    def _events(self, rows: RowRange[PredictionRequest], answer: Outputs) -> list[Event]:
        return [Predicted(rows.live.request.request_id, answer, rows.live.counts)]
