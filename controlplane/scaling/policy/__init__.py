"""Decisions about replicas: how many, how warm, and which one leaves. Pure; times are arguments.

Nothing here stores, calls or reads a clock. `kpa/`, `warmth/` and `local/` carry the decisions out. Begin with `kpa.py`
and `scale_to_zero.py`; `scale_settings.py` has the settings of a model's owner.
"""
