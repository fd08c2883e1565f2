"""Chunks and plans on disk until their commit: `ROOT/TENANT/ID/{plan.json,declared.json,chunks/DIGEST}`.

A directory with `declared.json` is a push; without it, it is a plan whose client has not declared its chunks yet.
Blocking, so callers run it in threads. A name appears only by renaming a whole file or directory, so a killed process
leaves no half chunk. Nothing is synced: a power cut may lose bytes, which packing detects by their digests.
"""

import errno
import logging
import os
import re
import secrets
import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from kelvin.contracts.artifacts.manifest import encode_manifest, version_of
from kelvin.contracts.errors import CapacityExceeded, Conflict, NotFound, Refused, Unavailable
from kelvin.contracts.names import is_dns_label
from kelvin.contracts.traffic_errors import Overloaded
from kelvin.contracts.wire import decode, encode
from snapshotter.intake.plan_record import ID_HEX, Declaration, PlanRecord
from snapshotter.intake.policy.quota import PromisedBytes

log = logging.getLogger(__name__)

_ID: Final = re.compile(rf"[0-9a-f]{{{ID_HEX}}}")
_PLAN: Final = "plan.json"
_DECLARED: Final = "declared.json"
IDLE_S: Final = 600.0  # a push that was active more recently is not removed to make room


class Staging:
    """All open pushes of all tenants: for each at most `plans_per_tenant` plans and as many pushes. To make room, the
    longest idle plan is removed, which costs its client one call. A push is removed only if it is idle.
    """

    def __init__(self, root: Path, plans_per_tenant: int) -> None:
        self._root = root
        self._plans_per_tenant = plans_per_tenant
        self._pins: Counter[str] = Counter()
        # Held from the last check of an idle push until it is renamed, so that no commit starts in between.
        self._removal_lock = threading.Lock()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._remove_unfinished()

    def __repr__(self) -> str:
        return f"<Staging {self._root} held={sum(self._pins.values())}>"

    @contextmanager
    def pin(self, plan_id: str) -> Iterator[None]:
        """Keep the plan during the block, whatever its age and the free space."""
        with self._removal_lock:
            self._pins[plan_id] += 1
        try:
            yield
        finally:
            with self._removal_lock:
                self._pins[plan_id] -= 1
                self._pins += Counter()  # forget zeros

    def open_plan(self, record: PlanRecord, first_chunks: Mapping[str, bytes], now_s: float) -> None:
        """Store the plan and its first chunks. Idempotent. `now_s` is wall clock."""
        with _translate_errors("plan", record.plan_id):
            if not self._path(record.tenant, record.plan_id).exists():
                self._make_room_for_plan(record.tenant)
        chunks = {f"chunks/{digest}": data for digest, data in first_chunks.items()}
        self._ensure(record, {_PLAN: encode(record), **chunks}, now_s)

    def load_plan(self, tenant: str, plan_id: str) -> PlanRecord:
        """Return the plan. Raises `Refused(NotFound)` for an unknown plan, and for another tenant's."""
        with _translate_errors("plan", plan_id):
            raw = (self._path(tenant, plan_id) / _PLAN).read_bytes()
        try:
            return decode(raw, PlanRecord)
        except Refused:
            raise Refused(NotFound("plan", plan_id)) from None  # truncated by a power cut: the client plans again

    def open_push(
        self, push: PlanRecord, digests: tuple[str, ...], now_s: float, has_file_to_write: bool = False
    ) -> None:
        """Open a push of these chunks; only they are accepted. Idempotent. `now_s` is wall clock.

        With `has_file_to_write`, the push's file is not stored yet. Raises `Refused(Overloaded)` if the tenant has too
        many pushes and all are in use.
        """
        with _translate_errors("plan", push.plan_id):
            if not self._path(push.tenant, push.plan_id).exists():
                self._make_room_for_push(push.tenant, now_s)
        declaration = push.to_declaration(digests, has_file_to_write)
        self._ensure(push, {_PLAN: encode(push), _DECLARED: encode(declaration)}, now_s)

    def check_free_space(self, nbytes: int) -> None:
        """Raise `Refused(CapacityExceeded)` if the disk has less space than that."""
        try:
            free = shutil.disk_usage(self._root).free
        except OSError as error:
            raise Refused(Unavailable("the staging disk")) from error
        if nbytes > free:
            raise Refused(CapacityExceeded("bytes on the staging disk", nbytes, free))

    def read_declared(self, tenant: str, plan_id: str) -> tuple[str, ...]:
        """Return the declared chunks of the push. Raises `Refused(Conflict)` before `open_push`."""
        declaration = self._try_read_declaration(self._path(tenant, plan_id))
        if declaration is None:
            raise Refused(Conflict("chunk", "request the missing chunks first"))
        return declaration.digests

    def open_promises(self, tenant: str, excluded_id: str, now_s: float) -> list[PromisedBytes]:
        """Return what the tenant's pushes other than `excluded_id` may still send, the longest idle first."""
        found: list[PromisedBytes] = []
        with _translate_errors("plan", excluded_id):
            for plan in sorted(self._plans(tenant), key=_active_at_s):
                if plan.name == excluded_id or (declaration := self._try_read_declaration(plan)) is None:
                    continue
                found.append(PromisedBytes(plan.name, declaration.added_bytes(), self._is_idle(plan, now_s)))
        return found

    def put_chunk(self, tenant: str, plan_id: str, digest: str, data: bytes) -> None:
        """Stage a chunk whose digest the caller has checked. Idempotent."""
        with _translate_errors("plan", plan_id):
            _write_whole(self._path(tenant, plan_id) / "chunks" / digest, data)

    def find_staged(self, tenant: str, wanted: Iterable[str]) -> set[str]:
        """Return those of `wanted` that a push of the tenant holds."""
        names = (entry.name for plan in self._plans(tenant) for entry in _scan(plan / "chunks"))
        return set(wanted).intersection(names)

    def staged_digests(self, tenant: str, plan_id: str) -> list[str]:
        """Return the digests of the chunks that this push holds."""
        chunks = _scan(self._path(tenant, plan_id) / "chunks")
        return [entry.name for entry in chunks if not entry.name.startswith(".")]

    def link_staged(self, tenant: str, plan_id: str, wanted: Iterable[str]) -> set[str]:
        """Link chunks of the tenant's other pushes into this one. Return those of `wanted` that it then has."""
        own_chunks = self._path(tenant, plan_id) / "chunks"
        with _translate_errors("plan", plan_id):
            missing = set(wanted) - {entry.name for entry in os.scandir(own_chunks)}
            for other_push in self._plans(tenant):
                for digest in missing & {entry.name for entry in _scan(other_push / "chunks")}:
                    try:
                        os.link(other_push / "chunks" / digest, own_chunks / digest)
                    except (FileExistsError, FileNotFoundError):
                        continue  # sent or dropped meanwhile; the client sends what is missing
            return set(wanted) & {entry.name for entry in os.scandir(own_chunks)}

    def read_chunk(self, tenant: str, plan_id: str, digest: str) -> bytes:
        """Return a staged chunk, which the caller verifies. Raises `Refused(Conflict)` if it is missing."""
        with _translate_read_errors(digest):
            return (self._path(tenant, plan_id) / "chunks" / digest).read_bytes()

    def read_chunk_part(self, tenant: str, plan_id: str, digest: str, offset: int, length: int) -> bytes:
        """Return part of a staged chunk, or fewer bytes if it ends earlier. Raises as `read_chunk` does."""
        with _translate_read_errors(digest), (self._path(tenant, plan_id) / "chunks" / digest).open("rb") as file:
            return os.pread(file.fileno(), length, offset)

    def discard_chunk(self, tenant: str, digest: str) -> None:
        """Remove a damaged chunk from all of the tenant's pushes."""
        with _translate_errors("chunk", digest):
            for plan in self._plans(tenant):
                (plan / "chunks" / digest).unlink(missing_ok=True)

    def touch(self, tenant: str, plan_id: str, now_s: float) -> None:
        """Mark the push as active. Raises `Refused(NotFound)`."""
        with _translate_errors("plan", plan_id):
            os.utime(self._path(tenant, plan_id), (now_s, now_s))

    def drop(self, tenant: str, plan_id: str) -> None:
        """Remove the push, which may be gone already. If the disk fails, a sweep tries again."""
        try:
            _remove(self._path(tenant, plan_id))
        except OSError as error:
            log.warning("a push was not removed", extra={"plan": plan_id, "error": str(error)})

    def drop_idle(self, tenant: str, plan_id: str, now_s: float) -> bool:
        """Remove the push if it is still idle: no commit holds it, and its client is not active again.

        Return whether it is gone. Raises `Refused(Unavailable)` if the disk fails.
        """
        with _translate_errors("plan", plan_id):
            return self._remove_idle(self._path(tenant, plan_id), now_s, IDLE_S)

    def declared_digests(self, tenant: str) -> set[str]:
        """Return every chunk of the tenant's open pushes, sent or stored already."""
        return {digest for _, digests in self._pushes(tenant) for digest in digests}

    def pending_versions(self, tenant: str) -> set[str]:
        """Return the versions of the tenant's open pushes. A push with a damaged record has none."""
        found: set[str] = set()
        for plan_id, digests in self._pushes(tenant):
            try:
                manifest = self.load_plan(tenant, plan_id).manifest(digests)
            except Refused as refused:
                if not isinstance(refused.failure, NotFound):
                    raise
            else:
                found.add(version_of(encode_manifest(manifest)))
        return found

    def _pushes(self, tenant: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield the id and the digests of each open push."""
        for plan in self._plans(tenant):
            if (declaration := self._try_read_declaration(plan)) is not None:
                yield plan.name, declaration.digests

    def sweep(self, now_s: float, max_age_s: float, only_tenant: str | None = None) -> int:
        """Remove pushes that were idle for longer than `max_age_s`, and leftovers of crashes. Return how many.

        With `only_tenant`, sweep that tenant alone. Raises `Refused(Unavailable)` if the root can't be read.
        """
        dropped = 0
        for tenant in self._tenants():
            if only_tenant not in (None, tenant.name):
                continue
            try:
                hidden_entries = [entry for entry in _scan(tenant) if entry.name.startswith(".")]
                unfinished = [Path(entry) for entry in hidden_entries if entry.is_dir(follow_symlinks=False)]
                candidates = (*self._plans(tenant.name), *unfinished)
            except Refused:
                log.warning("a tenant's pushes can't be listed", extra={"tenant": tenant.name})
                continue
            for path in candidates:
                try:
                    if now_s < _active_at_s(path) < float("inf"):  # touched while the clock was fast
                        os.utime(path, (now_s, now_s))
                    if now_s - _active_at_s(path) <= max_age_s:
                        continue
                    dropped += self._remove_idle(path, now_s, max_age_s)
                except OSError as error:
                    log.warning("a push was not removed", extra={"plan": path.name, "error": str(error)})
        return dropped

    def check_integrity(self) -> None:
        """Raise AssertionError unless tenants are within their limits and all plans load. For tests."""
        for tenant in self._tenants():
            plans = self._plans(tenant.name)
            pushes = [plan for plan in plans if _is_push(plan)]
            for group in (pushes, [plan for plan in plans if plan not in pushes]):
                assert len(group) <= self._plans_per_tenant, f"{tenant.name} has {group}"
            for plan in plans:
                assert self.load_plan(tenant.name, plan.name).plan_id == plan.name

    def _ensure(self, record: PlanRecord, files: Mapping[str, bytes], now_s: float) -> None:
        """Create the record's directory with these files, or repair one that a power cut damaged."""
        path = self._path(record.tenant, record.plan_id)
        with _translate_errors("plan", record.plan_id):
            if path.exists():
                for name, data in files.items():
                    if not _has_content(path / name, data):
                        _write_whole(path / name, data)
            else:
                self._create(path, files)
        self.touch(record.tenant, record.plan_id, now_s)

    def _create(self, path: Path, files: Mapping[str, bytes]) -> None:
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            (draft / "chunks").mkdir(parents=True)
            for name, data in files.items():
                (draft / name).write_bytes(data)
            draft.rename(path)
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # otherwise another request created it
                raise

    def _try_read_declaration(self, plan: Path) -> Declaration | None:
        try:
            return decode((plan / _DECLARED).read_bytes(), Declaration)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:  # an unreadable declaration is not an empty one
            raise Refused(Unavailable("the staging disk")) from error
        except Refused:  # truncated by a power cut: treat it as missing
            return None

    def _make_room_for_plan(self, tenant: str) -> None:
        plans = sorted((plan for plan in self._plans(tenant) if not _is_push(plan)), key=_active_at_s)
        for plan in plans[: max(0, len(plans) + 1 - self._plans_per_tenant)]:
            _remove(plan)

    def _make_room_for_push(self, tenant: str, now_s: float) -> None:
        pushes = sorted((plan for plan in self._plans(tenant) if _is_push(plan)), key=_active_at_s)
        excess = len(pushes) + 1 - self._plans_per_tenant
        for push in pushes:
            if excess > 0 and self._remove_idle(push, now_s, IDLE_S):
                excess -= 1
        if excess > 0:
            raise Refused(Overloaded("the list of open pushes", self._plans_per_tenant, 30.0))

    def _remove_idle(self, push: Path, now_s: float, idle_s: float) -> bool:
        """Remove the push unless a commit holds it or it was active in the last `idle_s` seconds.

        Return whether it is gone. Raises OSError if the disk fails.
        """
        with self._removal_lock:
            if push.exists() and (self._pins[push.name] or now_s - _active_at_s(push) < idle_s):
                return False
            hidden = _rename_hidden(push)
        shutil.rmtree(hidden, ignore_errors=True)
        return True

    def _is_idle(self, push: Path, now_s: float) -> bool:
        return not self._pins[push.name] and now_s - _active_at_s(push) >= IDLE_S

    def _remove_unfinished(self) -> None:
        """Remove unfinished entries of a killed process: names with a dot. Readers ignore those that remain."""
        for tenant in self._tenants():
            with suppress(Refused):
                for entry in _scan(tenant):
                    if entry.name.startswith("."):
                        shutil.rmtree(entry, ignore_errors=True)
                for file in (file for plan in self._plans(tenant.name) for file in _scan(plan / "chunks")):
                    if file.name.startswith("."):
                        with suppress(OSError):
                            Path(file).unlink()

    def _tenants(self) -> list[os.DirEntry[str]]:
        """Return the tenants' directories. Other entries, such as `lost+found`, are ignored."""
        found = _scan(self._root)
        return [entry for entry in found if is_dns_label(entry.name) and entry.is_dir(follow_symlinks=False)]

    def _plans(self, tenant: str) -> list[Path]:
        found = [entry for entry in _scan(self._root / tenant) if _ID.fullmatch(entry.name)]
        return [Path(entry) for entry in found if entry.is_dir(follow_symlinks=False)]

    def _path(self, tenant: str, plan_id: str) -> Path:
        if _ID.fullmatch(plan_id) is None:
            raise Refused(NotFound("plan", plan_id[:80]))
        return self._root / tenant / plan_id


def _is_push(plan: Path) -> bool:
    return (plan / _DECLARED).exists()


def _scan(path: Path | os.DirEntry[str]) -> list[os.DirEntry[str]]:
    """Return the entries of a directory, none if it is absent. Raises `Refused(Unavailable)` if it can't be read."""
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise Refused(Unavailable("the staging disk")) from error


def _active_at_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")  # gone, so it counts as new and is not removed


def _remove(directory: Path) -> None:
    """Rename a directory, then delete it, so that a killed process leaves no half plan under its name.

    It may be gone already. Raises OSError if the disk fails.
    """
    shutil.rmtree(_rename_hidden(directory), ignore_errors=True)


def _rename_hidden(directory: Path) -> Path:
    """Rename a directory to a name that readers ignore. Return the new path; nothing is there if it was gone."""
    hidden = directory.with_name(f".gone.{secrets.token_hex(8)}")
    with suppress(FileNotFoundError):
        directory.rename(hidden)
    return hidden


def _has_content(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except FileNotFoundError:
        return False


def _write_whole(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        temporary.write_bytes(data)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def _translate_read_errors(digest: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise Refused(Conflict("commit", f"chunk {digest} was not sent")) from None
    except OSError as error:
        raise Refused(Unavailable("the staging disk")) from error


@contextmanager
def _translate_errors(kind: str, name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise Refused(NotFound(kind, name)) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # the same failure as in `check_free_space`
            raise Refused(CapacityExceeded("bytes on the staging disk", 1, 0)) from error
        raise Refused(Unavailable("the staging disk")) from error
