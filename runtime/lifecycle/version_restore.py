"""Restore a version: lease, tensors, model, engine. Also suspend and resume it. All calls block; make one at a time.

Each step may raise `Refused`; the process then serves nothing. A sleeping replica has no engine and no KV cache. It
wakes by the steps that it needs.
"""

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch

from kelvin.contracts.artifacts.runtime_control import BindRequest, Probe
from kelvin.contracts.errors import Internal, Refused
from kelvin.contracts.timeline import Stage, StageSpan
from runtime.drivers.engine_thread import EngineThread
from runtime.drivers.interface import Engine
from runtime.drivers.native.engine import ModelEngine
from runtime.drivers.native.kv_blocks_policy import BLOCK_SIZE
from runtime.encoder.engine import EncoderEngine
from runtime.encoder.recipe import read_recipe
from runtime.encoder.serving import EmbeddingCodec, ServedEncoder
from runtime.lifecycle import predictor_sealing as predictor
from runtime.lifecycle.weights import (
    AcquireLease,
    DetachableModel,
    Lease,
    VerifiedModel,
    Weights,
    bind_verified,
    binds_without_reading,
    read_pinned_files,
    resolve_device,
)
from runtime.models.attention_hook import detach_backend
from runtime.models.binding import BoundModel
from runtime.models.families import SERVED
from runtime.models.pinned_files import PinnedFiles, sampling_defaults
from runtime.predictor.engine import PredictorEngine
from runtime.predictor.serving import ServedPredictor
from runtime.surface.filter_pipeline import FilterClient, FilterPipeline, build_filter_pipeline
from runtime.surface.serving import EngineCallbacks, ServedDecoder, ServedVersion, SuspendHandle
from runtime.text.tokenizer import TextCodec, check_token_rows

log = logging.getLogger(__name__)


# After a wake, the probe shares the forward of the first request, which arrives at once or, on busy cores, a little
# later. A probe that ran alone just before that request would delay it by a whole forward. Without a request in this
# time, the probe runs alone.
PROBE_AFTER_S: Final = 0.25


class _StageRecorder:
    """The stages of one restore, which begins now. `on_stage` is called when a stage ends."""

    def __init__(self, callbacks: EngineCallbacks) -> None:
        self._began_ns = time.monotonic_ns()
        self._on_stage = callbacks.on_stage
        self._ended: list[StageSpan] = []

    @property
    def spans(self) -> tuple[StageSpan, ...]:
        return tuple(self._ended)

    def end(self, stage: Stage) -> None:
        span = StageSpan(stage, (time.monotonic_ns() - self._began_ns) // 1000)
        self._ended.append(span)
        self._on_stage(span)

    def end_prerequisite(self, stage: Stage) -> None:
        """End a stage that others depend on. Move their ends to this time if they were earlier."""
        self.end(stage)
        *others, first = self._ended
        self._ended = [first, *(StageSpan(each.stage, max(each.after_us, first.after_us)) for each in others)]


@dataclass(frozen=True, slots=True)
class _RestoreCache:
    """Files, model, codec and filters of the first restore, which a wake reuses."""

    files: PinnedFiles
    verified: VerifiedModel
    codec: TextCodec | EmbeddingCodec
    filter_pipeline: FilterPipeline | None


class SuspendedModel:
    """A bound model without an engine. It keeps its lease until `release_weights`, which also releases the weights.

    `resume_model` leases released weights again. Copies on a device are never kept: `resume_model` makes them again
    from the lease. `suspend` detaches the engine's backend, and the next engine attaches its own. `bound` is None for a
    model that is rebuilt from the lease's bytes. One call at a time.
    """

    def __init__(self, weights: Weights, bound: BoundModel | None, acquire: AcquireLease) -> None:
        architecture = weights.lease.manifest.engine.architecture
        self._model = None if bound is None else DetachableModel(SERVED[architecture], bound.module)
        self._lease = weights.lease
        self._weights: Weights | None = weights
        self._copy_again = weights.copy_again  # makes device copies again; None without a lease or without copies
        self._acquire = acquire
        self.has_released_weights = False

    def __repr__(self) -> str:
        state = "released" if self.has_released_weights else "empty" if self._weights is None else "whole"
        return f"<SuspendedModel {state} {self._lease!r}>"

    def suspend(self) -> None:
        """Free what an engine attached to the model, and all copies on a device."""
        if self._model is not None:
            detach_backend(self._model.module)
        if self._copy_again is not None:
            self._detach_weights()
        _free_unreferenced()

    def release_weights(self) -> None:
        """Release the lease. Raises `Refused(Internal)` if a reference to its memory remains. The memory then stays
        mapped, and the process has to end.
        """
        self._detach_weights()
        _free_unreferenced()
        if self._lease.in_use:
            log.error("a reference to the weights remains, so they can't be released")
            raise Refused(Internal())
        self._copy_again = None
        self.has_released_weights = True
        self._lease.close()

    def resume_model(self, request: BindRequest, stages: _StageRecorder) -> Weights:
        """Return the weights with the model over them. Raises `Refused`.

        (1) They were kept: return them. (2) The lease was kept: copy them to the device again. (3) Acquire a new lease.
        """
        # (1)
        if self._weights is not None:
            return self._weights
        # (2) and (3)
        if self._copy_again is not None:
            weights = self._copy_again()
        else:
            weights = self._acquire(request.tenant, request.version)
            weights.lease.wait_until_whole()
            stages.end(Stage.LEASED)
        if self._model is not None:
            self._model.attach_weights(weights.tensors)
            stages.end(Stage.BOUND)
        return weights

    def _detach_weights(self) -> None:
        if self._weights is None:
            return
        if self._model is not None:
            self._model.detach_weights(self._weights.tensors)
        self._weights.tensors.clear()  # other holders of the dictionary lose its views, too
        self._weights = None


def _free_unreferenced() -> None:
    """Free unreferenced modules and their reference cycles, and return their memory to the device."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def restore(
    request: BindRequest, callbacks: EngineCallbacks, acquire: AcquireLease, filters: FilterClient | None = None
) -> ServedVersion:
    """Lease, bind and start a version. When it returns, the engine's thread runs. Raises `Refused`."""
    stages = _StageRecorder(callbacks)
    torch.set_num_threads(request.threads)
    weights = acquire(request.tenant, request.version)
    if weights.lease.manifest.engine.kind == "predict":
        weights.lease.wait_until_whole()
        stages.end(Stage.LEASED)
        return _start_predictor(request, callbacks, weights, acquire, stages)
    files = read_pinned_files(weights.lease)
    filter_pipeline = build_filter_pipeline(files, filters)
    device = resolve_device(request.device_class)
    if not binds_without_reading(weights.lease, device):
        weights.lease.wait_until_whole()
    if is_whole := weights.lease.is_whole:
        stages.end(Stage.LEASED)
    verified = bind_verified(request.version, weights, files, device)
    stages.end(Stage.BOUND)
    cache = _RestoreCache(files, verified, _build_codec(weights.lease, files, verified), filter_pipeline)
    return _start_engine(request, callbacks, weights, cache, acquire, stages, is_partial_lease=not is_whole)


def _build_codec(lease: Lease, files: PinnedFiles, verified: VerifiedModel) -> TextCodec | EmbeddingCodec:
    if lease.manifest.engine.kind == "embed":
        return EmbeddingCodec(files, verified.facts.vocab_size)
    text = TextCodec(files)
    check_token_rows(text, verified.facts.vocab_size)
    return text


def _start_engine(
    request: BindRequest,
    callbacks: EngineCallbacks,
    weights: Weights,
    cache: _RestoreCache,
    acquire: AcquireLease,
    stages: _StageRecorder,
    *,
    is_partial_lease: bool = False,
    probes_first: bool = False,
) -> ServedVersion:
    """Start an engine over a bound model. Raises `Refused`. With `is_partial_lease` the lease may be incomplete; no
    weight is read before it is complete. With `probes_first` the engine must reproduce the known answers before this
    returns.
    """
    lease, verified, codec = weights.lease, cache.verified, cache.codec
    limits = lease.manifest.limits
    embeds = isinstance(codec, EmbeddingCodec)
    engine = (
        _build_encoder(request, verified, cache.files)
        if embeds
        else _build_decoder(request, verified, limits.max_streams)
    )
    thread = _build_thread(engine, callbacks, limits.max_streams, probes_first=probes_first)
    stages.end(Stage.READY)
    if is_partial_lease:
        lease.wait_until_whole()
        stages.end_prerequisite(Stage.LEASED)
    # A wake must check against the recorded answers. It must not record new ones.
    wake_cache = replace(cache, verified=replace(verified, recorded_seal=None))

    def restart(
        request: BindRequest, callbacks: EngineCallbacks, weights: Weights, stages: _StageRecorder, probes_first: bool
    ) -> ServedVersion:
        return _start_engine(request, callbacks, weights, wake_cache, acquire, stages, probes_first=probes_first)

    suspend_handle = _build_suspend_handle(
        SuspendedModel(weights, verified.bound, acquire), restart, has_device_copies=weights.copy_again is not None
    )
    serving: ServedVersion
    if isinstance(codec, EmbeddingCodec):
        serving = ServedEncoder(
            bind=request,
            limits=limits,
            engine=engine,
            thread=thread,
            spans=stages.spans,
            bytes_by_tier=lease.bytes_by_tier,
            recorded_seal=verified.recorded_seal,
            suspend_handle=suspend_handle,
            codec=codec,
            dimensions=verified.facts.dimensions,
        )
    else:
        serving = ServedDecoder(
            bind=request,
            limits=limits,
            engine=engine,
            thread=thread,
            spans=stages.spans,
            bytes_by_tier=lease.bytes_by_tier,
            recorded_seal=verified.recorded_seal,
            suspend_handle=suspend_handle,
            codec=codec,
            context_tokens=min(verified.facts.max_positions, engine.kv_blocks_total * BLOCK_SIZE),
            defaults=sampling_defaults(cache.files),
            filter_pipeline=cache.filter_pipeline,
        )
    thread.start()
    return serving


def _build_thread(engine: Engine, callbacks: EngineCallbacks, max_streams: int, *, probes_first: bool) -> EngineThread:
    """Return the engine's thread, not started. Raises `Refused` if `probes_first` and the answers are wrong."""
    if probes_first and (failure := engine.run_probe_alone()) is not None:
        raise Refused(failure)
    # Twice the streams: a cancelled request leaves only with the next step, but its successor arrives at once.
    return EngineThread(
        engine,
        on_events=callbacks.on_events,
        on_busy=callbacks.on_busy,
        max_requests=2 * max_streams,
        probe_after_s=PROBE_AFTER_S,
    )


# Builds a `ServedVersion` from the weights of `SuspendedModel.resume_model`. The last argument is `probes_first`.
_StartEngine = Callable[[BindRequest, EngineCallbacks, Weights, _StageRecorder, bool], ServedVersion]


def _build_suspend_handle(
    suspended: SuspendedModel, restart: _StartEngine, *, has_device_copies: bool = False
) -> SuspendHandle:
    """Return the operations of a sleeping version. If weights were released, a wake verifies the known answers before
    it is ready and not in the first batch. Waiting requests then go to another replica and don't fail with this one.
    """

    def resume(request: BindRequest, callbacks: EngineCallbacks) -> ServedVersion:
        stages = _StageRecorder(callbacks)
        torch.set_num_threads(request.threads)
        probes_first = suspended.has_released_weights
        return restart(request, callbacks, suspended.resume_model(request, stages), stages, probes_first)

    return SuspendHandle(suspended.suspend, resume, suspended.release_weights, has_device_copies=has_device_copies)


def _start_predictor(
    request: BindRequest,
    callbacks: EngineCallbacks,
    weights: Weights,
    acquire: AcquireLease,
    stages: _StageRecorder,
    known_probe: Probe | None = None,
    *,
    probes_first: bool = False,
) -> ServedVersion:
    """Start a predictor. Nothing is bound: its session is built from the lease's bytes. Raises `Refused`."""
    lease = weights.lease
    limits, signature = lease.manifest.limits, predictor.require_signature(lease.manifest, request.version)
    session = predictor.open_session(lease, request.version, request.threads)
    probe, recorded = (
        (known_probe, None) if known_probe else predictor.load_known_answers(request.version, lease, session)
    )
    stages.end(Stage.BOUND)
    engine = PredictorEngine(session, signature, version=request.version, max_rows=limits.max_input_tokens, probe=probe)
    thread = _build_thread(engine, callbacks, limits.max_streams, probes_first=probes_first)

    def restart(
        request: BindRequest, callbacks: EngineCallbacks, weights: Weights, stages: _StageRecorder, probes_first: bool
    ) -> ServedVersion:
        return _start_predictor(request, callbacks, weights, acquire, stages, probe, probes_first=probes_first)

    stages.end(Stage.READY)
    thread.start()
    return ServedPredictor(
        bind=request,
        limits=limits,
        engine=engine,
        thread=thread,
        spans=stages.spans,
        bytes_by_tier=lease.bytes_by_tier,
        recorded_seal=recorded,
        suspend_handle=_build_suspend_handle(SuspendedModel(weights, None, acquire), restart),
        signature=signature,
    )


def _build_decoder(request: BindRequest, verified: VerifiedModel, max_streams: int) -> Engine:
    return ModelEngine(
        verified.bound,
        verified.facts,
        version=request.version,
        kv_bytes=request.kv_bytes,
        device=resolve_device(request.device_class),
        probe=verified.probe,
        max_running=max_streams,
        max_waiting=max_streams,
    )


def _build_encoder(request: BindRequest, verified: VerifiedModel, files: PinnedFiles) -> Engine:
    return EncoderEngine(
        verified.bound,
        read_recipe(files),
        verified.facts,
        version=request.version,
        device=resolve_device(request.device_class),
        probe=verified.probe,
    )
