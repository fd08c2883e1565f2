"""The storage quota: each distinct chunk counts once, promises count, and idle pushes make room."""

import pytest

from kelvin.contracts.artifact_errors import StorageQuotaExceeded
from kelvin.contracts.errors import Refused
from snapshotter.intake.policy.quota import ENTRY_BYTES, PromisedBytes, choose_dropped_pushes

E = ENTRY_BYTES
PAGE = 4096
ONE = PAGE + E  # what a chunk of one page counts


def promise(plan_id: str, *digests: str, free: bool = False) -> PromisedBytes:
    return PromisedBytes(plan_id, dict.fromkeys(digests, PAGE), free)


@pytest.mark.parametrize(
    ("stored_bytes", "stored", "wanted", "open_promises", "limit", "dropped"),
    [
        pytest.param(0, "", "a", [], ONE, (), id="the first chunk, to the last byte"),
        pytest.param(ONE, "a", "ab", [], 2 * ONE, (), id="a stored chunk adds nothing"),
        pytest.param(9 * ONE, "a", "a", [], ONE, (), id="a push that adds nothing fits a limit that was lowered"),
        pytest.param(0, "", "a", [promise("p", "b")], 2 * ONE, (), id="beside a promise"),
        pytest.param(0, "", "ab", [promise("p", "a", "b")], 2 * ONE, (), id="a shared chunk counts once"),
        pytest.param(ONE, "a", "b", [promise("p", "a")], 2 * ONE, (), id="a promise of a stored chunk does not count"),
        pytest.param(0, "", "a", [promise("p", "b", free=True)], ONE, ("p",), id="an idle push makes room"),
        pytest.param(
            0, "", "a", [promise("p", "b"), promise("q", "c", free=True), promise("r", "d", free=True)], 3 * ONE,
            ("q",), id="as few as needed, in their order, and none in use",
        ),
        pytest.param(0, "", "a", [promise("p", "b", free=True)], 2 * ONE, (), id="no push is dropped if there is room"),
    ],
)  # fmt: skip
def test_push_within_quota_is_accepted(
    stored_bytes: int,
    stored: str,
    wanted: str,
    open_promises: list[PromisedBytes],
    limit: int,
    dropped: tuple[str, ...],
) -> None:
    found = choose_dropped_pushes(stored_bytes, set(stored), dict.fromkeys(wanted, PAGE), open_promises, limit)
    assert found == dropped


@pytest.mark.parametrize(
    ("stored_bytes", "stored", "wanted", "open_promises", "limit", "failure"),
    [
        pytest.param(0, "", "a", [], ONE - 1, StorageQuotaExceeded(0, ONE, ONE - 1), id="a byte too much"),
        pytest.param(700, "b", "ab", [], ONE, StorageQuotaExceeded(700, ONE, ONE), id="beside what is stored"),
        pytest.param(
            0, "", "a", [promise("p", "b")], 2 * ONE - 1, StorageQuotaExceeded(ONE, ONE, 2 * ONE - 1),
            id="beside a promise in use",
        ),
        pytest.param(
            0, "", "ab", [promise("p", "b", "c")], 2 * ONE, StorageQuotaExceeded(ONE, 2 * ONE, 2 * ONE),
            id="a promise that shares a chunk",
        ),
        pytest.param(
            0, "", "ab", [promise("p", "c", free=True)], ONE, StorageQuotaExceeded(0, 2 * ONE, ONE),
            id="even if all idle pushes were dropped",
        ),
        pytest.param(0, "", "a", [], 0, StorageQuotaExceeded(0, ONE, 0), id="a tenant that may store nothing"),
    ],
)  # fmt: skip
def test_push_beyond_the_quota_is_refused(
    stored_bytes: int,
    stored: str,
    wanted: str,
    open_promises: list[PromisedBytes],
    limit: int,
    failure: StorageQuotaExceeded,
) -> None:
    """The failure names used bytes, requested bytes and the limit."""
    with pytest.raises(Refused) as caught:
        choose_dropped_pushes(stored_bytes, set(stored), dict.fromkeys(wanted, PAGE), open_promises, limit)
    assert caught.value.failure == failure
    for number in (failure.used, failure.asked, failure.limit):
        assert f"{number} " in f"{failure.message} "
