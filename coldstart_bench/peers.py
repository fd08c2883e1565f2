"""What is beside us and ends by itself: a new process of the library's, and the maker of models."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from coldstart_bench.report import BenchFailed

FRESH_S: Final = 900.0
LOADERS: Final = Path(__file__).parent / "loaders"
_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class PeerFailed(BenchFailed):
    """A program beside us ended or answered nothing; what it said is in the text."""


def start_fresh(directory: Path, ids: Sequence[int]) -> tuple[float, int]:
    """`from_pretrained` in a new process: seconds from its start to its first token, and the token. Raises PeerFailed
    where it ends before, or takes longer than `FRESH_S`.
    """
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, str(LOADERS / "fresh.py"), str(directory), json.dumps(list(ids))],
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
        finally:
            end.cancel()  # its thread would keep a bench that is ended here for as long
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
