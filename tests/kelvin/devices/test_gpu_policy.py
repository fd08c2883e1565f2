"""GPU health from driver facts: which facts make a GPU unhealthy, degraded or healthy. Which GPUs CUDA can see."""

from dataclasses import replace

import pytest

from kelvin.devices.gpu_policy import (
    APPLICATION_XIDS,
    CudaVisibility,
    DegradedGpu,
    GpuFacts,
    GpuHealth,
    HealthyGpu,
    ListedGpu,
    UnhealthyGpu,
    judge_gpu_health,
    visible_gpus,
    worst_gpu_health,
)

GOOD = GpuFacts(
    "GPU 0", recovery=0, uncorrected=0, uncorrected_ever=0, remap_pending=False, remap_failed=False, temperature_c=61,
    slows_c=87, ends_c=92, memory_used_bytes=1 << 30, memory_total_bytes=80 << 30,
)  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "want"),
    [
        pytest.param(GOOD, HealthyGpu(), id="no problem"),
        pytest.param(GpuFacts("GPU 0"), HealthyGpu(), id="a MIG instance without facts"),
        pytest.param(replace(GOOD, lost=True), UnhealthyGpu("it does not answer"), id="fallen off the bus"),
        pytest.param(replace(GOOD, xids=(79,)), UnhealthyGpu("XID 79"), id="an XID of a lost GPU"),
        pytest.param(replace(GOOD, xids=(48,)), UnhealthyGpu("XID 48"), id="a double bit error"),
        pytest.param(replace(GOOD, xids=(95,)), UnhealthyGpu("XID 95"), id="an error that was not contained"),
        pytest.param(replace(GOOD, xids=(9999,)), UnhealthyGpu("XID 9999"), id="an unknown XID"),
        pytest.param(replace(GOOD, xids=tuple(APPLICATION_XIDS)), HealthyGpu(), id="errors of applications"),
        pytest.param(replace(GOOD, xids=(13, 94)), DegradedGpu("XID 94"), id="an error that was contained"),
        pytest.param(replace(GOOD, xids=(63, 119)), UnhealthyGpu("XID 119"), id="the unhealthy reason comes first"),
        pytest.param(
            replace(GOOD, recovery=1), UnhealthyGpu("its driver asks for a reset of the GPU"), id="a reset is needed"
        ),
        pytest.param(
            replace(GOOD, recovery=2), UnhealthyGpu("its driver asks for a reboot of the node"), id="a reboot"
        ),
        pytest.param(
            replace(GOOD, recovery=3), DegradedGpu("its driver asks to end traffic between GPUs"), id="peer traffic"
        ),
        pytest.param(replace(GOOD, recovery=99), HealthyGpu(), id="an unknown action"),
        pytest.param(
            replace(GOOD, remap_failed=True),
            UnhealthyGpu("a bad row of its memory could not be remapped"),
            id="no spare rows are left",
        ),
        pytest.param(
            replace(GOOD, remap_pending=True),
            DegradedGpu("rows of its memory wait for a reset to be remapped"),
            id="a row will be remapped",
        ),
        pytest.param(
            replace(GOOD, pages_pending=True),
            DegradedGpu("pages of its memory wait for a reboot to be retired"),
            id="a page will be retired",
        ),
        pytest.param(
            replace(GOOD, uncorrected=2),
            DegradedGpu("2 uncorrected ECC errors since its driver was loaded"),
            id="ECC errors since the driver was loaded",
        ),
        pytest.param(replace(GOOD, uncorrected_ever=2), HealthyGpu(), id="earlier ECC errors"),
        pytest.param(replace(GOOD, temperature_c=86), HealthyGpu(), id="just below the slowdown"),
        pytest.param(
            replace(GOOD, temperature_c=87), DegradedGpu("its temperature is 87 °C; it slows down at 87"), id="slows"
        ),
        pytest.param(
            replace(GOOD, temperature_c=92),
            UnhealthyGpu("its temperature is 92 °C; it switches itself off at 92"),
            id="at the shutdown",
        ),
        pytest.param(
            replace(GOOD, temperature_c=99, slows_c=None, ends_c=None), HealthyGpu(), id="no thresholds known"
        ),
    ],
)
def test_judge(facts: GpuFacts, want: GpuHealth) -> None:
    """The first reason in order of severity decides."""
    assert judge_gpu_health(facts) == want


@pytest.mark.parametrize(
    ("devices", "want"),
    [
        pytest.param([], HealthyGpu(), id="no GPU"),
        pytest.param([GOOD, GOOD], HealthyGpu(), id="two good ones"),
        pytest.param(
            [replace(GOOD, xids=(94,)), replace(GOOD, name="GPU 1", lost=True)],
            UnhealthyGpu("GPU 1: it does not answer"),
            id="the worst of them",
        ),
        pytest.param(
            [GOOD, replace(GOOD, name="GPU 1", xids=(94,))], DegradedGpu("GPU 1: XID 94"), id="the second one"
        ),
    ],
)
def test_worst_gpu_health_names_the_device(devices: list[GpuFacts], want: GpuHealth) -> None:
    """The worst GPU decides, and the reason names it."""
    assert worst_gpu_health(devices) == want


ONE = ListedGpu("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "H100")
TWO = ListedGpu("GPU-8932aaaa-d72c-4106-c12f-20bd9faed9f6", "H100")
THREE = ListedGpu("GPU-1111f937-d72c-4106-c12f-20bd9faed9f6", "H100")
ALIKE = [ONE, TWO, THREE]
MIXED = [ONE, replace(TWO, product="T4"), THREE]
EVERY = (0, 1, 2)
BY_BUS = "PCI_BUS_ID"


@pytest.mark.parametrize(
    ("listed", "shown", "want"),
    [
        pytest.param(ALIKE, CudaVisibility(), EVERY, id="not set"),
        pytest.param(ALIKE, CudaVisibility("1"), (1,), id="a number"),
        pytest.param(ALIKE, CudaVisibility(" 2, 0 "), (0, 2), id="several numbers"),
        pytest.param(ALIKE, CudaVisibility("0,2,-1,1"), (0, 2), id="numbers after a negative one are ignored"),
        pytest.param(ALIKE, CudaVisibility("2,3,1"), (2,), id="numbers after a missing one are ignored"),
        pytest.param(ALIKE, CudaVisibility(""), EVERY, id="no GPU is visible, so none is used"),
        pytest.param(ALIKE, CudaVisibility("-1"), EVERY, id="no GPU is visible, by -1"),
        pytest.param(ALIKE, CudaVisibility("1", "FASTEST_FIRST"), (1,), id="equal GPUs, fastest first"),
        pytest.param(MIXED, CudaVisibility("1"), EVERY, id="different GPUs, fastest first: the order is unknown"),
        pytest.param(MIXED, CudaVisibility("1", BY_BUS), (1,), id="different GPUs in bus order"),
        pytest.param(
            [replace(each, product=None) for each in ALIKE],
            CudaVisibility("1"),
            EVERY,
            id="GPUs without a product name",
        ),
        pytest.param(
            [ONE, replace(TWO, is_parted=True), THREE], CudaVisibility("0", BY_BUS), EVERY, id="MIG is numbered too"
        ),
        pytest.param(MIXED, CudaVisibility(str(TWO.uuid)), (1,), id="a UUID"),
        pytest.param(MIXED, CudaVisibility("GPU-1111"), (2,), id="a UUID prefix"),
        pytest.param(ALIKE, CudaVisibility("GPU-1111,GPU-8932a"), (1, 2), id="two UUID prefixes"),
        pytest.param(ALIKE, CudaVisibility("GPU-1111,0"), (0, 2), id="a UUID prefix and a number"),
        pytest.param(ALIKE, CudaVisibility("GPU-8932"), EVERY, id="an ambiguous prefix"),
        pytest.param(ALIKE, CudaVisibility("GPU-7"), EVERY, id="an unknown prefix"),
        pytest.param([replace(ONE, uuid=None), TWO], CudaVisibility("GPU-8932f"), (0, 1), id="a GPU without a UUID"),
        pytest.param(ALIKE, CudaVisibility("MIG-8932f937-d72c-4106-c12f-20bd9faed9f6"), EVERY, id="a MIG UUID"),
        pytest.param(
            ALIKE,
            CudaVisibility("MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/2"),
            EVERY,
            id="the older form of a MIG UUID",
        ),
        pytest.param(ALIKE, CudaVisibility("first"), EVERY, id="a word"),
        pytest.param(ALIKE, CudaVisibility("1" * 5000), EVERY, id="a number that is too large"),
        pytest.param([], CudaVisibility("0"), (), id="no GPU at all"),
    ],
)
def test_visible_devices_selects_every_used_gpu(
    listed: list[ListedGpu], shown: CudaVisibility, want: tuple[int, ...]
) -> None:
    """Every GPU that CUDA may use is returned, for each form of CUDA_VISIBLE_DEVICES. In doubt, all are."""
    assert visible_gpus(listed, shown) == want
