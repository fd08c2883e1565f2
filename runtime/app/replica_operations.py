"""The operations of a replica over the real weight cache: restore, gate, seal and warm-up."""

from functools import partial

import torch

from kelvin.contracts.artifacts.runtime_control import BindRequest, GateFacts, GateJob, SealAttestation, SealJob
from kelvin.ipc.engine_jobs import GATE_BYTES, seal_bytes
from kelvin.ipc.socket_directory import SocketDirectory
from runtime.app.process_memory import SPARE_BYTES, limit_memory
from runtime.app.warmup import WarmUp
from runtime.lifecycle import sealing_jobs
from runtime.lifecycle.replica import ReplicaOperations
from runtime.lifecycle.version_restore import restore
from runtime.lifecycle.weights import Weights, engine_fingerprint, resolve_device
from runtime.predictor.onnx_session import installed_fingerprint
from runtime.surface.filter_pipeline import FilterClient
from runtime.surface.served_version import EngineCallbacks, ServedVersion
from weightcache.client import lease as client
from weightcache.client.device_copy import Lanes, agreed_checksum, copy_to_device, view_tensors


def build_operations(
    directory: SocketDirectory, timeout_s: float, filters: FilterClient | None = None
) -> ReplicaOperations:
    """Return the operations. A lease from the cache agent in `directory` may take `timeout_s` seconds."""
    cache = WeightCacheClient(directory, timeout_s)
    return ReplicaOperations(
        restore=partial(_restore, cache, filters),
        gate=_gate,
        seal=partial(_seal, cache, filters),
        warm_up=(*WarmUp().steps, cache.lanes.prepare),
    )


class WeightCacheClient:
    """Leases weights from the cache agent, and copies them to the device that computes."""

    def __init__(self, directory: SocketDirectory, timeout_s: float) -> None:
        self._directory = directory
        self._timeout_s = timeout_s
        self.lanes = Lanes()

    def acquire(self, device: torch.device, tenant: str, version: str, *, progressive: bool = False) -> Weights:
        """Lease a version for `device`. With `progressive`, some bytes may still be loading. Raises `Refused`."""
        engines = _list_engines(device)
        lease = client.acquire(self._directory, tenant, version, self._timeout_s, engines, progressive=progressive)
        if device.type == "cpu":
            return Weights(lease, view_tensors(lease))
        try:
            return self._copy_to(device, lease, agreed_checksum(lease.attestations))
        except BaseException:
            lease.close()
            raise

    def acquire_limited(self, device: torch.device, kv_bytes: int, tenant: str, version: str) -> Weights:
        """Lease a version for a restore, and limit the memory that this process may use for it."""
        weights = self.acquire(device, tenant, version, progressive=True)
        if device.type == "cpu":  # not for a GPU: its drivers map memory that is not this process's
            # Count the weights: a tensor is copied if its stored layout isn't the one that is computed over.
            limit_memory(weights.lease.manifest.total_bytes + kv_bytes + SPARE_BYTES)
        return weights

    def _copy_to(self, device: torch.device, lease: client.Lease, expected_checksum: str | None) -> Weights:
        copies = copy_to_device(lease, self.lanes.lane_for(device), expected_checksum)
        checksum = copies.checksum  # a local name, so that `copy_again` does not keep the arena alive
        copy_again = partial(self._copy_to, device, lease, checksum)
        return Weights(lease, copies.tensors, checksum, copy_again, partial(view_tensors, lease))


def _restore(
    cache: WeightCacheClient, filters: FilterClient | None, request: BindRequest, callbacks: EngineCallbacks
) -> ServedVersion:
    if filters is not None:
        filters.tenant = request.tenant
    acquire = partial(cache.acquire_limited, resolve_device(request.device_class), request.kv_bytes)
    return restore(request, callbacks, acquire, filters)


# A job computes on the CPU only. Its process ends afterwards, so the memory limit affects no later work.
def _gate(job: GateJob) -> GateFacts:
    limit_memory(GATE_BYTES)
    return sealing_jobs.gate(job)


def _seal(cache: WeightCacheClient, filters: FilterClient | None, job: SealJob) -> SealAttestation:
    limit_memory(seal_bytes(job))
    if filters is not None:
        filters.tenant = job.tenant
    acquire = partial(cache.acquire, torch.device("cpu"))
    return sealing_jobs.seal(job, acquire, with_device_checksum=cache.lanes.has_device, filters=filters)


def _list_engines(device: torch.device) -> tuple[tuple[str, str], ...]:
    """Return (library, device) of each engine that this process may use. A lease brings known answers for one."""
    onnx_fingerprint = installed_fingerprint()
    predictors = () if onnx_fingerprint is None else ((onnx_fingerprint, "cpu"),)
    return (engine_fingerprint(device), *predictors)
