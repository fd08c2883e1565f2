"""A hot restart replaces the activator once the new one is ready. Otherwise the old one stays, with the reason."""

import asyncio
import errno
import os
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from kelvin.supervisor.child_group import Child, ChildGroup, ChildSpec
from kelvin.supervisor.hot_restart import OUTCOME_FILE, HotRestart

DOOR = ChildSpec("activator", "activator", "activator.sock", listens=True)


class Process:
    """A process with the attributes that a child uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid


def _begun(child: Child, pid: int) -> None:
    child.process = cast(None, Process(pid))


class Group(ChildGroup):
    """A group whose processes end as soon as they are told to."""

    def __init__(self, spawn: Callable[[Child], None]) -> None:
        super().__init__([Child(ChildSpec("cache", "weightcache", None)), Child(DOOR)], spawn, lambda *_: None)
        self.ended: list[tuple[int | None, int]] = []

    async def end(self, ending: Collection[Child], patience_s: float, number: int = signal.SIGTERM) -> None:
        for child in ending:
            self.ended.append((child.pid, number))
            if not child.is_restarted:
                self.members.remove(child)


@dataclass
class Supervisor:
    """A supervisor's children, and what was done to them."""

    run: Path
    ready_s: float = 60.0
    is_ready: bool = True
    on_start: Callable[["Supervisor", Child], None] = lambda _, child: _begun(child, 2)
    at_door: Callable[["Supervisor"], bool] = lambda _: True
    hot_restart: HotRestart = field(init=False)

    def __post_init__(self) -> None:
        self.group = Group(lambda child: self.on_start(self, child))
        self.children, self.ended = self.group.members, self.group.ended

    async def change(self) -> None:
        """Run a hot restart to its end."""
        _begun(self.children[1], 1)
        self.hot_restart = HotRestart(self.group, self.may_begin, self.is_serving, self.run, self.ready_s, 5.0)
        self.hot_restart.begin()
        self.hot_restart.begin()
        async with asyncio.timeout(30):
            while self.hot_restart.is_running:
                await asyncio.sleep(0)

    async def may_begin(self) -> bool:
        return self.is_ready

    async def is_serving(self, child: Child) -> bool:
        return self.at_door(self)

    @property
    def doors(self) -> list[tuple[int | None, bool]]:
        """Return process id and restart flag of each activator."""
        return [(child.pid, child.is_restarted) for child in self.children if child.spec.listens]

    @property
    def said(self) -> str:
        """Return the reason of a failed restart, or ""."""
        path = self.run / OUTCOME_FILE
        return path.read_text() if path.exists() else ""


def test_old_activator_ends_once_the_new_is_ready(tmp_path: Path) -> None:
    """The old activator gets SIGUSR1. Two orders before the start count as one."""
    supervisor = Supervisor(tmp_path)
    asyncio.run(supervisor.change())
    assert supervisor.ended == [(1, signal.SIGUSR1)]
    assert supervisor.doors == [(2, True)]
    assert supervisor.said == ""


def test_order_during_a_hot_restart_starts_another(tmp_path: Path) -> None:
    """A later order is for the activator that is then current, so another restart follows, once for all of them."""
    begun: list[int] = []

    def start(supervisor: Supervisor, child: Child) -> None:
        begun.append(len(begun) + 2)
        _begun(child, begun[-1])

    def ready(supervisor: Supervisor) -> bool:
        if begun == [2]:
            supervisor.hot_restart.begin()
            supervisor.hot_restart.begin()
        return True

    supervisor = Supervisor(tmp_path, on_start=start, at_door=ready)
    asyncio.run(supervisor.change())
    assert supervisor.ended == [(1, signal.SIGUSR1), (2, signal.SIGUSR1)]
    assert supervisor.doors == [(3, True)]


def _dies(supervisor: Supervisor, child: Child) -> None:
    _begun(child, 2)
    child.process = None


def _dies_after_its_answer(supervisor: Supervisor) -> bool:
    supervisor.children[-1].process = None
    return True


def _refused(supervisor: Supervisor, child: Child) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize(
    ("supervisor", "reason", "ended"),
    [
        pytest.param(lambda run: Supervisor(run, is_ready=False), "before the installation is ready", [], id="early"),
        pytest.param(
            lambda run: Supervisor(run, on_start=_dies, at_door=lambda _: False),
            "logs/activator.log says why",
            [(None, signal.SIGTERM)],
            id="the new one dies",
        ),
        pytest.param(
            lambda run: Supervisor(run, at_door=_dies_after_its_answer),
            "logs/activator.log says why",
            [(None, signal.SIGTERM)],
            id="the new one dies after it was ready",
        ),
        pytest.param(
            lambda run: Supervisor(run, on_start=_refused),
            "can't be started, and the old one stays: Too many open files",
            [],
            id="the system refuses the start",
        ),
        pytest.param(
            lambda run: Supervisor(run, ready_s=0.0, at_door=lambda _: False),
            "the old one stays",
            [(2, signal.SIGTERM)],
            id="the new one is never ready",
        ),
    ],
)
def test_failed_hot_restart_keeps_the_old_activator(
    tmp_path: Path, supervisor: Callable[[Path], Supervisor], reason: str, ended: list[tuple[int | None, int]]
) -> None:
    """The old activator keeps running and is restarted if it dies."""
    fake = supervisor(tmp_path)
    asyncio.run(fake.change())
    assert reason in fake.said
    assert fake.ended == ended
    assert fake.doors == [(1, True)]


def test_dead_old_activator_is_not_signalled(tmp_path: Path) -> None:
    def dies(supervisor: Supervisor) -> bool:
        supervisor.children[1].process = None
        return True

    supervisor = Supervisor(tmp_path, at_door=dies)
    asyncio.run(supervisor.change())
    assert supervisor.ended == []
    assert supervisor.doors == [(2, True)]


def test_failed_hot_restart_gives_the_old_activator_its_name(tmp_path: Path) -> None:
    """If the new activator took the socket's name and failed, the name goes back to the old one."""
    name = tmp_path / "activator.sock"

    def takes_over(supervisor: Supervisor, child: Child) -> None:
        (tmp_path / "new").write_text("new")
        (tmp_path / "new").rename(name)
        _dies(supervisor, child)

    name.write_text("old")
    supervisor = Supervisor(tmp_path, on_start=takes_over, at_door=lambda _: False)
    asyncio.run(supervisor.change())
    assert supervisor.doors == [(1, True)]
    assert name.read_text() == "old"
    assert {each.name for each in tmp_path.iterdir()} == {"activator.sock", OUTCOME_FILE}


def test_failed_hot_restart_leaves_the_name_to_the_restarted_one(tmp_path: Path) -> None:
    """The old activator died and was restarted, so its new process has the name. The dead socket doesn't replace it."""
    name = tmp_path / "activator.sock"

    def comes_back(supervisor: Supervisor) -> bool:
        _begun(supervisor.children[1], 3)
        (tmp_path / "next").write_text("next")
        (tmp_path / "next").rename(name)
        return False

    name.write_text("old")
    supervisor = Supervisor(tmp_path, ready_s=0.0, at_door=comes_back)
    asyncio.run(supervisor.change())
    assert supervisor.doors == [(3, True)]
    assert name.read_text() == "next"


def test_new_activator_keeps_the_socket_name(tmp_path: Path) -> None:
    """Control of the two tests above: if the new activator is ready, it keeps the name."""
    name = tmp_path / "activator.sock"

    def takes_over(supervisor: Supervisor, child: Child) -> None:
        (tmp_path / "new").write_text("new")
        (tmp_path / "new").rename(name)
        _begun(child, 2)

    name.write_text("old")
    supervisor = Supervisor(tmp_path, on_start=takes_over)
    asyncio.run(supervisor.change())
    assert supervisor.doors == [(2, True)]
    assert [each.name for each in tmp_path.iterdir()] == ["activator.sock"]
    assert name.read_text() == "new"


def test_a_file_system_that_links_no_sockets_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is reported at once, and the old activator stays."""

    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    supervisor = Supervisor(tmp_path)
    asyncio.run(supervisor.change())
    assert "the activator can't be restarted: Operation not permitted" in supervisor.said
    assert supervisor.doors == [(1, True)]
