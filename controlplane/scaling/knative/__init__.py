"""Where a cluster decides: objects are written, and what becomes of them is watched."""
