"""Read facts about GPUs from NVIDIA's management library (extra `gpu`). Only this file imports it. Blocking.

A fact that a device does not report is None: a MIG part has no temperature, a desktop card has no ECC. A device is lost
only if it does not answer at all. This module never changes a setting and never resets a device.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

from kelvin.devices.gpu_policy import CudaVisibility, GpuFacts, ListedGpu, visible_gpus

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_XIDS: Final = 64  # XIDs kept per device and read at once: in a storm of them, the first ones decide


class Gpus:
    """Devices by index, valid inside `open_gpus`. Use it from one thread at a time."""

    def __init__(self, nvml: Any, shown: CudaVisibility | None = None) -> None:
        self._nvml = nvml
        self._lost = (nvml.NVMLError_GpuIsLost, nvml.NVMLError_GpuNotFound)
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        used_indexes = (
            range(len(handles)) if shown is None else visible_gpus([self._listed(handle) for handle in handles], shown)
        )
        self._handles = {index: handles[index] for index in used_indexes}
        self._xids: dict[int, tuple[int, ...]] = dict.fromkeys(used_indexes, ())
        self._events = self._register_events()

    def __repr__(self) -> str:
        return f"<Gpus {len(self._handles)}>"

    def read_facts(self) -> tuple[GpuFacts, ...]:
        """Return the current facts of all devices, with XIDs since `open_gpus`."""
        self._drain_events()
        return tuple(self._facts(index, handle) for index, handle in self._handles.items())

    def close(self) -> None:
        """Stop listening for events. Idempotent."""
        if self._events is not None:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(self._events)
            self._events = None

    def _facts(self, index: int, handle: Any) -> GpuFacts:
        try:
            return self._read_device(index, handle)
        except self._lost:
            return GpuFacts(f"GPU {index}", lost=True, xids=self._xids[index])

    def _read_device(self, index: int, handle: Any) -> GpuFacts:
        """Return the device's facts. Raises the errors that mean a lost device."""
        nvml = self._nvml

        def ecc(counter: int) -> int | None:
            return self._try_query(lambda: int(nvml.nvmlDeviceGetTotalEccErrors(handle, uncorrected, counter)))

        def threshold(kind: int) -> int | None:
            return self._try_query(lambda: int(nvml.nvmlDeviceGetTemperatureThreshold(handle, kind)))

        uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        remapped = self._try_query(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
        memory = self._try_query(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        return GpuFacts(
            name=f"GPU {index}",
            xids=self._xids[index],
            recovery=self._try_query(lambda: self._recovery(handle)),
            uncorrected=ecc(nvml.NVML_VOLATILE_ECC),
            uncorrected_ever=ecc(nvml.NVML_AGGREGATE_ECC),
            remap_pending=None if remapped is None else bool(remapped[2]),
            remap_failed=None if remapped is None else bool(remapped[3]),
            pages_pending=self._try_query(lambda: bool(nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))),
            temperature_c=self._try_query(
                lambda: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
            ),
            slows_c=threshold(nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
            ends_c=threshold(nvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN),
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
        )

    def _recovery(self, handle: Any) -> int | None:
        nvml = self._nvml
        (field,) = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        return int(field.value.uiVal) if field.nvmlReturn == nvml.NVML_SUCCESS else None

    def _try_query(self, query: Callable[[], T]) -> T | None:
        """Return None if device, driver or permissions do not give the value. Raises errors that mean a lost device."""
        try:
            return query()
        except self._lost:
            raise
        except self._nvml.NVMLError:
            return None

    def _register_events(self) -> Any:
        """Register for XID events. Return None if no event set can be created."""
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return None
        registered = 0
        for handle in self._handles.values():
            with suppress(nvml.NVMLError):
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
                registered += 1
        if registered < len(self._handles):
            log.warning("not every GPU tells of XIDs", extra={"devices": len(self._handles), "heard": registered})
        return events

    def _drain_events(self) -> None:
        """Read the events since the last call, without waiting."""
        nvml = self._nvml
        for _ in range(MAX_XIDS if self._events is not None else 0):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError:  # timeout: no more events
                return
            if not event.eventType & nvml.nvmlEventTypeXidCriticalError:
                continue
            for index in self._device_indexes(event.device):
                known, xid = self._xids[index], int(event.eventData)
                if xid not in known and len(known) < MAX_XIDS:
                    self._xids[index] = (*known, xid)
                    log.error("a GPU tells of an XID", extra={"device": index, "xid": xid})

    def _device_indexes(self, device: Any) -> list[int]:
        """Return the indexes of the device, or all indexes if it can't be identified."""
        uuid = self._try_uuid(device)
        found = [index for index, handle in self._handles.items() if uuid and self._try_uuid(handle) == uuid]
        return found or list(self._xids)

    def _listed(self, handle: Any) -> ListedGpu:
        nvml, is_parted = self._nvml, False
        product: str | None = None
        with suppress(nvml.NVMLError):
            product = str(nvml.nvmlDeviceGetName(handle))
        with suppress(nvml.NVMLError):  # few devices support MIG
            is_parted = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
        return ListedGpu(self._try_uuid(handle), product, is_parted)

    def _try_uuid(self, handle: Any) -> str | None:
        try:
            return str(self._nvml.nvmlDeviceGetUUID(handle))
        except self._nvml.NVMLError:
            return None


@contextmanager
def open_gpus(nvml: Any = None, *, shown: CudaVisibility | None = None) -> Iterator[Gpus | None]:
    """Open the GPUs of this machine. With `shown`, only those that CUDA shows to that process: NVML itself shows all.
    Yields None if there is no such library, driver or device.
    """
    if nvml is None and (nvml := _try_import()) is None:
        yield None
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        log.debug("no NVML", extra={"error": str(error)})
        yield None
        return
    try:
        gpus = _try_gpus(nvml, shown)
        try:
            yield gpus
        finally:
            if gpus is not None:
                gpus.close()
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _try_import() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _try_gpus(nvml: Any, shown: CudaVisibility | None) -> Gpus | None:
    try:
        return Gpus(nvml, shown)
    except nvml.NVMLError as error:
        log.warning("GPUs can't be queried", extra={"error": str(error)})
        return None
