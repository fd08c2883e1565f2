"""Metrics and traces of a process: a page in Prometheus' format, and traces by OTLP if configured.

Each package defines its own metrics. Begin with `telemetry.py`, which each process opens once.
"""
