"""ReadinessProber: pods that the cluster does not call ready are probed over real HTTP, used once they answer, and
dropped when they go.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.upstream import readiness_prober
from activator.upstream.http1_client import Client, Fields, UpstreamResponse
from activator.upstream.readiness_prober import ReadinessProber, pause_s
from kelvin.contracts.serving.control_messages import Feed, ReplicaRow
from kelvin.ipc.connector import ConnectorFactory
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.telemetry.policy.instruments import MetricsPage
from tests.activator.control import replica_row
from tests.activator.upstream.pod import FakePod


class ProberWorld:
    """A prober, and the replicas that the activator would use."""

    def __init__(self, run: Path) -> None:
        self.directory = SocketDirectory(run)
        self.page = MetricsPage("activator")
        self.used: dict[str, ReplicaRow] = {}
        self.news = asyncio.Event()
        self.proving = ReadinessProber(
            ConnectorFactory(self.directory, pods=True),
            lambda row: self.act(Feed(revision=0, replicas=(row,))),
            self.page,
        )

    def hear(self, line: Feed) -> None:
        """Handle a line of the feed."""
        self.act(self.proving.filter_feed(line))

    def act(self, line: Feed) -> None:
        """Apply a line as ReplicaTracker does."""
        if line.full:
            self.used.clear()
        for runtime_id in line.removed_replicas:
            self.used.pop(runtime_id, None)
        for row in line.replicas:
            assert not row.unproven
            self.used[row.runtime_id] = row
        self.news.set()
        self.proving.check_integrity()

    async def until_used(self, name: str) -> None:
        """Wait until the replica is used."""
        async with asyncio.timeout(30):
            while name not in self.used:
                self.news.clear()
                await self.news.wait()


def row_of(pod: FakePod, *, unproven: bool = True, draining: bool = False, max_streams: int = 8) -> ReplicaRow:
    """Return the pod's row as the activator gets it from the control plane."""
    row = replica_row("p", max_streams, draining=draining)
    return msgspec.structs.replace(row, address=pod.url, url=pod.url, unproven=unproven)


def feed_of(*rows: ReplicaRow, full: bool = False, removed: tuple[str, ...] = ()) -> Feed:
    return Feed(revision=1, full=full, replicas=rows, removed_replicas=removed)


@asynccontextmanager
async def placed(run: Path, *, listens: bool = True) -> AsyncIterator[tuple[ProberWorld, FakePod]]:
    """Start a prober and a pod that is not ready. At the end no probe runs, and every probe was valid."""
    prober_world, pod = ProberWorld(run), FakePod()
    try:
        if listens:
            await pod.start()
        yield prober_world, pod
    finally:
        await prober_world.proving.close()
        assert repr(prober_world.proving).startswith("<ReadinessProber asking=0 ")
        prober_world.directory.close()
        await pod.stop()
    assert pod.wrong == []


async def wait_for_probes(pod: FakePod, more: int = 1) -> None:
    """Wait until so many more probes were answered."""
    wanted = len(pod.probes) + more
    async with asyncio.timeout(30):
        while len(pod.probes) < wanted:
            pod.probed.clear()
            await pod.probed.wait()


async def test_pod_is_used_after_its_first_valid_probe(tmp_path: Path) -> None:
    """After the first success the pod is used and not probed again. Changes of its row in the feed apply meanwhile."""
    async with placed(tmp_path) as (prober_world, pod):
        prober_world.hear(feed_of(row_of(pod)))
        await wait_for_probes(pod, 3)
        assert not prober_world.used
        prober_world.hear(feed_of(row_of(pod, max_streams=3)))
        pod.is_ready = True
        await prober_world.until_used("p")
        assert prober_world.used["p"] == row_of(pod, unproven=False, max_streams=3)
        assert pod.probes.count(200) == 1
        assert pod.probes[-1] == 200
        prober_world.hear(feed_of(row_of(pod, max_streams=4)))
        assert prober_world.used["p"] == row_of(pod, unproven=False, max_streams=4), "it was probed already"
        prober_world.hear(feed_of(row_of(pod), full=True))
        assert prober_world.used["p"].max_streams == 8
        assert repr(prober_world.proving) == "<ReadinessProber asking=0 proven=1 used=1>"


async def test_refused_probe_is_repeated(tmp_path: Path) -> None:
    """A starting container refuses connections. The same address is probed again."""
    async with placed(tmp_path, listens=False) as (prober_world, pod):
        prober_world.hear(feed_of(row_of(pod)))
        await asyncio.sleep(0.05)
        pod.is_ready = True
        await pod.start()
        await prober_world.until_used("p")


async def test_probe_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the timeout it is probed again."""
    monkeypatch.setattr(readiness_prober, "TIMEOUT_S", 0.05)

    async with placed(tmp_path) as (prober_world, pod):
        pod.is_hung = True
        prober_world.hear(feed_of(row_of(pod)))
        await asyncio.wait_for(pod.probed.wait(), 30)
        monkeypatch.setattr(readiness_prober, "TIMEOUT_S", 5.0)
        pod.is_hung, pod.is_ready = False, True
        await prober_world.until_used("p")


@pytest.mark.parametrize("body", [b"", b"queued", b"activator", b"queue" * 10_000])
async def test_wrong_probe_response_is_not_ready(tmp_path: Path, body: bytes) -> None:
    """A server that answers 200 to everything is not a ready pod."""
    async with placed(tmp_path) as (prober_world, pod):
        pod.is_ready, pod.body = True, body
        prober_world.hear(feed_of(row_of(pod)))
        await wait_for_probes(pod, 3)
        assert not prober_world.used


@pytest.mark.parametrize(
    ("line", "is_used"),
    [
        pytest.param(lambda pod: feed_of(row_of(pod, unproven=False)), True, id="the cluster calls it ready"),
        pytest.param(lambda pod: feed_of(removed=("p",)), False, id="it was removed"),
        pytest.param(lambda pod: feed_of(full=True), False, id="a snapshot knows none"),
        pytest.param(lambda pod: feed_of(row_of(pod, draining=True)), False, id="it drains"),
    ],
)
async def test_probing_ends_when_the_feed_decides(
    tmp_path: Path, line: Callable[[FakePod], Feed], is_used: bool
) -> None:
    """The feed's own row decides, and the last row counts."""
    async with placed(tmp_path) as (prober_world, pod):
        prober_world.hear(feed_of(row_of(pod)))
        await wait_for_probes(pod)
        prober_world.hear(line(pod))
        assert ("p" in prober_world.used) is is_used
        assert "asking=0" in repr(prober_world.proving)
        pod.is_ready = True
        probes = len(pod.probes)
        await asyncio.sleep(0.1)
        assert len(pod.probes) <= probes + 1, "one probe may have been in flight"
        assert ("p" in prober_world.used) is is_used


async def test_pod_that_is_no_longer_ready_is_probed_again(tmp_path: Path) -> None:
    """The cluster called the pod ready and takes that back. It is used again after a successful probe."""
    async with placed(tmp_path) as (prober_world, pod):
        prober_world.hear(feed_of(row_of(pod, unproven=False)))
        assert prober_world.used
        assert not pod.probes, "a ready pod is not probed"
        prober_world.hear(feed_of(row_of(pod)))
        assert not prober_world.used
        await wait_for_probes(pod, 2)
        pod.is_ready = True
        await prober_world.until_used("p")
        prober_world.hear(feed_of(row_of(pod, draining=True)))
        assert prober_world.used["p"].draining, "its running requests are finished"


async def test_changed_address_is_probed_again(tmp_path: Path) -> None:
    """A successful probe counts for its address only."""
    async with placed(tmp_path) as (prober_world, pod):
        other = FakePod()
        await other.start()
        pod.is_ready = True
        prober_world.hear(feed_of(row_of(pod)))
        await prober_world.until_used("p")
        prober_world.hear(feed_of(row_of(other)))
        assert not prober_world.used
        await wait_for_probes(other, 2)
        other.is_ready = True
        await prober_world.until_used("p")
        assert prober_world.used["p"].address == other.url
        await other.stop()


async def test_line_without_pods_is_passed_on_unchanged(tmp_path: Path) -> None:
    """No copy is made and no task started."""
    async with placed(tmp_path) as (prober_world, _):
        line = feed_of(replica_row("a"), replica_row("b"), full=True)
        assert prober_world.proving.filter_feed(line) is line


async def test_plain_pod_is_not_used_where_not_allowed(tmp_path: Path) -> None:
    """An http:// URL is not used where plain pods are not allowed."""
    async with placed(tmp_path) as (prober_world, pod):
        pod.is_ready = True
        factory, use = ConnectorFactory(prober_world.directory), prober_world.used.setdefault
        strict = ReadinessProber(factory, use, MetricsPage("activator"))  # type: ignore[arg-type]
        strict.filter_feed(feed_of(row_of(pod)))
        await asyncio.sleep(0.05)
        assert not prober_world.used
        assert not pod.probes
        assert "asking=0" in repr(strict)
        await strict.close()


async def test_unexpected_error_ends_the_probing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pod is probed again when the feed names it again, and used once it answers correctly."""
    send, raised = Client.request, list[int]()

    async def garbled(
        client: Client, method: str, target: str, body: bytes = b"", fields: Fields = ()
    ) -> UpstreamResponse:
        if not raised:
            raised.append(1)
            raise ValueError("no such answer")
        return await send(client, method, target, body, fields)

    monkeypatch.setattr(Client, "request", garbled)

    async with placed(tmp_path) as (prober_world, pod):
        pod.is_ready = True
        prober_world.hear(feed_of(row_of(pod)))
        async with asyncio.timeout(30):
            while "asking=0" not in repr(prober_world.proving):
                await asyncio.sleep(0)
        assert not prober_world.used
        prober_world.hear(feed_of(row_of(pod)))
        await prober_world.until_used("p")


@pytest.mark.parametrize(
    ("probing_s", "want_s"),
    [
        pytest.param(0.0, 0.025, id="at first"),
        pytest.param(1.0, 0.025, id="a short start"),
        pytest.param(2.0, 0.04, id="a fiftieth of a longer one"),
        pytest.param(30.0, 0.6, id="a fiftieth of a long one"),
        pytest.param(3600.0, 1.0, id="at least once per second"),
    ],
)
def test_probe_pause_grows_with_time(probing_s: float, want_s: float) -> None:
    """The pause depends on the time since the first probe."""
    assert pause_s(probing_s) == pytest.approx(want_s)


@given(st.floats(0.0, 600.0))
def test_ready_pod_is_noticed_soon(ready_s: float) -> None:
    """A ready pod is noticed within 25 ms or 2 % of its start, with few probes over ten minutes."""
    at_s, wait_for_probes = 0.0, 1
    while at_s < ready_s:
        at_s, wait_for_probes = at_s + pause_s(at_s), wait_for_probes + 1
    assert at_s - ready_s <= max(0.025, 0.02 * ready_s) + 1e-9
    assert wait_for_probes <= 900
