"""A new key's file is private and complete, never replaces another by accident, and is checked beforehand."""

import errno
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from kelvin.cli.base.api_client import CommandFailed
from kelvin.cli.tenants.key_commands import key_file


def test_key_file_is_private(tmp_path: Path) -> None:
    """The mode is 0600, and no other file is left."""
    with key_file(tmp_path / "new.key", replace=False) as write:
        assert not (tmp_path / "new.key").exists()
        write("secret")
    assert (tmp_path / "new.key").read_text() == "secret\n"
    assert stat.S_IMODE((tmp_path / "new.key").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["new.key"]


def test_a_refused_key_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed), key_file(tmp_path / "new.key", replace=False):
        raise CommandFailed("refused")
    assert list(tmp_path.iterdir()) == []


def test_another_key_is_replaced_only_by_its_successor(tmp_path: Path) -> None:
    """An existing file is refused unless the key is rotated."""
    path = tmp_path / "old.key"
    path.write_text("old")
    with pytest.raises(CommandFailed, match=r"old\.key exists"), key_file(path, replace=False):
        raise AssertionError
    with key_file(path, replace=True) as write:
        assert path.read_text() == "old"
        write("new")
    assert path.read_text() == "new\n"


def test_a_file_that_appeared_meanwhile_is_kept(tmp_path: Path) -> None:
    """A file made meanwhile is kept, because the secret in it is stored nowhere else."""
    path = tmp_path / "new.key"
    with key_file(path, replace=False) as write:
        path.write_text("another's")
        with pytest.raises(CommandFailed, match=r"new\.key was made meanwhile.*revoke"):
            write("secret")
    assert path.read_text() == "another's"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_that_leads_nowhere_has_the_name(tmp_path: Path) -> None:
    """A broken link is refused before the key is created."""
    path = tmp_path / "new.key"
    path.symlink_to(tmp_path / "away" / "new.key")
    with pytest.raises(CommandFailed, match=r"new\.key exists"), key_file(path, replace=False):
        raise AssertionError
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_key_has_its_file_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """Some file systems, such as FAT, have no hard links. An existing file is kept there too."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "new.key"
    with key_file(path, replace=False) as write:
        if is_there:
            path.write_text("another's")
        with pytest.raises(CommandFailed) if is_there else nullcontext():
            write("secret")
    assert path.read_text() == ("another's" if is_there else "secret\n")
    assert list(tmp_path.iterdir()) == [path]


@contextmanager
def without_room() -> Iterator[None]:
    """Let files be created but not written, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_key_that_has_no_room_is_not_made(tmp_path: Path) -> None:
    """No file is left."""
    with (
        without_room(),
        pytest.raises(CommandFailed, match="can't be written"),
        key_file(tmp_path / "new.key", replace=False),
    ):
        raise AssertionError
    assert list(tmp_path.iterdir()) == []


def test_unwritable_key_file_is_refused_beforehand(tmp_path: Path) -> None:
    """The check comes before a key is created whose secret would be lost."""
    with pytest.raises(CommandFailed, match="can't be written"), key_file(tmp_path / "none" / "x", replace=False):
        raise AssertionError
