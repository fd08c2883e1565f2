"""The progress display of a long command on a terminal."""

import io

from rich.console import Console
from rich.progress import Progress as RichProgress

from kelvin.cli.artifacts.progress import Bar
from kelvin.contracts.artifacts.push_api import CommitStep


def test_each_stage_shows_one_progress_bar() -> None:
    """Each stage replaces the progress bar of the previous one."""
    out = io.StringIO()
    with RichProgress(console=Console(file=out, force_terminal=True, width=80)) as bar:
        shown = Bar(bar)
        shown.advance(1)
        shown.begin("hashing", 100)
        shown.advance(40)
        assert [(task.description, task.completed) for task in bar.tasks] == [("hashing", 40)]
        shown.begin(CommitStep.SEALING, None)
        assert [task.description for task in bar.tasks] == ["sealing"]
