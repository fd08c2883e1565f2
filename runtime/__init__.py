"""The process that computes: zygote, standby, runtime, and the engine within.

Weights come from `weightcache`, requests from `activator`. Begin with `replica.py`, the states of one process. A
request passes `api.py`, `serving.py`, `engine/` (or `encoder/`, `predictor/`) and `delivery.py`. `restore.py` makes a
version ready.
"""
