"""A restored replica answers like the library, binds as attested, sleeps and wakes, and fails closed.

Released weights return in other memory, and are verified there before the replica serves.
"""

from typing import Any

import msgspec
import pytest
import torch

from kelvin.contracts.artifact_errors import ArtifactRejected, ProbeFailed
from kelvin.contracts.artifacts.manifest import Limits
from kelvin.contracts.artifacts.runtime_control import Fingerprint, SealAttestation
from kelvin.contracts.errors import Failure, Internal, NotFound, Refused
from kelvin.contracts.timeline import Stage
from runtime.lifecycle import weights as module
from runtime.lifecycle.version_restore import restore
from runtime.lifecycle.weights import DetachableModel, Weights, resolve_device, version_fingerprint
from runtime.models.binding import BoundModel, bind
from runtime.surface.served_version import EngineCallbacks, ServedDecoder, SuspendHandle
from tests.runtime.driving import DEADLINE_S, EventRecorder
from tests.runtime.restoring import (
    VERSION,
    bind_of,
    copy_weights,
    generate,
    generate_by_library,
    restored,
    suspend_version,
    wake_and_check,
)
from tests.runtime.versions import MemoryLease, make_llama


@pytest.mark.parametrize("attested", [True, False], ids=["attested", "not attested here"])
def test_restored_model_matches_the_library(sealed: MemoryLease, attested: bool) -> None:
    """Greedy tokens are the library's, stages are in order, and the probe was verified."""
    lease, recorder = sealed if attested else MemoryLease(VERSION), EventRecorder()
    with restored(lease, recorder, ServedDecoder) as serving:
        assert [span.stage for span in serving.spans] == [Stage.LEASED, Stage.BOUND, Stage.READY]
        times = [span.after_us for span in serving.spans]
        assert times == sorted(times)
        assert serving.engine.needs_probe or serving.engine.busy_ns
        generate(serving, recorder)
        assert not serving.engine.needs_probe
        assert recorder.tokens == generate_by_library(lease)
        assert recorder.failure is None


@pytest.mark.parametrize(
    ("fast_bind", "matching", "want"),
    [
        pytest.param(True, True, ["fast"], id="fast, if it was found exact"),
        pytest.param(False, True, ["library"], id="the library's, if fast was not exact"),
        pytest.param(True, False, ["library", "fast"], id="both, without an attestation of this fingerprint"),
    ],
)
def test_attestation_decides_the_bind_method(
    sealed: MemoryLease, monkeypatch: pytest.MonkeyPatch, fast_bind: bool, matching: bool, want: list[str]
) -> None:
    """The bind method is taken from an attestation of this fingerprint. Without one, both bindings are compared."""
    attestation = msgspec.structs.replace(sealed.attestations[0], fast_bind=fast_bind)
    if not matching:
        other = Fingerprint(torch="1.0", dtype="float32", device_class="cpu")
        attestation = msgspec.structs.replace(attestation, fingerprint=other)
    used: list[str] = []

    def spy(*args: Any, **options: Any) -> BoundModel:
        used.append(options["bind_method"])
        return bind(*args, **options)

    monkeypatch.setattr(module, "bind", spy)
    with restored(MemoryLease(VERSION, (attestation,)), EventRecorder(), ServedDecoder):
        assert used == want


def _with_other_answers(attestation: SealAttestation) -> SealAttestation:
    logits = tuple(tuple(value + 1.0 for value in row) for row in attestation.probe.top_logits)
    return msgspec.structs.replace(attestation, probe=msgspec.structs.replace(attestation.probe, top_logits=logits))


def test_wrong_known_answers_let_no_token_leave(sealed: MemoryLease) -> None:
    """Negative control: with other known answers the first request fails without a token."""
    recorder = EventRecorder()
    with restored(
        MemoryLease(VERSION, (_with_other_answers(sealed.attestations[0]),)), recorder, ServedDecoder
    ) as serving:
        generate(serving, recorder)
        assert isinstance(recorder.failure, ProbeFailed)
        assert recorder.tokens == []
        assert isinstance(serving.thread.poisoned, ProbeFailed)


def test_a_flipped_weight_is_found_by_the_probe(sealed: MemoryLease) -> None:
    """Bytes that changed after the cache verified them are found by the probe."""
    recorder, lease = EventRecorder(), MemoryLease(VERSION, sealed.attestations)
    norm = next(tensor for tensor in VERSION.manifest.tensors if tensor.name == "model.norm.weight")
    lease._linear[norm.offset + 3] ^= 0x40
    with restored(lease, recorder, ServedDecoder) as serving:
        generate(serving, recorder)
        assert isinstance(recorder.failure, ProbeFailed)
        assert recorder.tokens == []


def test_resumed_version_gives_the_same_answers(sealed: MemoryLease) -> None:
    """A resume makes a new engine and KV cache, keeps the bound model, and runs the probe again."""
    recorder = EventRecorder()
    handle = suspend_version(sealed, recorder)
    for _ in range(2):
        woken = wake_and_check(handle, sealed, recorder)
        assert [span.stage for span in woken.spans] == [Stage.READY]
        assert woken.engine.busy_ns
        assert woken.suspend_handle is not None
        handle = woken.suspend_handle
        handle.suspend()


@pytest.mark.parametrize("attested", [True, False], ids=["attested", "recorded here"])
def test_weights_that_changed_while_it_slept_are_found(sealed: MemoryLease, attested: bool) -> None:
    """After a bit flip during sleep, the first request fails and no token leaves."""
    recorder, lease = EventRecorder(), MemoryLease(VERSION, sealed.attestations if attested else ())
    handle = suspend_version(lease, recorder)
    norm = next(tensor for tensor in VERSION.manifest.tensors if tensor.name == "model.norm.weight")
    lease._linear[norm.offset + 3] ^= 0x40
    woken = handle.resume(bind_of(lease), recorder.callbacks)
    generate(woken, recorder)
    assert isinstance(recorder.failure, ProbeFailed)
    assert recorder.tokens == []
    assert isinstance(woken.thread.poisoned, ProbeFailed)
    assert woken.thread.stop(DEADLINE_S)


def test_device_copies_are_made_again_after_sleep(sealed: MemoryLease) -> None:
    """Device copies are freed during sleep, and made and bound again."""
    recorder = EventRecorder()
    handle = suspend_version(sealed, recorder, lambda tenant, version: copy_weights(sealed))
    wake_and_check(handle, sealed, recorder)


def test_kv_pool_bounds_the_context(sealed: MemoryLease) -> None:
    """The default length of an answer is bounded by the KV pool."""
    per_token = sealed.attestations[0].gate.kv_bytes_per_token
    with restored(sealed, EventRecorder(), ServedDecoder, kv_bytes=per_token * 16 * 10) as serving:
        assert serving.context_tokens == serving.engine.kv_blocks_total * 16 < 512
    with restored(sealed, EventRecorder(), ServedDecoder, kv_bytes=per_token * 16 * 100) as serving:
        assert serving.context_tokens == 512


@pytest.mark.parametrize(
    ("lease", "failure"),
    [
        pytest.param(
            MemoryLease(make_llama(files={"tokenizer.json": b"{}"})), ArtifactRejected, id="a broken tokenizer"
        ),
        pytest.param(MemoryLease(make_llama(limits=Limits(1, 1, 1))), NotFound, id="a version that is not there"),
    ],
)
def test_failed_restore_names_its_cause(lease: MemoryLease, failure: type[Failure]) -> None:
    request = bind_of(lease)
    if failure is NotFound:
        request = msgspec.structs.replace(request, version="0" * 64)
    with pytest.raises(Refused) as caught:
        restore(request, EngineCallbacks(lambda _: None, lambda _: None), lease.acquire)
    assert isinstance(caught.value.failure, failure)


def test_fingerprint_does_not_depend_on_threads() -> None:
    """Fingerprints name the device's kind. The number of threads changes no answer beyond the tolerance."""
    assert resolve_device("cpu-4") == resolve_device("cpu-1") == torch.device("cpu")
    assert resolve_device("h200").type == "cuda"
    assert version_fingerprint(VERSION.manifest, resolve_device("cpu-4")) == Fingerprint(
        torch=str(torch.__version__), dtype="float32", device_class="cpu"
    )


def _release_weights(lease: MemoryLease, recorder: EventRecorder) -> SuspendHandle:
    """Return a suspended version whose weights nothing uses."""
    handle = suspend_version(lease, recorder)
    handle.release_weights()
    assert not lease.in_use, "a view is still there"
    return handle


@pytest.mark.parametrize("attested", [True, False], ids=["attested", "recorded here"])
def test_weights_leased_again_give_the_same_answers(sealed: MemoryLease, attested: bool) -> None:
    """Weights leased again in other memory give the same answers, verified before the replica is ready."""
    recorder, lease = EventRecorder(), MemoryLease(VERSION, sealed.attestations if attested else ())
    handle = _release_weights(lease, recorder)
    for _ in range(2):
        recorder.clear()
        woken = handle.resume(bind_of(lease), recorder.callbacks)
        assert [span.stage for span in woken.spans] == [Stage.LEASED, Stage.BOUND, Stage.READY]
        assert not woken.engine.needs_probe
        generate(woken, recorder)
        assert recorder.tokens == generate_by_library(lease)
        assert woken.thread.stop(DEADLINE_S)
        assert woken.suspend_handle is not None
        handle = woken.suspend_handle
        del woken
        handle.suspend()
        handle.release_weights()
        assert not lease.in_use


def test_modules_and_tokenizer_outlast_released_weights(sealed: MemoryLease) -> None:
    """Module and tokenizer are kept, and every parameter is in new memory."""
    recorder, lease = EventRecorder(), MemoryLease(VERSION, sealed.attestations)
    with restored(lease, recorder, ServedDecoder) as serving:
        generate(serving, recorder)
        codec, handle = serving.codec, serving.suspend_handle
        module = serving.engine._runner._module  # type: ignore[attr-defined]
        before = {parameter.data_ptr() for parameter in module.parameters()}
    del serving
    assert handle is not None
    handle.suspend()
    handle.release_weights()
    assert all(parameter.is_meta for parameter in module.parameters())
    woken = handle.resume(bind_of(lease), recorder.callbacks)
    assert isinstance(woken, ServedDecoder)
    assert woken.codec is codec
    assert woken.engine._runner._module is module  # type: ignore[attr-defined]
    assert before.isdisjoint(parameter.data_ptr() for parameter in module.parameters())
    assert woken.thread.stop(DEADLINE_S)


def test_changed_weights_fail_the_wake(sealed: MemoryLease) -> None:
    """A bit flip in weights leased again fails the wake."""
    recorder, lease = EventRecorder(), MemoryLease(VERSION, sealed.attestations)
    handle = _release_weights(lease, recorder)
    norm = next(tensor for tensor in VERSION.manifest.tensors if tensor.name == "model.norm.weight")
    lease._linear[norm.offset + 3] ^= 0x40
    with pytest.raises(Refused) as caught:
        handle.resume(bind_of(lease), recorder.callbacks)
    assert isinstance(caught.value.failure, ProbeFailed)
    assert recorder.tokens == []


def test_weights_with_a_live_view_are_not_released(sealed: MemoryLease) -> None:
    """While a tensor is still referenced, a release is refused and unmaps nothing."""
    recorder, lease = EventRecorder(), MemoryLease(VERSION, sealed.attestations)
    with restored(lease, recorder, ServedDecoder) as serving:
        generate(serving, recorder)
        stale = next(serving.engine._runner._module.parameters()).detach()  # type: ignore[attr-defined]
        handle = serving.suspend_handle
    del serving
    assert handle is not None
    handle.suspend()
    with pytest.raises(Refused) as caught:
        handle.release_weights()
    assert isinstance(caught.value.failure, Internal)
    assert torch.equal(stale.reshape(-1), lease.weights().tensors["model.embed_tokens.weight"].reshape(-1))


def test_wake_without_attached_weights_is_refused(sealed: MemoryLease, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: parameters that keep pointing at old memory, or at none, fail the wake."""
    recorder, lease = EventRecorder(), MemoryLease(VERSION, sealed.attestations)
    handle = _release_weights(lease, recorder)
    with monkeypatch.context() as patched:
        patched.setattr(module, "_replace_parameters", lambda module, make: None)
        with pytest.raises(Refused) as caught:
            handle.resume(bind_of(lease), recorder.callbacks)
        assert isinstance(caught.value.failure, ArtifactRejected)
    stale = suspend_version(lease, recorder)
    monkeypatch.setattr(DetachableModel, "detach_weights", lambda *_: None)
    monkeypatch.setattr(DetachableModel, "attach_weights", lambda *_: None)
    monkeypatch.setattr(MemoryLease, "in_use", False)
    stale.release_weights()
    with pytest.raises(Refused) as caught:
        stale.resume(bind_of(lease), recorder.callbacks)
    assert isinstance(caught.value.failure, ProbeFailed)


def test_released_device_copies_come_from_a_new_lease(sealed: MemoryLease) -> None:
    """At level 1 the lease remains, at level 2 it does not, and new copies come from a new lease."""
    recorder, lease, acquired = EventRecorder(), MemoryLease(VERSION, sealed.attestations), list[str]()

    def acquire(tenant: str, version: str) -> Weights:
        acquired.append(version)
        return copy_weights(lease)

    handle = suspend_version(lease, recorder, acquire)
    handle.release_weights()
    wake_and_check(handle, lease, recorder)
    assert len(acquired) == 2
