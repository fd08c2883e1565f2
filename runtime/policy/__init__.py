"""Pure decisions of the runtime: the schedule, KV blocks, batches of rows, and which roles may ask for what."""
