"""Classify a failed attempt: may another replica answer, and is the replica at fault?"""

from typing import Final

from activator.queue.circuit_breakers import INTEGRITY
from activator.queue.throttler import Throttler
from activator.queue.version_queue import Replica
from activator.upstream.upstream_request import UpstreamLost, UpstreamRejected
from kelvin.contracts.artifact_errors import WeightsDamaged
from kelvin.contracts.errors import Failure, Internal, Refused, Unavailable
from kelvin.contracts.problem import WireFailure, from_wire
from kelvin.contracts.serving.stream_frames import Frame
from kelvin.contracts.traffic_errors import ReplicaLost
from kelvin.contracts.wire import BadJson, decoder

RETRYABLE_CODES: Final = frozenset({Unavailable.code, WeightsDamaged.code})


def may_retry(error: UpstreamLost | UpstreamRejected) -> bool:
    """Return whether another replica may answer after this failure. That is safe in four cases.

    1. The replica was lost before its first byte.
    2. The replica was full, so it did nothing for the request.
    3. The replica refused the request as `unavailable`, because it drains.
    4. The replica withdrew its answer (`weights_damaged`) before the client had any of it.
    """
    if isinstance(error, UpstreamLost):
        return error.before_response
    return error.is_full or error.failure.code in RETRYABLE_CODES


def report_replica_failure(
    throttler: Throttler, replica: Replica, error: Refused | UpstreamLost | UpstreamRejected
) -> None:
    """Report a failed attempt to the throttler if the replica is at fault. That is the case if it has ended, is full,
    was lost or drains, or if its weights or the version's files are damaged.
    """
    if isinstance(error, UpstreamLost) and error.has_ended:
        throttler.report_ended(replica)
        return
    if isinstance(error, UpstreamRejected) and error.is_full:
        throttler.report_full(replica, error.credit or 1)
        return
    code = ReplicaLost.code if isinstance(error, UpstreamLost) else error.failure.code
    if code in INTEGRITY or code in RETRYABLE_CODES or code == ReplicaLost.code:
        throttler.report_failed(replica, code)


def decode_failure(frame: Frame) -> Failure:
    """Return the failure in a FAILED frame, or Internal if it can't be decoded."""
    try:
        return from_wire(decoder(WireFailure).decode(frame.payload))
    except BadJson:
        return Internal()
