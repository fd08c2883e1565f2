"""What several processes of Kelvin do alike: sockets, TLS between them, logs, readiness, drain, lifeline.

Also here: a client of the zygote and of the processes that it forks (`zygote.py`, `born.py`, `jobs.py`), and keys that
sign (`signing.py`, `trust.py`). What one service alone does is in that service's package. Begin with `run.py`, which
runs a service until it is told to stop, `client.py` for calls between processes, and `loops.py` for background work.
"""
