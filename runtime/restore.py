"""From a version's digest to a replica that can serve it: lease, tensors, model, engine. Blocking; in one thread.

What may go wrong at each step is a `Refused`, after which the process serves nothing.
"""

import time
from typing import Final

import torch

from contracts.control import Bind
from contracts.timeline import Span, Stage
from runtime import decoder
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
from runtime.replica import Wiring
from runtime.serving import Served, Serving
from runtime.tokenizer import TextCodec
from runtime.weights import Acquire, Proven, bind_proven, device_of, pinned_files

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
    files = pinned_files(weights.lease)
    manifest = weights.lease.manifest
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
        )
    else:
        text = TextCodec(files)
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
        )
    thread.start()
    return serving


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
