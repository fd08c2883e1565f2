"""Each cell of the matrix has an outcome, and the docs page has the same matrix."""

import re
from pathlib import Path

import pytest

from coldstart_bench.harness.request_outcome import ANSWERED, GONE, refused_with
from tests.drills.__main__ import chosen
from tests.drills.matrix import (
    FAULTS,
    FIRST,
    KILLS,
    NONE,
    DamageKind,
    FaultKind,
    FirstStage,
    Operation,
    Stage,
    VictimProcess,
    fault_expected,
    fault_indicator,
    find_empty_cells,
    kill_expected,
    kill_indicator,
    markdown,
)

PAGE = Path(__file__).parents[2] / "docs" / "drills.md"


def test_no_cell_is_empty() -> None:
    """This covers each process at each stage and first stage, and each fault at each operation."""
    assert find_empty_cells(KILLS, FIRST, FAULTS) == []


def test_empty_cells_are_found() -> None:
    """Negative control: a short row and a missing row."""
    assert find_empty_cells({**KILLS, VictimProcess.ZYGOTE: KILLS[VictimProcess.ZYGOTE][:-1]}, FIRST, FAULTS) == [
        "zygote/report"
    ]
    assert find_empty_cells(KILLS, {**FIRST, VictimProcess.CACHE: FIRST[VictimProcess.CACHE][:-1]}, FAULTS) == [
        "cache/first-closing"
    ]
    faults = dict(FAULTS)
    del faults[FaultKind.LOCKED]
    assert find_empty_cells(KILLS, FIRST, faults) == ["sqlite-locked/warm", "sqlite-locked/cold", "sqlite-locked/push"]


def test_the_page_has_the_matrix() -> None:
    """`docs/drills.md` contains the output of `python -m tests.drills --table`."""
    for table in markdown().strip().split("\n\n"):
        assert table in PAGE.read_text()


def test_the_page_explains_every_indicator() -> None:
    """Each indicator of a cell has a row in the page."""
    named = {kill_indicator(process, stage) for process in VictimProcess for stage in Stage}
    named |= {fault_indicator(fault, operation) for fault in FaultKind for operation in Operation}
    assert set(re.findall(r"^\| ([a-z ,]+) \| ", PAGE.read_text(), re.MULTILINE)) >= named - {NONE}


@pytest.mark.parametrize(
    ("process", "stage", "outcome", "dings"),
    [
        pytest.param(
            VictimProcess.RUNTIME,
            Stage.DECODE,
            refused_with("replica_lost"),
            "stream completion",
            id="reported in time",
        ),
        pytest.param(VictimProcess.RUNTIME, Stage.PREFILL, ANSWERED, "first token", id="another replica"),
        pytest.param(VictimProcess.ZYGOTE, Stage.DECODE, ANSWERED, NONE, id="not involved"),
        pytest.param(VictimProcess.CLIENT, Stage.UPLOAD, GONE, NONE, id="the client itself"),
        pytest.param(VictimProcess.SNAPSHOTTER, Stage.UPLOAD, ANSWERED, "push time", id="it takes longer"),
    ],
)
def test_kill_indicator_follows_the_outcome(process: VictimProcess, stage: Stage, outcome: object, dings: str) -> None:
    """The indicator is a time if the operation is answered, and otherwise its failure."""
    assert (kill_expected(process, stage), kill_indicator(process, stage)) == (outcome, dings)


def test_fault_indicator_spares_client_faults() -> None:
    """A fault that a client causes itself affects no indicator."""
    assert fault_expected(FaultKind.DISK_FULL, Operation.PUSH) == refused_with("capacity_exceeded")
    assert fault_indicator(FaultKind.DISK_FULL, Operation.PUSH) == "push success"
    assert fault_expected(FaultKind.STORE_AWAY, Operation.WARM) == ANSWERED
    assert fault_indicator(FaultKind.STORE_AWAY, Operation.WARM) == NONE
    assert fault_indicator(FaultKind.LOCKED, Operation.PUSH) == "push time"
    assert fault_indicator(FaultKind.HALF_OPEN, Operation.WARM) == NONE


def test_cells_are_chosen_by_name() -> None:
    """Cells are chosen by stage and fault, in the given order."""
    cells = chosen(["zygote/seal", "disk-full/push", "client/seal", "cache/first-push", "tls/ca.key/torn"])
    assert cells.kills == {Stage.SEAL: [VictimProcess.ZYGOTE, VictimProcess.CLIENT]}
    assert cells.firsts == {VictimProcess.CACHE: [FirstStage.PUSH]}
    assert cells.damages == [("tls/ca.key", DamageKind.TORN)]
    assert cells.troubles == {FaultKind.DISK_FULL: [Operation.PUSH]}
    assert all(len(row) == 11 for row in chosen([]).kills.values())


@pytest.mark.parametrize("cell", ["zygote", "zygote/never", "nobody/seal", "disk-full/seal"])
def test_unknown_cell_is_refused_by_name(cell: str) -> None:
    with pytest.raises(ValueError, match="is not a valid"):
        chosen([cell])
