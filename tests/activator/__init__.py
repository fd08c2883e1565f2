"""Tests of the activator. These modules stand in for its surroundings, the largest first:

- `world.py`: a whole activator as its own process over TLS. `control.py` is its control plane, `replica.py` its
  replicas. `upstream/pod.py` is a replica in a cluster, `scale_link/parked_standby.py` a parked process.
  `answers/idempotent_calls.py` adds two activators that share a Redis.
- `request/hedge_world.py`: attempts at fake replicas over their sockets, in this process.
- `queue/slot_world.py`: a throttler in this process, on virtual time or by a `clock.py`.
- `http/memory_connections.py`, `tls/handshakes.py`: without a socket. `exchanges.py`: a request without a connection.

Modules that say "an activator that ..." (`frame_counting.py`, `decode_counting.py`, `content_logging.py` and others)
are started as programs instead of the activator.
"""
