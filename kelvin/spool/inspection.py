"""Look at what lies in a source's directory without owning it: nothing is acknowledged, moved or removed.

For copies: a writer may append and a shipper remove segments meanwhile. Whatever was durable when the look began, and
not yet shipped, is seen.
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
    """Whole frames with a sequence above `after`, ascending. A jump in the sequences is a hole: see whose it is.

    Raises OSError where the disk fails; a directory or segment that is gone meanwhile was shipped.
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
        offset, wanted = 0, first
        # What a segment holds from the next one's name on was never acknowledged to its writer.
        last = MAX_SEQUENCE if following is None else following - 1
        while wanted <= last and (frame := find_frame(content, offset, wanted, last)) is not None:
            if frame.sequence > after:
                yield frame
            offset, wanted = frame.end, frame.sequence + 1


def unshipped(root: Path) -> Iterator[tuple[str, Frame]]:
    """Yield source and frame of every record below `root` not acknowledged yet. See `frames_below`."""
    return frames_below(root, read_position, lambda _: True)


def frames_below(
    root: Path, after: Callable[[Path], int], wanted: Callable[[str], bool]
) -> Iterator[tuple[str, Frame]]:
    """Yield source and frame of the records of wanted sources whose sequence is above `after(directory)`.

    If a source can't be read to its end, that is logged, and the others are read.
    """
    for source in readable_sources(root):
        if not wanted(source):
            continue
        try:
            for frame in frames_after(root / source, after(root / source)):
                yield source, frame
        except OSError as error:
            log.error("a spool can't be read to its end", extra={"source": source, "error": repr(error)})
