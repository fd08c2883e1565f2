"""Tests of the activator. These modules stand in for its surroundings, the largest first:

- `world.py`: a whole activator as its own process over TLS. `control.py` is its control plane, `replica.py` its
  replicas. `pod.py` is a replica in a cluster, `parked_standby.py` a parked process. `idempotent_calls.py` adds two
  activators that share a Redis.
- `hedge_world.py`: attempts at fake replicas over their sockets, in this process.
- `slot_world.py`: a throttler in this process, on virtual time or by a `clock.py`.
- `memory_connections.py`, `handshakes.py`: connections without a socket. `exchanges.py`: a request without one.

Modules that say "an activator that ..." (`calling.py`, `counting.py`, `telling.py` and others) are started as programs
instead of the activator.
"""
