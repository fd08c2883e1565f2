"""Pure decisions of the control plane. Nothing here does I/O or reads a clock; times are arguments.

Begin with `kpa.py` and `idle.py` for scaling, `rating.py` and `findings.py` for bills, `rollout.py` for clusters.
"""
