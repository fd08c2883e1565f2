"""Tests of the activator. These modules stand in for what is around it, the largest first:

- `world.py`: a whole activator as its own process over TLS. `control.py` is its control plane, `replica.py` its
  replicas, `pod.py` and `parked_standby.py` what a cluster and a machine have besides. `idempotent_calls.py` adds two
  that share a Redis.
- `hedge_world.py`: attempts at fake replicas over their sockets, in this process.
- `slot_world.py`: a throttler in this process, on virtual time or by a `clock.py`.
- `memory_connections.py`, `handshakes.py`: connections without a socket. `exchanges.py`: a request without a
connection.

Modules that say "an activator that ..." (`calling.py`, `counting.py`, `telling.py` and others) are run as programs in
the activator's place.
"""
