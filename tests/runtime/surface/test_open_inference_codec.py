"""Predictions are decoded strictly by the signature, and answered in the protocol's form."""

import asyncio
import json
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kelvin.contracts.artifacts.tensor_schema import TensorSpec, make_signature
from kelvin.contracts.errors import Failure, Internal, InvalidRequest, LimitExceeded, Refused, SchemaMismatch
from kelvin.contracts.serving.stream_frames import MAX_PAYLOAD, Counts
from runtime.drivers.interface import Event, Failed, Finished, Predicted
from runtime.surface.answer_builder import AnswerProgress
from runtime.surface.open_inference_codec import PredictionAnswerBuilder, PredictionCall, decode_prediction

SIGNATURE = make_signature(
    [TensorSpec("x", "FP32", (-1, 2)), TensorSpec("s", "BYTES", (-1,))],
    [TensorSpec("label", "BYTES", (-1,)), TensorSpec("p", "FP32", (-1, 2))],
)
X = {"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [1, 2.5, 3, 4]}
S = {"name": "s", "shape": [2], "datatype": "BYTES", "data": ["a", "ü"]}
MANY = 9 * 10**4299


def decode(body: Any, max_rows: int = 10) -> PredictionCall:
    return decode_prediction(body if isinstance(body, bytes) else json.dumps(body).encode(), SIGNATURE, max_rows)


def having(*inputs: Any, **more: Any) -> dict[str, Any]:
    return {"inputs": list(inputs), **more}


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        pytest.param(having(X, S), (0, 1), id="flat"),
        pytest.param(having(S, X), (0, 1), id="in another order"),
        pytest.param(having(X | {"data": [[1, 2.5], [3, 4]]}, S), (0, 1), id="nested"),
        pytest.param(having(X, S, outputs=[]), (0, 1), id="no outputs are all"),
        pytest.param(having(X, S, outputs=[{"name": "p"}, {"name": "label"}]), (1, 0), id="in the order asked"),
        pytest.param(having(X, S, parameters={"schema_hash": SIGNATURE.schema_hash}), (0, 1), id="the right schema"),
        pytest.param(
            having(X, S, parameters={"binary_data_output": False, "mine": [1]}, more=1), (0, 1), id="what asks nothing"
        ),
    ],
)
def test_decoded(body: dict[str, Any], outputs: tuple[int, ...]) -> None:
    """Inputs are flat and in the signature's order."""
    call = decode(body)
    assert [list(each.values) for each in call.inputs] == [[1, 2.5, 3, 4], ["a", "ü"]]
    assert [each.shape for each in call.inputs] == [(2, 2), (2,)]
    assert (call.rows, call.outputs) == (2, outputs)


@pytest.mark.parametrize(
    ("body", "want"),
    [
        pytest.param(b"{", "body=(JSON): ", id="no JSON"),
        pytest.param([], "body=[]: must be a JSON object", id="no object"),
        pytest.param(b'{"inputs":' + b"[" * 100_000, "body=(JSON): ", id="nested without an end"),
        pytest.param({}, "inputs=(missing): is required", id="no inputs"),
        pytest.param({"inputs": 1}, "inputs=1: Expected `array`", id="inputs that are none"),
        pytest.param(having({"name": "x"}), "inputs[0].shape=(missing): is required", id="no shape"),
        pytest.param(having(X), "the input 's' is required", id="one is missing"),
        pytest.param(having(X, S, X), "an input is given twice", id="one is given twice"),
        pytest.param(having(X, S, X | {"name": "z"}), 'inputs="z": the inputs of this version are x', id="a stranger"),
        pytest.param(having(X | {"datatype": "FP64"}, S), 'inputs.x.datatype="FP64": must be FP32', id="another type"),
        pytest.param(having(X | {"shape": [2, 3]}, S), "must be [rows (1 or more), 2]", id="another shape"),
        pytest.param(having(X | {"shape": [4]}, S), "must be [rows (1 or more), 2]", id="fewer dimensions"),
        pytest.param(having(X | {"shape": [0, 2]}, S), "must be [rows (1 or more), 2]", id="no row"),
        pytest.param(having(X | {"shape": [-1, 2]}, S), "must be [rows (1 or more), 2]", id="a negative row"),
        pytest.param(having(X | {"data": [1, 2, 3]}, S), "(3 values)\": must be 4", id="too few values"),
        pytest.param(having(X | {"data": [[1, 2], [3]]}, S), "lists of 2 at depth 1", id="ragged lists"),
        pytest.param(having(X | {"data": [[1, 2], 3]}, S), "lists of 2 at depth 1", id="half nested"),
        pytest.param(having(X | {"data": [[1, 2]] * 3}, S), "must be 4", id="too many lists"),
        pytest.param(having(X | {"data": [[[1], [2]], [[3], [4]]]}, S), "must be FP32", id="nested too deeply"),
        pytest.param(having(X | {"data": [1, 2, None, 4]}, S), "inputs.x.data[2]=\"null\": must be FP32", id="null"),
        pytest.param(having(X | {"data": [1, 2, 1e39, 4]}, S), "inputs.x.data[2]", id="out of range"),
        pytest.param(having(X, S | {"data": ["a", 1]}), "inputs.s.data[1]=\"1\": must be BYTES", id="no text"),
        pytest.param(having(X, S | {"shape": [1], "data": ["a"]}), "same number of rows", id="rows that differ"),
        pytest.param(having(X, S, outputs=[{"name": "z"}]), "the outputs of this version are label, p", id="no output"),
        pytest.param(having(X, S, outputs=[{"name": "p"}] * 2), "requested twice", id="an output twice"),
        pytest.param(having(X, S, id="i" * 257), "at most 256 characters", id="a long id"),
        pytest.param(having(X | {"parameters": {"binary_data_size": 16}}, S), "is not supported", id="binary data"),
        pytest.param(having(X, S, parameters={"binary_data_output": True}), "is not supported", id="binary answers"),
        pytest.param(having(X, S, outputs=[{"name": "p", "parameters": {"classification": 2}}]), "is not supported",
                     id="an extension"),
        pytest.param(having(X, S, parameters={"schema_hash": 1}), "must be a text", id="a hash that is none"),
    ],
)  # fmt: skip
def test_refused(body: Any, want: str) -> None:
    """The refusal names field, value and rule."""
    with pytest.raises(Refused) as caught:
        decode(body)
    assert isinstance(caught.value.failure, InvalidRequest)
    assert want in caught.value.failure.message


@pytest.mark.parametrize(
    ("body", "max_rows", "want"),
    [
        pytest.param(having(X, S), 1, LimitExceeded("inputs", 2, 1, "rows"), id="too many rows"),
        pytest.param(having(X | {"shape": [MANY, 2]}, S), 10, LimitExceeded("inputs", MANY, 10, "rows"),
                     id="rows of more digits than Python writes"),
        pytest.param(having(X, S, parameters={"schema_hash": "0" * 64}), 10,
                     SchemaMismatch("0" * 64, SIGNATURE.schema_hash), id="another schema"),
    ],
)  # fmt: skip
def test_prediction_over_limit_or_off_schema_is_refused(body: Any, max_rows: int, want: Failure) -> None:
    """Each refusal has its own code."""
    with pytest.raises(Refused) as caught:
        decode(body, max_rows)
    assert caught.value.failure == want


COUNTS = Counts(prompt_tokens=3, device_us=7)
FIRST = (np.array(["a", "b"], object), np.array([[1, 0], [0.25, 0.75]], np.float32))
SECOND = (np.array(["c"], object), np.array([[0.5, 0.5]], np.float32))


def answer(outputs: tuple[int, ...] = (0, 1), id: str | None = None) -> PredictionAnswerBuilder:
    return PredictionAnswerBuilder("m", "v" * 64, SIGNATURE, PredictionCall(3, (), outputs, id))


def fed(feed: PredictionAnswerBuilder, events: Sequence[Event]) -> AnswerProgress:
    return asyncio.run(feed.add_events(events))


def test_prediction_answer_holds_all_rows_in_order() -> None:
    """All rows are in order, each output flat with its shape, and nothing is sent before the last row."""
    events: list[Event] = [Predicted("r", FIRST, COUNTS), Predicted("r", SECOND, COUNTS)]
    feed = answer(id="42")
    assert fed(feed, events).data == b""
    progress = fed(feed, [Finished("r", "stop", COUNTS)])
    assert json.loads(progress.data) == {
        "model_name": "m",
        "model_version": "v" * 64,
        "id": "42",
        "outputs": [
            {"name": "label", "datatype": "BYTES", "shape": [3], "data": ["a", "b", "c"]},
            {"name": "p", "datatype": "FP32", "shape": [3, 2], "data": [1, 0, 0.25, 0.75, 0.5, 0.5]},
        ],
    }
    assert (progress.reason, progress.counts) == ("stop", COUNTS)


def test_only_requested_outputs_are_returned() -> None:
    """Only requested outputs are sent, and no id if none was given."""
    progress = fed(answer((1,)), [Predicted("r", FIRST, COUNTS), Finished("r", "stop", COUNTS)])
    found = json.loads(progress.data)
    assert "id" not in found
    assert [output["name"] for output in found["outputs"]] == ["p"]


def test_an_answer_that_fails() -> None:
    """A failure has no data. An answer too long for a frame is refused."""
    progress = fed(answer(), [Predicted("r", FIRST, COUNTS), Failed("r", Internal(), COUNTS)])
    assert (progress.data, progress.failure) == (b"", Internal())
    long = (np.array(["x" * (MAX_PAYLOAD // 2)] * 2, object), FIRST[1])
    progress = fed(answer(), [Predicted("r", long, COUNTS), Finished("r", "stop", COUNTS)])
    assert isinstance(progress.failure, LimitExceeded)
    assert not progress.data


def test_rows_of_different_shapes_are_no_answer() -> None:
    """One shape can't describe batches of different widths. Outputs that were not requested may differ."""
    wide = (FIRST[0], np.zeros((2, 3), np.float32))
    events: list[Event] = [Predicted("r", FIRST, COUNTS), Predicted("r", wide, COUNTS)]
    progress = fed(answer(), events)
    assert isinstance(progress.failure, InvalidRequest)
    assert "the model's 'p' has another shape for some rows" in progress.failure.message
    assert fed(answer((0,)), events).failure is None


def test_answer_that_can_only_be_too_long_is_not_written_out() -> None:
    """An answer is refused at the first rows that exceed a frame. Unrequested outputs don't count."""
    wide = (FIRST[0], np.zeros((1, MAX_PAYLOAD // 2 + 1), np.float32))
    tracemalloc.start()
    try:
        progress = fed(answer(), [Predicted("r", wide, COUNTS)])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert isinstance(progress.failure, LimitExceeded)
    assert fed(answer((0,)), [Predicted("r", wide, COUNTS)]).failure is None


def test_many_values_are_answered_as_json() -> None:
    """Values are row-major over all parts and pieces, also for no rows."""
    count = 10_001
    texts = np.array([f"ü{at}" for at in range(count)], object)
    numbers = np.arange(2 * count, dtype=np.float32).reshape(2, count).T  # not contiguous
    none = (np.array([], object), np.zeros((0, 2), np.float32))
    for parts in ([(texts, numbers), FIRST], [none, FIRST, none], [none]):
        events: list[Event] = [Predicted("r", part, COUNTS) for part in parts]
        progress = fed(answer(), [*events, Finished("r", "stop", COUNTS)])
        label, p = json.loads(progress.data)["outputs"]
        whole = np.concatenate([part[1] for part in parts])
        assert label["data"] == np.concatenate([part[0] for part in parts]).tolist()
        assert (p["shape"], p["data"]) == (list(whole.shape), whole.ravel().tolist())


def test_long_answer_leaves_turns_to_other_requests() -> None:
    """The event loop runs other tasks while the answer is encoded."""

    async def count_turns() -> int:
        rows = Predicted("r", (FIRST[0], np.zeros((1024, 4000), np.float32)), COUNTS)
        encoded = asyncio.ensure_future(answer((1,)).add_events([rows, Finished("r", "stop", COUNTS)]))
        turns = 0
        while not encoded.done():
            await asyncio.sleep(0)
            turns += 1
        assert encoded.result().reason == "stop"
        return turns

    assert asyncio.run(count_turns()) > 100


def test_too_long_answer_is_not_written_to_its_end() -> None:
    """Encoding stops once the answer is longer than a frame."""
    events = [Predicted("r", (FIRST[0], np.full((700, 4000), 0.123456, np.float32)), COUNTS)]
    tracemalloc.start()
    try:
        progress = fed(answer((1,)), [*events, Finished("r", "stop", COUNTS)])
        assert tracemalloc.get_traced_memory()[1] < 2 * MAX_PAYLOAD
    finally:
        tracemalloc.stop()
    assert isinstance(progress.failure, LimitExceeded)
    assert not progress.data
