"""Read a source's directory without owning it: nothing is acknowledged, moved or removed.

Used for copies. A writer may append and a shipper may remove segments meanwhile. A read sees all records that were
durable when it began and are not shipped yet.
"""

import logging
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path

from kelvin.spool.frame import MAX_SEQUENCE, Frame, find_frame
from kelvin.spool.segment_disk import segment_name, segments
from kelvin.spool.segment_reader import read_position
from kelvin.spool.source_directory import readable_sources

log = logging.getLogger(__name__)


def frames_after(directory: Path, after: int) -> Iterator[Frame]:
    """Yield the whole frames with a sequence above `after`, ascending. A gap in the sequences is damage or a shipped
    segment. A directory or segment that disappears meanwhile was shipped. Raises OSError if the disk fails.
    """
    try:
        firsts = segments(directory)
    except FileNotFoundError:
        return
    for first, following in zip_longest(firsts, firsts[1:]):
        if following is not None and following <= after + 1:
            continue
        try:
            content = (directory / segment_name(first)).read_bytes()
        except FileNotFoundError:
            continue
        offset, next_sequence = 0, first
        # Records from the next segment's first sequence on were never acknowledged to their writer.
        last = MAX_SEQUENCE if following is None else following - 1
        while next_sequence <= last and (frame := find_frame(content, offset, next_sequence, last)) is not None:
            if frame.sequence > after:
                yield frame
            offset, next_sequence = frame.end, frame.sequence + 1


def unshipped(root: Path) -> Iterator[tuple[str, Frame]]:
    """Yield source and frame of every unacknowledged record below `root`. See `frames_below`."""
    return frames_below(root, read_position, lambda _: True)


def frames_below(
    root: Path, after: Callable[[Path], int], is_wanted: Callable[[str], bool]
) -> Iterator[tuple[str, Frame]]:
    """Yield source and frame of the records of wanted sources whose sequence is above `after(directory)`. A source that
    can't be read to its end is logged, and the others are still read.
    """
    for source in readable_sources(root):
        if not is_wanted(source):
            continue
        try:
            for frame in frames_after(root / source, after(root / source)):
                yield source, frame
        except OSError as error:
            log.error("a spool can't be read to its end", extra={"source": source, "error": repr(error)})
