"""Restores of a tiny version in this process: what its engine says, and how it falls asleep."""

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from contracts.errors import Failure
from contracts.jobs import Bind, SealJob
from runtime.engine.interface import Event, Failed, Finished, Generated, GenerationRequest, Sampling
from runtime.jobs import seal
from runtime.restore import restore
from runtime.serving import Kept, Serving, Wiring
from runtime.weights import Acquire, Weights, bind_weights, pinned_files
from tests.runtime.versions import MemoryLease, make_llama

VERSION = make_llama()
DEADLINE_S = 30.0


class Heard:
    """What the engine's thread said."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.failure: Failure | None = None
        self.ended = threading.Event()
        self.busy: list[bool] = []

    def take(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Generated():
                    self.tokens.append(event.token_id)
                case Failed():
                    self.failure = event.failure
        if any(isinstance(event, Finished | Failed) for event in events):
            self.ended.set()


def bind_of(lease: MemoryLease, kv_bytes: int = 1 << 20) -> Bind:
    version = lease.version.id
    return Bind(tenant="acme", model="m", version=version, device_class="cpu-1", threads=1, kv_bytes=kv_bytes)


@contextmanager
def restored(lease: MemoryLease, heard: Heard, kv_bytes: int = 1 << 20) -> Iterator[Serving]:
    serving = restore(bind_of(lease, kv_bytes), Wiring(heard.take, heard.busy.append), lease.acquire)
    assert isinstance(serving, Serving)
    try:
        yield serving
    finally:
        assert serving.thread.stop(DEADLINE_S)


def generate(serving: Serving, heard: Heard, tokens: int = 12) -> None:
    sampling = Sampling(max_tokens=tokens, temperature=0.0)
    serving.thread.submit(GenerationRequest(request_id="r", prompt_ids=(0, 7, 9, 11), sampling=sampling))
    assert heard.ended.wait(DEADLINE_S)


def sealed_lease(lease: MemoryLease) -> MemoryLease:
    attestation = seal(SealJob(tenant="acme", version=lease.version.id), lease.acquire)
    return MemoryLease(lease.version, (attestation,))


def by_library(lease: MemoryLease, tokens: int = 12) -> list[int]:
    bound = bind_weights(lease.weights(), pinned_files(lease), "library", torch.device("cpu"))
    bound.config._attn_implementation = "sdpa"
    generated = bound.module.generate(  # type: ignore[operator]
        torch.tensor([[0, 7, 9, 11]]), max_new_tokens=tokens, do_sample=False, eos_token_id=None
    )
    ids: list[int] = generated[0, 4:].tolist()
    return ids


def copied(lease: MemoryLease) -> Weights:
    """As on a device: copies of its tensors, which are made again in the same way."""
    weights = lease.weights()
    copies = {name: tensor.clone() for name, tensor in weights.tensors.items()}
    return Weights(weights.lease, copies, renew=lambda: copied(lease), on_host=lambda: lease.weights().tensors)


def asleep_over_copies(lease: MemoryLease, heard: Heard, acquire: Acquire) -> Kept:
    """Restored, asked once, asleep: of what `acquire` copied nothing is left."""
    serving = restore(bind_of(lease), Wiring(heard.take, heard.busy.append), acquire)
    assert isinstance(serving, Serving)
    generate(serving, heard)
    kept = serving.kept
    assert kept is not None
    copy = weakref.ref(next(iter(serving.engine._runner._module.parameters())))  # type: ignore[attr-defined]
    assert serving.thread.stop(DEADLINE_S)
    del serving
    kept.release()
    assert copy() is None, "the copies are still there"
    return kept


def wake_and_answer(kept: Kept, lease: MemoryLease, heard: Heard) -> None:
    """Woken over copies that are made anew, it says what the library says."""
    heard.ended.clear()
    heard.tokens.clear()
    woken = kept.again(bind_of(lease), Wiring(heard.take, heard.busy.append))
    assert isinstance(woken, Serving)
    generate(woken, heard)
    assert heard.tokens == by_library(lease)
    assert woken.thread.stop(DEADLINE_S)


def fell_asleep(lease: MemoryLease, heard: Heard) -> Kept:
    """Restored, asked once, asleep: nothing of the engine is left."""
    serving = restore(bind_of(lease), Wiring(heard.take, heard.busy.append), lease.acquire)
    assert isinstance(serving, Serving)
    generate(serving, heard)
    engine, kept = weakref.ref(serving.engine), serving.kept
    assert kept is not None
    assert serving.thread.stop(DEADLINE_S)
    del serving
    kept.release()
    gc.collect()
    assert engine() is None, "the engine, and with it the KV, is still there"
    heard.ended.clear()
    heard.tokens.clear()
    return kept
