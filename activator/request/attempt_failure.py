"""Classify a failed attempt: may another replica answer, and is the replica at fault?"""

from typing import Final

from activator.queue.circuit_breakers import INTEGRITY
from activator.queue.throttler import Throttler
from activator.queue.version_queue import Replica
from activator.upstream.replica_requests import UpstreamLost, UpstreamRejected
from kelvin.contracts.artifact_errors import WeightsDamaged
from kelvin.contracts.errors import Failure, Internal, Refused, Unavailable
from kelvin.contracts.problem import WireFailure, from_wire
from kelvin.contracts.serving.stream_frames import Frame
from kelvin.contracts.traffic_errors import ReplicaLost
from kelvin.contracts.wire import BadJson, decoder

# another replica may answer
RETRYABLE_CODES: Final = frozenset({Unavailable.code, WeightsDamaged.code})


def report_replica_failure(
    throttler: Throttler, replica: Replica, failed: Refused | UpstreamLost | UpstreamRejected
) -> None:
    """Report a failed attempt to the throttler if the replica is at fault. That is the case if it has ended, is full,
    was lost or drains, or if its weights or the version's files are damaged.
    """
    if isinstance(failed, UpstreamLost) and failed.has_ended:
        throttler.report_ended(replica)
        return
    if isinstance(failed, UpstreamRejected) and failed.is_full:
        throttler.report_full(replica, failed.credit or 1)
        return
    code = ReplicaLost.code if isinstance(failed, UpstreamLost) else failed.failure.code
    if code in INTEGRITY or code in RETRYABLE_CODES or code == ReplicaLost.code:
        throttler.report_failed(replica, code)


def decode_failure(frame: Frame) -> Failure:
    """Return the failure in a FAILED frame, or Internal if it can't be decoded."""
    try:
        return from_wire(decoder(WireFailure).decode(frame.payload))
    except BadJson:
        return Internal()
