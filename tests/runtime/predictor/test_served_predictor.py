"""A restored predictor: from a body to an answer, proven by its attestation, closed if that fails."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from kelvin.contracts.artifact_errors import ArtifactRejected, ProbeFailed
from kelvin.contracts.artifacts.runtime_control import Fingerprint
from kelvin.contracts.errors import Refused
from kelvin.contracts.timeline import Stage
from runtime.predictor.served_predictor import ServedPredictor
from runtime.surface.open_inference_codec import PredictionAnswerBuilder
from tests.runtime.driving import DEADLINE_S, EventRecorder
from tests.runtime.predictor import models
from tests.runtime.restoring import restored
from tests.runtime.versions import MemoryLease


def body(rows: Any, **more: Any) -> bytes:
    tensor = {"name": "x", "shape": [len(rows), 4], "datatype": "FP32", "data": rows}
    return json.dumps({"inputs": [tensor], **more}).encode()


def ask(serving: ServedPredictor, recorder: EventRecorder, raw: bytes) -> Any:
    prepared = asyncio.run(serving.prepare("/v2/infer", raw, "r", 0))
    serving.thread.submit(prepared.request)
    recorder.wait_for_ends()
    assert isinstance(prepared.builder, PredictionAnswerBuilder)
    return asyncio.run(prepared.builder.add_events(recorder.events))


@pytest.mark.parametrize("rows", [1, 90], ids=["decoded inline", "decoded beside the loop"])
def test_body_becomes_an_answer(rows: int) -> None:
    """The answer equals the arithmetic, with the given id."""
    given = np.random.default_rng(3).normal(size=(rows, 4)).round(12)
    recorder = EventRecorder()
    with restored(models.sealed(models.regression()), recorder, ServedPredictor) as serving:
        progress = ask(serving, recorder, body(given.tolist(), id="42", parameters={"x": "y" * 20_000 * (rows > 1)}))
    answer = json.loads(progress.data)
    assert (answer["id"], answer["model_name"], answer["model_version"]) == ("42", "m", serving.bind.version)
    (output,) = answer["outputs"]
    assert output["shape"] == [rows, 2]
    assert np.allclose(np.reshape(output["data"], (rows, 2)), given.astype(np.float32) @ models.WEIGHTS, atol=1e-5)
    assert progress.counts.prompt_tokens == rows
    assert progress.reason == "stop"
    assert [span.stage for span in serving.spans] == [Stage.LEASED, Stage.BOUND, Stage.READY]


def test_wrong_known_answers_close_it() -> None:
    """A replica whose outputs differ from those at sealing sends nothing."""
    lease = models.sealed(models.regression())
    (attestation,) = lease.attestations
    outputs = attestation.probe.outputs[0]
    bent = structs.replace(outputs, data=(outputs.data[0], 7.0, *outputs.data[2:]))
    wrong = structs.replace(attestation, probe=structs.replace(attestation.probe, outputs=(bent,)))
    recorder = EventRecorder()
    with restored(MemoryLease(lease.version, (wrong,)), recorder, ServedPredictor) as serving:
        progress = ask(serving, recorder, body([[1, 2, 3, 4]]))
    assert isinstance(progress.failure, ProbeFailed)
    assert not progress.data


def test_without_an_attestation_answers_are_recorded_first() -> None:
    """With an attestation of another library version, answers are recorded first."""
    lease = models.sealed(models.regression())
    (attestation,) = lease.attestations
    other = structs.replace(
        attestation, fingerprint=Fingerprint(torch="onnxruntime 0.1", dtype="float32", device_class="cpu")
    )
    recorder = EventRecorder()
    with restored(MemoryLease(lease.version, (other,)), recorder, ServedPredictor) as serving:
        progress = ask(serving, recorder, body([[1, 0, 0, 0]]))
    assert progress.reason == "stop"


@pytest.mark.parametrize("attested", [True, False], ids=["attested", "recorded before it slept"])
def test_resumed_predictor_is_verified_before_answering(attested: bool) -> None:
    """The graph is read again from the lease. A changed graph fails the probe, and no answer leaves."""
    lease = models.sealed(models.regression())
    if not attested:
        lease = MemoryLease(lease.version)
    recorder = EventRecorder()
    with restored(lease, recorder, ServedPredictor) as serving:
        ask(serving, recorder, body([[1, 0, 0, 0]]))
        handle, bind = serving.suspend_handle, serving.bind
    assert handle is not None
    handle.suspend()
    for bent in (False, True):
        if bent:
            at = lease._linear.index(np.float32(models.WEIGHTS).tobytes())
            lease._linear[at : at + 4] = np.float32(9.0).tobytes()
        recorder = EventRecorder()
        woken = handle.resume(bind, recorder.callbacks)
        assert isinstance(woken, ServedPredictor)
        progress = ask(woken, recorder, body([[1, 0, 0, 0]]))
        assert woken.thread.stop(DEADLINE_S)
        assert isinstance(progress.failure, ProbeFailed) if bent else progress.reason == "stop"


def test_released_graph_is_read_and_verified_again() -> None:
    """A new lease with other weights fails the wake before any request is served."""
    lease = models.sealed(models.regression())
    recorder = EventRecorder()
    with restored(lease, recorder, ServedPredictor) as serving:
        ask(serving, recorder, body([[1, 0, 0, 0]]))
        handle, bind = serving.suspend_handle, serving.bind
    assert handle is not None
    handle.suspend()
    handle.release_weights()
    assert not lease.in_use
    recorder = EventRecorder()
    woken = handle.resume(bind, recorder.callbacks)
    assert isinstance(woken, ServedPredictor)
    assert not woken.engine.needs_probe
    assert ask(woken, recorder, body([[1, 0, 0, 0]])).reason == "stop"
    assert woken.thread.stop(DEADLINE_S)
    assert woken.suspend_handle is not None
    woken.suspend_handle.suspend()
    woken.suspend_handle.release_weights()
    at = lease._linear.index(np.float32(models.WEIGHTS).tobytes())
    lease._linear[at : at + 4] = np.float32(9.0).tobytes()
    with pytest.raises(Refused) as caught:
        woken.suspend_handle.resume(bind, recorder.callbacks)
    assert isinstance(caught.value.failure, ProbeFailed)


def test_other_bytes_are_no_graph() -> None:
    """The session is made from the cache's bytes only."""
    version = models.version_of(models.regression())
    lease = MemoryLease(version)
    lease._linear[:64] = bytes(64)
    with pytest.raises(Refused) as caught, restored(lease, EventRecorder(), ServedPredictor):
        pass
    assert isinstance(caught.value.failure, ArtifactRejected)
