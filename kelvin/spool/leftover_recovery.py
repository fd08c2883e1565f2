"""Ship records of dead processes. A process is alive if it holds the lock on its source's directory."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kelvin.contracts.errors import Refused
from kelvin.process.loops import record_error
from kelvin.process.thread_calls import run_uncancellable
from kelvin.spool.inspection import frames_below
from kelvin.spool.segment_reader import SegmentReader, last_sequence, read_position
from kelvin.spool.shipper import MAX_BYTES, MAX_RECORDS, Post
from kelvin.spool.source_directory import SourceDirectory, is_shipped, readable_sources

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecoveredSource:
    """The result for one leftover source."""

    source: str
    shipped: int
    lost: int  # unreadable records: the receiver never gets their sequences
    remaining: int  # not accepted by the receiver now; call again


def leftover_records(directory: Path, is_wanted: Callable[[str], bool]) -> Iterator[bytes]:
    """Yield all records in the spools of wanted sources, acknowledged or not. See `inspection.frames_below`."""
    return (frame.payload for _, frame in frames_below(directory, lambda _: 0, is_wanted))


def list_spools(directory: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield each source with its last acknowledged sequence and its last sequence. A live source changes meanwhile. A
    source that the disk can't read is logged, and reported as fully acknowledged.
    """
    for source in readable_sources(directory):
        acknowledged = 0
        try:
            acknowledged = read_position(directory / source)
            last = last_sequence(directory / source)
        except FileNotFoundError:  # everything was shipped meanwhile
            continue
        except OSError as error:
            log.error("a spool can't be read", extra={"source": source, "error": repr(error)})
            last = acknowledged
        yield source, (acknowledged, last)


async def recover(directory: Path, post_for: Callable[[str], Post | None]) -> list[RecoveredSource]:
    """Ship every leftover source once. Remove its directory once all records are acknowledged.

    `post_for(source)` returns the function that takes the records of that source, or None to leave them. A post that
    raises ends that source for this call: nothing is lost, and `remaining` counts the rest. A source that can't be read
    is logged, and the others are shipped. Calls may be repeated and may overlap.
    """
    report = []
    for source in readable_sources(directory):
        post = post_for(source)
        if post is None:
            continue
        try:
            source_directory = None if is_shipped(directory / source) else SourceDirectory.try_lock(directory, source)
            if source_directory is None:
                continue
            try:
                report.append(await _ship(source_directory, post))
            finally:
                source_directory.close()
        except OSError as error:
            log.warning("a leftover spool can't be read; it is kept", extra={"source": source, "error": repr(error)})
    return report


async def _ship(source_directory: SourceDirectory, post: Post) -> RecoveredSource:
    tail = SegmentReader(source_directory.path)
    shipped = lost = 0
    last = await run_uncancellable(None, last_sequence, source_directory.path)
    try:
        while (batch := await run_uncancellable(None, tail.read, last, MAX_RECORDS, MAX_BYTES)) is not None:
            await post(batch.payloads)
            await run_uncancellable(None, tail.acknowledge, batch.last)
            shipped += len(batch.payloads)
            lost += batch.skipped
        # Damaged records after the last readable one can't be counted. `remove_if_shipped` keeps and logs them.
        lost += last - tail.acknowledged
        await run_uncancellable(None, tail.acknowledge, last)
    except (Refused, OSError) as error:
        log.warning(
            "a leftover spool could not be shipped; it is kept",
            extra={"source": source_directory.source, "error": repr(error)},
        )
    except Exception as error:
        record_error(error, source_directory.source)
    finally:
        tail.close()
    remaining = last - tail.acknowledged
    if remaining == 0:
        await run_uncancellable(None, source_directory.remove_if_shipped)
    return RecoveredSource(source_directory.source, shipped, lost, remaining)
