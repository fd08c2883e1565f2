"""What Knative's autoscaler is told, as its protocol has it on the wire: `stats.proto`, by protobuf's library.

Imported only where there is such an autoscaler.
"""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

DESCRIPTORS: Final = Path(__file__).with_name("stats.binpb")
MESSAGES: Final = "metrics.WireStatMessages"


class RevisionStat(NamedTuple):
    """Of one Revision since it was told last: requests at once, weighted by time, and how many came."""

    namespace: str
    name: str
    concurrency: float
    requests: int


@cache
def message_class() -> Any:
    """`WireStatMessages`. Not of generated code, which has to be of the library's own version."""
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file:
        pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName(MESSAGES))


def encode_stats(pod: str, stats: Iterable[RevisionStat]) -> bytes:
    """One binary frame. As Knative's activator leaves them: the time is the receiver's to say, `proxied` the pod's."""
    message = message_class()()
    for told in stats:
        each = message.messages.add(namespace=told.namespace, name=told.name)
        each.stat.pod_name = pod
        each.stat.average_concurrent_requests = told.concurrency
        each.stat.request_count = told.requests
    encoded: bytes = message.SerializeToString()
    return encoded
