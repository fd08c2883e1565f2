"""Usage records of a month as an installation would have written them: many replicas, several models, every outcome.

Whoever makes them knows what the bill must say: `Expected` is counted here, and nowhere out of the ledger.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from contracts.usage import LifetimeRecord, Origin, RequestRecord

TENANT: Final = "default"
BATCH: Final = 5_000  # requests that are posted at once; what the ledger takes at most
MODELS: Final = 20
REPLICAS: Final = 40  # at a time
SERVED: Final = 2_000  # requests in a replica's life
ORPHANS_EVERY: Final = 100_000  # requests, of which the activator died with one or two
STANDBY_US: Final = 400_000
RESTORE_US: Final = 250_000
ACTIVE_SHARE: Final = 1.25  # of the time that its requests used: a replica also waits while it is active


@dataclass(slots=True)
class Expected:
    """What the bill of the month must say."""

    requests: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    lifetimes: int = 0
    active_us: int = 0


@dataclass(slots=True)
class _Replica:
    """One that serves."""

    runtime_id: str
    pid: int
    model: int
    born_at_us: int
    requests: int = 0
    used_us: int = 0
    orphans: int = 0


class Month:
    """Deterministic by its seed. `expected` is complete once `batches` is at its end."""

    def __init__(self, requests: int, begin_us: int, end_us: int, seed: int = 1) -> None:
        self._requests = requests
        self._begin_us = begin_us
        self._end_us = end_us
        self._random = random.Random(seed)  # noqa: S311 — no secret
        self._versions = [f"{self._random.getrandbits(256):064x}" for _ in range(MODELS)]
        self._born = 0
        self._died = 0
        self._sequence = 0
        self.expected = Expected()

    def batches(self) -> Iterator[tuple[tuple[RequestRecord, ...], tuple[LifetimeRecord, ...]]]:
        """Requests in the order of their ends, and the lives of replicas that ended after them."""
        living = [self._bear(slot, self._begin_us) for slot in range(REPLICAS)]
        batch: list[RequestRecord] = []
        dead: list[LifetimeRecord] = []
        for number in range(self._requests):
            at_us = self._begin_us + (self._end_us - self._begin_us) * number // self._requests
            slot = number % REPLICAS
            batch.append(self._request(number, at_us, living[slot]))
            if living[slot].requests == SERVED:
                dead.append(self._bury(living[slot], at_us + 1))
                living[slot] = self._bear(slot, at_us + 1)
            if len(batch) == BATCH:
                yield tuple(batch), tuple(dead)
                batch, dead = [], []
        dead += [self._bury(replica, self._end_us - 1) for replica in living]
        yield tuple(batch), tuple(dead)

    def _bear(self, slot: int, at_us: int) -> _Replica:
        self._born += 1
        return _Replica(f"bench-{self._born}", 100 + self._born % 30_000, slot % MODELS, at_us)

    def _request(self, number: int, at_us: int, replica: _Replica) -> RequestRecord:
        chance = self._random.random
        outcome, status = (
            ("ok", 200) if chance() < 0.97 else ("cancelled", 499) if chance() < 0.7 else ("overloaded", 503)
        )
        served = outcome != "overloaded"
        prompt = 16 + int(chance() * 2_000) if served else 0
        completion = int(chance() * 500) + (outcome == "ok") if served else 0
        device_us = 200 * prompt // 16 + 900 * completion if served else 0
        is_orphan = outcome == "cancelled" and number % ORPHANS_EVERY < 100 and replica.orphans == 0
        if served:
            replica.requests += 1
            replica.used_us += device_us
        if is_orphan:
            replica.orphans += 1
        else:
            self._sequence += 1
        self.expected.requests[outcome] += 1
        self.expected.prompt_tokens += prompt
        self.expected.completion_tokens += completion
        return RequestRecord(
            request_id=f"req_{at_us // 1000:012x}{self._random.getrandbits(56):014x}",  # sorts by time, as ours do
            origin=Origin.ORPHAN if is_orphan else Origin.ACTIVATOR,
            source=replica.runtime_id if is_orphan else "activator-bench",
            sequence=1 if is_orphan else self._sequence,
            tenant=TENANT,
            model=f"model-{replica.model}",
            version=self._versions[replica.model],
            key_id=f"key{number % 7}",
            runtime_id=replica.runtime_id if served else None,
            started_at_us=at_us - device_us - 1_000,
            ended_at_us=at_us,
            queued_us=int(chance() * 2_000),
            outcome=outcome,
            status=status,
            stream=number % 3 != 0,
            prompt_tokens=prompt,
            cached_tokens=0,
            completion_tokens=completion,
            device_us=device_us,
        )

    def _bury(self, replica: _Replica, at_us: int) -> LifetimeRecord:
        self._died += 1
        active_us = int(replica.used_us * ACTIVE_SHARE)
        total_us = max(at_us - replica.born_at_us, STANDBY_US + RESTORE_US + active_us)
        self.expected.lifetimes += 1
        self.expected.active_us += active_us
        return LifetimeRecord(
            runtime_id=replica.runtime_id,
            source="supervisor-bench",
            sequence=self._died,
            pid=replica.pid,
            tenant=TENANT,
            model=f"model-{replica.model}",
            version=self._versions[replica.model],
            device_class="cpu-1",
            born_at_us=at_us - total_us,
            died_at_us=at_us,
            total_us=total_us,
            standby_us=STANDBY_US,
            restore_us=RESTORE_US,
            active_us=active_us,
            idle_us=total_us - STANDBY_US - RESTORE_US - active_us,
            requests=replica.requests,
            exit_status=0,
            cpu_us=active_us,
            max_rss_kb=600_000,
        )
