"""What a long command tells while it runs: nothing, or a bar on a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress


class Progress:
    """Told what happens, and shows nothing of it. Called from several threads."""

    def begin(self, stage: str, total_bytes: int | None) -> None:
        """A stage begins; None where its length is unknown."""

    def advance(self, nbytes: int) -> None:
        """So much more of it is done."""


class Bar(Progress):
    """A bar on a terminal's standard error; each stage replaces the one before it."""

    def __init__(self, bar: RichProgress) -> None:
        self._bar = bar
        self._task: TaskID | None = None

    def begin(self, stage: str, total_bytes: int | None) -> None:
        """See `Progress`."""
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(stage, total=total_bytes)

    def advance(self, nbytes: int) -> None:
        """See `Progress`."""
        if self._task is not None:
            self._bar.advance(self._task, nbytes)


@contextmanager
def shown_progress(wanted: bool) -> Iterator[Progress]:
    """A bar where it is wanted and standard error is a terminal."""
    console = Console(stderr=True)
    if not (wanted and console.is_terminal):
        yield Progress()
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with RichProgress(*columns, console=console, transient=True) as bar:
        yield Bar(bar)
