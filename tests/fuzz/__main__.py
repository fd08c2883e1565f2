"""`python -m tests.fuzz [TARGET …] --seconds 60`: fuzz for longer than a test may take. A finding is kept as a file."""

import argparse
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Final

from tests.fuzz.oracle import FuzzFinding, FuzzTarget, find
from tests.fuzz.targets import TARGETS, corpus_of

INPUTS: Final = 1000  # per seed


def search(target: FuzzTarget, seed: int, seconds: float) -> tuple[int, FuzzFinding | None]:
    """Fuzz with one seed after the other until a finding or the end of the time. Return the last seed and the
    finding.
    """
    corpus, until = list(corpus_of(target).values()), time.monotonic() + seconds
    while True:
        finding = find(target, corpus, seed=seed, inputs=INPUTS)
        if finding is not None or time.monotonic() >= until:
            return seed, finding
        seed += 1


def main() -> int:
    """Return 1 if there was a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="the first of the seeds")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="where findings are kept")
    arguments = parser.parse_args()
    if unknown := set(arguments.targets) - TARGETS.keys():
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    found = 0
    for name in arguments.targets or TARGETS:
        seed, finding = search(TARGETS[name], arguments.seed, arguments.seconds)
        print(f"{name}: seeds {arguments.seed} to {seed}, {INPUTS} inputs of each", flush=True)
        if finding is not None:
            found += 1
            arguments.findings.mkdir(parents=True, exist_ok=True)
            kept = arguments.findings / f"{name}-{sha256(finding.data).hexdigest()[:12]}"
            kept.write_bytes(finding.data)
            print(f"  {finding.fault}\n  {kept}: {finding.data[:200]!r}", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
