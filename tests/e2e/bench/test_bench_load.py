"""`kelvin bench load`: all loaders read the same bytes, and a loader that reads others is detected."""

import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from coldstart_bench.harness.program_runner import Program, ProgramFailed, program_output
from coldstart_bench.report.load_report import ALL, PEERS
from tests.e2e import bench_command

pytestmark = pytest.mark.deep


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_small_run(tmp_path: Path) -> None:
    """One round of one size: every installed loader from a cold and a hot disk, and Kelvin also from memory."""
    found, _ = bench_command.run_passing(tmp_path, "load", "--sizes", "0.05", "--repeats", "1")
    installed = {contender.name for contender in ALL if contender.installed}
    loads = {(row["state"], row["system"]) for row in found["rows"] if not row["system"].startswith("floor")}
    assert loads == {(state, name) for state in ("cold", "hot") for name in installed} | {("host", "kelvin")}
    assert {failed["system"] for failed in found["failures"]} == {each.name for each in ALL} - installed
    assert all(failed["reason"] == "not installed" for failed in found["failures"])
    assert {row["verifies"] for row in found["rows"] if row["system"] in ("kelvin", "tensorizer-verify")} == {True}
    for row in found["rows"]:
        assert row["n"] == 1
        assert row["size_bytes"] == pytest.approx(55.3e6, rel=0.01), "the smallest model that is made"
        assert row["total_s"] == pytest.approx(row["load_s"] + row["consume_s"])
    assert len(found["verdicts"]) == 9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.timeout(300)
def test_a_small_run_to_a_device(tmp_path: Path) -> None:
    found, _ = bench_command.run_passing(tmp_path, "load", "--sizes", "0.05", "--repeats", "1", "--device", "cuda:0")
    assert found["device"] == "cuda:0"


def test_flipped_byte_changes_the_checksum_or_is_refused(tmp_path: Path) -> None:
    """Negative control: a flipped byte changes the checksum. tensorizer notices it only if asked to verify."""
    weights, other = tmp_path / "model.safetensors", tmp_path / "model.tensors"
    save_file({"a": torch.arange(50_000.0), "b": torch.ones(7, dtype=torch.bfloat16)}, weights)
    right = int(program_output("coldstart_bench.programs.reference_checksum", weights))
    program_output("snapshotter.intake.tensorizer_writer", weights, other)
    for path in (weights, other):
        content = bytearray(path.read_bytes())
        content[content.index(struct.pack("<2f", 30_000.0, 30_001.0))] ^= 1
        path.write_bytes(content)
    by_name = {contender.name: contender for contender in PEERS}
    for name, path in (("mmap", weights), ("tensorizer", other)):
        with Program(by_name[name].program, *by_name[name].arguments) as program:
            assert program.call(path=str(path), device="cpu")["checksum"] != right
    verifying = by_name["tensorizer-verify"]
    with Program(verifying.program, *verifying.arguments) as program, pytest.raises(ProgramFailed, match="Hash"):
        program.call(path=str(other), device="cpu")
