"""A process is killed before its first record: its source has no segment, and reading what was left raises. A
supervisor that starts after that never starts.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from spool.disk import segment_name, segments
from spool.frame import decode_frame
from spool.home import readable_sources
from spool.recovery import left_records
from tests.simulation.undone import Undoing

WORLD = "ledger"
SIGN = r"^start_again: raised: ValueError"


def _payloads(directory: Path) -> Iterator[bytes]:
    firsts = segments(directory)
    for first, following in zip(firsts, [*firsts[1:], None], strict=True):
        content = (directory / segment_name(first)).read_bytes()
        offset, sequence = 0, first
        while sequence != following and (frame := decode_frame(content, offset)) is not None:
            if frame.sequence != sequence:
                break
            yield frame.payload
            offset, sequence = frame.end, sequence + 1


def _left_records(directory: Path, wanted: Callable[[str], bool]) -> Iterator[bytes]:
    for source in readable_sources(directory):
        if wanted(source):
            yield from _payloads(directory / source)


def undo(undoing: Undoing) -> None:
    undoing.function(left_records, _left_records)
