"""Content filters: a process that finds personal data in prompts and responses.

Runtimes call it over a Unix socket; `runtime/surface/filter_pipeline.py` acts on its findings. The messages are in
`kelvin/contracts/artifacts/filter_api.py`. Begin with `app.py`, then `pii.py`.
"""
