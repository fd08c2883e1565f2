"""What CUDA_VISIBLE_DEVICES means among the devices of a machine, and when that can't be told."""

from dataclasses import replace

import pytest

from contracts.gpu import Listed, Shown, visible

ONE = Listed("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "H100")
TWO = Listed("GPU-8932aaaa-d72c-4106-c12f-20bd9faed9f6", "H100")
THREE = Listed("GPU-1111f937-d72c-4106-c12f-20bd9faed9f6", "H100")
ALIKE = [ONE, TWO, THREE]
MIXED = [ONE, replace(TWO, product="T4"), THREE]
EVERY = (0, 1, 2)
BY_BUS = "PCI_BUS_ID"


@pytest.mark.parametrize(
    ("listed", "shown", "want"),
    [
        pytest.param(ALIKE, Shown(), EVERY, id="not set"),
        pytest.param(ALIKE, Shown("1"), (1,), id="a number"),
        pytest.param(ALIKE, Shown(" 2, 0 "), (0, 2), id="numbers, whose order is CUDA's"),
        pytest.param(ALIKE, Shown("0,2,-1,1"), (0, 2), id="what comes after a negative one is passed over"),
        pytest.param(ALIKE, Shown("2,3,1"), (2,), id="what comes after one that isn't there, too"),
        pytest.param(ALIKE, Shown(""), EVERY, id="none is shown: nobody computes here"),
        pytest.param(ALIKE, Shown("-1"), EVERY, id="likewise"),
        pytest.param(ALIKE, Shown("1", "FASTEST_FIRST"), (1,), id="all are as fast"),
        pytest.param(MIXED, Shown("1"), EVERY, id="the fastest is first, and nobody knows which that is"),
        pytest.param(MIXED, Shown("1", BY_BUS), (1,), id="by the bus"),
        pytest.param(
            [replace(each, product=None) for each in ALIKE], Shown("1"), EVERY, id="they don't say what they are"
        ),
        pytest.param(
            [ONE, replace(TWO, is_parted=True), THREE], Shown("0", BY_BUS), EVERY, id="parts are counted, too"
        ),
        pytest.param(MIXED, Shown(str(TWO.uuid)), (1,), id="a UUID"),
        pytest.param(MIXED, Shown("GPU-1111"), (2,), id="a short one"),
        pytest.param(ALIKE, Shown("GPU-1111,GPU-8932a"), (1, 2), id="two"),
        pytest.param(ALIKE, Shown("GPU-1111,0"), (0, 2), id="one by each"),
        pytest.param(ALIKE, Shown("GPU-8932"), EVERY, id="too short: it is two devices'"),
        pytest.param(ALIKE, Shown("GPU-7"), EVERY, id="nobody's"),
        pytest.param([replace(ONE, uuid=None), TWO], Shown("GPU-8932f"), (0, 1), id="of one that doesn't say"),
        pytest.param(ALIKE, Shown("MIG-8932f937-d72c-4106-c12f-20bd9faed9f6"), EVERY, id="a part"),
        pytest.param(ALIKE, Shown("MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/2"), EVERY, id="as it was written"),
        pytest.param(ALIKE, Shown("first"), EVERY, id="a word"),
        pytest.param(ALIKE, Shown("1" * 5000), EVERY, id="no number that could be one"),
        pytest.param([], Shown("0"), (), id="no device"),
    ],
)
def test_visible(listed: list[Listed], shown: Shown, want: tuple[int, ...]) -> None:
    """None of those that are used is left out."""
    assert visible(listed, shown) == want
