"""What `kelvin bench front` has to show, judged from its rows. Pure."""

from collections.abc import Sequence
from typing import Final

from coldstart_bench.front_rows import KELVIN, LITELLM, RAY, FrontRow, Streams
from coldstart_bench.verdicts import Verdict, held

ADDED_MS: Final = 1.0
OF_NGINX: Final = 0.10
OF_RAY: Final = 8.0
OF_LITELLM: Final = 25.0
RATE: Final = 3000.0
CORE_SHARE: Final = 0.25
CAME: Final = 0.98


def judge(rows: Sequence[FrontRow], streams: Streams, unrecorded: int) -> tuple[Verdict, ...]:
    """Whether it holds or not; the state is the number of connections."""
    ours = {row.connections: row for row in rows if row.system == KELVIN}
    one, some = ours.get(1), ours.get(16)
    added = None if one is None else one.added_p50_ms
    beside = None if some is None else some.ratio_to_nginx
    rate = None if some is None else some.requests_per_s
    over = {row.system: row.kelvin_ratio for row in rows if row.connections == 16}
    bad = sum(row.bad for row in rows)
    return (
        held("milliseconds added to the median", 0, "1", added, ADDED_MS, at_least=False),
        held("rate to that of nginx as a TLS proxy", 0, "16", beside, OF_NGINX, at_least=True),
        held("rate to that of Ray Serve", 0, "16", over.get(RAY), OF_RAY, at_least=True),
        held("rate to that of LiteLLM", 0, "16", over.get(LITELLM), OF_LITELLM, at_least=True),
        held("requests a second through one core", 0, "16", rate, RATE, at_least=True),
        held("share of a core for streams", 0, str(streams.streams), streams.core_share, CORE_SHARE, at_least=False),
        held("share of their tokens that came", 0, str(streams.streams), streams.came, CAME, at_least=True),
        held("requests that were not answered right", 0, "", float(bad), 0.0, at_least=False),
        held("answers without a usage record", 0, "", float(unrecorded), 0.0, at_least=False),
    )
