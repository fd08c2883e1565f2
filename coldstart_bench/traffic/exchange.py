"""What is asked of the open loop, and what it says of each request; microseconds after its beginning. Pure."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

import msgspec

from coldstart_bench.processes import Load

CUT: Final = "cut"  # the connection ended before the answer did
NO_DOOR: Final = "no_door"  # nobody took the connection
NO_END: Final = "no_end"  # it was still waiting when the patience was over


class Reader(StrEnum):
    """How the client takes its answer."""

    QUICK = "quick"
    SLOW = "slow"  # a little at a time
    SILENT = "silent"  # nothing after the first bytes, and it never closes: a peer that was switched off


class Payload(msgspec.Struct, frozen=True):
    """One kind of request; many may be the same."""

    key: str
    path: str
    body: str
    headers: dict[str, str] = {}
    reader: Reader = Reader.QUICK
    who: str = ""  # for who reads the report


class Plan(msgspec.Struct, frozen=True):
    """Send `payloads[number]` at `at_us`, for each of `arrivals`, which are in order of time."""

    port: int
    payloads: tuple[Payload, ...]
    arrivals: tuple[tuple[int, int], ...]
    connections: int  # that are open before the beginning
    most: int  # that may be open at all; who finds none free waits for one, and its clock runs
    patience_s: float  # after the last was due


class Sent(msgspec.Struct, frozen=True, array_like=True):
    """Of one request, whatever came of it. What it waited is counted from when it was due, not from when it went."""

    payload: int
    due_us: int
    sent_us: int | None  # None where no connection was to be had
    first_us: int | None  # of its answer: the first event of a stream that has text, or the first byte
    end_us: int
    status: int  # 0 without an answer
    code: str  # "" where it was answered, the failure's code otherwise, or one of the words above
    text: int  # which of the texts it was answered with, -1 where it has none
    retry_after: bool
    seen_us: int = 0  # when the loop came to send it, a connection or not

    @property
    def took_s(self) -> float:
        """Seconds from when it was due to its end."""
        return (self.end_us - self.due_us) / 1e6

    @property
    def is_ok(self) -> bool:
        """Whether its answer came, whole."""
        return self.status == 200 and not self.code


class Ran(msgspec.Struct, frozen=True):
    """What came of a plan, in the order of its arrivals."""

    began_ns: int  # CLOCK_MONOTONIC, which is one for all processes
    sent: tuple[Sent, ...]
    texts: tuple[str, ...]  # each once
    load: Load | None = None  # of the loop itself, connections not counted

    def text(self, sent: Sent) -> str:
        """What it was answered with."""
        return "" if sent.text < 0 else self.texts[sent.text]

    def answers(self) -> list[str]:
        """What each was answered, or that it was not."""
        return [self.text(sent) if sent.is_ok else f"not answered: {sent.code}" for sent in self.sent]


def lags_s(sent: Iterable[Sent]) -> list[float]:
    """How late the loop came to send each: whether it kept up itself. A wait for a connection is not among it."""
    return [(each.seen_us - each.due_us) / 1e6 for each in sent]


def held_up_s(sent: Iterable[Sent]) -> list[float]:
    """How long each waited for a connection, of which a door that answers late leaves none free."""
    return [(each.sent_us - each.seen_us) / 1e6 for each in sent if each.sent_us is not None]
