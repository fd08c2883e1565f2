"""Show the progress of a long command: nothing, or a bar on a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress


class Progress:
    """Progress reports that show nothing. Thread-safe."""

    def begin(self, stage: str, total_bytes: int | None) -> None:
        """Begin a stage. `total_bytes` is None if the length is unknown."""

    def advance(self, nbytes: int) -> None:
        """Report that `nbytes` more of the stage are done."""


class Bar(Progress):
    """A progress bar on standard error. Each stage replaces the previous one."""

    def __init__(self, bar: RichProgress) -> None:
        self._bar = bar
        self._task: TaskID | None = None

    def begin(self, stage: str, total_bytes: int | None) -> None:
        """Replace the bar by one for the new stage."""
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(stage, total=total_bytes)

    def advance(self, nbytes: int) -> None:
        """Advance the bar of the current stage."""
        if self._task is not None:
            self._bar.advance(self._task, nbytes)


@contextmanager
def open_progress(is_shown: bool) -> Iterator[Progress]:
    """Yield a bar if `is_shown` and standard error is a terminal, else a progress that shows nothing."""
    console = Console(stderr=True)
    if not (is_shown and console.is_terminal):
        yield Progress()
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with RichProgress(*columns, console=console, transient=True) as bar:
        yield Bar(bar)
