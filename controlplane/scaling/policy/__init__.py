"""Pure decisions about replicas: how many, how warm, which one leaves. Times are arguments.

Nothing here stores, calls or reads a clock; `kpa/`, `warmth/` and `local/` carry the decisions out. Begin with `kpa.py`
and `scale_to_zero.py`; `scale_settings.py` is what a model's owner may set.
"""
