"""Metrics and traces of a process: a page in Prometheus' format, and traces by OTLP if configured.

Which metrics there are is decided in each package, not here. Begin with `telemetry.py`, which each process opens once.
"""
