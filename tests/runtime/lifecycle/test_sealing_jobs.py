"""A sealed draft is one that will start: anything that would fail later fails the seal, with its reason."""

from dataclasses import replace

import pytest
import torch

from kelvin.contracts.artifact_errors import ArtifactRejected, ProbeFailed
from kelvin.contracts.artifacts.runtime_control import SealJob
from kelvin.contracts.errors import Refused
from runtime.lifecycle import sealing_jobs, weights
from runtime.lifecycle.sealing_jobs import seal
from runtime.lifecycle.weights import bind_verified, read_pinned_files
from runtime.models.probe import PROBE_TOKENS
from tests.runtime.versions import MemoryLease, make_llama
from weightcache.client.device_checksum import checksum_of

VERSION = make_llama()


def _seal(lease: MemoryLease):  # type: ignore[no-untyped-def]
    return seal(SealJob(tenant="acme", version=lease.version.id), lease.acquire)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_good_draft_is_attested(dtype: str) -> None:
    """The attestation has version, fingerprint, bind method, known answers and the gate's facts."""
    version = make_llama(dtype=dtype)  # type: ignore[arg-type]
    attestation = _seal(MemoryLease(version))
    assert attestation.version == version.id
    assert attestation.fingerprint.dtype == attestation.gate.dtype == dtype
    assert attestation.fingerprint.device_class == "cpu"
    assert attestation.fast_bind
    assert attestation.threads >= 1
    assert len(attestation.probe.token_ids) == PROBE_TOKENS
    assert attestation.gate.vocab_size == 512
    assert set(attestation.gate.first_use) == {tensor.name for tensor in version.manifest.tensors}


@pytest.mark.parametrize("with_device_checksum", [False, True])
def test_sealing_with_devices_says_what_a_device_records(with_device_checksum: bool) -> None:
    """The device checksum is computed only for devices. Elsewhere the first device computes it."""
    said = seal(
        SealJob(tenant="acme", version=VERSION.id),
        MemoryLease(VERSION).acquire,
        with_device_checksum=with_device_checksum,
    )
    assert said.device_checksum == (checksum_of(memoryview(VERSION.linear)) if with_device_checksum else None)


def test_first_replica_on_a_device_reports_its_checksum() -> None:
    """It is reported with that device's known answers, so that the next restore need not compute it."""
    lease = MemoryLease(VERSION)
    weights = replace(lease.weights(), device_checksum="ab" * 16)
    proven = bind_verified(VERSION.id, weights, read_pinned_files(lease), torch.device("cpu"))
    assert proven.recorded_seal is not None
    assert proven.recorded_seal.device_checksum == "ab" * 16


def test_fast_binding_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a difference from the library's module, restores bind by the library."""
    monkeypatch.setattr(weights, "find_differences", lambda fast, library: ("buffer 'x': other values",))
    assert not _seal(MemoryLease(VERSION)).fast_bind


def test_tokenizer_with_unknown_ids_is_refused() -> None:
    """A token id beyond the embedding would fail the first request that uses it."""
    small = make_llama(vocab_size=64)
    with pytest.raises(Refused) as caught:
        _seal(MemoryLease(small))
    failure = caught.value.failure
    assert isinstance(failure, ArtifactRejected)
    assert failure.path == "tokenizer.json"
    assert "the model 64" in failure.reason


@pytest.mark.parametrize(
    ("files", "path"),
    [
        pytest.param({"tokenizer.json": b"nothing"}, "tokenizer.json", id="a tokenizer that does not load"),
        pytest.param(
            {"generation_config.json": b"[]"}, "generation_config.json", id="a configuration of another shape"
        ),
        pytest.param({"chat_template.jinja": b"{% if %}"}, "chat_template.jinja", id="a template that does not parse"),
        pytest.param(
            {"chat_template.jinja": b"{{ " + b"(" * 3000 + b")" * 3000 + b" }}"},
            "chat_template.jinja",
            id="a template nested too deep",
        ),
        pytest.param(
            {"chat_template.jinja": b"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"},
            "chat_template.jinja",
            id="a template that loops for hours",
        ),
        pytest.param(
            {"chat_template.jinja": b"{{ 'a' * 2000000000 }}"}, "chat_template.jinja", id="a template of gigabytes"
        ),
    ],
)
def test_files_that_no_replica_could_use_are_refused(files: dict[str, bytes], path: str) -> None:
    with pytest.raises(Refused) as caught:
        _seal(MemoryLease(make_llama(files=files)))
    assert isinstance(caught.value.failure, ArtifactRejected)
    assert caught.value.failure.path == path


def test_sealing_finds_an_engine_with_other_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known answers that our engine does not give would fail every start."""
    monkeypatch.setattr("runtime.drivers.native.engine.known_answers.verify", lambda probe, logits: "position 0 is off")
    with pytest.raises(Refused) as caught:
        _seal(MemoryLease(VERSION))
    assert isinstance(caught.value.failure, ProbeFailed)


def test_weights_that_are_not_numbers_are_refused() -> None:
    """A model with NaN weights has no right answers."""
    lease = MemoryLease(VERSION)
    embedding = next(tensor for tensor in VERSION.manifest.tensors if tensor.name == "model.norm.weight")
    lease._linear[embedding.offset : embedding.offset + 4] = b"\x00\x00\xc0\x7f"
    with pytest.raises(Refused) as caught:
        _seal(lease)
    assert isinstance(caught.value.failure, ProbeFailed)


@pytest.mark.parametrize("error", [MemoryError(), RecursionError("too deep"), KeyError("x"), RuntimeError("no memory")])
def test_library_error_is_an_artifact_rejection(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A library error refuses the draft as an artifact, not as an internal error."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(sealing_jobs, "verify_and_record", fail)
    with pytest.raises(Refused) as refused:
        _seal(MemoryLease(VERSION))
    assert isinstance(refused.value.failure, ArtifactRejected)
    assert refused.value.failure.status == 422
    assert type(error).__name__ in refused.value.failure.reason


def test_failing_disk_is_not_the_artifacts_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retryable error is passed on."""

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(sealing_jobs, "verify_and_record", fail)
    with pytest.raises(OSError, match="Input/output"):
        _seal(MemoryLease(VERSION))
