"""Show operators what runs and why: states of models, start forecasts, costs of idle levels, sibling processes.

Nothing is decided here; `scaling/` decides. The routes are in `api/`. Begin with `model_status.py`.
"""
