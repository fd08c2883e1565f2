"""What one request has cost and delivered, as its replica knows it: the material of an orphan's record."""

from dataclasses import dataclass, replace

from msgspec import UNSET

from contracts.frames import Counts
from contracts.traffic_errors import Cancelled
from contracts.usage import Origin, RequestRecord


@dataclass(frozen=True, slots=True)
class Account:
    """A request that has left the engine. `activator` names the spool of whoever owes its record, "" where unknown."""

    request_id: str
    activator: str
    tenant: str
    model: str
    version: str
    key_id: str
    runtime_id: str
    started_at_us: int
    ended_at_us: int
    stream: bool
    counts: Counts
    delivered_tokens: int  # the last count that the activator acknowledged
    once: str = ""  # as the activator would have recorded it; "" for none
    degraded: str = ""  # as the activator would have recorded it

    def delivered(self, tokens: int) -> "Account":
        """Return the account with a later acknowledgement. The count never goes down."""
        return replace(self, delivered_tokens=max(self.delivered_tokens, min(tokens, self.counts.completion_tokens)))

    def answered_elsewhere(self) -> "Account":
        """Return the account of a request that another replica answered: it charges nothing."""
        return replace(self, delivered_tokens=0, once="")

    def record(self, source: str, sequence: int) -> RequestRecord:
        """What is charged: tokens that were acknowledged, not those that were made."""
        return RequestRecord(
            request_id=self.request_id,
            origin=Origin.ORPHAN,
            source=source,
            sequence=sequence,
            tenant=self.tenant,
            model=self.model,
            version=self.version,
            key_id=self.key_id,
            runtime_id=self.runtime_id,
            started_at_us=self.started_at_us,
            ended_at_us=self.ended_at_us,
            queued_us=0,
            outcome=Cancelled.code,
            status=Cancelled.status,
            stream=self.stream,
            prompt_tokens=self.counts.prompt_tokens,
            cached_tokens=self.counts.cached_tokens,
            completion_tokens=self.delivered_tokens,
            device_us=self.counts.device_us,
            once=self.once or UNSET,
            degraded=self.degraded or UNSET,
        )
