"""Content filters: a process that finds personal data in prompts and answers.

Runtimes ask it over a Unix socket; what they do with its findings is `runtime/surface/filter_pipeline.py`'s. The
messages are `kelvin/contracts/artifacts/filter_api.py`'s. Begin with `app.py`, then `pii.py`.
"""
