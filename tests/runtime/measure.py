"""`python -m tests.runtime.measure [--large]`: how long a standby takes to be borne, and a version to be bound.

Real processes, medians of seven, one after another. Not a test: a machine's load is in it. `--large` binds half a
gigabyte of bfloat16 weights, which stay in the cache's memory, instead of a megabyte.
"""

import argparse
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.runtime.processes import Born, Installation, installation
from tests.runtime.versions import make_llama

ROUNDS = 7
LARGE: dict[str, Any] = {
    "dtype": "bfloat16",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}


def _fork(house: Installation) -> tuple[Born, float]:
    began = time.perf_counter()
    born = house.fork()
    return born, (time.perf_counter() - began) * 1e3


def _say(name: str, values: Sequence[float]) -> None:
    print(f"{name:<28} {statistics.median(values):7.1f} ms   ({min(values):.1f} to {max(values):.1f})")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true")
    large = parser.parse_args().large
    host_bytes = (1 << 30) if large else (16 << 20)
    with (
        tempfile.TemporaryDirectory() as directory,
        installation(Path(directory) / "data", host_bytes=host_bytes) as house,
    ):
        version = house.publish(make_llama(**(LARGE if large else {})))
        standby, _ = _fork(house)
        standby.seal(version)
        standby.reap()
        print(f"{version.manifest.total_bytes / 1e6:.0f} MB; load {os.getloadavg()[0]:.1f}")
        for wait_s, name in ((0.0, "just borne"), (1.5, "warmed up")):
            times: dict[str, list[float]] = {}
            for _ in range(ROUNDS):
                born, parked_ms = _fork(house)
                times.setdefault("fork to parked", []).append(parked_ms)
                time.sleep(wait_s)
                began = time.perf_counter()
                bound = born.bind(version)
                times.setdefault("bind, as the caller sees it", []).append((time.perf_counter() - began) * 1e3)
                for span in bound.spans:
                    times.setdefault(f"bind to {span.stage.value}", []).append(span.after_us / 1e3)
                born.kill(signal.SIGKILL)
                born.reap()
            print(name)
            for what, values in times.items():
                _say(f"  {what}", values)


if __name__ == "__main__":
    main()
