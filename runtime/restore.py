"""From a version's digest to a replica that can serve it: lease, tensors, model, engine. Blocking; in one thread.

What may go wrong at each step is a `Refused`, after which the process serves nothing. A replica that sleeps has no
engine and no KV cache; it comes back by the same steps, as far as they are needed.
"""

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch

from contracts.errors import Internal, Refused
from contracts.jobs import Bind, Probe, SealAttestation
from contracts.timeline import Span, Stage
from runtime import decoder
from runtime.binding import BoundModel
from runtime.encoder import sealing as encoder
from runtime.encoder.engine import EncoderEngine
from runtime.encoder.recipe import read_recipe
from runtime.encoder.serving import EmbeddingCodec, EmbeddingServing
from runtime.engine.attention import detach
from runtime.engine.core import ModelEngine
from runtime.engine.interface import Engine
from runtime.engine.thread import EngineThread
from runtime.families import SERVED
from runtime.pinned import PinnedFiles, sampling_defaults
from runtime.policy.blocks import BLOCK_SIZE
from runtime.predictor import sealing as predictor
from runtime.predictor.engine import PredictorEngine
from runtime.predictor.serving import PredictorServing
from runtime.screening import FilterProcess, Screen, screen_of
from runtime.serving import Kept, Served, Serving, Wiring
from runtime.tokenizer import TextCodec, check_text
from runtime.weights import (
    Acquire,
    Lease,
    Proven,
    Skeleton,
    Weights,
    bind_proven,
    binds_unread,
    device_of,
    pinned_files,
)

log = logging.getLogger(__name__)


# A woken replica's first request comes at once, but on busy cores "at once" takes its time, and a probe that runs alone
# just before it costs it a whole forward. Where nobody comes, the probe runs alone, and nobody waits for it.
PROBE_AFTER_S: Final = 0.25


Stamp = Callable[[Stage], None]


@dataclass(frozen=True, slots=True)
class _Known:
    """What the first restore of a version has made and learned that outlasts a sleep."""

    files: PinnedFiles
    proven: Proven
    codec: TextCodec | EmbeddingCodec
    screen: Screen | None


class Dormant:
    """A version whose replica sleeps: its bound model over its weights, or empty and without a lease; and back again.

    Of copies on a device nothing is kept in either case: they are made of the lease. `bound` is None where a model is
    made anew out of the lease's bytes. One call at a time.
    """

    def __init__(self, weights: Weights, bound: BoundModel | None, acquire: Acquire) -> None:
        architecture = weights.lease.manifest.engine.architecture
        self._skeleton = None if bound is None else Skeleton(SERVED[architecture], bound.module)
        self._lease = weights.lease
        self._weights: Weights | None = weights
        self._renew = weights.renew  # of copies, while there is a lease to make them of
        self._acquire = acquire
        self.is_dropped = False

    def __repr__(self) -> str:
        state = "dropped" if self.is_dropped else "empty" if self._weights is None else "whole"
        return f"<Dormant {state} {self._lease!r}>"

    def release(self) -> None:
        """What an engine left on the model is freed, and what is on a device."""
        if self._skeleton is not None:
            detach(self._skeleton.module)
        if self._renew is not None:
            self._empty()
        _collect()

    def drop(self) -> None:
        """Give the lease back. Raises `Refused(Internal)` where something still looks into its memory: that stays
        mapped then, and the process has to end.
        """
        self._empty()
        _collect()
        if self._lease.in_use:
            log.error("something still refers to weights that are to be dropped")
            raise Refused(Internal())
        self._renew = None
        self.is_dropped = True
        self._lease.close()

    def rouse(self, request: Bind, stamp: Callable[[Stage], None]) -> Weights:
        """The weights, with the model over them: as they were left, or leased and placed anew. Raises `Refused`."""
        if self._weights is not None:
            return self._weights
        if self._renew is not None:
            weights = self._renew()
        else:
            weights = self._acquire(request.tenant, request.version)
            weights.lease.until_whole()
            stamp(Stage.LEASED)
        if self._skeleton is not None:
            self._skeleton.fill(weights.tensors)
            stamp(Stage.BOUND)
        return weights

    def _empty(self) -> None:
        if self._weights is None:
            return
        if self._skeleton is not None:
            self._skeleton.empty(self._weights.tensors)
        self._weights.tensors.clear()  # whoever else has the dictionary has none of its views either
        self._weights = None


def _collect() -> None:
    """What nothing refers to any more is freed, modules and their cycles included, and goes back to the device."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def restore(request: Bind, wiring: Wiring, acquire: Acquire, filters: FilterProcess | None = None) -> Served:
    """Raises `Refused`. On return the engine's thread runs, and the replica may be called ready."""
    spans, stamp = _clock(wiring)
    torch.set_num_threads(request.threads)
    weights = acquire(request.tenant, request.version)
    if weights.lease.manifest.engine.kind == "predict":
        weights.lease.until_whole()
        stamp(Stage.LEASED)
        return _predictor(request, wiring, weights, acquire, stamp, spans)
    files = pinned_files(weights.lease)
    screen = screen_of(files, filters)
    if not binds_unread(weights.lease, device_of(request.device_class)):
        weights.lease.until_whole()
    if not (late := not weights.lease.is_whole):
        stamp(Stage.LEASED)
    proven = _proven(request, weights, files)
    stamp(Stage.BOUND)
    known = _Known(files, proven, _codec(weights.lease, files, proven), screen)
    return _served(request, wiring, weights, known, _kept(weights, known, acquire), stamp, spans, late=late)


def _clock(wiring: Wiring) -> tuple[list[Span], Stamp]:
    """Spans since now, and what adds one and tells of it."""
    began_ns = time.monotonic_ns()
    spans: list[Span] = []

    def stamp(stage: Stage) -> None:
        spans.append(Span(stage, (time.monotonic_ns() - began_ns) // 1000))
        wiring.on_stage(spans[-1])

    return spans, stamp


def _proven(request: Bind, weights: Weights, files: PinnedFiles) -> Proven:
    ways = encoder.WAYS if weights.lease.manifest.engine.kind == "embed" else decoder.WAYS
    return bind_proven(request.version, weights, files, device_of(request.device_class), ways)


def _codec(lease: Lease, files: PinnedFiles, proven: Proven) -> TextCodec | EmbeddingCodec:
    if lease.manifest.engine.kind == "embed":
        return EmbeddingCodec(files, proven.facts.vocab_size)
    text = TextCodec(files)
    check_text(text, proven.facts.vocab_size)
    return text


def _served(
    request: Bind,
    wiring: Wiring,
    weights: Weights,
    known: _Known,
    kept: Kept,
    stamp: Stamp,
    spans: list[Span],
    *,
    late: bool = False,
    prove: bool = False,
) -> Served:
    """An engine over a bound model. `late`: its weights may be on their way still; none is read before all of them are
    there. To `prove`, it gives the known answers before anything else. Raises `Refused`.
    """
    limits, proven, codec = weights.lease.manifest.limits, known.proven, known.codec
    embeds = isinstance(codec, EmbeddingCodec)
    engine = _encoder(request, proven, known.files) if embeds else _decoder(request, proven, limits.max_streams)
    thread = _thread(engine, wiring, limits.max_streams, prove=prove)
    stamp(Stage.READY)
    if late:
        _until_whole(weights.lease, spans, stamp)
    serving: Served
    if isinstance(codec, EmbeddingCodec):
        serving = EmbeddingServing(
            request,
            limits,
            codec,
            proven.facts.dimensions,
            engine,
            thread,
            tuple(spans),
            weights.lease.bytes_by_tier,
            proven.recorded,
            kept,
        )
    else:
        serving = Serving(
            bind=request,
            limits=limits,
            context_tokens=min(proven.facts.max_positions, engine.kv_blocks_total * BLOCK_SIZE),
            codec=codec,
            defaults=sampling_defaults(known.files),
            engine=engine,
            thread=thread,
            spans=tuple(spans),
            bytes_by_tier=weights.lease.bytes_by_tier,
            recorded=proven.recorded,
            kept=kept,
            screen=known.screen,
        )
    thread.start()
    return serving


def _until_whole(lease: Lease, spans: list[Span], stamp: Stamp) -> None:
    """Wait for the bytes, and stamp LEASED. Stages that ended earlier are stamped no earlier: they needed the bytes."""
    lease.until_whole()
    beside = spans.copy()
    spans.clear()
    stamp(Stage.LEASED)
    leased_us = spans[0].after_us
    spans += [Span(span.stage, max(span.after_us, leased_us)) for span in beside]


def _thread(engine: Engine, wiring: Wiring, max_streams: int, *, prove: bool) -> EngineThread:
    """Not started yet. Raises `Refused` where an engine that is to `prove` itself does not."""
    if prove and (failure := engine.run_probe_alone()) is not None:
        raise Refused(failure)
    # As many again may wait: a cancelled request leaves with the next step, its successor is there at once.
    return EngineThread(
        engine,
        on_events=wiring.on_events,
        on_busy=wiring.on_busy,
        limit=2 * max_streams,
        probe_after_s=PROBE_AFTER_S,
    )


def _kept(weights: Weights, known: _Known, acquire: Acquire) -> Kept:
    """Answers that were known before are asked for again: what a wake recorded itself would prove nothing.

    Where weights come back they are asked for at once, not in the first batch: who waits for the wake is served by
    another replica then, instead of failing with this one.
    """
    dormant = Dormant(weights, known.proven.bound, acquire)
    before = replace(known, proven=replace(known.proven, recorded=None))

    def again(request: Bind, wiring: Wiring) -> Served:
        spans, stamp = _clock(wiring)
        torch.set_num_threads(request.threads)
        prove = dormant.is_dropped
        fresh = dormant.rouse(request, stamp)
        kept = _kept(fresh, before, acquire)
        return _served(request, wiring, fresh, before, kept, stamp, spans, prove=prove)

    return Kept(dormant.release, again, dormant.drop, copied=weights.renew is not None)


def _predictor(
    request: Bind,
    wiring: Wiring,
    weights: Weights,
    acquire: Acquire,
    stamp: Stamp,
    spans: list[Span],
    known: Probe | None = None,
    *,
    prove: bool = False,
) -> Served:
    """Of a graph nothing is bound: its session is made anew out of the lease's bytes. Raises `Refused`."""
    lease = weights.lease
    limits, signature = lease.manifest.limits, predictor.signature_of(lease.manifest, request.version)
    session = predictor.open_session(lease, request.version, request.threads)
    probe = known
    recorded: SealAttestation | None = None
    if probe is None:
        probe, recorded = predictor.known_answers_of(request.version, lease, session)
    stamp(Stage.BOUND)
    engine = PredictorEngine(session, signature, version=request.version, max_rows=limits.max_input_tokens, probe=probe)
    thread = _thread(engine, wiring, limits.max_streams, prove=prove)
    dormant = Dormant(weights, None, acquire)

    def again(request: Bind, wiring: Wiring) -> Served:
        fresh, stamp_again = _clock(wiring)
        prove = dormant.is_dropped
        found = dormant.rouse(request, stamp_again)
        return _predictor(request, wiring, found, acquire, stamp_again, fresh, probe, prove=prove)

    stamp(Stage.READY)
    thread.start()
    return PredictorServing(
        request,
        limits,
        signature,
        engine,
        thread,
        tuple(spans),
        lease.bytes_by_tier,
        recorded,
        Kept(dormant.release, again, dormant.drop),
    )


def _decoder(request: Bind, proven: Proven, max_streams: int) -> Engine:
    return ModelEngine(
        proven.bound,
        proven.facts,
        version=request.version,
        kv_bytes=request.kv_bytes,
        device=device_of(request.device_class),
        probe=proven.probe,
        max_running=max_streams,
        max_waiting=max_streams,
    )


def _encoder(request: Bind, proven: Proven, files: PinnedFiles) -> Engine:
    return EncoderEngine(
        proven.bound,
        read_recipe(files),
        proven.facts,
        version=request.version,
        device=device_of(request.device_class),
        probe=proven.probe,
    )
