"""A helper program that fails or hangs is reported with its last output, within a limit."""

import time
from pathlib import Path

import pytest

from coldstart_bench.harness import program_runner
from coldstart_bench.harness.program_runner import ProgramFailed, make_model, program_output, run_from_pretrained

FAILS = "import sys; sys.exit('no memory is left')"
HANGS = "import time; print(5, flush=True); time.sleep(600)"


def test_a_model_that_can_t_be_made_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_runner, "PROGRAMS", tmp_path)
    (tmp_path / "make_model.py").write_text(FAILS)
    with pytest.raises(ProgramFailed, match="make_model ended with 1: no memory is left"):
        make_model(tmp_path / "model", 1, 1)


def test_a_program_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that makes a model, or prints a result, is given up after its limit."""
    monkeypatch.setattr(program_runner, "PROGRAMS", tmp_path)
    monkeypatch.setattr(program_runner, "OUTPUT_S", 1.0)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in ("make_model", "kelvin_hangs"):
        (tmp_path / f"{name}.py").write_text(HANGS)
    with pytest.raises(ProgramFailed, match="make_model did not end within 1 s"):
        make_model(tmp_path / "model", 1, 1)
    with pytest.raises(ProgramFailed, match="kelvin_hangs did not end within 1 s"):
        program_output("kelvin_hangs")


def test_a_start_that_hangs_after_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that hangs after its first token keeps its result, and its process is killed."""
    monkeypatch.setattr(program_runner, "PROGRAMS", tmp_path)
    monkeypatch.setattr(program_runner, "FRESH_S", 2.0)
    (tmp_path / "fresh_transformers.py").write_text(HANGS)
    began = time.monotonic()
    assert run_from_pretrained(tmp_path, [1])[1] == 5
    assert time.monotonic() - began < 60
