"""Tiny runs of the activator's load benchmarks. Correctness is asserted, times are not."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e import bench_command

pytestmark = [pytest.mark.deep, pytest.mark.timeout(300)]

RIGHT = ("requests that were not answered right", "answers without a usage record")


def bench(tmp_path: Path, *words: str) -> Any:
    """Return the report of a run with correct answers. Timing claims may fail on a busy machine."""
    found, done = bench_command.run_measured(tmp_path, *words)
    red = [verdict["claim"] for verdict in found["verdicts"] if verdict["passed"] is False]
    assert not [claim for claim in red if claim in RIGHT], done.stdout
    return found


def test_a_small_flood(tmp_path: Path) -> None:
    """Both tenants' requests are answered and recorded, and no slot is used twice at once."""
    found = bench(tmp_path, "flood", "--requests", "50", "--slots", "4", "--slot-ms", "50")
    assert (found["loud"]["asked"], found["loud"]["right"]) == (50, 50)
    assert found["quiet"]["asked"] == found["quiet"]["right"] > 3
    assert (found["unrecorded"], found["most_inside"]) == (0, 4)
    assert found["loud"]["queued_p95_s"] > 0
    assert found["memory"]["peak_pss"] >= found["memory"]["before_pss"] > 0


def test_a_small_overload(tmp_path: Path) -> None:
    """At four times the capacity, each request is answered, late, or refused with a hint, and memory is measured."""
    words = ["--slots", "4", "--slot-ms", "50", "--times", "1,4", "--seconds", "2", "--deadline-ms", "400"]
    found = bench(tmp_path, "overload", *words)
    least, most = found["steps"]
    assert (least["times"], most["times"]) == (1, 4)
    assert (least["sent"], most["sent"]) == (160, 640)
    assert (least["wrong"], most["wrong"]) == (0, 0)
    assert least["good"] > 0
    assert sum(most["refused"].values()) > 0
    assert most["good"] + most["late"] + sum(most["refused"].values()) == 640
    assert found["unrecorded"] == 0
    assert most["memory_last"] > 0


def test_a_small_fleet(tmp_path: Path) -> None:
    """Each size has all its figures."""
    found = bench(tmp_path, "fleet", "--sizes", "50,120", "--active", "60", "--ticks", "3")
    assert [size["models"] for size in found["sizes"]] == [50, 120]
    few = {"controlplane_bytes"}  # with so few models it may be below the memory that was free before
    assert all(figure > 0 for size in found["sizes"] for name, figure in size.items() if name not in few)
    assert len(found["verdicts"]) == 5
    assert all(verdict["passed"] is not None for verdict in found["verdicts"])


@pytest.mark.long
def test_a_small_burst(tmp_path: Path) -> None:
    """All requests of both tenants get their text after one start, which reads each chunk once."""
    found = bench(tmp_path, "burst", "--requests", "30")
    assert [(one["tenant"], one["right"], one["wrong"]) for one in found["served"]] == [
        ("default", 15, 0),
        ("guest", 15, 0),
    ]
    assert found["starts"] == 1
    assert found["chunk_reads"] == found["chunks"] > 1
    assert found["memory"]["peak_pss"] > 0
    assert found["fairness"] is not None


def test_invalid_times_are_refused(tmp_path: Path) -> None:
    """An invalid list of times is refused before anything starts."""
    done = bench_command.run("overload", "--times", "1,many", TMPDIR=str(tmp_path))
    assert done.returncode == 2
    assert "1,many: must be numbers above 0" in done.stderr


def test_a_small_trace(tmp_path: Path) -> None:
    """A replayed trace keeps the recorded prompt and answer lengths."""
    trace, calm, bursty = tmp_path / "trace.csv", tmp_path / "calm.csv", tmp_path / "bursty.csv"
    rows = [f"2026-11-16 18:17:{number % 60:02}.{number}00,{5 + number},{1 + number % 9}" for number in range(100)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    calm.write_text("0,3,1.0,Gamma,1,1\n")
    bursty.write_text("0,1,2.0,Weibull,1,1\n")
    clients = ["--clients", str(calm), "--clients", str(bursty), "--shared-prefix", "0.5"]
    found = bench(tmp_path, "trace", str(trace), *clients, "--requests", "120", "--seconds", "2")
    fit, came = found["fit"], found["came"]
    assert (came["right"], came["unrecorded"]) == (fit["requests"], 0)
    assert fit["tenants"] == 2
    assert fit["prompt"]["distance"] < 0.3
    assert fit["joint"]["sent"] is not None
    assert fit["largest"]["asked"] == 0.75
    assert 0.3 < fit["prefix"]["sent"] < 0.6


def test_a_file_that_is_no_trace(tmp_path: Path) -> None:
    """A file that is not a trace is refused with line and rule."""
    (tmp_path / "x.csv").write_text("a,b\n")
    done = bench_command.run("trace", str(tmp_path / "x.csv"))
    assert done.returncode == 1
    assert "x.csv: line 1: must be TIMESTAMP,ContextTokens,GeneratedTokens" in done.stderr


@pytest.mark.long
def test_a_short_soak(tmp_path: Path) -> None:
    """While processes are killed under load, all requests end correctly and the bill agrees."""
    found = bench(tmp_path, "soak", "--seconds", "14", "--every", "3", "--rate", "4")
    wanted = ["SIGKILL activator", "SIGKILL runtime", "SIGKILL Redis", "SIGKILL control plane"]
    done = [event["what"] for event in found["events"]][: len(wanted)]
    assert done == wanted[: len(done)]  # a busy machine has no time for all of them
    assert done
    assert found["notes"] == []
    assert found["wrong"] == found["bill"] == found["left"] == []
    assert all(event["whole_after_s"] is not None for event in found["events"])
    assert found["answered"] > 0
