"""Play histories on the command line: `python -m tests.simulation --help`."""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from tests.simulation.core.history import History
from tests.simulation.core.history_player import Outcome, draw_for, play, search_seeds, shrink_history
from tests.simulation.worlds import WORLDS


def main() -> int:
    """Play one seed, a file, or many seeds. Exit with 1 if an invariant breaks."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=main.__doc__)
    parser.add_argument("world", choices=sorted(WORLDS))
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--histories", type=int, default=1, help="how many seeds from there on (default: 1)")
    parser.add_argument("--file", type=Path, help="a history in a file, as a failure prints it, in the place of a seed")
    parser.add_argument("--all", action="store_true", help="go on after a failure, and count them by what broke")
    parser.add_argument("--trace", action="store_true", help="print what happened also where all holds")
    parser.add_argument("--no-shrink", action="store_true", help="print a failure as it was drawn")
    options = parser.parse_args()
    world_type = WORLDS[options.world]
    if options.file is not None:
        return _tell(play(world_type, History.parse(options.file.read_text())), options)
    if options.histories == 1:
        return _tell(play(world_type, draw_for(world_type, options.seed)), options)
    kinds: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], int] = {}

    def seen(outcome: Outcome) -> bool:
        assert outcome.broken is not None
        kind = outcome.broken.invariant, outcome.broken.text[:120]
        kinds[kind] += 1
        first.setdefault(kind, outcome.history.seed)
        return bool(options.all)

    begun_s = time.perf_counter()
    found = search_seeds(world_type, range(options.seed, options.seed + options.histories), seen)
    print(f"{options.histories} histories, {time.perf_counter() - begun_s:.1f} s")
    for kind, count in kinds.most_common():
        print(f"{count} times, first with seed {first[kind]}: {': '.join(kind)}")
    return 0 if found is None else _tell(found, options)


def _tell(outcome: Outcome, options: argparse.Namespace) -> int:
    if outcome.broken is not None and not options.no_shrink:
        outcome = shrink_history(WORLDS[outcome.history.world], outcome)
    if outcome.broken is not None or options.trace:
        print(outcome)
    return int(outcome.broken is not None)


if __name__ == "__main__":
    sys.exit(main())
