"""A request to one replica of its version, in the words that replicas are told."""

import time

from activator.call import Call
from activator.keys import VersionKey
from activator.line import Replica
from activator.proxy import Told, Upstream, Upstreams


class Sender:
    """`source` is the spool that owes the records."""

    def __init__(self, upstreams: Upstreams, source: str) -> None:
        self._upstreams = upstreams
        self._source = source

    def __repr__(self) -> str:
        return f"<Sender {self._source}>"

    def send(self, key: VersionKey, call: Call, replica: Replica) -> Upstream:
        """`async with` it."""
        account = call.account
        caller = account.principal
        remaining_ms = call.deadline.remaining_ms(time.monotonic())
        guest = None if caller.tenant == key.tenant else caller.tenant
        degraded = None if account.degraded is None else account.degraded.recorded
        told = Told(
            account.request_id, caller.key_id, self._source, remaining_ms, replica.wants, call.ceiling, guest,
            account.once, degraded,
        )  # fmt: skip
        return self._upstreams.send(replica, call.path, call.body, told)
