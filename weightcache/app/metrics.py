"""Metrics from the agent's state: bytes and chunks by tier, faults, leases."""

from collections.abc import Callable, Mapping

from kelvin.telemetry.policy.instruments import Labels, MetricKind, MetricsPage, series_by_label
from kelvin.telemetry.policy.labels import outcome_of
from weightcache.app.api import State


def describe_cache(page: MetricsPage, read_state: Callable[[], State]) -> None:
    """Add the metrics of the cache. Each reads the state when the page is rendered."""

    def counter(name: str, help: str, labels: Labels, read: Callable[[State], Mapping[Labels, float]]) -> None:
        page.callback(name, help, MetricKind.COUNTER, labels, lambda: read(read_state()))

    def gauge(name: str, help: str, read: Callable[[State], Mapping[Labels, float]]) -> None:
        page.callback(name, help, MetricKind.GAUGE, ("tier",), lambda: read(read_state()))

    tier = ("tier",)
    counter("kelvin_chunk_reads_total", "Reads of chunks.", tier, lambda now: series_by_label(now.chunk_reads.items()))
    counter(
        "kelvin_read_bytes_total",
        "Bytes of the chunks read.",
        tier,
        lambda now: series_by_label(now.bytes_read.items()),
    )
    counter(
        "kelvin_nvme_read_bytes_total",
        "Bytes read from NVMe, by read path.",
        ("way",),
        lambda now: series_by_label(now.nvme.bytes_by_way.items()),
    )
    counter("kelvin_chunk_faults_total", "Copies that were faulty.", ("tier", "kind"), _fault_series)
    counter("kelvin_healed_chunks_total", "Faulty chunks of which a good copy was found.", tier, _healed_series)
    counter(
        "kelvin_refused_chunks_total",
        "Chunks not healed.",
        ("outcome",),
        lambda now: _by_code(now.refused_chunks),
    )
    counter(
        "kelvin_examined_chunks_total",
        "Kept chunks that were verified again.",
        tier,
        lambda now: series_by_label(now.examined_chunks.items()),
    )
    counter("kelvin_scrub_passes_total", "Complete passes of the scrubber.", (), lambda now: {(): now.sweeps})
    page.callback(
        "kelvin_damaged_processes",
        "Processes with wrong memory.",
        MetricKind.GAUGE,
        (),
        lambda: _damaged(read_state()),
    )
    counter("kelvin_leases_total", "Leases: hot if the version was loaded before.", ("start",), _lease_series)
    counter("kelvin_leases_refused_total", "Leases refused.", ("outcome",), lambda now: _by_code(now.leases_refused))
    counter("kelvin_prefetches_total", "Prefetches that ended.", ("outcome",), _prefetch_series)
    counter("kelvin_unverified_versions_total", "Loads of versions no trusted key signed.", (), _unverified_series)
    counter(
        "kelvin_unkept_chunks_total", "Chunks whose memory was needed first.", (), lambda now: {(): now.unkept_chunks}
    )
    counter(
        "kelvin_hedges_total", "Store reads sent twice: second, if that one won; else first.", ("first",), _hedge_series
    )
    gauge("kelvin_reads_running", "Running reads.", lambda now: series_by_label(now.reads_running.items()))
    gauge(
        "kelvin_chunks_queued",
        "Chunks that wait for their turn.",
        lambda now: series_by_label(now.chunks_queued.items()),
    )
    counter("kelvin_peer_sent_chunks_total", "Chunks sent to peers.", (), lambda now: {(): now.peers.sent_chunks})
    counter("kelvin_peer_sent_bytes_total", "Bytes sent to peers.", (), lambda now: {(): now.peers.sent_bytes})
    counter("kelvin_peer_refusals_total", "Peers that were not served, by reason.", ("reason",), _peer_refusal_series)
    page.callback("kelvin_peers", "Other nodes.", MetricKind.GAUGE, ("state",), lambda: _peer_series(read_state()))
    gauge(
        "kelvin_tier_bytes",
        "Bytes held.",
        lambda now: series_by_label((("host", now.host.bytes), ("nvme", now.nvme.bytes))),
    )
    gauge(
        "kelvin_tier_budget_bytes",
        "Bytes that a tier may hold.",
        lambda now: series_by_label((("host", now.host.budget_bytes), ("nvme", now.nvme.budget_bytes))),
    )
    gauge(
        "kelvin_tier_bytes_per_second",
        "Speed of recent loads from a tier.",
        lambda now: series_by_label((tier, rate.bytes_per_s) for tier, rate in now.rates.items()),
    )


def _lease_series(now: State) -> dict[Labels, float]:
    return series_by_label((("hot", now.leases_hot), ("cold", now.leases_granted - now.leases_hot)))


def _hedge_series(now: State) -> dict[Labels, float]:
    return series_by_label((("second", now.hedges_won), ("first", now.hedges - now.hedges_won)))


def _fault_series(now: State) -> dict[Labels, float]:
    return {(tier, kind): count for tier, kinds in now.chunk_faults.items() for kind, count in kinds.items()}


def _healed_series(now: State) -> dict[Labels, float]:
    return series_by_label(now.healed_chunks.items())


def _damaged(now: State) -> dict[Labels, float]:
    return {(): len({pid for each in now.damaged for pid in each.pids})}


def _prefetch_series(now: State) -> dict[Labels, float]:
    return {("ok",): now.prefetches.done, **_by_code(now.prefetches.failed)}


def _unverified_series(now: State) -> dict[Labels, float]:
    return {(): now.unverified_versions}


def _peer_refusal_series(now: State) -> dict[Labels, float]:
    peers = now.peers
    return series_by_label((("busy", peers.refused), ("slow", peers.cut), ("stranger", peers.strangers)))


def _peer_series(now: State) -> dict[Labels, float]:
    answering = sum(node.answers for node in now.peers.nodes)
    return series_by_label((("asked", answering), ("left_alone", len(now.peers.nodes) - answering)))


def _by_code(count_by_code: Mapping[str, int]) -> dict[Labels, float]:
    found: dict[Labels, float] = {}
    for code, count in count_by_code.items():
        found[(outcome_of(code),)] = found.get((outcome_of(code),), 0) + count
    return found
