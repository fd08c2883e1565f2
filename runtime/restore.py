"""From a version's digest to a replica that can serve it: lease, tensors, model, engine. Blocking; in one thread.

What may go wrong at each step is a `Refused`, after which the process serves nothing.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch

from contracts.control import Bind, Probe, SealAttestation
from contracts.timeline import Span, Stage
from runtime import decoder
from runtime.compatibility import check_text
from runtime.encoder import sealing as encoder
from runtime.encoder.codec import EmbeddingCodec
from runtime.encoder.engine import EncoderEngine
from runtime.encoder.recipe import read_recipe
from runtime.encoder.serving import EmbeddingServing
from runtime.engine.attention import detach
from runtime.engine.core import ModelEngine
from runtime.engine.interface import Engine
from runtime.engine.thread import EngineThread
from runtime.pinned import PinnedFiles, sampling_defaults
from runtime.policy.blocks import BLOCK_SIZE
from runtime.predictor import sealing as predictor
from runtime.predictor.engine import PredictorEngine
from runtime.predictor.serving import PredictorServing
from runtime.serving import Kept, Served, Serving, Wiring
from runtime.tokenizer import TextCodec
from runtime.weights import Acquire, Lease, Proven, Weights, bind_proven, device_of, pinned_files

PROBE_AFTER_S: Final = 0.05  # a woken replica's first request comes at once; without one the probe runs alone


Stamp = Callable[[Stage], None]


def restore(request: Bind, wiring: Wiring, acquire: Acquire) -> Served:
    """Raises `Refused`. On return the engine's thread runs, and the replica may be called ready."""
    spans, stamp = _clock()
    torch.set_num_threads(request.threads)
    weights = acquire(request.tenant, request.version)
    stamp(Stage.LEASED)
    if weights.lease.manifest.engine.kind == "predict":
        return _predictor(request, wiring, weights.lease, stamp, spans)
    files = pinned_files(weights.lease)
    proven = _proven(request, weights, files)
    stamp(Stage.BOUND)
    return _served(request, wiring, weights, files, proven, stamp, spans)


def _clock() -> tuple[list[Span], Stamp]:
    """Spans since now, and what adds one."""
    began_ns = time.monotonic_ns()
    spans: list[Span] = []
    return spans, lambda stage: spans.append(Span(stage, (time.monotonic_ns() - began_ns) // 1000))


def _proven(request: Bind, weights: Weights, files: PinnedFiles) -> Proven:
    ways = encoder.WAYS if weights.lease.manifest.engine.kind == "embed" else decoder.WAYS
    return bind_proven(request.version, weights, files, device_of(request.device_class), ways)


def _served(
    request: Bind,
    wiring: Wiring,
    weights: Weights,
    files: PinnedFiles,
    proven: Proven,
    stamp: Stamp,
    spans: list[Span],
) -> Served:
    """Engine and codec over a bound model."""
    limits = weights.lease.manifest.limits
    embeds = weights.lease.manifest.engine.kind == "embed"
    engine = _encoder(request, proven, files) if embeds else _decoder(request, proven, limits.max_streams)
    # As many again may wait: a cancelled request leaves with the next step, its successor is there at once.
    thread = EngineThread(
        engine,
        on_events=wiring.on_events,
        on_busy=wiring.on_busy,
        limit=2 * limits.max_streams,
        probe_after_s=PROBE_AFTER_S,
    )
    serving: Served
    if embeds:
        codec = EmbeddingCodec(files, proven.facts.vocab_size)
        stamp(Stage.READY)
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
            _kept(weights, files, proven),
        )
    else:
        text = TextCodec(files)
        check_text(text, proven.facts.vocab_size)
        stamp(Stage.READY)
        serving = Serving(
            bind=request,
            limits=limits,
            context_tokens=min(proven.facts.max_positions, engine.kv_blocks_total * BLOCK_SIZE),
            codec=text,
            defaults=sampling_defaults(files),
            engine=engine,
            thread=thread,
            spans=tuple(spans),
            bytes_by_tier=weights.lease.bytes_by_tier,
            recorded=proven.recorded,
            kept=_kept(weights, files, proven),
        )
    thread.start()
    return serving


def _kept(weights: Weights, files: PinnedFiles, proven: Proven) -> Kept:
    """Of views the bound model is kept as it is; of copies on a device nothing but the lease that they are made of."""
    if (renew := weights.renew) is not None:
        probe = proven.probe
        return Kept(_collect, lambda request, wiring: _bound_again(request, wiring, renew, files, probe))
    module, known = proven.bound.module, replace(proven, recorded=None)

    def again(request: Bind, wiring: Wiring) -> Served:
        spans, stamp = _clock()
        torch.set_num_threads(request.threads)
        return _served(request, wiring, weights, files, known, stamp, spans)

    return Kept(lambda: detach(module), again)


def _bound_again(
    request: Bind, wiring: Wiring, renew: Callable[[], Weights], files: PinnedFiles, probe: Probe
) -> Served:
    """Held against the answers that were known before: what a wake records itself would prove nothing."""
    spans, stamp = _clock()
    torch.set_num_threads(request.threads)
    weights = renew()
    proven = replace(_proven(request, weights, files), probe=probe, recorded=None)
    stamp(Stage.BOUND)
    return _served(request, wiring, weights, files, proven, stamp, spans)


def _collect() -> None:
    """What nothing refers to any more is freed, modules and their cycles included, and goes back to the device."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _predictor(
    request: Bind, wiring: Wiring, lease: Lease, stamp: Stamp, spans: list[Span], known: Probe | None = None
) -> Served:
    limits, signature = lease.manifest.limits, predictor.signature_of(lease.manifest, request.version)
    session = predictor.open_session(lease, request.version, request.threads)
    probe = known
    recorded: SealAttestation | None = None
    if probe is None:
        probe, recorded = predictor.known_answers_of(request.version, lease, session)
    stamp(Stage.BOUND)
    engine = PredictorEngine(session, signature, version=request.version, max_rows=limits.max_input_tokens, probe=probe)
    thread = EngineThread(
        engine,
        on_events=wiring.on_events,
        on_busy=wiring.on_busy,
        limit=2 * limits.max_streams,
        probe_after_s=PROBE_AFTER_S,
    )

    def again(request: Bind, wiring: Wiring) -> Served:
        fresh, stamp_again = _clock()
        return _predictor(request, wiring, lease, stamp_again, fresh, probe)

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
        Kept(_collect, again),
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
