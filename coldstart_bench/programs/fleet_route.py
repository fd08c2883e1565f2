"""Measure an activator's routing table with many models: applying the feed's first line, and lookups.

It prints `ready`. `{"models": N, "lookups": L}` is answered with CPU seconds; `lookup_s` and `key_s` are per lookup.
"""

import random
import time
from typing import Any

from activator.routing.policy.version_resolution import merge_references, resolve_version
from activator.routing.routing_table import RoutingTable
from coldstart_bench.harness.synthetic_fleet import fleet_feed, key_of, model_of, tenant_of, version_of
from coldstart_bench.programs.json_lines import answer_lines
from kelvin.contracts.serving.control_messages import Feed
from kelvin.contracts.wire import decoder, encode


def measured(models: int, lookups: int) -> dict[str, Any]:
    """Apply a feed and look up random names, each as a request has it. A wrong lookup makes the answer an error."""
    line = encode(fleet_feed(models))
    decoder(Feed)  # a process builds it once, so build it before the measurement
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
        reference = merge_references(None, model)
        entry = table.find_callable_model(tenant, reference.owner or tenant, reference.model)
        assert entry is not None
        found.append(resolve_version(reference, entry, tenant))
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
