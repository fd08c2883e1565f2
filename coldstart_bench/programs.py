"""Floors and loaders as processes of their own: a line of JSON in is one measurement, a line out what it took."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import IO, Any, Final

from coldstart_bench.peers import PeerFailed

READY_S: Final = 180.0  # a cold disk and an import of torch
ANSWER_S: Final = 900.0
END_S: Final = 5.0  # between the end of its output and its own
_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class Program:
    """`python -m coldstart_bench.loaders.NAME`, from `__enter__`, which waits for its `ready`, to `__exit__`."""

    def __init__(self, name: str, *arguments: str, answer_s: float = ANSWER_S) -> None:
        self._name = name
        self.answer_s = answer_s
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `_end`
        self._unread = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"coldstart_bench.loaders.{name}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,  # its children end with it
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
        """The answer. Raises as `say`, and PeerFailed with the program's own words."""
        answer = self.say(question)
        if "error" in answer:
            raise PeerFailed(f"{self._name}: {answer['error']}")
        return answer

    def say(self, words: object) -> Any:
        """A line of JSON in, the line that comes out. Raises PeerFailed where the program ended, or was silent for too
        long: it is ended then.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(words).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:  # it ended, or was ended
            raise self._failed(self._end_of()) from error
        return json.loads(self._line(self.answer_s))

    def timed(self, words: object) -> float:
        """Seconds from the line in to the line out. Raises as `say`."""
        began = time.perf_counter()
        self.say(words)
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

    def _failed(self, what: str) -> PeerFailed:
        try:
            said = os.pread(self._errors.fileno(), 1 << 16, 0).decode(errors="replace").strip().splitlines()
        except (OSError, ValueError):
            said = []
        return PeerFailed(f"{self._name} {what}" + (f": {said[-1]}" if said else ""))

    def _end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        self._errors.close()
