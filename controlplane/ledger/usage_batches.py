"""Decode batches of usage records one by one, so that an unreadable record blocks no other.

A record is unreadable if it is no JSON, lacks fields, has wrong ones, or holds a NUL character. The ledger keeps it
aside (`keep_aside` in `usage_ledger.py`). A record that has all fields and more is from a newer program. Its batch is
refused, so that its sender keeps it until the control plane is upgraded, too.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Final, TypeVar

import msgspec

from controlplane.db.nul_characters import check_json
from kelvin.contracts.accounting.usage import UNSEEN_END_PREFIX, LifetimeRecord, RequestRecord
from kelvin.contracts.errors import InvalidRequest, Refused
from kelvin.contracts.wire import BadJson, Fact, Wire, convert, decode, decode_any, decoder

R = TypeVar("R", RequestRecord, LifetimeRecord)

MAX_BATCH: Final = 5_000  # records
UNKNOWN: Final = "unknown"
_NAMES: Final = ("request_id", "runtime_id")
_TIMES: Final = ("ended_at_us", "died_at_us")


class Unreadable(Wire, frozen=True):
    """A usage record that the ledger keeps aside: its bytes, the reason, and the fields that could be read.

    `tenant` is None, `source` empty and `sequence` 0 if unknown.
    """

    raw: bytes
    reason: str
    subject: str
    tenant: str | None
    at_us: int
    source: str = ""
    sequence: int = 0


class _Batch(Fact, frozen=True):
    records: tuple[msgspec.Raw, ...]


def read_batch(body: bytes | bytearray, kind: type[R], now_us: int) -> tuple[tuple[R, ...], tuple[Unreadable, ...]]:
    """Return the batch's records and its unreadable ones.

    Raises Refused(InvalidRequest) if the body is no batch, has too many records, or has one of a newer program.
    """
    found = decode(body, _Batch).records
    check_size(len(found))
    raws = [bytes(raw) for raw in found]
    records, unreadable = split(raws, kind, now_us)
    for each in unreadable:
        if newer := _fields_of_newer_program(each.raw, kind):
            rule = f"has the field {newer[0]!r}, of a newer program: it waits until the control plane is replaced, too"
            raise Refused(InvalidRequest("records", each.subject[:128], rule))
    # The prefix is reserved for lives that the ledger ends itself.
    ours = [record for record in records if record.source.startswith(UNSEEN_END_PREFIX)]
    if ours:
        reason = f"its source must not begin with {UNSEEN_END_PREFIX!r}"
        unreadable += [describe(msgspec.json.encode(record), reason, now_us) for record in ours]
        records = [record for record in records if not record.source.startswith(UNSEEN_END_PREFIX)]
    return tuple(records), tuple(unreadable)


def check_size(records: int) -> None:
    """Raise Refused(InvalidRequest) if a batch of so many records is too large."""
    if records > MAX_BATCH:
        raise Refused(InvalidRequest("records", str(records), f"must be at most {MAX_BATCH}"))


def split(raws: Sequence[bytes], kind: type[R], now_us: int) -> tuple[list[R], list[Unreadable]]:
    """Decode records. Return them and the unreadable ones."""
    records, unreadable = list[R](), list[Unreadable]()
    decode_record = decoder(kind).decode
    for raw in raws:
        try:
            record = decode_record(raw)
            check_json(raw)
        except BadJson as error:
            unreadable.append(describe(raw, str(error), now_us))
        except Refused:
            unreadable.append(describe(raw, "it holds a NUL character", now_us))
        else:
            records.append(record)
    return records, unreadable


def _fields_of_newer_program(raw: bytes, kind: type[R]) -> list[str]:
    """Return the fields that `kind` doesn't have, if the others make a valid record; else none."""
    with suppress(BadJson, msgspec.ValidationError):
        if isinstance(found := decode_any(raw), dict):
            known = {name: found[name] for name in kind.__struct_fields__ if name in found}
            convert(known, kind)
            return sorted(found.keys() - known.keys())
    return []


def describe(raw: bytes, reason: str, now_us: int) -> Unreadable:
    """Describe an unreadable record by the fields that can be read. An unknown time counts as `now_us`."""
    try:
        found = decode_any(raw)
    except BadJson:
        found = None
    fields = found if isinstance(found, dict) else {}
    words = {name: fields[name] for name in (*_NAMES, "tenant", "source") if isinstance(fields.get(name), str)}
    times = [fields[name] for name in _TIMES if type(fields.get(name)) is int]
    sequence = fields.get("sequence")
    return Unreadable(
        raw=raw,
        reason=reason,
        subject=next((words[name] for name in _NAMES if name in words), UNKNOWN),
        tenant=words.get("tenant"),
        at_us=times[0] if times else now_us,
        source=words.get("source", ""),
        sequence=sequence if type(sequence) is int and "source" in words else 0,
    )
