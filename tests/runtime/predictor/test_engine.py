"""Rows give the same in any batch, costs are exact, a fault costs one request, and the probe must match."""

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from onnx import helper

from kelvin.contracts.artifact_errors import ArtifactRejected, ProbeFailed
from kelvin.contracts.errors import Failure, Internal, InvalidRequest, LimitExceeded, Refused, Unavailable
from kelvin.contracts.traffic_errors import Overloaded
from runtime.drivers.batching_policy import BatchingWindow
from runtime.drivers.interface import Cancelled, Event, Failed, Finished, GenerationRequest, Predicted, Sampling
from runtime.predictor import probe as known_answers
from runtime.predictor.onnx_session import OnnxSession
from tests.runtime.driving import run_to_end
from tests.runtime.predictor import models
from tests.runtime.predictor.models import WEIGHTS, ask, opened, outputs_of

ROWS = np.random.default_rng(2).normal(size=(60, 4)).astype(np.float32)
WANTED = ROWS @ WEIGHTS
LINEAR = opened(models.regression())


def test_rows_of_shared_forwards_return_to_their_request() -> None:
    """Requests share forwards, are split over several, and get their own rows in order."""
    engine = LINEAR.engine(batch_rows=16)
    for at in range(0, 60, 20):
        assert engine.admit(ask(str(at), x=ROWS[at : at + 20])) is None
    events = run_to_end(engine)
    assert sum(isinstance(event, Predicted) for event in events) > 3
    for at in range(0, 60, 20):
        assert np.allclose(outputs_of(events, str(at)), WANTED[at : at + 20], atol=1e-5)
    final = [event for event in events if isinstance(event, Finished)]
    assert [event.counts.prompt_tokens for event in final] == [20, 20, 20]
    assert sum(event.counts.device_us for event in final) == engine.busy_ns // 1000


def test_labels_that_are_words() -> None:
    """Outputs may be strings beside numbers."""
    engine = opened(models.classifier()).engine()
    assert engine.admit(ask("a", x=np.array([[9, 0], [0, 9], [-9, -9]], np.float32))) is None
    events = run_to_end(engine)
    assert list(outputs_of(events, "a")) == ["left", "right", "grün"]
    assert np.allclose(outputs_of(events, "a", 1).sum(1), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("request_", "want"),
    [
        pytest.param(ask("a", x=ROWS[:0]), InvalidRequest("inputs", "[]", "must hold a row"), id="no row"),
        pytest.param(ask("a", x=ROWS[:51]), LimitExceeded("inputs", 51, 50, "rows"), id="too many rows"),
        pytest.param(ask("a", y=ROWS[:2]), Internal(), id="another input"),
        pytest.param(ask("a", x=ROWS[:2, :3]), Internal(), id="another shape"),
        pytest.param(ask("a", x=ROWS[:2].astype(np.float64)), Internal(), id="another type"),
        pytest.param(
            GenerationRequest(request_id="a", prompt_ids=(1,), sampling=Sampling(max_tokens=1)), Internal(), id="a text"
        ),
    ],
)
def test_refused_at_once(request_: Any, want: Failure) -> None:
    """A wrong input is refused before any compute, since a graph trusts its shapes."""
    engine = LINEAR.engine()
    assert engine.admit(request_) == want
    assert not engine.has_work


def test_the_queue_is_bounded_and_ids_are_unique() -> None:
    engine = LINEAR.engine(max_waiting=1)
    assert engine.admit(ask("a", x=ROWS[:1])) is None
    assert engine.admit(ask("a", x=ROWS[:1])) == InvalidRequest("request_id", "a", "is in use")
    assert engine.admit(ask("b", x=ROWS[:1])) == Overloaded("the engine's queue", 1, 1.0)


def test_values_that_a_graph_refuses_cost_their_request_alone() -> None:
    """An unknown category fails its own request only."""
    engine = opened(models.picky(), b'{"inputs": [{"name": "colour", "examples": ["green", "red"]}]}').engine()
    for name, colour in (("a", "red"), ("b", "blue"), ("c", "green")):
        assert engine.admit(ask(name, colour=np.array([[colour]], object))) is None
    events = run_to_end(engine)
    assert {event.request_id: type(event) for event in events} == {"a": Finished, "b": Failed, "c": Finished}
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert failed.failure == InvalidRequest("inputs", "(values)", "the model does not accept these values")
    assert outputs_of(events, "c").tolist() == [[[0.0, 1.0]]]


def test_an_answer_that_is_no_number_is_refused() -> None:
    """JSON has no NaN or infinity. Other requests in the batch are answered."""
    engine = opened(models.logarithm()).engine()
    for name, value in (("a", 1.0), ("b", -1.0), ("c", 0.0)):
        assert engine.admit(ask(name, x=np.array([[value]], np.float32))) is None
    events = run_to_end(engine)
    failures = {event.request_id: event.failure for event in events if isinstance(event, Failed)}
    assert failures.keys() == {"b", "c"}
    assert all(isinstance(failure, InvalidRequest) and "not finite" in failure.rule for failure in failures.values())
    assert outputs_of(events, "a").tolist() == [[0.0]]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(1, 20)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("step"), st.just(0)),
    ),
    max_size=25,
)


@given(actions=ACTIONS, batch_rows=st.integers(1, 40))
@settings(max_examples=40)
def test_any_schedule(actions: list[tuple[str, int]], batch_rows: int) -> None:
    """In any schedule each request ends once, with its own rows."""
    engine = LINEAR.engine(batch_rows=batch_rows)
    asked: dict[str, int] = {}
    events: list[Event] = []
    for kind, what in actions:
        if kind == "arrive":
            name = str(len(asked))
            asked[name] = what
            assert engine.admit(ask(name, x=ROWS[:what])) is None
        elif kind == "cancel":
            engine.cancel(str(what))
        else:
            events.extend(engine.step())
            engine.check_integrity()
    events.extend(run_to_end(engine))
    for name, rows in asked.items():
        (last,) = [event for event in events if event.request_id == name and isinstance(event, Finished | Cancelled)]
        if isinstance(last, Finished):
            assert np.allclose(outputs_of(events, name), WANTED[:rows], atol=1e-5)


def test_first_request_waits_within_the_window() -> None:
    """The delay counts down from the first arrival, and is 0 once a forward is full."""
    now = [0]
    window = BatchingWindow(wait_s=0.004, single_request_s=0.01)
    engine = LINEAR.engine(clock_ns=lambda: now[0], batch_rows=4, window=window)
    assert engine.admit(ask("a", x=ROWS[:2])) is None
    assert engine.batching_delay_s == pytest.approx(0.004)
    now[0] = 3_000_000
    assert engine.batching_delay_s == pytest.approx(0.001)
    assert engine.admit(ask("b", x=ROWS[:3])) is None
    assert engine.batching_delay_s == 0


@pytest.mark.parametrize(
    ("row_s", "longest_s"), [pytest.param(0.2, 3.2, id="slow rows"), pytest.param(0.001, 1.1, id="quick rows")]
)
def test_no_forward_takes_as_long_as_one_that_hangs(
    row_s: float, longest_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow rows share a forward with few, quick rows with many, because a graph reports no progress."""
    now_ns, took_s, run = [0], [], OnnxSession.run

    def slow(self: OnnxSession, inputs: Any, rows: int) -> Any:
        took_s.append(rows * row_s)
        now_ns[0] += round(rows * row_s * 1e9)
        return run(self, inputs, rows)

    monkeypatch.setattr(OnnxSession, "run", slow)
    engine = LINEAR.engine(clock_ns=lambda: now_ns[0])
    for at in range(40):
        assert engine.admit(ask(str(at), x=ROWS[:50])) is None
    events = run_to_end(engine)
    assert all(np.allclose(outputs_of(events, str(at)), WANTED[:50], atol=1e-5) for at in range(40))
    assert max(took_s) <= longest_s
    assert sum(took_s) / len(took_s) > longest_s / 8, "many rows share a forward"


def test_known_answers_are_reproduced() -> None:
    """The probe matches in the first step, at no request's cost, or alone."""
    probe = known_answers.record(LINEAR.session, LINEAR.signature)
    engine = LINEAR.engine(probe=probe)
    assert engine.admit(ask("a", x=ROWS[:2])) is None
    events = run_to_end(engine)
    assert np.allclose(outputs_of(events, "a"), WANTED[:2], atol=1e-5)
    assert not engine.needs_probe
    alone = LINEAR.engine(probe=probe)
    assert alone.run_probe_alone() is None
    assert not alone.needs_probe


def test_another_model_poisons_the_engine() -> None:
    """Negative control: another model fails the probe, and no answer leaves."""
    probe = known_answers.record(LINEAR.session, LINEAR.signature)
    spoilt = structs.replace(
        probe, outputs=(structs.replace(probe.outputs[0], data=(9.0, *probe.outputs[0].data[1:])),)
    )
    engine = LINEAR.engine(probe=spoilt)
    assert engine.admit(ask("a", x=ROWS[:2])) is None
    (event,) = run_to_end(engine)
    assert isinstance(event, Failed)
    assert isinstance(event.failure, ProbeFailed)
    assert "'y': off by" in event.failure.reason
    assert engine.admit(ask("b", x=ROWS[:2])) == event.failure


@pytest.mark.parametrize(
    ("field", "value", "want"),
    [
        pytest.param("inputs", (), "other inputs", id="inputs"),
        pytest.param("outputs", (), "other outputs", id="outputs"),
    ],
)
def test_known_answers_of_another_signature(field: str, value: tuple[()], want: str) -> None:
    probe = structs.replace(known_answers.record(LINEAR.session, LINEAR.signature), **{field: value})
    assert want in str(known_answers.verify(probe, LINEAR.session, LINEAR.signature))


@pytest.mark.parametrize(
    ("model", "want"),
    [
        pytest.param(models.centred(), "depends on the rows beside it", id="rows that touch one another"),
        pytest.param(models.picky(), "does not compute example rows", id="rows that it refuses"),
        pytest.param(models.logarithm(), "not finite", id="answers that are no number"),
    ],
)
def test_model_without_reproducible_answers_is_not_sealed(model: Any, want: str) -> None:
    with pytest.raises(Refused, match=want) as caught:
        models.sealed(model)
    assert isinstance(caught.value.failure, ArtifactRejected)


def test_examples_of_the_signature_are_recorded() -> None:
    """Examples in the signature allow sealing a model that takes no other values."""
    lease = models.sealed(models.picky(), b'{"inputs": [{"name": "colour", "examples": ["green", "red"]}]}')
    (attestation,) = lease.attestations
    assert attestation.probe.inputs[0].data == ("green", "red") * 4
    assert attestation.fingerprint.torch.startswith("onnxruntime ")


def test_too_large_known_answers_are_refused() -> None:
    """Known answers repeat the example rows, and every start reads them."""
    text = models.tensor("x", models.STRING, None, 4), models.tensor("y", models.STRING, None, 4)
    echo = models.graph([helper.make_node("Identity", ["x"], ["y"])], text[:1], text[1:])
    said = b'{"inputs": [{"name": "x", "examples": ["%b"]}]}'
    with pytest.raises(Refused, match="its known answers take 576") as caught:
        models.sealed(echo, said % (b"a" * 900_000))
    assert isinstance(caught.value.failure, ArtifactRejected)
    models.sealed(echo, said % (b"a" * 300_000))


def test_graph_must_match_the_signature() -> None:
    """A session whose tensors differ from the signature is refused."""
    model = models.regression()
    other = models.signature_of(models.logarithm())
    with pytest.raises(Refused, match="with another type or shape"):
        OnnxSession(model.SerializeToString(), other, 1)
    with pytest.raises(Refused, match="does not accept it"):
        OnnxSession(b"\x08\x08", models.signature_of(model), 1)


def test_missing_onnxruntime_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal names the missing extra."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(Refused, match="the extra 'onnx'") as caught:
        opened(models.regression())
    assert isinstance(caught.value.failure, Unavailable)
