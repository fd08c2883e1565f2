"""The recorded exchanges that the product rests on, beside the tests: they are replayed everywhere."""

import json
from pathlib import Path
from typing import Final

from tests.cluster.answers import Json
from tests.cluster.api_server import serving
from tests.cluster.recordings import NAMESPACE, Client, Replay, needs_recordings, recorded
from tests.cluster.test_replay_exchanges import SENT

EXTRACT: Final[list[Json]] = [
    json.loads(line) for line in (Path(__file__).parent / "data" / "exchanges.jsonl").read_text().splitlines()
]


def test_replay() -> None:
    """Apply, its conflicts and refusals, preconditions, Leases: as the real server answered."""
    with serving() as server, server.no_collector(), Client(server) as client:
        server.namespace(NAMESPACE)
        assert Replay(server, client, SENT, {}).all(EXTRACT) == {}


@needs_recordings
def test_the_extract_is_of_the_recordings() -> None:
    everything = [*recorded("api_exchanges.json"), *recorded("leases.json")]
    assert [each for each in EXTRACT if each not in everything] == []
