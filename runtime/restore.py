"""Restore a version: lease, tensors, model, engine. Also suspend it and resume it. Blocking; in one thread.

Each step may raise `Refused`, after which the process serves nothing. A replica that sleeps has no engine and no KV
cache; it wakes by those of the steps that are needed.
"""

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch

from contracts.errors import Internal, Refused
from contracts.jobs import Bind, Probe
from contracts.timeline import Span, Stage
from runtime.binding import BoundModel
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


# A woken replica's first request comes at once, but that may take a while on busy cores. A probe that ran alone just
# before it would delay it by a whole forward. Without a request in this time, the probe runs alone and delays nobody.
PROBE_AFTER_S: Final = 0.25


class _Stages:
    """The stages of one restore, which begins now. `on_stage` is called as each of them ends."""

    def __init__(self, wiring: Wiring) -> None:
        self._began_ns = time.monotonic_ns()
        self._on_stage = wiring.on_stage
        self._ended: list[Span] = []

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(self._ended)

    def end(self, stage: Stage) -> None:
        span = Span(stage, (time.monotonic_ns() - self._began_ns) // 1000)
        self._ended.append(span)
        self._on_stage(span)

    def end_first(self, stage: Stage) -> None:
        """End a stage that the others needed. None of them has ended before it."""
        self.end(stage)
        *others, first = self._ended
        self._ended = [first, *(Span(each.stage, max(each.after_us, first.after_us)) for each in others)]


@dataclass(frozen=True, slots=True)
class _Known:
    """What the first restore of a version has made and learned that outlasts a sleep."""

    files: PinnedFiles
    proven: Proven
    codec: TextCodec | EmbeddingCodec
    screen: Screen | None


class Dormant:
    """A bound model without an engine: with its lease or, after `drop`, without lease and weights. `rouse` undoes both.

    Copies on a device are not kept in either case: `rouse` makes them of the lease. `bound` is None for a model that is
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
        """Free what an engine left on the model, and all copies on a device."""
        if self._skeleton is not None:
            detach(self._skeleton.module)
        if self._renew is not None:
            self._empty()
        _collect()

    def drop(self) -> None:
        """Give the lease back. Raises `Refused(Internal)` if something still refers to its memory: then it stays
        mapped, and the process has to end.
        """
        self._empty()
        _collect()
        if self._lease.in_use:
            log.error("something still refers to weights that are to be dropped")
            raise Refused(Internal())
        self._renew = None
        self.is_dropped = True
        self._lease.close()

    def rouse(self, request: Bind, stages: _Stages) -> Weights:
        """Return the weights with the model over them: as they were left, or leased anew. Raises `Refused`."""
        if self._weights is not None:
            return self._weights
        if self._renew is not None:
            weights = self._renew()
        else:
            weights = self._acquire(request.tenant, request.version)
            weights.lease.until_whole()
            stages.end(Stage.LEASED)
        if self._skeleton is not None:
            self._skeleton.fill(weights.tensors)
            stages.end(Stage.BOUND)
        return weights

    def _empty(self) -> None:
        if self._weights is None:
            return
        if self._skeleton is not None:
            self._skeleton.empty(self._weights.tensors)
        self._weights.tensors.clear()  # whoever else has the dictionary has none of its views either
        self._weights = None


def _collect() -> None:
    """Free modules that nothing refers to, and their cycles, and give their memory back to the device."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def restore(request: Bind, wiring: Wiring, acquire: Acquire, filters: FilterProcess | None = None) -> Served:
    """Lease, bind and start a version. On return its engine's thread runs, and it is ready. Raises `Refused`."""
    stages = _Stages(wiring)
    torch.set_num_threads(request.threads)
    weights = acquire(request.tenant, request.version)
    if weights.lease.manifest.engine.kind == "predict":
        weights.lease.until_whole()
        stages.end(Stage.LEASED)
        return _predictor(request, wiring, weights, acquire, stages)
    files = pinned_files(weights.lease)
    screen = screen_of(files, filters)
    device = device_of(request.device_class)
    if not binds_unread(weights.lease, device):
        weights.lease.until_whole()
    if is_whole := weights.lease.is_whole:
        stages.end(Stage.LEASED)
    proven = bind_proven(request.version, weights, files, device)
    stages.end(Stage.BOUND)
    known = _Known(files, proven, _codec(weights.lease, files, proven), screen)
    return _served(request, wiring, weights, known, acquire, stages, late=not is_whole)


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
    acquire: Acquire,
    stages: _Stages,
    *,
    late: bool = False,
    prove: bool = False,
) -> Served:
    """Start an engine over a bound model. `late`: the lease may not be whole yet; no weight is read before it is.
    `prove`: the engine has to give the known answers before this returns. Raises `Refused`.
    """
    lease, proven, codec = weights.lease, known.proven, known.codec
    limits = lease.manifest.limits
    embeds = isinstance(codec, EmbeddingCodec)
    engine = _encoder(request, proven, known.files) if embeds else _decoder(request, proven, limits.max_streams)
    thread = _thread(engine, wiring, limits.max_streams, prove=prove)
    stages.end(Stage.READY)
    if late:
        lease.until_whole()
        stages.end_first(Stage.LEASED)
    # Answers that were known before are asked for again: what a wake recorded itself would prove nothing.
    before = replace(known, proven=replace(proven, recorded=None))

    def serve(request: Bind, wiring: Wiring, weights: Weights, stages: _Stages, prove: bool) -> Served:
        return _served(request, wiring, weights, before, acquire, stages, prove=prove)

    kept = _kept(Dormant(weights, proven.bound, acquire), serve, copied=weights.renew is not None)
    serving: Served
    if isinstance(codec, EmbeddingCodec):
        serving = EmbeddingServing(
            bind=request,
            limits=limits,
            engine=engine,
            thread=thread,
            spans=stages.spans,
            bytes_by_tier=lease.bytes_by_tier,
            recorded=proven.recorded,
            kept=kept,
            codec=codec,
            dimensions=proven.facts.dimensions,
        )
    else:
        serving = Serving(
            bind=request,
            limits=limits,
            engine=engine,
            thread=thread,
            spans=stages.spans,
            bytes_by_tier=lease.bytes_by_tier,
            recorded=proven.recorded,
            kept=kept,
            codec=codec,
            context_tokens=min(proven.facts.max_positions, engine.kv_blocks_total * BLOCK_SIZE),
            defaults=sampling_defaults(known.files),
            screen=known.screen,
        )
    thread.start()
    return serving


def _thread(engine: Engine, wiring: Wiring, max_streams: int, *, prove: bool) -> EngineThread:
    """Return the engine's thread, not started yet. Raises `Refused` if `prove` and the engine's answers are wrong."""
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


# Makes a `Served` of the weights that `Dormant.rouse` returned. The last argument is `prove`.
_Serve = Callable[[Bind, Wiring, Weights, _Stages, bool], Served]


def _kept(dormant: Dormant, serve: _Serve, *, copied: bool = False) -> Kept:
    """Return the sleeping version. If weights were dropped, a wake asks for the known answers at once, and not in the
    first batch: requests that wait for it go to another replica then, and do not fail with this one.
    """

    def again(request: Bind, wiring: Wiring) -> Served:
        stages = _Stages(wiring)
        torch.set_num_threads(request.threads)
        prove = dormant.is_dropped
        return serve(request, wiring, dormant.rouse(request, stages), stages, prove)

    return Kept(dormant.release, again, dormant.drop, copied=copied)


def _predictor(
    request: Bind,
    wiring: Wiring,
    weights: Weights,
    acquire: Acquire,
    stages: _Stages,
    known: Probe | None = None,
    *,
    prove: bool = False,
) -> Served:
    """Start a predictor. Nothing is bound: its session is made out of the lease's bytes. Raises `Refused`."""
    lease = weights.lease
    limits, signature = lease.manifest.limits, predictor.signature_of(lease.manifest, request.version)
    session = predictor.open_session(lease, request.version, request.threads)
    probe, recorded = (known, None) if known else predictor.known_answers_of(request.version, lease, session)
    stages.end(Stage.BOUND)
    engine = PredictorEngine(session, signature, version=request.version, max_rows=limits.max_input_tokens, probe=probe)
    thread = _thread(engine, wiring, limits.max_streams, prove=prove)

    def serve(request: Bind, wiring: Wiring, weights: Weights, stages: _Stages, prove: bool) -> Served:
        return _predictor(request, wiring, weights, acquire, stages, probe, prove=prove)

    stages.end(Stage.READY)
    thread.start()
    return PredictorServing(
        bind=request,
        limits=limits,
        engine=engine,
        thread=thread,
        spans=stages.spans,
        bytes_by_tier=lease.bytes_by_tier,
        recorded=recorded,
        kept=_kept(Dormant(weights, None, acquire), serve),
        signature=signature,
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
