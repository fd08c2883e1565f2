"""Claims about parked pods can fail, and pods leave no files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coldstart_bench.report.cold_report import cold_rows
from coldstart_bench.suites import pool_bench
from coldstart_bench.suites.pool_bench import OWN, WAITING, PoolFigures, judge

SIZE = 100_000_000


@pytest.mark.parametrize(
    ("seconds", "want"),
    [
        pytest.param({OWN: [5.0], WAITING: [1.0]}, (5.0, True), id="five times sooner is enough"),
        pytest.param({OWN: [4.9], WAITING: [1.0]}, (4.9, False), id="less is not"),
        pytest.param({OWN: [4.9]}, (None, None), id="what was not measured does not pass"),
        pytest.param({OWN: [9.0, 5.0, 1.0], WAITING: [2.0, 1.0, 1.0]}, (5.0, True), id="by medians"),
    ],
)
def test_pool_claims_compare_bind_with_pod_start(
    seconds: dict[str, list[float]], want: tuple[float | None, bool | None]
) -> None:
    rows = cold_rows({(SIZE, "store", system): each for system, each in seconds.items()})
    (verdict,) = judge(PoolFigures(SIZE, rows))
    assert (verdict.value, verdict.passed) == want


def test_pod_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's directory, with its cache of the model, is removed after each round."""

    @contextmanager
    def service(command: list[str], environment: object, log: Path, is_ready: object, what: str) -> Iterator[int]:
        (log.parent / "data").mkdir()
        (log.parent / "data" / "chunk").touch()
        yield 1

    monkeypatch.setattr(pool_bench, "running_service", service)
    ground = pool_bench.PodConfig(tmp_path, "file:///store", {}, tmp_path)
    with pool_bench.running_pod(ground, "be" * 32, "own-0"):
        assert list(tmp_path.iterdir()) != []
    assert list(tmp_path.iterdir()) == []
