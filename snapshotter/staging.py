"""Chunks and plans on disk until their commit: `ROOT/TENANT/PLAN/{plan.json,digests.json,chunks/DIGEST}`.

Blocking; callers run it in threads. A name appears only by rename of a whole file, so a killed process leaves no half
chunk under a digest. Nothing is synced: after a power cut bytes may be gone, which packing finds, as it hashes them.
"""

import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from contracts.errors import CapacityExceeded, Conflict, NotFound, Overloaded, Refused, Unavailable
from contracts.push import MissingRequest
from contracts.wire import decode, encode
from snapshotter.plans import PlanRecord

_PLAN_ID: Final = re.compile(r"[0-9a-f]{32}")
# A push that was active so recently is not thrown out to make room for another.
IDLE_S: Final = 600.0


def new_plan_id() -> str:
    """Unguessable: a plan id also keeps tenants' mistakes apart."""
    return secrets.token_hex(16)


class Staging:
    """All open pushes of all tenants. At most `plans_per_tenant` each; the longest idle makes room."""

    def __init__(self, root: Path, plans_per_tenant: int) -> None:
        self._root = root
        self._plans_per_tenant = plans_per_tenant
        self._held: Counter[str] = Counter()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for tenant in _scan(root):
            for entry in _scan(tenant):
                if entry.name.startswith("."):  # a plan that a killed process had not yet opened
                    shutil.rmtree(entry, ignore_errors=True)

    def __repr__(self) -> str:
        return f"<Staging {self._root} held={sum(self._held.values())}>"

    @contextmanager
    def hold(self, plan_id: str) -> Iterator[None]:
        """While inside, neither age nor the lack of room drops the plan."""
        self._held[plan_id] += 1
        try:
            yield
        finally:
            self._held[plan_id] -= 1
            self._held += Counter()  # forget zeros

    def open(self, record: PlanRecord, first_chunks: Mapping[str, bytes], now_s: float) -> None:
        """Make the plan durable against a kill, with the chunks that are here already. `now_s` is wall clock.

        Raises `Refused(Overloaded)` where the tenant has too many pushes that are all in use.
        """
        self._make_room(record.tenant, now_s)
        with _translated("plan", record.plan_id):
            draft = self._root / record.tenant / f".{record.plan_id}"
            (draft / "chunks").mkdir(parents=True)
            for digest, data in first_chunks.items():
                (draft / "chunks" / digest).write_bytes(data)
            (draft / "plan.json").write_bytes(encode(record))
            draft.rename(self._path(record.tenant, record.plan_id))

    def load(self, tenant: str, plan_id: str) -> PlanRecord:
        """Raises `Refused(NotFound)` for an unknown plan, and for another tenant's."""
        with _translated("plan", plan_id):
            raw = (self._path(tenant, plan_id) / "plan.json").read_bytes()
        try:
            return decode(raw, PlanRecord)
        except Refused:
            raise Refused(NotFound("plan", plan_id)) from None  # cut by a power failure: the client plans again

    def declare(self, tenant: str, plan_id: str, digests: tuple[str, ...]) -> None:
        """What the client will send, of which only these are accepted."""
        with _translated("plan", plan_id):
            _write_whole(self._path(tenant, plan_id) / "digests.json", encode(MissingRequest(digests=digests)))

    def check_room(self, nbytes: int) -> None:
        """Raises `Refused(CapacityExceeded)` where the disk can't take that much more."""
        free = shutil.disk_usage(self._root).free
        if nbytes > free:
            raise Refused(CapacityExceeded("bytes on the staging disk", nbytes, free))

    def declared(self, tenant: str, plan_id: str) -> tuple[str, ...]:
        """Raises `Refused(Conflict)` before `declare`."""
        path = self._path(tenant, plan_id) / "digests.json"
        try:
            return decode(path.read_bytes(), MissingRequest).digests
        except (FileNotFoundError, Refused):
            raise Refused(Conflict("chunk", "ask which chunks are missing first")) from None

    def put(self, tenant: str, plan_id: str, digest: str, data: bytes) -> None:
        """Keep a chunk whose digest the caller has checked. Repeats are harmless."""
        with _translated("plan", plan_id):
            _write_whole(self._path(tenant, plan_id) / "chunks" / digest, data)

    def adopt(self, tenant: str, plan_id: str, wanted: Iterable[str]) -> set[str]:
        """Those of `wanted` that are staged, also by other pushes of the tenant: a push that was cut is taken up."""
        mine = self._path(tenant, plan_id) / "chunks"
        with _translated("plan", plan_id):
            missing = set(wanted) - {entry.name for entry in os.scandir(mine)}
            for other in self._plans(tenant):
                for digest in missing & {entry.name for entry in _scan(other / "chunks")}:
                    try:
                        os.link(other / "chunks" / digest, mine / digest)
                    except (FileExistsError, FileNotFoundError):
                        continue  # sent or dropped meanwhile; what is missing then is asked for
            return set(wanted) & {entry.name for entry in os.scandir(mine)}

    def read(self, tenant: str, plan_id: str, digest: str) -> bytes:
        """A staged chunk; the caller checks it. Raises `Refused(Conflict)` where it is not there."""
        try:
            return (self._path(tenant, plan_id) / "chunks" / digest).read_bytes()
        except FileNotFoundError:
            raise Refused(Conflict("commit", f"chunk {digest} was not sent")) from None
        except OSError as error:
            raise Refused(Unavailable("the staging disk")) from error

    def discard(self, tenant: str, plan_id: str, digest: str) -> None:
        """Forget a chunk that turned out to be damaged."""
        (self._path(tenant, plan_id) / "chunks" / digest).unlink(missing_ok=True)

    def touch(self, tenant: str, plan_id: str, now_s: float) -> None:
        """The push is alive. Raises `Refused(NotFound)`."""
        with _translated("plan", plan_id):
            os.utime(self._path(tenant, plan_id), (now_s, now_s))

    def drop(self, tenant: str, plan_id: str) -> None:
        """Forget the push. It may be gone already."""
        shutil.rmtree(self._path(tenant, plan_id), ignore_errors=True)

    def sweep(self, now_s: float, max_age_s: float) -> int:
        """Drop pushes that stood still for too long and what crashes left; returns how many."""
        dropped = 0
        for tenant in _scan(self._root):
            for entry in _scan(tenant):
                idle_s = now_s - _mtime(Path(entry))
                if idle_s > max_age_s and not self._held[entry.name]:
                    shutil.rmtree(entry, ignore_errors=True)
                    dropped += 1
        return dropped

    def check_integrity(self) -> None:
        """Every tenant is within its bound, and every plan can be loaded. For tests."""
        for tenant in _scan(self._root):
            plans = self._plans(tenant.name)
            assert len(plans) <= self._plans_per_tenant, f"{tenant.name} has {len(plans)} plans"
            for plan in plans:
                assert self.load(tenant.name, plan.name).plan_id == plan.name

    def _make_room(self, tenant: str, now_s: float) -> None:
        while len(plans := self._plans(tenant)) >= self._plans_per_tenant:
            free = [plan for plan in plans if not self._held[plan.name]]
            oldest = min(free, key=_mtime, default=None)
            if oldest is None or now_s - _mtime(oldest) < IDLE_S:
                raise Refused(Overloaded("the list of open pushes", self._plans_per_tenant, 30.0))
            shutil.rmtree(oldest, ignore_errors=True)

    def _plans(self, tenant: str) -> list[Path]:
        return [Path(entry) for entry in _scan(self._root / tenant) if _PLAN_ID.fullmatch(entry.name)]

    def _path(self, tenant: str, plan_id: str) -> Path:
        if _PLAN_ID.fullmatch(plan_id) is None:
            raise Refused(NotFound("plan", plan_id[:80]))
        return self._root / tenant / plan_id


def _scan(path: Path | os.DirEntry[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")  # gone: neither old nor in the way


def _write_whole(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        temporary.write_bytes(data)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def _translated(kind: str, name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise Refused(NotFound(kind, name)) from None
    except OSError as error:
        raise Refused(Unavailable("the staging disk")) from error
