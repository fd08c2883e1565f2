"""The traces that an installation sends to a collector, and its metrics page."""

import base64
from typing import Any

import pytest

from coldstart_bench.harness.installation import Installation
from tests.e2e.conftest import COLLECTORS_SECRET
from tests.e2e.https_client import Answer, complete, connect, headers, post
from tests.e2e.installation_processes import mapped
from tests.e2e.installation_state import sole_replica
from tests.e2e.tiny_models import prompt_of
from tests.eventually import wait
from tests.kelvin.telemetry.receiver import Receiver

pytestmark = pytest.mark.deep

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def _timeline(kelvin: Installation, answer: Answer) -> Any:
    return kelvin.client.request("GET", f"/v1/requests/{answer.headers['x-request-id']}/timeline")


def _stages(trace: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Return names and end times of a trace's stages, in microseconds from its start."""
    whole, *stages = trace
    began = int(whole["start_time_unix_nano"])
    return sorted(((span["name"], (int(span["end_time_unix_nano"]) - began) // 1000) for span in stages), key=_at)


def _at(stage: tuple[str, int]) -> tuple[int, str]:
    return stage[1], stage[0]


def _agrees(trace: list[dict[str, Any]], timeline: Any) -> bool:
    """Return whether a trace has the stages of the timeline route."""
    return _stages(trace) == sorted(((stamp["stage"], stamp["at_us"]) for stamp in timeline["stamps"]), key=_at)


def _restores(collector: Receiver, runtime_id: str) -> list[dict[str, Any]]:
    """Return the restore traces of the replica."""
    wholes = [span for span in collector.spans() if span["name"] == "restore"]
    return [span for span in wholes if span["attributes"].get("kelvin.runtime_id") == runtime_id]


def test_only_cold_starts_and_errors_are_traced(watched: Installation, collector: Receiver) -> None:
    """Only notable requests are sent (share 0), with the stages of their timelines. The cold one links its restore."""
    watched.scale_to_zero("llama")
    cold = complete(watched, "llama", prompt_of([5, 9]), max_tokens=3)
    warm = complete(watched, "llama", prompt_of([5, 9]), max_tokens=3)
    wrong = complete(watched, "llama", prompt_of([5, 9]), max_tokens=100_000)
    assert (cold.status, warm.status, wrong.status) == (200, 200, 400)
    wait(lambda: collector.trace_of(wrong.headers["x-request-id"]), "the error's trace")  # the last of the three
    trace, timeline = collector.trace_of(cold.headers["x-request-id"]), _timeline(watched, cold)
    assert timeline["cold"]
    assert _agrees(trace, timeline)
    assert _agrees(collector.trace_of(wrong.headers["x-request-id"]), _timeline(watched, wrong))
    assert collector.trace_of(warm.headers["x-request-id"]) == []
    # Negative control: a missing stage, or another end time, is noticed.
    assert not _agrees(trace[:-1], timeline)
    assert not _agrees(trace, {"stamps": [{**stamp, "at_us": stamp["at_us"] + 1} for stamp in timeline["stamps"]]})
    whole = trace[0]
    runtime = sole_replica(watched, "llama")
    seen = whole["attributes"]
    assert (seen["kelvin.tenant"], seen["kelvin.model"], seen["kelvin.outcome"]) == ("default", "llama", "ok")
    assert seen["kelvin.version"] == watched.model("llama")["version"]
    assert seen["kelvin.runtime_id"] == runtime["runtime_id"]
    assert (seen["gen_ai.usage.input_tokens"], seen["gen_ai.usage.output_tokens"]) == (2, 3)
    assert whole["resource"]["service.name"] == "activator"
    wait(lambda: _restores(collector, runtime["runtime_id"]), "the restore's trace")
    (restore,) = _restores(collector, runtime["runtime_id"])
    assert whole["links"][0]["trace_id"] == restore["trace_id"]
    assert restore["resource"]["service.name"] == "controlplane"
    error = collector.trace_of(wrong.headers["x-request-id"])[0]
    assert error["status"] == {"message": "context_length_exceeded", "code": "STATUS_CODE_ERROR"}


def test_a_request_belongs_to_its_callers_trace(watched: Installation, collector: Receiver) -> None:
    """The trace has the caller's trace id and parent span."""
    body = {"model": "llama", "prompt": prompt_of([5]), "max_tokens": 100_000}
    answer = post(watched, "/v1/completions", body, traceparent=f"00-{TRACE}-{CALLER}-01")
    request_id = answer.headers["x-request-id"]
    wait(lambda: collector.trace_of(request_id), "the trace")
    whole = collector.trace_of(request_id)[0]
    assert base64.b64decode(whole["trace_id"]).hex() == TRACE
    assert base64.b64decode(whole["parent_span_id"]).hex() == CALLER


def test_a_scraper_with_a_key_sees_all_processes(watched: Installation) -> None:
    """`GET /admin/v1/metrics` is one page of Prometheus text for all processes. A key without the scope gets 403."""
    watched.scale_to_zero("llama")
    assert complete(watched, "llama", prompt_of([5, 9]), max_tokens=2).status == 200
    connection = connect(watched)
    connection.request("GET", "/admin/v1/metrics", headers=headers(watched, "admin.key"))
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.request("GET", "/admin/v1/metrics", headers=headers(watched))
    assert connection.getresponse().status == 403
    connection.close()
    assert answer.getheader("content-type") == "text/plain; version=0.0.4; charset=utf-8"
    assert text.count("# TYPE process_cpu_seconds_total counter") == 1
    for said in (  # some are counted shortly after the answer
        'kelvin_up{process="controlplane",peer="cache"} 1',
        'kelvin_requests_total{process="activator",tenant="default",model="llama",outcome="ok",status="200",start="cold"}',
        'kelvin_first_token_seconds_count{process="activator",tenant="default",model="llama",start="cold"}',
        'kelvin_restore_seconds_count{process="controlplane",tier="host"}',
        'kelvin_replicas{process="controlplane",state="ready"} 1',
        'kelvin_pending_replicas{process="controlplane",device="cpu",zone="any",spot="no"} 0',
        'kelvin_chunk_reads_total{process="weightcache",tier="store"}',
        'kelvin_kv_blocks{process="runtime",state="free"}',
        'process_resident_memory_bytes{process="snapshotter"}',
        'kelvin_traces_total{process="activator",result="sent"}',
    ):
        wait(lambda said=said: said in watched.admin.text("/admin/v1/metrics"), said)  # type: ignore[misc]


def test_the_collectors_secret_is_told_to_the_collector_alone(watched: Installation, collector: Receiver) -> None:
    """The secret is sent with each call to the collector, and is in no log and no span."""
    wrong = complete(watched, "llama", prompt_of([5, 9]), max_tokens=100_000)
    wait(lambda: collector.trace_of(wrong.headers["x-request-id"]), "the error's trace")
    seen = collector.seen()
    assert {each["authorization"] for each in seen["headers"]} == {f"Basic {COLLECTORS_SECRET}"}
    assert COLLECTORS_SECRET not in str(seen["traces"])
    for log in (watched.data / "logs").glob("*.log"):
        assert COLLECTORS_SECRET not in log.read_text()


def test_telemetry_library_is_loaded_if_enabled(watched: Installation) -> None:
    """Only the activator, which sends traces, loads protobuf. `test_telemetry_off.py` tests the other case."""
    wait(lambda: mapped(watched, "google/_upb").get("activator"), "it is loaded where it is on")
    found = mapped(watched, "google/_upb")
    assert [found[name] for name in ("runtime.app.zygote", "weightcache", "snapshotter")] == [False, False, False]
