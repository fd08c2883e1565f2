"""Metrics from the agent's state: bytes and chunks by tier, faults, leases."""

from collections.abc import Callable, Mapping

from kelvin.telemetry.policy.instruments import Labels, MetricKind, MetricsPage, series_by_label
from kelvin.telemetry.policy.labels import outcome_of
from weightcache.app.api import State


def describe_cache(page: MetricsPage, read_state: Callable[[], State]) -> None:
    """Add the metrics of the cache. Each reads the state when the page is rendered."""

    def counter(name: str, help: str, labels: Labels, series: Callable[[State], Mapping[Labels, float]]) -> None:
        page.callback(name, help, MetricKind.COUNTER, labels, lambda: series(read_state()))

    def total(name: str, help: str, count: Callable[[State], float]) -> None:
        counter(name, help, (), lambda now: {(): count(now)})

    def by_label(name: str, help: str, label: str, counts: Callable[[State], Mapping[str, float]]) -> None:
        counter(name, help, (label,), lambda now: series_by_label(counts(now).items()))

    def by_outcome(name: str, help: str, counts: Callable[[State], Mapping[str, int]]) -> None:
        counter(name, help, ("outcome",), lambda now: _series_by_outcome(counts(now)))

    def gauge(name: str, help: str, label: str, values: Callable[[State], Mapping[str, float]]) -> None:
        page.callback(name, help, MetricKind.GAUGE, (label,), lambda: series_by_label(values(read_state()).items()))

    by_label("kelvin_chunk_reads_total", "Reads of chunks.", "tier", lambda now: now.chunk_reads)
    by_label("kelvin_read_bytes_total", "Bytes of the chunks read.", "tier", lambda now: now.bytes_read)
    by_label(
        "kelvin_nvme_read_bytes_total", "Bytes read from NVMe, by read path.", "way", lambda now: now.nvme.bytes_by_way
    )
    counter("kelvin_chunk_faults_total", "Copies that were faulty.", ("tier", "kind"), _fault_series)
    by_label(
        "kelvin_healed_chunks_total",
        "Faulty chunks of which a good copy was found.",
        "tier",
        lambda now: now.healed_chunks,
    )
    by_outcome("kelvin_refused_chunks_total", "Chunks not healed.", lambda now: now.refused_chunks)
    by_label(
        "kelvin_examined_chunks_total", "Kept chunks that were verified again.", "tier", lambda now: now.examined_chunks
    )
    total("kelvin_scrub_passes_total", "Complete passes of the scrubber.", lambda now: now.sweeps)
    page.callback(
        "kelvin_damaged_processes", "Processes with wrong memory.", MetricKind.GAUGE, (), lambda: _damaged(read_state())
    )
    by_label("kelvin_leases_total", "Leases: hot if the version was loaded before.", "start", _leases_by_start)
    by_outcome("kelvin_leases_refused_total", "Leases refused.", lambda now: now.leases_refused)
    counter("kelvin_prefetches_total", "Prefetches that ended.", ("outcome",), _prefetch_series)
    total(
        "kelvin_unverified_versions_total",
        "Loads of versions no trusted key signed.",
        lambda now: now.unverified_versions,
    )
    total("kelvin_unkept_chunks_total", "Chunks whose memory was needed first.", lambda now: now.unkept_chunks)
    by_label(
        "kelvin_hedges_total",
        "Store reads sent twice: second, if that one won; else first.",
        "first",
        _hedges_by_winner,
    )
    gauge("kelvin_reads_running", "Running reads.", "tier", lambda now: now.reads_running)
    gauge("kelvin_chunks_queued", "Chunks that wait for their turn.", "tier", lambda now: now.chunks_queued)
    total("kelvin_peer_sent_chunks_total", "Chunks sent to peers.", lambda now: now.peers.sent_chunks)
    total("kelvin_peer_sent_bytes_total", "Bytes sent to peers.", lambda now: now.peers.sent_bytes)
    by_label("kelvin_peer_refusals_total", "Peers that were not served, by reason.", "reason", _peer_refusals_by_reason)
    gauge("kelvin_peers", "Other nodes.", "state", _peers_by_state)
    gauge("kelvin_tier_bytes", "Bytes held.", "tier", lambda now: {"host": now.host.bytes, "nvme": now.nvme.bytes})
    gauge("kelvin_tier_budget_bytes", "Bytes that a tier may hold.", "tier", _budget_bytes_by_tier)
    gauge("kelvin_tier_bytes_per_second", "Speed of recent loads from a tier.", "tier", _bytes_per_s_by_tier)


def _leases_by_start(now: State) -> dict[str, float]:
    return {"hot": now.leases_hot, "cold": now.leases_granted - now.leases_hot}


def _hedges_by_winner(now: State) -> dict[str, float]:
    return {"second": now.hedges_won, "first": now.hedges - now.hedges_won}


def _fault_series(now: State) -> dict[Labels, float]:
    return {(tier, kind): count for tier, kinds in now.chunk_faults.items() for kind, count in kinds.items()}


def _damaged(now: State) -> dict[Labels, float]:
    return {(): len({pid for each in now.damaged for pid in each.pids})}


def _prefetch_series(now: State) -> dict[Labels, float]:
    return {("ok",): now.prefetches.done, **_series_by_outcome(now.prefetches.failed)}


def _peer_refusals_by_reason(now: State) -> dict[str, float]:
    return {"busy": now.peers.refused, "slow": now.peers.cut, "stranger": now.peers.strangers}


def _peers_by_state(now: State) -> dict[str, float]:
    available = sum(node.answers for node in now.peers.nodes)
    return {"asked": available, "left_alone": len(now.peers.nodes) - available}


def _budget_bytes_by_tier(now: State) -> dict[str, float]:
    return {"host": now.host.budget_bytes, "nvme": now.nvme.budget_bytes}


def _bytes_per_s_by_tier(now: State) -> dict[str, float]:
    return {tier: rate.bytes_per_s for tier, rate in now.rates.items()}


def _series_by_outcome(count_by_code: Mapping[str, int]) -> dict[Labels, float]:
    series: dict[Labels, float] = {}
    for code, count in count_by_code.items():
        series[(outcome_of(code),)] = series.get((outcome_of(code),), 0) + count
    return series
