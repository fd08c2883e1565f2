"""Run the bench's programs: those that answer lines of JSON, and those that end by themselves.

A line of JSON sent to a `Program` is one measurement; the line that it answers has the result.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

from coldstart_bench.report.bench_report import BenchFailed
from kelvin.process.python_command import python_command

READY_S: Final = 180.0  # a cold disk and an import of torch
ANSWER_S: Final = 900.0
END_S: Final = 5.0  # from the end of a program's output to its exit
FRESH_S: Final = 900.0
OUTPUT_S: Final = 3600.0  # time limit of a program that ends by itself: making the largest model takes minutes
_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
PROGRAMS: Final = Path(__file__).parents[1] / "programs"


class ProgramFailed(BenchFailed):
    """A program ended or did not answer. The text has its output."""


class Program:
    """`python -m coldstart_bench.programs.NAME`. Entering the block waits for its `ready`; leaving it ends it."""

    def __init__(self, name: str, *arguments: str, answer_s: float = ANSWER_S) -> None:
        self._name = name
        self.answer_s = answer_s
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `_end`
        self._unread = b""
        self._process = subprocess.Popen(
            python_command(f"coldstart_bench.programs.{name}", *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,  # `_end` ends its children, too
        )

    def __repr__(self) -> str:
        return f"<Program {self._name} pid={self._process.pid}>"

    def __enter__(self) -> "Program":
        try:
            if (line := self._read_line(READY_S)) != b"ready":
                raise self._failure(f"said {line[:200]!r} instead of 'ready'")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def pid(self) -> int:
        """Pid of the process and of its process group."""
        return self._process.pid

    def call(self, **arguments: object) -> Any:
        """Return the answer. Raises as `exchange_line` does, and ProgramFailed with the answer's error."""
        answer = self.exchange_line(arguments)
        if "error" in answer:
            raise ProgramFailed(f"{self._name}: {answer['error']}")
        return answer

    def exchange_line(self, words: object) -> Any:
        """Send a line of JSON and return the answer. Raises ProgramFailed if the program ended or stays silent."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(words).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:  # the program ended, or `_end` closed its pipes
            raise self._failure(self._describe_end()) from error
        return json.loads(self._read_line(self.answer_s))

    def time_request(self, words: object) -> float:
        """Return the seconds from the line to the answer. Raises as `exchange_line` does."""
        began = time.perf_counter()
        self.exchange_line(words)
        return time.perf_counter() - began

    def _read_line(self, patience_s: float) -> bytes:
        assert self._process.stdout is not None
        limit = time.monotonic() + patience_s
        while b"\n" not in self._unread:
            waits = max(0.0, limit - time.monotonic())
            if not select.select([self._process.stdout], [], [], waits)[0]:
                silent = self._failure(f"did not answer within {patience_s:g} s")
                self._end()
                raise silent
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise self._failure(self._describe_end())
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _describe_end(self) -> str:
        try:
            return f"ended with {self._process.wait(timeout=END_S)}"
        except subprocess.TimeoutExpired:
            return "closed its output"

    def _failure(self, message: str) -> ProgramFailed:
        try:
            errors = os.pread(self._errors.fileno(), 1 << 16, 0).decode(errors="replace").strip().splitlines()
        except (OSError, ValueError):
            errors = []
        return ProgramFailed(f"{self._name} {message}" + (f": {errors[-1]}" if errors else ""))

    def _end(self) -> None:
        if self._errors.closed:  # it was ended before
            return
        with contextlib.suppress(ProcessLookupError):  # its group has no process any more
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        self._errors.close()


def run_from_pretrained(directory: Path, ids: Sequence[int]) -> tuple[float, int]:
    """Run `from_pretrained` in a new process. Return (seconds from its start to its first token, token). Raises
    ProgramFailed if it ends before or takes longer than `FRESH_S`.
    """
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, str(PROGRAMS / "fresh_transformers.py"), str(directory), json.dumps(list(ids))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **_ENVIRONMENT},
    ) as process:
        assert process.stdout is not None
        end = threading.Timer(FRESH_S, process.kill)
        end.start()
        try:
            answer = process.stdout.readline()
            seconds = time.perf_counter() - began
            process.wait()
        finally:
            process.kill()  # still alive only if the bench is interrupted here
            end.cancel()  # the timer's thread would keep an interrupted bench alive
    if not answer:
        raise ProgramFailed(f"from_pretrained ended with {process.returncode}")
    return seconds, int(answer)


def make_model(directory: Path, size_bytes: int, seed: int, *, sharp: bool = False) -> None:
    """Make a random Llama of this size. If `sharp`, it is twice as large, and batching does not change its texts. See
    programs/make_model.py. Raises ProgramFailed.
    """
    words = ["sharp"] if sharp else []
    command = [sys.executable, str(PROGRAMS / "make_model.py"), str(directory), str(size_bytes), str(seed), *words]
    _output(command, "make_model", {**os.environ, **_ENVIRONMENT})


def program_output(module: str, *arguments: str | Path) -> str:
    """Run a module and return its output. Raises ProgramFailed with the end of its standard error."""
    return _output(python_command(module, *map(str, arguments)), module)


def _output(command: Sequence[str], name: str, environment: Mapping[str, str] | None = None) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=OUTPUT_S, env=environment)
    except subprocess.TimeoutExpired as error:
        raise ProgramFailed(f"{name} did not end within {error.timeout:g} s") from error
    if done.returncode != 0:
        raise ProgramFailed(f"{name} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout
