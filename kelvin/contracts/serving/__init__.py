"""Messages about serving between control plane, activator and runtime: the feed, forecasts, frames. Pure.

The bodies of `/control` are in `artifacts/runtime_control.py`, usage records in `accounting`. Begin with
`control_messages.py`.
"""
