"""Metrics and traces of a process: a page in Prometheus' format, and traces by OTLP if a collector is configured.

Which metrics there are is decided in each package (`activator/meters.py` and its like), not here. Begin with
`telemetry.py`, which each process opens once.
"""
