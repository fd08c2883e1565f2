"""A replica's process: it loads one model version and computes responses, from its fork to its exit.

`app/` holds the programs, `api/` the routes, `lifecycle/` a replica's state and how a version becomes ready. `surface/`
decodes requests and renders responses. `text/` turns text into token ids and back. `models/` binds weights to modules.
`drivers/` computes for decoders, `encoder/` for embedding models, `predictor/` for ONNX models.

Not here: weights come from `weightcache`, requests from `activator`, and the control plane makes the bills.

Begin with `lifecycle/replica.py`, the states of one process. A request passes `api/inference_api.py`,
`surface/served_version.py`, `drivers/engine_thread.py` with an engine, and `api/delivery.py`.
"""
