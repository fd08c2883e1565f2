"""A replica's own figures, read when it is asked. What ends with a replica is a gauge; others outlive it and count."""

from runtime.replica import Replica
from telemetry.policy.instruments import Kind, by
from telemetry.telemetry import local


def metrics_of(replica: Replica) -> str:
    """As Prometheus reads it. Replicas are added up where several are asked, so no name is a label."""
    report = replica.report()
    telemetry = local("runtime")
    blocks = (("free", report.kv_blocks_free), ("used", report.kv_blocks_total - report.kv_blocks_free))
    telemetry.page.read("kelvin_kv_blocks", "KV blocks.", Kind.GAUGE, ("state",), lambda: by(blocks))
    sequences = (("running", report.running), ("waiting", report.waiting))
    telemetry.page.read("kelvin_sequences", "Sequences in engines.", Kind.GAUGE, ("state",), lambda: by(sequences))
    return telemetry.text()
