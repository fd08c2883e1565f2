"""Registers a fleet with a control plane's registry, in the database of the argument: `{"models": N}` on stdin has it
hold the first N, each written as a push would have it written. Says `ready`; each line is answered when it is durable.
"""

import asyncio
import json
import sys
from contextlib import closing
from pathlib import Path

from coldstart_bench.fleet.names import CREATED_S, registration_of, tenants_of
from controlplane.audit import INSTALLATION
from controlplane.feed import FeedHub
from controlplane.registry import Registry
from controlplane.store import Database, open_database
from controlplane.tenants import TenantStore


async def fill(database: Database, models: int) -> None:
    """Up to so many; what is there stays."""
    feed = FeedHub()
    tenants, registry = TenantStore(database, feed), Registry(database, feed)
    await registry.load()
    known = {tenant.tenant for tenant in await tenants.all(CREATED_S)}
    for tenant in tenants_of(models):
        if tenant not in known:
            await tenants.create(INSTALLATION, tenant, CREATED_S)
    for number in range(len(registry.every_model()), models):
        await registry.register(registration_of(number), CREATED_S)


def main(path: Path) -> None:
    """Until stdin ends."""
    with closing(open_database(path)) as database:
        print("ready", flush=True)
        for line in sys.stdin:
            models = json.loads(line)["models"]
            asyncio.run(fill(database, models))
            print(json.dumps({"models": models}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
