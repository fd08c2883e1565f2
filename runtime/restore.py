"""From a version's digest to a replica that can serve it: lease, tensors, model, engine. Blocking; in one thread.

What may go wrong at each step is a `Refused`, after which the process serves nothing.
"""

import time
from collections.abc import Callable
from typing import Final

import torch

from contracts.control import Bind
from contracts.timeline import Span, Stage
from runtime import decoder
from runtime.compatibility import check_text
from runtime.encoder import sealing as encoder
from runtime.encoder.codec import EmbeddingCodec
from runtime.encoder.engine import EncoderEngine
from runtime.encoder.recipe import read_recipe
from runtime.encoder.serving import EmbeddingServing
from runtime.engine.core import ModelEngine
from runtime.engine.interface import Engine
from runtime.engine.thread import EngineThread
from runtime.pinned import PinnedFiles, sampling_defaults
from runtime.policy.blocks import BLOCK_SIZE
from runtime.predictor import sealing as predictor
from runtime.predictor.engine import PredictorEngine
from runtime.predictor.serving import PredictorServing
from runtime.replica import Wiring
from runtime.serving import Served, Serving
from runtime.tokenizer import TextCodec
from runtime.weights import Acquire, Lease, Proven, bind_proven, device_of, pinned_files

PROBE_AFTER_S: Final = 0.05  # a woken replica's first request comes at once; without one the probe runs alone


def restore(request: Bind, wiring: Wiring, acquire: Acquire) -> Served:
    """Raises `Refused`. On return the engine's thread runs, and the replica may be called ready."""
    began_ns = time.monotonic_ns()
    spans: list[Span] = []

    def stamp(stage: Stage) -> None:
        spans.append(Span(stage, (time.monotonic_ns() - began_ns) // 1000))

    device = device_of(request.device_class)
    torch.set_num_threads(request.threads)
    weights = acquire(request.tenant, request.version)
    stamp(Stage.LEASED)
    manifest = weights.lease.manifest
    if manifest.engine.kind == "predict":
        return _predictor(request, wiring, weights.lease, stamp, spans)
    files = pinned_files(weights.lease)
    embeds = manifest.engine.kind == "embed"
    ways = encoder.WAYS if embeds else decoder.WAYS
    proven = bind_proven(request.version, weights, files, device, ways)
    stamp(Stage.BOUND)
    engine = _encoder(request, proven, files) if embeds else _decoder(request, proven, manifest.limits.max_streams)
    # As many again may wait: a cancelled request leaves with the next step, its successor is there at once.
    thread = EngineThread(
        engine,
        on_events=wiring.on_events,
        on_busy=wiring.on_busy,
        limit=2 * manifest.limits.max_streams,
        probe_after_s=PROBE_AFTER_S,
    )
    serving: Served
    if embeds:
        codec = EmbeddingCodec(files, proven.facts.vocab_size)
        stamp(Stage.READY)
        serving = EmbeddingServing(
            request,
            manifest.limits,
            codec,
            proven.facts.dimensions,
            engine,
            thread,
            tuple(spans),
            weights.lease.bytes_by_tier,
            proven.recorded,
        )
    else:
        text = TextCodec(files)
        check_text(text, proven.facts.vocab_size)
        stamp(Stage.READY)
        serving = Serving(
            bind=request,
            limits=manifest.limits,
            context_tokens=min(proven.facts.max_positions, engine.kv_blocks_total * BLOCK_SIZE),
            codec=text,
            defaults=sampling_defaults(files),
            engine=engine,
            thread=thread,
            spans=tuple(spans),
            bytes_by_tier=weights.lease.bytes_by_tier,
            recorded=proven.recorded,
        )
    thread.start()
    return serving


def _predictor(
    request: Bind, wiring: Wiring, lease: Lease, stamp: Callable[[Stage], None], spans: list[Span]
) -> Served:
    limits, signature = lease.manifest.limits, predictor.signature_of(lease.manifest, request.version)
    session = predictor.open_session(lease, request.version, request.threads)
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
    stamp(Stage.READY)
    thread.start()
    return PredictorServing(request, limits, signature, engine, thread, tuple(spans), lease.bytes_by_tier, recorded)


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
