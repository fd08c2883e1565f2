"""GPU facts from NVML's replies and refusals, against a fake, because test machines have no GPU.

The fake uses the constants and exceptions of the real binding (nvidia-ml-py 13, pynvml.py), and the same function
names, arguments and result types. `nvmlDeviceGetRemappedRows` returns a tuple of four. `nvmlEventSetWait_v2` raises
Timeout if there is no event. Field values have their own status. The test of real NVML is skipped without a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kelvin.devices.gpu_policy import CudaVisibility, GpuFacts, HealthyGpu, judge_gpu_health
from kelvin.devices.nvml import open_gpus

pynvml = pytest.importorskip("pynvml")

FULL = GpuFacts(
    "GPU 0", recovery=1, uncorrected=2, uncorrected_ever=5, remap_pending=True, remap_failed=False, pages_pending=False,
    temperature_c=61, slows_c=87, ends_c=92, memory_used_bytes=3, memory_total_bytes=7,
)  # fmt: skip


class FakeNvml:
    """NVML with some devices. Functions in `refused` aren't supported. If `raises` is set, every query raises it."""

    def __init__(self, devices: int = 1) -> None:
        self.devices = devices
        self.refused: set[str] = set()
        self.raises: Exception | None = None
        self.events: list[tuple[int, int]] = []  # (device, XID)
        self.registered: set[int] = set()  # devices registered for events
        self.open = 0
        self.sets = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)  # constants and exceptions

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return self.devices

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, _: int) -> str:
        return "NVIDIA H100"

    def nvmlDeviceGetMigMode(self, _: int) -> list[int]:
        self._check_supported("nvmlDeviceGetMigMode")
        return [pynvml.NVML_DEVICE_MIG_DISABLE, pynvml.NVML_DEVICE_MIG_DISABLE]

    def nvmlDeviceGetTotalEccErrors(self, _: int, kind: int, counter: int) -> int:
        self._check_supported("nvmlDeviceGetTotalEccErrors")
        assert kind == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        return {pynvml.NVML_VOLATILE_ECC: 2, pynvml.NVML_AGGREGATE_ECC: 5}[counter]

    def nvmlDeviceGetRemappedRows(self, _: int) -> tuple[int, int, int, int]:
        self._check_supported("nvmlDeviceGetRemappedRows")
        return 0, 1, 1, 0

    def nvmlDeviceGetRetiredPagesPendingStatus(self, _: int) -> int:
        self._check_supported("nvmlDeviceGetRetiredPagesPendingStatus")
        return 0

    def nvmlDeviceGetTemperature(self, _: int, sensor: int) -> int:
        self._check_supported("nvmlDeviceGetTemperature")
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return 61

    def nvmlDeviceGetTemperatureThreshold(self, _: int, kind: int) -> int:
        self._check_supported("nvmlDeviceGetTemperatureThreshold")
        return {pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN: 87, pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN: 92}[kind]

    def nvmlDeviceGetMemoryInfo(self, _: int) -> SimpleNamespace:
        self._check_supported("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(used=3, total=7, free=4)

    def nvmlDeviceGetFieldValues(self, _: int, fields: list[int]) -> list[SimpleNamespace]:
        self._check_supported("nvmlDeviceGetFieldValues")
        assert fields == [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        return [SimpleNamespace(nvmlReturn=pynvml.NVML_SUCCESS, value=SimpleNamespace(uiVal=1))]

    def nvmlEventSetCreate(self) -> str:
        self._check_supported("nvmlEventSetCreate")
        self.sets += 1
        return "set"

    def nvmlEventSetFree(self, _: str) -> None:
        self.sets -= 1

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, _: str) -> None:
        self._check_supported("nvmlDeviceRegisterEvents")
        assert kinds == pynvml.nvmlEventTypeXidCriticalError
        self.registered.add(handle)

    def nvmlEventSetWait_v2(self, _: str, timeout_ms: int) -> SimpleNamespace:
        assert timeout_ms == 0
        while self.events and self.events[0][0] in set(range(self.devices)) - self.registered:
            self.events.pop(0)
        if not self.events:
            raise pynvml.NVMLError_Timeout
        device, xid = self.events.pop(0)
        return SimpleNamespace(device=device, eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=xid)

    def _check_supported(self, name: str) -> None:
        if self.raises is not None:
            raise self.raises
        if name in self.refused:
            raise pynvml.NVMLError_NotSupported


@contextmanager
def opened_gpus(fake: FakeNvml, shown: CudaVisibility | None = None) -> Iterator[Any]:
    """Open the GPUs of `fake`, and check at the end that NVML and its event sets are released."""
    with open_gpus(fake, shown=shown) as gpus:
        assert gpus is not None
        yield gpus
    assert (fake.open, fake.sets) == (0, 0)


def test_every_gpu_fact_is_read() -> None:
    with opened_gpus(FakeNvml()) as gpus:
        assert gpus.read_facts() == (FULL,)


def test_device_without_facts_is_healthy() -> None:
    """A MIG instance refuses every query, which doesn't make it unhealthy."""
    fake = FakeNvml()
    fake.refused = {name for name in dir(FakeNvml) if name.startswith(("nvmlDevice", "nvmlEvent"))}
    with opened_gpus(fake) as gpus:
        assert gpus.read_facts() == (GpuFacts("GPU 0"),)
        assert judge_gpu_health(gpus.read_facts()[0]) == HealthyGpu()


@pytest.mark.parametrize("error", ["NVMLError_GpuIsLost", "NVMLError_GpuNotFound"])
def test_lost_device_is_reported(error: str) -> None:
    """Only errors that mean a lost device mark it as lost."""
    fake = FakeNvml()
    with opened_gpus(fake) as gpus:
        fake.raises = getattr(pynvml, error)()
        assert gpus.read_facts() == (GpuFacts("GPU 0", lost=True),)
        fake.raises = pynvml.NVMLError_Unknown()
        assert gpus.read_facts() == (GpuFacts("GPU 0"),)


def test_xids_are_kept_by_device() -> None:
    """A device keeps each XID once. An XID of an unknown device counts for all devices."""
    fake = FakeNvml(devices=2)
    with opened_gpus(fake) as gpus:
        assert [each.xids for each in gpus.read_facts()] == [(), ()]
        fake.events = [(1, 79), (1, 79), (0, 13)]
        assert [each.xids for each in gpus.read_facts()] == [(13,), (79,)]
        fake.events = [(7, 62)]
        assert [each.xids for each in gpus.read_facts()] == [(13, 62), (79, 62)]


@pytest.mark.parametrize("refused", [set(), {"nvmlDeviceGetMigMode"}], ids=["MIG is supported", "MIG is not supported"])
def test_gpu_hidden_from_cuda_is_not_checked(refused: set[str]) -> None:
    """A hidden GPU isn't checked, and its XIDs don't count for others. GPUs keep the machine's numbering."""
    fake = FakeNvml(devices=2)
    fake.refused = refused
    with opened_gpus(fake, CudaVisibility("1")) as gpus:
        fake.events = [(0, 79), (1, 13)]
        assert [(each.name, each.xids) for each in gpus.read_facts()] == [("GPU 1", (13,))]
    with opened_gpus(fake, CudaVisibility("MIG-0")) as gpus:
        assert [each.name for each in gpus.read_facts()] == ["GPU 0", "GPU 1"]


def test_no_driver_means_no_gpus() -> None:
    """Without a driver, `open_gpus` yields None."""
    fake = FakeNvml()

    def refuse() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    fake.nvmlInit = refuse  # type: ignore[method-assign]
    with open_gpus(fake) as gpus:
        assert gpus is None


@pytest.mark.gpu
def test_real_gpu_reports_memory() -> None:
    """A real GPU has a memory size and is not lost."""
    with open_gpus() as gpus:
        if gpus is None:
            pytest.skip("no NVML on this machine: no GPU was asked")
        for facts in gpus.read_facts():
            assert not facts.lost
            assert facts.memory_total_bytes
