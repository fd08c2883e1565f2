"""Encode reports for Knative's autoscaler: its `stats.proto`. Imported only if there is such an autoscaler."""

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
    """One Revision's time-weighted concurrency and number of new requests since its last report."""

    namespace: str
    name: str
    concurrency: float
    requests: int


@cache
def message_class() -> Any:
    """Return the class of `WireStatMessages`. Built at run time: generated code must match the library's version."""
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file:
        pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName(MESSAGES))


def encode_stats(pod: str, stats: Iterable[RevisionStat]) -> bytes:
    """Return one binary frame. Like Knative's activator, leave the time to the receiver and `proxied` to the pod."""
    message = message_class()()
    for revision_stat in stats:
        each = message.messages.add(namespace=revision_stat.namespace, name=revision_stat.name)
        each.stat.pod_name = pod
        each.stat.average_concurrent_requests = revision_stat.concurrency
        each.stat.request_count = revision_stat.requests
    encoded: bytes = message.SerializeToString()
    return encoded
