"""Programs beside us, each a process of its own: a line in is a start, a line out is its first token."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Final

LOADERS: Final = Path(__file__).parent / "loaders"
_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class PeerFailed(Exception):
    """A peer ended or answered nothing; its standard error is in the text."""


class Peer:
    """A loader that stays: it says `ready`, then answers each line of token ids with the first token."""

    def __init__(self, script: str, *arguments: str) -> None:
        self._name = script
        self._process = subprocess.Popen(
            [sys.executable, str(LOADERS / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **_ENVIRONMENT},
        )

    def __enter__(self) -> "Peer":
        self._expect("ready")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stdin, stdout = self._pipes()
        stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        stdout.close()

    def start(self, ids: Sequence[int]) -> tuple[float, int]:
        """Seconds from the line in to the line out, and the token."""
        stdin, stdout = self._pipes()
        began = time.perf_counter()
        stdin.write(json.dumps(list(ids)) + "\n")
        stdin.flush()
        answer = stdout.readline()
        seconds = time.perf_counter() - began
        if not answer:
            raise PeerFailed(f"{self._name} ended with {self._process.wait()}")
        return seconds, int(answer)

    def _expect(self, word: str) -> None:
        _, stdout = self._pipes()
        if (line := stdout.readline().strip()) != word:
            raise PeerFailed(f"{self._name} said {line!r} instead of {word!r} (exit {self._process.wait()})")

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout


def start_fresh(directory: Path, ids: Sequence[int]) -> tuple[float, int]:
    """`from_pretrained` in a new process: seconds from its start to its first token, and the token."""
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, str(LOADERS / "fresh.py"), str(directory), json.dumps(list(ids))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **_ENVIRONMENT},
    ) as process:
        assert process.stdout is not None
        answer = process.stdout.readline()
        seconds = time.perf_counter() - began
    if not answer:
        raise PeerFailed(f"from_pretrained ended with {process.returncode}")
    return seconds, int(answer)


def make_model(directory: Path, size_bytes: int, seed: int, *, sharp: bool = False) -> None:
    """A random Llama of that size, or of twice that with the same texts in any batch; see loaders/make_model.py."""
    words = ["sharp"] if sharp else []
    subprocess.run(
        [sys.executable, str(LOADERS / "make_model.py"), str(directory), str(size_bytes), str(seed), *words],
        check=True,
        env={**os.environ, **_ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
