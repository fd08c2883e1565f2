"""A replica killed during a stream: the client gets an error, and pays for the delivered tokens."""

import contextlib
import os
import signal

from coldstart_bench.harness.installation import Installation
from tests.e2e.https_client import complete, connect, headers
from tests.e2e.installation_state import bill, cache, is_recorded, living, replicas, report
from tests.e2e.tiny_models import words_of


def _stream_and_kill(kelvin: Installation, model: str, after_events: int) -> str:
    """Kill the model's replicas after some events of a stream. Return everything that was received."""
    connection, pids = connect(kelvin), [replica["pid"] for replica in replicas(kelvin, model)]
    body = f'{{"model": "{model}", "prompt": "w1 w2 w3", "max_tokens": 3000, "temperature": 0, "stream": true}}'
    connection.request("POST", "/v1/completions", body, headers(kelvin))
    seen, lines = 0, []
    for line in connection.getresponse():
        lines.append(line.decode())
        seen += line.startswith(b"data: {")
        if seen == after_events and line.startswith(b"data: {"):
            for pid in pids:  # the list may still have a process that another test stopped
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    connection.close()
    return "".join(lines)


def test_killed_replica_ends_the_stream_and_bills_what_was_sent(
    kelvin: Installation,
) -> None:
    """The stream ends with an error event, the next request succeeds, and the bill has the delivered tokens."""
    marker = complete(kelvin, "llama", "w1", max_tokens=1)
    assert marker.status == 200
    kelvin.wait(lambda: is_recorded(kelvin, marker.headers["x-request-id"]), "every record is in the ledger")
    before = bill(kelvin)
    raw = _stream_and_kill(kelvin, "llama", 3)
    assert "event: error" in raw
    assert '"replica_lost"' in raw
    assert "[DONE]" not in raw
    last = complete(kelvin, "llama", "w1 w2", max_tokens=2)
    assert last.status == 200
    kelvin.wait(lambda: is_recorded(kelvin, last.headers["x-request-id"]), "the last one, too")
    after = bill(kelvin)
    assert after["requests"].get("replica_lost", 0) == before["requests"].get("replica_lost", 0) + 1
    kelvin.wait(lambda: cache(kelvin)["leases"] == living(kelvin), "the dead replica's lease is gone")
    assert after["completion_tokens"] == before["completion_tokens"] + words_of(raw) + 2


def test_nothing_leaks_after_many_hangups(kelvin: Installation) -> None:
    """After clients disconnect at various points, the replica has no requests, all KV blocks and no new descriptors."""
    complete(kelvin, "llama", "w1", max_tokens=1)
    before = report(kelvin, "llama")
    for events in (0, 1, 2, 5, 9):
        for _ in range(4):
            connection = connect(kelvin)
            body = '{"model": "llama", "prompt": "w1 w2", "max_tokens": 3000, "stream": true}'
            connection.request("POST", "/v1/completions", body, headers(kelvin))
            if events:
                answer = connection.getresponse()
                for _line in zip(range(events), answer, strict=False):
                    pass
            connection.close()

    def quiet() -> bool:
        now = report(kelvin, "llama")
        return bool(
            now.running == 0
            and now.waiting == 0
            and now.kv_blocks_free == now.kv_blocks_total
            and now.open_files <= before.open_files + 2
        )

    kelvin.wait(quiet, "the replica is as before")
