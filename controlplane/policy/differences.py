"""How much a difference between two accounts is, at most, in requests, tokens, device time and money.

What is compared with what is `balance`'s; this tells the size of what it found, and of what is known not to be exact.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from signal import Signals
from typing import Final

from contracts.billing import Difference, Imbalance
from contracts.usage import ACK_TOKENS, SO_FAR_S, LifetimeRecord, RequestRecord
from controlplane.policy.balance import Kind, LifetimeFacts, Range
from controlplane.policy.rating import ANY_CLASS, SECOND_US, DevicePrices, Prices, amount_micros

Size = tuple[int | None, int | None, int | None, int | None]  # requests, tokens, device us, micro-units; None: unknown


class Known(StrEnum):
    """Kinds beside those of the balance."""

    CHARGED_BY_RECEIPT = "charged_by_receipt"
    CHARGED_SO_FAR = "charged_so_far"
    UNSHIPPED = "unshipped"
    TOTAL_WRONG = "total_wrong"


@dataclass(frozen=True, slots=True)
class Ending:
    """What is known of a replica beside its balance."""

    device_class: str
    exit_status: int
    max_positions: int | None  # tokens that a request of its version can have; None where it isn't registered


@dataclass(frozen=True, slots=True)
class Waiting:
    """A source's spool that is still there."""

    acknowledged: int
    last: int


def tokens_micros(prices: Prices, tokens: int) -> int:
    """The most that so many tokens of any kind may cost."""
    return amount_micros(tokens, max(prices.prompt, prices.cached, prices.completion), prices.per_tokens)


def device_micros(prices: Prices, device_class: str, time_us: int) -> int:
    """The most that so much device time may cost, whatever the replica was doing."""
    rate = _rate(prices, device_class)
    return amount_micros(time_us, max(rate.restore, rate.active, rate.idle), SECOND_US)


def life_micros(prices: Prices, device_class: str, restore_us: int, active_us: int, idle_us: int) -> int:
    """What that device time costs."""
    rate = _rate(prices, device_class)
    pairs = ((restore_us, rate.restore), (active_us, rate.active), (idle_us, rate.idle))
    return sum(amount_micros(time_us, price, SECOND_US) for time_us, price in pairs)


def requests_micros(prices: Prices, requests: int, prompt: int, cached: int, completion: int) -> int:
    """What these requests cost if they are charged; `prompt` includes `cached`."""
    pairs = ((prompt - cached, prices.prompt), (cached, prices.cached), (completion, prices.completion))
    tokens = sum(amount_micros(quantity, price, prices.per_tokens) for quantity, price in pairs)
    return tokens + requests * prices.request


def of_life(problem: Imbalance, facts: LifetimeFacts, ending: Ending, prices: Prices) -> Difference:
    """What is wrong with a replica's account."""
    size = _size_of(Kind(problem.kind), facts, ending, prices)
    return _difference(problem.kind, problem.subject, problem.detail, size, cause=_end_of(ending.exit_status))


def of_hole(source: str, received: Sequence[Range], waiting: Waiting | None) -> Iterator[Difference]:
    """Each gap in a source's sequences. Whose the records were nobody knows."""
    cause = "its spool is gone, and they with it" if waiting is None else "its spool is there, and can't be read there"
    for first, last in gaps(received):
        which = f"record {first}" if first == last else f"records {first} to {last}"
        detail = f"{which} of this source never arrived; record {last + 1} did"
        yield _difference(Kind.SEQUENCE_HOLE, source, detail, (last - first + 1, None, None, None), cause=cause)


def unshipped(source: str, waiting: Waiting) -> Difference:
    """Records that will come."""
    count = waiting.last - waiting.acknowledged
    detail = f"{count} records wait in its spool; they may be any tenant's"
    return _difference(Known.UNSHIPPED, source, detail, (count, None, None, None), fails=False)


def charged_by_receipt(request_id: str, runtime_id: str, tokens: int, prices: Prices) -> Difference:
    """A request whose activator died: what it delivered after its last word to the replica is not charged."""
    detail = f"charged for the {tokens} tokens that were acknowledged to replica {runtime_id}"
    size = (0, ACK_TOKENS, 0, amount_micros(ACK_TOKENS, prices.completion, prices.per_tokens))
    cause = "its activator died"
    return _difference(Known.CHARGED_BY_RECEIPT, request_id, detail, size, cause=cause, fails=False)


def charged_so_far(runtime_id: str, device_class: str, prices: Prices) -> Difference:
    """A replica whose pod ended with all that it had to tell: what it lived after its last word is not charged."""
    off_us = SO_FAR_S * SECOND_US
    size = (0, 0, off_us, device_micros(prices, device_class, off_us))
    detail = "charged up to its last word of its life"
    cause = "its pod, or its node, ended at once"
    return _difference(Known.CHARGED_SO_FAR, runtime_id, detail, size, cause=cause, fails=False)


def silent(runtime_id: str) -> Difference:
    """A replica that has been silent for a while, and may still report. After an hour it is `charged_so_far`."""
    detail = "has said nothing of its life lately; an hour after its last word it is charged up to there"
    cause = "its pod ended at once, or can't reach the control plane"
    size = (0, 0, SO_FAR_S * SECOND_US, None)
    return _difference(Known.CHARGED_SO_FAR, runtime_id, detail, size, cause=cause, fails=False)


def of_conflict(subject: str, reason: str, record: RequestRecord | LifetimeRecord | None, prices: Prices) -> Difference:
    """A record that was kept aside; None where it can't be read."""
    ids = (record.request_id,) if isinstance(record, RequestRecord) else ()
    return _difference(Kind.CONFLICT, subject, reason, _worth(record, prices), ids=ids)


def gone(problem: Imbalance, requests: int, device_us: int) -> Difference:
    """A replica whose life nobody wrote: its requests' device time is the least of it."""
    detail = f"{problem.detail}; they used {device_us} us of device time"
    cause = "the machine lost its power, or its supervisor's spool was destroyed"
    return _difference(problem.kind, problem.subject, detail, (requests, 0, None, None), cause=cause)


def wrong_total(subject: str, detail: str, size: Size) -> Difference:
    """A sum that is kept, and that the rows don't make."""
    return _difference(Known.TOTAL_WRONG, subject, detail, size)


def gaps(received: Sequence[Range]) -> Iterator[Range]:
    """What is not there before the last that is: sequences begin at 1. `received` is normal."""
    expected = 1
    for first, last in received:
        if first > expected:
            yield expected, first - 1
        expected = last + 1


def _size_of(kind: Kind, facts: LifetimeFacts, ending: Ending, prices: Prices) -> Size:
    match kind:
        case Kind.TIME_UNACCOUNTED:
            off_us = abs(facts.standby_us + facts.restore_us + facts.active_us + facts.idle_us - facts.total_us)
            return 0, 0, off_us, device_micros(prices, ending.device_class, off_us)
        case Kind.DEVICE_TIME_OVER:  # a replica's life is billed, and not its requests' share of it
            return 0, 0, facts.recorded_device_us - facts.active_us, 0
        case Kind.REQUESTS_MISSING:
            count = facts.requests - facts.recorded_requests
            left_us = max(0, facts.active_us - facts.recorded_device_us)
            if ending.max_positions is None:
                return count, None, left_us, None
            tokens = count * ending.max_positions
            return count, tokens, left_us, tokens_micros(prices, tokens) + count * prices.request
        case Kind.REQUESTS_EXTRA:
            return facts.answered_requests - facts.requests, None, facts.recorded_device_us, None
    raise ValueError(f"{kind} says nothing of a replica's life")


def _worth(record: RequestRecord | LifetimeRecord | None, prices: Prices) -> Size:
    match record:
        case RequestRecord():
            tokens = record.prompt_tokens + record.completion_tokens
            figures = (record.prompt_tokens, record.cached_tokens, record.completion_tokens)
            return 1, tokens, record.device_us, requests_micros(prices, 1, *figures)
        case LifetimeRecord():
            parts = (record.restore_us, record.active_us, record.idle_us)
            return 0, 0, record.total_us, life_micros(prices, record.device_class, *parts)
        case None:
            return None, None, None, None


def _difference(
    kind: str, subject: str, detail: str, size: Size, *, cause: str = "", ids: tuple[str, ...] = (), fails: bool = True
) -> Difference:
    requests, tokens, device_us, micros = size
    return Difference(
        kind=kind,
        subject=subject,
        detail=detail,
        fails=fails,
        cause=cause,
        ids=ids,
        requests=requests,
        tokens=tokens,
        device_us=device_us,
        amount_micros=micros,
    )


def _rate(prices: Prices, device_class: str) -> DevicePrices:
    return prices.device.get(device_class) or prices.device.get(ANY_CLASS) or DevicePrices(0, 0, 0)


_NAMES: Final = {number.value: number.name for number in Signals}


def _end_of(exit_status: int) -> str:
    """As Popen.returncode."""
    if exit_status < 0:
        return f"the replica was killed by {_NAMES.get(-exit_status, f'signal {-exit_status}')}"
    return f"the replica ended with status {exit_status}" if exit_status else ""
