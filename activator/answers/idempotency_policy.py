"""Requests with an `Idempotency-Key`: valid keys, their digests, and which answers are kept for how long. Names are
digests under the installation's secret. The tenant is part of each name, so keys of two tenants never collide.
"""

import hashlib
import hmac
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kelvin.contracts.errors import InvalidRequest, Refused

IDEMPOTENCY_HEADER: Final = b"idempotency-key"
MAX_CHARACTERS: Final = 255
ENTRY_BYTES: Final = 512  # overhead of a kept answer
RUNS_PER_CHARGE: Final = 8  # runs of one key that are billed once; each further run is billed
CHARGE_S: Final = 86_400.0  # window, from the first run of a key, in which its runs are billed once
_KEY: Final = re.compile(rb"[\x21-\x7e]{1,%d}" % MAX_CHARACTERS)
_DIGITS: Final = 32  # hex digits of `charge_id`: 128 bits


@dataclass(frozen=True, slots=True)
class AnswerKey:
    """The name of an answer. `name` depends on tenant and key, if any. `charge_id` depends on the request, too."""

    tenant: str
    name: bytes
    fingerprint: bytes
    charge_id: str


def read_key(header_values: Sequence[bytes]) -> bytes:
    """Return the one key of a request. Raises Refused(InvalidRequest), which does not repeat the sent value."""
    if len(header_values) != 1:
        raise Refused(InvalidRequest("idempotency-key", f"({len(header_values)} headers)", "send exactly one"))
    if _KEY.fullmatch(header_values[0]) is None:
        rule = f"must be 1 to {MAX_CHARACTERS} visible ASCII characters"
        raise Refused(InvalidRequest("idempotency-key", f"({len(header_values[0])} bytes)", rule))
    return header_values[0]


def derive_answer_key(secret: bytes, tenant: str, key: bytes | None, parts: Sequence[bytes]) -> AnswerKey:
    """Return the digests of a request. `parts` is everything that the answer depends on, so requests with equal `parts`
    are the same request. Without a key, the fingerprint is also the name.
    """
    fingerprint = _digest(secret, b"asked", parts)
    key_parts = tenant.encode(), key or b""
    charge_id = _digest(secret, b"once", (*key_parts, fingerprint)).hex()[:_DIGITS]
    name = fingerprint if key is None else _digest(secret, b"name", key_parts)
    return AnswerKey(tenant, name, fingerprint, charge_id)


def _digest(secret: bytes, purpose: bytes, parts: Sequence[bytes]) -> bytes:
    """Return HMAC-SHA256 (RFC 2104). Each part follows its length, so no two lists of parts give the same bytes."""
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    for part in (b"kelvin once 1", purpose, *parts):
        mac.update(len(part).to_bytes(8, "big"))
        mac.update(part)
    return mac.digest()


@dataclass(frozen=True, slots=True)
class AnswerStoreLimits:
    """How long answers are kept, and how many, per tenant and in total."""

    ttl_s: float = 86_400.0
    answer_bytes: int = 4 << 20  # a larger answer is not kept
    tenant_answers: int = 10_000
    tenant_bytes: int = 32 << 20
    answers: int = 100_000
    nbytes: int = 128 << 20


DEFAULT_LIMITS: Final = AnswerStoreLimits()
CACHE_LIMITS: Final = AnswerStoreLimits(ttl_s=300.0, answer_bytes=1 << 20, tenant_bytes=16 << 20, nbytes=64 << 20)


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """A sealed answer, the fingerprint of its request, and its age."""

    fingerprint: bytes
    sealed: bytes
    age_s: float = field(default=0.0, compare=False)


@dataclass(slots=True)
class _TenantAnswers:
    """One tenant's answers, oldest first."""

    answers: OrderedDict[bytes, KeptAnswer] = field(default_factory=OrderedDict)
    nbytes: int = 0


class AnswerCache:
    """Kept answers. When the cache is full, the tenant with most bytes loses its oldest answer."""

    def __init__(self, limits: AnswerStoreLimits) -> None:
        self._limits = limits
        self._rows: dict[str, _TenantAnswers] = {}
        # all have one TTL: sorted
        self._ends: OrderedDict[tuple[str, bytes], float] = OrderedDict()
        self.nbytes = 0

    def __repr__(self) -> str:
        return f"<AnswerCache answers={len(self)} bytes={self.nbytes} tenants={len(self._rows)}>"

    def __len__(self) -> int:
        return len(self._ends)

    def find(self, tenant: str, name: bytes, now_s: float) -> KeptAnswer | None:
        """Return the unexpired answer of that name with its age, or None."""
        self.drop_expired(now_s)
        return self._aged(tenant, name, now_s) if (tenant, name) in self._ends else None

    def list_answers(self, now_s: float) -> list[tuple[str, bytes, KeptAnswer]]:
        """Return all answers with their tenants and names, the oldest first."""
        return [(tenant, name, self._aged(tenant, name, now_s)) for tenant, name in self._ends]

    def put(self, tenant: str, name: bytes, answer: KeptAnswer, now_s: float) -> bool:
        """Keep the answer in place of an earlier one of that name, for the rest of its lifetime. Return False if it
        does not fit the tenant's limit or the total limit.
        """
        self.drop_expired(now_s)
        size = _size(answer)
        if size > min(self._limits.tenant_bytes, self._limits.nbytes):
            return False
        self._drop(tenant, name)
        row = self._rows.setdefault(tenant, _TenantAnswers())
        row.answers[name] = answer
        row.nbytes += size
        self.nbytes += size
        self._ends[tenant, name] = now_s - answer.age_s + self._limits.ttl_s
        while len(row.answers) > self._limits.tenant_answers or row.nbytes > self._limits.tenant_bytes:
            self._drop_oldest(tenant)
        while len(self) > self._limits.answers or self.nbytes > self._limits.nbytes:
            self._drop_oldest(max(self._rows, key=lambda each: self._rows[each].nbytes))
        return (tenant, name) in self._ends

    def drop_expired(self, now_s: float) -> None:
        """Drop all answers that have expired by `now_s`."""
        while self._ends:
            (tenant, name), end_s = next(iter(self._ends.items()))
            if end_s > now_s:
                return
            self._drop(tenant, name)

    def check_integrity(self) -> None:
        """Assert that sums match the rows, and that tenants and the cache are within their limits."""
        assert {(tenant, name) for tenant, row in self._rows.items() for name in row.answers} == set(self._ends)
        for row in self._rows.values():
            assert row.nbytes == sum(map(_size, row.answers.values())) <= self._limits.tenant_bytes
            assert 0 < len(row.answers) <= self._limits.tenant_answers
        assert self.nbytes == sum(row.nbytes for row in self._rows.values()) <= self._limits.nbytes
        assert len(self) <= self._limits.answers
        assert list(self._ends.values()) == sorted(self._ends.values())

    def _aged(self, tenant: str, name: bytes, now_s: float) -> KeptAnswer:
        age_s = self._limits.ttl_s - (self._ends[tenant, name] - now_s)
        return replace(self._rows[tenant].answers[name], age_s=age_s)

    def _drop_oldest(self, tenant: str) -> None:
        self._drop(tenant, next(iter(self._rows[tenant].answers)))

    def _drop(self, tenant: str, name: bytes) -> None:
        row = self._rows.get(tenant)
        answer = None if row is None else row.answers.pop(name, None)
        if row is None or answer is None:
            return
        row.nbytes -= _size(answer)
        self.nbytes -= _size(answer)
        del self._ends[tenant, name]
        if not row.answers:
            del self._rows[tenant]


def _size(answer: KeptAnswer) -> int:
    return len(answer.sealed) + ENTRY_BYTES


class RunCounts:
    """How often each key ran with something to charge; the oldest keys are forgotten. This limits what a caller gets
    for one charge by running a key repeatedly, after cutting its answers short or pushing them out of the store.
    """

    def __init__(self, keys: int = 65_536) -> None:
        self._keys = keys
        self._counts: OrderedDict[str, tuple[int, float]] = OrderedDict()  # runs, and the time of the first one

    def record_run(self, charge_id: str, now_s: float) -> None:
        """Count one more run of the key."""
        count, since_s = self._counts.pop(charge_id, (0, now_s))
        if now_s - since_s >= CHARGE_S:
            count, since_s = 0, now_s
        self._counts[charge_id] = count + 1, since_s
        if len(self._counts) > self._keys:
            self._counts.popitem(last=False)

    def exceeds_free_runs(self, charge_id: str, now_s: float) -> bool:
        """Return whether the next run of the key is billed separately."""
        count, since_s = self._counts.get(charge_id, (0, now_s))
        return count >= RUNS_PER_CHARGE and now_s - since_s < CHARGE_S
