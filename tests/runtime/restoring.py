"""Restore a tiny version in this process, generate with it, and suspend it."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from kelvin.contracts.artifacts.runtime_control import BindRequest, SealJob
from runtime.drivers.interface import GenerationRequest, Sampling
from runtime.lifecycle.sealing_jobs import seal
from runtime.lifecycle.version_restore import restore
from runtime.lifecycle.weights import AcquireLease, Weights, bind_weights, read_pinned_files
from runtime.surface.served_version import ServedVersion, SuspendHandle
from tests.runtime.driving import DEADLINE_S, EventRecorder
from tests.runtime.versions import MemoryLease, make_llama

S = TypeVar("S", bound=ServedVersion)
VERSION = make_llama()


def bind_of(lease: MemoryLease, kv_bytes: int = 1 << 20) -> BindRequest:
    version = lease.version.id
    return BindRequest(tenant="acme", model="m", version=version, device_class="cpu-1", threads=1, kv_bytes=kv_bytes)


@contextmanager
def restored(lease: MemoryLease, recorder: EventRecorder, kind: type[S], kv_bytes: int = 1 << 20) -> Iterator[S]:
    """A served version, until the block ends."""
    serving = restore(bind_of(lease, kv_bytes), recorder.callbacks, lease.acquire)
    assert isinstance(serving, kind)
    try:
        yield serving
    finally:
        assert serving.thread.stop(DEADLINE_S)


def generate(serving: ServedVersion, recorder: EventRecorder, tokens: int = 12) -> None:
    """Generate greedy tokens and wait for the end."""
    sampling = Sampling(max_tokens=tokens, temperature=0.0)
    serving.thread.submit(GenerationRequest(request_id="r", prompt_ids=(0, 7, 9, 11), sampling=sampling))
    recorder.wait_for_ends()


def sealed_lease(lease: MemoryLease) -> MemoryLease:
    attestation = seal(SealJob(tenant="acme", version=lease.version.id), lease.acquire)
    return MemoryLease(lease.version, (attestation,))


def generate_by_library(lease: MemoryLease, tokens: int = 12) -> list[int]:
    bound = bind_weights(lease.weights(), read_pinned_files(lease), "library", torch.device("cpu"))
    bound.config._attn_implementation = "sdpa"
    generated = bound.module.generate(  # type: ignore[operator]
        torch.tensor([[0, 7, 9, 11]]), max_new_tokens=tokens, do_sample=False, eos_token_id=None
    )
    ids: list[int] = generated[0, 4:].tolist()
    return ids


def copy_weights(lease: MemoryLease) -> Weights:
    """Return copies of the tensors, as on a device, which can be made again."""
    weights = lease.weights()
    copies = {name: tensor.clone() for name, tensor in weights.tensors.items()}
    return Weights(
        weights.lease,
        copies,
        copy_again=lambda: copy_weights(lease),
        build_host_tensors=lambda: lease.weights().tensors,
    )


def suspend_version(lease: MemoryLease, recorder: EventRecorder, acquire: AcquireLease | None = None) -> SuspendHandle:
    """Restore, generate and suspend. Nothing of the engine or of the device copies is left."""
    serving = restore(bind_of(lease), recorder.callbacks, acquire or lease.acquire)
    generate(serving, recorder)
    engine, handle = weakref.ref(serving.engine), serving.suspend_handle
    assert handle is not None
    copy = weakref.ref(next(iter(serving.engine._runner._module.parameters())))  # type: ignore[attr-defined]
    assert serving.thread.stop(DEADLINE_S)
    del serving
    handle.suspend()
    assert acquire is None or copy() is None, "the copies are still there"
    gc.collect()
    assert engine() is None, "the engine, and with it the KV, is still there"
    recorder.clear()
    return handle


def wake_and_check(handle: SuspendHandle, lease: MemoryLease, recorder: EventRecorder) -> ServedVersion:
    """Wake it and assert the library's tokens. Its thread has ended."""
    recorder.clear()
    woken = handle.resume(bind_of(lease), recorder.callbacks)
    generate(woken, recorder)
    assert recorder.tokens == generate_by_library(lease)
    assert not woken.engine.needs_probe
    assert woken.thread.stop(DEADLINE_S)
    return woken
