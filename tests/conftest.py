"""What holds for every test, which files are read and in which order, and the S3 server that some share."""

import gc
import signal
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.consistency.capabilities import TABLE, capabilities, not_shown
from tests.faults.s3_buckets import Buckets, serving
from tests.shared_fixtures import SHARED_FIXTURES, FixtureGroupScheduling, is_deep, shared_fixture_of
from tests.virtual_loop import VirtualLoop

# How long an example takes says more about the machine's neighbours than about the example.
settings.register_profile("kelvin", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kelvin")

# Under `nohup` the processes that tests start would ignore it, too, and those that it should end would live on.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of which nothing would run is not even imported: that takes seconds, in each worker."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if config.option.markexpr != "not deep" or not is_test or not is_deep(collection_path):
        return None
    named = {Path(argument.partition("::")[0]).resolve() for argument in config.args}
    return None if collection_path in named else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """All that is imported and collected is there to the end: no collection of garbage looks through it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FixtureGroupScheduling:
    """Files that share an installation are one worker's; a file that asks for two goes with the first of them."""
    return FixtureGroupScheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that may take long come first: begun last, all workers but one would wait for them at the end."""
    limits: defaultdict[Path, float] = defaultdict(float)
    for item in items:
        limit = item.get_closest_marker("timeout")
        limits[item.path] = max(limits[item.path], 0.0 if limit is None else limit.args[0])
    items.sort(key=lambda item: (-limits[item.path], "e2e" not in item.path.parts))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """A worker that goes on to other files keeps nothing of those before, which no worker is given again."""
    yield
    is_last = nextitem is None or shared_fixture_of(nextitem.path) != shared_fixture_of(item.path)
    if is_last and hasattr(item.config, "workerinput"):
        SHARED_FIXTURES.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the capabilities whose tests are red."""
    stats = terminalreporter.stats
    red = [report.nodeid for kind in ("failed", "error") for report in stats.get(kind, ()) if hasattr(report, "nodeid")]
    for row in not_shown(capabilities(TABLE.read_text()), red) if red else ():
        terminalreporter.write_line(f"not shown: {row}")


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, object]]:
    """The event loop of an async test: asyncio's own, or the one that its marker names."""
    if request.node.get_closest_marker("virtual_time") is not None:
        return "asyncio", {"loop_factory": VirtualLoop}
    return "asyncio", {"use_uvloop": request.node.get_closest_marker("uvloop") is not None}


@pytest.fixture(scope="session")
def buckets() -> Iterator[Buckets]:
    """An S3 server of this session's own."""
    with serving() as buckets:
        yield buckets
