"""Programs beside us: floors and loaders that answer lines of JSON, and what ends by itself.

A line into a `Program` is one measurement, a line out what it took.
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
END_S: Final = 5.0  # between the end of its output and its own
FRESH_S: Final = 900.0
OUTPUT_S: Final = 3600.0  # for a program that ends by itself: the largest model takes minutes to make
_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
PROGRAMS: Final = Path(__file__).parents[1] / "programs"


class ProgramFailed(BenchFailed):
    """A program beside us ended or answered nothing; what it said is in the text."""


class Program:
    """`python -m coldstart_bench.programs.NAME`, from `__enter__`, which waits for its `ready`, to `__exit__`."""

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
            if (line := self._line(READY_S)) != b"ready":
                raise self._failed(f"said {line[:200]!r} instead of 'ready'")
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
        """Of the process, and of its group."""
        return self._process.pid

    def ask(self, **question: object) -> Any:
        """The answer. Raises as `exchange_line`, and ProgramFailed with the program's own words."""
        answer = self.exchange_line(question)
        if "error" in answer:
            raise ProgramFailed(f"{self._name}: {answer['error']}")
        return answer

    def exchange_line(self, words: object) -> Any:
        """A line of JSON in, the line that comes out. Raises ProgramFailed where the program ended, or was silent for
        too long: it is ended then.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(words).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:  # it ended, or was ended
            raise self._failed(self._end_of()) from error
        return json.loads(self._line(self.answer_s))

    def time_request(self, words: object) -> float:
        """Seconds from the line in to the line out. Raises as `exchange_line`."""
        began = time.perf_counter()
        self.exchange_line(words)
        return time.perf_counter() - began

    def _line(self, patience_s: float) -> bytes:
        assert self._process.stdout is not None
        limit = time.monotonic() + patience_s
        while b"\n" not in self._unread:
            waits = max(0.0, limit - time.monotonic())
            if not select.select([self._process.stdout], [], [], waits)[0]:
                silent = self._failed(f"did not answer within {patience_s:g} s")
                self._end()
                raise silent
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise self._failed(self._end_of())
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _end_of(self) -> str:
        try:
            return f"ended with {self._process.wait(timeout=END_S)}"
        except subprocess.TimeoutExpired:
            return "closed its output"

    def _failed(self, what: str) -> ProgramFailed:
        try:
            said = os.pread(self._errors.fileno(), 1 << 16, 0).decode(errors="replace").strip().splitlines()
        except (OSError, ValueError):
            said = []
        return ProgramFailed(f"{self._name} {what}" + (f": {said[-1]}" if said else ""))

    def _end(self) -> None:
        if self._errors.closed:  # it was ended before
            return
        with contextlib.suppress(ProcessLookupError):  # nobody of its group lives any more
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
    """`from_pretrained` in a new process: seconds from its start to its first token, and the token. Raises
    ProgramFailed where it ends before, or takes longer than `FRESH_S`.
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
            process.kill()  # only if the bench is ended here
            end.cancel()  # its thread would keep a bench that is ended here for as long
    if not answer:
        raise ProgramFailed(f"from_pretrained ended with {process.returncode}")
    return seconds, int(answer)


def make_model(directory: Path, size_bytes: int, seed: int, *, sharp: bool = False) -> None:
    """A random Llama of that size, or of twice that with the same texts in any batch; see programs/make_model.py.

    Raises ProgramFailed where it can't be made.
    """
    words = ["sharp"] if sharp else []
    command = [sys.executable, str(PROGRAMS / "make_model.py"), str(directory), str(size_bytes), str(seed), *words]
    _output(command, "make_model", {**os.environ, **_ENVIRONMENT})


def program_output(module: str, *arguments: str | Path) -> str:
    """Its output. Raises ProgramFailed with the last of its words."""
    return _output(python_command(module, *map(str, arguments)), module)


def _output(command: Sequence[str], name: str, environment: Mapping[str, str] | None = None) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=OUTPUT_S, env=environment)
    except subprocess.TimeoutExpired as error:
        raise ProgramFailed(f"{name} did not end within {error.timeout:g} s") from error
    if done.returncode != 0:
        raise ProgramFailed(f"{name} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout
