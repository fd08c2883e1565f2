"""A push to a real snapshotter: what is sent and reported, and what happens if files or the server change meanwhile."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from msgspec import structs

from kelvin.cli.artifacts.progress import Progress
from kelvin.cli.artifacts.push import DEFAULT_SENDERS, TransferOptions, push_directory
from kelvin.cli.artifacts.push_client import RetryPolicy
from kelvin.cli.artifacts.push_source import PushSource
from kelvin.contracts.errors import Refused, Unavailable
from tests.kelvin.cli_targets import push
from tests.snapshotter.house import TENANT, House
from tests.snapshotter.models import Model, default_weights, resharded, weight
from tests.snapshotter.reader import assert_whole, read_version, versions_of

FAST = TransferOptions(retry_policy=RetryPolicy(give_up_s=30, first_s=30, base_s=0.001, cap_s=0.01))


@dataclass
class Told(Progress):
    """A `Progress` that records its calls and may run a callback at the start of a stage."""

    at: dict[str, Callable[[], object]] = field(default_factory=dict)
    stages: list[tuple[str, int | None]] = field(default_factory=list)
    done: int = 0

    def begin(self, stage: str, total_bytes: int | None) -> None:
        self.stages.append((stage, total_bytes))
        self.done = 0
        self.at.pop(stage, lambda: None)()

    def advance(self, nbytes: int) -> None:
        self.done += nbytes


def test_pushed_version_is_stored_byte_for_byte(house: House, tmp_path: Path) -> None:
    """The store has the pushed bytes, and the version is registered."""
    model = Model()
    directory = model.write(tmp_path / "model")
    progress = Told()
    with house.client() as client:
        committed = push(directory, "toy", client, progress)
    files, tensors = read_version(house.store, TENANT, committed.version)
    assert tensors == {name: each.data for name, each in model.shards["model.safetensors"].items()}
    assert files == {path: raw for path, raw in model.files().items() if path.endswith(".json")}
    assert [(each.version, each.pushed_by) for each in house.control.registrations] == [(committed.version, "k1")]
    assert progress.stages[:2] == [("looking", None), ("hashing", committed.total_bytes)]


def test_second_push_sends_nothing(house: House, tmp_path: Path) -> None:
    """A second push sends and seals nothing, and reports the same version."""
    directory = Model().write(tmp_path / "model")
    with house.client() as client:
        first = push_directory(directory, "toy", client, Progress())
        second = push_directory(directory, "toy", client, Progress())
    assert first.committed.created
    assert first.sent_bytes > 0
    assert second.committed == structs.replace(first.committed, created=False, new_chunks=0)
    assert second.sent_bytes == 0
    assert len(house.control.seals) == 1


def test_sends_only_what_changed(house: House, tmp_path: Path) -> None:
    """One changed tensor sends one chunk. Other shards of the same tensors send nothing and give the same version."""
    weights = default_weights() | {"model.big.weight": weight((10_000,), 7)}
    with house.client() as client:
        first = push(Model(shards={"model.safetensors": weights}).write(tmp_path / "a"), "toy", client, Progress())
        changed = weights | {"model.norm.weight": weight((8,), 4242)}
        pushed = push_directory(
            Model(shards={"model.safetensors": changed}).write(tmp_path / "b"), "toy", client, Progress()
        )
        assert pushed.sent_bytes == 4096
        assert pushed.committed.new_chunks == 1
        sharded = Model(shards=resharded(weights, 3, seed=9)).write(tmp_path / "c")
        again = push_directory(sharded, "toy", client, Progress())
    assert again.committed.version == first.version
    assert again.sent_bytes == 0
    assert_whole(house.store, TENANT)


def rewrite(path: Path) -> None:
    """Change a byte and keep size and time."""
    before = path.stat()
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


@pytest.mark.parametrize(
    ("stage", "name", "change"),
    [
        pytest.param("hashing", "model.safetensors", append, id="weights that grow before they are hashed"),
        pytest.param("sending", "model.safetensors", append, id="weights that grow before they are sent"),
        pytest.param("sending", "model.safetensors", rewrite, id="weights that are rewritten with size and time kept"),
        pytest.param("sending", "config.json", append, id="a config that grows after it was checked"),
        pytest.param("sending", "config.json", rewrite, id="a config that is rewritten with size and time kept"),
        pytest.param("sending", "model.safetensors", Path.unlink, id="weights that are deleted"),
    ],
)
def test_file_changed_during_a_push_is_refused(
    house: House, tmp_path: Path, stage: str, name: str, change: Callable[[Path], None]
) -> None:
    """The refusal names the file and nothing is published. A later push of the unchanged directory succeeds."""
    directory = Model().write(tmp_path / "model")
    progress = Told(at={stage: lambda: change(directory / name)})
    with house.client() as client:
        with pytest.raises(Refused) as caught:
            push(directory, "toy", client, progress)
        assert caught.value.failure.code == "artifact_rejected"
        assert caught.value.failure.param == name
        assert versions_of(house.store, TENANT) == []
        Model().write(directory)
        assert push(directory, "toy", client, Progress()).created


def test_rejected_artifact_is_not_sent(tmp_path: Path) -> None:
    """A pickle is refused before the first request."""

    def never(request: httpx.Request) -> httpx.Response:
        raise AssertionError(f"{request.method} {request.url}")

    directory = Model(more={"pytorch_model.bin": b""}).write(tmp_path / "model")
    with (
        httpx.Client(transport=httpx.MockTransport(never), base_url="http://x") as client,
        pytest.raises(Refused, match="pickles"),
    ):
        push(directory, "toy", client, Progress())


def test_dropped_push_begins_again(house: House, tmp_path: Path) -> None:
    """A push whose staged data was removed starts again by itself and succeeds."""
    directory = Model().write(tmp_path / "model")

    def forget() -> None:
        for plan in (house.data / "staging" / TENANT).iterdir():
            plan.rename(tmp_path / plan.name)

    with house.client() as client:
        committed = push_directory(directory, "toy", client, Told(at={"sending": forget}), FAST).committed
    assert committed.created
    assert_whole(house.store, TENANT)


def test_lost_staged_chunk_is_sent_again(house: House, tmp_path: Path) -> None:
    """Staged chunks that are lost before the commit are sent again."""
    directory = Model().write(tmp_path / "model")
    lost: list[Path] = []

    class Losing(PushSource):
        def check_unchanged(self) -> None:
            if not lost:
                lost.extend((house.data / "staging" / TENANT).glob("*/chunks/*"))
                for path in lost:
                    path.unlink()
            super().check_unchanged()

    with house.client() as client, pytest.MonkeyPatch.context() as patch:
        patch.setattr("kelvin.cli.artifacts.push_source.PushSource", Losing)
        assert push_directory(directory, "toy", client, Progress(), FAST).committed.created
    assert lost
    assert_whole(house.store, TENANT)


def test_push_waits_for_an_unavailable_control_plane(house: House, tmp_path: Path) -> None:
    """Temporary failures of gate, seal and registration are retried."""
    directory = Model().write(tmp_path / "model")
    away = Unavailable("the control plane", 0.001)
    house.control.failures = {"gate": [away] * 2, "seal": [away] * 2, "versions": [away]}
    with house.client() as client:
        assert push_directory(directory, "toy", client, Progress(), FAST).committed.version
    assert len(house.control.registrations) == 1


def test_push_holds_one_chunk_per_sender(house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of chunks in memory is at most the number of senders, for a model of any size."""
    weights = {f"t{number}": weight((2048,), number) for number in range(60)}
    directory = Model(shards={"model.safetensors": weights}).write(tmp_path / "model")
    held, most = [0], [0]

    @contextmanager
    def counted() -> Iterator[None]:
        held[0] += 1
        most[0] = max(most[0], held[0])
        yield
        held[0] -= 1

    honest = httpx.Client.request

    def request(self: httpx.Client, method: str, *rest: object, **more: object) -> httpx.Response:
        if method != "PUT":
            return honest(self, method, *rest, **more)  # type: ignore[arg-type]
        with counted():
            return honest(self, method, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(httpx.Client, "request", request)
    with house.client() as client:
        pushed = push_directory(directory, "toy", client, Progress())
    assert pushed.committed.new_chunks >= 60
    assert 1 <= most[0] <= DEFAULT_SENDERS
