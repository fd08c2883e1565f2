"""Pure decisions of the runtime: the schedule and the KV blocks."""
