"""Forecast what a start takes, and what each level of warmth costs.

`kpa/version_scaler.py` decides how warm an idle model stays, by the break-even rule in `scaling/policy`; replicas are
put to sleep in `scaling/local`. Begin with `warmth_cost.py`,
then `start_forecasts.py`.
"""
