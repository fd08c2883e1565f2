"""Hot restarts and kills of the activator under load, and replaced replicas under streams: no client fails."""

import asyncio
import json
import os
import signal
import ssl
import threading
from functools import partial

import pytest

from coldstart_bench.harness import installation
from coldstart_bench.harness.installation import Installation
from tests.activator.http.keep_alive_clients import Connected, KeepAliveClients
from tests.activator.world import http
from tests.e2e.commands import run
from tests.e2e.https_client import Answer, all_at_once, complete
from tests.e2e.installation_processes import command, services, supervisor
from tests.e2e.installation_state import replicas, rows

pytestmark = pytest.mark.deep


def _restart(kelvin: Installation) -> tuple[int, str, str]:
    return installation.run_command(kelvin.data, "restart", "activator")


def test_three_restarts_under_load(kelvin: Installation) -> None:
    """Three restarts under 16 clients give three new processes and no failure."""
    complete(kelvin, "llama", "w1", max_tokens=1)
    key = (kelvin.data / "default.key").read_text().strip()
    post = http(json.dumps({"model": "llama", "prompt": "w1", "max_tokens": 2}).encode(), "/v1/completions", key)
    get = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n\r\n".encode()
    tls = ssl.create_default_context(cafile=str(kelvin.data / "ca.pem"))
    seen = [services(kelvin)["activator"].pid]

    async def connect() -> Connected:
        return await asyncio.open_connection("127.0.0.1", kelvin.port, ssl=tls, server_hostname="localhost")

    async def change() -> None:
        for _ in range(3):
            status, out, err = await asyncio.to_thread(_restart, kelvin)
            assert status == 0, out + err
            seen.append(services(kelvin)["activator"].pid)

    load = KeepAliveClients(connect, [get, post, get, get])
    asyncio.run(load.run_during(16, change))
    assert load.failures == []
    assert len(set(seen)) == 4


def test_dying_activator_refuses_no_request(kelvin: Installation) -> None:
    """A client that connects while no activator runs waits in the supervisor's socket, and is answered."""
    first = services(kelvin)["activator"]
    os.kill(first.pid, signal.SIGKILL)
    assert complete(kelvin, "llama", "w1", max_tokens=1).status == 200
    assert services(kelvin)["activator"].pid != first.pid


def test_concurrent_restart_commands_both_succeed(kelvin: Installation) -> None:
    """Two concurrent restart commands both succeed, and one activator remains."""
    assert [status for status, *_ in all_at_once(*[partial(_restart, kelvin)] * 2)] == [0, 0]
    kelvin.wait(
        lambda: [command(p)[-1:] for p in supervisor(kelvin).children()].count(["activator"]) == 1, "one is left"
    )


class Streams:
    """Clients that send streaming requests all the time."""

    def __init__(self, kelvin: Installation, clients: int) -> None:
        self._kelvin = kelvin
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(clients)]
        self.answers: list[Answer | BaseException] = []

    def __enter__(self) -> "Streams":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def more(self, answers: int) -> None:
        """Wait for this many more answers."""
        wanted = len(self.answers) + answers
        self._kelvin.wait(lambda: len(self.answers) >= wanted, "streams go on")

    def _ask(self) -> None:
        while not self._stop.is_set():
            try:
                self.answers.append(complete(self._kelvin, "llama", "w1 w2", max_tokens=24, stream=True))
            except BaseException as error:  # the test reports it
                self.answers.append(error)


def _serving(kelvin: Installation) -> set[str]:
    return {each["runtime_id"] for each in replicas(kelvin, "llama") if each["state"] == "ready"}


def _lives(kelvin: Installation) -> set[str]:
    return {runtime_id for (runtime_id,) in rows(kelvin, "SELECT runtime_id FROM ledger_lifetimes")}


def test_replicas_are_replaced_under_streams(kelvin: Installation) -> None:
    """Two rolling restarts of two replicas fail no stream, and each ended lifetime is in the ledger."""
    path = "/admin/v1/models/llama/scale"
    kelvin.admin.request("PUT", path, {"min": 2, "max": 2})
    try:
        kelvin.wait(lambda: len(_serving(kelvin)) == 2, "two replicas serve")
        seen = [_serving(kelvin)]
        with Streams(kelvin, 4) as streams:
            for _ in range(2):
                streams.more(4)
                done = json.loads(run(kelvin, "models", "restart", "llama", "--json"))
                assert (done["state"], done["replicas"], done["replaced"]) == ("done", 2, 2)
                seen.append(_serving(kelvin))
            streams.more(4)
        whole = [each for each in streams.answers if isinstance(each, Answer) and each.status == 200 and each.done]
        assert [each for each in streams.answers if each not in whole] == []
        assert [each.error for each in whole if each.error] == []
        assert len({each.text for each in whole}) == 1
        assert [len(ids) for ids in seen] == [2, 2, 2]
        assert len(set().union(*seen)) == 6
        kelvin.wait(lambda: _lives(kelvin) >= seen[0] | seen[1], "the lives of the old ones are recorded")
    finally:
        kelvin.admin.request("PUT", path, {"min": 0, "max": 1})
