"""`python -m tests.fuzz [TARGET …] --seconds 60`: look for longer than a test may. A finding is kept as a file."""

import argparse
import sys
import time
from hashlib import sha256
from pathlib import Path

from tests.fuzz.fuzzer import fuzz
from tests.fuzz.targets import TARGETS, corpus_of


def main() -> int:
    """1 where something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all unless told")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="where inputs are kept")
    asked = parser.parse_args()
    if unknown := set(asked.targets) - TARGETS.keys():
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    found = 0
    for name in asked.targets or TARGETS:
        target = TARGETS[name]
        report = fuzz(target, list(corpus_of(target).values()), seed=asked.seed, seconds=asked.seconds)
        print(f"{name}: {report.executions} inputs, {report.steps} steps, seed {asked.seed}", flush=True)
        if report.finding is not None:
            found += 1
            asked.findings.mkdir(parents=True, exist_ok=True)
            kept = asked.findings / f"{name}-{sha256(report.finding.data).hexdigest()[:12]}"
            kept.write_bytes(report.finding.data)
            print(f"  {report.finding.fault}\n  {kept}: {report.finding.data[:200]!r}", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
