"""Restore a version: lease, tensors, model, engine. Also suspend and resume it. All calls block; make one at a time.

Each step may raise `Refused`; the process then serves nothing. A sleeping replica has no engine and no KV cache. It
wakes by the steps that it needs.
"""

import gc
import logging
import time
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
from runtime.encoder.served_encoder import EmbeddingCodec, ServedEncoder
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
from runtime.predictor.served_predictor import ServedPredictor
from runtime.surface.filter_pipeline import FilterClient, FilterPipeline, build_filter_pipeline
from runtime.surface.served_version import EngineCallbacks, ServedDecoder, ServedVersion, SuspendHandle
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
class _Startup:
    """One restore or wake. With `probes_first`, the known answers are reproduced before the version is ready."""

    request: BindRequest
    callbacks: EngineCallbacks
    stages: _StageRecorder
    probes_first: bool = False

    def build_thread(self, engine: Engine, max_streams: int) -> EngineThread:
        """Return the engine's thread, not started. Raises `Refused` if `probes_first` and the answers are wrong."""
        if self.probes_first and (failure := engine.run_probe_alone()) is not None:
            raise Refused(failure)
        # Twice the streams: a cancelled request leaves only with the next step, but its successor arrives at once.
        return EngineThread(
            engine,
            on_events=self.callbacks.on_events,
            on_busy=self.callbacks.on_busy,
            max_requests=2 * max_streams,
            probe_after_s=PROBE_AFTER_S,
        )


class SuspendedModel:
    """A bound model without an engine. It keeps its lease until `release_weights`, which also releases the weights.

    `resume` leases released weights again. Copies on a device are never kept: `resume` makes them again from the lease.
    `suspend` detaches the engine's backend, and the next engine attaches its own. `bound` is None for a model that is
    rebuilt from the lease's bytes. One call at a time.
    """

    def __init__(
        self, weights: Weights, bound: BoundModel | None, starter: "_ModelStarter | _PredictorStarter"
    ) -> None:
        architecture = weights.lease.manifest.engine.architecture
        self._model = None if bound is None else DetachableModel(SERVED[architecture], bound.module)
        self._lease = weights.lease
        self._weights: Weights | None = weights
        self._copy_again = weights.copy_again  # makes device copies again; None without a lease or without copies
        self._starter = starter
        self._has_released_weights = False

    @property
    def handle(self) -> SuspendHandle:
        """Return the operations of the version while it has no engine."""
        has_device_copies = self._model is not None and self._copy_again is not None
        return SuspendHandle(self.suspend, self.resume, self.release_weights, has_device_copies)

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
        self._has_released_weights = True
        self._lease.close()

    def resume(self, request: BindRequest, callbacks: EngineCallbacks) -> ServedVersion:
        """Return the version with a new engine. Raises `Refused`.

        If weights were released, the known answers are verified before the version is ready and not in the first batch.
        Waiting requests then go to another replica and don't fail with this one.
        """
        stages = _StageRecorder(callbacks)
        torch.set_num_threads(request.threads)
        startup = _Startup(request, callbacks, stages, probes_first=self._has_released_weights)
        return self._starter.start(startup, self._resume_weights(request, stages))

    def _resume_weights(self, request: BindRequest, stages: _StageRecorder) -> Weights:
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
            weights = self._starter.acquire(request.tenant, request.version)
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
    startup = _Startup(request, callbacks, stages)
    torch.set_num_threads(request.threads)
    weights = acquire(request.tenant, request.version)
    if weights.lease.manifest.engine.kind == "predict":
        weights.lease.wait_until_whole()
        stages.end(Stage.LEASED)
        return _PredictorStarter(acquire).start(startup, weights)
    files = read_pinned_files(weights.lease)
    filter_pipeline = build_filter_pipeline(files, filters)
    device = resolve_device(request.device_class)
    if not binds_without_reading(weights.lease, device):
        weights.lease.wait_until_whole()
    if is_whole := weights.lease.is_whole:
        stages.end(Stage.LEASED)
    verified = bind_verified(request.version, weights, files, device)
    stages.end(Stage.BOUND)
    codec = _build_codec(weights.lease, files, verified)
    starter = _ModelStarter(acquire, files, verified, codec, filter_pipeline)
    return starter.start(startup, weights, is_partial_lease=not is_whole)


def _build_codec(lease: Lease, files: PinnedFiles, verified: VerifiedModel) -> TextCodec | EmbeddingCodec:
    if lease.manifest.engine.kind == "embed":
        return EmbeddingCodec(files, verified.facts.vocab_size)
    text = TextCodec(files)
    check_token_rows(text, verified.facts.vocab_size)
    return text


@dataclass(frozen=True, slots=True)
class _ModelStarter:
    """Starts engines over one bound model: in the restore, and again in each wake."""

    acquire: AcquireLease
    files: PinnedFiles
    verified: VerifiedModel
    codec: TextCodec | EmbeddingCodec
    filter_pipeline: FilterPipeline | None

    def start(self, startup: _Startup, weights: Weights, *, is_partial_lease: bool = False) -> ServedVersion:
        """Start an engine. Raises `Refused`. With `is_partial_lease` the lease may be incomplete; no weight is read
        before it is complete.
        """
        request, lease, verified, codec = startup.request, weights.lease, self.verified, self.codec
        limits = lease.manifest.limits
        engine = self._build_engine(request, limits.max_streams)
        thread = startup.build_thread(engine, limits.max_streams)
        startup.stages.end(Stage.READY)
        if is_partial_lease:
            lease.wait_until_whole()
            startup.stages.end_prerequisite(Stage.LEASED)
        # A wake must check against the recorded answers. It must not record new ones.
        starter = replace(self, verified=replace(verified, recorded_seal=None))
        suspended = SuspendedModel(weights, verified.bound, starter)
        served: ServedVersion
        if isinstance(codec, EmbeddingCodec):
            served = ServedEncoder(
                bind=request,
                limits=limits,
                engine=engine,
                thread=thread,
                spans=startup.stages.spans,
                bytes_by_tier=lease.bytes_by_tier,
                recorded_seal=verified.recorded_seal,
                suspend_handle=suspended.handle,
                codec=codec,
                dimensions=verified.facts.dimensions,
            )
        else:
            served = ServedDecoder(
                bind=request,
                limits=limits,
                engine=engine,
                thread=thread,
                spans=startup.stages.spans,
                bytes_by_tier=lease.bytes_by_tier,
                recorded_seal=verified.recorded_seal,
                suspend_handle=suspended.handle,
                codec=codec,
                context_tokens=min(verified.facts.max_positions, engine.kv_blocks_total * BLOCK_SIZE),
                defaults=sampling_defaults(self.files),
                filter_pipeline=self.filter_pipeline,
            )
        thread.start()
        return served

    def _build_engine(self, request: BindRequest, max_streams: int) -> Engine:
        verified, device = self.verified, resolve_device(request.device_class)
        if isinstance(self.codec, EmbeddingCodec):
            return EncoderEngine(
                verified.bound,
                read_recipe(self.files),
                verified.facts,
                version=request.version,
                device=device,
                probe=verified.probe,
            )
        return ModelEngine(
            verified.bound,
            verified.facts,
            version=request.version,
            kv_bytes=request.kv_bytes,
            device=device,
            probe=verified.probe,
            max_running=max_streams,
            max_waiting=max_streams,
        )


@dataclass(frozen=True, slots=True)
class _PredictorStarter:
    """Starts engines of one predictor. Nothing is bound: each session is built from the lease's bytes."""

    acquire: AcquireLease
    probe: Probe | None = None  # known answers of an earlier start

    def start(self, startup: _Startup, weights: Weights) -> ServedVersion:
        """Start an engine. Raises `Refused`."""
        request, lease = startup.request, weights.lease
        limits, signature = lease.manifest.limits, predictor.require_signature(lease.manifest, request.version)
        session = predictor.open_session(lease, request.version, request.threads)
        probe, recorded_seal = (
            (self.probe, None) if self.probe else predictor.load_known_answers(request.version, lease, session)
        )
        startup.stages.end(Stage.BOUND)
        engine = PredictorEngine(
            session, signature, version=request.version, max_rows=limits.max_input_tokens, probe=probe
        )
        thread = startup.build_thread(engine, limits.max_streams)
        startup.stages.end(Stage.READY)
        thread.start()
        return ServedPredictor(
            bind=request,
            limits=limits,
            engine=engine,
            thread=thread,
            spans=startup.stages.spans,
            bytes_by_tier=lease.bytes_by_tier,
            recorded_seal=recorded_seal,
            suspend_handle=SuspendedModel(weights, None, replace(self, probe=probe)).handle,
            signature=signature,
        )
