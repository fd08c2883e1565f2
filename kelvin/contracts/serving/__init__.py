"""What control plane, activator and runtime say of serving: the feed, forecasts, frames. Pure.

The bodies of `/control` are in `artifacts/runtime_control.py`, usage records in `accounting`. Begin with
`control_messages.py`.
"""
