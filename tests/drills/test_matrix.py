"""The matrix states something in each cell, and the page says the same."""

import re
from pathlib import Path

import pytest

from coldstart_bench.endings import ANSWERED, GONE, refused
from tests.drills.__main__ import chosen
from tests.drills.matrix import (
    FAULTS,
    FIRST,
    KILLS,
    NONE,
    Damage,
    Fault,
    FirstStage,
    Operation,
    Process,
    Stage,
    fault_dings,
    fault_expected,
    gaps,
    kill_dings,
    kill_expected,
    markdown,
)

PAGE = Path(__file__).parents[2] / "docs" / "drills.md"


def test_no_cell_is_empty() -> None:
    """Each process at each stage, the first ones too, and each fault at each operation."""
    assert gaps(KILLS, FIRST, FAULTS) == []


def test_an_empty_cell_is_found() -> None:
    """The control: a row that is cut, and one that is missing."""
    assert gaps({**KILLS, Process.ZYGOTE: KILLS[Process.ZYGOTE][:-1]}, FIRST, FAULTS) == ["zygote/report"]
    assert gaps(KILLS, {**FIRST, Process.CACHE: FIRST[Process.CACHE][:-1]}, FAULTS) == ["cache/first-closing"]
    faults = dict(FAULTS)
    del faults[Fault.LOCKED]
    assert gaps(KILLS, FIRST, faults) == ["sqlite-locked/warm", "sqlite-locked/cold", "sqlite-locked/push"]


def test_the_page_has_the_matrix() -> None:
    """`python -m tests.drills --table` prints what `docs/drills.md` holds."""
    for table in markdown().strip().split("\n\n"):
        assert table in PAGE.read_text()


def test_the_page_explains_every_indicator() -> None:
    """Whatever a cell dings has a row."""
    named = {kill_dings(process, stage) for process in Process for stage in Stage}
    named |= {fault_dings(fault, operation) for fault in Fault for operation in Operation}
    assert set(re.findall(r"^\| ([a-z ,]+) \| ", PAGE.read_text(), re.MULTILINE)) >= named - {NONE}


@pytest.mark.parametrize(
    ("process", "stage", "outcome", "dings"),
    [
        pytest.param(Process.RUNTIME, Stage.DECODE, refused("replica_lost"), "stream completion", id="told in time"),
        pytest.param(Process.RUNTIME, Stage.PREFILL, ANSWERED, "first token", id="another replica"),
        pytest.param(Process.ZYGOTE, Stage.DECODE, ANSWERED, NONE, id="no part in it"),
        pytest.param(Process.CLIENT, Stage.UPLOAD, GONE, NONE, id="its own doing"),
        pytest.param(Process.SNAPSHOTTER, Stage.UPLOAD, ANSWERED, "push time", id="it takes longer"),
    ],
)
def test_a_death_dings(process: Process, stage: Stage, outcome: object, dings: str) -> None:
    """Time where the operation is answered all the same, its failure otherwise."""
    assert (kill_expected(process, stage), kill_dings(process, stage)) == (outcome, dings)


def test_a_fault_dings() -> None:
    """Not where the client harms itself."""
    assert fault_expected(Fault.DISK_FULL, Operation.PUSH) == refused("capacity_exceeded")
    assert fault_dings(Fault.DISK_FULL, Operation.PUSH) == "push success"
    assert fault_expected(Fault.STORE_AWAY, Operation.WARM) == ANSWERED
    assert fault_dings(Fault.STORE_AWAY, Operation.WARM) == NONE
    assert fault_dings(Fault.LOCKED, Operation.PUSH) == "push time"
    assert fault_dings(Fault.HALF_OPEN, Operation.WARM) == NONE


def test_cells_are_chosen_by_name() -> None:
    """By stage and fault, in the order in which they were named."""
    cells = chosen(["zygote/seal", "disk-full/push", "client/seal", "cache/first-push", "tls/ca.key/torn"])
    assert cells.kills == {Stage.SEAL: [Process.ZYGOTE, Process.CLIENT]}
    assert cells.firsts == {Process.CACHE: [FirstStage.PUSH]}
    assert cells.damages == [("tls/ca.key", Damage.TORN)]
    assert cells.troubles == {Fault.DISK_FULL: [Operation.PUSH]}
    assert all(len(row) == 11 for row in chosen([]).kills.values())


@pytest.mark.parametrize("cell", ["zygote", "zygote/never", "nobody/seal", "disk-full/seal"])
def test_what_is_no_cell_is_refused(cell: str) -> None:
    """By its name."""
    with pytest.raises(ValueError, match="is not a valid"):
        chosen([cell])
