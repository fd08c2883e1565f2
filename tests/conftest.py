"""Settings of every test run, the order of files, and the shared S3 server."""

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

# The time of an example depends on other load on the machine, so it is not checked.
settings.register_profile("kelvin", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kelvin")

# `nohup` makes child processes ignore SIGHUP, and then tests that send it would leave them running.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of a file whose tests are all deselected: an import takes seconds in each worker."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if config.option.markexpr != "not deep" or not is_test or not is_deep(collection_path):
        return None
    named = {Path(argument.partition("::")[0]).resolve() for argument in config.args}
    return None if collection_path in named else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Turn garbage collection off during collection, then freeze the objects: they live until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FixtureGroupScheduling:
    """Send files that share an installation to one worker. A file that uses two goes with the first of them."""
    return FixtureGroupScheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with long timeouts first: started last, they would keep one worker busy while the others are idle."""
    limits: defaultdict[Path, float] = defaultdict(float)
    for item in items:
        limit = item.get_closest_marker("timeout")
        limits[item.path] = max(limits[item.path], 0.0 if limit is None else limit.args[0])
    items.sort(key=lambda item: (-limits[item.path], "e2e" not in item.path.parts))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Close shared fixtures when a worker goes on to a file of another group: no later file gets them."""
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
    """The event loop of an async test: asyncio, or the one that its marker names."""
    if request.node.get_closest_marker("virtual_time") is not None:
        return "asyncio", {"loop_factory": VirtualLoop}
    return "asyncio", {"use_uvloop": request.node.get_closest_marker("uvloop") is not None}


@pytest.fixture(scope="session")
def buckets() -> Iterator[Buckets]:
    """An S3 server for this session."""
    with serving() as buckets:
        yield buckets
