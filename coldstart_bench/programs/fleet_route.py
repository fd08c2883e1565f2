"""An activator's table of a fleet: what taking the feed's first line over costs, and looking a model up. Says `ready`;
`{"models": N, "lookups": L}` is answered with seconds of a processor, `lookup_s` and `key_s` of one of them.
"""

import random
import time
from typing import Any

from activator.routing.policy.traffic_split import resolve, which_model
from activator.routing.routing_table import RoutingTable
from coldstart_bench.harness.synthetic_fleet import fleet_feed, key_of, model_of, tenant_of, version_of
from coldstart_bench.programs.json_lines import answer_lines
from kelvin.contracts.serving.control_messages import Feed
from kelvin.contracts.wire import decoder, encode


def measured(models: int, lookups: int) -> dict[str, Any]:
    """Names in no order, each as a request has it. Where a look-up finds another version, the answer is an error."""
    line = encode(fleet_feed(models))
    decoder(Feed)  # made once in a process
    began = time.process_time()
    table = RoutingTable()
    table.apply(decoder(Feed).decode(line))
    table_s = time.process_time() - began
    draw = random.Random(1)  # noqa: S311 - the same names each time
    asked = [(tenant_of(n), model_of(n), version_of(n)) for n in draw.choices(range(models), k=lookups)]
    keys = [key_of(tenant) for tenant, _, _ in asked]
    found = []
    began = time.process_time()
    for tenant, model, _ in asked:
        reference = which_model(None, model)
        entry = table.find_callable_model(tenant, reference.owner or tenant, reference.model)
        assert entry is not None
        found.append(resolve(reference, entry, tenant))
    lookup_s = (time.process_time() - began) / lookups
    began = time.process_time()
    holders = [table.principal(key, 0.0) for key in keys]
    key_s = (time.process_time() - began) / lookups
    wrong = sum(row.version != version for row, (_, _, version) in zip(found, asked, strict=True))
    wrong += sum(who is None or who.tenant != tenant for who, (tenant, _, _) in zip(holders, asked, strict=True))
    if wrong:
        return {"error": f"{wrong} of {lookups} look-ups were wrong"}
    return {"table_s": table_s, "lookup_s": lookup_s, "key_s": key_s}


if __name__ == "__main__":
    answer_lines(measured)
