"""The front door: TLS, HTTP, keys, routes, the queue for models at zero, streams, and a usage record of each request.

Replicas compute, and the control plane decides how many there are and keeps the books. Begin with `app.py`, which
builds everything. A completion passes `transports.py`, `front_door.py`, `completions.py`, `attempts.py`, `throttler.py`
and `replica_requests.py`. Decisions are in `policy/`. `shared_*.py` keep what several activators share in one Redis:
limits and answers.
"""
