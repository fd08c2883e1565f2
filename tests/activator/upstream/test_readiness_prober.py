"""Pods that the cluster doesn't call ready: asked over real HTTP, used once they answer, forgotten when they go."""

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


class Told:
    """What the activator would act on: replicas as they stand."""

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
        """A line of the feed."""
        self.act(self.proving.take(line))

    def act(self, line: Feed) -> None:
        """As the roster does."""
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
        """It is used."""
        async with asyncio.timeout(30):
            while name not in self.used:
                self.news.clear()
                await self.news.wait()


def row_of(pod: FakePod, *, unproven: bool = True, draining: bool = False, max_streams: int = 8) -> ReplicaRow:
    """As the control plane tells of it; in the activator's own terms."""
    row = replica_row("p", max_streams, draining=draining)
    return msgspec.structs.replace(row, address=pod.url, url=pod.url, unproven=unproven)


def heard(*rows: ReplicaRow, full: bool = False, removed: tuple[str, ...] = ()) -> Feed:
    return Feed(revision=1, full=full, replicas=rows, removed_replicas=removed)


@asynccontextmanager
async def placed(run: Path, *, listens: bool = True) -> AsyncIterator[tuple[Told, FakePod]]:
    """A pod that isn't ready; in the end nobody asks it any more, and it was asked rightly."""
    told, pod = Told(run), FakePod()
    try:
        if listens:
            await pod.start()
        yield told, pod
    finally:
        await told.proving.close()
        assert repr(told.proving).startswith("<ReadinessProber asking=0 ")
        told.directory.close()
        await pod.stop()
    assert pod.wrong == []


async def asked(pod: FakePod, more: int = 1) -> None:
    """So many probes more were answered."""
    wanted = len(pod.probes) + more
    async with asyncio.timeout(30):
        while len(pod.probes) < wanted:
            pod.probed.clear()
            await pod.probed.wait()


async def test_pod_is_used_after_its_first_valid_probe(tmp_path: Path) -> None:
    """Not before; then as a ready one, and asked no more. What the feed says of it meanwhile counts."""
    async with placed(tmp_path) as (told, pod):
        told.hear(heard(row_of(pod)))
        await asked(pod, 3)
        assert not told.used
        told.hear(heard(row_of(pod, max_streams=3)))
        pod.is_ready = True
        await told.until_used("p")
        assert told.used["p"] == row_of(pod, unproven=False, max_streams=3)
        assert pod.probes.count(200) == 1
        assert pod.probes[-1] == 200
        told.hear(heard(row_of(pod, max_streams=4)))
        assert told.used["p"] == row_of(pod, unproven=False, max_streams=4), "it was proven already"
        told.hear(heard(row_of(pod), full=True))
        assert told.used["p"].max_streams == 8
        assert repr(told.proving) == "<ReadinessProber asking=0 proven=1 used=1>"


async def test_refused_probe_is_repeated(tmp_path: Path) -> None:
    """A container that has not begun refuses connections: asked on, at the same place."""
    async with placed(tmp_path, listens=False) as (told, pod):
        told.hear(heard(row_of(pod)))
        await asyncio.sleep(0.05)
        pod.is_ready = True
        await pod.start()
        await told.until_used("p")


async def test_probe_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within its time, then it is asked anew."""
    monkeypatch.setattr(readiness_prober, "TIMEOUT_S", 0.05)

    async with placed(tmp_path) as (told, pod):
        pod.is_hung = True
        told.hear(heard(row_of(pod)))
        await asyncio.wait_for(pod.probed.wait(), 30)
        monkeypatch.setattr(readiness_prober, "TIMEOUT_S", 5.0)
        pod.is_hung, pod.is_ready = False, True
        await told.until_used("p")


@pytest.mark.parametrize("body", [b"", b"queued", b"activator", b"queue" * 10_000])
async def test_wrong_probe_response_is_not_ready(tmp_path: Path, body: bytes) -> None:
    """Whoever answers 200 to everything is no pod of ours that takes requests."""
    async with placed(tmp_path) as (told, pod):
        pod.is_ready, pod.body = True, body
        told.hear(heard(row_of(pod)))
        await asked(pod, 3)
        assert not told.used


@pytest.mark.parametrize(
    ("line", "is_used"),
    [
        pytest.param(lambda pod: heard(row_of(pod, unproven=False)), True, id="the cluster calls it ready"),
        pytest.param(lambda pod: heard(removed=("p",)), False, id="it was removed"),
        pytest.param(lambda pod: heard(full=True), False, id="a snapshot knows none"),
        pytest.param(lambda pod: heard(row_of(pod, draining=True)), False, id="it ends"),
    ],
)
async def test_probing_ends_when_the_feed_decides(
    tmp_path: Path, line: Callable[[FakePod], Feed], is_used: bool
) -> None:
    """With the feed's own word, whatever that is; what it is told last holds."""
    async with placed(tmp_path) as (told, pod):
        told.hear(heard(row_of(pod)))
        await asked(pod)
        told.hear(line(pod))
        assert ("p" in told.used) is is_used
        assert "asking=0" in repr(told.proving)
        pod.is_ready = True
        probes = len(pod.probes)
        await asyncio.sleep(0.1)
        assert len(pod.probes) <= probes + 1, "one may have been on its way"
        assert ("p" in told.used) is is_used


async def test_one_that_is_ready_no_more_is_proven_anew(tmp_path: Path) -> None:
    """The cluster called it ready, and takes that back: it is used again once it answers."""
    async with placed(tmp_path) as (told, pod):
        told.hear(heard(row_of(pod, unproven=False)))
        assert told.used
        assert not pod.probes, "whom the cluster calls ready is not asked"
        told.hear(heard(row_of(pod)))
        assert not told.used
        await asked(pod, 2)
        pod.is_ready = True
        await told.until_used("p")
        told.hear(heard(row_of(pod, draining=True)))
        assert told.used["p"].draining, "what it has it finishes"


async def test_changed_address_is_probed_again(tmp_path: Path) -> None:
    """What was proven was proven of the place."""
    async with placed(tmp_path) as (told, pod):
        other = FakePod()
        await other.start()
        pod.is_ready = True
        told.hear(heard(row_of(pod)))
        await told.until_used("p")
        told.hear(heard(row_of(other)))
        assert not told.used
        await asked(other, 2)
        other.is_ready = True
        await told.until_used("p")
        assert told.used["p"].address == other.url
        await other.stop()


async def test_a_line_without_pods_is_handed_on_as_it_is(tmp_path: Path) -> None:
    """No copy, no task."""
    async with placed(tmp_path) as (told, _):
        line = heard(replica_row("a"), replica_row("b"), full=True)
        assert told.proving.take(line) is line


async def test_one_that_can_t_be_reached_so_is_never_used(tmp_path: Path) -> None:
    """Where pods are not spoken to plainly, an http:// is not followed."""
    async with placed(tmp_path) as (told, pod):
        pod.is_ready = True
        strict = ReadinessProber(ConnectorFactory(told.directory), told.used.setdefault, MetricsPage("activator"))  # type: ignore[arg-type]
        strict.take(heard(row_of(pod)))
        await asyncio.sleep(0.05)
        assert not told.used
        assert not pod.probes
        assert "asking=0" in repr(strict)
        await strict.close()


async def test_an_answer_that_nobody_foresaw_ends_the_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked anew when the feed tells of it again, and used once it answers rightly."""
    send, raised = Client.send, list[int]()

    async def garbled(
        client: Client, method: str, target: str, body: bytes = b"", fields: Fields = ()
    ) -> UpstreamResponse:
        if not raised:
            raised.append(1)
            raise ValueError("no such answer")
        return await send(client, method, target, body, fields)

    monkeypatch.setattr(Client, "send", garbled)

    async with placed(tmp_path) as (told, pod):
        pod.is_ready = True
        told.hear(heard(row_of(pod)))
        async with asyncio.timeout(30):
            while "asking=0" not in repr(told.proving):
                await asyncio.sleep(0)
        assert not told.used
        told.hear(heard(row_of(pod)))
        await told.until_used("p")


@pytest.mark.parametrize(
    ("asked_s", "want_s"),
    [
        pytest.param(0.0, 0.025, id="at first"),
        pytest.param(1.0, 0.025, id="a short start"),
        pytest.param(2.0, 0.04, id="a fiftieth of a longer one"),
        pytest.param(30.0, 0.6, id="and of a long one"),
        pytest.param(3600.0, 1.0, id="once a second, however long"),
    ],
)
def test_probe_pause_grows_with_time(asked_s: float, want_s: float) -> None:
    """By how long it has been asked."""
    assert pause_s(asked_s) == pytest.approx(want_s)


@given(st.floats(0.0, 600.0))
def test_a_start_is_seen_to_be_over_soon(ready_s: float) -> None:
    """Whenever it is ready: within 25 ms or 2 % of the start, and of ten minutes' asking there are few."""
    at_s, asked = 0.0, 1
    while at_s < ready_s:
        at_s, asked = at_s + pause_s(at_s), asked + 1
    assert at_s - ready_s <= max(0.025, 0.02 * ready_s) + 1e-9
    assert asked <= 900
