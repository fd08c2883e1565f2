"""Tell operators what runs and why: the state of models, start forecasts, costs of idle levels, sibling processes.

Nothing is decided here: that is in `scaling/`. The routes are in `api/`. Begin with `model_status.py`.
"""
