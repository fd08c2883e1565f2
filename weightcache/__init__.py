"""The tiered weight cache: the agent that owns the tiers, and the library by which a runtime leases from it."""
