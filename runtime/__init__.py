"""Compute the answers of one version: a replica's process, from its fork to its end.

`app/` starts processes and puts them together, `api/` takes requests and control orders, `lifecycle/` owns the state
of a replica and makes a version ready. `surface/` decodes requests and renders answers, `text/` turns text into token
ids and back, `models/` binds weights to modules. `drivers/` computes for decoders, `encoder/` and `predictor/` for
the other kinds.

Weights come from `weightcache`, requests from `activator`. Bills are the control plane's.

Begin with `lifecycle/replica.py`, the states of one process. A request passes `api/inference_api.py`,
`surface/serving.py`, `drivers/engine_thread.py` with an engine, and `api/delivery.py`.
"""
