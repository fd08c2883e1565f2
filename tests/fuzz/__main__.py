"""`python -m tests.fuzz [TARGET …] --seconds 60`: look for longer than a test may. A finding is kept as a file."""

import argparse
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Final

from tests.fuzz.oracle import FuzzFinding, FuzzTarget, find
from tests.fuzz.targets import TARGETS, corpus_of

INPUTS: Final = 1000  # of one seed


def search(target: FuzzTarget, seed: int, seconds: float) -> tuple[int, FuzzFinding | None]:
    """Look with one seed after the other until something is found or the time is over. Return the last seed, too."""
    corpus, until = list(corpus_of(target).values()), time.monotonic() + seconds
    while True:
        finding = find(target, corpus, seed=seed, inputs=INPUTS)
        if finding is not None or time.monotonic() >= until:
            return seed, finding
        seed += 1


def main() -> int:
    """1 where something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all unless told")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="the first one; others follow")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="where inputs are kept")
    asked = parser.parse_args()
    if unknown := set(asked.targets) - TARGETS.keys():
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    found = 0
    for name in asked.targets or TARGETS:
        seed, finding = search(TARGETS[name], asked.seed, asked.seconds)
        print(f"{name}: seeds {asked.seed} to {seed}, {INPUTS} inputs of each", flush=True)
        if finding is not None:
            found += 1
            asked.findings.mkdir(parents=True, exist_ok=True)
            kept = asked.findings / f"{name}-{sha256(finding.data).hexdigest()[:12]}"
            kept.write_bytes(finding.data)
            print(f"  {finding.fault}\n  {kept}: {finding.data[:200]!r}", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
