"""Staging on a disk that returns errors, lost data in a power cut, or holds foreign files."""

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs

from kelvin.blobstore.memory_store import MemoryStore
from kelvin.contracts.errors import Conflict, NotFound, Unavailable
from snapshotter.app.app import open_app
from snapshotter.app.settings import SnapshotterSettings
from snapshotter.push.staging import IDLE_S, Staging
from tests.eventually import eventually
from tests.snapshotter.bench import DirectJobs
from tests.snapshotter.push.test_staging import PAGE_CHUNK, A, B, failure_of, open_staged_push, record


def refusing(number: int) -> Callable[..., None]:
    """Return a file operation that fails with this error."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("kind", ["plan", "push"])
def test_read_only_disk_ends_the_search_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """On a disk that removes nothing, a new plan or push fails at once instead of searching for room without end."""
    staging = Staging(tmp_path, 1)
    if kind == "plan":
        staging.open_plan(record(), {}, 0.0)
    else:
        open_staged_push(staging)
    monkeypatch.setattr(Path, "rename", refusing(errno.EROFS))
    open_plan = partial(staging.open_plan, record(), {}, 2 * IDLE_S)
    again = open_plan if kind == "plan" else partial(open_staged_push, staging, now_s=2e9)
    assert failure_of(again) == Unavailable("the staging disk")


def test_sweep_counts_only_what_it_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A push that the disk can't remove stays, is not counted, and does not stop the sweep."""
    staging = Staging(tmp_path, 2)
    push = open_staged_push(staging)
    monkeypatch.setattr(Path, "rename", refusing(errno.EROFS))
    assert staging.sweep(now_s=101.0, max_age_s=100.0) == 0
    staging.load_plan("acme", push)


def test_idle_push_that_is_committed_meanwhile_stays(tmp_path: Path) -> None:
    """A push whose commit begins between its choice as idle and its removal stays."""
    staging = Staging(tmp_path, 2)
    push = open_staged_push(staging, a=b"one")
    assert [promise.is_idle for promise in staging.open_promises("acme", "", IDLE_S)] == [True]
    with staging.pin(push):
        assert not staging.drop_idle("acme", push, IDLE_S)
    staging.touch("acme", push, IDLE_S)  # the client came back
    assert not staging.drop_idle("acme", push, IDLE_S)
    assert staging.read_chunk("acme", push, A) == b"one"
    assert staging.drop_idle("acme", push, 2 * IDLE_S)
    assert staging.drop_idle("acme", push, 2 * IDLE_S)  # it is removed already
    assert isinstance(failure_of(staging.load_plan, "acme", push), NotFound)


def test_start_skips_unreadable_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with an I/O error affects only its own tenant, whose calls fail as unavailable."""
    staging = Staging(tmp_path, 2)
    sick, well = open_staged_push(staging, "acme", a=b"one"), open_staged_push(staging, "umbrella", a=b"two")
    scandir = os.scandir

    def refuse(path: object) -> object:
        if sick in str(path):
            raise OSError(errno.EIO, "EIO")
        return scandir(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", refuse)
    again = Staging(tmp_path, 2)
    assert again.read_chunk("umbrella", well, A) == b"two"
    assert failure_of(again.find_staged, "acme", [A]) == Unavailable("the staging disk")
    (tmp_path / "acme" / sick).rename(tmp_path / "acme" / f".{sick}")
    monkeypatch.setattr(os, "scandir", lambda path: refuse(sick) if "acme" in str(path) else scandir(path))
    assert again.sweep(now_s=101.0, max_age_s=100.0) == 1
    assert isinstance(failure_of(again.load_plan, "umbrella", well), NotFound)


FOREIGN_ENTRIES = [
    pytest.param("stray", id="a file beside the tenants"),
    pytest.param("lost+found/", id="the file system's own directory"),
    pytest.param("acme/stray", id="a file beside the pushes"),
    pytest.param("acme/lost+found/x", id="a directory beside the pushes"),
    pytest.param("acme/.stray", id="a hidden file beside the pushes"),
    pytest.param(f"acme/{'1' * 32}", id="a file with the name of a push"),
    pytest.param(f"acme/{'0' * 32}/stray", id="a file in a push"),
    pytest.param(f"acme/{'0' * 32}/chunks/stray", id="a file beside the chunks"),
    pytest.param(f"acme/{'0' * 32}/chunks/lost+found/a/b", id="a directory beside the chunks"),
    pytest.param(f"acme/{'0' * 32}/chunks/.hidden/a", id="a hidden directory beside the chunks"),
    pytest.param("umbrella/a/b/c", id="four path segments"),
    pytest.param("loop@", id="a link to itself beside the tenants"),
    pytest.param(f"acme/{'1' * 32}@", id="a link to itself with the name of a push"),
    pytest.param("acme/.loop@", id="a hidden link to itself"),
]


@pytest.mark.parametrize("entry", FOREIGN_ENTRIES)
def test_foreign_entries_stop_nothing(tmp_path: Path, entry: str) -> None:
    """Staging opens, serves and sweeps a directory with a foreign entry."""
    open_staged_push(Staging(tmp_path, 3), plan_id="0" * 32, a=b"one")
    path = tmp_path / entry
    if entry.endswith("/"):
        path.mkdir()
    elif entry.endswith("@"):
        path = path.with_name(path.name.removesuffix("@"))
        path.symlink_to(path.name)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"not ours")
    staging = Staging(tmp_path, 3)
    assert staging.read_chunk("acme", "0" * 32, A) == b"one"
    other = open_staged_push(staging, now_s=1.0)
    assert staging.find_staged("acme", [A, B]) == {A}
    assert staging.link_staged("acme", other, [A, B]) == {A}
    assert {promise.plan_id for promise in staging.open_promises("acme", "", 0.0)} == {"0" * 32, other}
    assert staging.declared_digests("acme") == set()
    assert staging.sweep(now_s=1e12, max_age_s=100.0) == 2
    staging.discard_chunk("acme", A)
    staging.check_integrity()


def damages(raw: bytes) -> dict[str, bytes]:
    """Return the damage that power cuts and bad disks do to a file."""
    return {"empty": b"", "torn": raw[: len(raw) // 2], "zero-filled": bytes(len(raw)), "not text": b"\xff" * len(raw)}


@pytest.mark.parametrize("damage", ["empty", "torn", "zero-filled", "not text"])
@pytest.mark.parametrize("name", ["plan.json", "declared.json"])
def test_damaged_record_is_as_good_as_none(tmp_path: Path, name: str, damage: str) -> None:
    """A damaged plan or declaration is refused, affects no other push, and is restored by its client's next call."""
    plan = structs.replace(record(), chunks=(PAGE_CHUNK,))
    staging = Staging(tmp_path, 2)
    staging.open_push(plan, (A,), 0.0)
    path = tmp_path / "acme" / plan.plan_id / name
    path.write_bytes(damages(path.read_bytes())[damage])
    staging = Staging(tmp_path, 2)
    call = staging.load_plan if name == "plan.json" else staging.read_declared
    assert isinstance(failure_of(call, "acme", plan.plan_id), NotFound | Conflict)
    open_staged_push(staging, a=b"one")
    assert staging.find_staged("acme", [A]) == {A}
    assert len(staging.open_promises("acme", "", 0.0)) == (2 if name == "plan.json" else 1)
    staging.open_push(plan, (A,), 0.0)
    assert staging.load_plan("acme", plan.plan_id) == plan
    assert staging.read_declared("acme", plan.plan_id) == (A,)


def test_disk_that_reads_nothing_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unreadable declaration is not an empty one: calls that need it are refused as retryable."""
    staging = Staging(tmp_path, 2)
    push = open_staged_push(staging)
    monkeypatch.setattr(Path, "read_bytes", refusing(errno.EIO))
    for ask in (
        lambda: staging.read_declared("acme", push),
        lambda: staging.open_promises("acme", "", 0.0),
        lambda: staging.declared_digests("acme"),
        lambda: staging.load_plan("acme", push),
        lambda: staging.read_chunk("acme", push, A),
    ):
        assert failure_of(ask) == Unavailable("the staging disk")


def test_push_without_a_readable_time_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promises are listed by the time of their push, so they are unknown, too."""
    staging = Staging(tmp_path, 2)
    push, stat = open_staged_push(staging), Path.stat

    def refuse(self: Path, **more: bool) -> os.stat_result:
        if self.name == push:
            raise OSError(errno.EIO, "EIO")
        return stat(self, **more)

    monkeypatch.setattr(Path, "stat", refuse)
    assert failure_of(staging.open_promises, "acme", "", 0.0) == Unavailable("the staging disk")


async def test_root_that_can_not_be_read_is_swept_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The staging disk may come back. Until then each sweep logs the error, and the service runs on."""
    settings, store = SnapshotterSettings(data=tmp_path, store_url="memory:"), MemoryStore()
    async with open_app(settings, store, DirectJobs(tmp_path)):
        monkeypatch.setattr(os, "scandir", refusing(errno.EIO))
        await eventually(lambda: "the staging directory could not be swept" in caplog.messages)
    assert "a background loop failed" not in caplog.messages
